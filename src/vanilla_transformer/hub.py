"""Sharing a model: what is known of its training, its model card, and the way to the Hub.

A folder that `train`, `demo` or `VanillaTransformerTrainer` wrote holds `training_run.json`, the record of the run,
and `README.md`, the card made from it. The card's metadata follow the Hub's specification: language, tags, and
`model-index` results with the signature of each score.
"""

import ast
import dataclasses
import html
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, GenerationConfig, Seq2SeqTrainingArguments, TrainingArguments
from transformers.utils import cached_file, logging

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


logger = logging.get_logger(__name__)

RECORD = "training_run.json"
CARD = "README.md"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
CODE = tuple(
    f"{part}_vanilla_transformer.py" for part in ("configuration", "generation", "modeling", "pipeline")
)  # what travels with every saved model
# The file without which a folder has no tokenizer: ours, or that of a model converted from Marian.
TOKENIZERS = ("tokenizer.json", "source.spm")
# All that a repository of a model holds; checkpoints, optimiser states and pickles beside it stay at home.
PUSHED = (
    CARD,
    RECORD,
    "LICENSE*",
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    *CODE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "target_vocab.json",
    "merges.txt",
    "*.spm",
    "*.model",
    "*.png",
)

# A Space's own: the model's folder in it, what its page starts from, and the packages of both.
SPACE_MODEL = "model"
SPACE_MODULES = ("__init__", "serving")
SPACE_FILES = ("attention_page.html",)
SPACE_REQUIREMENTS = ("torch", "transformers", "safetensors", "datasets", "gradio")
SPACE_APP = f'''"""The page of this Space, for this machine alone where it is started by hand: python app.py"""

import os
import sys

from vanilla_transformer.serving import serve


if __name__ == "__main__":
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "{SPACE_MODEL}")
    host = "0.0.0.0" if "SPACE_ID" in os.environ else "127.0.0.1"
    try:
        serve([folder], names=[NAME], host=host, port=int(os.environ.get("GRADIO_SERVER_PORT", 7860)))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        sys.exit(f"app.py: error: {{error}} (GRADIO_SERVER_PORT is the port)")
'''

# Fields that make a model another one than the paper's; the rest is its size, and the ids of the vocabulary.
DEPARTURES = {
    "norm_first": "layer normalisation before each sub-layer",
    "final_norm": "layer normalisation after each stack",
    "attention_bias": "biases in the attention's projections",
    "output_bias": "a bias on the output words",
    "tie_word_embeddings": "matrices of source, target and output words of their own",
    "position_embedding": "positions",
    "activation": "activation of the feed-forward layers",
    "pruned_heads": "heads taken out, layer by layer",
    "attention_dropout": "dropout on the attention weights",
    "activation_dropout": "dropout on the hidden layer of the feed-forward layers",
    "layer_norm_eps": "epsilon of the layer normalisation",
}
SHAPE = (
    "encoder_layers",
    "decoder_layers",
    "d_model",
    "d_ff",
    "num_heads",
    "d_k",
    "d_v",
    "dropout",
    "label_smoothing",
)
# Settings of generate() that the card names where they are not neutral.
OTHER_DECODING = {
    "do_sample": False,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
}
# Training arguments that tell of the machine, the person or the screen, not of the model.
UNTOLD_ARGUMENTS = re.compile(
    r".*(_dir|token|_path|_checkpoint|project)|hub_.*|push_to_hub|run_name|local_rank|use_cpu|disable_tqdm|report_to|"
    r"accelerator_config|dataloader_.*|greater_is_better|log_level.*|logging_.*|.*deepspeed.*"
)

# What a record leaves out.
STOCK_DEFAULTS = {each.name: each.default for each in dataclasses.fields(Seq2SeqTrainingArguments)}


