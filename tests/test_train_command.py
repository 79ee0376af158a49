"""`vanilla-transformer train`: from two text files to a folder that opens, and what it says of a user's mistakes."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import vanilla_transformer
import vanilla_transformer_cli
from vanilla_transformer.commands.train import new_config, parse, read_recipe
from vanilla_transformer.evaluation import corpus_scores, perplexity
from vanilla_transformer.hub import TrainingRun
from vanilla_transformer.locks import sole_writer
from vanilla_transformer.translation import load_translator, translate_lines


RECIPES = sorted((Path(__file__).resolve().parents[1] / "scripts" / "recipes").glob("*.yaml"))

NUMBERS = [("one", "ein"), ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf"), ("nine", "neun")]
THINGS = [("trains", "Züge"), ("apples", "Äpfel"), ("rivers", "Flüsse"), ("gardens", "Gärten"), ("books", "Bücher")]
ACTIONS = [("wait", "warten"), ("fall down", "fallen herunter"), ("are here", "sind hier")]
PAIRS = [
    (f"{number} {thing} {action} .", f"{zahl} {ding} {tun} .")
    for number, zahl in NUMBERS
    for thing, ding in THINGS
    for action, tun in ACTIONS
]

SHAPE = ["d_model=16", "d_ff=32", "num_heads=2", "encoder_layers=1", "decoder_layers=1", "dropout=0.1"]
SMALL = ["--preset", "tiny", "--config_overrides", *SHAPE, "--vocab_size", "300"]
QUICK = ["--generation_num_beams", "1", "--disable_tqdm", "true", "--use_cpu", "true", "--warmup_steps", "10"]


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Four text files: flag of the command, path."""
    folder = tmp_path_factory.mktemp("text")
    parts = {"train": PAIRS[:80], "validation": PAIRS[80:]}
    return {
        f"--{part}_{side}": write_lines(folder / f"{part}.{side}", [pair[index] for pair in pairs])
        for part, pairs in parts.items()
        for index, side in enumerate(("source", "target"))
    }


def flags(files: dict[str, str], *parts: str) -> list[str]:
    return [item for flag, path in files.items() for item in (flag, path) if flag.startswith(parts or "--")]


def train(*arguments: str) -> int:
    return vanilla_transformer_cli.main(["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory, files) -> Path:
    """The folder of a finished run of 30 updates, evaluated and saved twice on the way."""
    output = tmp_path_factory.mktemp("run") / "model"
    strategy = ["--eval_strategy", "steps", "--eval_steps", "15", "--save_strategy", "steps", "--save_steps", "15"]
    code = train(
        *flags(files),
        *SMALL,
        *QUICK,
        *strategy,
        *("--max_steps", "30", "--tokens_per_batch", "300", "--logging_steps", "5", "--learning_rate", "0.01"),
        *("--load_best_model_at_end", "true", "--output_dir", output),
    )
    assert code == 0
    return output


def trainer_state(folder: Path) -> dict:
    return json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))


# --- A run from end to end -------------------------------------------------------------------------------------------


def test_the_output_folder_opens_with_the_auto_classes_and_the_pipeline(run):
    model = AutoModelForSeq2SeqLM.from_pretrained(run)
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert isinstance(model, vanilla_transformer.VanillaTransformerForConditionalGeneration)
    assert (model.config.d_model, model.config.encoder_layers, model.config.num_heads) == (16, 1, 2)
    assert model.config.vocab_size == len(tokenizer) <= 300
    assert model.generation_config.num_beams == 4
    assert model.generation_config.max_new_tokens_over_source == 50
    assert tokenizer.decode(tokenizer("fünf Züge").input_ids, skip_special_tokens=True) == "fünf Züge"
    (answer,) = pipeline("translation", model=str(run))("two trains wait .", max_new_tokens=5)
    assert set(answer) == {"translation_text"}


def test_the_run_learnt_and_is_on_record(run):
    history = trainer_state(run)["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert trainer_state(run)["global_step"] == 30
    for name in ("train_results.json", "eval_results.json", "checkpoint-15", "checkpoint-30", "tokenizer.json"):
        assert (run / name).exists(), name
    scores = json.loads((run / "eval_results.json").read_text())
    assert {"eval_loss", "eval_bleu", "eval_chrf"} <= set(scores)


def test_the_best_model_by_bleu_is_the_one_in_the_folder(run):
    """BLEU is what the best is chosen by where nothing else is said."""
    state = trainer_state(run)
    scores = {entry["step"]: entry["eval_bleu"] for entry in state["log_history"] if "eval_bleu" in entry}
    assert state["best_metric"] == max(scores.values())
    best = Path(state["best_model_checkpoint"])
    kept, saved = load_file(best / "model.safetensors"), load_file(run / "model.safetensors")
    assert all(torch.equal(kept[name], saved[name]) for name in saved)


def test_the_results_are_those_of_the_saved_model_on_the_whole_validation_set(run, files):
    """Read and translated again, line by line, from the folder and the text files."""
    model, tokenizer = load_translator(str(run), device="cpu")
    sources, targets = (
        Path(files[f"--validation_{side}"]).read_text(encoding="utf-8").splitlines() for side in ("source", "target")
    )
    scores = json.loads((run / "eval_results.json").read_text())
    assert math.exp(scores["eval_loss"]) == pytest.approx(perplexity(model, tokenizer, sources, targets), rel=1e-5)
    translations = [best.text for best, *_ in translate_lines(model, tokenizer, sources, num_beams=1)]
    expected = corpus_scores(translations, [targets])
    assert scores["eval_bleu"] == pytest.approx(expected["bleu"]["score"], abs=1e-6)
    assert scores["eval_chrf"] == pytest.approx(expected["chrf"]["score"], abs=1e-6)


def test_tensorboard_has_the_curves(run):
    (folder,) = {path.parent for path in run.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    bleu = events.Scalars("eval/bleu")
    logged = [entry for entry in trainer_state(run)["log_history"] if "eval_bleu" in entry]
    assert [(point.step, point.value) for point in bleu][: len(logged)] == [
        (entry["step"], pytest.approx(entry["eval_bleu"])) for entry in logged
    ]
    assert {"train/loss", "train/learning_rate", "eval/loss", "eval/chrf"} <= set(events.Tags()["scalars"])


def test_what_is_printed_at_the_end_are_the_results(tmp_path, files, capsys):
    output = tmp_path / "model"
    assert train(*flags(files), *SMALL, *QUICK, "--max_steps", "2", "--output_dir", output) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(f"saved to {output}: ")
    assert {"train_loss", "eval_loss", "eval_bleu", "eval_chrf"} == set(json.loads(last.split(": ", 1)[1]))


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, True),
        ({"MASTER_ADDR": None}, False),  # one process was asked for
        ({"ACCELERATE_MIXED_PRECISION": None}, False),  # not by accelerate launch
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),  # MPI started it
    ],
)
def test_a_process_that_accelerate_started_alone_is_told(tmp_path, files, caplog, monkeypatch, changes, told):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no", **changes}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert train(*flags(files, "--train"), *SMALL, *QUICK, "--max_steps", "1", "--output_dir", tmp_path / "model") == 0
    assert told == any("accelerate launch has started one process" in each.getMessage() for each in caplog.records)


