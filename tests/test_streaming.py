"""Streams: every pair once a pass, batches within the budget, and the same ones again after a stop."""

import gzip
import json
import logging
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from conftest import TINY_CORPUS
from vanilla_transformer.data import PairCounts, TranslationCollator
from vanilla_transformer.streaming import (
    RowsOfTheSampler,
    StreamedTokenBatches,
    TokenStream,
    first_texts,
    stream_pairs,
)


LINES = [(f"{source} {number}", f"{number} {target}") for number in range(20) for source, target in TINY_CORPUS]


def corpus(folder: Path, lines=LINES, name="text"):
    paths = [folder / f"{name}.source", folder / f"{name}.target.gz"]
    texts = ["".join(f"{pair[side]}\n" for pair in lines).encode() for side in (0, 1)]
    paths[0].write_bytes(texts[0])
    paths[1].write_bytes(gzip.compress(texts[1]))
    return stream_pairs(source_files=paths[0], target_files=paths[1])


def as_ids(rows) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(row["input_ids"].tolist()), tuple(row["labels"].tolist())) for row in rows]


def by_hand(tokenizer, lines=LINES):
    return [(tuple(tokenizer(source).input_ids), tuple(tokenizer(target).input_ids)) for source, target in lines]


def passes(batches, pairs: int, count: int):
    """The rows of the first passes, which end between two batches."""
    rows, found = [], []
    for batch in batches:
        rows += as_ids(batch)
        if len(rows) >= pairs:
            assert len(rows) == pairs
            found.append(rows)
            rows = []
            if len(found) == count:
                return found
    raise AssertionError("a stream has no end")


@pytest.mark.parametrize("buffer_size", [1, 64, 1000])
def test_every_pass_has_each_pair_once_in_another_order(tmp_path, tiny_tokenizer, buffer_size):
    stream = TokenStream([corpus(tmp_path)], tiny_tokenizer, buffer_size=buffer_size)
    first, second = passes(StreamedTokenBatches(stream, 200), len(LINES), 2)
    assert Counter(first) == Counter(second) == Counter(by_hand(tiny_tokenizer))
    assert (first == second) == (buffer_size == 1)
    for start in range(0, len(LINES), buffer_size):  # a buffer holds these pairs and no others
        end = start + buffer_size
        assert Counter(first[start:end]) == Counter(by_hand(tiny_tokenizer, LINES[start:end]))


def test_batches_are_full_within_the_budget_and_of_like_length(tmp_path, tiny_tokenizer):
    stream = TokenStream([corpus(tmp_path)], tiny_tokenizer)
    batches = list(islice(StreamedTokenBatches(stream, 300), 40))
    used = 0
    for batch in batches:
        for side in ("input_ids", "labels"):
            lengths = [len(row[side]) for row in batch]
            assert len(batch) * max(lengths) <= 300
            used += sum(lengths)
    assert used > 0.7 * 2 * 300 * len(batches)  # a batch of the budget on both sides would be 1


def test_blank_and_long_pairs_are_dropped_as_pairs_and_counted(tmp_path, tiny_tokenizer, caplog):
    long = "long " * 60
    lines = [*LINES[:20], ("", "x"), ("x", " \t"), (long, "x"), ("x", long), ("", long)]
    stream = TokenStream([corpus(tmp_path, lines)], tiny_tokenizer, max_source_tokens=50)
    limits = {"max_source_tokens": 50, "the budget": 100}
    assert len(tiny_tokenizer(long).input_ids) > max(limits.values())
    with caplog.at_level(logging.WARNING, logger="vanilla_transformer.streaming"):
        rows = passes(StreamedTokenBatches(stream, 100), 20, 2)
    assert Counter(rows[0]) == Counter(rows[1]) == Counter(by_hand(tiny_tokenizer, LINES[:20]))
    assert "dropped 5 of 25 pairs: 3 with a blank side, 2 with more than 50 source or 100 target" in caplog.text
    (counts,) = stream.counts
    assert counts == PairCounts(total=50, kept=40, blank=6, too_long=4, truncated=0)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_see_pairs_of_their_own(tmp_path, tiny_tokenizer, processes):
    seen: Counter = Counter()
    for process in range(processes):
        stream = TokenStream([corpus(tmp_path)], tiny_tokenizer, buffer_size=50)
        own = len(range(process, len(LINES), processes))
        batches = StreamedTokenBatches(stream, 200, process=process, processes=processes)
        first, second = passes(batches, own, 2)
        assert Counter(first) == Counter(second)
        seen.update(first)
    assert seen == Counter(by_hand(tiny_tokenizer))


