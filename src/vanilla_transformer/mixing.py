"""Several corpora in given proportions, whatever their sizes.

An epoch of a mixture has as many pairs as all corpora together. Each corpus gives its share of them by weight: a small
one with a great weight is gone through several times, each time in a new order; a large one with a small weight gives
a part, and the next epoch goes on where that ended, so that no pair comes again before all others of its corpus came.
"""

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import numpy as np

from vanilla_transformer.data import TokenBatchSampler


@dataclass(frozen=True)
class Mixture:
    """Corpora that lie one after the other in one dataset, and the weight of each.

    Args:
        sizes: Pairs of each corpus.
        weights: What the draws from each are proportional to, in any unit.

    Raises:
        ValueError: There are not as many weights as corpora, a weight is not above 0, or one is so small that an epoch
            has no pair of its corpus.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        check_weights(self.weights, len(self.sizes))
        if 0 in self.draws():
            number = self.draws().index(0)
            raise ValueError(
                f"weights {list(self.weights)}: an epoch of {sum(self.sizes)} pairs has none of corpus {number + 1}; "
                "raise its weight or leave it out."
            )

    def draws(self) -> list[int]:
        """Pairs that an epoch has of each corpus; together as many as all corpora have."""
        largest = max(self.weights)
        shares = [weight / largest for weight in self.weights]  # whose sum no weight makes infinite
        total, whole = sum(self.sizes), math.fsum(shares)
        exact = [total * share / whole for share in shares]
        draws = [int(each) for each in exact]
        by_remainder = sorted(range(len(exact)), key=lambda i: draws[i] - exact[i])
        for number in by_remainder[: total - sum(draws)]:
            draws[number] += 1
        return draws

    def indices(self, epoch: int, seed: int) -> np.ndarray:
        """The rows of an epoch, corpus by corpus; int64, shape `(pairs,)`. They follow from the arguments alone."""
        chosen, offset = [], 0
        for corpus, (size, draws) in enumerate(zip(self.sizes, self.draws(), strict=True)):
            start, end = epoch * draws, (epoch + 1) * draws
            for number in range(start // size, -(-end // size)):
                order = np.random.default_rng((seed, corpus, number)).permutation(size)
                chosen.append(offset + order[max(start - number * size, 0) : end - number * size])
            offset += size
        return np.concatenate(chosen)


class MixedTokenBatchSampler(TokenBatchSampler):
    """Batches as those of `TokenBatchSampler`, of the rows that a mixture chooses anew for each epoch.

    The number of batches is the same in all epochs here too. It is that of the largest of some epochs and a little
    more; should an epoch not fit in, batches drawn at random are left out of it.

    Args:
        source_lengths, target_lengths: Of all rows, corpus after corpus.
        tokens_per_batch: See `TokenBatchSampler`.
        mixture: Which rows an epoch has.
        multiple_of, seed: See `TokenBatchSampler`.

    Raises:
        ValueError: As `TokenBatchSampler`, or the lengths are not those of the mixture's corpora.
    """

    def __init__(
        self,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        tokens_per_batch: int,
        *,
        mixture: Mixture,
        multiple_of: int = 1,
        seed: int = 0,
    ):
        if len(source_lengths) != sum(mixture.sizes):
            raise ValueError(f"corpora of {list(mixture.sizes)} pairs need as many lengths, got {len(source_lengths)}")
        self.mixture = mixture
        super().__init__(source_lengths, target_lengths, tokens_per_batch, multiple_of=multiple_of, seed=seed)

    def _fix_batch_count(self) -> int:
        self._of_all = self._lengths, self._longest, self._shares
        counts = []
        for epoch in range(8 if len(self._longest) < 200_000 else 2):
            self._choose(epoch, seed=0)  # the same for every seed
            counts.append(super()._fix_batch_count())
        count = max(counts)
        larger = math.ceil(count * 1.005) + 1 if min(counts) < count else count
        larger = -(-larger // self.multiple_of) * self.multiple_of
        return larger if larger <= len(self._longest) else count

    def _choose(self, epoch: int, seed: int) -> np.ndarray:
        chosen = self.mixture.indices(epoch, seed)
        lengths, longest, shares = self._of_all
        self._lengths = lengths[0][chosen], lengths[1][chosen]
        self._longest, self._shares = longest[chosen], shares[chosen]
        return chosen

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chosen = self._choose(epoch, self.seed)
        order, starts, ends = super()._plan(epoch)
        return chosen[order], starts, ends


def check_weights(weights: Sequence[float], corpora: int) -> None:
    """Raises ValueError where there is not one weight above 0 for each corpus."""
    if len(weights) != corpora:
        raise ValueError(f"expected one weight for each of {corpora} corpora, got {len(weights)}: {list(weights)}.")
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be numbers above 0, got {list(weights)}.")


def in_turn(weights: Sequence[float], ended: Set[int] = frozenset()) -> Iterator[int]:
    """Numbers of corpora: after any number of draws each has its share by weight, to within one or two.

    Args:
        weights: One for each corpus.
        ended: Those that are not drawn any more; the caller may add to them. Without one left the draws end.
    """
    drawn = [0] * len(weights)
    while still := [i for i in range(len(weights)) if i not in ended]:
        number = min(still, key=lambda i: (drawn[i] + 1) / weights[i])
        drawn[number] += 1
        yield number


__all__ = ["MixedTokenBatchSampler", "Mixture", "check_weights", "in_turn"]