def test_a_run_without_validation(tmp_path, files):
    output = tmp_path / "model"
    assert train(*flags(files, "--train"), *SMALL, *QUICK, "--max_steps", "3", "--output_dir", output) == 0
    AutoModelForSeq2SeqLM.from_pretrained(output)
    assert not (output / "eval_results.json").exists()


def test_resuming_goes_on_from_the_last_whole_checkpoint(tmp_path, run, files):
    """Bit-identical with the run that was not disturbed: same weights, losses and rates."""
    copied = tmp_path / "model"
    shutil.copytree(run, copied)
    (copied / "model.safetensors").unlink()
    (copied / "checkpoint-30" / "trainer_state.json").unlink()  # killed while it saved
    strategy = ["--eval_strategy", "steps", "--eval_steps", "15", "--save_strategy", "steps", "--save_steps", "15"]
    code = train(
        *flags(files),
        *SMALL,
        *QUICK,
        *strategy,
        *("--max_steps", "30", "--tokens_per_batch", "300", "--logging_steps", "5", "--learning_rate", "0.01"),
        *("--output_dir", copied, "--resume_from_checkpoint", "true"),
    )
    assert code == 0
    history = [
        [(entry["loss"], entry["learning_rate"]) for entry in trainer_state(folder)["log_history"] if "loss" in entry]
        for folder in (run, copied)
    ]
    assert history[0] == history[1]
    before, after = (load_file(folder / "checkpoint-30" / "model.safetensors") for folder in (run, copied))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_finished_run_that_is_resumed_keeps_its_record_and_results(tmp_path, run, files):
    copied = tmp_path / "model"
    shutil.copytree(run, copied)
    settings = [*SMALL, *QUICK, "--eval_steps", "15", "--max_steps", "30", "--tokens_per_batch", "300"]
    settings += ["--learning_rate", "0.01", "--output_dir", copied, "--resume_from_checkpoint", "true"]
    assert train(*flags(files), *settings) == 0
    before, after = (TrainingRun.load(folder) for folder in (run, copied))
    for name in ("updates", "target_tokens", "seconds", "train_loss"):
        assert getattr(after, name) == getattr(before, name) is not None, name
    before, after = (json.loads((folder / "train_results.json").read_text()) for folder in (run, copied))
    assert after == before


def test_a_run_cannot_be_resumed_in_another_shape(capsys, tmp_path, run, files):
    copied = tmp_path / "model"
    shutil.copytree(run, copied)
    wider = [*SMALL[:3], *("d_model=24" if each == "d_model=16" else each for each in SHAPE), "--vocab_size", "300"]
    capsys.readouterr()
    settings = [*QUICK, "--max_steps", "40", "--output_dir", copied, "--resume_from_checkpoint", "true"]
    assert train(*flags(files), *wider, *settings) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "cannot resume from" in errors[0]
    assert "the shape of a run (preset, config_overrides, vocabulary) cannot change" in errors[0]


def test_fine_tuning_keeps_vocabulary_and_configuration(tmp_path, run, files):
    output = tmp_path / "tuned"
    arguments = ["--model", run, *QUICK, "--max_steps", "2", "--learning_rate", "0.001", "--output_dir", output]
    assert train(*flags(files), *arguments) == 0
    old, new = (AutoModelForSeq2SeqLM.from_pretrained(folder) for folder in (run, output))
    assert (run / "tokenizer.json").read_bytes() == (output / "tokenizer.json").read_bytes()
    changed = {name for name, value in old.config.to_dict().items() if new.config.to_dict()[name] != value}
    assert changed <= {"_name_or_path", "transformers_version"}
    distances = [(value - new.state_dict()[name]).abs().max().item() for name, value in old.state_dict().items()]
    assert 0 < max(distances) < 0.02  # two small steps away from the old weights, not anywhere


def test_a_fine_tuned_model_tells_of_its_base(tmp_path, run, files):
    """Languages, preset and overrides are the base's where the command line names none."""
    base = tmp_path / "base"
    shutil.copytree(run, base, ignore=shutil.ignore_patterns("checkpoint-*"))
    record = TrainingRun.load(base)
    record.source_lang, record.target_lang = "en", "de"
    record.save(base)
    arguments = ["--model", base, *QUICK, "--max_steps", "1", "--learning_rate", "0.001", "--save_strategy", "no"]
    assert train(*flags(files), *arguments, "--output_dir", tmp_path / "tuned") == 0
    tuned = TrainingRun.load(tmp_path / "tuned")
    assert (tuned.source_lang, tuned.target_lang, tuned.preset, tuned.base_model) == (
        *("en", "de", "tiny"),
        "base (a local folder)",
    )
    assert tuned.config_overrides == record.config_overrides == SHAPE
    given = ["--source_lang", "fr", "--target_lang", "it"]
    assert train(*flags(files), *arguments, *given, "--output_dir", tmp_path / "other") == 0
    assert TrainingRun.load(tmp_path / "other").source_lang == "fr"
    (base / "training_run.json").write_text("[]")  # a record that nobody can read is no reason not to train
    assert train(*flags(files), *arguments, "--output_dir", tmp_path / "unknown") == 0
    assert TrainingRun.load(tmp_path / "unknown").source_lang is None