@dataclass
class TrainingRun:
    """What is known of how a model came to be; every field may be unknown (None, or empty).

    Args:
        source_lang, target_lang: Language codes, such as "en".
        dataset: Name of a dataset on the Hub.
        files: Names of the text files, without their folders.
        corpora: Where several were mixed, one mapping each: `files`, `weight`, `pairs` (not of a stream).
        streamed: Whether the text was read as a stream, through a shuffle buffer of `shuffle_buffer_size` pairs.
        training_pairs, validation_pairs: Pairs of sentences used.
        training_text: Digest of the lengths of the training pairs in tokens, which tells one text from another.
        preset, config_overrides, recipe: As given to `train`.
        base_model: Name of the model that was fine-tuned.
        averaged: Names of the checkpoints whose mean the weights are.
        arguments: Training arguments that differ from transformers' own defaults.
        updates, epochs, target_tokens: Done in all; target tokens without padding, since `resumed_at`.
        kept_update: The update whose weights were kept as the best, where it is not the last.
        seconds: Time of the training, evaluations in it counted, since `resumed_at`.
        first_batch_seconds: From the start of the command, imports not counted, to the first batch of its training.
        peak_memory_mib: Most memory until then, of the first process and those that it started, pages of mapped files
            counted; `peak_memory_without_files_mib`: without them.
        resumed_at: The update from which the run went on.
        processes, hardware, software: What it ran on.
        train_loss: Mean of the run, label-smoothed, in nats a token.
        evaluations: One mapping each: `name`, `dataset`, `split`, `segments`, `decoding`, `dtype`, `bleu` and `chrf`
            (each `{"score", "signature"}`), `perplexity`.
    """

    source_lang: str | None = None
    target_lang: str | None = None
    dataset: str | None = None
    files: list[str] = field(default_factory=list)
    corpora: list[dict[str, Any]] = field(default_factory=list)
    streamed: bool | None = None
    shuffle_buffer_size: int | None = None
    training_pairs: int | None = None
    validation_pairs: int | None = None
    training_text: str | None = None
    preset: str | None = None
    config_overrides: list[str] = field(default_factory=list)
    recipe: str | None = None
    base_model: str | None = None
    averaged: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    updates: int | None = None
    epochs: float | None = None
    target_tokens: int | None = None
    kept_update: int | None = None
    seconds: float | None = None
    first_batch_seconds: float | None = None
    peak_memory_mib: int | None = None
    peak_memory_without_files_mib: int | None = None
    resumed_at: int | None = None
    processes: int | None = None
    hardware: str | None = None
    software: dict[str, str] = field(default_factory=dict)
    train_loss: float | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "TrainingRun":
        """The record in a model's folder; an empty one where there is none.

        Raises:
            ValueError: The file is not such a record.
        """
        path = Path(folder) / RECORD
        if not path.is_file():
            return cls()
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            known = {each.name for each in dataclasses.fields(cls)}
            return cls(**{name: value for name, value in record.items() if name in known})
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is not the record of a training run: {error}") from error

    def save(self, folder: str | os.PathLike) -> None:
        """Writes `training_run.json` into the folder, whole or not at all."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, [], {})}
        write_whole(Path(folder) / RECORD, json.dumps(known, indent=2, ensure_ascii=False) + "\n")

    def note_machine(self) -> None:
        """Fills in hardware and software."""
        self.hardware = hardware()
        self.software = {}
        for package in ("vanilla-transformer", "transformers", "torch", "tokenizers"):
            try:
                self.software[package] = version(package)
            except PackageNotFoundError:
                continue

    def add_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Adds an evaluation, in place of an earlier one on the same text by the same decoding."""

        def same(other: Mapping[str, Any]) -> bool:
            return all(other.get(key) == evaluation.get(key) for key in ("name", "split", "decoding"))

        self.evaluations = [each for each in self.evaluations if not same(each)] + [dict(evaluation)]


def name_of_base(model: str) -> str:
    """What a card calls the model that was fine-tuned: its name on the Hub, or that of its folder, told apart."""
    return f"{Path(model).resolve().name} (a local folder)" if Path(model).exists() else model


