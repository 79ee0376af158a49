"""Training: the schedule, the batches and the evaluation of the trainer, and stock trainers with the model."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import os
import pickle
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import TrainOutput

from conftest import TINY_CORPUS
from small_models import small_model, words
from translators import output_bias, varied_model
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, training
from vanilla_transformer.data import TranslationCollator, tokenize_pairs
from vanilla_transformer.training import (
    CollatorWithItsOwnSeed,
    VanillaTransformerTrainer,
    VanillaTransformerTrainingArguments,
    bfloat16_gain,
    fault_of_checkpoint,
    give_back_freed_memory,
    keep_freed_memory,
    last_whole_checkpoint,
    learning_rate_at,
)


BOS, PAD, EOS = 0, 1, 2
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
BY_SENTENCES = {"tokens_per_batch": None, "per_device_train_batch_size": 8}


def arguments(folder: Path, cls: type = VanillaTransformerTrainingArguments, **settings):
    """Training arguments of a short quiet run without dropout's randomness in the way."""
    return cls(output_dir=str(folder), **{**QUIET, **settings})


def random_pairs(lengths: list[tuple[int, int]], seed: int = 0) -> Dataset:
    """Encoded pairs of random words with (source, target) lengths, end of sentence counted."""
    rows = []
    for number, pair in enumerate(lengths):
        sides = [[*words(length - 1, seed=seed + 2 * number + side).tolist(), EOS] for side, length in enumerate(pair)]
        rows.append({"input_ids": sides[0], "labels": sides[1]})
    return Dataset.from_list(rows)


# Lengths unlike each other on the two sides; 24 sentences.
MANY = [(2 + n * 7 % 11, 2 + n * 5 % 9) for n in range(24)]


class Watch(TrainerCallback):
    """Notes the rate that the optimizer holds just before each update."""

    def __init__(self):
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])


def received_batches(model) -> list[dict[str, torch.Tensor]]:
    """A list that will hold whatever the model's forward is given while it trains."""
    seen: list[dict[str, torch.Tensor]] = []

    def note(module, args, kwargs):
        if module.training:
            seen.append({name: value.clone() for name, value in kwargs.items() if torch.is_tensor(value)})

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def collated(dataset: Dataset) -> dict[str, torch.Tensor]:
    return TranslationCollator(PAD)(list(dataset))


def same_weights(left, right, **tolerance) -> None:
    for name, value in left.state_dict().items():
        torch.testing.assert_close(
            value, right.state_dict()[name], msg=lambda text, n=name: f"{n}: {text}", **tolerance
        )


def token_losses(model, rows: Dataset, label_smoothing: float = 0.0) -> torch.Tensor:
    """The oracle: cross-entropy of every target token from torch itself, one sentence at a time, without padding."""
    losses = []
    for row in rows:
        labels = torch.tensor(row["labels"])
        decoder_input_ids = torch.tensor([[BOS, *row["labels"][:-1]]])
        source = torch.tensor([row["input_ids"]])
        logits = model(input_ids=source, decoder_input_ids=decoder_input_ids).logits[0]
        losses.append(F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing))
    return torch.cat(losses)


# --- The learning rate (section 5.3, equation 3) ---------------------------------------------------------------------


def equation_3(n: int, d_model: int, warmup: int) -> float:
    return (1 / math.sqrt(d_model)) * min(1 / math.sqrt(n), n / math.sqrt(warmup**3))


@pytest.mark.parametrize(
    "update, rate", [(1, 1.746928e-07), (2, 3.493856e-07), (4000, 6.987712e-04), (100_000, 1.397542e-04)]
)
def test_the_rate_is_that_of_equation_3(update, rate):
    """The values of the public report, for the base model."""
    assert learning_rate_at(update, 512, 4000) == pytest.approx(rate, rel=1e-6)
    assert learning_rate_at(update, 512) == pytest.approx(rate, rel=1e-6)
    assert learning_rate_at(update, 256) == pytest.approx(rate * math.sqrt(2), rel=1e-6)
    assert learning_rate_at(update, 512, factor=3.0) == pytest.approx(3 * rate, rel=1e-6)


@pytest.mark.parametrize("update, warmup", [(0, 4000), (-1, 4000), (1, 0)])
def test_updates_and_warm_up_count_from_1(update, warmup):
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate_at(update, 512, warmup)


def wide_model(d_model: int):
    return small_model(d_model=d_model, d_ff=8, encoder_layers=1, decoder_layers=1, std=0.05)


@pytest.mark.parametrize("d_model", [512, 256])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_optimizer_uses_equation_3_at_each_update_whatever_the_accumulation(tmp_path, d_model, accumulation):
    """Read from the optimizer before each step; updates count, not micro-batches."""
    watch = Watch()
    trainer = VanillaTransformerTrainer(
        wide_model(d_model),
        arguments(tmp_path, max_steps=3, gradient_accumulation_steps=accumulation, tokens_per_batch=40),
        train_dataset=random_pairs(MANY),
        callbacks=[watch],
    )
    trainer.train()
    expected = [equation_3(n, d_model, 4000) for n in (1, 2, 3)]
    assert watch.rates == pytest.approx(expected, rel=1e-6)
    assert logged(trainer, "learning_rate") == pytest.approx(expected, rel=1e-6)
    assert watch.rates[0] == pytest.approx(1.746928e-07 * math.sqrt(512 / d_model), rel=1e-6)


def test_the_schedule_holds_for_a_hundred_thousand_updates(tmp_path):
    trainer = VanillaTransformerTrainer(wide_model(512), arguments(tmp_path), train_dataset=random_pairs(MANY))
    trainer.create_optimizer_and_scheduler(100_000)
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    rates = {}
    optimizer.step()
    for update in range(1, 4003):
        rates[update] = optimizer.param_groups[0]["lr"]
        scheduler.step()
    for update in (1, 2, 3999, 4000, 4001):
        assert rates[update] == pytest.approx(equation_3(update, 512, 4000), rel=1e-9)
    assert max(rates, key=rates.__getitem__) == 4000
    for done, rate in ((2_000, equation_3(2_001, 512, 4000)), (99_999, 1.397542e-04)):  # as after a resume
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": done - 1})
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("given, peak", [(None, (16 * 4) ** -0.5), (0.005, 0.005)])
def test_the_peak_is_at_warmup_steps(tmp_path, given, peak):
    """`learning_rate` is the peak; None is the paper's (d_model * warmup_steps) ** -0.5."""
    watch = Watch()
    trainer = VanillaTransformerTrainer(
        small_model(),
        arguments(tmp_path, max_steps=8, warmup_steps=4, learning_rate=given),
        train_dataset=random_pairs(MANY),
        callbacks=[watch],
    )
    trainer.train()
    shape = [0.25, 0.5, 0.75, 1.0, *(math.sqrt(4 / n) for n in (5, 6, 7, 8))]
    assert watch.rates == pytest.approx([peak * share for share in shape], rel=1e-6)


def test_the_rate_goes_on_after_save_and_resume(tmp_path):
    settings = {"warmup_steps": 4, "save_strategy": "steps", "save_steps": 5, "tokens_per_batch": 40}
    whole, rest = Watch(), Watch()
    VanillaTransformerTrainer(
        small_model(),
        arguments(tmp_path, max_steps=7, **settings),
        train_dataset=random_pairs(MANY),
        callbacks=[whole],
    ).train()
    VanillaTransformerTrainer(
        small_model(seed=9),
        arguments(tmp_path, max_steps=7, **settings),
        train_dataset=random_pairs(MANY),
        callbacks=[rest],
    ).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert whole.rates == pytest.approx([equation_3(n, 16, 4) for n in range(1, 8)], rel=1e-6)
    assert rest.rates == whole.rates[5:]


def test_other_schedules_stay_those_of_transformers(tmp_path):
    rates = {}
    for cls in (VanillaTransformerTrainer, Seq2SeqTrainer):
        for schedule in ("linear", "cosine"):
            watch = Watch()
            cls(
                small_model(),
                arguments(
                    tmp_path,
                    Seq2SeqTrainingArguments,
                    max_steps=4,
                    warmup_steps=2,
                    learning_rate=0.01,
                    lr_scheduler_type=schedule,
                ),
                train_dataset=random_pairs(MANY),
                data_collator=TranslationCollator(PAD),
                callbacks=[watch],
            ).train()
            rates[cls, schedule] = watch.rates
    for schedule in ("linear", "cosine"):
        ours, stock = rates[VanillaTransformerTrainer, schedule], rates[Seq2SeqTrainer, schedule]
        assert ours == stock
        assert ours[0] == 0.0  # the stock warm-up, one update late


def test_a_share_as_warm_up_is_that_share_of_the_updates(tmp_path):
    watch = Watch()
    settings = {"max_steps": 8, "warmup_steps": 0.5, "learning_rate": 0.01}
    trainer = VanillaTransformerTrainer(
        small_model(), arguments(tmp_path, **settings), train_dataset=random_pairs(MANY), callbacks=[watch]
    )
    trainer.train()
    assert watch.rates[:5] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01 * math.sqrt(4 / 5)])


@pytest.mark.parametrize("warmup_steps", [0, 0.5])
def test_the_rate_of_the_paper_needs_its_warm_up(tmp_path, warmup_steps):
    with pytest.raises(ValueError, match="learning_rate.*warmup_steps"):
        VanillaTransformerTrainer(small_model(), arguments(tmp_path, warmup_steps=warmup_steps))


def test_training_arguments_serve_models_of_different_width(tmp_path):
    """The rate of equation (3) must not stick to the arguments of the first model that used them."""
    args = arguments(tmp_path, warmup_steps=4)
    for d_model in (16, 64):
        trainer = VanillaTransformerTrainer(small_model(d_model=d_model), args, train_dataset=random_pairs(MANY))
        assert trainer.args.learning_rate == pytest.approx((d_model * 4) ** -0.5)


def test_a_model_may_come_from_model_init(tmp_path):
    watch = Watch()
    trainer = VanillaTransformerTrainer(
        args=arguments(tmp_path, max_steps=2, warmup_steps=4),
        model_init=lambda: small_model(),
        train_dataset=random_pairs(MANY),
        callbacks=[watch],
    )
    trainer.train()
    assert watch.rates == pytest.approx([equation_3(n, 16, 4) for n in (1, 2)], rel=1e-6)


