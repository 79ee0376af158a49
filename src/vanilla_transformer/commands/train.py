"""`vanilla-transformer train`: from two text files, or a dataset, to a folder with a trained model."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from huggingface_hub.utils import WeakFileLock
from transformers import AutoTokenizer, HfArgumentParser, PreTrainedTokenizerBase, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import logging

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, list_presets
from vanilla_transformer.data import load_pairs, same_tokenizer, tokenize_pairs
from vanilla_transformer.hub import TrainingRun, name_of_base, record_of
from vanilla_transformer.locks import sole_writer
from vanilla_transformer.mixing import Mixture, check_weights
from vanilla_transformer.preparation import FirstBatch, MemoryWatch
from vanilla_transformer.resumable import warn_if_alone
from vanilla_transformer.shards import cache_folder, usable_cores
from vanilla_transformer.streaming import SHUFFLE_BUFFER_SIZE, PairStream, TokenStream, first_texts, stream_pairs
from vanilla_transformer.tokenization import train_tokenizer
from vanilla_transformer.training import (
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
    bfloat16_gain,
    last_whole_checkpoint,
)
from vanilla_transformer.translation import load_translator, position_limit


logger = logging.get_logger(__name__)

PAPER_UPDATES = 100_000  # section 5.2: the base model
HIGHEST_PEAK = 0.01
VOCABULARY_PAIRS_OF_A_STREAM = 1_000_000
FILES = ("train_source", "train_target", "validation_source", "validation_target")
METRICS = ("loss", "bleu", "chrf", "generated_length")


@dataclass
class TrainArguments:
    """What `train` takes besides the training arguments of transformers."""

    recipe: str | None = field(
        default=None,
        metadata={
            "help": "A recipe's name (multi30k_tiny, multi30k_tokenized, wmt14_base, wmt14_big) or a YAML file."
        },
    )
    preset: str = field(default="base", metadata={"help": f"Shape of a new model: {', '.join(list_presets())}."})
    config_overrides: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of the configuration, as NAME=VALUE, that replace those of the preset."},
    )
    model: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a model to fine-tune, with its tokenizer."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a tokenizer to use instead of training one."}
    )
    vocab_size: int = field(
        default=37000, metadata={"help": "Words of the joint vocabulary that is trained (section 5.1: about 37,000)."}
    )
    train_source: list[str] | None = field(default=None, metadata={"help": "Source text of training, .gz by name."})
    train_target: list[str] | None = field(default=None, metadata={"help": "Target text of training, line by line."})
    train_weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "One weight for each pair of training files: each is a corpus that gives its share by weight to "
            "an epoch, which has as many pairs as all corpora together; by default each pair comes once an epoch."
        },
    )
    validation_source: list[str] | None = field(default=None, metadata={"help": "Source text of validation."})
    validation_target: list[str] | None = field(default=None, metadata={"help": "Target text of validation."})
    dataset: str | None = field(
        default=None, metadata={"help": "In place of files: a dataset of the Hub, or a folder or file of one."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the dataset, such as de-en."})
    train_split: str = field(default="train", metadata={"help": "Split of the dataset to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Split of the dataset to validate on; none by default."}
    )
    source_lang: str | None = field(
        default=None, metadata={"help": "Language of the source, such as en; of a dataset, its column."}
    )
    target_lang: str | None = field(
        default=None, metadata={"help": "Language of the target, such as de; a dataset's column."}
    )
    max_source_tokens: int | None = field(
        default=None, metadata={"help": "Pairs with a longer source are dropped; by default the tokenizer's limit."}
    )
    max_target_tokens: int | None = field(
        default=None, metadata={"help": "Pairs with a longer target are dropped; by default the tokenizer's limit."}
    )
    vocab_pairs: int | None = field(
        default=None,
        metadata={
            "help": "Pairs, spread over the text, that a new vocabulary is learnt from; by default all, of a stream "
            f"the first {VOCABULARY_PAIRS_OF_A_STREAM:,}."
        },
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that encode a large corpus; by default as many as there are cores."}
    )
    cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for encoded text, which is used again for the same text and vocabulary; by default "
            "vanilla_transformer in the cache of the datasets library."
        },
    )
    overwrite_cache: bool = field(default=False, metadata={"help": "Encode the text anew although it was before."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read the training text as it is needed and keep none of it on disk; needs --max_steps."},
    )
    shuffle_buffer_size: int | None = field(
        default=None,
        metadata={
            "help": "Pairs of a stream that are shuffled, and made batches of, at a time, in each process "
            f"({SHUFFLE_BUFFER_SIZE:,})."
        },
    )


class TrainParser(HfArgumentParser):
    """Errors on one line, and no abbreviated flags."""

    def __init__(self):
        super().__init__(
            cast(Any, (TrainArguments, VanillaTransformerTrainingArguments)),
            prog="vanilla-transformer train",
            allow_abbrev=False,
            description="Trains a translation model on parallel text, or fine-tunes one (--model).",
        )

    def error(self, message: str) -> Any:
        """Raises, for the command's one line."""
        raise ValueError(f"{' '.join(message.split())} (see {self.prog} --help)")