def record_of(model: str) -> TrainingRun:
    """The record of a model in a folder or on the Hub; an empty one where it has none that can be read."""
    record = cached_file(
        model,
        RECORD,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:
        return TrainingRun.load(Path(record).parent) if record else TrainingRun()
    except ValueError as error:
        logger.warning(f"the card will not tell of the base model's training: {error}")
        return TrainingRun()


def hardware() -> str:
    """Name of the GPUs, or of the processor with the number of cores in use."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()}" if count > 1 else torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, UnicodeDecodeError):
        pass
    threads = torch.get_num_threads()
    return f"{name}, {threads} core{'' if threads == 1 else 's'}"


def changed_arguments(arguments: TrainingArguments) -> dict[str, Any]:
    """Training arguments whose value is not transformers' default, without paths, names of runs and tokens."""
    changed: dict[str, Any] = {}
    values = arguments.to_dict()
    for each in dataclasses.fields(arguments):
        value = values.get(each.name)
        default = STOCK_DEFAULTS.get(each.name)
        if default is dataclasses.MISSING or value in (default, None, [], {}) or UNTOLD_ARGUMENTS.fullmatch(each.name):
            continue
        if (default is None and value is False) or isinstance(value, dict):
            continue
        if str(value) != str(getattr(default, "value", default)):
            changed[each.name] = value
    return changed


# ---------------------------------------------------------------------------------------------------------------------
# The model card
# ---------------------------------------------------------------------------------------------------------------------


def model_card(
    config: VanillaTransformerConfig,
    run: TrainingRun,
    *,
    model_id: str,
    num_parameters: int,
    generation_config: GenerationConfig | None = None,
    longest_source: int | None = None,
    license: str | None = None,
) -> ModelCard:
    """The card of a model.

    Args:
        config: Of the model.
        run: How it was trained and evaluated; what is unknown is said to be so, or left out.
        model_id: Name on the Hub, or of the folder.
        num_parameters: Tied matrices counted once.
        generation_config: Decoding settings; None means those of a new model.
        longest_source: Tokens at which the tokenizer cuts a source.
        license: Identifier of the licence on the Hub, such as "apache-2.0".
    """
    name = one_line(model_id.rstrip("/").rpartition("/")[2])
    languages = [code for code in (run.source_lang, run.target_lang) if code and is_language_code(code)]
    data = ModelCardData(
        language=languages or None,
        license=license,
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "vanilla-transformer", "attention-is-all-you-need"],
        datasets=[run.dataset] if run.dataset and is_repo_id(run.dataset) else None,
        base_model=run.base_model if run.base_model and is_repo_id(run.base_model) else None,
        metrics=["bleu", "chrf"] if run.evaluations else None,
        model_name=name,
        eval_results=eval_results(run) or None,
        ignore_metadata_errors=False,
    )
    kind = f"preset {plain(run.preset)}" if run.preset and not run.config_overrides else "a shape of its own"
    languages_known = bool(run.source_lang and run.target_lang)
    return ModelCard.from_template(
        data,
        template_str=template(),
        title=plain(name),
        summary=(
            f"A Transformer as in [Attention Is All You Need](https://arxiv.org/abs/1706.03762), {kind}, "
            f"for translation{f': {direction(run)}' if languages_known else ''}."
        ),
        use=use_section(model_id),
        results=results_section(run),
        model=model_section(config, run, num_parameters),
        decoding=decoding_sentence(generation_config),
        training_rows=training_rows(run),
        arguments="\n".join(f"{key}: {json.dumps(value)}" for key, value in sorted(run.arguments.items())),
        direction=f", {direction(run)}," if languages_known else "",
        longest=f"{longest_source:,}" if longest_source else "the tokenizer's limit of",
    )


def template() -> str:
    """Text of the Jinja template, from the installed package or from the repository."""
    here = Path(__file__).parent
    for path in (here / "model_cards" / "template.md", here.parents[1] / "model_cards" / "template.md"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"the package's model_cards/template.md is missing beside {here}; install it again.")


def use_section(model_id: str) -> str:
    """How to use the model, for whoever has only transformers, and for whoever has the package."""
    quoted = json.dumps(model_id, ensure_ascii=False).replace("`", "")
    return "\n".join(
        [
            "```python",
            "from transformers import pipeline",
            "",
            f'translate = pipeline("translation", model={quoted}, trust_remote_code=True)',
            'print(translate("A sentence to translate."))',
            "```",
            "",
            "The repository carries the model's code, which `trust_remote_code=True` runs: read it first, and pin "
            "`revision=` to the commit that you read. With the package `vanilla-transformer` installed and imported, "
            "the argument is not needed, and whole files are translated by",
            "",
            "```sh",
            f"vanilla-transformer translate --model {shell_word(model_id)} --input lines.txt --output translated.txt",
            "```",
        ]
    )