def test_an_optimizer_and_a_schedule_of_the_users_own_are_used(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done))
    watch = Watch()
    VanillaTransformerTrainer(
        model,
        arguments(tmp_path, max_steps=3),
        train_dataset=random_pairs(MANY),
        optimizers=(optimizer, schedule),
        callbacks=[watch],
    ).train()
    assert watch.rates == pytest.approx([0.25, 0.125, 0.25 / 3])


def test_the_defaults_are_the_papers(tmp_path):
    """Section 5.3: Adam with 0.9, 0.98, 1e-9, 4,000 updates of warm-up; no decay, no clipping."""
    trainer = VanillaTransformerTrainer(wide_model(512), arguments(tmp_path), train_dataset=random_pairs(MANY))
    trainer.create_optimizer_and_scheduler(10)
    group = trainer.optimizer.param_groups[0]
    assert isinstance(trainer.optimizer, (torch.optim.Adam, torch.optim.AdamW))
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)
    assert all(each["weight_decay"] == 0 for each in trainer.optimizer.param_groups)
    assert group["initial_lr"] == pytest.approx((512 * 4000) ** -0.5)
    assert trainer.args.max_grad_norm == 0


# --- The loss: accumulation, smoothing, ignored labels ---------------------------------------------------------------


EIGHT = [(length, length + 1) for length in (2, 5, 8, 11)] * 2
SGD = {"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 1}


def one_update(cls, folder: Path, rows: int, accumulation: int, dataset=None, model=None, **settings):
    """The model after one update by plain gradient descent, and the trainer."""
    model = model if model is not None else small_model()
    ours = cls is VanillaTransformerTrainer
    args_class = TrainingArguments if cls is Trainer else Seq2SeqTrainingArguments
    if ours:
        args_class = VanillaTransformerTrainingArguments
        settings = {"tokens_per_batch": None, **settings}
    args = arguments(
        folder,
        args_class,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        **{**SGD, "max_grad_norm": 0.0, **settings},
    )
    trainer = cls(model, args, train_dataset=dataset or random_pairs(EIGHT), data_collator=collator_for(args, model))
    trainer.train()
    return model, trainer


def collator_for(args, model):
    """Ours; with the stock smoothing, which takes the labels away, the stock one that makes decoder inputs."""
    if not args.label_smoothing_factor:
        return TranslationCollator(PAD)
    divides = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    if args.gradient_accumulation_steps > 1 and not divides:
        pytest.skip("transformers below 5.15 does not divide its smoothed loss by accumulation steps, in any model")
    from vanilla_transformer.tokenization import train_tokenizer

    return DataCollatorForSeq2Seq(train_tokenizer(["a"], 259), model=model)


def manual_update(dataset: Dataset, label_smoothing: float, model=None, learning_rate: float = 0.01):
    """One step by hand on the sum of the token losses over the number of tokens; the loss, and the model after it."""
    model = model if model is not None else small_model()
    losses = token_losses(model, dataset, label_smoothing)
    loss = losses.sum() / len(losses)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= learning_rate * parameter.grad
    return loss.item(), model


@pytest.mark.parametrize("rows, accumulation", [(8, 1), (4, 2), (1, 8)])
@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer, Trainer])
def test_accumulation_equals_one_large_batch(tmp_path, cls, rows, accumulation):
    """Same logged loss and weights; the oracle is one manual step over all eight."""
    expected_loss, expected = manual_update(random_pairs(EIGHT), label_smoothing=0.1)
    model, trainer = one_update(cls, tmp_path, rows, accumulation)
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows, accumulation", [(8, 1), (4, 2), (1, 8)])
@pytest.mark.parametrize("cls", [Seq2SeqTrainer, Trainer])
def test_the_stock_label_smoothing_replaces_ours(tmp_path, cls, rows, accumulation):
    """Smoothed once, by 0.3 and not by the configuration's 0.1; accumulation changes nothing."""
    expected_loss, expected = manual_update(random_pairs(EIGHT), label_smoothing=0.3)
    model, trainer = one_update(cls, tmp_path, rows, accumulation, label_smoothing_factor=0.3)
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer, Trainer])
def test_the_logged_gradient_and_the_evaluation_do_not_depend_on_the_accumulation(tmp_path, cls, smoothing):
    """The norm is that of the whole batch's gradient; evaluation is unsmoothed, but by the stock smoothing."""
    stock = {} if cls is VanillaTransformerTrainer else {"label_smoothing_factor": smoothing}
    expected_loss, expected = manual_update(
        random_pairs(EIGHT), smoothing, small_model(label_smoothing=smoothing), learning_rate=0.0
    )
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in expected.parameters()))
    unsmoothed = token_losses(small_model(), random_pairs(EIGHT), stock.get("label_smoothing_factor", 0.0)).mean()
    for rows, accumulation in ((8, 1), (4, 2), (1, 8)):
        model = small_model(label_smoothing=smoothing)
        _, trainer = one_update(
            cls, tmp_path, rows, accumulation, model=model, max_grad_norm=1e9, learning_rate=0.0, **stock
        )
        assert logged(trainer, "grad_norm") == pytest.approx([norm], rel=1e-5)
        assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
        evaluated = trainer.evaluate(random_pairs(EIGHT))
        assert evaluated["eval_loss"] == pytest.approx(unsmoothed.item(), abs=1e-5)


def test_a_wrapped_model_makes_decoder_inputs_or_says_what_to_pass(tmp_path):
    """The stock collator asks the model for them; one that does not offer them leads to a message, never to source."""
    from torch.nn.parallel import DistributedDataParallel

    from vanilla_transformer.tokenization import train_tokenizer

    tokenizer = train_tokenizer(["a"], 259)
    model = small_model(decoder_start_token_id=4, label_smoothing=0.0).train()
    rows = [dict(row) for row in random_pairs(EIGHT)]

    def batch_for(wrapped):
        return dict(DataCollatorForSeq2Seq(tokenizer, model=wrapped)(copy.deepcopy(rows)))

    expected = [[4, *row["labels"][:-1]] for row in rows]
    for offered in (model, torch.compile(model)):
        batch = batch_for(offered)
        decoder_input_ids = batch["decoder_input_ids"].tolist()
        assert [ids[: len(row)] for ids, row in zip(decoder_input_ids, expected, strict=True)] == expected
    labels = batch.pop("labels")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        logits = parallel(**batch).logits
        loss = parallel(**batch, labels=labels).loss
        unasked = batch_for(parallel)
        assert "decoder_input_ids" not in unasked
        del unasked["labels"]
        with pytest.raises(
            ValueError, match=r"DataCollatorForSeq2Seq\(tokenizer, model=model\), with the model itself"
        ):
            parallel(**unasked)
    finally:
        torch.distributed.destroy_process_group()
    right = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(right.item(), abs=1e-6)
    for none in (Seq2SeqTrainer, Trainer):
        args = arguments(
            tmp_path,
            Seq2SeqTrainingArguments if none is Seq2SeqTrainer else TrainingArguments,
            label_smoothing_factor=0.1,
            max_steps=1,
        )
        collator = DataCollatorForSeq2Seq(tokenizer)
        trainer = none(small_model(), args, train_dataset=random_pairs(EIGHT), data_collator=collator)
        with pytest.raises(ValueError, match=r"DataCollatorForSeq2Seq\(tokenizer, model=model\)"):
            trainer.train()


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_of_token_batches_equals_one_large_batch(tmp_path, accumulation):
    expected_loss, expected = manual_update(random_pairs(EIGHT), label_smoothing=0.1)
    model = small_model()
    seen = received_batches(model)
    trainer = VanillaTransformerTrainer(
        model,
        arguments(tmp_path, **SGD, tokens_per_batch=8 * 12, gradient_accumulation_steps=accumulation),
        train_dataset=random_pairs(EIGHT),
    )
    trainer.train()
    assert len(seen) == accumulation
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)


def test_ours_refuses_the_stock_label_smoothing_and_names_the_field(tmp_path):
    args = arguments(tmp_path, Seq2SeqTrainingArguments, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*config\.label_smoothing"):
        VanillaTransformerTrainer(small_model(), args)
    with pytest.raises(ValueError, match=r"config\.label_smoothing"):
        VanillaTransformerTrainer(small_model(), arguments(tmp_path, label_smoothing_factor=0.2))


def without_labels(dataset: Dataset) -> Dataset:
    return Dataset.from_list([{**row, "labels": [-100] * len(row["labels"])} for row in dataset])


def test_an_update_without_any_label_leaves_the_weights_as_they_are(tmp_path):
    """No NaN."""
    for accumulation in (1, 2):
        model, trainer = one_update(
            VanillaTransformerTrainer,
            tmp_path,
            4 // accumulation,
            accumulation,
            without_labels(random_pairs(EIGHT[:4])),
        )
        assert logged(trainer, "loss") == [0.0]
        same_weights(model, small_model(), rtol=0, atol=0)


@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer])
def test_a_micro_batch_without_labels_counts_for_nothing(tmp_path, cls):
    """The same update as without it."""
    kept, lost = random_pairs(EIGHT[:4]), without_labels(random_pairs(EIGHT[4:], seed=50))
    expected_loss, expected = manual_update(kept, label_smoothing=0.1)
    mixed = Dataset.from_list([*kept, *lost])
    model, trainer = one_update(cls, tmp_path, 1, 8, mixed)
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)


