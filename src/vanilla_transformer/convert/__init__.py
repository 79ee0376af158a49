"""Exchange with other formats: each is one file of this folder, imported only when it is asked for.

A format's module has `read(name, folder, **options)`, which writes what lies in that format as a model of this
package, `write(name, folder, **options)`, which does the reverse, or both. Each writes a whole model folder into the
empty `folder` that it is given and returns, one a line, what did not survive the way. `convert_from` and `convert_to`
make that folder, put it in its place, and remove it where something fails. What formats of bare checkpoints have in
common lies in `weights` (opening them without running code, taking tensors by name and shape, writing the folder),
`vocabularies` (two of them as one, and its tokenizer) and `descriptions` (what the weights do not tell); what
translators on other engines have in common lies in `engines`. `onnx_search` goes into every ONNX folder and needs none
of this.
"""

import contextlib
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Format:
    """What is known of a format before its module is imported.

    Attributes:
        title: What people call it.
        reads: Whether models come in from it.
        writes: Whether models go out to it.
        packages: Packages that it imports and the core does not bring.
        extra: The extra of this distribution that installs them.
    """

    title: str
    reads: bool = False
    writes: bool = False
    packages: tuple[str, ...] = ()
    extra: str = "export"


# The name of a format is that of its module here, and its word on the command line.
FORMATS = {
    "marian": Format("Marian of transformers (MarianMTModel, OPUS-MT)", reads=True, writes=True),
    "nn_transformer": Format("models around torch.nn.Transformer, with a description", reads=True),
    "fairseq": Format("fairseq (its transformer models)", reads=True),
    "annotated": Format('models in the style of "The Annotated Transformer", with a description', reads=True),
    "joeynmt": Format("JoeyNMT (its Transformers)", reads=True),
    "ctranslate2": Format("CTranslate2", writes=True, packages=("ctranslate2",)),
    "onnx": Format("ONNX", writes=True, packages=("onnx", "onnxscript", "onnxruntime")),
}


def convert_from(format: str, model: str | os.PathLike, output_dir: str | os.PathLike, **options: Any) -> list[str]:
    """Writes a model of another format as a model of this package.

    Args:
        format: One of `FORMATS` that is read.
        model: A folder, a file, or a name on the Hub, as the format has it.
        output_dir: A new or an empty folder; it appears whole or not at all.
        options: What `read` of the format takes besides.

    Returns:
        What differs from the original, a line each; the empty list where nothing does.

    Raises:
        ValueError: An unknown format, or a model that cannot be represented exactly.
        FileExistsError: `output_dir` holds something.
        ImportError: An optional package is missing; the message names the extra.
    """
    module = format_module(format, "reads")
    with new_folder(output_dir) as folder:
        return module.read(os.fspath(model), folder, **options)


def convert_to(format: str, model: str | os.PathLike, output_dir: str | os.PathLike, **options: Any) -> list[str]:
    """Writes a model of this package in another format.

    Args:
        format: One of `FORMATS` that is written.
        model: The folder of a model of this package, or its name on the Hub.
        output_dir: A new or an empty folder; it appears whole or not at all.
        options: What `write` of the format takes besides.

    Returns:
        What the format could not take over, a line each; the empty list where it took everything.

    Raises:
        ValueError, FileExistsError, ImportError: As in `convert_from`.
    """
    module = format_module(format, "writes")
    with new_folder(output_dir) as folder:
        return module.write(os.fspath(model), folder, **options)


def format_module(format: str, direction: str) -> Any:
    """The module of a format, imported now.

    Args:
        format: Its name.
        direction: "reads" or "writes": what it has to be able to do.
    """
    known = [name for name, each in FORMATS.items() if getattr(each, direction)]
    if format not in known:
        doing = {"reads": "read from", "writes": "written to"}[direction]
        raise ValueError(f"the format {format!r} cannot be {doing}; choose one of {', '.join(known)}.")
    require(FORMATS[format].packages, f"the format {format}", FORMATS[format].extra)
    return importlib.import_module(f"vanilla_transformer.convert.{format}")


