"""Corpora mixed by weight: the proportions hold in every epoch, and within a corpus no pair is preferred."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vanilla_transformer.mixing import MixedTokenBatchSampler, Mixture, in_turn


@settings(max_examples=60, deadline=None)
@given(
    corpora=st.lists(st.tuples(st.integers(20, 90), st.floats(0.5, 9)), min_size=1, max_size=4), seed=st.integers(0, 9)
)
def test_every_epoch_has_the_proportions_and_every_pair_comes_as_often_as_the_others(corpora, seed):
    sizes, weights = zip(*corpora, strict=True)
    mixture = Mixture(sizes, weights)
    corpus_of = np.repeat(np.arange(len(sizes)), sizes)
    counts: Counter = Counter()
    for epoch in range(4):
        rows = mixture.indices(epoch, seed)
        assert len(rows) == sum(sizes)
        for corpus, found in enumerate(np.bincount(corpus_of[rows], minlength=len(sizes))):
            assert abs(found - sum(sizes) * weights[corpus] / sum(weights)) < 1
        counts.update(rows.tolist())
        for corpus in range(len(sizes)):
            of_corpus = [counts[row] for row in np.flatnonzero(corpus_of == corpus).tolist()]
            assert max(of_corpus) - min(of_corpus) <= 1


def test_a_corpus_that_is_gone_through_again_comes_in_another_order():
    mixture = Mixture((10, 1000), (100, 1))
    rows = mixture.indices(0, seed=3)
    small = rows[rows < 10]
    assert len(small) == 1000
    passes = {tuple(small[start : start + 10]) for start in range(0, 1000, 10)}
    assert len(passes) == 100
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert (mixture.indices(0, seed=3) == rows).all()
    assert (mixture.indices(0, seed=4) != rows).any()
    assert (mixture.indices(1, seed=3) != rows).any()


def test_batches_of_a_mixture_hold_what_an_epoch_has_within_the_budget():
    rng = np.random.default_rng(1)
    sizes, weights = (3000, 200, 900), (1, 2, 1)
    source, target = rng.integers(2, 40, size=4100), rng.integers(2, 40, size=4100)
    source[3000:3200] += 30  # so that the lengths of an epoch depend on what is chosen
    mixture = Mixture(sizes, weights)
    samplers = [MixedTokenBatchSampler(source, target, 400, mixture=mixture, multiple_of=4, seed=7) for _ in range(2)]
    assert len(samplers[0]) % 4 == 0
    for epoch in (0, 1, 2, 9):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = list(samplers[0])
        assert list(samplers[1]) == batches  # also where the epochs before were not gone through
        assert len(batches) == len(samplers[0])
        for batch in batches:
            assert len(batch) * max(source[batch].max(), target[batch].max()) <= 400
        assert Counter(row for batch in batches for row in batch) == Counter(mixture.indices(epoch, 7).tolist())
    samplers[1].set_epoch(0)
    assert list(samplers[1]) != batches


def test_an_epoch_that_does_not_fit_leaves_whole_batches_out(monkeypatch):
    """The number of batches was fixed on epochs of short pairs."""
    source = np.full(400, 2)
    source[200:] = 40
    mixture = Mixture((200, 200), (1, 1))
    short = np.tile(np.arange(200), 2)
    with monkeypatch.context() as patch:
        patch.setattr(Mixture, "indices", lambda self, epoch, seed: short)
        sampler = MixedTokenBatchSampler(source, source, 80, mixture=mixture)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    rows = [row for batch in batches for row in batch]
    assert len(set(rows)) == len(rows) < 400


def test_draws_in_turn_keep_the_proportions_at_every_moment():
    weights = [1, 3, 0.5]
    drawn = np.zeros(3)
    for count, number in enumerate(islice(in_turn(weights), 2000), 1):
        drawn[number] += 1
        assert np.abs(drawn - count * np.array(weights) / sum(weights)).max() < 2


def test_draws_in_turn_pass_over_what_has_ended_at_once():
    """However light what is left: it is not waited for."""
    ended: set[int] = set()
    turns = in_turn([1e-300, 1], ended)
    assert [next(turns) for _ in range(5)] == [1] * 5
    ended.add(1)
    assert [next(turns) for _ in range(5)] == [0] * 5
    ended.add(0)
    assert list(turns) == []


def test_weights_count_by_their_proportion_however_large():
    assert Mixture((30, 50), (1e308, 1e308)).draws() == Mixture((30, 50), (1, 1)).draws() == [40, 40]
    assert Mixture((30, 50), (1e-308, 3e-308)).draws() == [20, 60]


@pytest.mark.parametrize(
    "sizes, weights, message",
    [
        ((5, 5), (1,), "one weight for each of 2 corpora, got 1"),
        ((5, 5), (1, 0), "above 0"),
        ((5, 5), (1, float("nan")), "above 0"),
        ((5, 5), (1, float("inf")), "above 0"),
        ((5, 5), (1, 1e-9), "none of corpus 2"),
    ],
)
def test_weights_that_make_no_sense_are_refused(sizes, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(sizes, weights)
    with pytest.raises(ValueError, match="as many lengths"):
        MixedTokenBatchSampler(np.full(9, 2), np.full(9, 2), 100, mixture=Mixture((5, 5), (1, 1)))