def test_a_tokenizer_can_be_brought_along(tmp_path, run, files):
    output = tmp_path / "model"
    shape = ["--preset", "tiny", "--config_overrides", *SHAPE]
    code = train(*flags(files), *shape, "--tokenizer", run, *QUICK, "--max_steps", "1", "--output_dir", output)
    assert code == 0
    assert (run / "tokenizer.json").read_bytes() == (output / "tokenizer.json").read_bytes()


def test_pairs_beyond_learned_positions_are_dropped_and_the_tokenizer_knows_the_limit(tmp_path):
    long = ("one train . " * 30, "ein Zug . " * 30)
    text = {
        f"--train_{side}": write_lines(tmp_path / side, [pair[index] for pair in [*PAIRS[:20], long]])
        for index, side in enumerate(("source", "target"))
    }
    learned = ["position_embedding=learned", "max_position_embeddings=24"]
    shape = ["--preset", "tiny", "--config_overrides", *SHAPE, *learned, "--vocab_size", "300"]
    output = tmp_path / "model"
    assert train(*flags(text), *shape, *QUICK, "--num_train_epochs", "1", "--output_dir", output) == 0
    model, tokenizer = load_translator(output)
    assert tokenizer.model_max_length == 24
    assert len(list(translate_lines(model, tokenizer, [PAIRS[0][0], long[0]], num_beams=1))) == 2


