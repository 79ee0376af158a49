"""A run that goes on from a checkpoint: in what it is not the run that wrote it.

Weights, optimizer, learning rate and random numbers come from the checkpoint; text, batches and the rest of the
settings from whoever starts it again, who may have changed them without meaning to.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from vanilla_transformer.hub import STOCK_DEFAULTS, TrainingRun


logger = logging.get_logger(__name__)

BATCHES = ("tokens_per_batch", "per_device_train_batch_size")
OTHER_UPDATES = ("lr_scheduler_type", "warmup_steps", "max_grad_norm", "bf16", "fp16", "optim")
# The states of the optimizer and of the schedule bring them along.
KEPT = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")
# Fields of the configuration that do not change what is trained, or that belong to the tokenizer.
_INDIFFERENT_FIELDS = {"use_cache", "bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"}


def digest_of_lengths(lengths: list[np.ndarray]) -> str:
    """Tells one training text from another, as far as batches go: by the tokens of each of its pairs, in their order.

    Args:
        lengths: One array of shape `(pairs,)` for each side.
    """
    digest = hashlib.blake2b(digest_size=16)
    for side in lengths:
        digest.update(np.ascontiguousarray(side, dtype="<i8").tobytes())
    return digest.hexdigest()


def warn_of_changes(checkpoint: Path, before: TrainingRun, now: TrainingRun, config: Any = None) -> None:
    """Warns where a run that goes on will not make the updates that it would have made undisturbed.

    Args:
        checkpoint: What it goes on from.
        before: The record in it.
        now: What is known of the run that goes on: arguments, processes, text.
        config: Of the model, where the checkpoint's is of the same kind; None where they are not to be compared.
    """
    if before.processes is None or now.processes is None:
        return
    batches = changed_batches(before, now)
    others = [*changed_text(before, now), *changed_settings(before, now, OTHER_UPDATES)]
    if any(needs_total(run) for run in (before, now)):
        by_updates = all((_value(run, "max_steps") or 0) > 0 for run in (before, now))
        others += changed_settings(before, now, ["max_steps"] if by_updates else ["max_steps", "num_train_epochs"])
    if config is not None:
        others += changed_fields(checkpoint, config)
    if changed := [*batches, *others]:
        what = "in other batches" if not others else "otherwise"
        logger.warning(
            f"{checkpoint} was trained {what} ({'; '.join(changed)}): the run goes on, but neither its updates nor "
            "its place in the text are those of an undisturbed one"
        )
    elif now.processes != before.processes and getattr(config, "dropout", None):
        logger.warning(
            f"{checkpoint} was trained in {before.processes} processes, this run has {now.processes}: batches are the "
            "same, but the random numbers of dropout are others"
        )
    if kept := changed_settings(before, now, KEPT):
        logger.warning(
            f"{'; '.join(kept)}: a run that goes on keeps what its checkpoint has; to change it, fine-tune the model "
            "in a run of its own"
        )


def changed_batches(before: TrainingRun, now: TrainingRun) -> list[str]:
    """In what the batches of an update differ."""
    changed = changed_settings(before, now, BATCHES)
    steps_before, steps = (run.arguments.get("gradient_accumulation_steps", 1) for run in (before, now))
    processes_before, processes = (run.processes or 1 for run in (before, now))
    at_once = processes_before * steps_before
    if processes * steps != at_once:
        fits = at_once % processes == 0 and not (now.streamed and processes != processes_before)
        hint = f", --gradient_accumulation_steps {at_once // processes} keeps them" if fits else ""
        products = f"{processes_before} x {steps_before} before, {processes} x {steps} now"
        changed.append(f"processes x accumulation steps {products}{hint}")
    elif now.streamed and processes != processes_before:
        changed.append(f"a stream divided among {processes_before} processes before, {processes} now")
    return changed


def changed_text(before: TrainingRun, now: TrainingRun) -> list[str]:
    """In what the text, its languages, and its order differ, as far as both runs know."""
    changed = []
    if None not in (before.training_text, now.training_text):
        other = before.training_text != now.training_text
    else:
        other = None not in (before.training_pairs, now.training_pairs) and before.training_pairs != now.training_pairs
    if other and before.training_pairs != now.training_pairs:
        changed.append(f"training text of {before.training_pairs:,} pairs before, {now.training_pairs:,} now")
    elif other:
        changed.append(f"another training text of as many pairs ({now.training_pairs:,})")
    for name in ("source_lang", "target_lang"):
        known = getattr(before, name), getattr(now, name)
        if None not in known and known[0] != known[1]:
            changed.append(f"--{name} {known[0]} before, {known[1]} now")
    if (before.files or before.dataset) and (now.files or now.dataset):  # else the command did not tell
        if bool(before.streamed) != bool(now.streamed):
            changed.append("--streaming " + ("now, but not before" if now.streamed else "before, but not now"))
        elif now.streamed:
            if (before.files, before.dataset) != (now.files, now.dataset):
                names = [", ".join([*run.files, *([run.dataset] if run.dataset else [])]) for run in (before, now)]
                changed.append(f"a stream of {names[0]} before, of {names[1]} now")
            if before.shuffle_buffer_size != now.shuffle_buffer_size:
                changed.append(
                    f"--shuffle_buffer_size {before.shuffle_buffer_size} before, {now.shuffle_buffer_size} now"
                )
        weights = [[corpus.get("weight") for corpus in run.corpora] for run in (before, now)]
        if weights[0] != weights[1]:
            given = [" ".join(f"{weight:g}" for weight in each) or "none" for each in weights]
            changed.append(f"--train_weights {given[0]} before, {given[1]} now")
    own = [_value(run, "data_seed") for run in (before, now)]
    seeds = [_value(run, "seed") if seed is None else seed for run, seed in zip((before, now), own, strict=True)]
    if seeds[0] != seeds[1]:
        changed.append(f"seed of the text's order {seeds[0]} before, {seeds[1]} now")
    return changed


def changed_settings(before: TrainingRun, now: TrainingRun, names: Any) -> list[str]:
    """Training arguments of these names that differ."""
    values = {name: (_value(before, name), _value(now, name)) for name in names}
    return [f"--{name} {old} before, {new} now" for name, (old, new) in values.items() if not _same(old, new)]


def needs_total(run: TrainingRun) -> bool:
    """Whether its learning rate depends on how many updates it is to make in all."""
    schedule, warmup = str(_value(run, "lr_scheduler_type")), _value(run, "warmup_steps") or 0
    return not schedule.startswith(("inverse_sqrt", "constant")) or 0 < warmup < 1


def changed_fields(checkpoint: Path, config: Any) -> list[str]:
    """Fields of the model's configuration that differ from those in a checkpoint."""
    try:
        before = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []  # which opening it will tell, where it matters
    now = json.loads(json.dumps(config.to_dict(), default=str))
    names = [name for name in type(config).__annotations__ if name not in _INDIFFERENT_FIELDS]
    return [
        f"{name}={json.dumps(before[name])} in its configuration before, {json.dumps(now.get(name))} now"
        for name in names
        if name in before and before[name] != now.get(name)
    ]


def _same(old: Any, new: Any) -> bool:
    """Whether they mean the same: numbers by their value, for 4000 and 4000.0 do."""
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return old == new
    return str(old) == str(new)


def _value(run: TrainingRun, name: str) -> Any:
    """An argument of a run, whose record leaves out what is the default of transformers."""
    default = STOCK_DEFAULTS.get(name)
    return run.arguments.get(name, None if default is dataclasses.MISSING else getattr(default, "value", default))


__all__ = ["digest_of_lengths", "warn_of_changes"]