def results_section(run: TrainingRun) -> str:
    """A table of the evaluations, and the signatures under it."""
    if not run.evaluations:
        return "Not evaluated yet: `vanilla-transformer evaluate --update_card` adds its scores here."
    lines = ["| text | segments | sacreBLEU | chrF | perplexity | decoding |", "| --- | --- | --- | --- | --- | --- |"]
    signatures: list[str] = []
    for each in run.evaluations:
        cells = [
            plain(f"{each.get('name') or 'unnamed'}" + (f" ({each['split']})" if each.get("split") else "")),
            f"{each['segments']:,}" if each.get("segments") else "",
            *(f"{each[metric]['score']:.2f}" if each.get(metric) else "" for metric in ("bleu", "chrf")),
            f"{each['perplexity']:.3f}" if each.get("perplexity") else "",
            plain(str(each.get("decoding") or "")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        for metric, label in (("bleu", "BLEU"), ("chrf", "chrF")):
            if each.get(metric):
                signatures.append(f"{label} `{each[metric]['signature']}`")
    lines += [
        "",
        "Signatures: " + "; ".join(dict.fromkeys(signatures)) + ". Perplexity is per token, end of sentence ",
    ]
    lines[-1] += "counted, unsmoothed."
    return "\n".join(lines)


def eval_results(run: TrainingRun) -> list[EvalResult]:
    """The evaluations as entries of the card's `model-index`."""
    results = []
    languages = f" {run.source_lang}-{run.target_lang}" if run.source_lang and run.target_lang else ""
    task = one_line(f"Translation{languages}")
    for each in run.evaluations:
        name = one_line(each.get("name") or "unnamed")
        where: dict[str, Any] = {
            "task_type": "translation",
            "task_name": task,
            # What has the same type and split is taken for one test set, whatever its name.
            "dataset_type": each.get("dataset") or re.sub(r"\W+", "-", name.lower()).strip("-") or "text",
            "dataset_name": name,
            "dataset_split": one_line(each["split"]) if each.get("split") else None,
        }
        for metric, label in (("bleu", "sacreBLEU"), ("chrf", "chrF")):
            if each.get(metric):
                results.append(
                    EvalResult(
                        **where,
                        metric_type="sacrebleu" if metric == "bleu" else metric,
                        metric_name=label,
                        metric_value=round(each[metric]["score"], 2),
                        metric_args={
                            "signature": each[metric]["signature"],
                            "decoding": one_line(each.get("decoding") or "not stated"),
                        },
                    )
                )
    return results


def model_rows(config: VanillaTransformerConfig, run: TrainingRun, num_parameters: int) -> list[tuple[str, str]]:
    """Size of the model, row by row."""
    overrides = ", ".join(map(plain, run.config_overrides))
    rows = [
        ("preset", (plain(run.preset) if run.preset else "none") + (f" with {overrides}" if overrides else "")),
        ("parameters", f"{num_parameters:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
    ]
    return rows + [(f"`{name}`", str(value)) for name in SHAPE if (value := getattr(config, name)) is not None]


def model_section(config: VanillaTransformerConfig, run: TrainingRun, num_parameters: int) -> str:
    """Size of the model as a table, and how it departs from the paper."""
    rows = [f"| {name} | {value} |" for name, value in model_rows(config, run, num_parameters)]
    return "\n".join(["| | |", "| --- | --- |", *rows, "", departures_text(config)])


def departures_text(config: VanillaTransformerConfig) -> str:
    """Which fields make the model another one than the paper's."""
    paper = VanillaTransformerConfig()
    found = [
        f"`{name}={getattr(config, name)}` ({meaning})"
        for name, meaning in DEPARTURES.items()
        if getattr(config, name) != getattr(paper, name)
    ]
    return f"Departures from the paper: {', '.join(found)}." if found else "Departures from the paper: none."


def decoding_text(
    generation_config: GenerationConfig | None, num_beams: int | None = None, max_length: int | None = None
) -> str:
    """The settings of `generate()` in words.

    Args:
        generation_config: None means those of a new model.
        num_beams: Replaces theirs.
        max_length: Replaces every limit of theirs, the start token counted.
    """
    settings = generation_config
    if settings is None:
        return "beam 4, length penalty ((5 + n) / 6) ** 0.6, at most source + 50 tokens (section 6.1)"
    beams = num_beams or settings.num_beams or 1
    words = [f"beam {beams}" if beams > 1 else "greedy"]
    if beams > 1 and settings.length_penalty:
        gnmt = getattr(settings, "length_penalty_type", None) == "gnmt"
        words.append(f"length penalty {'((5 + n) / 6)' if gnmt else 'n'} ** {settings.length_penalty}")
    if max_length is not None:
        words.append(f"at most {max_length - 1} tokens")
    elif (over := getattr(settings, "max_new_tokens_over_source", None)) is not None:
        words.append(f"at most source + {over} tokens")
    elif (most := settings.max_new_tokens or settings.max_length) is not None:
        words.append(f"at most {most} tokens")
    for name, neutral in OTHER_DECODING.items():
        if (value := getattr(settings, name, None)) not in (None, neutral):
            words.append(f"{name} {value}")
    return ", ".join(words)


def decoding_sentence(generation_config: GenerationConfig | None) -> str:
    """The card's line on decoding."""
    return f"Decoding, unless a call to `generate()` says otherwise: {decoding_text(generation_config)}."


def training_rows(run: TrainingRun) -> list[tuple[str, str]]:
    """What is known of the run, row by row."""
    amount = f", {run.training_pairs:,} pairs" if run.training_pairs else ""
    data = plain(run.dataset or ", ".join(run.files) or "not stated") + amount
    effort = [f"{run.updates:,} updates" if run.updates else "", f"{run.epochs:.1f} epochs" if run.epochs else ""]
    # Of a resumed run only the tokens of its last part are known.
    effort.append(f"{run.target_tokens:,} target tokens" if run.target_tokens and not run.resumed_at else "")
    rows = [
        ("languages", direction(run)),
        ("text", data),
        ("mixture", plain(mixture_text(run))),
        ("validation", f"{run.validation_pairs:,} pairs" if run.validation_pairs else ""),
        ("recipe", plain(run.recipe or "")),
        ("fine-tuned from", plain(run.base_model or "")),
        ("effort", ", ".join(filter(None, effort))),
        ("weights", weights_text(run)),
        ("time", duration(run.seconds) + (f" since update {run.resumed_at:,}" if run.resumed_at else "")),
        ("hardware", plain(run.hardware or "") + (f", {run.processes} processes" if (run.processes or 1) > 1 else "")),
        ("software", plain(", ".join(f"{name} {number}" for name, number in run.software.items()))),
        ("training loss", f"{run.train_loss:.3f} nats a token, smoothed, mean of the run" if run.train_loss else ""),
    ]
    return [(name, value) for name, value in rows if value.strip()]


def mixture_text(run: TrainingRun) -> str:
    """In what proportion corpora were mixed, and through what buffer a stream was shuffled."""
    parts = [
        f"{' + '.join(corpus['files'])}{f', {pairs:,} pairs' if (pairs := corpus.get('pairs')) else ''}, weight "
        f"{corpus['weight']:g}"
        for corpus in run.corpora
    ]
    if run.streamed:
        parts.append(f"streamed, shuffled within {run.shuffle_buffer_size:,} pairs a process")
    return "; ".join(parts)


def weights_text(run: TrainingRun) -> str:
    """Which weights were kept, where they are not those of the last update."""
    if run.averaged:
        return f"the mean of {len(run.averaged)} checkpoints: {', '.join(map(plain, run.averaged))}"
    return f"of update {run.kept_update:,}, the best on the validation text" if run.kept_update else ""


def direction(run: TrainingRun) -> str:
    """The languages in words."""
    if not run.source_lang or not run.target_lang:
        return "not stated"
    return f"{plain(run.source_lang)} to {plain(run.target_lang)}"


def duration(seconds: float | None) -> str:
    """Seconds as hours, minutes and seconds."""
    if not seconds:
        return ""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if minutes else "", f"{rest} s" if not hours else ""]
    return " ".join(filter(None, parts))


def plain(text: str) -> str:
    """The text on one line, safe in Markdown: no HTML, no table borders, no links."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(one_line(text), quote=False))


def one_line(text: str) -> str:
    """The text with single spaces in the place of line breaks."""
    return " ".join(str(text).split())


def shell_word(text: str) -> str:
    """The text as one word of a command line, on one line."""
    line = " ".join(text.split())
    return line if re.fullmatch(r"[\w@%+=:,./-]+", line) else "'" + line.replace("'", "'\\''") + "'"


def is_language_code(text: str) -> bool:
    """Whether the Hub would take it for a language: a code such as "en", "tgk" or "pt-BR", not a column's name."""
    return re.fullmatch(r"[a-z]{2,3}([-_][A-Za-z0-9]{2,8})*", text) is not None


def is_repo_id(text: str) -> bool:
    """Whether it can be the name of a repository, and is no path on this machine."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) is not None and not os.path.exists(text) and text[0] not in "./"


def write_model_card(
    folder: str | os.PathLike, run: TrainingRun, *, model_id: str | None = None, license: str | None = None
) -> ModelCard:
    """Writes `training_run.json` and `README.md` into a folder that holds a saved model.

    Args:
        folder: With config.json and the weights.
        run: How the model was trained.
        model_id: Its name on the Hub; None means the folder's.
        license: See `model_card`.
    """
    path = Path(folder)
    card = card_of(path, run, model_id=model_id or path.resolve().name, license=license)
    run.save(path)
    write_whole(path / CARD, str(card))
    return card


def card_of(path: Path, run: TrainingRun, *, model_id: str, license: str | None = None) -> ModelCard:
    """The card of the model in a folder."""
    settings = path / "generation_config.json"
    return model_card(
        VanillaTransformerConfig.from_pretrained(path),
        run,
        model_id=model_id,
        num_parameters=parameters_in(path),
        generation_config=GenerationConfig.from_pretrained(path) if settings.is_file() else None,
        longest_source=length_limit(path),
        license=license,
    )


def add_evaluation(folder: str | os.PathLike, evaluation: Mapping[str, Any]) -> None:
    """Adds an evaluation to the record and to the card of a model; what someone wrote into the card stays.

    Args:
        folder: With the saved model.
        evaluation: See `TrainingRun.evaluations`.
    """
    path = Path(folder)
    run = TrainingRun.load(path)
    run.add_evaluation(evaluation)
    if not (path / CARD).is_file():
        write_model_card(path, run)
        return
    content = str(ModelCard.load(path / CARD, ignore_metadata_errors=True))
    content = replace_section(content, "results", results_section(run))
    updated: Any = ModelCard(content, ignore_metadata_errors=True)
    updated.data.eval_results = eval_results(run)
    updated.data.model_name = updated.data.model_name or path.resolve().name
    updated.data.metrics = ["bleu", "chrf"]
    run.save(path)
    write_whole(path / CARD, str(updated))


def replace_section(content: str, name: str, text: str) -> str:
    """The card with another text between `<!-- name -->` and `<!-- end of name -->`; added at the end if not there."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = content.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        return f"{content.rstrip()}\n\n{start}\n{text}\n{end}\n"
    return f"{before}{start}\n{text}\n{end}{after}"


def section(content: str, name: str) -> str | None:
    """The text between `<!-- name -->` and `<!-- end of name -->`; None where there is none."""
    _, found, rest = content.partition(f"<!-- {name} -->")
    text, closed, _ = rest.partition(f"<!-- end of {name} -->")
    return text.strip() if found and closed else None


def parameters_in(folder: Path) -> int:
    """Number of weights in the safetensors files of a folder."""
    return sum(math.prod(shape) for shape in shapes_in(folder).values())


def shapes_in(folder: Path) -> dict[str, list[int]]:
    """Name and shape of each tensor in the safetensors files of a folder, from their headers.

    Raises:
        FileNotFoundError: There are none.
        ValueError: One is not whole.
    """
    shapes = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes.update({name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    return shapes


def check_weights(config: VanillaTransformerConfig, folder: Path) -> None:
    """Raises ValueError where the files lack a weight of the model, or hold one of another shape."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    tied = model.all_tied_weights_keys
    found = shapes_in(folder)
    for name, parameter in model.state_dict().items():
        if name in found and found[name] != list(parameter.shape):
            raise ValueError(
                f"{folder}: {name} has the shape {found[name]} in the weights and {list(parameter.shape)} by "
                "config.json; they do not belong together."
            )
        if name not in found and tied.get(name, name) not in found:
            raise ValueError(f"{folder}: the weights lack {name}; the model was not saved to its end.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder, of one or of several parts.

    Raises:
        FileNotFoundError: There are none, or one that the index names is missing.
    """
    single, index = (folder / name for name in WEIGHTS)
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors; is it the folder of a saved model?")
    parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for part in parts:
        if not (folder / part).is_file():
            raise FileNotFoundError(f"{folder / part} is missing, which {index.name} names.")
    return [folder / part for part in parts]


def length_limit(folder: Path) -> int | None:
    """`model_max_length` of the tokenizer in a folder; None where it has no limit, or there is no tokenizer."""
    path = folder / "tokenizer_config.json"
    limit = json.loads(path.read_text(encoding="utf-8")).get("model_max_length") if path.is_file() else None
    return int(limit) if isinstance(limit, (int, float)) and limit < 10**9 else None


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new one, never a part."""
    making = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        making.write_text(text, encoding="utf-8")
        os.replace(making, path)
    finally:
        making.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# The Hub
# ---------------------------------------------------------------------------------------------------------------------


def files_to_push(folder: str | os.PathLike, repo_id: str, *, license: str | None = None) -> dict[str, Path | bytes]:
    """What a repository of this model holds: each file's name and, where it is not on the disk as it is, its content.

    The card gets the repository's name; the code is added where the folder lacks it.

    Args:
        folder: With the saved model and its tokenizer.
        repo_id: Name of the repository.
        license: Written into the card; None leaves what it says.

    Raises:
        FileNotFoundError: No folder, or the configuration, the weights or the tokenizer are missing in it.
        ValueError: A model of another package, or files that are not whole or do not belong together.
    """
    validate_repo_id(repo_id)
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    tokenizer = next((name for name in TOKENIZERS if (path / name).is_file()), TOKENIZERS[0])
    for name, what in (("config.json", "configuration"), (tokenizer, "tokenizer")):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}; without its {what} nobody could use the model.")
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if settings.get("model_type") != VanillaTransformerConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {settings.get('model_type')!r}; push is for those of this package. For "
            "others there is `hf upload`."
        )
    config = VanillaTransformerConfig.from_pretrained(path)
    weights = weight_files(path)
    check_weights(config, path)
    words = len(AutoTokenizer.from_pretrained(path))
    if words > config.vocab_size:
        raise ValueError(f"the tokenizer of {folder} knows {words} tokens, its model only {config.vocab_size}.")

    files: dict[str, Path | bytes] = {}
    for pattern in PUSHED:
        for file in sorted(path.glob(pattern)):
            if file.is_file() and (file.suffix != ".safetensors" or file in weights):
                files[file.name] = file
    for name in CODE:
        files.setdefault(name, Path(__file__).with_name(name))
    if not {"auto_map", "custom_pipelines"} <= set(settings):
        files["config.json"] = config.to_json_string().encode()
    files[CARD] = card_to_push(path, repo_id, license).encode()
    return dict(sorted(files.items()))


def card_to_push(path: Path, repo_id: str, license: str | None) -> str:
    """The folder's card with the repository's name in it; a new one where there is none."""
    if not (path / CARD).is_file():
        return str(card_of(path, TrainingRun.load(path), model_id=repo_id, license=license))
    content = str(ModelCard.load(path / CARD, ignore_metadata_errors=True))
    if "<!-- use -->" in content:
        content = replace_section(content, "use", use_section(repo_id))
    card: Any = ModelCard(content, ignore_metadata_errors=True)
    if license is not None:
        card.data.license = license
    if card.data.eval_results:
        card.data.model_name = repo_id.rpartition("/")[2]
    return str(card)


def files_of_space(folder: str | os.PathLike, repo_id: str, *, license: str | None = None) -> dict[str, Path | bytes]:
    """What a Space of the Hub holds that is a page to try this model on: each file's name and content.

    It is whole in itself: the model, the page and the code of both, so that it needs no other repository. A folder
    with these files runs anywhere: `pip install -r requirements.txt`, then `python app.py`.

    Args:
        folder: With the saved model and its tokenizer.
        repo_id: Name of the Space.
        license: Written into the Space's card and that of the model; None leaves what the model's card says.

    Raises:
        FileNotFoundError, ValueError: See `files_to_push`.
    """
    validate_repo_id(repo_id)
    model_files = files_to_push(folder, SPACE_MODEL, license=license)  # by that name its card opens it in the Space
    card: Any = ModelCard(content_of(model_files[CARD]).decode("utf-8"), ignore_metadata_errors=True)
    name = repo_id.rpartition("/")[2]
    run = TrainingRun.load(Path(folder))
    gradio = next(line for line in space_requirements() if line.startswith("gradio")).partition("==")[2]
    header = {
        "title": name,
        "emoji": "\U0001f5e3",
        "colorFrom": "blue",
        "colorTo": "gray",
        "sdk": "gradio",
        **({"sdk_version": gradio} if gradio else {}),
        "app_file": "app.py",
        "pinned": False,
        **({"license": card.data.license} if card.data.license else {}),
        "short_description": f"Translation, {direction(run)}"[:60] if run.source_lang else "Translation",
    }
    text = (
        f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True)}---\n\n# {plain(name)}\n\n"
        "A page to try a translation model on: the Transformer of *Attention Is All You Need*, as trained with the "
        "package vanilla-transformer. Its card is `model/README.md`. On another machine: "
        "`pip install -r requirements.txt`, then `python app.py`.\n"
    )
    code = Path(__file__).parent
    package = code.name
    more = ["sentencepiece"] if any(file.endswith(".spm") for file in model_files) else []
    files: dict[str, Path | bytes] = {f"{SPACE_MODEL}/{file}": content for file, content in model_files.items()}
    files |= {f"{package}/{file}": code / file for file in (*modules_of_page(code), *SPACE_FILES)}
    files |= {
        CARD: text.encode(),
        "app.py": SPACE_APP.replace("NAME", repr(name)).encode(),
        "requirements.txt": "".join(f"{line}\n" for line in space_requirements(more)).encode(),
    }
    return dict(sorted(files.items()))


def modules_of_page(code: Path) -> list[str]:
    """Files of this package that are imported where a Space's page is, by the import statements in them."""
    open_names, found = list(SPACE_MODULES), set()
    while open_names:
        name = open_names.pop()
        if name in found or not (code / f"{name}.py").is_file():  # a name of __init__, not a module
            continue
        found.add(name)
        for node in ast.parse((code / f"{name}.py").read_text(encoding="utf-8")).body:  # not what functions import
            if isinstance(node, ast.ImportFrom):
                package, _, module = (node.module or "").partition(".")
                if node.level:
                    open_names.append(package)
                elif package == code.name:
                    open_names += [module] if module else [alias.name for alias in node.names]
    return sorted(f"{name}.py" for name in found)


def space_requirements(more: Iterable[str] = ()) -> list[str]:
    """What the page needs, in the versions that are installed here, as far as they are."""
    lines = []
    for name in (*SPACE_REQUIREMENTS, *more):
        try:
            lines.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            lines.append(name)
    return lines


def content_of(content: Path | bytes) -> bytes:
    """The bytes of a file to push."""
    return content if isinstance(content, bytes) else content.read_bytes()


def write_space(
    folder: str | os.PathLike, output_dir: str | os.PathLike, repo_id: str, *, license: str | None = None
) -> list[str]:
    """Writes the files of `files_of_space` into a folder; returns their names.

    Args:
        folder: With the saved model and its tokenizer.
        output_dir: A new or an empty folder.
        repo_id: Name of the Space.
        license: See `files_of_space`.

    Raises:
        FileExistsError: `output_dir` is not empty.
        FileNotFoundError, ValueError: See `files_of_space`.
    """
    files = files_of_space(folder, repo_id, license=license)
    target = Path(output_dir)
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"expected a new or an empty folder, but {output_dir} is not empty")
    for name, content in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content_of(content))
    return list(files)


class Pushed(NamedTuple):
    """What a push did: the address of the branch's newest commit, and whether it is new."""

    address: str
    changed: bool


def push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
    license: str | None = None,
    token: str | None = None,
    files: dict[str, Path | bytes] | None = None,
    space: bool = False,
) -> Pushed:
    """Uploads a model's folder as one commit: all of it arrives, or nothing; none where the Hub has it all already.

    Weights that a broken upload has brought to the Hub already are not sent again. A licence that is given stays in
    the folder's card, for the next push.

    Args:
        folder: With the saved model and its tokenizer.
        repo_id: `user/name`; a bare name is one of the token's owner. Made where it does not exist.
        private: Whether a new repository is private; None means what the owner's settings say. One that exists stays
            as it is.
        revision: Branch to commit to, made where it does not exist; None means the main one.
        commit_message: Of the commit.
        license: See `model_card`.
        token: None means that of `hf auth login` or of the variable HF_TOKEN.
        files: What `files_to_push`, or `files_of_space`, gave for the same arguments; None asks it.
        space: Whether to make a Space of it, a page to try the model on: see `files_of_space`.

    Raises:
        FileNotFoundError, ValueError: See `files_to_push`; a name that the Hub does not take; `private` for a
            repository that exists and is public.
        huggingface_hub.errors.HfHubHTTPError: What the Hub refuses.
        httpx.HTTPError: The Hub is not reached.
    """
    files_of = files_of_space if space else files_to_push
    files = dict(files_of(folder, repo_id, license=license) if files is None else files)
    api = HfApi(token=token, library_name="vanilla-transformer")
    kind = "space" if space else "model"
    made = api.create_repo(
        repo_id, private=private, exist_ok=True, repo_type=kind, space_sdk="gradio" if space else None
    )
    repo_id = made.repo_id  # now with its owner
    if not space:  # whose card does not name it
        files[CARD] = card_to_push(Path(folder), repo_id, license).encode()
    if private and api.repo_info(repo_id, repo_type=kind).private is False:
        raise ValueError(
            f"{repo_id} exists already and is public; nothing was sent. Make it private in its settings on the Hub, "
            "or give another name."
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=kind)
    newest = api.repo_info(repo_id, revision=revision, repo_type=kind).sha
    commit = api.create_commit(
        repo_id,
        operations=[CommitOperationAdd(name, content) for name, content in files.items()],
        commit_message=commit_message,
        revision=revision,
        repo_type=kind,
    )
    card = Path(folder) / CARD
    if license is not None and card.is_file():
        own: Any = ModelCard.load(card, ignore_metadata_errors=True)
        own.data.license = license
        write_whole(card, str(own))
    return Pushed(str(commit.commit_url), commit.oid != newest)


def size_of(content: Path | bytes) -> int:
    """Bytes of a file to push."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


__all__ = [
    "Pushed",
    "TrainingRun",
    "add_evaluation",
    "changed_arguments",
    "files_of_space",
    "files_to_push",
    "model_card",
    "push",
    "write_model_card",
    "write_space",
]
