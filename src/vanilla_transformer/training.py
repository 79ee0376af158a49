"""Training: the paper's recipe (sections 5.1 to 5.4) as a `Seq2SeqTrainer`.

`VanillaTransformerTrainer` adds to the stock trainer batches bounded by tokens, the learning rate of equation (3) to
the letter, and an evaluation that is a mean over tokens, scores each segment once and measures BLEU by generation.
"""

import contextlib
import copy
import ctypes
import errno
import functools
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import find_batch_size, gather_object
from datasets import Dataset
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, PredictionOutput, denumpify_detensorize
from transformers.utils import logging

from vanilla_transformer.data import TokenBatchSampler, TranslationCollator, token_lengths
from vanilla_transformer.evaluation import compute_metrics_for, corpus_scores
from vanilla_transformer.going_on import digest_of_lengths, warn_of_changes
from vanilla_transformer.hub import (
    RECORD,
    WEIGHTS,
    TrainingRun,
    changed_arguments,
    decoding_text,
    name_of_base,
    record_of,
    shapes_in,
    write_model_card,
)
from vanilla_transformer.mixing import MixedTokenBatchSampler, Mixture
from vanilla_transformer.streaming import RowsOfTheSampler, StreamedTokenBatches, TokenStream
from vanilla_transformer.translation import length_batches


logger = logging.get_logger(__name__)

# Some minutes of a tiny model on a CPU, beside which the page faults that follow do not count.
UPDATES_UNTIL_MEMORY_IS_GIVEN_BACK = 250


def learning_rate_at(update: int, d_model: int, warmup_steps: int = 4000, factor: float = 1.0) -> float:
    """factor * d_model^-0.5 * min(update^-0.5, update * warmup_steps^-1.5).

    Args:
        update (`int`): Number of the update, from 1.
        d_model (`int`): Width of the model.
        warmup_steps (`int`, defaults to 4000): Updates of linear growth.
        factor (`float`, defaults to 1.0): 1 in the paper.

    Raises:
        ValueError: An update or a warm-up below 1.

    Source: Vaswani et al. 2017, section 5.3, equation (3).
    """
    if update < 1 or warmup_steps < 1:
        raise ValueError(f"update and warmup_steps count from 1, got update={update} and warmup_steps={warmup_steps}.")
    return factor * d_model**-0.5 * min(update**-0.5, update * warmup_steps**-1.5)