def test_a_stream_that_is_gone_on_with_has_the_batches_of_one_that_was_not_stopped(tmp_path, tiny_tokenizer):
    def loader(seed):
        stream = TokenStream([corpus(tmp_path)], tiny_tokenizer, buffer_size=64)
        return DataLoader(
            RowsOfTheSampler(),
            batch_sampler=StreamedTokenBatches(stream, 200, seed=seed),
            collate_fn=TranslationCollator(1),
        )

    whole = [batch["labels"].tolist() for batch in islice(loader(5), 60)]
    for done in (1, 7, 40):
        rest = islice(skip_first_batches(loader(5), done), 60 - done)
        assert [batch["labels"].tolist() for batch in rest] == whole[done:]
    assert [batch["labels"].tolist() for batch in islice(loader(6), 60)] != whole


@pytest.mark.parametrize("weights", [(1, 3), (5, 0.5)])
def test_corpora_are_mixed_by_weight_at_every_moment(tmp_path, tiny_tokenizer, weights):
    """The second has ten pairs, which come again and again."""
    lines = [LINES[10:], LINES[:10]]
    streams = [corpus(tmp_path, part, str(number)) for number, part in enumerate(lines)]
    stream = TokenStream(streams, tiny_tokenizer, weights=weights, buffer_size=40)
    of_second = set(by_hand(tiny_tokenizer, lines[1]))
    rows = []
    for batch in StreamedTokenBatches(stream, 200):
        rows += as_ids(batch)
        if len(rows) >= 2000:
            break
    for start in range(0, 2000, 40):  # buffer by buffer
        found = sum(row in of_second for row in rows[start : start + 40])
        assert abs(found - 40 * weights[1] / sum(weights)) < 3
    often = Counter(row for row in rows[:2000] if row in of_second)
    assert max(often.values()) - min(often.values()) <= 1


def test_a_dataset_gives_what_files_give(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"translation": {"en": source, "de": target}} for source, target in LINES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    stream = stream_pairs(dataset=path, source_lang="en", target_lang="de")
    assert list(stream) == list(stream) == list(corpus(tmp_path)) == LINES
    columns = tmp_path / "pairs.tsv"
    columns.write_text("en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in LINES), encoding="utf-8")
    assert list(stream_pairs(dataset=columns, source_lang="en", target_lang="de")) == LINES
    with pytest.raises(ValueError, match=r"the languages 'en' and 'fr' .* found \['en', 'de'\]"):
        stream_pairs(dataset=path, source_lang="en", target_lang="fr")
    with pytest.raises(ValueError, match="a stream can only be that of a whole split"):
        stream_pairs(dataset=path, source_lang="en", target_lang="de", split="train[:10]")


def test_a_vocabulary_is_learnt_from_the_first_pairs_in_proportion(tmp_path):
    streams = [corpus(tmp_path, [(f"a{n}", f"b{n}") for n in range(90)], "one"), corpus(tmp_path, LINES, "two")]
    texts = list(first_texts(streams, 40, [1, 3]))
    assert len(texts) == 80
    assert [text for text in texts if text[:1] in "ab"] == [f"{side}{n}" for n in range(10) for side in "ab"]
    for weights in ([1, 3], [1e-300, 1]):  # all of both, in a moment
        assert len(list(first_texts(streams, 10**6, weights))) == 2 * (90 + len(LINES))


def test_what_cannot_be_streamed_is_refused(tmp_path, tiny_tokenizer):
    text = corpus(tmp_path)
    with pytest.raises(ValueError, match="buffer_size must be at least 1"):
        TokenStream([text], tiny_tokenizer, buffer_size=0)
    with pytest.raises(ValueError, match="one weight for each of 2 corpora"):
        TokenStream([text, text], tiny_tokenizer)
    with pytest.raises(FileNotFoundError):
        stream_pairs(source_files=tmp_path / "absent", target_files=tmp_path / "absent")
    blank = TokenStream([corpus(tmp_path, [("", "x"), ("x", "")])], tiny_tokenizer)
    with pytest.raises(ValueError, match="none of its 2 pairs can be used: 2 with a blank side"):
        next(iter(StreamedTokenBatches(blank, 100)))
    single = TokenStream([corpus(tmp_path, [("a", "b")])], tiny_tokenizer)
    with pytest.raises(ValueError, match=r"has fewer pairs than there are processes \(2\)"):
        next(iter(StreamedTokenBatches(single, 100, process=1, processes=2)))
    (tmp_path / "text.source").write_text("one\ntwo\n")
    (tmp_path / "text.target.gz").write_bytes(gzip.compress(b"one\n"))
    with pytest.raises(ValueError, match="equally many lines"):
        list(islice(StreamedTokenBatches(TokenStream([corpus_of(tmp_path)], tiny_tokenizer), 100), 9))


def corpus_of(folder: Path):
    (folder / "one").write_text("x\n")
    return stream_pairs(source_files=folder / "text.source", target_files=folder / "one")