def main(argv: list[str]) -> int:
    """Runs the command; see `vanilla-transformer train --help`.

    Raises:
        ValueError: Arguments that contradict each other, an unknown recipe, preset or field, text that cannot be used.
        FileNotFoundError, NotADirectoryError: A path that does not exist, or an output folder that is a file.
        BlockingIOError: Another run trains into the output folder just now.
    """
    started, memory = time.perf_counter(), MemoryWatch()
    try:
        with contextlib.ExitStack() as held:
            return run_training(argv, started, memory, held)
    finally:
        memory.stop()


def run_training(argv: list[str], started: float, memory: MemoryWatch, held: contextlib.ExitStack) -> int:
    """`main`, whose start and memory are being watched, and at whose end is let go what is `held`."""
    arguments, training_arguments = parse(argv)
    if training_arguments.process_index == 0:
        advice = "wait for its end, or give another --output_dir."
        held.enter_context(sole_writer(str(training_arguments.output_dir), advice))
    set_seed(training_arguments.seed)
    if training_arguments.should_log:
        logging.get_logger("vanilla_transformer").setLevel(logging.INFO)
    if training_arguments.disable_tqdm or not sys.stderr.isatty():  # in a log, or beside an error, only noise
        disable_progress_bars()
        logging.disable_progress_bar()  # of transformers, where it writes weights
    if training_arguments.bf16 and training_arguments.should_log and (gain := bfloat16_gain()) < 0.9:
        logger.warning(
            f"this machine multiplies bfloat16 matrices at {gain:.0%} of float32's speed: --bf16 false is faster"
        )
    warn_if_alone()
    if training_arguments.ddp_find_unused_parameters is None:
        training_arguments.ddp_find_unused_parameters = False  # each weight has a part in the loss
    overwrite = arguments.overwrite_cache and training_arguments.process_index == 0
    with one_process_first("text", arguments, training_arguments):
        corpora, validation_pairs = open_corpora(arguments, overwrite)
    model, tokenizer = open_or_make_model(arguments, training_arguments, corpora)
    positions = position_limit(model)
    if positions is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    with one_process_first("ids", arguments, training_arguments):
        training_set, mixture = encode_training_text(arguments, corpora, tokenizer, overwrite)
        validation_set = None
        if validation_pairs is not None:
            validation_set, _ = tokenize_pairs(
                validation_pairs,
                tokenizer,
                drop=False,
                description="validation",
                **encoding_options(arguments, overwrite),
            )
    if training_arguments.should_log:
        warn_of_peak(model.config.d_model, training_arguments)
    trainer = VanillaTransformerTrainer(
        model,
        training_arguments,
        train_dataset=training_set,
        eval_dataset=validation_set,
        processing_class=tokenizer,
        mixture=mixture,
    )
    trainer.add_callback(FirstBatch(trainer.run, started, memory))
    describe(trainer.run, arguments, mixture)
    result = trainer.train(resume_from_checkpoint=training_arguments.resume_from_checkpoint)
    metrics = result.metrics
    if trainer.updates_made:
        trainer.save_metrics("train", metrics)
    else:
        logger.info(f"all {trainer.state.global_step} updates were done before; nothing was trained")
    trainer.save_state()
    if validation_set is not None:
        scores = trainer.evaluate()
        trainer.save_metrics("eval", scores)
        metrics = {**metrics, **scores}
    trainer.save_model()
    if trainer.is_world_process_zero():
        told = ("train_loss", "eval_loss", "eval_bleu", "eval_chrf")[0 if trainer.updates_made else 1 :]
        summary = {name: metrics[name] for name in told if name in metrics}
        print(f"saved to {training_arguments.output_dir}: {json.dumps(summary)}")
    # Processes that leave while others still talk to them can end in an abort.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    return 0


def warn_of_peak(d_model: int, training_arguments: VanillaTransformerTrainingArguments) -> None:
    """Says where a short warm-up makes the peak of equation (3) higher than any model of the paper bears."""
    if training_arguments.learning_rate is not None:
        return
    peak = (d_model * training_arguments.warmup_steps) ** -0.5
    if peak > HIGHEST_PEAK:
        logger.warning(
            f"equation (3) peaks at {peak:.2g} after {training_arguments.warmup_steps:g} updates, where training may "
            f"diverge: the paper's models peak at 0.0007 and less; a longer --warmup_steps lowers it, and "
            "--learning_rate sets it"
        )