@pytest.fixture(scope="module")
def local_dataset(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("dataset") / "pairs.jsonl"
    rows = [{"translation": {"en": source, "de": target}} for source, target in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_local_dataset_takes_the_place_of_files(tmp_path, local_dataset):
    output = tmp_path / "model"
    code = train(
        *("--dataset", local_dataset, "--source_lang", "en", "--target_lang", "de", "--train_split", "train[:80]"),
        *("--validation_split", "train[80:]", *SMALL, *QUICK, "--max_steps", "2", "--output_dir", output),
    )
    assert code == 0
    assert "eval_bleu" in json.loads((output / "eval_results.json").read_text())


@pytest.mark.parametrize("max_steps", [9, 10, 11])
def test_a_finished_run_that_is_resumed_trains_no_further(files, tmp_path, max_steps):
    common = [*flags(files, "--train"), *SMALL, *QUICK, "--tokens_per_batch", "300", "--max_steps", max_steps]
    common += ["--save_strategy", "steps", "--save_steps", "4", "--output_dir", tmp_path / "model"]
    assert train(*common) == 0
    finished = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()  # as if killed before the model was saved
    assert train(*common, "--resume_from_checkpoint", "true") == 0
    assert trainer_state(tmp_path / "model")["global_step"] == max_steps
    resumed = load_file(tmp_path / "model" / "model.safetensors")
    assert resumed.keys() == finished.keys()
    assert all(torch.equal(resumed[name], finished[name]) for name in resumed)


# --- Recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_comes_along_can_be_read(tmp_path, path):
    """By file and by name; every value arrives as it stands in the file."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    files = []
    if "dataset" not in settings:  # a recipe for files that the reader names
        for name in ("train_source", "train_target", "validation_source", "validation_target"):
            (tmp_path / name).write_text("a\n", encoding="utf-8")
            files += [f"--{name}", str(tmp_path / name)]
    for name in (str(path), path.stem):
        arguments, training_arguments = parse(["--recipe", name, "--output_dir", str(tmp_path / "out"), *files])
        for field, value in settings.items():
            arrived = getattr(arguments if hasattr(arguments, field) else training_arguments, field)
            assert getattr(arrived, "value", arrived) == value, field
    assert not (tmp_path / "out").exists()


def test_there_are_the_recipes_that_are_promised():
    assert {path.stem for path in RECIPES} == {"multi30k_tiny", "multi30k_tokenized", "wmt14_base", "wmt14_big"}
    for path in RECIPES:
        assert read_recipe(path.stem) == yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture
def recipe(tmp_path, local_dataset) -> str:
    settings = {
        "dataset": local_dataset,
        "dataset_config": None,
        "source_lang": "en",
        "target_lang": "de",
        "train_split": "train[:80]",
        "validation_split": "train[80:]",
        "preset": "tiny",
        "config_overrides": SHAPE,
        "vocab_size": 300,
        "tokens_per_batch": 300,
        "learning_rate": "5e-3",
        "warmup_steps": 7,
        "max_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "chrf",
        "generation_num_beams": 1,
        "lr_scheduler_kwargs": {},
    }
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)


def parsed(*arguments) -> tuple:
    return parse([str(argument) for argument in arguments])


def test_a_recipe_of_ones_own_runs(tmp_path, recipe):
    output = tmp_path / "model"
    assert train("--recipe", recipe, "--output_dir", output) == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(output).config.d_model == 16
    assert trainer_state(output)["global_step"] == 2
    assert "eval_bleu" in json.loads((output / "eval_results.json").read_text())


def test_the_command_line_comes_before_the_recipe_and_the_recipe_before_the_defaults(tmp_path, recipe):
    arguments, training_arguments = parsed("--recipe", recipe, "--output_dir", tmp_path / "out")
    assert (arguments.preset, arguments.config_overrides, arguments.vocab_size) == ("tiny", SHAPE, 300)
    assert (training_arguments.tokens_per_batch, training_arguments.learning_rate) == (300, 0.005)
    assert training_arguments.metric_for_best_model == "chrf"
    arguments, training_arguments = parsed(
        *("--recipe", recipe, "--output_dir", tmp_path / "out", "--vocab_size", 280, "--max-steps", 9),
        *("--tokens_per_batch=99", "--no_predict_with_generate", "--metric_for_best_model", "loss"),
    )
    assert arguments.vocab_size == 280
    assert arguments.config_overrides == SHAPE
    assert (training_arguments.max_steps, training_arguments.tokens_per_batch) == (9, 99)
    assert training_arguments.predict_with_generate is False
    assert training_arguments.metric_for_best_model == "loss"


def test_local_files_take_the_place_of_the_recipes_dataset(tmp_path, recipe, files):
    output = tmp_path / "out"
    arguments, training_arguments = parsed("--recipe", recipe, "--output_dir", output, *flags(files))
    assert arguments.dataset is None
    assert arguments.validation_split is None
    assert arguments.train_source == [files["--train_source"]]
    assert arguments.validation_target == [files["--validation_target"]]
    assert training_arguments.eval_strategy == "steps"
    arguments, training_arguments = parsed("--recipe", recipe, "--output_dir", output, *flags(files, "--train"))
    assert arguments.validation_source is arguments.validation_split is None
    assert training_arguments.eval_strategy == "no"
    arguments, _ = parsed("--recipe", recipe, "--output_dir", output, *flags(files, "--validation"))
    assert arguments.dataset is not None
    assert arguments.validation_split is None
    assert arguments.validation_source == [files["--validation_source"]]


def test_another_dataset_takes_the_place_of_the_recipes_files(tmp_path, files, local_dataset):
    path = tmp_path / "files.yaml"
    named = {flag.removeprefix("--"): name for flag, name in files.items()}  # one file, not a list of one
    path.write_text(yaml.safe_dump({**named, "dataset_config": "de-en"}), encoding="utf-8")
    output = tmp_path / "out"
    arguments, _ = parsed("--recipe", path, "--output_dir", output, "--dataset", local_dataset)
    assert (arguments.dataset, arguments.dataset_config, arguments.train_source) == (local_dataset, None, None)
    path.write_text(yaml.safe_dump(named), encoding="utf-8")
    arguments, _ = parsed("--recipe", path, "--output_dir", output)
    assert arguments.train_source == [files["--train_source"]]


def test_batches_of_sentences_replace_batches_of_tokens_wherever_they_are_asked_for(tmp_path, recipe):
    common = ("--output_dir", tmp_path / "out")
    _, args = parsed("--recipe", recipe, *common, "--per_device_train_batch_size", 16)
    assert (args.tokens_per_batch, args.per_device_train_batch_size) == (None, 16)
    settings = yaml.safe_load(Path(recipe).read_text())
    del settings["tokens_per_batch"]
    Path(recipe).write_text(yaml.safe_dump({**settings, "per_device_train_batch_size": 16}))
    _, args = parsed("--recipe", recipe, *common)
    assert (args.tokens_per_batch, args.per_device_train_batch_size) == (None, 16)
    _, args = parsed("--recipe", recipe, *common, "--tokens_per_batch", 99)
    assert args.tokens_per_batch == 99
    Path(recipe).write_text(yaml.safe_dump({**settings, "per_device_train_batch_size": 16, "tokens_per_batch": 5}))
    with pytest.raises(ValueError, match="exclude each other"):
        parsed("--recipe", recipe, *common)


def test_resuming_can_be_denied_and_a_checkpoint_named(tmp_path, run, files):
    common = [*flags(files), "--output_dir", tmp_path / "out", "--resume_from_checkpoint"]
    assert parsed(*common, "false")[1].resume_from_checkpoint is None
    checkpoint = str(run / "checkpoint-15")
    assert parsed(*common, checkpoint)[1].resume_from_checkpoint == checkpoint


def test_fields_of_the_configuration_are_given_by_name(tmp_path, files):
    arguments, _ = parsed(
        *(*flags(files), "--output_dir", tmp_path / "out", "--preset", "tiny", "--config_overrides"),
        *("layer_norm_eps=1e-6", "norm_first=true", "d_k=8", "d_v=null", "activation=gelu", "dropout=0"),
    )
    config = new_config(arguments, vocab_size=300)
    assert (config.layer_norm_eps, config.norm_first, config.d_k, config.d_v) == (1e-6, True, 8, None)
    assert (config.activation, config.dropout, config.d_model, config.vocab_size) == ("gelu", 0, 128, 300)


def test_without_further_settings_the_papers_updates_and_the_best_bleu_of_the_epochs(tmp_path, files):
    _, args = parsed(*flags(files), "--output_dir", tmp_path / "out")
    assert (args.max_steps, args.warmup_steps, args.adam_beta2, args.learning_rate) == (100_000, 4000, 0.98, None)
    assert (args.eval_strategy, args.save_strategy, args.load_best_model_at_end) == ("epoch", "epoch", True)
    assert (args.metric_for_best_model, args.greater_is_better) == ("bleu", True)
    _, args = parsed(*flags(files), "--output_dir", tmp_path / "out", "--no_predict_with_generate")
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    _, args = parsed(*flags(files, "--train"), "--output_dir", tmp_path / "out", "--num_train_epochs", 3)
    assert (args.max_steps, args.num_train_epochs, args.eval_strategy) == (-1, 3, "no")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # given: evaluate, save, after how many updates each, keep the best
        ("--eval_strategy steps --eval_steps 50", ("steps", "steps", 50, 50, True)),
        ("--eval_steps 50", ("steps", "steps", 50, 50, True)),
        ("--save_steps 50", ("steps", "steps", 50, 50, True)),
        ("--save_strategy steps --logging_steps 20", ("steps", "steps", 20, 20, True)),
        ("--eval_steps 50 --save_steps 100", ("steps", "steps", 50, 100, False)),
        ("--eval_steps 50 --save_steps 70", ("steps", "steps", 50, 70, False)),
        ("--eval_strategy steps --eval_steps 50 --save_strategy epoch", ("steps", "epoch", 50, 500, False)),
        ("--save_strategy epoch", ("epoch", "epoch", None, 500, True)),
        ("--eval_steps 50 --save_strategy best", ("steps", "best", 50, 500, True)),
        ("--eval_steps 50 --save_strategy no", ("steps", "no", 50, 500, False)),
        ("--eval_steps 10 --save_steps 0.5", ("steps", "steps", 10, 0.5, False)),
        ("--eval_strategy no", ("no", "steps", None, 500, False)),
        ("--eval_steps 50 --load_best_model_at_end false", ("steps", "steps", 50, 50, False)),
    ],
)
def test_what_is_given_of_evaluating_and_saving_holds_for_both_and_the_best_is_kept(
    tmp_path, files, caplog, monkeypatch, given, expected
):
    """And where they are given so that the best cannot be kept, that is said."""
    monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
    _, args = parsed(*flags(files), "--output_dir", tmp_path / "out", *given.split())
    found = (args.eval_strategy, args.save_strategy, args.eval_steps, args.save_steps, args.load_best_model_at_end)
    assert found == expected
    told = "the last model will be kept, not the best" in caplog.text
    assert told == (not expected[-1] and "load_best" not in given and expected[0] != "no")


@pytest.mark.parametrize(
    "written, expected",
    [
        ("eval_strategy: no\nsave_strategy: no\n", ("no", "no", False)),
        ("eval_strategy: null\neval_steps: 10\n", ("steps", "steps", True)),
        ("load_best_model_at_end: null\neval_steps: 10\n", ("steps", "steps", True)),
    ],
)
def test_a_recipe_may_say_no_or_leave_open(tmp_path, files, written, expected):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(written)
    _, args = parsed(*flags(files), "--output_dir", tmp_path / "out", "--recipe", recipe)
    assert (args.eval_strategy, args.save_strategy, args.load_best_model_at_end) == expected


def test_a_recipe_with_a_list_for_a_number_is_refused(capsys, tmp_path, files):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("eval_steps: [10]\n")
    assert "--eval_steps must be a number above 0" in refused(capsys, tmp_path, *flags(files), "--recipe", recipe)


def test_a_fine_tuning_run_that_is_resumed_still_tells_of_its_base(tmp_path, run, files):
    common = [
        *QUICK,
        "--learning_rate",
        "0.001",
        "--save_steps",
        "1",
        "--eval_strategy",
        "no",
        "--save_strategy",
        "steps",
    ]
    common += ["--output_dir", tmp_path / "tuned"]
    assert train(*flags(files), "--model", run, "--max_steps", "1", *common) == 0
    assert train(*flags(files), *SMALL, "--max_steps", "2", *common, "--resume_from_checkpoint", "true") == 0
    assert TrainingRun.load(tmp_path / "tuned").base_model == f"{run.name} (a local folder)"


def test_a_warm_up_that_is_too_short_for_equation_3_is_told(tmp_path, files, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
    common = [*flags(files, "--train"), *SMALL, *QUICK, "--max_steps", "1", "--save_strategy", "no"]
    assert train(*common, "--output_dir", tmp_path / "short") == 0
    assert "peaks at 0.079 after 10 updates" in caplog.text  # (16 * 10) ** -0.5
    caplog.clear()
    assert train(*common, "--warmup_steps", "1000", "--output_dir", tmp_path / "long") == 0
    assert "peaks" not in caplog.text


# --- A user's mistakes: one line, exit code 2, nothing written -------------------------------------------------------


def refused(capsys, tmp_path: Path, *arguments, output: Path | None = None) -> str:
    """The one line on standard error of a command that must be refused and must leave no trace."""
    output = output or tmp_path / "never"
    before = snapshot(tmp_path)
    capsys.readouterr()
    # One update at most, should the command not be refused.
    assert train("--max_steps", "1", *arguments, "--output_dir", output) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("vanilla-transformer train: error: ")
    assert snapshot(tmp_path) == before
    return lines[0]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def changed_files(files: dict[str, str], **paths) -> list[str]:
    return flags({**files, **{f"--{name}": str(path) for name, path in paths.items()}})


def test_a_missing_file(capsys, tmp_path, files):
    message = refused(capsys, tmp_path, *changed_files(files, train_target=tmp_path / "missing.de"), *SMALL)
    assert "--train_target" in message
    assert str(tmp_path / "missing.de") in message


def test_a_folder_in_the_place_of_a_file(capsys, tmp_path, files):
    assert str(tmp_path) in refused(capsys, tmp_path, *changed_files(files, validation_source=tmp_path), *SMALL)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_unequal_numbers_of_lines(capsys, tmp_path, files, part):
    write_lines(tmp_path / "short", ["eins", "zwei", "drei"])
    message = refused(capsys, tmp_path, *changed_files(files, **{f"{part}_target": tmp_path / "short"}), *SMALL)
    assert str(80 if part == "train" else 10) in message
    assert "3" in message
    assert str(tmp_path / "short") in message


@pytest.mark.parametrize("part", ["train", "validation"])
def test_broken_utf8(capsys, tmp_path, files, part):
    lines = Path(files[f"--{part}_source"]).read_bytes().splitlines(keepends=True)
    lines[4] = b"caf\xe9 caf\xe9\n"
    (tmp_path / "latin").write_bytes(b"".join(lines))
    message = refused(capsys, tmp_path, *changed_files(files, **{f"{part}_source": tmp_path / "latin"}), *SMALL)
    assert f"{tmp_path / 'latin'}, line 5" in message


def test_empty_files(capsys, tmp_path, files):
    (tmp_path / "empty").write_bytes(b"")
    paths = {"train_source": tmp_path / "empty", "train_target": tmp_path / "empty"}
    assert str(tmp_path / "empty") in refused(capsys, tmp_path, *changed_files(files, **paths), *SMALL)
    message = refused(capsys, tmp_path, *changed_files(files, train_source=tmp_path / "empty"), *SMALL)
    assert "80" in message


def test_blank_files(capsys, tmp_path):
    blank = write_lines(tmp_path / "blank", ["", "  ", ""])
    refused(capsys, tmp_path, "--train_source", blank, "--train_target", blank, *SMALL)


def test_an_output_folder_that_is_a_file(capsys, tmp_path, files):
    (tmp_path / "file").write_text("precious")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refused(capsys, tmp_path, *flags(files), *SMALL, output=output)
        assert str(tmp_path / "file") in message
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("kept", ["model.safetensors", "config.json", "model-00001-of-00002.safetensors"])
def test_an_output_folder_that_holds_a_model(capsys, tmp_path, files, kept):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / kept).write_text("precious")
    message = refused(capsys, tmp_path, *flags(files), *SMALL, output=tmp_path / "model")
    assert f"train the model further into another one (--model {tmp_path / 'model'})" in message


def test_an_output_folder_that_holds_a_run(capsys, tmp_path, files, run):
    copied = tmp_path / "model"
    copied.mkdir()
    shutil.copytree(run / "checkpoint-15", copied / "checkpoint-15")
    message = refused(capsys, tmp_path, *flags(files), *SMALL, output=copied)
    assert "--resume_from_checkpoint true" in message
    shown = refused(capsys, tmp_path, *flags(files), *SMALL, "--resume_from_checkpoint", "false", output=copied)
    assert shown == message


def test_an_output_folder_of_a_recipe_is_looked_at_too(capsys, tmp_path, files):
    (tmp_path / "file").write_text("precious")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "file")}))
    assert train(*flags(files), *SMALL, "--recipe", path) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_nothing_to_resume_from(capsys, tmp_path, files):
    (tmp_path / "model").mkdir()
    for resume in ("true", tmp_path / "model" / "checkpoint-5"):
        for output in (tmp_path / "model", tmp_path / "missing"):
            message = refused(
                capsys, tmp_path, *flags(files), *SMALL, "--resume_from_checkpoint", resume, output=output
            )
            assert "--resume_from_checkpoint" in message


WRONG_ARGUMENTS = {
    "heads that do not divide": (["--config_overrides", "d_model=16", "num_heads=3"], ["d_model=16", "num_heads=3"]),
    "unknown preset": (["--preset", "huge"], ["huge", "base", "tiny"]),
    "unknown field": (["--config_overrides", "width=3"], ["width=3"]),
    "field without value": (["--config_overrides", "d_model"], ["NAME=VALUE"]),
    "field of another type": (["--config_overrides", "d_model=wide"], ["d_model"]),
    "field that is no YAML": (["--config_overrides", "activation=[gelu"], ["activation"]),
    "vocabulary as a field": (["--config_overrides", "vocab_size=9"], ["vocab_size"]),
    "vocabulary too small": (["--vocab_size", "100"], ["259", "100"]),
    "unknown flag": (["--widht", "3"], ["--widht"]),
    "abbreviated flag": (["--max_step", "3"], ["--max_step"]),
    "no number": (["--max_steps", "many"], ["--max_steps", "many"]),
    "unknown schedule": (["--lr_scheduler_type", "nosuch"], ["nosuch"]),
    "both kinds of batches": (
        ["--tokens_per_batch", "500", "--per_device_train_batch_size", "8"],
        ["--tokens_per_batch", "--per_device_train_batch_size"],
    ),
    "no tokens": (["--tokens_per_batch", "0"], ["tokens_per_batch"]),
    "no updates between evaluations": (["--eval_steps", "0"], ["--eval_steps must be a number above 0, got 0"]),
    "fewer than none": (["--save_steps", "-5"], ["--save_steps must be a number above 0, got -5"]),
    "best of nothing": (["--save_strategy", "best", "--eval_strategy", "no"], ["saves nothing without an evaluation"]),
    "stock smoothing": (["--label_smoothing_factor", "0.1"], ["label_smoothing_factor", "config_overrides"]),
    "unknown recipe": (["--recipe", "nosuch"], ["nosuch", "multi30k_tiny", "wmt14_base"]),
    "unknown metric": (["--metric_for_best_model", "blue"], ["blue", "bleu"]),
    "dataset and files": (["--dataset", "x/y"], ["--dataset", "--train_source"]),
    "split without a dataset": (["--validation_split", "validation"], ["--validation_split"]),
    "no warm-up": (["--warmup_steps", "0"], ["warmup_steps", "learning_rate"]),
    "missing model": (["--model", "/no/such/folder"], ["/no/such/folder"]),
    "missing tokenizer": (["--tokenizer", "/no/such/folder"], ["/no/such/folder"]),
    "model and tokenizer": (["--model", "x/y", "--tokenizer", "x/y"], ["--model", "--tokenizer"]),
    "model and preset": (["--model", "x/y", "--preset", "tiny"], ["--model", "--preset"]),
    "model and vocabulary": (["--model", "x/y", "--vocab_size", "300"], ["--model", "--vocab_size"]),
}


@pytest.mark.parametrize("arguments, told", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments(capsys, tmp_path, files, arguments, told):
    message = refused(capsys, tmp_path, *flags(files), *arguments)
    for part in told:
        assert part in message


WRONG_CHOICES = {
    "no data": ([], ["--train_source", "--train_target", "--dataset"]),
    "half of the data": (["--train_source"], ["--train_target"]),
    "half of the validation": (["--train_source", "--train_target", "--validation_source"], ["--validation_target"]),
}


@pytest.mark.parametrize("kept, told", WRONG_CHOICES.values(), ids=WRONG_CHOICES)
def test_missing_arguments(capsys, tmp_path, files, kept, told):
    message = refused(capsys, tmp_path, *[item for flag in kept for item in (flag, files[flag])])
    for part in told:
        assert part in message


@pytest.mark.parametrize(
    "given", ["--eval_strategy epoch", "--eval_steps 5", "--metric_for_best_model bleu", "--save_strategy best"]
)
def test_evaluation_without_a_validation_set(capsys, tmp_path, files, given):
    message = refused(capsys, tmp_path, *flags(files, "--train"), *SMALL, *given.split())
    assert given.split()[0] in message
    assert "--validation_source" in message


def test_the_output_folder_must_be_named(capsys, files):
    assert train(*flags(files)) == 2
    assert "--output_dir is missing" in capsys.readouterr().err


WRONG_RECIPES = {
    "unknown settings": ("max_step: 3\nprest: tiny\n", ["max_step", "prest"]),
    "no number": ("max_steps: many\n", ["max_steps", "many"]),
    "part of a number": ("max_steps: 1.5\n", ["max_steps", "1.5"]),
    "no truth value": ("bf16: perhaps\n", ["bf16", "perhaps"]),
    "a list for a number": ("max_steps: [1, 2]\n", ["2"]),
    "no mapping": ("- tiny\n", ["NAME: VALUE"]),
    "empty": ("", ["NAME: VALUE"]),
    "no YAML": ("preset: [tiny\n", ["YAML"]),
}


@pytest.mark.parametrize("text, told", WRONG_RECIPES.values(), ids=WRONG_RECIPES)
def test_wrong_recipes_are_refused_by_name(capsys, tmp_path, files, text, told):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    message = refused(capsys, tmp_path, *flags(files), "--recipe", path)
    for part in (str(path), *told):
        assert part in message


def test_a_sentence_longer_than_a_batch_can_be_mended_and_the_command_given_again(capsys, tmp_path, files):
    output = tmp_path / "model"
    common = [*flags(files), *SMALL, *QUICK, "--max_steps", "1", "--output_dir", output]
    assert train(*common, "--tokens_per_batch", "5") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vanilla-transformer train: error: ")
    assert "tokens_per_batch=5" in error
    assert train(*common, "--tokens_per_batch", "500") == 0


def test_a_recipe_that_is_not_utf8(capsys, tmp_path, files):
    (tmp_path / "wrong.yaml").write_bytes(b"preset: \xff\xfe\n")
    assert "wrong.yaml" in refused(capsys, tmp_path, *flags(files), "--recipe", tmp_path / "wrong.yaml")


def test_a_dataset_without_the_language_asked_for(capsys, tmp_path, local_dataset):
    message = refused(
        capsys, tmp_path, "--dataset", local_dataset, "--source_lang", "en", "--target_lang", "fr", *SMALL
    )
    assert "'fr'" in message
    assert "'de'" in message


def test_a_dataset_that_does_not_exist(capsys, tmp_path):
    assert "missing.jsonl" in refused(capsys, tmp_path, "--dataset", tmp_path / "missing.jsonl", *SMALL)


# --- In a process of its own -----------------------------------------------------------------------------------------


def in_a_process(*arguments, timeout: int = 300) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    source = str(Path(vanilla_transformer_cli.__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "vanilla_transformer_cli", "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2_in_a_process_of_its_own(tmp_path, files):
    short = write_lines(tmp_path / "short", ["eins"])
    for arguments in (
        changed_files(files, train_target=short),
        [*flags(files), "--config_overrides", "num_heads=7"],
        [*flags(files), "--recipe", "nosuch"],
    ):
        result = in_a_process(*arguments, "--output_dir", tmp_path / "never")
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.startswith("vanilla-transformer train: error: ")
        assert result.stderr.count("\n") == 1, result.stderr
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_help_names_every_setting_of_ours():
    result = in_a_process("--help")
    assert result.returncode == 0
    assert result.stderr == ""
    for name in ("--recipe", "--preset", "--tokens_per_batch", "--train_source", "--model", "--learning_rate"):
        assert name in result.stdout
    assert "object at 0x" not in result.stdout


@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically_in_a_new_process(tmp_path, files):
    """SIGKILL after the second checkpoint, then --resume_from_checkpoint true; dropout 0.1, accumulation 2."""
    common = [*flags(files), *SMALL, *QUICK, "--tokens_per_batch", "120", "--gradient_accumulation_steps", "2"]
    common += ["--max_steps", "40", "--save_strategy", "steps", "--save_steps", "7", "--logging_steps", "1"]
    whole = in_a_process(*common, "--output_dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killer = (
        "import os, signal, sys\n"
        "from transformers import TrainerCallback\n"
        "from vanilla_transformer.training import VanillaTransformerTrainer\n"
        "class Kill(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs):\n"
        "        if state.global_step == 17:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "init = VanillaTransformerTrainer.__init__\n"
        "def with_killer(self, *args, **kwargs):\n"
        "    init(self, *args, callbacks=[Kill()], **kwargs)\n"
        "VanillaTransformerTrainer.__init__ = with_killer\n"
        "from vanilla_transformer_cli import main\n"
        "sys.exit(main(['train', *sys.argv[1:]]))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(vanilla_transformer_cli.__file__).parent)
    command = [sys.executable, "-c", killer, *common, "--output_dir", str(tmp_path / "killed")]
    assert subprocess.run(command, capture_output=True, timeout=300, env=environment, check=False).returncode == -9
    assert (tmp_path / "killed" / "checkpoint-14").is_dir()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    resumed = in_a_process(*common, "--output_dir", tmp_path / "killed", "--resume_from_checkpoint", "true")
    assert resumed.returncode == 0, resumed.stderr
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    histories = [
        [(entry["loss"], entry["learning_rate"]) for entry in trainer_state(folder)["log_history"] if "loss" in entry]
        for folder in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 40


def launched(processes: int, *arguments) -> str:
    """Standard error of scripts/train.py in one process, or in several under torchrun with gloo, on the processor."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "train.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(vanilla_transformer_cli.__file__).parent)
    command = [sys.executable, str(script)]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *launcher, str(script), "--ddp_backend", "gloo"]
    command += map(str, arguments)
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
def test_two_processes_equal_one_with_accumulation_of_two(tmp_path, files):
    """Dropout 0, float32: losses, scores and weights."""
    common = [*flags(files), *SMALL, *QUICK, "--tokens_per_batch", "200", "--max_steps", "12", "--logging_steps", "1"]
    common += ["--eval_strategy", "steps", "--eval_steps", "6", "--save_strategy", "no", "--learning_rate", "0.001"]
    common[common.index("dropout=0.1")] = "dropout=0.0"
    launched(1, *common, "--gradient_accumulation_steps", "2", "--output_dir", tmp_path / "one")
    told = launched(2, *common, "--output_dir", tmp_path / "two")
    assert "find_unused_parameters" not in told  # torch looks for none, and does not say that there are none
    assert "%|" not in told  # no progress bar in a log
    histories = [trainer_state(tmp_path / name)["log_history"] for name in ("one", "two")]
    for key in ("loss", "learning_rate", "eval_loss", "eval_bleu", "eval_chrf", "eval_generated_length"):
        one, two = ([entry[key] for entry in history if key in entry] for history in histories)
        assert len(one) == (12 if key in ("loss", "learning_rate") else 2)
        assert two == pytest.approx(one, rel=1e-6, abs=1e-6), key
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
def test_two_processes_resume_in_mid_epoch_bit_identically(tmp_path, files):
    """Dropout 0.1, a checkpoint in the second epoch, another output folder."""
    common = [*flags(files, "--train"), *SMALL, *QUICK, "--tokens_per_batch", "200", "--logging_steps", "1"]
    common += ["--max_steps", "14", "--save_strategy", "steps", "--save_steps", "7"]
    launched(2, *common, "--output_dir", tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-7"
    epoch = trainer_state(checkpoint)["epoch"]
    assert epoch > 1
    assert epoch % 1 > 0
    launched(2, *common, "--output_dir", tmp_path / "rest", "--resume_from_checkpoint", checkpoint)
    histories = [
        [entry["loss"] for entry in trainer_state(tmp_path / name)["log_history"] if "loss" in entry]
        for name in ("whole", "rest")
    ]
    assert histories[0] == histories[1]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "rest"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert (tmp_path / "whole" / "tokenizer.json").read_bytes() == (tmp_path / "rest" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--max_source_tokens", "1"], "--max_source_tokens must be"),
        (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps must be"),
        (["--learning_rate", "nan"], "--learning_rate must be"),
        (["--adam_beta1", "2"], "--adam_beta1 must be below 1"),
        (["--data_seed", "-4"], "--data_seed must be"),
        (["--num_train_epochs", "0"], "train nothing"),
        (["--report_to", "no_such_thing"], "no_such_thing"),
        (["--config_overrides", "is_encoder_decoder=false"], "is_encoder_decoder must be True"),
    ],
)
def test_a_number_out_of_range_is_told_before_the_corpus_is_read(arguments, told, tmp_path, capsys):
    for name in ("source", "target"):  # unequal: reading them would be another error
        (tmp_path / name).write_text("one line\n" * (2 if name == "source" else 3), encoding="utf-8")
    output = tmp_path / "output"
    files = ["--train_source", str(tmp_path / "source"), "--train_target", str(tmp_path / "target")]
    assert vanilla_transformer_cli.main(["train", *files, "--output_dir", str(output), *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert told in lines[0]
    assert not output.exists()


def test_resuming_from_another_run_does_not_overwrite_a_model(tmp_path, capsys):
    good, other = tmp_path / "good", tmp_path / "other" / "checkpoint-3"
    good.mkdir()
    other.mkdir(parents=True)
    (good / "config.json").write_text("{}", encoding="utf-8")
    (other / "trainer_state.json").write_text("{}", encoding="utf-8")
    text = tmp_path / "text"
    text.write_text("one line\n", encoding="utf-8")
    files = ["--train_source", str(text), "--train_target", str(text)]
    resume = ["--resume_from_checkpoint", str(other)]
    assert vanilla_transformer_cli.main(["train", *files, "--output_dir", str(good), *resume]) == 2
    assert "holds a model already" in capsys.readouterr().err
    assert [path.name for path in good.iterdir()] == ["config.json"]


# --- Going on with a run ---------------------------------------------------------------------------------------------


def going_on(output: Path, *more: str) -> list[str]:
    """Arguments of the run of the fixture, 40 updates long, which goes on in a copy."""
    strategy = ["--eval_strategy", "steps", "--eval_steps", "20", "--save_strategy", "steps", "--save_steps", "20"]
    settings = ["--tokens_per_batch", "300", "--learning_rate", "0.01", "--max_steps", "40", *strategy]
    return [*QUICK, *settings, "--output_dir", str(output), "--resume_from_checkpoint", "true", *more]


def errors_of(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "error:" in line]


def test_a_checkpoint_without_its_vocabulary_takes_that_of_its_run_and_none_is_learnt_anew(
    capsys, tmp_path, run, files
):
    """Other text would give the same number of words other meanings, and the shapes would not tell."""
    copied = tmp_path / "model"
    shutil.copytree(run, copied)
    (copied / "checkpoint-30" / "tokenizer.json").unlink()
    kept = (copied / "tokenizer.json").read_bytes()
    assert train(*flags(files), *SMALL, *going_on(copied)) == 0
    for folder in (copied, copied / "checkpoint-40"):
        assert (folder / "tokenizer.json").read_bytes() == kept
    for folder in (copied, copied / "checkpoint-40"):
        (folder / "tokenizer.json").unlink()
    before = snapshot(copied)
    capsys.readouterr()
    assert train(*flags(files), *SMALL, *going_on(copied, "--max_steps", "50")) == 2
    (error,) = errors_of(capsys)
    assert f"neither it nor {copied} has the run's tokenizer.json" in error
    assert snapshot(copied) == before
    assert train(*flags(files), *SMALL[:-2], *going_on(copied, "--max_steps", "50"), "--tokenizer", str(run)) == 0


def test_a_run_cannot_go_on_with_another_vocabulary_of_the_same_size(capsys, tmp_path, run, files):
    copied, other = tmp_path / "model", tmp_path / "other"
    shutil.copytree(run, copied)
    AutoTokenizer.from_pretrained(run).train_new_from_iterator(["another text " * 20] * 20, 300).save_pretrained(other)
    capsys.readouterr()
    assert train(*flags(files), *SMALL[:-2], *going_on(copied), "--tokenizer", str(other)) == 2
    (error,) = errors_of(capsys)
    assert f"--tokenizer {other} has another tokenizer than the one it was trained with" in error
    assert train(*flags(files), *SMALL[:-2], *going_on(copied), "--tokenizer", str(run)) == 0


def test_a_run_that_goes_on_with_other_files_or_languages_is_told(capsys, tmp_path, run, files):
    copied, shorter = tmp_path / "model", dict(files)
    shutil.copytree(run, copied)
    for side in ("source", "target"):
        lines = Path(files[f"--train_{side}"]).read_text(encoding="utf-8").splitlines()
        shorter[f"--train_{side}"] = write_lines(tmp_path / f"train.{side}", lines[1:])
    capsys.readouterr()
    assert train(*flags(shorter), *SMALL, *going_on(copied, "--seed", "3")) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "was trained otherwise" in line]
    assert len(told) == 1
    assert "training text of 80 pairs before, 79 now" in told[0]
    assert "seed of the text's order 42 before, 3 now" in told[0]


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_two_runs_do_not_mix_their_files_in_one_folder(capsys, tmp_path, files):
    """The second is refused while the first trains, and leaves everything as it is."""
    output = tmp_path / "model"
    with sole_writer(output, ""):
        before = snapshot(tmp_path)
        capsys.readouterr()
        assert train(*flags(files), *SMALL, *QUICK, "--max_steps", "1", "--output_dir", output) == 2
        (error,) = errors_of(capsys)
        assert f"another run is writing into {output}: wait for its end, or give another --output_dir" in error
        assert snapshot(tmp_path) == before
    assert train(*flags(files), *SMALL, *QUICK, "--max_steps", "1", "--output_dir", output) == 0
