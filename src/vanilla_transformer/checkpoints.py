"""Checkpoint averaging: several checkpoints of one run into one model whose weights are their mean.

"For the base models, we used a single model obtained by averaging the last 5 checkpoints, which were written at
10-minute intervals. For the big models, we averaged the last 20 checkpoints" (Vaswani et al. 2017, section 6.1).
Weights are read from safetensors alone, one tensor at a time, so that twenty checkpoints need no more memory than two.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vanilla_transformer.translation import naming_what_is_full


logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TRAINER_STATE = "trainer_state.json"

# Fields that say nothing of what the weights mean.
_UNCHECKED_CONFIG_FIELDS = {"transformers_version", "_name_or_path", "_commit_hash", "auto_map", "custom_pipelines"}
_UNCHECKED_TOKENIZER_FIELDS = {
    "transformers_version",
    "name_or_path",
    "tokenizer_file",
    # What the last call of the tokenizer left behind.
    "truncation",
    "padding",
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# What belongs to one checkpoint's training and not to the mean: weights, pickles, the trainer's state, scores.
_LEFT_BEHIND_ENDINGS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".ckpt",
    ".distcp",
    ".index.json",
    "results.json",
)
_LEFT_BEHIND_NAMES = (TRAINER_STATE, "training_run.json", "README.md", "latest")

# Bytes of a number, by the name of its type in a file.
SIZES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}

PathLike = str | os.PathLike


class Stored(NamedTuple):
    """Where and how a tensor is stored."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_of_number(self) -> int:
        """Bytes of one of its numbers."""
        return SIZES[self.dtype]


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def whole_checkpoints(run_dir: PathLike) -> list[Path]:
    """The checkpoints of a run that were written to their end, oldest (fewest updates) first.

    Trainer writes a checkpoint's `trainer_state.json` last, so a run that was killed while it saved leaves a folder
    without it, or with half of it. Such a folder is stepped over with a warning, and so is one whose weights are not
    all there.

    Args:
        run_dir: The run's `output_dir`; it need not exist.
    """
    numbered = [
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in Path(run_dir).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal() and path.is_dir()
    ]
    whole = []
    for _, path in sorted(numbered):
        try:
            _read_json(path / TRAINER_STATE)
            _read_json(path / "config.json")
            _tensors_of(path)
        except (ValueError, OSError) as error:
            logger.warning("stepped over %s, which is not whole: %s", path, error)
        else:
            whole.append(path)
    return whole


def last_checkpoints(run_dir: PathLike, last: int = 5, *, interval_minutes: float | None = None) -> list[Path]:
    """The last whole checkpoints of a run, oldest first.

    Args:
        run_dir: The run's `output_dir`, with `checkpoint-STEPS` folders in it.
        last: How many; the paper takes 5 for its base models and 20 for its big ones.
        interval_minutes: Take, from the newest back, only checkpoints that were written at least so many minutes
            before the one taken last, by the time of their `trainer_state.json`; None takes all.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: `last` is below 1, `interval_minutes` is not above 0, or the run has fewer whole checkpoints.

    Source: Vaswani et al. 2017, section 6.1.
    """
    if isinstance(last, bool) or not isinstance(last, int) or last < 1:
        raise ValueError(f"last must be a whole number of at least 1, got {last!r}.")
    if interval_minutes is not None and not 0 < interval_minutes < float("inf"):
        raise ValueError(f"interval_minutes must be above 0, or None for every checkpoint, got {interval_minutes!r}.")
    if not Path(run_dir).is_dir():
        raise FileNotFoundError(f"there is no run's folder {run_dir}.")
    whole = whole_checkpoints(run_dir)
    chosen: list[Path] = []
    taken_at = float("inf")
    for path in reversed(whole):
        written_at = (path / TRAINER_STATE).stat().st_mtime
        if interval_minutes is None or taken_at - written_at >= 60 * interval_minutes:
            chosen.insert(0, path)
            taken_at = written_at
        if len(chosen) == last:
            break
    if len(chosen) < last:
        apart = "" if interval_minutes is None else f" written at least {interval_minutes:g} minutes apart"
        names = f" ({', '.join(path.name for path in chosen)})" if chosen else ""
        plural = "" if len(chosen) == 1 else "s"
        raise ValueError(
            f"{run_dir} holds {len(chosen)} whole checkpoint{plural}{apart}{names}, but {last} are to be averaged; "
            f"ask for fewer (--last), or train with --save_total_limit {last} and save more often "
            "(--save_strategy steps --save_steps N); the last and the best one are all that train keeps unless told "
            "otherwise."
        )
    if interval_minutes is None:
        _warn_of_gap(chosen)
    return chosen