def describe(run: TrainingRun, arguments: TrainArguments, mixture: Mixture | None = None) -> None:
    """Notes for the model card what only the command knows: languages, text, preset."""
    run.source_lang, run.target_lang = arguments.source_lang, arguments.target_lang
    files = [path for name in FILES[:2] for path in getattr(arguments, name) or []]
    if arguments.dataset and Path(arguments.dataset).exists():
        files.append(arguments.dataset)
    else:
        run.dataset = arguments.dataset
    run.files = [Path(path).resolve().name for path in files]  # not where they lie on this machine
    if arguments.train_weights:
        half = len(files) // 2
        run.corpora = [
            {"files": [run.files[number], run.files[half + number]], "weight": weight}
            for number, weight in enumerate(arguments.train_weights)
        ]
        if mixture is not None:
            for corpus, size in zip(run.corpora, mixture.sizes, strict=True):
                corpus["pairs"] = size
    if arguments.model is None:
        run.preset, run.config_overrides = arguments.preset, arguments.config_overrides
    else:
        run.base_model = name_of_base(arguments.model)
        base = record_of(arguments.model)
        run.preset, run.config_overrides = base.preset, base.config_overrides
        run.source_lang, run.target_lang = run.source_lang or base.source_lang, run.target_lang or base.target_lang
    run.recipe = Path(arguments.recipe).stem if arguments.recipe else None


def parse(argv: list[str]) -> tuple[TrainArguments, VanillaTransformerTrainingArguments]:
    """Arguments from the command line, over those of the recipe, over the command's defaults.

    Raises:
        ValueError: See `main`.
    """
    parser = TrainParser()
    known = set(vars(parser.parse_args([])))
    parser.parse_args(argv)  # --help, and what is wrong with a flag by itself
    given = given_settings(argv, known)
    recipe = read_recipe(given["recipe"]) if given.get("recipe") else {}
    if unknown := sorted(set(recipe) - known):
        raise ValueError(
            f"recipe {given['recipe']}: unknown settings {', '.join(unknown)}; see vanilla-transformer train --help."
        )
    try:
        parser.parse_args(as_flags(recipe))
    except ValueError as error:
        raise ValueError(f"recipe {given['recipe']}: {error}") from None
    defaults = settle(given, recipe)
    chosen = {**recipe, **given}
    if not chosen.get("output_dir"):
        raise ValueError("--output_dir is missing: the folder for checkpoints and the trained model.")
    resume = chosen.get("resume_from_checkpoint")
    if str(resume).lower() in ("false", "0", "no", "none"):
        resume = None
    # Only a run that continues its own folder may write over what is there.
    own = str(resume).lower() in ("true", "1", "yes") or (
        resume and Path(chosen["output_dir"]).resolve() in Path(resume).resolve().parents
    )
    check_output_folder(str(chosen["output_dir"]), bool(own))
    parser.set_defaults(**{**{name: None for name, value in recipe.items() if value is None}, **defaults})
    # What comes later on a command line counts, so a recipe is what stands before it.
    arguments, training_arguments = parser.parse_args_into_dataclasses(
        [*as_flags(recipe), *argv], look_for_args_file=False
    )
    check_arguments(arguments, training_arguments)
    training_arguments.resume_from_checkpoint = resume
    if str(resume).lower() in ("true", "1", "yes"):
        training_arguments.resume_from_checkpoint = last_whole_checkpoint(chosen["output_dir"])
        if training_arguments.resume_from_checkpoint is None:
            raise ValueError(
                f"--resume_from_checkpoint: {training_arguments.output_dir} holds no whole checkpoint; leave it out, "
                "with another --output_dir if that one holds a model."
            )
    elif resume and not (Path(resume) / "trainer_state.json").is_file():
        raise FileNotFoundError(f"--resume_from_checkpoint: {resume} is no whole checkpoint; true means the last one.")
    return arguments, training_arguments