@dataclass
class VanillaTransformerTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the paper's recipe as defaults, and batches bounded by tokens.

    Every argument of the stock class is there; these differ or are new:

    Args:
        tokens_per_batch (`int`, *optional*, defaults to 4096): Rows times longest row, padding counted, at most, for
            the source side and for the target side each, for each process and micro-batch (section 5.1 has about
            25,000 over all). None means `per_device_train_batch_size` sentences; the two exclude each other.
        learning_rate (`float`, *optional*): Peak of the schedule, reached at `warmup_steps`. None means equation (3):
            (d_model * warmup_steps) ** -0.5.
        lr_scheduler_type (`str`, defaults to "inverse_sqrt"): In `VanillaTransformerTrainer` this is the shape of
            equation (3), exactly, the first update included.
        warmup_steps (`float`, defaults to 4000): Section 5.3.
        adam_beta2, adam_epsilon (`float`, default to 0.98 and 1e-9): Section 5.3.
        max_grad_norm (`float`, defaults to 0.0): No clipping; the paper mentions none.
        predict_with_generate (`bool`, defaults to True): BLEU by generation at each evaluation.

    Raises:
        ValueError: `tokens_per_batch` below 1, or given together with `per_device_train_batch_size`; FSDP without an
            accelerator, where accelerate would leave it out.

    Source: Vaswani et al. 2017, sections 5.1 and 5.3.
    """

    tokens_per_batch: int | None = field(
        default=4096,
        metadata={"help": "Rows times longest row at most, for source and target each, per process and micro-batch."},
    )
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Peak learning rate; by default (d_model * warmup_steps) ** -0.5, equation (3)."},
    )
    lr_scheduler_type: str = field(
        default="inverse_sqrt", metadata={"help": 'The schedule; "inverse_sqrt" is equation (3) of the paper.'}
    )
    warmup_steps: float = field(default=4000, metadata={"help": "Updates of linear growth of the learning rate."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Beta2 of Adam."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Epsilon of Adam."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Largest norm of the gradient; 0 means no clipping."})
    predict_with_generate: bool = field(default=True, metadata={"help": "Measure BLEU by generation."})

    def __post_init__(self):
        if self.tokens_per_batch is not None and self.tokens_per_batch < 1:
            raise ValueError(f"tokens_per_batch must be at least 1, got tokens_per_batch={self.tokens_per_batch}.")
        rows = self.per_device_train_batch_size
        defaults = {each.name: each.default for each in fields(self)}
        if self.tokens_per_batch is not None and rows != defaults["per_device_train_batch_size"]:
            raise ValueError(
                f"per_device_train_batch_size={rows} and tokens_per_batch={self.tokens_per_batch} exclude each other: "
                "a batch is bounded by sentences or by tokens; set tokens_per_batch=None for batches of sentences."
            )
        if (self.bf16 or self.bf16_full_eval) and not torch.accelerator.is_available():
            self.use_cpu = True  # else transformers refuses bfloat16, which processors do have
        super().__post_init__()
        sharded = self.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
        if sharded and self.device.type == "cpu":
            raise ValueError(
                "FSDP is asked for, but on a processor accelerate knows none and would, without a word, train a whole "
                "copy of the model in each process; leave --fsdp out (and FSDP of the accelerate config), or train on "
                "GPUs."
            )
        if self.fp16 and self.device.type == "cpu":
            logger.warning(
                "fp16=True has no effect on a processor: accelerate trains in float32 there; bf16=True is for both."
            )


class EpochOfSampler(TrainerCallback):
    """Tells a batch sampler its epoch, derived from the updates done: a resumed run reshuffles as the first did."""

    def __init__(self, sampler: TokenBatchSampler, updates_per_epoch: int):
        self.sampler = sampler
        self.updates_per_epoch = updates_per_epoch

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Called before the epoch's first batch is drawn."""
        self.sampler.set_epoch(state.global_step // self.updates_per_epoch)


class CollatorWithItsOwnSeed:
    """Collates with random numbers that follow from the seed, the epoch and the rows alone.

    A loader collates a batch before it is asked for, in this process or in a worker. A collator that drops or masks
    words at random would therefore do so otherwise after a resume, and shift the random numbers of the dropout. So it
    finds the generators of `random`, numpy and torch (on the processor) seeded, and they are put back afterwards.
    Attributes of the collator are found here too.

    Args:
        collator: Makes a batch of rows.
        seed: Of the run.
    """

    def __init__(self, collator: Any, seed: int):
        self.collator = collator
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers may outlive an epoch

    def __call__(self, rows: Any) -> Any:
        """One batch."""
        text = f"{self.seed} {int(self.epoch)} {rows!r}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).digest()
        seed = int.from_bytes(digest, "big")
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            return self.collator(rows)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def __getattr__(self, name: str) -> Any:
        if name in ("collator", "seed", "epoch"):  # not set yet, while it is being unpickled in a worker
            raise AttributeError(name)
        return getattr(self.collator, name)


class EpochOfCollator(TrainerCallback):
    """Tells a `CollatorWithItsOwnSeed` its epoch."""

    def __init__(self, collator: CollatorWithItsOwnSeed):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        """Called before the epoch's first batch is drawn; after a resume `state.epoch` has a fraction."""
        self.collator.epoch.fill_(int(state.epoch or 0))


class NothingButNumbers(TrainerCallback):
    """Stops a run before an update that would make its weights infinite or undefined."""

    def __init__(self, trainer: "VanillaTransformerTrainer"):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Called when the gradients of an update are complete, the same on every process."""
        self.trainer.check_update()


class GivesBackMemory(TrainerCallback):
    """Gives freed memory back to the system now and then while a CPU trains; see `give_back_freed_memory`."""

    def on_step_end(self, args, state, control, **kwargs):
        """Called after each update."""
        if args.device.type == "cpu" and state.global_step % UPDATES_UNTIL_MEMORY_IS_GIVEN_BACK == 0:
            give_back_freed_memory()


class BestOfItsRun(TrainerCallback):
    """Finds the best checkpoint of a run that goes on, wherever the run has been moved or copied.

    The trainer's state knows it by its path, at which there may be nothing any more, or another run.
    """

    def __init__(self, trainer: "VanillaTransformerTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        """Called when the state has been read."""
        resumed, recorded = self.trainer.resumed_from, self.trainer.best_before
        if resumed is None or recorded is None:
            return
        beside = (resumed.parent, resumed.resolve().parent, Path(args.output_dir), Path(recorded).parent)
        best = next(
            (folder / Path(recorded).name for folder in beside if (folder / Path(recorded).name).is_dir()), None
        )
        if best is not None:
            if state.best_model_checkpoint is None and args.should_log:  # the stock trainer has given it up
                logger.warning(f"the best checkpoint so far is {best}")
            state.best_model_checkpoint = str(best)
            return
        state.best_model_checkpoint = state.best_global_step = state.best_metric = None
        if args.load_best_model_at_end and args.should_log:
            logger.warning(
                f"{Path(recorded).name}, the best checkpoint so far, is gone: a later one will be kept, or the last "
                "model"
            )


class FixedBatches:
    """Index lists in a fixed order, as a `DataLoader`'s batch sampler.

    Args:
        batches: This process's batches.
        steps: Batches of the process that has most of them.
    """

    def __init__(self, batches: list[list[int]], steps: int):
        self.batches = batches
        self.steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass
class Segment:
    """What the evaluation knows of one row of the dataset; None where it was not asked for.

    Args:
        index: Row of the dataset.
        prediction: Generated ids, shape `(length,)`, or logits, shape `(target_length, vocab_size)`.
        labels: Its labels, shape `(target_length,)`, -100 for padding.
        loss: Mean over its own target tokens; not a number where it has none.
        inputs: What the model was given, by name, one row of each.
    """

    index: int
    prediction: Any = None
    labels: list[int] | None = None
    loss: float | None = None
    inputs: dict[str, Any] | None = None


class VanillaTransformerTrainer(Seq2SeqTrainer):
    """`Seq2SeqTrainer` for translation as in the paper.

    Differs from the stock trainer in these points:

    - with `tokens_per_batch` (from `VanillaTransformerTrainingArguments` or given here), batches are bounded by tokens
      on the source and on the target side, sentences of like length together, reshuffled each epoch by seed;
    - `lr_scheduler_type="inverse_sqrt"` is equation (3): linear growth, then update ** -0.5, with `learning_rate` as
      its peak at `warmup_steps`, the first update at peak / warmup_steps (the stock schedule is one update late);
    - evaluation: the loss is a mean over tokens, unsmoothed; every segment is generated and scored exactly once, on
      any number of processes; with `predict_with_generate` and a tokenizer, BLEU and chrF are measured without further
      setting;
    - a collator that draws random numbers draws the same ones for a batch after a resume, whatever the workers;
    - `train_samples_per_second` counts the sentences that were trained on, `eval_steps_per_second` the batches;
    - a run whose loss or gradient is no finite number stops before the update, instead of going on with lost weights;
    - a checkpoint that cannot be written, and a worker of the data loader that dies, stop it in one line that names
      the last whole checkpoint;
    - a run that goes on is told in what it is another one, and finds its best checkpoint where it has been moved;
    - a checkpoint that is not whole is never resumed from, and learned positions that are too few for the data are
      told before the first update;
    - `label_smoothing_factor` is refused: smoothing is the model's (`config.label_smoothing`), and only in training.

    Args:
        args_and_kwargs: As for `Seq2SeqTrainer`; `processing_class` is the tokenizer. `train_dataset` may be a
            `TokenStream`, which has no length and needs `max_steps` and `tokens_per_batch`.
        tokens_per_batch (`int`, *optional*): Replaces that of the training arguments.
        mixture (`Mixture`, *optional*): Which corpora `train_dataset` consists of and in what proportion an epoch
            has them; needs `tokens_per_batch`. None means each sentence once an epoch.

    Raises:
        ValueError: `label_smoothing_factor` other than 0, no `learning_rate` with `warmup_steps` below 1, or an
            adapter with PEFT's `ensure_weight_tying` on the word matrices.

    Source: Vaswani et al. 2017, sections 5.1 to 5.4.
    """

    # Declared in the base class for every kind of model, several of them as perhaps None.
    model: Any
    args: Any
    eval_dataset: Any
    processing_class: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        tokens_per_batch: int | None = None,
        mixture: Mixture | None = None,
        **kwargs: Any,
    ):
        if args is not None and args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} would smooth the evaluation loss too; set "
                "label_smoothing in the model's configuration instead (config.label_smoothing, 0.1 by default), which "
                "smooths in training only."
            )
        for adapter in (getattr(model, "peft_config", None) or {}).values():
            if getattr(adapter, "modules_to_tie", None):
                raise ValueError(
                    "ensure_weight_tying=True makes PEFT put a linear layer in the place of the decoder's embedding; "
                    "open the model with tie_word_embeddings=False, or leave ensure_weight_tying out."
                )
        if args is not None and args.learning_rate is None:
            args = copy.copy(args)  # the caller may use them again, for a model of another width
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        keep_few_kernels()
        super().__init__(model, args, *rest, **kwargs)
        if use_cache is not None:
            self.model.config.use_cache = use_cache  # the stock trainer writes its own into what is saved
        self._computes_peak = self.args.learning_rate is None
        if self._computes_peak:
            self.args.learning_rate = self._peak_of_the_paper()
        has_collator = kwargs.get("data_collator") is not None or (len(rest) > 0 and rest[0] is not None)
        if not has_collator and hasattr(self.model, "config"):
            self.data_collator = TranslationCollator(self.model.config.pad_token_id)
        if type(self.data_collator) is not TranslationCollator:  # which draws no random numbers
            self.data_collator = CollatorWithItsOwnSeed(self.data_collator, self._data_seed())
            self.add_callback(EpochOfCollator(self.data_collator))
        self.add_callback(NothingButNumbers(self))
        self.add_callback(BestOfItsRun(self))
        self.add_callback(GivesBackMemory())
        self._loss_of_update: Any = 0.0
        self._measures_bleu = (
            self.compute_metrics is None and self.args.predict_with_generate and self.processing_class is not None
        )
        if self._measures_bleu:
            self.compute_metrics = compute_metrics_for(self.processing_class)
        self.tokens_per_batch = tokens_per_batch
        if tokens_per_batch is None:
            self.tokens_per_batch = getattr(self.args, "tokens_per_batch", None)
        self.mixture = mixture
        if self.tokens_per_batch is None and (mixture is not None or isinstance(self.train_dataset, TokenStream)):
            raise ValueError("a mixture of corpora, and a TokenStream, need tokens_per_batch, got None.")
        self._target_tokens: Any = 0
        self._target_tokens_of_run: Any = 0
        self._target_tokens_since = time.perf_counter()
        self.run = TrainingRun()
        self.resumed_from: Path | None = None
        self.best_before: str | None = None
        self._resumed_at, self._record_at_resume = 0, TrainingRun()
        self._sentences = 0
        self._evaluation_steps: int | None = None

    # Learning rate (section 5.3)

    def _peak_of_the_paper(self) -> float:
        """(d_model * warmup_steps) ** -0.5: equation (3) at the end of the warm-up."""
        warmup_steps = self.args.warmup_steps
        if warmup_steps < 1:
            raise ValueError(
                "learning_rate=None means (d_model * warmup_steps) ** -0.5 and needs warmup_steps of at least 1, got "
                f"warmup_steps={warmup_steps}; give learning_rate, the peak, or warmup_steps."
            )
        return learning_rate_at(int(warmup_steps), self.model.config.d_model, int(warmup_steps))

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule of equation (3) for "inverse_sqrt"; else the stock one."""
        if self.lr_scheduler is not None or str(self.args.lr_scheduler_type).rsplit(".")[-1].lower() != "inverse_sqrt":
            return super().create_scheduler(num_training_steps, optimizer)
        warmup_steps = max(1, self.args.get_warmup_steps(num_training_steps))
        peak = learning_rate_at(warmup_steps, 1, warmup_steps)
        self.lr_scheduler = LambdaLR(
            cast(torch.optim.Optimizer, self.optimizer if optimizer is None else optimizer),
            # LambdaLR counts updates done, the equation the update to come.
            lambda done: learning_rate_at(done + 1, 1, warmup_steps) / peak,
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # Batches (section 5.1)

    def get_train_dataloader(self) -> DataLoader:
        """Batches bounded by tokens, or the stock loader without `tokens_per_batch`.

        Raises:
            ValueError: No dataset, one of unknown lengths, or a sentence longer than `tokens_per_batch` or than the
                learned positions reach.
        """
        if self.tokens_per_batch is None:
            if self._positions_end() and hasattr(self.train_dataset, "__len__"):
                self._check_positions(lengths_of(self.train_dataset), "train_dataset")
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ValueError("training requires a train_dataset, got None.")
        if isinstance(self.train_dataset, TokenStream):
            return self._stream_loader(self.train_dataset)
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                "tokens_per_batch needs a train_dataset whose sentences can be measured beforehand, got a "
                f"{type(self.train_dataset).__name__}; set tokens_per_batch=None for batches of sentences."
            )
        batches_per_update = self.accelerator.num_processes * self.args.gradient_accumulation_steps
        source_lengths, target_lengths = lengths_of(self.train_dataset)
        self._check_positions([source_lengths, target_lengths], "train_dataset")
        common: dict[str, Any] = {"multiple_of": batches_per_update, "seed": self._data_seed()}
        lengths = (source_lengths, target_lengths, self.tokens_per_batch)
        if self.mixture is None:
            sampler = TokenBatchSampler(*lengths, **common)
        else:
            sampler = MixedTokenBatchSampler(*lengths, mixture=self.mixture, **common)
        self.remove_callback(EpochOfSampler)
        self.add_callback(EpochOfSampler(sampler, len(sampler) // batches_per_update))
        self.accelerator.even_batches = False  # the sampler's count is a multiple already; nothing is repeated
        return self.accelerator.prepare(self._loader_of(self.train_dataset, sampler))

    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _stream_loader(self, stream: TokenStream) -> DataLoader:
        """This process's own batches of a stream, each process with other pairs; not divided any further."""
        for side, limit in zip(("source", "target"), stream.limits, strict=True):
            if (positions := self._positions_end()) and min(limit, self.tokens_per_batch or limit) > positions:
                raise ValueError(
                    f"a stream with up to {limit} {side} tokens does not fit max_position_embeddings={positions}; "
                    f"give it max_{side}_tokens={positions}."
                )
        batches = StreamedTokenBatches(
            stream,
            cast(int, self.tokens_per_batch),
            seed=self._data_seed(),
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )
        return self._loader_of(RowsOfTheSampler(), batches)

    def _loader_of(self, dataset: Any, sampler: Any) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            persistent_workers=self.args.dataloader_persistent_workers,
            # Starting workers draws a random number; those that persist are started once in an undisturbed run, but
            # twice where it was resumed in mid-epoch, which must not shift the random numbers of the dropout.
            generator=torch.Generator() if self.args.dataloader_persistent_workers else None,
        )

    def _positions_end(self) -> int | None:
        """Positions that the model has learned; None where they are computed, which has no end."""
        config: Any = getattr(self.model, "config", None)
        learned = getattr(config, "position_embedding", None) == "learned"
        return config.max_position_embeddings if learned else None

    def _check_positions(self, lengths: list[np.ndarray], dataset: str) -> None:
        """Raises ValueError where a sentence is longer than the learned positions reach."""
        positions = self._positions_end()
        if positions is None:
            return
        for side, array in zip(("source", "target"), lengths, strict=False):
            if len(array) and array.max() > positions:
                index = int(array.argmax())
                raise ValueError(
                    f"sentence {index} of {dataset} has {array[index]} {side} tokens but max_position_embeddings="
                    f"{positions}: learned positions end there; drop long pairs (max_{side}_tokens of tokenize_pairs) "
                    f"or take a model with max_position_embeddings={array[index]} or position_embedding='sinusoidal'."
                )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `Trainer.train`. `resume_from_checkpoint=True` means the last whole one of `output_dir`.

        Raises:
            ValueError: There is no whole checkpoint, or the one named is not whole; see `fault_of_checkpoint`.
            FloatingPointError: A loss, a gradient or a weight is infinite or undefined.
            ChildProcessError: A worker of the data loader died.
            OSError: A checkpoint cannot be written.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"there is no whole checkpoint to resume from in {self.args.output_dir}.")
        elif resume_from_checkpoint:
            fault = fault_of_checkpoint(resume_from_checkpoint)
            if fault is not None:
                raise ValueError(
                    f"{resume_from_checkpoint} is not a whole checkpoint: {fault}; resume_from_checkpoint=True takes "
                    "the last whole one."
                )
        if self.args.device.type == "cpu":
            keep_freed_memory()
        self.run.training_pairs, self.run.training_text = number_of_rows(self.train_dataset), self._text_digest()
        if isinstance(self.train_dataset, TokenStream):
            self.run.streamed, self.run.shuffle_buffer_size = True, self.train_dataset.buffer_size
        # Read now: the checkpoint may be thrown away on the way.
        self._resumed_at, self._record_at_resume = 0, TrainingRun()
        self.resumed_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self.best_before = None
        if resume_from_checkpoint:
            state = json.loads((Path(resume_from_checkpoint) / TRAINER_STATE).read_text(encoding="utf-8"))
            self._resumed_at, self.best_before = state["global_step"], state.get("best_model_checkpoint")
            self._record_at_resume = TrainingRun.load(resume_from_checkpoint)
            self._check_shapes(Path(resume_from_checkpoint))
            self._compare_with(Path(resume_from_checkpoint))
        self._sentences = 0
        self._target_tokens_of_run = 0
        self._target_tokens_since = self._start_of_run = time.perf_counter()
        self._loss_of_update = 0.0
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"cannot resume from {resume_from_checkpoint}: a file of its states ({STATES}) holds something "
                "other than numbers, or is damaged; nothing in a checkpoint is run."
            ) from error
        except (RuntimeError, OSError, EOFError) as error:
            if not (self.args.dataloader_num_workers and tells_of_a_dead_worker(error)):
                raise
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise anew for every other worker
            raise ChildProcessError(
                f"a worker process of the data loader died at update {self.state.global_step + 1}: it was killed, "
                "perhaps as memory ran out (fewer --dataloader_num_workers need less, and --dataloader_num_workers 0 "
                f"none). {self._way_on()}"
            ) from error
        self._check_weights()
        if self._resumed_at and self.updates_made == 0 and (Path(self.args.output_dir) / RECORD).is_file():
            self.run = TrainingRun.load(self.args.output_dir)  # which knows of the whole run
            return result
        self._record_run()
        # Of a resumed run the trainer knows the mean loss since then only.
        self.run.train_loss = None if self._resumed_at else float(result.training_loss)
        return result

    @property
    def updates_made(self) -> int:
        """Updates of the last `train`, without those before the checkpoint that it resumed from."""
        return self.state.global_step - self._resumed_at

    def _check_shapes(self, checkpoint: Path) -> None:
        """Raises ValueError where a checkpoint's weights are not those of the model, before anything is loaded."""
        if not is_ours(self.model) or not any((checkpoint / name).is_file() for name in WEIGHTS):
            return
        own = {name: list(value.shape) for name, value in self.model.state_dict().items()}
        for name, shape in shapes_in(checkpoint).items():
            if own.get(name) != shape:
                here = f"{own[name]} in the model" if name in own else "not in the model at all"
                raise ValueError(
                    f"cannot resume from {checkpoint}: {name} has the shape {shape} there and is {here}; the shape of "
                    "a run (preset, config_overrides, vocabulary) cannot change on the way."
                )

    def _compare_with(self, checkpoint: Path) -> None:
        """Warns where the updates of a run that goes on are not those that it would have made undisturbed."""
        if self.args.should_log:
            now = copy.copy(self.run)
            now.arguments, now.processes = self._arguments(), self.accelerator.num_processes
            if self._computes_peak:  # which follows from --warmup_steps
                now.arguments["learning_rate"] = self._record_at_resume.arguments.get("learning_rate")
            config = self.model.config if is_ours(self.model) else None
            warn_of_changes(checkpoint, self._record_at_resume, now, config)

    def _arguments(self) -> dict[str, Any]:
        """Training arguments for the record, with the trainer's own."""
        own = {} if self.tokens_per_batch is None else {"tokens_per_batch": self.tokens_per_batch}
        return {**changed_arguments(self.args), **own}

    def _text_digest(self) -> str | None:
        """Of the lengths of the training text; None where they would have to be counted for it alone."""
        if isinstance(self.train_dataset, TokenStream) or number_of_rows(self.train_dataset) is None:
            return None
        counted = isinstance(self.train_dataset, Dataset) and {"input_ids", "labels"} <= set(
            self.train_dataset.column_names
        )
        return digest_of_lengths(lengths_of(self.train_dataset)) if counted else None

    def _record_run(self) -> None:
        """Writes what the run was so far into `run`, for the model card."""
        run, before = self.run, self._record_at_resume
        known = before.target_tokens is not None and before.seconds is not None
        # The update since which tokens and time are counted; None where that is the first.
        run.resumed_at = before.resumed_at if known else self._resumed_at or None
        if before.base_model and run.base_model is None:
            run.base_model, run.preset, run.config_overrides = (
                before.base_model,
                before.preset,
                before.config_overrides,
            )
        for name in ("source_lang", "target_lang"):
            setattr(run, name, getattr(run, name) or getattr(before, name))
        if run.base_model is None and (origin := str(getattr(self.model.config, "_name_or_path", "") or "")):
            run.base_model = name_of_base(origin)
            base = record_of(origin)
            for name in ("source_lang", "target_lang", "preset", "config_overrides"):
                setattr(run, name, getattr(run, name) or getattr(base, name))
        run.validation_pairs = number_of_rows(self.eval_dataset)
        run.arguments = self._arguments()
        run.updates = self.state.global_step
        run.epochs = None if isinstance(self.train_dataset, TokenStream) else self.state.epoch
        run.target_tokens = int(self._target_tokens_of_run) + (before.target_tokens or 0 if known else 0) or None
        seconds = time.perf_counter() - self._start_of_run + (before.seconds or 0.0 if known else 0.0)
        run.seconds = round(seconds, 1)
        run.processes = self.accelerator.num_processes
        run.note_machine()
        kept_at, best = self.state.global_step, self.state.best_model_checkpoint
        # The best one may never have been saved; what is loaded at the end is the best of those that were.
        if self.args.load_best_model_at_end and best:
            kept_at = int(str(best).rpartition("-")[2])
        run.kept_update = kept_at if kept_at != self.state.global_step else None
        for entry in self.state.log_history:
            if entry["step"] == kept_at:
                self._record_evaluation(entry)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the model card, with what `run` knows, into `output_dir`; the stock one for other models."""
        if self.is_world_process_zero() and not self._write_model_card(self.args.output_dir, kwargs.get("license")):
            super().create_model_card(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves model, code, tokenizer, generation settings, the record of the run and the model card."""
        if _internal_call:
            super().save_model(output_dir, _internal_call)
        else:
            with self._telling_what_is_not_written("the model"):
                super().save_model(output_dir, _internal_call)
        if self.args.should_save and not _internal_call:
            self._write_model_card(output_dir or self.args.output_dir)
        elif self.args.should_save and output_dir and self.is_in_train:  # a checkpoint, which a resumed run reads
            self._record_run()
            self.run.save(output_dir)

    def _write_model_card(self, folder: str, license: str | None = None) -> bool:
        """Writes record and card into a folder that holds a model of this package; returns whether it does."""
        holds_model = any((Path(folder) / name).is_file() for name in WEIGHTS) and is_ours(self.model)
        if holds_model:
            write_model_card(folder, self.run, model_id=self.args.hub_model_id, license=license)
        return holds_model

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates; see `Seq2SeqTrainer.evaluate`. Scores of the evaluation set go into `run`, for the card."""
        metrics = super().evaluate(eval_dataset, *args, **kwargs)
        if eval_dataset is None and not self.is_in_train:
            self._record_evaluation(metrics)
        return metrics

    def _record_evaluation(self, metrics: dict[str, float]) -> None:
        """Adds BLEU and chrF of an evaluation on the validation text to `run`."""
        if not self._measures_bleu or "eval_bleu" not in metrics or not hasattr(self.eval_dataset, "__len__"):
            return
        signatures = corpus_scores(["a"], [["a"]])
        given = getattr(self, "_gen_kwargs", {})
        self.run.add_evaluation(
            {
                "name": "validation text",
                "dataset": self.run.dataset,
                "segments": len(self.eval_dataset),
                "decoding": decoding_text(
                    self.model.generation_config, given.get("num_beams"), given.get("max_length")
                ),
                "perplexity": perplexity_of(metrics["eval_loss"]) if "eval_loss" in metrics else None,
                **{
                    name: {"score": metrics[f"eval_{name}"], "signature": signatures[name]["signature"]}
                    for name in ("bleu", "chrf")
                },
            }
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """One pass over the training set; none where all updates are done, as in a finished run that is resumed.

        The stock method looks at the number of updates only after it has made one more.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        cast(Any, super())._run_epoch(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of one update; counts their sentences and target tokens for the log."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._sentences += sum(find_batch_size(batch) or 0 for batch in batches)
        if num_items is not None:
            self._target_tokens = self._target_tokens + num_items
            self._target_tokens_of_run = self._target_tokens_of_run + num_items
        return batches, num_items

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs; adds target tokens a second since the last log to training's lines, and mends the stock speeds."""
        self._mend_speeds(logs)
        if "loss" in logs:
            now = time.perf_counter()
            logs["target_tokens_per_second"] = round(float(self._target_tokens) / (now - self._target_tokens_since), 1)
            self._target_tokens, self._target_tokens_since = 0, now
        super().log(logs, *args, **kwargs)
        if "loss" not in logs:  # an evaluation has passed, which is not training time
            self._target_tokens, self._target_tokens_since = 0, time.perf_counter()

    def _mend_speeds(self, metrics: dict[str, float]) -> None:
        """Puts counted sentences and batches where the stock trainer multiplies by rows that a batch may not have."""
        if metrics.get("train_runtime") and "train_samples_per_second" in metrics:
            sentences = self._sentences
            if self.accelerator.num_processes > 1:
                sentences = sum(gather_object([sentences]))
            metrics["train_samples_per_second"] = round(sentences / metrics["train_runtime"], 3)
        elif self._evaluation_steps is not None:
            for name in [name for name in metrics if name.endswith("_steps_per_second")]:
                runtime = metrics.get(f"{name.removesuffix('_steps_per_second')}_runtime")
                if runtime:
                    metrics[name] = round((self._evaluation_steps or 0) / runtime, 3)
            self._evaluation_steps = None

    # Faults on the way

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one micro-batch; keeps its loss for `check_update`."""
        loss = super().training_step(*args, **kwargs)
        self._loss_of_update = self._loss_of_update + loss.detach()
        return loss

    def check_update(self) -> None:
        """Raises FloatingPointError where the update to come rests on numbers that are infinite or undefined.

        Training in float16 with a scaler leaves such updates out by itself.
        """
        if self.args.device.type != "cpu" and (self.state.global_step + 1) % max(1, self.state.logging_steps):
            return  # an accelerator is not waited for at each update; what is lost stays lost until it is asked
        loss, self._loss_of_update = self._loss_of_update, 0.0
        if self.accelerator.scaler is not None:
            return
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        if not self._on_all_processes(is_finite([*gradients, torch.as_tensor(loss)])):
            update, number = self.state.global_step + 1, float(loss)
            what = f"the loss of update {update} is {number}"
            if math.isfinite(number):
                what = f"the gradient of update {update} is infinite or undefined (its loss is {number:.4g})"
            raise FloatingPointError(
                f"training has diverged: {what}; the update was not made. {self._way_on()} "
                "A lower --learning_rate, a longer --warmup_steps or --max_grad_norm 1 may help."
            )

    def _check_weights(self) -> None:
        """Raises FloatingPointError where an update has left weights that are infinite or undefined."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        if not self._on_all_processes(is_finite(trained)):
            raise FloatingPointError(
                f"training has diverged: update {self.state.global_step} left weights that are infinite or undefined, "
                f"which are not saved. {self._way_on()} A lower --learning_rate or a longer --warmup_steps may help."
            )

    def _on_all_processes(self, value: bool) -> bool:
        """Whether it is so on every process: all of them stop, or none."""
        if self.accelerator.num_processes == 1:
            return value
        against = torch.tensor(float(not value), device=self.accelerator.device)
        return not bool(cast(torch.Tensor, self.accelerator.reduce(against, reduction="sum")))

    def _way_on(self) -> str:
        """Which checkpoint a stopped run can go on from."""
        last = last_whole_checkpoint(self._get_output_dir(trial=None), warn=False)
        if last is None:
            return "There is no whole checkpoint to go on from."
        return f"The last whole checkpoint is {last} (--resume_from_checkpoint true goes on from it)."

    # Checkpoints

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves; one of the same name from an earlier run is no checkpoint from the moment it is written over."""
        trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            (folder / TRAINER_STATE).unlink(missing_ok=True)
        self._check_weights()  # before an older checkpoint makes room for it
        with self._telling_what_is_not_written(f"the checkpoint of update {self.state.global_step}"):
            super()._save_checkpoint(*args, **kwargs)

    @contextlib.contextmanager
    def _telling_what_is_not_written(self, what: str) -> Iterator[None]:
        """Raises OSError, with the way on, where a file cannot be written."""
        try:
            yield
        except Exception as error:
            reason = why_not_written(error)
            if reason is None:
                raise
            raise OSError(
                f"{what} could not be written to {self.args.output_dir}: {reason}. {self._way_on()}"
            ) from error

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether this is the best model so far; of two equal ones (BLEU 0 early on), the one of the lower loss."""
        before = self.state.best_metric
        if super()._determine_best_metric(metrics, trial):
            return True
        name = f"eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}"
        best_losses = [
            entry["eval_loss"]
            for entry in self.state.log_history
            if entry["step"] == self.state.best_global_step and "eval_loss" in entry
        ]
        loss = metrics.get("eval_loss")
        if before is None or metrics.get(name) != before or loss is None or not best_losses or loss >= best_losses[-1]:
            return False
        self.state.best_global_step = self.state.global_step
        return True

    def _save_rng_state(self, *args: Any, **kwargs: Any) -> None:
        """Saves, and waits: what is written next, the trainer's state, says that every process is done."""
        super()._save_rng_state(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint during training; with the code, which the stock trainer leaves behind."""
        if self.is_world_process_zero():
            for file in Path(checkpoint_folder).glob("*_vanilla_transformer.py"):
                shutil.copy(file, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Leaves tied matrices out of the warning on missing weights: a checkpoint holds them once."""
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of like length for this process alone, longest first; each segment in exactly one of them."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation requires an eval_dataset, got None.")
        if not hasattr(dataset, "__len__"):
            return super().get_eval_dataloader(dataset)
        return self._segments_once(dataset, "eval_dataset")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As `get_eval_dataloader`."""
        if not hasattr(test_dataset, "__len__"):
            return super().get_test_dataloader(test_dataset)
        return self._segments_once(test_dataset, "test_dataset")

    def _segments_once(self, dataset: Any, name: str) -> DataLoader:
        sides = lengths_of(dataset)
        self._check_positions(sides, name)
        lengths = list(zip(*(side.tolist() for side in sides), strict=True))
        if self.tokens_per_batch is not None:
            batches = list(length_batches(lengths, self.tokens_per_batch))
        else:
            order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
            rows = self.args.per_device_eval_batch_size
            batches = [order[start : start + rows] for start in range(0, len(order), rows)]
        processes = self.accelerator.num_processes
        mine = FixedBatches(batches[self.accelerator.process_index :: processes], -(-len(batches) // processes))
        return DataLoader(
            dataset,
            batch_sampler=cast(Any, mine),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, "evaluation"),
            generator=torch.Generator(),  # else each evaluation would draw from the random numbers of the dropout
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss as a mean over all target tokens, and metrics over all segments, each counted once.

        The arguments of the stock loop hold: `include_for_metrics`, `batch_eval_metrics`, `eval_do_concat_batches`,
        `prediction_loss_only`; `fp16_full_eval` and `bf16_full_eval` move the model to that precision, outside of
        training, and leave it there. The loss is summed in double precision whatever the model's.

        Returns:
            `EvalLoopOutput`. `predictions` are generated ids, shape `(segments, longest)`, padded with -100, in the
            dataset's order (without `predict_with_generate` logits, shape `(segments, longest, vocab_size)`; None
            where only the loss is asked for); `label_ids` likewise. With `eval_do_concat_batches=False` each is a
            list of such arrays, of as many consecutive segments as the stock evaluation has in a batch. What
            `compute_metrics` receives has the same form; its `inputs` are the source ids, and its `losses`, shape
            `(segments,)`, each segment's own mean. With `batch_eval_metrics` it is given tensors, batch by batch, of
            all processes, and `inputs` is a dict of what the model was given.
        """
        self._evaluation_steps = None
        if not isinstance(dataloader.batch_sampler, FixedBatches):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        by_batch = self.args.batch_eval_metrics and self.compute_metrics is not None and not loss_only
        model = self._model_for_evaluation()
        was_training = model.training
        model.eval()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "eval", None)):
            optimizer.eval()  # optimizers that average the weights they are evaluated with
        self.callback_handler.eval_dataloader = dataloader
        totals = [0.0, 0]
        segments: list[Segment] = []
        metrics: dict[str, Any] = {}
        sampler = dataloader.batch_sampler
        steps = sampler.steps
        batches = zip(sampler, dataloader, strict=True)
        for step in range(steps):
            pair = next(batches, None)
            # A process that has run out of batches still takes part in gathering those of the others.
            batch = [] if pair is None else self._evaluate_batch(model, *pair, loss_only, totals)
            if by_batch:
                everyone = gather_object(batch) if self.accelerator.num_processes > 1 else batch
                if everyone[0].labels is not None:
                    prediction = self._as_tensors(everyone)
                    metrics = cast(Any, self.compute_metrics)(prediction, compute_result=step == steps - 1)
                if description != "Prediction":
                    batch = [Segment(segment.index) for segment in batch]
            segments.extend(batch)
            if pair is not None:
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        model.train(was_training)

        total_loss, total_tokens = totals
        if self.accelerator.num_processes > 1:
            segments = gather_object(segments)
            total_loss, total_tokens = (sum(parts) for parts in zip(*gather_object([totals]), strict=True))
        segments.sort(key=lambda segment: segment.index)
        predictions = self._arrays_of([segment.prediction for segment in segments])
        label_ids = self._arrays_of([segment.labels for segment in segments])
        if self.compute_metrics is not None and not by_batch and predictions is not None and label_ids is not None:
            losses = self._arrays_of([segment.loss for segment in segments])
            name = self._main_input_name()
            inputs = self._arrays_of([(segment.inputs or {}).get(name) for segment in segments])
            prediction = EvalPrediction(predictions=predictions, label_ids=label_ids, inputs=inputs, losses=losses)
            metrics = self.compute_metrics(prediction)
        metrics = dict(metrics)
        if total_tokens:
            metrics["loss"] = total_loss / total_tokens
        prefix = f"{metric_key_prefix}_"
        metrics = {
            name if name.startswith(prefix) else prefix + name: value
            for name, value in denumpify_detensorize(metrics).items()
        }
        self._evaluation_steps = steps
        return EvalLoopOutput(
            predictions=cast(Any, predictions), label_ids=label_ids, metrics=metrics, num_samples=len(segments)
        )

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As `Seq2SeqTrainer.predict`, each segment once; see `evaluation_loop`."""
        output = super().predict(*args, **kwargs)
        self._mend_speeds(cast(dict[str, float], output.metrics))
        return output

    def _model_for_evaluation(self) -> Any:
        """The model on its device, outside of training in the precision of `fp16_full_eval` or `bf16_full_eval`."""
        model = self.model
        if self.is_in_train or self.is_model_parallel:
            return model
        dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16 if self.args.bf16_full_eval else None
        if dtype is not None or self.args.device.type != "cpu":
            model = model.to(device=self.args.device, dtype=dtype)
        return model

    def _main_input_name(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    def _evaluate_batch(
        self, model: Any, indices: list[int], batch: dict[str, Any], loss_only: bool, totals: list
    ) -> list[Segment]:
        """Segments of one batch, by rows; adds to `totals`, the summed loss and the tokens it is summed over."""
        inputs = self._prepare_inputs(batch)
        labels = inputs.get("labels")
        segments = [Segment(index) for index in indices]
        generates = self.args.predict_with_generate and not loss_only
        with torch.no_grad(), self.accelerator.autocast():  # the model may not have been prepared for training yet
            if labels is not None:
                with self.compute_loss_context_manager():
                    outputs = model(**inputs)
                tokens = int(labels.ne(-100).sum())
                if tokens:  # else some models' loss is 0 / 0
                    totals[0] += float(outputs["loss"]) * tokens
                    totals[1] += tokens
                if not loss_only and "loss" in self.args.include_for_metrics:
                    for segment, loss in zip(segments, mean_losses(outputs["logits"], labels), strict=True):
                        segment.loss = loss
                if not generates and not loss_only:
                    logits = outputs["logits"]
                    if self.preprocess_logits_for_metrics is not None:
                        logits = self.preprocess_logits_for_metrics(logits, labels)
                    if logits.is_floating_point():
                        logits = logits.float()
                    for segment, row in zip(segments, logits.cpu().numpy(), strict=True):
                        segment.prediction = row
            if generates:
                for segment, row in zip(segments, self._generate(model, inputs).tolist(), strict=True):
                    segment.prediction = row
        if loss_only:
            return segments
        if labels is not None:
            for segment, row in zip(segments, labels.tolist(), strict=True):
                segment.labels = row
        if "inputs" in self.args.include_for_metrics:
            names = inputs if self.args.batch_eval_metrics else [self._main_input_name()]
            rows = {name: inputs[name].cpu().numpy() for name in names if torch.is_tensor(inputs.get(name))}
            for number, segment in enumerate(segments):
                segment.inputs = {name: each[number] for name, each in rows.items()}
        return segments

    def _arrays_of(self, rows: list[Any]) -> Any:
        """One array of all rows, or, with `eval_do_concat_batches=False`, a list of them; see `evaluation_loop`."""
        if self.args.eval_do_concat_batches:
            return pad_rows(rows)
        size = self.args.eval_batch_size * self.accelerator.num_processes
        arrays = [pad_rows(rows[start : start + size]) for start in range(0, len(rows), size)]
        return None if not arrays or any(array is None for array in arrays) else arrays

    def _as_tensors(self, segments: list[Segment]) -> EvalPrediction:
        """One batch of all processes in the form that `batch_eval_metrics` gives to `compute_metrics`."""

        def tensor(rows: list[Any]) -> Any:
            array = pad_rows(rows)
            return None if array is None else torch.from_numpy(array).to(self.args.device)

        names: Any = segments[0].inputs
        inputs: Any = names and {name: tensor([cast(dict, each.inputs)[name] for each in segments]) for name in names}
        return EvalPrediction(
            predictions=tensor([segment.prediction for segment in segments]),
            label_ids=tensor([segment.labels for segment in segments]),
            inputs=inputs,
            losses=tensor([segment.loss for segment in segments]),
        )

    def _generate(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Generated ids of one batch, shape `(batch, length)`, by the settings of the model and of this evaluation."""
        settings = {name: value for name, value in getattr(self, "_gen_kwargs", {}).items() if value is not None}
        sources = {
            name: value for name, value in inputs.items() if name in ("input_ids", "attention_mask", "inputs_embeds")
        }
        with self.compute_loss_context_manager():
            return model.generate(**sources, **settings)