class InOrder:
    """For a trainer of batches of sentences: unshuffled, so that a test decides what a micro-batch holds."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer])
def test_a_whole_micro_batch_without_labels_counts_for_nothing(tmp_path, cls, smoothing, first):
    """Four rows of labels and four of none, one after the other, in one update."""
    kept, lost = random_pairs(EIGHT[:4]), without_labels(random_pairs(EIGHT[4:], seed=50))
    expected_loss, expected = manual_update(kept, smoothing, small_model(label_smoothing=smoothing))
    mixed = Dataset.from_list([*lost, *kept] if first else [*kept, *lost])
    in_order = type("InOrderTrainer", (InOrder, cls), {})
    settings = {} if cls is VanillaTransformerTrainer else {"label_smoothing_factor": smoothing}
    model = small_model(label_smoothing=smoothing)
    args_class = VanillaTransformerTrainingArguments if not settings else Seq2SeqTrainingArguments
    if not settings:
        settings = {"tokens_per_batch": None}
    args = arguments(
        tmp_path,
        args_class,
        **SGD,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        **settings,
    )
    trainer = in_order(model, args, train_dataset=mixed, data_collator=collator_for(args, model))
    trainer.train()
    assert logged(trainer, "loss") == pytest.approx([expected_loss], abs=1e-5)
    same_weights(model, expected, rtol=1e-5, atol=1e-6)


def test_without_any_label_only_the_weight_decay_is_left(tmp_path):
    """By hand: Adam's step is zero, and decoupled decay takes rate * decay of every matrix."""
    model, trainer = one_update(
        VanillaTransformerTrainer,
        tmp_path,
        2,
        2,
        without_labels(random_pairs(EIGHT[:4])),
        optim="adamw_torch",
        weight_decay=0.5,
    )
    decayed = set(trainer.get_decay_parameter_names(model))
    before = dict(small_model().named_parameters())
    assert 0 < len(decayed) < len(before)
    for name, parameter in model.named_parameters():
        share = 1 - 0.01 * 0.5 if name in decayed else 1.0
        torch.testing.assert_close(parameter, before[name] * share, rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize("cls, reentrant", [(VanillaTransformerTrainer, False), (Seq2SeqTrainer, True)])
def test_gradient_checkpointing_changes_nothing(tmp_path, cls, reentrant):
    """Through the trainer: same loss and weights; afterwards the model still generates the same."""
    plain, plain_trainer = one_update(cls, tmp_path, 8, 1)
    model, trainer = one_update(
        cls,
        tmp_path,
        8,
        1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert model.is_gradient_checkpointing
    assert logged(trainer, "loss") == pytest.approx(logged(plain_trainer, "loss"), abs=1e-6)
    same_weights(model, plain, rtol=1e-5, atol=1e-6)
    sources = words(2, 6)
    assert torch.equal(
        model.eval().generate(sources, max_new_tokens=8), plain.eval().generate(sources, max_new_tokens=8)
    )


def test_bfloat16_trains_on_a_processor(tmp_path):
    """transformers refuses bf16 without an accelerator unless use_cpu is set; ours sets it."""
    args = VanillaTransformerTrainingArguments(
        output_dir=str(tmp_path),
        bf16=True,
        report_to="none",
        disable_tqdm=True,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        warmup_steps=4,
    )
    assert args.use_cpu == (not torch.accelerator.is_available())
    model = small_model(std=0.1)
    dtypes = set()
    model.model.encoder.layers[0].self_attention.q_proj.register_forward_hook(
        lambda module, inputs, output: dtypes.add(output.dtype)
    )
    trainer = VanillaTransformerTrainer(
        model, args, train_dataset=random_pairs(MANY), eval_dataset=random_pairs(MANY[:6])
    )
    trainer.train()
    assert dtypes == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    expected = token_losses(small_model(std=0.1), random_pairs(MANY), 0.1).mean().item()
    assert logged(trainer, "loss")[0] == pytest.approx(expected, rel=0.02)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        token_losses(model, random_pairs(MANY[:6])).mean().item(), rel=0.02
    )


# --- Batches (section 5.1) -------------------------------------------------------------------------------------------


def rows_of(batch: dict[str, torch.Tensor]) -> list[tuple]:
    """What the model was given, row by row, without padding."""
    sources = [
        ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    targets = [row[row != -100].tolist() for row in batch["labels"]]
    return [(tuple(source), tuple(target)) for source, target in zip(sources, targets, strict=True)]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_batches_are_bounded_on_both_sides_and_each_sentence_comes_once_an_epoch(tmp_path, accumulation):
    """What forward() really receives, padding counted."""
    dataset = random_pairs(MANY)
    everything = sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in dataset)
    assert len(set(everything)) == len(everything)
    model = small_model()
    seen = received_batches(model)
    trainer = VanillaTransformerTrainer(
        model,
        arguments(tmp_path, num_train_epochs=3, tokens_per_batch=40, gradient_accumulation_steps=accumulation),
        train_dataset=dataset,
    )
    trainer.train()
    for batch in seen:
        assert batch["input_ids"].numel() <= 40
        assert batch["labels"].numel() <= 40
    assert len(seen) % (3 * accumulation) == 0
    assert trainer.state.global_step == len(seen) // accumulation
    per_epoch = len(seen) // 3
    epochs = [seen[start : start + per_epoch] for start in range(0, len(seen), per_epoch)]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in rows_of(batch)) == everything
    compositions = [{frozenset(rows_of(batch)) for batch in epoch} for epoch in epochs]
    assert compositions[0] != compositions[1] != compositions[2]


