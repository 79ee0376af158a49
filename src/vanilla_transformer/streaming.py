"""Training text that is read as it is needed and never kept on disk: for corpora that are larger than the disk.

A stream has no length and no end: after its last pair it begins anew. Of every so many pairs (the shuffle buffer) the
batches are formed at a time, as those of a corpus whose lengths are known are formed of all of it, and they come in
random order. All of it follows from the text and the seed: a run that is resumed goes through the same batches.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.data import (
    PairCounts,
    PathLike,
    TokenBatchSampler,
    encode_batch,
    iterate_pairs,
    open_dataset,
    paired_files,
    require_eos,
    require_regular_files,
    token_limit,
)
from vanilla_transformer.mixing import check_weights, in_turn


logger = logging.getLogger(__name__)

SHUFFLE_BUFFER_SIZE = 100_000
_PAIRS_AT_A_TIME = 1000

Pair = tuple[str | None, str | None]


# ---------------------------------------------------------------------------------------------------------------------
# Pairs of text
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class PairStream:
    """Pairs of text that can be gone through any number of times; each `iter()` begins at the first pair.

    Args:
        name: What it is called in messages.
        begin: Gives the pairs, from the first.
    """

    name: str
    begin: Callable[[], Iterator[Pair]]

    def __iter__(self) -> Iterator[Pair]:
        return self.begin()


def stream_pairs(
    *,
    source_files: PathLike | Sequence[PathLike] | None = None,
    target_files: PathLike | Sequence[PathLike] | None = None,
    dataset: PathLike | None = None,
    dataset_config: str | None = None,
    split: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> PairStream:
    """Opens a parallel corpus as a stream; the arguments are those of `load_pairs`.

    A dataset of the Hub is fetched piece by piece while it is read.

    Raises:
        FileNotFoundError: A file or dataset does not exist.
        ValueError: As `load_pairs`; what is wrong with the text itself (lines that are not UTF-8, unequal numbers of
            lines) is raised when the reading comes to it.
    """
    if dataset is not None:
        if source_files is not None or target_files is not None:
            raise ValueError("expected either dataset or source_files and target_files, got both")
        opened = open_dataset(dataset, dataset_config, split, source_lang, target_lang, streaming=True)
        sides = (source_lang or "source", target_lang or "target")
        pairs_of = _pairs_of_rows(next(iter(opened), None), str(dataset), sides)
        return PairStream(str(dataset), lambda: map(pairs_of, opened))
    if source_files is None or target_files is None:
        raise ValueError("expected dataset, or both source_files and target_files")
    files = paired_files(source_files, target_files)
    require_regular_files([path for pair in files for path in pair])
    return PairStream(", ".join(source for source, _ in files), lambda: iterate_pairs(files))


def _pairs_of_rows(first: Any, name: str, sides: tuple[str, str]) -> Callable[[Mapping[str, Any]], Pair]:
    """How a row of a dataset is taken apart, as its first row tells."""
    if first is None:
        raise ValueError(f"expected at least one pair of sentences, but dataset {name!r} is empty")
    if sides[0] == sides[1]:
        raise ValueError(f"source_lang and target_lang must differ, got {sides[0]!r} for both")
    nested = isinstance(first.get("translation"), Mapping)
    found = first["translation"] if nested else first
    if not set(sides) <= set(found):
        raise ValueError(
            f"expected the {'languages' if nested else 'text columns'} {sides[0]!r} and {sides[1]!r} in dataset "
            f"{name!r}, but found {list(found)}; pass source_lang and target_lang out of these"
        )

    def pair_of(row: Mapping[str, Any]) -> Pair:
        texts = row["translation"] if nested else row
        source, target = (texts[side] for side in sides)
        for text in (source, target):
            if not (text is None or isinstance(text, str)):
                raise ValueError(f"expected text in dataset {name!r}, got {text!r:.80}; convert it to strings first")
        return source, target

    pair_of(first)
    return pair_of


def first_texts(corpora: Sequence[PairStream], pairs: int, weights: Sequence[float] | None = None) -> Iterator[str]:
    """Both sides of the first pairs of streams, mixed by weight, each stream gone through once at most.

    Args:
        corpora: The streams.
        pairs: How many to read at most.
        weights: See `TokenStream`; None means equal ones.
    """
    streams = [iter(corpus) for corpus in corpora]
    ended: set[int] = set()
    for number in in_turn(weights or [1.0] * len(streams), ended):
        if pairs <= 0:
            return
        pair = next(streams[number], None)
        if pair is None:
            ended.add(number)
            continue
        pairs -= 1
        yield from (text for text in pair if text)


# ---------------------------------------------------------------------------------------------------------------------
# Batches of token ids
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class TokenStream:
    """Streams of text as endless training data of `VanillaTransformerTrainer`, which has no length.

    Args:
        corpora: One stream, or several that are mixed.
        tokenizer: Closes a text with EOS.
        weights: Of several corpora: what the pairs drawn of each are proportional to. None needs a single corpus.
        buffer_size: Pairs of which batches are formed at a time, in each process; that many are held in memory.
        max_source_tokens, max_target_tokens: As for `tokenize_pairs`; a pair with more is dropped as a pair, and so
            is one that exceeds a batch.

    Raises:
        ValueError: A size or limit is out of range, weights do not fit the corpora, or the tokenizer has no EOS.
    """

    corpora: Sequence[PairStream]
    tokenizer: PreTrainedTokenizerBase
    weights: Sequence[float] | None = None
    buffer_size: int = SHUFFLE_BUFFER_SIZE
    max_source_tokens: int | None = None
    max_target_tokens: int | None = None
    counts: list[PairCounts] = field(init=False)

    def __post_init__(self):
        if self.buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {self.buffer_size}")
        check_weights(self.weights or [1.0], len(self.corpora))
        self.limits = (
            token_limit("max_source_tokens", self.max_source_tokens, self.tokenizer),
            token_limit("max_target_tokens", self.max_target_tokens, self.tokenizer),
        )
        self.blank_lengths = require_eos(self.tokenizer)
        self.counts = [PairCounts(0, 0, 0, 0, 0) for _ in self.corpora]  # of this process, since the last `iter()`

    def rows(self, corpus: int, limits: tuple[int, int], process: int, processes: int) -> Iterator[dict | None]:
        """A process's pairs of a corpus as ids, without end; None where the corpus begins anew.

        Args:
            corpus: Number of the corpus.
            limits: Most tokens of a source and of a target.
            process: Number of this process; it takes the pairs whose numbers leave that rest, and no other does.
            processes: How many there are.
        """
        stream = self.corpora[corpus]
        while True:
            before = self.counts[corpus]
            pairs = islice(iter(stream), process, None, processes)
            while held := list(islice(pairs, _PAIRS_AT_A_TIME)):
                yield from self._encoded(held, corpus, limits)
            now = self.counts[corpus]
            total, kept, blank, too_long = (
                getattr(now, name) - getattr(before, name) for name in ("total", "kept", "blank", "too_long")
            )
            why = (
                f"{blank} with a blank side, {too_long} with more than {limits[0]} source or {limits[1]} target tokens"
            )
            if total == 0:
                raise ValueError(
                    f"{stream.name} has fewer pairs than there are processes ({processes}), each of which reads pairs "
                    "of its own."
                )
            if kept == 0:
                raise ValueError(f"{stream.name}: none of its {total} pairs can be used: {why}; see max_source_tokens")
            if kept < total:
                logger.warning(
                    "%s, read to its end: dropped %d of %d pairs: %s", stream.name, total - kept, total, why
                )
            yield None

    def _encoded(self, pairs: list[Pair], corpus: int, limits: tuple[int, int]) -> Iterator[dict]:
        sources, targets = zip(*pairs, strict=True)
        ids = encode_batch({"source": list(sources), "target": list(targets)}, self.tokenizer)
        lengths = [np.fromiter(map(len, ids[side]), dtype=np.int64) for side in ("input_ids", "labels")]
        blank = (lengths[0] <= self.blank_lengths[0]) | (lengths[1] <= self.blank_lengths[1])
        too_long = ((lengths[0] > limits[0]) | (lengths[1] > limits[1])) & ~blank
        kept = np.flatnonzero(~(blank | too_long))
        old = self.counts[corpus]
        self.counts[corpus] = PairCounts(
            old.total + len(pairs),
            old.kept + len(kept),
            old.blank + int(blank.sum()),
            old.too_long + int(too_long.sum()),
            0,
        )
        for row in kept.tolist():
            yield {side: np.asarray(ids[side][row], dtype=np.int32) for side in ("input_ids", "labels")}


class StreamedTokenBatches(Sampler[list[dict]]):
    """Batches of a `TokenStream` for one process, without end: the rows themselves in the place of their numbers.

    Rows x longest row <= `tokens_per_batch` on each side, padding counted. With one corpus, the batches of one pass
    through it are done before the next begins, so that each pair comes once a pass. Each `iter()` begins at the start.

    Args:
        stream: The text.
        tokens_per_batch: See `TokenBatchSampler`.
        seed: Of the shuffling.
        process, processes: This process and their number; they see pairs of their own.
    """

    def __init__(
        self, stream: TokenStream, tokens_per_batch: int, *, seed: int = 0, process: int = 0, processes: int = 1
    ):
        self.stream = stream
        self.tokens_per_batch = tokens_per_batch
        self.seed = seed
        self.process, self.processes = process, processes

    def __iter__(self) -> Iterator[list[dict]]:
        for number, rows in enumerate(self._buffers()):
            plan = _Buffer([len(row["input_ids"]) for row in rows], [len(row["labels"]) for row in rows], self)
            for batch in plan.batches(np.random.default_rng((self.seed, self.process, number))):
                yield [rows[index] for index in batch]

    def _buffers(self) -> Iterator[list[dict]]:
        stream = self.stream
        stream.counts = [PairCounts(0, 0, 0, 0, 0) for _ in stream.corpora]
        limits = (min(stream.limits[0], self.tokens_per_batch), min(stream.limits[1], self.tokens_per_batch))
        rows = [stream.rows(number, limits, self.process, self.processes) for number in range(len(stream.corpora))]
        held: list[dict] = []
        for number in in_turn(stream.weights or [1.0]):
            row = next(rows[number])
            if row is None and len(rows) > 1:
                row = next(rows[number])  # which there is, or an error was raised
            if row is not None:
                held.append(row)
            if held and (row is None or len(held) == stream.buffer_size):
                yield held
                held = []


class _Buffer(TokenBatchSampler):
    """The batches of one buffer, whose number need not be known beforehand."""

    def __init__(self, source_lengths: Iterable[int], target_lengths: Iterable[int], batches: StreamedTokenBatches):
        lengths = np.asarray(source_lengths), np.asarray(target_lengths)
        super().__init__(*lengths, batches.tokens_per_batch)

    def _fix_batch_count(self) -> int:
        return 0

    def batches(self, rng: np.random.Generator) -> Iterator[list[int]]:
        order = self._random_order(rng)
        bounds = self._cut(order)
        for batch in rng.permutation(len(bounds) - 1):
            yield order[bounds[batch] : bounds[batch + 1]].tolist()


class RowsOfTheSampler(Dataset):
    """What a `DataLoader` over `StreamedTokenBatches` looks rows up in: the sampler has given the rows themselves."""

    def __getitem__(self, row: Any) -> Any:
        return row


__all__ = [
    "SHUFFLE_BUFFER_SIZE",
    "PairStream",
    "RowsOfTheSampler",
    "StreamedTokenBatches",
    "TokenStream",
    "first_texts",
    "stream_pairs",
]