def _warn_of_gap(chosen: Sequence[Path]) -> None:
    """Warns where the oldest lies far behind: the trainer kept it as its best and threw away those that followed."""
    steps = [int(path.name.removeprefix("checkpoint-")) for path in chosen]
    gaps = [later - earlier for earlier, later in zip(steps, steps[1:], strict=False)]
    if len(gaps) > 1 and gaps[0] > 2 * max(gaps[1:]):
        logger.warning(
            "%s lies %d updates before the next one and the others at most %d apart: it was kept as the best, not as "
            "one of the last; leave it out (--last %d), or train with a --save_total_limit that is one greater",
            chosen[0],
            gaps[0],
            max(gaps[1:]),
            len(chosen) - 1,
        )


# ---------------------------------------------------------------------------------------------------------------------
# The mean
# ---------------------------------------------------------------------------------------------------------------------


def average_checkpoints(checkpoints: Sequence[PathLike], output_dir: PathLike) -> Path:
    """Writes a model whose weights are the arithmetic mean of those of several checkpoints.

    The mean of each tensor is computed in float64 and rounded once to the type that it was stored in; what is equal in
    all checkpoints stays as it is, to the bit. Tied weights, stored once, stay tied. Configuration, tokenizer,
    generation settings and shipped code come along from the last checkpoint of the list, and its division into files
    too; the trainer's state does not. Memory: a few tensors, however many
    checkpoints.

    Args:
        checkpoints: Folders with a `config.json` and `model.safetensors`, or several safetensors with their index.
        output_dir: Appears whole or not at all; must not exist yet, or be empty.

    Returns:
        `output_dir`, which `from_pretrained` opens.

    Raises:
        FileNotFoundError: A checkpoint, its configuration or its weights are not there.
        FileExistsError: `output_dir` holds something already.
        NotADirectoryError: `output_dir` is a file.
        ValueError: No checkpoint, one named twice, broken weights, or checkpoints that differ in configuration,
            tokenizer, or the names, shapes or types of their tensors, or in a tensor of whole numbers; or weights that
            are not finite.

    Source: Vaswani et al. 2017, section 6.1.
    """
    if isinstance(checkpoints, (str, bytes, os.PathLike)):
        raise TypeError(f"checkpoints must be a sequence of folders, got one {type(checkpoints).__name__}.")
    folders = [Path(checkpoint) for checkpoint in checkpoints]
    output = Path(output_dir)
    if not folders:
        raise ValueError("nothing to average: expected at least one checkpoint, got none.")
    seen: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint {folder}.")
        if (other := seen.setdefault(os.path.realpath(folder), folder)) is not folder:
            raise ValueError(f"{folder} is named twice (as {other} before); each checkpoint counts once.")
    _require_new(output)
    _check_same_settings(folders)
    tensors = [_tensors_of(folder) for folder in folders]
    _check_same_tensors(folders, tensors)
    with _folder_in_the_making(output) as making:
        for file in sorted({stored.file.name for stored in tensors[-1].values()}):
            _write_mean(making / file, folders[-1] / file, tensors)
        if (folders[-1] / INDEX).is_file():
            shutil.copyfile(folders[-1] / INDEX, making / INDEX)
        for path in sorted(folders[-1].iterdir()):
            left_behind = path.name in _LEFT_BEHIND_NAMES or path.name.endswith(_LEFT_BEHIND_ENDINGS)
            if path.is_file() and not left_behind:
                shutil.copyfile(path, making / path.name)
    return output