def test_the_sampler_learns_its_epoch_without_the_help_of_transformers(tmp_path, monkeypatch):
    """Not every version, nor every way of resuming on several processes, tells a batch sampler its epoch."""
    monkeypatch.setattr(DataLoaderShard, "set_epoch", lambda self, epoch: None)
    model = small_model()
    seen = received_batches(model)
    settings = {"num_train_epochs": 3, "tokens_per_batch": 40, "save_strategy": "epoch"}
    VanillaTransformerTrainer(model, arguments(tmp_path, **settings), train_dataset=random_pairs(MANY)).train()
    batches = [rows_of(batch) for batch in seen]
    epochs = [batches[start : start + len(batches) // 3] for start in range(0, len(batches), len(batches) // 3)]
    assert epochs[0] != epochs[1] != epochs[2]
    seen.clear()
    trainer = VanillaTransformerTrainer(model, arguments(tmp_path, **settings), train_dataset=random_pairs(MANY))
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{2 * len(epochs[0])}"))
    assert [rows_of(batch) for batch in seen] == epochs[2]


def test_the_seed_decides_the_order_of_the_batches(tmp_path):
    orders = []
    for seed, data_seed in ((1, None), (1, None), (2, None), (2, 1)):
        model = small_model()
        seen = received_batches(model)
        VanillaTransformerTrainer(
            model,
            arguments(tmp_path, num_train_epochs=1, tokens_per_batch=80, seed=seed, data_seed=data_seed),
            train_dataset=random_pairs(MANY),
        ).train()
        orders.append([rows_of(batch) for batch in seen])
    assert orders[0] == orders[1] == orders[3]
    assert orders[0] != orders[2]


def test_tokens_per_batch_may_be_given_to_the_trainer(tmp_path):
    model = small_model()
    seen = received_batches(model)
    VanillaTransformerTrainer(
        model,
        arguments(tmp_path, Seq2SeqTrainingArguments, num_train_epochs=1),
        train_dataset=random_pairs(MANY),
        tokens_per_batch=30,
    ).train()
    assert 20 < max(batch["input_ids"].numel() for batch in seen) <= 30


def test_without_tokens_per_batch_batches_have_the_rows_asked_for(tmp_path):
    model = small_model()
    seen = received_batches(model)
    VanillaTransformerTrainer(
        model,
        arguments(tmp_path, num_train_epochs=1, tokens_per_batch=None, per_device_train_batch_size=6),
        train_dataset=random_pairs(MANY),
    ).train()
    assert [len(batch["input_ids"]) for batch in seen] == [6] * 4


def test_tokens_and_rows_exclude_each_other(tmp_path):
    with pytest.raises(ValueError, match="per_device_train_batch_size=32.*tokens_per_batch"):
        arguments(tmp_path, per_device_train_batch_size=32)
    with pytest.raises(ValueError, match="tokens_per_batch must be at least 1"):
        arguments(tmp_path, tokens_per_batch=0)


def test_a_second_run_of_one_trainer_is_no_different(tmp_path):
    """train() twice: schedule and batches start anew, without warnings of things left over."""
    watch = Watch()
    model = small_model()
    seen = received_batches(model)
    trainer = VanillaTransformerTrainer(
        model,
        arguments(tmp_path, num_train_epochs=1, tokens_per_batch=40, warmup_steps=4),
        train_dataset=random_pairs(MANY),
        callbacks=[watch],
    )
    trainer.train()
    count, rates = len(seen), list(watch.rates)
    trainer.train()
    assert watch.rates[len(rates) :] == rates
    assert [rows_of(batch) for batch in seen[:count]] == [rows_of(batch) for batch in seen[count:]]


def test_other_columns_and_the_stock_collator_do_no_harm(tmp_path):
    dataset = random_pairs(MANY[:8])
    dataset = dataset.add_column("source", [f"text {n}" for n in range(8)])
    model = small_model()
    from vanilla_transformer.tokenization import train_tokenizer

    trainer = VanillaTransformerTrainer(
        model,
        arguments(tmp_path, max_steps=1, tokens_per_batch=60),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=DataCollatorForSeq2Seq(train_tokenizer(["a"], 259), model=model),
    )
    trainer.train()
    expected = token_losses(model.eval(), random_pairs(MANY[:8])).mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_batches_of_tokens_need_a_dataset_of_known_lengths(tmp_path):
    endless = random_pairs(MANY).to_iterable_dataset()
    trainer = VanillaTransformerTrainer(small_model(), arguments(tmp_path, max_steps=1), train_dataset=endless)
    with pytest.raises(ValueError, match="tokens_per_batch"):
        trainer.train()


class Listed(torch.utils.data.Dataset):
    """A dataset of plain torch."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_a_dataset_of_plain_torch_gives_the_same(tmp_path):
    results = []
    for dataset in (random_pairs(MANY), Listed(random_pairs(MANY))):
        model = small_model()
        model.generation_config.max_new_tokens_over_source = 3
        trainer = VanillaTransformerTrainer(
            model,
            arguments(tmp_path, max_steps=3, tokens_per_batch=40, warmup_steps=4),
            train_dataset=dataset,
            eval_dataset=dataset,
            compute_metrics=lambda prediction: {"sum": int(prediction.predictions.clip(0).sum())},
        )
        trainer.train()
        metrics = trainer.evaluate()
        results.append((logged(trainer, "loss"), metrics["eval_loss"], metrics["eval_sum"]))
    assert results[0] == results[1]


# --- Evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture
def translator(tiny_tokenizer):
    """A random model whose translations vary in length, and an encoded set of the tiny corpus of which it gets about
    half right."""
    model = varied_model(tiny_tokenizer)
    pairs = []
    for number, (source, target) in enumerate(TINY_CORPUS):
        ids = model.generate(**tiny_tokenizer(source, return_tensors="pt"), num_beams=1)
        own = tiny_tokenizer.decode(ids[0], skip_special_tokens=True)
        pairs.append({"source": source, "target": f"{own} {own}"[: 3 * len(own) // 2] if number % 2 else target})
    dataset, _ = tokenize_pairs(Dataset.from_list(pairs), tiny_tokenizer, drop=False)
    return model, dataset, pairs


def evaluator(folder: Path, translator, tokenizer, cls=VanillaTransformerTrainer, **settings):
    model, dataset, _ = translator
    options = settings.pop("options", {})
    args_class = VanillaTransformerTrainingArguments if cls is VanillaTransformerTrainer else Seq2SeqTrainingArguments
    settings = {"generation_num_beams": 1, "predict_with_generate": True, **settings}
    return cls(
        model, arguments(folder, args_class, **settings), eval_dataset=dataset, processing_class=tokenizer, **options
    )


def alone(model, tokenizer, sources: list[str], **settings) -> list[str]:
    """The oracle: each sentence by itself."""
    texts = []
    for source in sources:
        ids = model.generate(**tokenizer(source, return_tensors="pt"), **settings)
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return texts


def unpadded(rows: np.ndarray, *drop: int) -> list[list[int]]:
    return [[token for token in row if token not in {-100, *drop}] for row in rows.tolist()]


BATCHINGS = [
    {"tokens_per_batch": 4096},
    {"tokens_per_batch": 60},
    {"tokens_per_batch": None, "per_device_eval_batch_size": 3},
    {"tokens_per_batch": None, "per_device_eval_batch_size": 100},
]


@pytest.mark.parametrize("batching", BATCHINGS)
def test_the_evaluation_loss_is_an_unsmoothed_mean_over_tokens(tmp_path, tiny_tokenizer, translator, batching):
    """By hand over the whole set: each sentence alone, whatever the batches."""
    model, dataset, _ = translator
    losses = token_losses(model, dataset)
    lengths = [len(row["labels"]) for row in dataset]
    by_sentence = torch.stack([part.mean() for part in losses.split(lengths)])
    assert abs(losses.mean() - by_sentence.mean()) > 0.05  # a mean over sentences would be something else
    metrics = evaluator(tmp_path, translator, tiny_tokenizer, **batching).evaluate()
    assert metrics["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)


def test_metrics_do_not_depend_on_the_batches(tmp_path, tiny_tokenizer, translator):
    kept = []
    for batching in BATCHINGS:
        metrics = evaluator(tmp_path, translator, tiny_tokenizer, **batching).evaluate()
        kept.append({name: metrics[f"eval_{name}"] for name in ("loss", "bleu", "chrf", "generated_length")})
    assert 5 < kept[0]["bleu"] < 95
    for metrics in kept[1:]:
        assert metrics == pytest.approx(kept[0], rel=1e-6)


def test_each_segment_is_generated_and_scored_once_in_the_order_of_the_dataset(tmp_path, tiny_tokenizer, translator):
    model, dataset, pairs = translator
    calls = []

    def compute_metrics(prediction):
        calls.append(prediction)
        return {"segments": len(prediction.predictions)}

    trainer = evaluator(
        tmp_path, translator, tiny_tokenizer, tokens_per_batch=60, options={"compute_metrics": compute_metrics}
    )
    generated_rows = []
    generate = model.generate
    model.generate = lambda *args, **kwargs: (
        generated_rows.append(len(kwargs["input_ids"])),
        generate(*args, **kwargs),
    )[1]
    metrics = trainer.evaluate()
    del model.generate
    assert metrics["eval_segments"] == len(dataset) == sum(generated_rows)
    assert len(generated_rows) > 2
    (prediction,) = calls
    texts = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in unpadded(prediction.predictions)]
    assert texts == alone(model, tiny_tokenizer, [pair["source"] for pair in pairs], num_beams=1)
    assert unpadded(prediction.label_ids) == [row["labels"] for row in dataset]
    assert "eval_bleu" not in metrics  # the user's own metrics, and nothing beside them


def test_bleu_of_the_evaluation_is_that_of_the_sacrebleu_command(tmp_path, tiny_tokenizer, translator):
    """Translations one by one into a file, references into another."""
    model, _, pairs = translator
    metrics = evaluator(tmp_path, translator, tiny_tokenizer, tokens_per_batch=60).evaluate()
    hypotheses = alone(model, tiny_tokenizer, [pair["source"] for pair in pairs], num_beams=1)
    assert len({len(text) for text in hypotheses}) > 3
    (tmp_path / "hypotheses").write_text("".join(f"{text}\n" for text in hypotheses), encoding="utf-8")
    (tmp_path / "references").write_text("".join(f"{pair['target']}\n" for pair in pairs), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", str(tmp_path / "references"), "-i", str(tmp_path / "hypotheses")]
    result = subprocess.run(
        [*command, "-m", "bleu", "chrf", "-b", "-w", "8"], capture_output=True, text=True, check=True
    )
    bleu, chrf = json.loads(result.stdout) if result.stdout.startswith("[") else map(float, result.stdout.split())
    assert metrics["eval_bleu"] == pytest.approx(bleu, abs=1e-6)
    assert metrics["eval_chrf"] == pytest.approx(chrf, abs=1e-6)


def test_predict_gives_every_segment_and_its_metrics(tmp_path, tiny_tokenizer, translator):
    model, dataset, pairs = translator
    trainer = evaluator(tmp_path, translator, tiny_tokenizer, tokens_per_batch=60)
    evaluated = trainer.evaluate()
    output = trainer.predict(dataset)
    assert output.predictions.shape[0] == output.label_ids.shape[0] == len(dataset)
    for name in ("loss", "bleu", "chrf"):
        assert output.metrics[f"test_{name}"] == pytest.approx(evaluated[f"eval_{name}"], abs=1e-6)
    texts = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in unpadded(output.predictions)]
    assert texts == alone(model, tiny_tokenizer, [pair["source"] for pair in pairs], num_beams=1)


def test_predict_works_without_labels(tmp_path, tiny_tokenizer, translator):
    _, dataset, _ = translator
    trainer = evaluator(tmp_path, translator, tiny_tokenizer)
    with_labels = trainer.predict(dataset).predictions
    output = trainer.predict(dataset.remove_columns("labels"))
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    assert unpadded(output.predictions, PAD) == unpadded(with_labels, PAD)


def test_the_users_metrics_without_generation_see_the_logits(tmp_path, tiny_tokenizer, translator):
    """As with the stock trainer; predictions of unlike lengths are filled up with -100."""
    model, dataset, _ = translator

    def accuracy(prediction):
        kept = prediction.label_ids != -100
        return {"accuracy": float((prediction.predictions.argmax(-1)[kept] == prediction.label_ids[kept]).mean())}

    trainer = evaluator(
        tmp_path,
        translator,
        tiny_tokenizer,
        predict_with_generate=False,
        tokens_per_batch=60,
        options={"compute_metrics": accuracy},
    )
    hits = []
    for row in dataset:
        logits = model(
            input_ids=torch.tensor([row["input_ids"]]), decoder_input_ids=torch.tensor([[BOS, *row["labels"][:-1]]])
        ).logits[0]
        hits.extend((logits.argmax(-1) == torch.tensor(row["labels"])).tolist())
    assert sum(hits) > 0
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(np.mean(hits))


def test_several_evaluation_sets_are_told_apart(tmp_path, tiny_tokenizer, translator):
    model, dataset, _ = translator
    halves = {"first": dataset.select(range(5)), "second": dataset.select(range(5, 10))}
    trainer = evaluator(tmp_path, (model, halves, None), tiny_tokenizer)
    metrics = trainer.evaluate()
    for name, half in halves.items():
        assert metrics[f"eval_{name}_loss"] == pytest.approx(token_losses(model, half).mean().item(), rel=1e-6)
        assert f"eval_{name}_bleu" in metrics


def test_an_evaluation_set_with_unlabelled_rows_is_a_mean_over_the_rest(tmp_path, tiny_tokenizer, translator):
    model, dataset, _ = translator
    mixed = Dataset.from_list([*dataset.select(range(6)), *without_labels(dataset.select(range(6, 10)))])
    for batching in BATCHINGS:
        trainer = evaluator(tmp_path, (model, mixed, None), tiny_tokenizer, predict_with_generate=False, **batching)
        expected = token_losses(model, dataset.select(range(6))).mean().item()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def given_settings(model, monkeypatch) -> list[tuple[int, int]]:
    """Beams and longest output of each call of generate()."""
    calls = []
    generate = type(model).generate

    def note(self, *args, **kwargs):
        rows = generate(self, *args, **kwargs)
        calls.append((kwargs.get("num_beams"), rows.shape[1]))
        return rows

    monkeypatch.setattr(type(model), "generate", note)
    return calls


def endless_translator(tokenizer):
    """A model that never ends a sentence by itself, and two sentences of unlike length."""
    model = varied_model(tokenizer)
    with torch.no_grad():
        model.lm_head.bias.copy_(output_bias(tokenizer, end=-1e4))
    model.generation_config.max_new_tokens_over_source = 50
    pairs = Dataset.from_list(
        [{"source": "A dog.", "target": "Ein Hund."}, dict(zip(("source", "target"), TINY_CORPUS[0], strict=True))]
    )
    return model, tokenize_pairs(pairs, tokenizer)[0], pairs


def test_settings_of_generation_come_from_the_call_then_from_the_arguments_then_from_the_model(
    tmp_path, tiny_tokenizer, monkeypatch
):
    """Longest output: the start token and what was generated."""
    endless = endless_translator(tiny_tokenizer)
    longest_source = max(len(row["input_ids"]) for row in endless[1])
    calls = given_settings(endless[0], monkeypatch)
    trainer = evaluator(tmp_path, endless, tiny_tokenizer, generation_num_beams=2, generation_max_length=9)
    trainer.evaluate()
    trainer.evaluate(num_beams=3, max_new_tokens=4)
    trainer.predict(endless[1], max_length=6)
    assert calls == [(2, 9), (3, 5), (2, 6)]
    calls.clear()
    trainer = evaluator(tmp_path, endless, tiny_tokenizer, generation_num_beams=None)
    endless[0].generation_config.num_beams = 1
    endless[0].generation_config.early_stopping = False
    trainer.evaluate()
    assert calls == [(None, 1 + longest_source + 50)]


@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer])
def test_evaluation_leaves_the_models_decoding_as_it_was(tmp_path, tiny_tokenizer, cls):
    """Seq2SeqTrainer writes max_length=20 into the model's settings; the limit stays source + 50 for each row."""
    endless = endless_translator(tiny_tokenizer)
    model, dataset, _ = endless
    before = [model.generate(torch.tensor([row["input_ids"]])) for row in dataset]
    assert [ids.shape[1] for ids in before] == [1 + len(row["input_ids"]) + 50 for row in dataset]
    options = {} if cls is VanillaTransformerTrainer else {"data_collator": TranslationCollator(PAD)}
    trainer = evaluator(tmp_path, endless, tiny_tokenizer, cls, options=options)
    trainer.evaluate()
    predicted = trainer.predict(dataset).predictions
    for ids, expected in zip(unpadded(predicted, PAD), before, strict=True):
        assert len(ids) == expected.shape[1] > 21
    for row, expected in zip(dataset, before, strict=True):
        assert torch.equal(model.generate(torch.tensor([row["input_ids"]])), expected)
    trainer.save_model(str(tmp_path / "saved"))
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "saved")
    for row, expected in zip(dataset, before, strict=True):
        assert torch.equal(reloaded.generate(torch.tensor([row["input_ids"]])), expected)


def test_the_stock_seq2seq_trainer_evaluates_with_our_metrics(tmp_path, tiny_tokenizer, translator):
    """Batches whose outputs differ in length, the last batch smaller."""
    from vanilla_transformer.evaluation import compute_metrics_for

    model, _, _ = translator
    ours = evaluator(tmp_path, translator, tiny_tokenizer).evaluate()
    stock = evaluator(
        tmp_path,
        translator,
        tiny_tokenizer,
        Seq2SeqTrainer,
        per_device_eval_batch_size=3,
        options={"data_collator": TranslationCollator(PAD), "compute_metrics": compute_metrics_for(tiny_tokenizer)},
    ).evaluate()
    for name in ("eval_bleu", "eval_chrf", "eval_generated_length"):
        assert stock[name] == pytest.approx(ours[name], abs=1e-6)


def test_evaluation_draws_no_random_numbers_that_training_would_miss(tmp_path):
    """A run that evaluates on the way ends with the weights of one that does not (dropout 0.1)."""
    ends = []
    for settings in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        torch.manual_seed(0)
        model = small_model(dropout=0.1, std=0.1)
        VanillaTransformerTrainer(
            model,
            arguments(tmp_path, max_steps=4, warmup_steps=4, tokens_per_batch=40, **settings),
            train_dataset=random_pairs(MANY),
            eval_dataset=random_pairs(MANY[:5]),
        ).train()
        ends.append(model)
    same_weights(*ends, rtol=0, atol=0)


def test_training_goes_on_in_training_mode_after_an_evaluation(tmp_path, tiny_tokenizer, translator):
    model, dataset, _ = translator
    trainer = evaluator(tmp_path, translator, tiny_tokenizer)
    for mode in (True, False):
        model.train(mode)
        trainer.evaluate()
        assert model.training is mode


# --- Evaluation: the settings of the stock loop ----------------------------------------------------------------------


def kept_metrics():
    """A compute_metrics that keeps what it is given."""
    calls = []

    def compute_metrics(prediction):
        calls.append(prediction)
        return {"calls": len(calls)}

    return calls, compute_metrics


@pytest.mark.parametrize("batching", BATCHINGS)
def test_metrics_may_see_the_sources_and_each_segments_loss(tmp_path, tiny_tokenizer, translator, batching):
    """In the dataset's order whatever the batches; of the shapes that the stock trainer gives."""
    model, dataset, _ = translator
    losses = [token_losses(model, [row]).mean().item() for row in dataset]
    assert max(losses) - min(losses) > 0.5
    calls, compute_metrics = kept_metrics()
    for predict_with_generate in (True, False):
        evaluator(
            tmp_path,
            translator,
            tiny_tokenizer,
            predict_with_generate=predict_with_generate,
            include_for_metrics=["inputs", "loss"],
            options={"compute_metrics": compute_metrics},
            **batching,
        ).evaluate()
    stock, compute_metrics = kept_metrics()
    evaluator(
        tmp_path,
        translator,
        tiny_tokenizer,
        Seq2SeqTrainer,
        per_device_eval_batch_size=1,  # else its losses are means of batches
        include_for_metrics=["inputs", "loss"],
        options={"compute_metrics": compute_metrics, "data_collator": TranslationCollator(PAD)},
    ).evaluate()
    for prediction in calls:
        assert unpadded(prediction.inputs, PAD) == [row["input_ids"] for row in dataset]
        assert prediction.losses == pytest.approx(losses, rel=1e-5)
        assert prediction.inputs.shape == stock[0].inputs.shape
        assert prediction.losses.shape == stock[0].losses.shape
        assert prediction.losses == pytest.approx(stock[0].losses, rel=1e-5)


def test_metrics_see_neither_sources_nor_losses_unless_asked_for(tmp_path, tiny_tokenizer, translator):
    calls, compute_metrics = kept_metrics()
    evaluator(tmp_path, translator, tiny_tokenizer, options={"compute_metrics": compute_metrics}).evaluate()
    assert calls[0].inputs is None
    assert calls[0].losses is None


@pytest.mark.parametrize("batching", BATCHINGS)
def test_metrics_batch_by_batch_see_each_segment_once(tmp_path, tiny_tokenizer, translator, batching):
    """batch_eval_metrics: tensors, the result asked for with the last batch only, nothing kept for the end."""
    model, dataset, pairs = translator
    seen, asked = [], []

    def compute_metrics(prediction, compute_result):
        assert torch.is_tensor(prediction.predictions)
        assert torch.is_tensor(prediction.label_ids)
        sources = prediction.inputs["input_ids"]
        assert (prediction.inputs["attention_mask"] == (sources != PAD)).all()
        rows = zip(sources.tolist(), prediction.predictions.tolist(), prediction.losses.tolist(), strict=True)
        seen.extend((tuple(t for t in ids if t != PAD), [t for t in row if t >= 0], loss) for ids, row, loss in rows)
        asked.append(compute_result)
        return {"rows": len(seen)} if compute_result else {}

    trainer = evaluator(
        tmp_path,
        translator,
        tiny_tokenizer,
        batch_eval_metrics=True,
        include_for_metrics=["inputs", "loss"],
        options={"compute_metrics": compute_metrics},
        **batching,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == len(dataset)
    assert asked == [False] * (len(asked) - 1) + [True]
    assert metrics["eval_loss"] == pytest.approx(token_losses(model, dataset).mean().item(), rel=1e-6)
    found = {ids: (tiny_tokenizer.decode(row, skip_special_tokens=True), loss) for ids, row, loss in seen}
    texts = alone(model, tiny_tokenizer, [pair["source"] for pair in pairs], num_beams=1)
    for row, text in zip(dataset, texts, strict=True):
        assert found[tuple(row["input_ids"])][0] == text
        loss = token_losses(model, [row]).mean().item()
        assert found[tuple(row["input_ids"])][1] == pytest.approx(loss, rel=1e-5)
    output = trainer.predict(dataset)
    predicted = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in unpadded(output.predictions)]
    assert predicted == texts


@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer])
@pytest.mark.parametrize("settings", [{"batch_eval_metrics": True}, {"eval_do_concat_batches": False}])
def test_our_metrics_are_the_same_by_batches(tmp_path, tiny_tokenizer, translator, cls, settings):
    from vanilla_transformer.evaluation import compute_metrics_for

    whole = evaluator(tmp_path, translator, tiny_tokenizer).evaluate()
    assert 5 < whole["eval_bleu"] < 95
    options = {}
    if cls is Seq2SeqTrainer:
        options = {"data_collator": TranslationCollator(PAD), "compute_metrics": compute_metrics_for(tiny_tokenizer)}
    settings = {"per_device_eval_batch_size": 3, **settings}
    if cls is VanillaTransformerTrainer:
        settings["tokens_per_batch"] = 60
    trainer = evaluator(tmp_path, translator, tiny_tokenizer, cls, options=options, **settings)
    for _ in range(2):
        trainer.predict(translator[1].select(range(4)))  # nothing of which is left in what follows
        metrics = trainer.evaluate()
        for name in ("eval_bleu", "eval_chrf", "eval_generated_length"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-9)