def is_ours(model: Any) -> bool:
    """Whether it is a translation model of this package, not one of another package or an adapter around one."""
    return type(model).__name__ == "VanillaTransformerForConditionalGeneration"


def number_of_rows(dataset: Any) -> int | None:
    """None for a stream, whose rows nobody has counted, and for no dataset."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def lengths_of(dataset: Any) -> list[np.ndarray]:
    """Tokens of each row, one array of shape `(rows,)` for `input_ids` and, where there are any, one for `labels`."""
    sides = ("input_ids", "labels")
    if isinstance(dataset, Dataset) and set(sides) <= set(dataset.column_names):
        return list(token_lengths(dataset))
    rows = [[len(row[side]) for side in sides if side in row] for row in (dataset[i] for i in range(len(dataset)))]
    return list(np.asarray(rows, dtype=np.int64).T)


def mean_losses(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """Unsmoothed loss of each row of a batch, a mean over its labels that are not -100; not a number without any."""
    losses = cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    kept = labels.ne(-100)
    return (losses.masked_fill(~kept, 0.0).sum(dim=1) / kept.sum(dim=1)).tolist()


def pad_rows(rows: list[Any], padding: int = -100) -> np.ndarray | None:
    """Rows of unlike length as one array, shape `(rows, longest, ...)`, filled up with `padding`.

    Numbers in the place of rows give an array of shape `(rows,)`. None where a row is None.
    """
    if not rows or any(row is None for row in rows):
        return None
    arrays = [np.asarray(row) for row in rows]
    if arrays[0].ndim == 0:
        return np.asarray(rows, dtype=np.float32)
    padded = np.full((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), padding, dtype=arrays[0].dtype)
    for index, row in enumerate(arrays):
        padded[index, : len(row)] = row
    return padded


# What a run goes on with besides its weights.
STATES = "optimizer.pt, scheduler.pt, rng_state.pth"

# The trainer's own record, which it writes last.
TRAINER_STATE = "trainer_state.json"


def last_whole_checkpoint(folder: str | os.PathLike, warn: bool = True) -> str | None:
    """The last checkpoint of a run that was written to its end; None where there is none.

    Later ones that are not whole (see `fault_of_checkpoint`) are passed over with a warning that says why.

    Args:
        folder: The run's `output_dir`; it need not exist.
        warn: Whether to warn of those that are passed over.
    """
    checkpoints = [
        (int(path.name.removeprefix("checkpoint-")), path)
        for path in Path(folder).glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal()
    ]
    for _, path in sorted(checkpoints, reverse=True):
        fault = fault_of_checkpoint(path)
        if fault is None:
            return str(path)
        if warn:
            logger.warning(f"{path} is passed over, it is not a whole checkpoint: {fault}.")
    return None


def fault_of_checkpoint(folder: str | os.PathLike) -> str | None:
    """Why a run cannot go on from a checkpoint; None where it can.

    Trainer writes a checkpoint's `trainer_state.json` last, so a run that was killed while it saved leaves a folder
    without it, or with half of it. A disk that was full or lost power may also leave other files cut short, which
    their own tables of contents tell: the numbers themselves are not read.

    Args:
        folder: The checkpoint.
    """
    path = Path(folder)
    if not path.is_dir():
        return "there is no such folder"
    if not (path / TRAINER_STATE).is_file():
        return f"{TRAINER_STATE}, which is written last, is missing"
    files = sorted(each for each in path.iterdir() if each.is_file())
    for file in files:
        try:
            fault = fault_of_file(file)
        except OSError as error:
            fault = str(error)
        if fault is not None:
            return f"{file.name} {fault}"
    if any(each.is_dir() for each in path.iterdir()):
        return None  # of several adapters, or in shards of another library
    names = {file.name for file in files}
    if not any(name.endswith((".safetensors", ".bin")) and "model" in name for name in names):
        return "there are no weights in it"
    # All of them, or, with save_only_model, none.
    states = {"optimizer.pt", "scheduler.pt", "rng_state"}
    missing = [state for state in sorted(states) if not any(name.startswith(state) for name in names)]
    return f"{' and '.join(missing)} missing" if missing and len(missing) < len(states) else None


def fault_of_file(path: Path) -> str | None:
    """What is wrong with a file of a checkpoint, judged by its table of contents; None where nothing is."""
    try:
        if path.suffix == ".json":
            contents = json.loads(path.read_text(encoding="utf-8"))
            if path.name.endswith(".index.json"):
                missing = {each for each in contents["weight_map"].values() if not (path.parent / each).is_file()}
                return f"names {min(missing)}, which is missing" if missing else None
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                header_length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                if header_length + 8 > size:
                    return f"is cut short at {size} bytes"
                header = json.loads(file.read(header_length))
            ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
            whole = 8 + header_length + max(ends, default=0)
            if size != whole:
                return f"has {size} bytes where its table of contents says {whole}"
        elif path.suffix in (".pt", ".pth", ".bin"):
            zipfile.ZipFile(path).close()
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        return "is cut short or damaged"
    return None


def why_not_written(error: Exception) -> str | None:
    """What kept a file from being written, by the error of whoever wrote it; None where it is another matter."""
    if isinstance(error, OSError):
        disk = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
        return error.strerror if error.errno in disk else None
    if isinstance(error, SafetensorError) or "(os error " in str(error):  # of a tokenizer, a plain Exception
        return str(error)
    # torch.save says where in its code it was, not what the system told it.
    if "PytorchStreamWriter" in str(error) or "inline_container" in str(error):
        return "torch.save could not write a file to its end, as on a full disk"
    return None


def tells_of_a_dead_worker(error: BaseException) -> bool:
    """Whether an error is that of a data loader whose worker has ended, and not one that a worker reported."""
    text = str(error)
    if isinstance(error, RuntimeError):
        return "DataLoader worker (pid" in text
    frames = traceback.walk_tb(error.__traceback__)
    in_loader = any(frame.f_globals.get("__name__") == "torch.utils.data.dataloader" for frame, _ in frames)
    return in_loader and not text.startswith("Caught ")


def is_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether all numbers of some tensors are finite; of a tensor spread over processes, those that lie here."""
    here = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    here = [each.coalesce().values() if each.is_sparse else each for each in here]
    here = [each.detach() for each in here if each.is_floating_point() and each.numel()]
    largest = [torch.linalg.vector_norm(each, ord=math.inf).float() for each in here]
    return not largest or bool(torch.stack([each.to(largest[0].device) for each in largest]).isfinite().all())


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory instead of returning it to the system.

    Batches of changing shape make torch ask for blocks of some megabytes many times in an update; handed back and
    fetched again, each costs page faults, which on a CPU take longer than the arithmetic on them. Now and then the
    trainer gives it back all the same: `give_back_freed_memory`. Elsewhere this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Gives the free pages that glibc keeps, by `keep_freed_memory`, back to the system, once.

    Blocks of changing sizes leave ever more of the heap touched and free; what is needed again is fetched again, and
    the rest is not.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_few_kernels() -> None:
    """Lets oneDNN, with which torch multiplies bfloat16 matrices on a CPU, keep 128 kernels instead of 1,024.

    It makes one for each shape, and each holds memory: with batches of changing lengths a training grows by gigabytes
    until the cache is full, and no faster. It reads the variable when the first kernel is made; a value that the user
    has set stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


@functools.cache
def bfloat16_gain(size: int = 256) -> float:
    """How many times as fast as in float32 this device multiplies matrices in bfloat16, timed once a process.

    Not every processor that has bfloat16 instructions gains by them: those without matrix tiles may be slower.

    Args:
        size (`int`, defaults to 256): Rows and columns of the matrices; where a processor has to emulate bfloat16, a
            hundred times slower than float32, larger ones would keep the user waiting.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        times = []
        for _ in range(8):  # the first ones prepare kernels
            start = time.perf_counter()
            float((matrix @ matrix)[0, 0])  # waits for the device
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times[2:])
    return seconds[torch.float32] / seconds[torch.bfloat16]


def perplexity_of(loss: float) -> float:
    """exp of a mean loss in nats; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


__all__ = [
    "VanillaTransformerTrainer",
    "VanillaTransformerTrainingArguments",
    "bfloat16_gain",
    "fault_of_checkpoint",
    "give_back_freed_memory",
    "keep_few_kernels",
    "keep_freed_memory",
    "last_whole_checkpoint",
    "learning_rate_at",
    "perplexity_of",
]