def _write_mean(path: Path, like: Path, tensors: Sequence[dict[str, "Stored"]]) -> None:
    """Writes the means of all tensors of the file `like`, one after the other: no file is ever held as a whole.

    Source: the format of https://github.com/huggingface/safetensors: the length of the header as eight bytes, the
    header in JSON, filled up with spaces to a multiple of eight, and the numbers.
    """
    here = {name: stored for name, stored in tensors[-1].items() if stored.file == like}
    order = sorted(here, key=lambda name: (-here[name].size_of_number, name))  # each begins at a multiple of its size
    with safe_open(like, framework="pt") as opened:
        header: dict[str, Any] = {"__metadata__": opened.metadata() or {"format": "pt"}}
    end = 0
    for name in order:
        stored = here[name]
        start, end = end, end + math.prod(stored.shape) * stored.size_of_number
        header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            mean = _mean(name, [each[name].file for each in tensors])
            file.write(mean.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _mean(name: str, files: Sequence[Path]) -> torch.Tensor:
    """The mean of one tensor over files, in the type in which it is stored."""
    first = _read_tensor(files[0], name)
    if not first.is_floating_point():
        for file in files[1:]:
            if not torch.equal(_read_tensor(file, name), first):
                raise ValueError(
                    f"{name}, of type {first.dtype}, differs between {file.parent} and {files[0].parent}; only "
                    "floating-point numbers have a mean, so these checkpoints cannot be averaged."
                )
        return first
    total = first.to(torch.float64, copy=True)
    varies = torch.zeros(first.shape, dtype=torch.bool)
    for file in files[1:]:
        tensor = _read_tensor(file, name)
        total += tensor
        varies |= tensor != first
        del tensor  # before the next one is read
    mean = rounded_once(total.div_(len(files)), first.dtype)
    if not torch.isfinite(mean).all():
        broken = next((file for file in files if not torch.isfinite(_read_tensor(file, name)).all()), files[0])
        raise ValueError(f"{name} in {broken.parent} is not finite everywhere; leave this checkpoint out.")
    # What is equal everywhere is not computed: a sum of equal float64 numbers may be rounded.
    return torch.where(varies, mean, first)


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    """One tensor of a file, in memory of its own: the file's mapping, which counts as memory, ends here."""
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name).clone()