@pytest.mark.parametrize("batching", BATCHINGS)
def test_without_concatenation_there_is_an_array_for_every_few_segments(
    tmp_path, tiny_tokenizer, translator, batching
):
    """In the dataset's order, as many in each as a batch of the stock evaluation has."""
    model, dataset, pairs = translator
    calls, compute_metrics = kept_metrics()
    trainer = evaluator(
        tmp_path,
        translator,
        tiny_tokenizer,
        eval_do_concat_batches=False,
        include_for_metrics=["inputs", "loss"],
        options={"compute_metrics": compute_metrics},
        **{"per_device_eval_batch_size": 4, **batching},
    )
    output = trainer.predict(dataset)
    size = trainer.args.per_device_eval_batch_size
    counts = [min(size, len(dataset) - start) for start in range(0, len(dataset), size)]
    given = calls[0]
    for arrays in (output.predictions, output.label_ids, given.predictions, given.label_ids, given.inputs):
        assert [len(array) for array in arrays] == counts
    assert [len(array) for array in given.losses] == counts
    rows = [row for array in output.predictions for row in unpadded(array)]
    texts = [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
    assert texts == alone(model, tiny_tokenizer, [pair["source"] for pair in pairs], num_beams=1)
    labels = [row for array in output.label_ids for row in unpadded(array)]
    assert labels == [row["labels"] for row in dataset]


@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Seq2SeqTrainer])
def test_prediction_loss_only_gives_the_loss_and_nothing_else(tmp_path, tiny_tokenizer, translator, cls, monkeypatch):
    model, dataset, _ = translator
    monkeypatch.setattr(type(model), "generate", lambda *args, **kwargs: pytest.fail("nothing is to be generated"))
    calls, compute_metrics = kept_metrics()
    options = {"compute_metrics": compute_metrics}
    settings = {"per_device_eval_batch_size": 10}
    if cls is Seq2SeqTrainer:
        options["data_collator"] = TranslationCollator(PAD)
        # The stock trainer generates all the same where it is only the argument that says so.
        settings["predict_with_generate"] = False
    trainer = evaluator(
        tmp_path, translator, tiny_tokenizer, cls, prediction_loss_only=True, options=options, **settings
    )
    expected = token_losses(model, dataset).mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    output = trainer.predict(dataset)
    assert output.predictions is None
    assert output.label_ids is None
    assert output.metrics["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert calls == []


def test_whole_numbers_that_stand_for_logits_stay_whole(tmp_path, tiny_tokenizer, translator):
    """preprocess_logits_for_metrics with an arg-max, as the documentation of transformers shows it."""
    _, dataset, _ = translator
    calls, compute_metrics = kept_metrics()
    evaluator(
        tmp_path,
        translator,
        tiny_tokenizer,
        predict_with_generate=False,
        options={
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        },
    ).evaluate()
    assert calls[0].predictions.dtype.kind == "i"
    assert calls[0].predictions.shape == calls[0].label_ids.shape


def test_an_optimizer_that_averages_weights_is_told_of_the_evaluation(tmp_path):
    """Schedule-free optimizers hold other weights for evaluation, and switch on eval()."""

    class Switching(torch.optim.SGD):
        mode = "train"

        def eval(self):
            self.mode = "eval"

        def train(self):
            self.mode = "train"

    model = small_model()
    optimizer = Switching(model.parameters(), lr=0.01)
    modes = []
    model.register_forward_pre_hook(lambda module, args: modes.append((module.training, optimizer.mode)))
    trainer = VanillaTransformerTrainer(
        model,
        arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, tokens_per_batch=4096),
        train_dataset=random_pairs(MANY),
        eval_dataset=random_pairs(MANY[:5]),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)),
    )
    trainer.train()
    assert modes == [(True, "train"), (False, "eval")] * 2