def given_settings(argv: list[str], known: set[str]) -> dict[str, Any]:
    """The settings that stand on the command line, without any defaults."""
    unset = object()
    parser = TrainParser()
    parser.set_defaults(**dict.fromkeys(known, unset))
    return {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not unset}


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line; those that are None are left out, for no flag says None."""
    flags = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]
    return flags


def settle(given: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Takes out of the recipe what the command line replaces, and returns the command's defaults for the rest.

    Args:
        given: Settings of the command line.
        recipe: Settings of the recipe; changed in place.

    Raises:
        ValueError: Settings that exclude each other.
    """

    def leave_out(*names: str) -> None:
        for name in names:
            recipe.pop(name, None)

    train_files, validation_files = FILES[:2], FILES[2:]
    if not set(train_files).isdisjoint(given):  # local files take the place of the recipe's dataset
        leave_out("dataset", "dataset_config", "train_split", "validation_split", "train_weights", *FILES)
    elif not set(validation_files).isdisjoint(given):
        leave_out("validation_split", *validation_files)
    if "dataset" in given:
        leave_out("dataset_config", "train_weights", *FILES)
    if given.get("model") or given.get("tokenizer"):
        which = "--model" if given.get("model") else "--tokenizer"
        fixed = ("preset", "config_overrides", "vocab_size") if given.get("model") else ("vocab_size",)
        if clash := [f"--{name}" for name in fixed if name in given]:
            raise ValueError(f"{which} brings its own; leave {' and '.join(clash)} out.")
        leave_out(*fixed)

    chosen = {**recipe, **given}
    for name in ("eval_steps", "save_steps", "logging_steps"):
        if chosen.get(name) is not None and number_of(chosen[name]) <= 0:
            raise ValueError(f"--{name} must be a number above 0, got {chosen[name]}.")
    defaults: dict[str, Any] = {}
    if is_true(chosen.get("streaming")) and chosen.get("max_steps") is None:
        raise ValueError("--streaming needs --max_steps: a stream has no end.")
    if not {"max_steps", "num_train_epochs"} & set(chosen):
        defaults["max_steps"] = PAPER_UPDATES
    if "report_to" not in chosen:
        defaults["report_to"] = "tensorboard"

    if chosen.get("validation_split") and not chosen.get("dataset"):
        raise ValueError(
            "--validation_split belongs to --dataset; files are --validation_source and --validation_target."
        )
    if chosen.get("validation_source") or chosen.get("validation_split"):
        scores = METRICS if chosen.get("predict_with_generate", True) else METRICS[:1]
        defaults.update(when_to_evaluate_and_save(chosen))
        if "metric_for_best_model" not in chosen:
            best = "bleu" if "bleu" in scores else "loss"
            defaults.update(metric_for_best_model=best, greater_is_better=best != "loss")
        elif str(chosen["metric_for_best_model"]).removeprefix("eval_") not in scores:
            raise ValueError(
                f"--metric_for_best_model {chosen['metric_for_best_model']}: expected one of {', '.join(scores)}."
            )
    else:  # nothing to choose the best model by
        need_text = [name for name in ("eval_steps", "metric_for_best_model") if given.get(name) is not None]
        need_text += ["load_best_model_at_end"] if given.get("load_best_model_at_end") else []
        need_text += ["eval_strategy"] if str(given.get("eval_strategy", "no")).lower() != "no" else []
        need_text += ["save_strategy best"] if str(given.get("save_strategy")).lower() == "best" else []
        if need_text:
            raise ValueError(
                f"{' and '.join(f'--{name}' for name in need_text)}: needs --validation_source and "
                "--validation_target, or --validation_split."
            )
        leave_out(
            "eval_strategy", "eval_steps", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"
        )
        if str(recipe.get("save_strategy")).lower() == "best":
            leave_out("save_strategy")

    rows, tokens = "per_device_train_batch_size", "tokens_per_batch"
    for settings in (given, recipe):
        if settings.get(rows) is not None and settings.get(tokens) is not None:
            raise ValueError(
                f"--{tokens} and --{rows} exclude each other; give one of them: a batch is bounded by tokens or by "
                "sentences."
            )
    if rows in given or (rows in recipe and tokens not in given):
        leave_out(tokens)
        defaults[tokens] = None
    else:
        leave_out(rows)
    return defaults