def require(packages: tuple[str, ...], what: str, extra: str) -> None:
    """Raises ImportError, with the extra that helps, where one of the packages is not installed."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f'{what} needs the package {package}: pip install "vanilla-transformer[{extra}]" ({error})'
            ) from error


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A folder to fill, which takes its place at `path` when everything in it is written, and is gone after an error.

    Raises:
        FileExistsError: There is something at `path` other than an empty folder.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        what = "it is not empty" if target.is_dir() else "it is a file"
        raise FileExistsError(f"{path} must be a new or an empty folder, but {what}; choose another --output_dir.")
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        folder = making / target.name  # inside, since a temporary folder itself is closed to others
        folder.mkdir()
        yield folder
        os.replace(folder, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def file_of(name: str, file: str, revision: str | None = None) -> str | None:
    """Path of a file in a folder, or in a repository on the Hub; None where it has none, or is not reached."""
    from transformers.utils import cached_file

    return cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )


def write_card(
    folder: Path,
    name: str,
    *,
    revision: str | None,
    origin: str,
    use: str,
    differences: list[str],
    tags: dict[str, bool],
    config: Any,
) -> None:
    """Writes the model card of a converted model: the original's, where it has one, with what is different now.

    Scores stay in the text, as those of the original, and leave the metadata: they were not measured here.

    Args:
        folder: Where to write it.
        name: Folder or name of the original.
        revision: Of the original on the Hub.
        origin: What the original is, such as "the Marian model".
        use: How the converted model is used, in Markdown.
        differences: From the original, a line each.
        tags: Tags to set (True) and to take away (False).
        config: The configuration, of this package, on our side of the conversion.
    """
    import yaml
    from huggingface_hub import ModelCard
    from transformers import GenerationConfig

    from vanilla_transformer.hub import (
        CARD,
        decoding_sentence,
        is_repo_id,
        model_section,
        parameters_in,
        plain,
        replace_section,
        section,
        write_whole,
    )

    original = file_of(name, CARD, revision)
    text = Path(original).read_text(encoding="utf-8", errors="replace") if original else ""
    try:
        data = ModelCard(text or "---\n{}\n---\n", ignore_metadata_errors=True).data
        body = ModelCard(text or "---\n{}\n---\n", ignore_metadata_errors=True).text
    except (ValueError, TypeError, yaml.YAMLError):
        data, body = ModelCard("---\n{}\n---\n").data, text  # metadata that nobody can read
    heading = name.rstrip("/").rpartition("/")[2]
    told = "".join(f"\n- {plain(each)}" for each in differences)
    conversion = f"Converted by `vanilla-transformer convert` from {origin} {plain(heading)}" + (
        f"; what the card says of that one holds here too, but for:\n{told}" if told else "."
    )
    if not body.strip():
        body = f"\n# {plain(folder.name)}\n"
    earlier = section(body, "conversion")
    body = replace_section(body, "conversion", f"{earlier}\n\n{conversion}" if earlier else conversion)
    body = replace_section(body, "use", use)
    if section(body, "decoding") is not None:
        settings = GenerationConfig.from_pretrained(folder)
        body = replace_section(body, "decoding", decoding_sentence(settings))
    before = "Measured before the conversion, on the original:"
    if (scores := section(body, "results")) and "segments" in scores and not scores.startswith(before):
        body = replace_section(body, "results", f"{before}\n\n{scores}")
    run = record_of(folder, name, revision)
    if section(body, "model") is not None:  # a card of this package
        body = re.sub(r"^# .*$", lambda _: f"# {plain(folder.name)}", body, count=1, flags=re.MULTILINE)
        body = replace_section(body, "model", model_section(config, run, parameters_in(folder)))
    kept = [tag for tag in data.get("tags") or [] if tags.get(tag, True)]
    data["tags"] = list(dict.fromkeys(["translation", *kept, *(tag for tag, wanted in tags.items() if wanted)]))
    data["library_name"] = "transformers"
    data["pipeline_tag"] = "translation"
    data.pop("model-index", None)
    for measured in ("eval_results", "model_name", "metrics"):
        data[measured] = None
    if is_repo_id(name):
        data["base_model"] = name
    write_whole(folder / CARD, f"---\n{data.to_yaml()}\n---\n{body}")


def record_of(folder: Path, name: str, revision: str | None) -> Any:
    """The record of the original's training, without its scores, which is written for the converted model too."""
    from vanilla_transformer.hub import RECORD, TrainingRun

    original = file_of(name, RECORD, revision)
    if original is None:
        return TrainingRun()
    try:
        run = TrainingRun.load(Path(original).parent)
    except ValueError:
        return TrainingRun()
    run.evaluations = []
    run.save(folder)
    return run


__all__ = ["FORMATS", "Format", "convert_from", "convert_to"]