# --- Speeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"num_train_epochs": 2, "tokens_per_batch": 40},
        {"max_steps": 3, "tokens_per_batch": 40, "gradient_accumulation_steps": 2},
        {"max_steps": 4, "tokens_per_batch": None, "per_device_train_batch_size": 5},
    ],
)
def test_samples_a_second_are_the_sentences_that_were_trained_on(tmp_path, settings):
    """The stock number takes every batch for per_device_train_batch_size sentences. The slow step makes the run long
    enough for the rounding of its time not to matter."""

    class Slow(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            time.sleep(0.5)

    model = small_model()
    seen = received_batches(model)
    trainer = VanillaTransformerTrainer(
        model, arguments(tmp_path, **settings), train_dataset=random_pairs(MANY), callbacks=[Slow()]
    )
    for _ in range(2):  # a second run counts from 0
        seen.clear()
        metrics = trainer.train().metrics
        sentences = sum(len(batch["input_ids"]) for batch in seen)
        assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(sentences, rel=2e-3)
        assert logged(trainer, "train_samples_per_second")[-1] == metrics["train_samples_per_second"]


def test_steps_a_second_are_the_batches_that_were_evaluated(tmp_path, monkeypatch):
    dataset = random_pairs(MANY)
    model = small_model()
    batches = []

    def slowly(module, args, kwargs):
        time.sleep(0.1)
        batches.append(1)

    model.register_forward_pre_hook(slowly, with_kwargs=True)
    trainer = VanillaTransformerTrainer(
        model, arguments(tmp_path, tokens_per_batch=60, predict_with_generate=False), eval_dataset=dataset
    )
    metrics = trainer.evaluate()
    assert len(batches) not in (1, 3)  # three would be what the stock trainer takes them for
    assert metrics["eval_steps_per_second"] * metrics["eval_runtime"] == pytest.approx(len(batches), rel=2e-3)
    assert metrics["eval_samples_per_second"] * metrics["eval_runtime"] == pytest.approx(len(dataset), rel=2e-3)
    assert logged(trainer, "eval_steps_per_second") == [metrics["eval_steps_per_second"]]
    batches.clear()
    metrics = trainer.predict(dataset).metrics
    assert metrics["test_steps_per_second"] * metrics["test_runtime"] == pytest.approx(len(batches), rel=2e-3)


# --- Learned positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", [{"tokens_per_batch": 100}, BY_SENTENCES])
@pytest.mark.parametrize("lengths, told", [((9, 12), "12 target"), ((12, 9), "12 source")])
def test_learned_positions_that_are_too_few_are_told_before_the_first_update(tmp_path, batching, lengths, told):
    dataset = random_pairs([(5, 6), (7, 4), lengths, (3, 3)])
    for number, positions in enumerate((11, 12)):
        model = small_model(position_embedding="learned", max_position_embeddings=positions)
        model.generation_config.max_new_tokens_over_source = 0
        seen = received_batches(model)
        trainer = VanillaTransformerTrainer(
            model,
            arguments(tmp_path, max_steps=1, **batching),
            train_dataset=dataset,
            eval_dataset=dataset,
        )
        if number == 0:
            match = f"sentence 2 of {{}} has {told} tokens but max_position_embeddings=11"
            with pytest.raises(ValueError, match=match.format("train_dataset")):
                trainer.train()
            with pytest.raises(ValueError, match=match.format("eval_dataset")):
                trainer.evaluate()
            with pytest.raises(ValueError, match=match.format("test_dataset")):
                trainer.predict(dataset)
            assert seen == []
        else:
            trainer.train()
            trainer.evaluate()


def test_the_log_tells_target_tokens_a_second(tmp_path, monkeypatch):
    """Counted by hand: every token of an epoch in ten seconds of a clock of our own, then in twenty."""
    now = [100.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            now[0] += 10 * state.global_step

    dataset = random_pairs(MANY)
    trainer = VanillaTransformerTrainer(
        small_model(),
        arguments(tmp_path, num_train_epochs=2, tokens_per_batch=1000, gradient_accumulation_steps=2),
        train_dataset=dataset,
        callbacks=[Clock()],
    )
    trainer.train()
    assert trainer.state.global_step == 2
    tokens = sum(len(row["labels"]) for row in dataset)
    assert logged(trainer, "target_tokens_per_second") == pytest.approx([tokens / 10, tokens / 20], abs=0.05)


# --- Resuming --------------------------------------------------------------------------------------------------------


RESUME = {
    "max_steps": 12,
    "save_strategy": "steps",
    "save_steps": 5,
    "tokens_per_batch": 40,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 4,
}


def resumable(folder: Path, seed: int = 0, collator=None, **settings):
    torch.manual_seed(seed)
    model = small_model(dropout=0.1, std=0.1, seed=seed)
    trainer = VanillaTransformerTrainer(
        model,
        arguments(folder, **{**RESUME, **settings}),
        train_dataset=random_pairs(MANY * 2),
        data_collator=collator,
    )
    return model, trainer


@pytest.mark.parametrize("checkpoint", [5, 10])
def test_a_resumed_run_is_bit_identical_with_an_undisturbed_one(tmp_path, checkpoint):
    """In mid-epoch, dropout 0.1, token batches, accumulation 2; losses, rates and weights."""
    whole, undisturbed = resumable(tmp_path)
    undisturbed.train()
    updates_per_epoch = round(undisturbed.state.global_step / undisturbed.state.epoch)
    assert checkpoint % updates_per_epoch != 0
    assert checkpoint == 5 or checkpoint > updates_per_epoch  # one in the first epoch, one in a later
    model, trainer = resumable(tmp_path, seed=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{checkpoint}"))
    assert trainer.state.global_step == 12
    for name in ("loss", "learning_rate"):
        assert logged(trainer, name) == logged(undisturbed, name)
    same_weights(model, whole, rtol=0, atol=0)
    held = {path.name for path in (tmp_path / f"checkpoint-{checkpoint}").iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors"} <= held
    pickled = {name for name in held if name.endswith((".pt", ".pth", ".bin", ".pkl", ".ckpt"))}
    assert pickled == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}  # the trainer's own


class RandomCollator(TranslationCollator):
    """Masks words at random, by each of the three generators that there are."""

    def __init__(self):
        super().__init__(PAD)
        self.seen: list[torch.Tensor] = []

    def __call__(self, rows):
        batch = super().__call__(rows)
        ids = batch["input_ids"]
        shape = tuple(ids.shape)
        drawn = torch.rand(shape) + torch.from_numpy(np.random.rand(*shape)) + random.random()
        batch["input_ids"] = ids.masked_fill((drawn > 1.9) & (ids > EOS), 4)
        self.seen.append(batch["input_ids"])
        return batch


@pytest.mark.parametrize("batching", [{}, {"tokens_per_batch": None, "per_device_train_batch_size": 4}])
def test_a_collator_that_draws_random_numbers_draws_the_same_after_a_resume(tmp_path, batching):
    """Its draws also leave the dropout's random numbers alone, and are others for each batch and epoch."""
    collators = [RandomCollator(), RandomCollator()]
    whole, undisturbed = resumable(tmp_path, collator=collators[0], **batching)
    undisturbed.train()
    assert undisturbed.state.epoch > 1
    model, trainer = resumable(tmp_path, seed=5, collator=collators[1], **batching)
    torch.rand(7), np.random.rand(7), random.random()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert logged(trainer, "loss") == logged(undisturbed, "loss")
    same_weights(model, whole, rtol=0, atol=0)
    seen = [collator.seen for collator in collators]
    assert len(seen[0]) > len(seen[1]) > 0
    for left, right in zip(seen[0][-len(seen[1]) :], seen[1], strict=True):
        assert torch.equal(left, right)
    masked = [float((ids == 4).float().mean()) for ids in seen[0]]
    assert min(masked) < max(masked)


def test_random_numbers_of_a_collator_follow_from_seed_epoch_and_rows():
    rows = list(random_pairs(MANY[:6]))

    def drawn(seed: int, epoch: int, rows) -> torch.Tensor:
        collator = CollatorWithItsOwnSeed(lambda rows: torch.rand(8), seed)
        collator.epoch.fill_(epoch)
        return collator(rows)

    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    reference = drawn(1, 0, rows)
    assert torch.equal(drawn(1, 0, rows), reference)
    for other in ((2, 0, rows), (1, 1, rows), (1, 0, rows[::-1]), (1, 0, rows[:5])):
        assert not torch.equal(drawn(*other), reference)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == generators


def test_a_collator_stays_what_it_was_to_whoever_asks_the_trainer(tmp_path, tiny_tokenizer):
    model = small_model()
    collator = DataCollatorForSeq2Seq(tiny_tokenizer, model=model)
    trainer = VanillaTransformerTrainer(model, arguments(tmp_path), data_collator=collator)
    assert trainer.data_collator.tokenizer is tiny_tokenizer
    copied = pickle.loads(pickle.dumps(trainer.data_collator))  # as a worker that is not forked gets it
    rows = [dict(row) for row in random_pairs(EIGHT)]
    for name, value in collator(copy.deepcopy(rows)).items():
        assert torch.equal(copied(copy.deepcopy(rows))[name], value)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = trainer.data_collator.no_such_thing
    ours = TranslationCollator(PAD)
    assert VanillaTransformerTrainer(model, arguments(tmp_path), data_collator=ours).data_collator is ours


def test_a_run_resumed_at_the_end_of_an_epoch_is_bit_identical(tmp_path):
    whole, undisturbed = resumable(tmp_path, save_strategy="epoch")
    undisturbed.train()
    first = min(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    model, trainer = resumable(tmp_path, seed=5, save_strategy="epoch")
    trainer.train(resume_from_checkpoint=str(first))
    assert logged(trainer, "loss") == logged(undisturbed, "loss")
    same_weights(model, whole, rtol=0, atol=0)


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    whole, undisturbed = resumable(tmp_path)
    undisturbed.train()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-12")
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"epoch": 1.')
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    model, trainer = resumable(tmp_path, seed=5)
    trainer.train(resume_from_checkpoint=True)
    assert logged(trainer, "loss") == logged(undisturbed, "loss")
    same_weights(model, whole, rtol=0, atol=0)


def test_there_is_no_last_checkpoint_in_an_empty_or_missing_folder(tmp_path):
    assert last_whole_checkpoint(tmp_path) is None
    assert last_whole_checkpoint(tmp_path / "missing") is None


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


CHECKPOINT_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of 12 updates with checkpoints at 5, 10 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    model, trainer = resumable(folder)
    trainer.train()
    return folder, model, trainer


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_checkpoint_with_a_file_cut_short_is_passed_over_with_a_warning(
    tmp_path, whole_run, name, share, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
    shutil.copytree(whole_run[0], tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoint-12"
    assert {path.name for path in damaged.iterdir()} >= set(CHECKPOINT_FILES)
    assert last_whole_checkpoint(tmp_path / "run") == str(damaged)
    assert caplog.text == ""
    cut(damaged / name, share)
    with caplog.at_level(logging.WARNING):
        assert last_whole_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-10")
    assert f"{damaged} is passed over" in caplog.text
    assert name in caplog.text
    with pytest.raises(ValueError, match=f"checkpoint-12 is not a whole checkpoint: {re.escape(name)}"):
        resumable(tmp_path / "run")[1].train(resume_from_checkpoint=str(damaged))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_checkpoint_that_lacks_a_file_is_passed_over(tmp_path, whole_run, name):
    shutil.copytree(whole_run[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoint-12" / name).unlink()
    assert last_whole_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-10")
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        resumable(tmp_path / "run")[1].train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-12"))


def test_weights_in_several_files_must_all_be_there(tmp_path, whole_run):
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(whole_run[0] / "checkpoint-5", folder)
    small_model().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert fault_of_checkpoint(folder) is None
    max(folder.glob("model-*.safetensors")).unlink()
    assert "model.safetensors.index.json" in fault_of_checkpoint(folder)


def test_a_checkpoint_of_the_model_alone_is_whole(tmp_path):
    _, trainer = resumable(tmp_path, save_only_model=True, max_steps=5)
    trainer.train()
    assert not (tmp_path / "checkpoint-5" / "optimizer.pt").exists()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path, whole_run):
    """The weights of the last checkpoint are cut short though its trainer_state.json is whole: bit-identical still."""
    shutil.copytree(whole_run[0], tmp_path / "run")
    cut(tmp_path / "run" / "checkpoint-12" / "model.safetensors", 0.7)
    cut(tmp_path / "run" / "checkpoint-10" / "optimizer.pt", 0.7)
    model, trainer = resumable(tmp_path / "run", seed=5)
    trainer.train(resume_from_checkpoint=True)
    assert logged(trainer, "loss") == logged(whole_run[2], "loss")
    same_weights(model, whole_run[1], rtol=0, atol=0)
    assert last_whole_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-12")


def test_a_checkpoint_that_another_run_was_writing_over_when_it_died_is_not_whole(tmp_path, whole_run, monkeypatch):
    """New weights beside an old optimizer and an old trainer_state.json would look whole."""
    shutil.copytree(whole_run[0], tmp_path / "run")

    def die(*args):
        raise KeyboardInterrupt

    model, trainer = resumable(tmp_path / "run", seed=9)
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", die)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 5
    for path in (tmp_path / "run").glob("checkpoint-1*"):
        shutil.rmtree(path)
    saved = load_file(tmp_path / "run" / "checkpoint-5" / "model.safetensors")
    assert torch.equal(saved["model.encoder.embed_tokens.weight"], model.get_input_embeddings().weight)
    assert last_whole_checkpoint(tmp_path / "run") is None


KILLED_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import conftest, torch
from test_training import last_whole_checkpoint, logged, resumable
torch.set_num_threads(1)
folder = Path(sys.argv[1])
resumes = last_whole_checkpoint(folder) is not None
model, trainer = resumable(folder, seed=5 if resumes else 0, max_steps=60, save_steps=2, save_total_limit=3)
print("BEGINS", flush=True)
trainer.train(resume_from_checkpoint=True if resumes else None)
torch.save([model.state_dict(), logged(trainer, "loss")], folder / "end.pt")
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    """SIGKILL at moments by lot: every other one while a checkpoint is being written, the rest anywhere; six, or as
    many more as it takes to leave two checkpoints half written."""
    script = tmp_path / "run.py"
    script.write_text(KILLED_SCRIPT.format(tests=str(Path(__file__).parent)))
    rng = random.Random(0)
    kills, half_written = 0, 0

    def start(folder: Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(process: subprocess.Popen) -> None:
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors

    finish(start(tmp_path / "whole"))
    folder = tmp_path / "killed"
    while kills < 6 or (half_written < 2 and kills < 10):
        known = set(folder.glob("checkpoint-*"))
        process = start(folder)
        assert process.stdout.readline() == "BEGINS\n"
        if kills % 2 == 0:
            while process.poll() is None and not set(folder.glob("checkpoint-*")) - known:
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.02))
        else:
            time.sleep(rng.uniform(0.2, 1.0))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
        kills += 1
        half_written += any(fault_of_checkpoint(path) for path in folder.glob("checkpoint-*"))
    assert half_written >= 2
    finish(start(folder))
    (expected, expected_losses), (weights, losses) = (
        torch.load(each / "end.pt", weights_only=True) for each in (tmp_path / "whole", folder)
    )
    assert losses == expected_losses
    assert len(losses) == 60
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


RESUME_SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import conftest, torch
from test_training import RandomCollator, logged, resumable
torch.set_num_threads(1)
folder, checkpoint, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
model, trainer = resumable(
    folder,
    seed=0 if checkpoint == "none" else 5,
    collator=RandomCollator() if sys.argv[5] == "random" else None,
    dataloader_num_workers=workers,
    dataloader_persistent_workers=sys.argv[6] == "persistent",
)
trainer.train(resume_from_checkpoint=None if checkpoint == "none" else str(folder / checkpoint))
torch.save(model.state_dict(), sys.argv[4])
print("RESULT", json.dumps([logged(trainer, "loss"), logged(trainer, "learning_rate")]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers, collator, kind",
    [(0, "plain", "-"), (2, "plain", "-"), (2, "random", "-"), (2, "random", "persistent")],
)
def test_a_run_resumed_in_a_new_process_is_bit_identical(tmp_path, workers, collator, kind):
    script = tmp_path / "run.py"
    script.write_text(RESUME_SCRIPT.format(tests=str(Path(__file__).parent)))
    results, weights = [], []
    for checkpoint in ("none", "checkpoint-5"):
        output = tmp_path / f"weights-{checkpoint}.pt"
        command = [sys.executable, str(script), str(tmp_path / "run"), checkpoint, str(workers), str(output)]
        result = subprocess.run([*command, collator, kind], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        results.append(next(line for line in result.stdout.splitlines() if line.startswith("RESULT")))
        weights.append(torch.load(output, weights_only=True))
    assert results[0] == results[1]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


# --- Best model, early stopping --------------------------------------------------------------------------------------


class Scripted:
    """Metrics with a BLEU by script, and a note of the weights at each evaluation."""

    def __init__(self, model, scores: list[float]):
        self.model = model
        self.scores = iter(scores)
        self.weights: list[dict[str, torch.Tensor]] = []

    def __call__(self, prediction):
        self.weights.append(copy.deepcopy(self.model.state_dict()))
        return {"bleu": next(self.scores)}


def scripted_run(folder: Path, scores: list[float], callbacks=(), **settings):
    model = small_model()
    model.generation_config.max_new_tokens_over_source = 2
    metrics = Scripted(model, scores)
    trainer = VanillaTransformerTrainer(
        model,
        arguments(
            folder,
            **{
                "max_steps": len(scores),
                "warmup_steps": 4,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "save_strategy": "steps",
                "save_steps": 1,
                "save_total_limit": 1,
                "load_best_model_at_end": True,
                "metric_for_best_model": "bleu",
                "greater_is_better": True,
                "generation_num_beams": 1,
                **settings,
            },
        ),
        train_dataset=random_pairs(MANY),
        eval_dataset=random_pairs(MANY[:3]),
        compute_metrics=metrics,
        callbacks=list(callbacks),
    )
    trainer.train()
    return model, trainer, metrics


def test_the_model_with_the_best_bleu_is_kept(tmp_path, caplog):
    """And loading it does not warn of tied matrices that a checkpoint holds once."""
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        model, trainer, metrics = scripted_run(tmp_path, [10.0, 30.0, 20.0, 25.0])
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert trainer.state.best_metric == 30.0
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    for name, value in model.state_dict().items():
        assert torch.equal(value, metrics.weights[1][name]), name
        if "norm" not in name:
            assert not torch.equal(value, metrics.weights[3][name]), name
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert "missing keys" not in caplog.text
    trainer.save_model(str(tmp_path / "best"))
    same_weights(VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path / "best"), model, rtol=0, atol=0)


def test_missing_weights_that_are_not_tied_are_still_reported(tmp_path, caplog):
    trainer = VanillaTransformerTrainer(small_model(), arguments(tmp_path))
    state = dict(trainer.model.state_dict())
    del state["lm_head.weight"], state["model.decoder.layers.0.feed_forward.fc1.weight"]
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        trainer._issue_warnings_after_load(trainer.model.load_state_dict(state, strict=False))
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert "feed_forward.fc1.weight" in caplog.text
    assert "lm_head" not in caplog.text


@pytest.mark.parametrize(("losses", "best"), [([3.0, 2.0, 2.5], 2), ([2.0, 3.0, 2.5], 1), ([2.0, 2.0, 2.0], 1)])
def test_of_models_with_equal_bleu_that_of_the_lowest_loss_is_kept(tmp_path, monkeypatch, losses, best):
    """BLEU is 0 for long in a small or an early run, and its first model is the worst."""
    remaining = iter(losses)
    evaluation_loop = VanillaTransformerTrainer.evaluation_loop

    def scripted(self, *args, **kwargs):
        output = evaluation_loop(self, *args, **kwargs)
        output.metrics["eval_loss"] = next(remaining)
        return output

    monkeypatch.setattr(VanillaTransformerTrainer, "evaluation_loop", scripted)
    model, trainer, metrics = scripted_run(tmp_path, [0.0, 0.0, 0.0])
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.state.best_metric == 0.0
    assert all(torch.equal(value, metrics.weights[best - 1][name]) for name, value in model.state_dict().items())


def test_training_stops_early_where_bleu_no_longer_rises(tmp_path):
    _, trainer, metrics = scripted_run(
        tmp_path, [10.0, 20.0, 15.0, 12.0, 99.0, 99.0], [EarlyStoppingCallback(early_stopping_patience=2)]
    )
    assert trainer.state.global_step == 4
    assert trainer.state.best_metric == 20.0


# --- It learns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [VanillaTransformerTrainer, Trainer])
def test_a_few_pairs_are_learnt_by_heart_end_of_sentence_included(tmp_path, cls):
    """Greedy and beam decoding give the targets exactly, first token to EOS."""
    dataset = random_pairs([(4, 3), (6, 7), (3, 5), (7, 11)])
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(small_model(d_model=32, d_ff=64, dropout=0.0).config)
    common = {"max_steps": 100, "learning_rate": 0.005, "logging_steps": 60}
    if cls is Trainer:
        args = arguments(tmp_path, TrainingArguments, **common)
        trainer = cls(model, args, train_dataset=dataset, data_collator=TranslationCollator(PAD))
    else:
        trainer = cls(model, arguments(tmp_path, warmup_steps=20, **common), train_dataset=dataset)
    trainer.train()
    model.eval()
    batch = collated(dataset)
    for beams in (1, 4):
        settings = {"num_beams": beams, "max_new_tokens": 64}
        if beams == 1:
            settings |= {"early_stopping": False}
        rows = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **settings).tolist()
        for row, pair in zip(rows, dataset, strict=True):
            target = [BOS, *pair["labels"]]
            assert row[: len(target)] == target
            assert set(row[len(target) :]) <= {PAD}


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_freed_memory_is_kept_only_where_there_is_glibc(monkeypatch):
    loaded = []
    monkeypatch.setattr(training.ctypes, "CDLL", lambda name: loaded.append(name) or object())
    monkeypatch.setattr(training.sys, "platform", "darwin")
    keep_freed_memory()
    give_back_freed_memory()
    assert loaded == []
    monkeypatch.setattr(training.sys, "platform", "linux")
    keep_freed_memory()  # a C library without mallopt, as musl's: nothing happens
    assert loaded == [None]
    give_back_freed_memory()  # and without malloc_trim
    assert loaded == [None, None]


def test_freed_memory_goes_back_to_the_system():
    """Half of many blocks is freed, none of it at the heap's end, from where alone glibc gives back by itself."""
    script = """
import ctypes, re
from vanilla_transformer.training import give_back_freed_memory, keep_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

keep_freed_memory()
give_back_freed_memory()  # what the imports have left
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(2**20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 2**20)
for block in blocks[:-1:2]:
    libc.free(block)
before = resident()
give_back_freed_memory()
print(before, resident())
"""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        pytest.skip("freed memory is kept with glibc only")
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = map(int, told.stdout.split())
    assert 80 <= before - after <= 120


def test_a_long_run_gives_memory_back_now_and_then(tmp_path, monkeypatch):
    given_back = []
    args = arguments(tmp_path, max_steps=5)
    trainer = VanillaTransformerTrainer(small_model(), args, train_dataset=random_pairs(MANY))
    monkeypatch.setattr(training, "UPDATES_UNTIL_MEMORY_IS_GIVEN_BACK", 2)
    monkeypatch.setattr(training, "give_back_freed_memory", lambda: given_back.append(trainer.state.global_step))
    trainer.train()
    trainer.args.max_steps = 7
    trainer.train()  # from the beginning; the callback is still there, once
    assert given_back == [2, 4, 2, 4, 6]


@pytest.mark.parametrize("device, calls", [("cpu", 1), ("meta", 0)])
def test_memory_is_given_back_only_where_a_processor_trains(monkeypatch, device, calls):
    given_back = []
    monkeypatch.setattr(training, "give_back_freed_memory", lambda: given_back.append(1))
    state = TrainerState(global_step=training.UPDATES_UNTIL_MEMORY_IS_GIVEN_BACK)
    training.GivesBackMemory().on_step_end(SimpleNamespace(device=torch.device(device)), state, TrainerControl())
    assert len(given_back) == calls


@pytest.mark.parametrize(
    "given, again", [(None, "cache_miss"), pytest.param("1024", "cache_hit", marks=pytest.mark.slow)]
)
def test_kernels_of_old_shapes_are_forgotten_unless_the_user_wants_them(given, again):
    """By oneDNN's own log: a shape is multiplied, then 200 others, then the first again."""
    script = """
import torch
from vanilla_transformer.training import keep_few_kernels
keep_few_kernels()
weight = torch.ones(32, 64, dtype=torch.bfloat16)
for rows in (7, *range(8, 208), 7):
    torch.nn.functional.linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
"""
    environment = {**os.environ, "ONEDNN_VERBOSE": "2"}
    environment.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    if given is not None:
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = given
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    created = [line for line in told.stdout.splitlines() if ",create:" in line]
    if len(created) < 202:
        pytest.skip("bfloat16 matrices are multiplied by another library here")
    assert again in created[-1]


@pytest.mark.parametrize("device, calls", [("cpu", 1), ("meta", 0)])
def test_freed_memory_is_kept_only_for_training_on_a_processor(tmp_path, monkeypatch, device, calls):
    called = []
    monkeypatch.setattr(training, "keep_freed_memory", lambda: called.append(1))
    monkeypatch.setattr(Seq2SeqTrainer, "train", lambda self, *args, **kwargs: TrainOutput(0, 0.0, {}))
    trainer = VanillaTransformerTrainer(small_model(), arguments(tmp_path))
    monkeypatch.setattr(type(trainer.args), "device", torch.device(device))
    trainer.train()
    assert len(called) == calls


def test_the_gain_of_bfloat16_is_the_ratio_of_the_times(monkeypatch):
    now = [0.0]
    product = torch.Tensor.__matmul__

    def timed_product(a, b):
        now[0] += 6.0 if a.dtype == torch.float32 else 2.0
        return product(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", timed_product)
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    bfloat16_gain.cache_clear()
    assert bfloat16_gain(size=4) == 3.0
    bfloat16_gain.cache_clear()


# --- Several processes -----------------------------------------------------------------------------------------------


PREDICT_SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import conftest, torch
from small_models import small_model
from test_training import MANY, QUIET, random_pairs
from vanilla_transformer.training import VanillaTransformerTrainer, VanillaTransformerTrainingArguments
torch.set_num_threads(1)
model = small_model()
model.generation_config.max_new_tokens_over_source = 3
by_batch = sys.argv[3] == "by_batch"
args = VanillaTransformerTrainingArguments(
    output_dir=sys.argv[1], generation_num_beams=1, tokens_per_batch=int(sys.argv[2]), batch_eval_metrics=by_batch,
    include_for_metrics=["inputs", "loss"], **QUIET
)
rows = []
def compute_metrics(prediction, compute_result=True):
    inputs = prediction.inputs["input_ids"] if by_batch else prediction.inputs
    assert len(prediction.predictions) == len(prediction.label_ids) == len(inputs) == len(prediction.losses)
    rows.extend(tuple(token for token in row if token not in (-100, 1)) for row in inputs.tolist())
    return {{"segments": len(rows), "distinct": len(set(rows))}} if compute_result else {{}}
trainer = VanillaTransformerTrainer(model, args, compute_metrics=compute_metrics)
output = trainer.predict(random_pairs(MANY[:5]))
if trainer.is_world_process_zero():
    rows = [[t for t in row if t not in (-100, 1)] for row in output.predictions.tolist()]
    labels = [[t for t in row if t != -100] for row in output.label_ids.tolist()]
    print("RESULT", json.dumps([trainer.args.world_size, rows, labels, output.metrics["test_loss"],
          output.metrics["test_segments"], output.metrics["test_distinct"]]), flush=True)
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
"""


def launch(processes: int, arguments: list[str]) -> str:
    """Runs a script in one process, or in several under torchrun on this machine; returns its standard output.

    The script has to end its process group: gloo's threads may still hold a tensor when the interpreter goes, which
    aborts.
    """
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*launcher, *arguments], capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at_the_end", "by_batch"])
@pytest.mark.parametrize("tokens_per_batch", [14, 4096])
def test_two_processes_evaluate_every_segment_once(tmp_path, tokens_per_batch, how):
    """Five segments; in one batch for all, a process has none at all."""
    script = tmp_path / "predict.py"
    script.write_text(PREDICT_SCRIPT.format(tests=str(Path(__file__).parent)))
    results = []
    for processes in (1, 2):
        output = launch(processes, [str(script), str(tmp_path / "out"), str(tokens_per_batch), how])
        line = next(line for line in output.splitlines() if line.startswith("RESULT"))
        results.append(json.loads(line.removeprefix("RESULT ")))
    assert [result[0] for result in results] == [1, 2]
    assert results[1][1:3] == results[0][1:3]
    assert results[1][3] == pytest.approx(results[0][3], abs=1e-6)
    assert results[0][4:] == results[1][4:] == [5, 5]
    assert results[0][2] == [row["labels"] for row in random_pairs(MANY[:5])]


def test_training_leaves_use_cache_of_the_configuration_as_it_was(tmp_path, tiny_tokenizer):
    for use_cache in (True, False):
        config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tiny_tokenizer), use_cache=use_cache)
        model = VanillaTransformerForConditionalGeneration(config)
        arguments = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        VanillaTransformerTrainer(model, arguments, processing_class=tiny_tokenizer)
        assert model.config.use_cache is use_cache