def when_to_evaluate_and_save(chosen: dict[str, Any]) -> dict[str, Any]:
    """Defaults for what the user left open of evaluating, saving and keeping the best, where there is validation text.

    What is given for one of the two holds for the other too, so that the best model can be kept; where they are given
    so that it cannot, the last is kept, and that is said.

    Args:
        chosen: Settings of the command line and of the recipe.
    """
    strategies = ("eval_strategy", "save_strategy")
    given = {name: str(chosen[name]).lower() for name in strategies if chosen.get(name) is not None}
    for name in strategies:  # a number of updates says that it is by updates
        if chosen.get(name.replace("strategy", "steps")) is not None:
            given.setdefault(name, "steps")
    evaluation, saving = given.get("eval_strategy"), given.get("save_strategy")
    usual = "steps" if is_true(chosen.get("streaming")) else "epoch"  # a stream has one epoch: all of the training
    evaluation = evaluation or (saving if saving in ("steps", "epoch") else usual)
    saving = saving or (evaluation if evaluation in ("steps", "epoch") else usual)
    defaults: dict[str, Any] = {"eval_strategy": evaluation, "save_strategy": saving, "save_total_limit": 2}
    each = {name: chosen.get(name) for name in ("eval_steps", "save_steps")}
    both_by_steps = evaluation == saving == "steps"
    if saving == "best" and evaluation == "no":
        raise ValueError("--save_strategy best saves nothing without an evaluation; leave --eval_strategy no out.")
    if evaluation == "no":
        return {}
    if both_by_steps:  # transformers would evaluate after logging_steps and save after 500
        steps = each["eval_steps"] or each["save_steps"] or chosen.get("logging_steps") or 500
        each = {name: value or steps for name, value in each.items()}
        defaults.update(each)
    # Where only some of the evaluated models are saved, the best may not be among them.
    together = saving == "best" or evaluation == saving
    if both_by_steps:
        together = number_of(each["save_steps"]) == number_of(each["eval_steps"])
    if saving != "no" and together:
        defaults["load_best_model_at_end"] = True
    elif chosen.get("load_best_model_at_end") is None:
        logger.warning(
            "the last model will be kept, not the best: that takes an evaluation before each saving, such as "
            "--eval_strategy steps --save_strategy steps --eval_steps 500 --save_steps 500"
        )
    return defaults


def is_true(value: Any) -> bool:
    """Whether a setting of a recipe or of the command line says yes."""
    return str(value).lower() in ("true", "1", "yes", "y", "t")


