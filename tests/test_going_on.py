"""A run that goes on from a checkpoint is told in what it is another one."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from small_models import small_model
from test_streaming import corpus
from test_training import MANY, RESUME, arguments, random_pairs
from vanilla_transformer.hub import RECORD
from vanilla_transformer.streaming import TokenStream
from vanilla_transformer.training import VanillaTransformerTrainer


@pytest.fixture
def warnings(caplog, monkeypatch):
    """A function: what was warned of since it was called last."""
    monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vanilla_transformer")

    def since_last() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "vanilla_transformer.going_on"]
        caplog.clear()
        return found

    return since_last


PAIRS = random_pairs(MANY * 2)


def trainer_on(folder: Path, dataset, config: dict | None = None, **settings) -> VanillaTransformerTrainer:
    model = small_model(**{"dropout": 0.1, "std": 0.1, **(config or {})})
    given = {**RESUME, "max_steps": 6, "learning_rate": 0.01, **settings}
    both = {"train_dataset": dataset, "eval_dataset": dataset if "eval_strategy" in given else None}
    return VanillaTransformerTrainer(model, arguments(folder, **given), **both)


OTHER = {
    "nothing": ({}, None),
    "more updates, other times to save": ({"max_steps": 9, "save_steps": 3, "logging_steps": 2}, None),
    "accumulation": ({"gradient_accumulation_steps": 1}, "1 x 2 before, 1 x 1 now, --gradient_accumulation_steps 2"),
    "tokens": ({"tokens_per_batch": 60}, "--tokens_per_batch 40 before, 60 now"),
    "seed": ({"seed": 7}, "seed of the text's order 42 before, 7 now"),
    "data_seed": ({"data_seed": 0}, "seed of the text's order 42 before, 0 now"),
    "same seed": ({"seed": 7, "data_seed": 42}, None),
    "warm-up": ({"warmup_steps": 3}, "--warmup_steps 4 before, 3 now"),
    "schedule": ({"lr_scheduler_type": "constant"}, "--lr_scheduler_type inverse_sqrt before, constant now"),
    "another number of updates, for a schedule that ends": (
        {"lr_scheduler_type": "linear", "max_steps": 9},
        "--lr_scheduler_type inverse_sqrt before, linear now; --max_steps 5 before, 9 now",
    ),
    "rows": ({"tokens_per_batch": None, "per_device_train_batch_size": 4}, "--tokens_per_batch 40 before, None now"),
    "a whole number that is written as another": ({"warmup_steps": 4.0, "max_grad_norm": 0}, None),
    "clipping": ({"max_grad_norm": 5.0}, "before, 5.0 now"),
}


@pytest.mark.parametrize("changes, told", OTHER.values(), ids=OTHER)
def test_settings_that_change_the_updates_to_come_are_told(tmp_path, warnings, changes, told):
    trainer_on(tmp_path, PAIRS, max_steps=5).train()
    warnings()
    trainer_on(tmp_path, PAIRS, **changes).train(resume_from_checkpoint=True)
    found = warnings()
    assert len(found) == (told is not None), found
    if told is not None:
        assert told in found[0]
        assert "neither its updates nor its place in the text are those of an undisturbed one" in found[0]


def test_other_text_is_told_also_where_it_has_as_many_pairs(tmp_path, warnings):
    trainer_on(tmp_path, PAIRS, max_steps=5).train()
    warnings()
    trainer_on(tmp_path, random_pairs(MANY * 2, seed=9), max_steps=5).train(resume_from_checkpoint=True)
    assert warnings() == []  # other words, but the same batches: the lengths are what is compared
    order = list(range(len(PAIRS)))
    lengths = [len(row) for row in PAIRS["labels"]]
    other = next(index for index in order if lengths[index] != lengths[0])
    order[0], order[other] = order[other], order[0]
    trainer_on(tmp_path, PAIRS.select(order)).train(resume_from_checkpoint=True)
    (found,) = warnings()
    assert f"another training text of as many pairs ({len(PAIRS)})" in found


def test_text_of_another_length_is_told_with_both_lengths(tmp_path, warnings):
    trainer_on(tmp_path, PAIRS, max_steps=5).train()
    warnings()
    trainer_on(tmp_path, PAIRS.select(range(1, len(PAIRS)))).train(resume_from_checkpoint=True)
    (found,) = warnings()
    assert f"training text of {len(PAIRS)} pairs before, {len(PAIRS) - 1} now" in found


def test_a_field_of_the_configuration_that_leaves_the_shapes_alone_is_told(tmp_path, warnings):
    trainer_on(tmp_path, PAIRS, max_steps=5).train()
    warnings()
    changed = {"dropout": 0.3, "activation": "gelu", "use_cache": False}
    trainer_on(tmp_path, PAIRS, changed).train(resume_from_checkpoint=True)
    (found,) = warnings()
    assert "dropout=0.1 in its configuration before, 0.3 now" in found
    assert 'activation="relu" in its configuration before, "gelu" now' in found
    assert "use_cache" not in found


def test_what_the_checkpoint_decides_is_told_and_stays(tmp_path, warnings):
    """The states of the optimizer and the schedule bring their own numbers along."""
    trainer_on(tmp_path, PAIRS, max_steps=5).train()
    warnings()
    trainer = trainer_on(tmp_path, PAIRS, learning_rate=0.5, adam_beta2=0.9, weight_decay=0.1)
    trainer.train(resume_from_checkpoint=True)
    (found,) = warnings()
    assert "--learning_rate 0.01 before, 0.5 now" in found
    assert "--adam_beta2 0.98 before, 0.9 now" in found
    assert "--weight_decay 0.0 before, 0.1 now" in found
    group = trainer.optimizer.param_groups[0]
    assert (group["betas"][1], group["weight_decay"]) == (0.98, 0.0)
    assert trainer.state.log_history[-2]["learning_rate"] == pytest.approx(
        0.01 * math.sqrt(RESUME["warmup_steps"] / 6)
    )


def test_a_stream_among_other_processes_is_other_text(tmp_path, tiny_tokenizer, warnings):
    """Each process reads every so manieth pair: with another number of them none finds its place again."""
    config = {"vocab_size": len(tiny_tokenizer), "dropout": 0.0}
    stream = TokenStream([corpus(tmp_path)], tiny_tokenizer, buffer_size=64)
    trainer_on(tmp_path, stream, config, max_steps=5).train()
    record = json.loads((tmp_path / "checkpoint-5" / RECORD).read_text())
    record["processes"], record["arguments"]["gradient_accumulation_steps"] = 2, 1
    (tmp_path / "checkpoint-5" / RECORD).write_text(json.dumps(record))
    warnings()
    trainer_on(tmp_path, stream, config).train(resume_from_checkpoint=True)
    (found,) = warnings()
    assert "a stream divided among 2 processes before, 1 now" in found


def test_of_a_corpus_in_memory_another_number_of_processes_makes_the_same_batches(tmp_path, warnings):
    trainer_on(tmp_path, PAIRS, {"dropout": 0.0}, max_steps=5).train()
    record = json.loads((tmp_path / "checkpoint-5" / RECORD).read_text())
    record["processes"] = 2
    record["arguments"]["gradient_accumulation_steps"] = 1
    (tmp_path / "checkpoint-5" / RECORD).write_text(json.dumps(record))
    warnings()
    trainer_on(tmp_path, PAIRS, {"dropout": 0.0}).train(resume_from_checkpoint=True)
    assert warnings() == []


def worst_is_best(folder: Path, **settings) -> VanillaTransformerTrainer:
    """A run of 6 updates that keeps the model of the highest loss, which is that of the first evaluation."""
    by_loss = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "predict_with_generate": False}
    return trainer_on(folder, PAIRS, **{**by_loss, **steps, **settings})


@pytest.mark.parametrize("there_is_another", [False, True], ids=["moved", "another run at the old place"])
def test_a_run_that_was_moved_keeps_its_best_model(tmp_path, there_is_another):
    """Its state names the best checkpoint by the place where it was then."""
    first = worst_is_best(tmp_path / "a")
    first.train()
    assert Path(first.state.best_model_checkpoint).name == "checkpoint-2"
    best = load_file(tmp_path / "a" / "checkpoint-2" / "model.safetensors")
    shutil.move(tmp_path / "a", tmp_path / "b")
    if there_is_another:
        shutil.copytree(tmp_path / "b" / "checkpoint-6", tmp_path / "a" / "checkpoint-2")
    again = worst_is_best(tmp_path / "b")
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(tmp_path / "b" / "checkpoint-2")
    kept = again.model.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in best.items())
    last = load_file(tmp_path / "b" / "checkpoint-6" / "model.safetensors")
    assert not all(torch.equal(kept[name], value) for name, value in last.items())


def test_a_best_update_that_was_not_saved_leaves_the_best_of_those_that_were(tmp_path):
    """Evaluated at each update and saved at every other: the best of all need not have a checkpoint."""
    settings = {"eval_steps": 1, "save_steps": 2, "save_total_limit": 2}
    steady = {"greater_is_better": False, "learning_rate": 1e-9, "warmup_steps": 1}  # the loss hardly changes
    values = {1: 5.0, 2: 1.0, 3: 0.5, 4: 4.0, 5: 4.1, 6: 4.2}

    def run(folder: Path, resume: bool, updates: int) -> VanillaTransformerTrainer:
        trainer = worst_is_best(folder, **settings, **steady, max_steps=updates)
        evaluate = trainer.evaluate

        def with_these_values(*args, **options):
            metrics = evaluate(*args, **options)
            metrics["eval_loss"] = values[trainer.state.global_step]
            return metrics

        trainer.evaluate = with_these_values
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    undisturbed = run(tmp_path / "whole", False, 6)
    run(tmp_path / "parts", False, 4)
    resumed = run(tmp_path / "parts", True, 6)
    for name in ("best_global_step", "best_metric"):
        assert getattr(resumed.state, name) == getattr(undisturbed.state, name), name
    best = Path(undisturbed.state.best_model_checkpoint).name
    assert Path(resumed.state.best_model_checkpoint).name == best == "checkpoint-2"


def test_where_the_best_checkpoint_is_gone_a_later_one_is_kept_and_it_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
    worst_is_best(tmp_path, max_steps=4).train()
    shutil.rmtree(tmp_path / "checkpoint-2")
    again = worst_is_best(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert "checkpoint-2, the best checkpoint so far, is gone" in caplog.text
    assert again.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