def rounded_once(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 numbers in a narrower type, to the nearest and of two nearest the even one.

    torch itself goes to 16 bits by way of float32, which rounds twice. Here the step to float32 rounds to odd: what
    is inexact never ends in an even bit, so that the second step sees on which side of the middle a number lies.

    Args:
        numbers: float64, any shape.
        dtype: A floating-point type of at most 64 bits.

    Source: Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
        to odd".
    """
    if torch.finfo(dtype).bits >= 32:
        return numbers.to(dtype)
    single = numbers.float()
    bits = single.view(torch.int32)
    back = single.double()
    even_but_inexact = (back != numbers) & (bits % 2 == 0) & torch.isfinite(single)
    step = torch.where(numbers.abs() > back.abs(), 1, -1).to(torch.int32)
    return torch.where(even_but_inexact, bits + step, bits).view(torch.float32).to(dtype)


def _tensors_of(folder: Path) -> dict[str, Stored]:
    """Where and how each tensor of a checkpoint is stored, by its name; no number is read.

    Raises:
        FileNotFoundError: There are no safetensors, or a file that the index names is not there.
        ValueError: A file or the index is broken, or a tensor is not where the index says.
    """
    index = folder / INDEX
    expected: dict[str, str] | None = None
    if index.is_file():
        expected = _read_json(index).get("weight_map")
        if not isinstance(expected, dict) or not expected:
            raise ValueError(f"{index} has no weight_map.")
        files = sorted(set(expected.values()))
        if any(not isinstance(file, str) or Path(file).name != file for file in files):
            raise ValueError(f"{index} names a file outside its folder.")
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        pickled = (folder / "pytorch_model.bin").exists() or (folder / "pytorch_model.bin.index.json").exists()
        hint = "; pickled weights are not read, save them as safetensors" if pickled else ""
        raise FileNotFoundError(f"{folder} has no {WEIGHTS} and no {INDEX}{hint}.")
    tensors = {}
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} has no {file}, which its index names.")
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 -- it is no dict
                    part = opened.get_slice(name)
                    dtype = str(part.get_dtype())
                    tensors[name] = Stored(folder / file, dtype, tuple(part.get_shape()))
                    if dtype not in SIZES:
                        raise ValueError(f"{name} in {folder / file} is of the type {dtype}, which is not known here.")
        except SafetensorError as error:
            raise ValueError(f"{folder / file} is broken or cut short ({error}).") from error
    if expected is not None:
        wrong = sorted(
            {name for name, file in expected.items() if name not in tensors} | (set(tensors) - set(expected))
        )
        if wrong:
            raise ValueError(f"{index} and the files beside it disagree on {wrong[0]}.")
    return tensors


def _check_same_tensors(folders: Sequence[Path], tensors: Sequence[dict[str, Stored]]) -> None:
    """Raises ValueError where a checkpoint has other tensors than the first one."""
    for folder, each in zip(folders[1:], tensors[1:], strict=True):
        for one, other, where, lacking in (
            (tensors[0], each, folders[0], folder),
            (each, tensors[0], folder, folders[0]),
        ):
            if missing := sorted(set(one) - set(other)):
                raise ValueError(
                    f"{lacking} lacks {len(missing)} tensors that {where} has, such as {missing[0]}: they are not "
                    "checkpoints of one model."
                )
        for name, stored in each.items():
            first = tensors[0][name]
            if (stored.dtype, stored.shape) != (first.dtype, first.shape):
                raise ValueError(
                    f"{name} is {stored.dtype} of shape {list(stored.shape)} in {folder}, but {first.dtype} of shape "
                    f"{list(first.shape)} in {folders[0]}; only checkpoints of one shape and type can be averaged."
                )


def _check_same_settings(folders: Sequence[Path]) -> None:
    """Raises ValueError where a checkpoint has another configuration or another tokenizer than the first one."""
    first = _read_json(folders[0] / "config.json")
    for folder in folders[1:]:
        config = _read_json(folder / "config.json")
        _check_same_fields("config.json", (folders[0], first), (folder, config), _UNCHECKED_CONFIG_FIELDS)
        for name in _TOKENIZER_FILES:
            paths = folders[0] / name, folder / name
            present = [path.is_file() for path in paths]
            if present[0] != present[1]:
                raise ValueError(
                    f"{paths[present.index(False)].parent} has no {name}, which {paths[present.index(True)].parent} "
                    "has: their tokenizers differ."
                )
            if not present[0] or paths[0].read_bytes() == paths[1].read_bytes():
                continue
            if not name.endswith(".json"):
                raise ValueError(f"{name} differs between {folders[0]} and {folder}: their tokenizers differ.")
            one, other = (_read_json(path) for path in paths)
            _check_same_fields(name, (folders[0], one), (folder, other), _UNCHECKED_TOKENIZER_FIELDS)


def _check_same_fields(
    file: str, one: tuple[Path, dict[str, Any]], other: tuple[Path, dict[str, Any]], unchecked: set[str]
) -> None:
    (first_folder, first), (folder, fields) = one, other
    for name in sorted((set(first) | set(fields)) - unchecked):
        values = [json.dumps(each[name], sort_keys=True) if name in each else "absent" for each in (first, fields)]
        if values[0] != values[1]:
            raise ValueError(
                f"{file}: {name} is {values[1]:.80} in {folder}, but {values[0]:.80} in {first_folder}; only "
                "checkpoints of one model with one tokenizer can be averaged."
            )


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no JSON, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content


def _require_new(output: Path) -> None:
    """Raises unless `output` can be made, or is an empty folder."""
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"expected a folder to write to, but {output} is a file.")
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} holds something already; give a folder that is new or empty.")


@contextlib.contextmanager
def _folder_in_the_making(output: Path) -> Iterator[Path]:
    """A folder beside the one wanted, which takes its name at the end, or vanishes if anything fails."""
    target = Path(os.path.realpath(output))
    target.parent.mkdir(parents=True, exist_ok=True)
    making = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(making, ignore_errors=True)  # of a process that was killed and had this number
    try:
        making.mkdir()
        with naming_what_is_full(output):
            yield making
        _require_new(target)
        if target.is_dir():
            target.rmdir()
        making.rename(target)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


__all__ = ["average_checkpoints", "last_checkpoints", "whole_checkpoints"]