def number_of(value: Any) -> float:
    """A setting of a recipe or of the command line as a number; 0 where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def read_recipe(name: str) -> dict[str, Any]:
    """Settings of a recipe: a YAML file, or the name of one that comes with the package.

    Raises:
        FileNotFoundError: There is no such file and no such name.
        ValueError: The file is not a YAML mapping of settings.
    """
    shipped = [Path(__file__).parents[1] / "recipes", Path(__file__).parents[3] / "scripts" / "recipes"]
    candidates = [Path(name), *(folder / f"{name}.yaml" for folder in shipped)]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        names = sorted({file.stem for folder in shipped if folder.is_dir() for file in folder.glob("*.yaml")})
        raise FileNotFoundError(f"no recipe file {name!r}, and no recipe of that name; there are {', '.join(names)}.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ValueError(f"{path} must hold settings, NAME: VALUE on each line.")
    # YAML reads the word no as false.
    return {name: "no" if value is False and name.endswith("_strategy") else value for name, value in settings.items()}


def check_output_folder(output_dir: str, resumes: bool) -> None:
    """Raises where the output folder is a file, cannot be written, or holds a run already."""
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"--output_dir {output_dir} is a file; give a folder.")
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"--output_dir {output_dir} is a link to {os.readlink(path)}, which does not exist.")
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), path)
    if not existing.is_dir():
        raise NotADirectoryError(f"--output_dir {output_dir}: {existing} is a file, not a folder.")
    if not os.access(existing, os.W_OK):
        raise PermissionError(f"--output_dir {output_dir}: no permission to write into {existing}.")
    has_model = any(
        next(path.glob(name), None) for name in ("config.json", "*.safetensors", "*.safetensors.index.json")
    )
    if resumes:
        return
    if last_whole_checkpoint(path):
        raise ValueError(
            f"--output_dir {output_dir} holds a run already; give another folder, or continue it with "
            "--resume_from_checkpoint true."
        )
    if has_model:
        raise ValueError(
            f"--output_dir {output_dir} holds a model already, and no checkpoint to continue from; give another "
            f"folder, or train the model further into another one (--model {output_dir})."
        )


def check_arguments(arguments: TrainArguments, training_arguments: VanillaTransformerTrainingArguments) -> None:
    """Raises where the choice of data or model contradicts itself, before anything is read."""
    files = {"--train_source": arguments.train_source, "--train_target": arguments.train_target}
    if arguments.dataset is None and not all(files.values()):
        missing = " and ".join(flag for flag, value in files.items() if not value)
        raise ValueError(
            f"{missing} missing: give --train_source and --train_target, or --dataset, or a recipe with one."
        )
    if arguments.dataset is not None and any(files.values()):
        raise ValueError("give either --dataset or --train_source and --train_target, not both.")
    if bool(arguments.validation_source) != bool(arguments.validation_target):
        raise ValueError("--validation_source and --validation_target belong together; one of them is missing.")
    for name in FILES:
        for path in getattr(arguments, name) or []:
            if not Path(path).exists():
                raise FileNotFoundError(f"--{name}: there is no file {path}.")
            if Path(path).is_dir():
                raise IsADirectoryError(f"--{name}: {path} is a folder; give a text file.")
    check_corpora(arguments, training_arguments)
    if arguments.model is None:
        new_config(arguments, vocab_size=max(arguments.vocab_size, 3))
    elif arguments.tokenizer is not None:
        raise ValueError("--model brings its own tokenizer; leave --tokenizer out.")
    # The trainer refuses these too, but only after the corpus is read and the vocabulary made.
    if smoothing := training_arguments.label_smoothing_factor:
        raise ValueError(
            f"--label_smoothing_factor {smoothing} would smooth the evaluation loss too; use --config_overrides "
            f"label_smoothing={smoothing} instead."
        )
    if training_arguments.learning_rate is None and training_arguments.warmup_steps < 1:
        raise ValueError(
            f"--warmup_steps {training_arguments.warmup_steps}: without --learning_rate, the peak is (d_model * "
            "warmup_steps) ** -0.5, for which warmup_steps must be at least 1."
        )
    check_numbers(arguments, training_arguments)
    check_reports(training_arguments)


def check_corpora(arguments: TrainArguments, training_arguments: VanillaTransformerTrainingArguments) -> None:
    """Raises where weights, stream or cache do not fit the rest."""
    by_tokens = training_arguments.tokens_per_batch is not None
    if (weights := arguments.train_weights) is not None:
        if not arguments.train_source:
            raise ValueError("--train_weights belongs to --train_source and --train_target, one weight for each pair.")
        sides = (arguments.train_source, arguments.train_target or [])
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"expected as many --train_target as --train_source, got {len(sides[1])} and {len(sides[0])}."
            )
        try:
            check_weights(weights, len(sides[0]))
        except ValueError as error:
            raise ValueError(f"--train_weights: {error}") from None
        if not by_tokens:
            raise ValueError("--train_weights needs --tokens_per_batch, not --per_device_train_batch_size.")
    if arguments.streaming and not by_tokens:
        raise ValueError("--streaming needs --tokens_per_batch, not --per_device_train_batch_size.")
    if arguments.streaming and training_arguments.max_steps < 1:
        raise ValueError(f"--streaming needs --max_steps of at least 1, got {training_arguments.max_steps}.")
    if arguments.shuffle_buffer_size is not None and not arguments.streaming:
        raise ValueError("--shuffle_buffer_size belongs to --streaming; other text is shuffled whole.")
    cache = Path(arguments.cache_dir or ".")
    if cache.exists() and not cache.is_dir():
        raise NotADirectoryError(f"--cache_dir {arguments.cache_dir} is a file; give a folder.")


def check_numbers(arguments: TrainArguments, training_arguments: VanillaTransformerTrainingArguments) -> None:
    """Raises where a number is out of range, which would be noticed only after the corpus is read."""
    given = training_arguments
    lowest: dict[str, tuple[float | None, float]] = {
        "max_source_tokens": (arguments.max_source_tokens, 2),
        "max_target_tokens": (arguments.max_target_tokens, 2),
        "preprocessing_num_workers": (arguments.preprocessing_num_workers, 1),
        "shuffle_buffer_size": (arguments.shuffle_buffer_size, 1),
        "vocab_pairs": (arguments.vocab_pairs, 1),
        "gradient_accumulation_steps": (given.gradient_accumulation_steps, 1),
        "per_device_train_batch_size": (given.per_device_train_batch_size, 1),
        "per_device_eval_batch_size": (given.per_device_eval_batch_size, 1),
        "dataloader_num_workers": (given.dataloader_num_workers, 0),
        "data_seed": (given.data_seed, 0),
        "learning_rate": (given.learning_rate, 0),
        "adam_beta1": (given.adam_beta1, 0),
        "adam_beta2": (given.adam_beta2, 0),
        "adam_epsilon": (given.adam_epsilon, 0),
        "max_grad_norm": (given.max_grad_norm, 0),
    }
    for name, (value, least) in lowest.items():
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"--{name} must be a number of at least {least}, got {value}.")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(given, name) >= 1:
            raise ValueError(f"--{name} must be below 1, got {getattr(given, name)}.")
    if given.max_steps <= 0 and not 0 < given.num_train_epochs < math.inf:
        raise ValueError(
            f"--num_train_epochs {given.num_train_epochs} and --max_steps {given.max_steps} train nothing; one of "
            "them must be above 0."
        )


def check_reports(training_arguments: VanillaTransformerTrainingArguments) -> None:
    """Raises where --report_to names something unknown, or something that is not installed."""
    for integration in get_reporting_integration_callbacks(training_arguments.report_to):
        try:
            integration()
        except RuntimeError as error:
            raise ImportError(f"--report_to: {' '.join(str(error).split())}") from error


def new_config(arguments: TrainArguments, **special: Any) -> VanillaTransformerConfig:
    """Configuration of a new model: preset, overrides, vocabulary.

    Raises:
        ValueError: An unknown preset or field, or a value that does not fit.
    """
    fields = {each.name for each in dataclasses.fields(VanillaTransformerConfig)}
    overrides = {}
    for override in arguments.config_overrides:
        name, separator, value = override.partition("=")
        if not separator or name not in fields:
            raise ValueError(f"--config_overrides {override}: expected NAME=VALUE with a field of the configuration.")
        if name in special:
            raise ValueError(f"--config_overrides {override}: {name} follows from the tokenizer; see --vocab_size.")
        overrides[name] = value_of(value)
    try:
        return VanillaTransformerConfig.from_preset(arguments.preset, **overrides, **special)
    except TypeError as error:
        raise ValueError(f"--config_overrides: {' '.join(str(error).split())}") from error


def value_of(text: str) -> Any:
    """A value as YAML reads it, and 1e-5, which YAML takes for text, as a number."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


@contextlib.contextmanager
def one_process_first(
    what: str, arguments: TrainArguments, training_arguments: VanillaTransformerTrainingArguments
) -> Iterator[None]:
    """The first process, then each of the others, which find in the cache what the first has made.

    They wait for a file and not in a collective call, which would time out while a large corpus is encoded.

    Args:
        what: Name of the work. Each has a file of its own: the first process may be at the next work, and hold its
            file, before the others have begun with this one.
        arguments: Which say where the cache is.
        training_arguments: Which say how many processes there are.
    """
    if training_arguments.world_size == 1:
        yield
        return
    folder = cache_folder(arguments.cache_dir)
    run = hashlib.blake2b(os.path.abspath(str(training_arguments.output_dir)).encode(), digest_size=8).hexdigest()
    with contextlib.ExitStack() as held:
        with training_arguments.main_process_first(local=False, desc="taking the lock"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = WeakFileLock(folder / f"run-{run}-{what}.lock")
            if training_arguments.process_index == 0:
                held.enter_context(lock)
        if training_arguments.process_index != 0:
            held.enter_context(lock)
        yield


def open_corpora(
    arguments: TrainArguments, overwrite_cache: bool = False
) -> tuple[Sequence[Dataset] | Sequence[PairStream], Dataset | None]:
    """Training text, one corpus or one for each weight, and, where given, validation pairs.

    They are datasets with the columns `source` and `target`, and of a stream `PairStream`.
    """
    cache: dict[str, Any] = {"cache_dir": arguments.cache_dir, "overwrite_cache": overwrite_cache}
    from_dataset: dict[str, Any] = {
        "dataset": arguments.dataset,
        "dataset_config": arguments.dataset_config,
        "source_lang": arguments.source_lang,
        "target_lang": arguments.target_lang,
    }
    if arguments.dataset is not None:
        places = [{"split": arguments.train_split, **from_dataset}]
    elif arguments.train_weights is not None:
        sources, targets = arguments.train_source or [], arguments.train_target or []
        places = [
            {"source_files": source, "target_files": target} for source, target in zip(sources, targets, strict=True)
        ]
    else:
        places = [{"source_files": arguments.train_source, "target_files": arguments.train_target}]
    training: Any = [stream_pairs(**each) if arguments.streaming else load_pairs(**each, **cache) for each in places]
    if arguments.validation_source is not None:
        files: dict[str, Any] = {
            "source_files": arguments.validation_source,
            "target_files": arguments.validation_target,
        }
        return training, load_pairs(**files, **cache)
    if arguments.dataset is not None and arguments.validation_split is not None:
        return training, load_pairs(split=arguments.validation_split, **from_dataset, **cache)
    return training, None


def encoding_options(arguments: TrainArguments, overwrite_cache: bool) -> dict[str, Any]:
    """What `tokenize_pairs` is told of limits, processes and cache."""
    return {
        "max_source_tokens": arguments.max_source_tokens,
        "max_target_tokens": arguments.max_target_tokens,
        "num_proc": arguments.preprocessing_num_workers or usable_cores(),
        "cache_dir": arguments.cache_dir,
        "overwrite_cache": overwrite_cache,
    }


def encode_training_text(
    arguments: TrainArguments, corpora: Sequence[Any], tokenizer: PreTrainedTokenizerBase, overwrite_cache: bool
) -> tuple[Dataset | TokenStream, Mixture | None]:
    """Ids of all corpora, one after the other, and in what proportion an epoch has them; or a stream of ids."""
    if arguments.streaming:
        stream = TokenStream(
            corpora,
            tokenizer,
            weights=arguments.train_weights,
            buffer_size=arguments.shuffle_buffer_size or SHUFFLE_BUFFER_SIZE,
            max_source_tokens=arguments.max_source_tokens,
            max_target_tokens=arguments.max_target_tokens,
        )
        return stream, None
    encoded = []
    for number, pairs in enumerate(corpora, 1):
        name = "training" if len(corpora) == 1 else f"training, corpus {number}"
        table, _ = tokenize_pairs(pairs, tokenizer, description=name, **encoding_options(arguments, overwrite_cache))
        encoded.append(table)
    if arguments.train_weights is None:
        return encoded[0], None
    mixture = Mixture(tuple(map(len, encoded)), tuple(arguments.train_weights))
    return concatenate_datasets(encoded), mixture


def open_or_make_model(
    arguments: TrainArguments, training_arguments: VanillaTransformerTrainingArguments, corpora: Sequence[Any]
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model to fine-tune, or a new one with a tokenizer trained on both sides of `corpora`.

    Raises:
        ValueError: The run goes on from a checkpoint that has no tokenizer, or another one.
    """
    resumed = training_arguments.resume_from_checkpoint
    if arguments.model is not None:
        model, tokenizer = load_translator(arguments.model)
        if resumed:
            check_tokenizer(tokenizer, f"--model {arguments.model}", Path(resumed))
        return model, tokenizer
    if arguments.tokenizer is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        if resumed:
            check_tokenizer(tokenizer, f"--tokenizer {arguments.tokenizer}", Path(resumed))
    elif resumed:
        tokenizer = AutoTokenizer.from_pretrained(folder_of_tokenizer(Path(resumed)))
    else:
        tokenizer = shared_tokenizer(arguments, training_arguments, corpora)
    config = new_config(
        arguments,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    set_seed(training_arguments.seed)
    model = VanillaTransformerForConditionalGeneration(config)
    logger.info(f"a new model of {model.num_parameters():,} parameters, vocabulary {len(tokenizer):,}")
    return model, tokenizer


def folder_of_tokenizer(checkpoint: Path) -> Path:
    """Where the vocabulary of a run lies that goes on: in its checkpoint, else in the folder of the run.

    A vocabulary that is learnt anew may give its words other numbers, for which the weights mean nothing.

    Raises:
        ValueError: It is in neither.
    """
    for folder in (checkpoint, checkpoint.parent):
        if (folder / "tokenizer.json").is_file():
            return folder
    raise ValueError(
        f"cannot resume from {checkpoint}: neither it nor {checkpoint.parent} has the run's tokenizer.json, without "
        "which its weights mean nothing; give a folder that has it as --tokenizer."
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, given: str, checkpoint: Path) -> None:
    """Raises ValueError where the tokenizer given is not that of the checkpoint, which the weights belong to."""
    try:
        before = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):  # it has none, or not all of it
        return
    if not same_tokenizer(before, tokenizer):
        raise ValueError(
            f"cannot resume from {checkpoint}: {given} has another tokenizer than the one it was trained with."
        )


def shared_tokenizer(
    arguments: TrainArguments, training_arguments: VanillaTransformerTrainingArguments, corpora: Sequence[Any]
) -> PreTrainedTokenizerBase:
    """Trains the joint vocabulary once, on the first process, and opens it on all."""
    folder = Path(str(training_arguments.output_dir))
    with training_arguments.main_process_first(desc="training the tokenizer"):
        if training_arguments.process_index == 0:
            texts = vocabulary_texts(arguments, corpora)
            tokenizer = train_tokenizer(texts, arguments.vocab_size, show_progress=sys.stderr.isatty())
            tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def vocabulary_texts(arguments: TrainArguments, corpora: Sequence[Any]) -> Iterator[str]:
    """The text that a vocabulary is learnt from, both sides of it; weights tell only with streams."""
    if arguments.streaming:
        yield from first_texts(corpora, arguments.vocab_pairs or VOCABULARY_PAIRS_OF_A_STREAM, arguments.train_weights)
        return
    pairs = sum(map(len, corpora))
    every = pairs / min(arguments.vocab_pairs or pairs, pairs)
    seen = 0
    for corpus in corpora:
        for batch in corpus.iter(1000):
            for side in ("source", "target"):
                texts = enumerate(batch[side], seen)
                yield from (text for number, text in texts if text and (every == 1 or number % every < 1))
            seen += len(batch[side])
