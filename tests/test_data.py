"""Lines, pairs, batches: no line shifts, no sentence is lost or repeated, no batch exceeds its budget."""

import gzip
import io
import json
import logging
import os
import pickle
import time
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from torch.utils.data import DataLoader

from conftest import TINY_CORPUS
from vanilla_transformer import data
from vanilla_transformer.data import (
    PairCounts,
    TokenBatchSampler,
    TranslationCollator,
    load_pairs,
    read_lines,
    read_parallel,
    token_lengths,
    tokenize_pairs,
)
from vanilla_transformer.tokenization import train_tokenizer


EOS = 2
BOM = b"\xef\xbb\xbf"


# Lines of text


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def lines_by_bytes(content):
    """The rules once more, by splitting bytes: the oracle."""
    parts = content.removeprefix(BOM).split(b"\n")
    if parts[-1] == b"":
        parts.pop()
    return [part.removesuffix(b"\r").decode("utf-8") for part in parts]


def test_only_a_newline_splits_lines(tmp_path):
    content = (
        "one\u2028still one\r\ntwo\x85x\n\nfour\x0cstill four\nfive\x1cfive\nsix\rsix\u2029\x0b\x1d\x1e\n".encode()
    )
    expected = [
        "one\u2028still one",
        "two\x85x",
        "",
        "four\x0cstill four",
        "five\x1cfive",
        "six\rsix\u2029\x0b\x1d\x1e",
    ]
    assert list(read_lines(write(tmp_path / "text", content))) == expected
    target = write(tmp_path / "target", "a\nb\nc\nd\ne\nf\n")
    assert read_parallel(tmp_path / "text", target) == (expected, list("abcdef"))


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"a\r\n\r\nb\r", ["a", "", "b"]),
        (b"a\r\r\n", ["a\r"]),
        (BOM + b"one\ntwo\n", ["one", "two"]),
        (BOM, []),
        (BOM + b"\n", [""]),
        (b"a\n" + BOM + b"b\n", ["a", "\ufeffb"]),
        (BOM + BOM + b"a\n", ["\ufeffa"]),
        (b"nul\x00nul\n", ["nul\x00nul"]),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".gz", ".de.GZ"])
def test_line_rules_hold_for_plain_and_gzip_files(tmp_path, content, expected, suffix):
    compressed = gzip.compress(content) if suffix.lower().endswith("gz") else content
    assert list(read_lines(write(tmp_path / f"text{suffix}", compressed))) == expected


@settings(max_examples=200, deadline=None)
@given(content=st.text(alphabet="ab \n\r\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\ufeff\x00é").map(str.encode))
def test_line_rules_hold_for_any_text(tmp_path_factory, content):
    path = write(tmp_path_factory.getbasetemp() / "any.txt", content)
    assert list(read_lines(path)) == lines_by_bytes(content)
    assert list(read_lines(str(path))) == lines_by_bytes(content)


def test_standard_input_follows_the_same_rules(monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(BOM + "é\x85\r\n\nlast".encode())))
    assert list(read_lines("-")) == ["é\x85", "", "last"]


def test_lines_are_read_one_at_a_time(monkeypatch):
    def endless():
        while True:
            yield b"again\n"

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=endless()))
    lines = read_lines("-")
    assert [next(lines) for _ in range(3)] == ["again"] * 3


@pytest.mark.parametrize("compress", [False, True])
def test_bytes_that_are_not_utf8_are_reported_with_file_and_line(tmp_path, compress):
    content = "fine\nstill fine\nMüller\n".encode("latin-1")
    path = write(tmp_path / ("l1.gz" if compress else "l1.txt"), gzip.compress(content) if compress else content)
    lines = read_lines(path)
    assert [next(lines), next(lines)] == ["fine", "still fine"]
    with pytest.raises(ValueError, match=rf"{path}, line 3: .*0xfc at byte 2"):
        next(lines)


@pytest.mark.parametrize(
    "content",
    [
        b"plain text in a file called .gz\n",
        gzip.compress(b"line\n" * 10_000)[:-10],
        gzip.compress(os.urandom(5000))[:200] + b"\x00" * 400,
    ],
    ids=["not gzip", "cut short", "overwritten"],
)
def test_broken_gzip_is_reported_with_the_file(tmp_path, content):
    path = write(tmp_path / "text.gz", content)
    with pytest.raises(ValueError, match=str(path)):
        list(read_lines(path))
    with pytest.raises(ValueError, match=str(path)):
        load_pairs(source_files=path, target_files=path)


def test_missing_files_and_folders_are_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "absent")):
        read_lines(tmp_path / "absent")
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder"):
        read_lines(tmp_path)
    present = write(tmp_path / "present", "a\n")
    for read in (read_parallel, lambda s, t: load_pairs(source_files=s, target_files=t)):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / "absent")):
            read(present, tmp_path / "absent")
        with pytest.raises(ValueError, match="folder"):
            read(tmp_path, present)


# Parallel files


@pytest.fixture(params=["read_parallel", "load_pairs"])
def read_files(request):
    """Both ways of reading parallel files, as a function that returns two lists."""
    if request.param == "read_parallel":
        return read_parallel

    def read(source, target):
        pairs = load_pairs(source_files=source, target_files=target)
        assert pairs.column_names == ["source", "target"]
        return list(pairs["source"]), list(pairs["target"])

    return read


def test_parallel_lines_keep_their_partners(tmp_path, read_files):
    source = write(tmp_path / "source", "s1\n\ns3\x85x\r\ns4")
    target = write(tmp_path / "target.gz", gzip.compress(b"t1\nt2\n  \nt4\n"))
    assert read_files(source, target) == (["s1", "", "s3\x85x", "s4"], ["t1", "t2", "  ", "t4"])


def test_several_files_follow_each_other(tmp_path, read_files):
    paths = [write(tmp_path / name, f"{name}1\n{name}2\n") for name in ("a", "b", "x", "y")]
    assert read_files(paths[:2], [str(path) for path in paths[2:]]) == (
        ["a1", "a2", "b1", "b2"],
        ["x1", "x2", "y1", "y2"],
    )


@pytest.mark.parametrize("source_count, target_count", [(3, 5), (5, 3), (0, 2), (2, 0)])
def test_unequal_line_counts_are_refused_with_both_numbers(tmp_path, read_files, source_count, target_count):
    source = write(tmp_path / "source", "s\n" * source_count)
    target = write(tmp_path / "target", "t\n" * target_count)
    with pytest.raises(ValueError, match=rf"{source} has {source_count} and {target} has {target_count};"):
        read_files(source, target)


def test_line_counts_are_compared_file_by_file(tmp_path, read_files):
    sources = [write(tmp_path / "s1", "a\nb\n"), write(tmp_path / "s2", "c\n")]
    targets = [write(tmp_path / "t1", "x\n"), write(tmp_path / "t2", "y\nz\n")]
    with pytest.raises(ValueError, match=r"s1 has 2 and .*t1 has 1"):
        read_files(sources, targets)


def test_unequal_numbers_of_files_and_empty_files_are_refused(tmp_path, read_files):
    one, empty = write(tmp_path / "one", "a\n"), write(tmp_path / "empty", "")
    with pytest.raises(ValueError, match="2 source files .* and 1 target files"):
        read_files([one, one], [one])
    with pytest.raises(ValueError, match="0 source files"):
        read_files([], [])
    with pytest.raises(ValueError, match="at least one line"):
        read_files([empty, empty], [empty, empty])


def test_a_corrected_file_is_read_after_a_refusal(tmp_path):
    source, target = write(tmp_path / "source", "a\nb\n"), write(tmp_path / "target", "x\n")
    with pytest.raises(ValueError, match="has 2 and"):
        load_pairs(source_files=source, target_files=target)
    write(target, "x\ny\n")
    assert list(load_pairs(source_files=source, target_files=target)["target"]) == ["x", "y"]


def test_files_are_converted_once_and_mapped_into_memory(tmp_path, monkeypatch):
    source, target = write(tmp_path / "source", "a\nb\n"), write(tmp_path / "target", "x\ny\n")
    first = load_pairs(source_files=source, target_files=target)
    assert first.cache_files
    assert pickle.loads(pickle.dumps(first))["source"][:] == ["a", "b"]

    def refuse(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(data, "iterate_pairs", refuse)
    again = load_pairs(source_files=str(source), target_files=[target])
    assert again.cache_files == first.cache_files
    assert again._fingerprint == first._fingerprint


def test_a_changed_file_is_never_served_from_the_cache(tmp_path):
    source, target = write(tmp_path / "source", "a\nb\n"), write(tmp_path / "target", "x\ny\n")
    before = load_pairs(source_files=source, target_files=target)
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    write(source, "a\nc\n")
    os.utime(source, ns=times)  # same size, same time of change
    after = load_pairs(source_files=source, target_files=target)
    assert list(after["source"]) == ["a", "c"]
    assert list(before["source"]) == ["a", "b"]
    assert after._fingerprint != before._fingerprint


def test_standard_input_is_refused_for_training(tmp_path):
    target = write(tmp_path / "target", "x\n")
    with pytest.raises(ValueError, match="standard input is no regular file"):
        load_pairs(source_files="-", target_files=target)
    with pytest.raises(ValueError, match="more than once"):
        read_parallel("-", "-")


# Datasets


ROWS = [{"en": "one\u2028line", "de": "eins"}, {"en": "two\nlines", "de": "None"}, {"en": "0042", "de": ""}]
EXPECTED = {"source": [row["en"] for row in ROWS], "target": [row["de"] for row in ROWS]}


def json_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def build_dataset(kind, folder):
    """Writes ROWS in one of the shapes that load_pairs opens, and returns what to pass as dataset."""
    columns = datasets.Dataset.from_list(ROWS)
    features = datasets.Features({"translation": datasets.Translation(["de", "en"])})
    translations = datasets.Dataset.from_list([{"translation": row} for row in ROWS], features=features)
    if kind == "saved translation":
        translations.save_to_disk(folder / "saved")
    elif kind == "saved columns":
        columns.add_column("id", [1, 2, 3]).save_to_disk(folder / "saved")
    elif kind == "saved splits":
        other = datasets.Dataset.from_list(ROWS[:1])
        datasets.DatasetDict({"train": columns, "validation": other}).save_to_disk(folder / "saved")
    elif kind == "folder":
        (folder / "saved").mkdir()
        write(folder / "saved" / "train.jsonl", json_lines([{"translation": row, "id": 1} for row in ROWS]))
    elif kind == "jsonl translation":
        return write(folder / "rows.jsonl", json_lines([{"translation": row, "id": 1} for row in ROWS]))
    elif kind == "json.gz":
        return write(folder / "rows.json.gz", gzip.compress(json_lines(ROWS).encode()))
    elif kind == "parquet":
        columns.to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet"
    elif kind in ("csv", "tsv"):
        columns.to_csv(folder / f"rows.{kind}", sep="," if kind == "csv" else "\t")
        return folder / f"rows.{kind}"
    return folder / "saved"


@pytest.mark.parametrize(
    "kind, split",
    [
        ("saved translation", None),
        ("saved columns", None),
        ("saved columns", "train"),
        ("saved splits", "train"),
        ("folder", None),
        ("folder", "train"),
        ("jsonl translation", None),
        ("jsonl translation", "train"),
        ("json.gz", None),
        ("parquet", None),
        ("csv", None),
        ("tsv", None),
    ],
)
def test_datasets_of_every_shape_give_the_same_pairs(tmp_path, kind, split):
    path = build_dataset(kind, tmp_path)
    pairs = load_pairs(dataset=path, split=split, source_lang="en", target_lang="de")
    assert pairs.column_names == ["source", "target"]
    assert {column: list(pairs[column]) for column in pairs.column_names} == EXPECTED
    turned = load_pairs(dataset=str(path), split=split, source_lang="de", target_lang="en")
    assert list(turned["source"]) == EXPECTED["target"]


def test_columns_named_source_and_target_need_no_languages(tmp_path):
    datasets.Dataset.from_dict({"target": ["t"], "source": ["s"], "x": [1]}).save_to_disk(tmp_path / "saved")
    assert load_pairs(dataset=tmp_path / "saved").to_list() == [{"source": "s", "target": "t"}]


def test_a_part_of_a_split_can_be_taken(tmp_path):
    path = build_dataset("jsonl translation", tmp_path)
    pairs = load_pairs(dataset=path, split="train[:2]", source_lang="en", target_lang="de")
    assert list(pairs["source"]) == EXPECTED["source"][:2]


def test_a_dataset_is_not_copied_in_memory(tmp_path):
    path = build_dataset("saved translation", tmp_path)
    assert load_pairs(dataset=path, source_lang="en", target_lang="de").cache_files


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("saved splits", {}, r"splits \['train', 'validation'\], but no split was given"),
        ("saved splits", {"split": "test"}, r"splits \['train', 'validation'\], but split 'test'"),
        ("saved columns", {"split": "validation"}, "one table .* but split 'validation'"),
        ("folder", {"split": "validation"}, r"splits \['train'\]"),
        ("jsonl translation", {"split": "test"}, r"splits \['train'\]"),
        ("saved columns", {"source_lang": "fr"}, r"found columns \['en', 'de', 'id'\]; pass source_lang"),
        ("saved translation", {"source_lang": "fr"}, r"found \['d?e?n?', '.*'\]; pass source_lang"),
        ("saved translation", {"source_lang": None, "target_lang": None}, "'source' and 'target' in the column"),
        ("saved columns", {"source_lang": "id"}, "expected text in the column 'id'"),
        ("saved columns", {"source_lang": "de"}, "must differ"),
        ("jsonl translation", {"dataset_config": "de-en"}, "no configurations"),
    ],
)
def test_datasets_that_do_not_fit_are_refused_with_what_there_is(tmp_path, kind, options, message):
    path = build_dataset(kind, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_pairs(dataset=path, **{"source_lang": "en", "target_lang": "de", **options})


def test_wrong_combinations_of_arguments_are_refused(tmp_path):
    path = write(tmp_path / "text.txt", "a\n")
    for options, message in [
        ({}, "expected dataset, or both"),
        ({"source_files": path}, "target_files=None"),
        ({"source_files": path, "target_files": path, "dataset": "x"}, "got both"),
        ({"source_files": path, "target_files": path, "split": "train"}, "leave them out"),
        ({"dataset": path}, "source_files and target_files"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_pairs(**options)
    for absent in (tmp_path / "absent", "./absent", "absent.jsonl"):
        with pytest.raises(FileNotFoundError, match="absent"):
            load_pairs(dataset=absent)


def test_a_broken_or_empty_dataset_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot be read"):
        load_pairs(dataset=write(tmp_path / "rows.jsonl", '{"en": "a"\n{{{'), source_lang="en", target_lang="de")
    text = datasets.Value("string")
    empty = datasets.Dataset.from_dict({"source": [], "target": []}, datasets.Features(source=text, target=text))
    empty.to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="empty.parquet' cannot be read"):
        load_pairs(dataset=tmp_path / "empty.parquet")
    datasets.Dataset.from_dict({"source": ["a"], "target": ["b"]}).save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    monkeypatch.setattr(data, "load_from_disk", lambda _: saved.select([]))
    with pytest.raises(ValueError, match="is empty"):
        load_pairs(dataset=tmp_path / "saved")


# Token ids


@pytest.fixture
def corpus(tmp_path):
    def build(sources, targets):
        write(tmp_path / "source", "".join(line + "\n" for line in sources))
        write(tmp_path / "target", "".join(line + "\n" for line in targets))
        return load_pairs(source_files=tmp_path / "source", target_files=tmp_path / "target")

    return build


def test_pairs_with_a_blank_side_are_dropped_as_pairs_and_counted(corpus, tiny_tokenizer, caplog):
    sources = [f"source {i}" for i in range(1, 11)]
    targets = [f"target {i}" for i in range(1, 11)]
    sources[2], targets[6] = "", " \t\u3000"
    caplog.set_level(logging.INFO, logger="vanilla_transformer.data")
    tokens, counts = tokenize_pairs(corpus(sources, targets), tiny_tokenizer, description="training")
    kept = [f"{i}" for i in (1, 2, 4, 5, 6, 8, 9, 10)]
    assert tiny_tokenizer.batch_decode(list(tokens["input_ids"]), skip_special_tokens=True) == [
        "source " + i for i in kept
    ]
    assert tiny_tokenizer.batch_decode(list(tokens["labels"]), skip_special_tokens=True) == [
        "target " + i for i in kept
    ]
    assert counts == PairCounts(total=10, kept=8, blank=2, too_long=0, truncated=0)
    assert [(record.name, record.levelname) for record in caplog.records] == [("vanilla_transformer.data", "WARNING")]
    assert "training: dropped 2 of 10 pairs: 2 with a blank side" in caplog.text


def test_pairs_over_a_limit_are_dropped_as_pairs_and_counted(corpus, tiny_tokenizer):
    bang = {count: "?!" * count for count in range(1, 20)}
    lengths = {count: len(tiny_tokenizer(text).input_ids) for count, text in bang.items()}
    assert lengths[4] == 9  # every sign is a token of its own here, and EOS counts
    pairs = corpus([bang[3], bang[3], bang[9], bang[4], ""], [bang[4], bang[3], bang[3], bang[9], bang[19]])
    tokens, counts = tokenize_pairs(pairs, tiny_tokenizer, max_source_tokens=8, max_target_tokens=9)
    assert [(len(row["input_ids"]), len(row["labels"])) for row in tokens] == [(7, 9), (7, 7)]
    assert counts == PairCounts(total=5, kept=2, blank=1, too_long=2, truncated=0)
    # A limit that is met exactly drops nothing.
    tokens, counts = tokenize_pairs(pairs, tiny_tokenizer, max_source_tokens=9, max_target_tokens=9)
    assert counts == PairCounts(total=5, kept=2, blank=1, too_long=2, truncated=0)
    tokens, counts = tokenize_pairs(pairs, tiny_tokenizer, max_source_tokens=19, max_target_tokens=19)
    assert counts == PairCounts(total=5, kept=4, blank=1, too_long=0, truncated=0)
    assert tokens[1] == {"input_ids": tiny_tokenizer(bang[3]).input_ids, "labels": tiny_tokenizer(bang[3]).input_ids}


def test_no_limit_means_that_of_the_tokenizer(corpus):
    tokenizer = train_tokenizer(["a text"], 300, model_max_length=5)
    _, counts = tokenize_pairs(corpus(["abcd", "abcde", "ab"], ["abcd", "ab", "abcde"]), tokenizer)
    assert (counts.kept, counts.too_long) == (1, 2)


def test_evaluation_keeps_every_pair_and_cuts_with_a_warning(corpus, tiny_tokenizer, caplog):
    sources = ["?!" * 3, "", "?!" * 10, "a </s> b"]
    targets = ["?!" * 30, "!", "?!", "?" * 7]
    tokens, counts = tokenize_pairs(
        corpus(sources, targets),
        tiny_tokenizer,
        max_source_tokens=8,
        max_target_tokens=8,
        drop=False,
        description="validation",
    )
    for row, source, target in zip(tokens, sources, targets, strict=True):
        assert row["input_ids"] == tiny_tokenizer(source, truncation=True, max_length=8).input_ids
        assert row["labels"] == tiny_tokenizer(text_target=target, truncation=True, max_length=8).input_ids
        for ids in row.values():
            assert ids.index(EOS) == len(ids) - 1
    assert counts == PairCounts(total=4, kept=4, blank=0, too_long=0, truncated=2)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "validation, line 1: target of 61 tokens truncated to 8 (EOS kept)",
        "validation, line 3: source of 21 tokens truncated to 8 (EOS kept)",
    ]


def test_control_tokens_in_text_do_not_become_control_ids(corpus, tiny_tokenizer):
    text = "use the </s> tag, <pad>, <s> and <unk> here"
    tokens, _ = tokenize_pairs(corpus([text], [text]), tiny_tokenizer)
    for ids in tokens[0].values():
        assert [i for i in ids if i < 3] == [EOS]
        assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_missing_text_counts_as_blank(tiny_tokenizer):
    pairs = datasets.Dataset.from_dict({"source": ["a", None, "c"], "target": ["x", "y", None]})
    tokens, counts = tokenize_pairs(pairs, tiny_tokenizer)
    assert (len(tokens), counts.blank) == (1, 2)
    tokens, counts = tokenize_pairs(pairs, tiny_tokenizer, drop=False)
    assert tokens["labels"][2] == [EOS]


def test_encoding_is_done_once(corpus, tiny_tokenizer, tmp_path, monkeypatch):
    pairs = corpus(["a b c", "", "d e f g h"], ["x", "y", "z"])
    first, counts = tokenize_pairs(pairs, tiny_tokenizer)
    assert first.cache_files
    assert first.features["input_ids"].feature.dtype == first.features["labels"].feature.dtype == "int32"

    def refuse(*_, **__):
        raise AssertionError("encoded again")

    # A fast tokenizer remembers the truncation and padding of its last call; that must not count as a change.
    identity = data._tokenizer_identity(tiny_tokenizer)
    tiny_tokenizer(["a", "b c"], truncation=True, max_length=3, padding=True)
    assert data._tokenizer_identity(tiny_tokenizer) == identity
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    reloaded = type(tiny_tokenizer).from_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(data, "encode_batch", refuse)
    for tokenizer in (tiny_tokenizer, reloaded):
        again, again_counts = tokenize_pairs(pairs, tokenizer)
        assert again.to_list() == first.to_list()
        assert again_counts == counts
    with pytest.raises(AssertionError, match="encoded again"):
        tokenize_pairs(pairs, train_tokenizer(["another text"], 300))


def test_several_processes_encode_the_same(corpus, tiny_tokenizer):
    pairs = corpus([source for source, _ in TINY_CORPUS], [target for _, target in TINY_CORPUS])
    parallel, counts = tokenize_pairs(pairs, tiny_tokenizer, num_proc=2)
    assert counts.kept == len(TINY_CORPUS)
    assert list(parallel["input_ids"]) == tiny_tokenizer([source for source, _ in TINY_CORPUS]).input_ids
    assert list(parallel["labels"]) == tiny_tokenizer([target for _, target in TINY_CORPUS]).input_ids


def test_a_corpus_of_which_nothing_is_left_is_refused_with_the_counts(corpus, tiny_tokenizer):
    pairs = corpus(["", "a", "long " * 50], ["x", " ", "y"])
    with pytest.raises(ValueError, match="none of the 3 pairs .* 2 with a blank side, 1 with more than 20 source"):
        tokenize_pairs(pairs, tiny_tokenizer, max_source_tokens=20)


def test_what_cannot_be_encoded_is_refused(corpus, tiny_tokenizer):
    pairs = corpus(["a"], ["b"])
    with pytest.raises(ValueError, match="max_target_tokens must be at least 2"):
        tokenize_pairs(pairs, tiny_tokenizer, max_target_tokens=1)
    with pytest.raises(ValueError, match=r"got \['source'\]"):
        tokenize_pairs(pairs.remove_columns(["target"]), tiny_tokenizer)
    with pytest.raises(ValueError, match="at least one pair"):
        tokenize_pairs(pairs.select([]), tiny_tokenizer)
    without_eos = train_tokenizer(["a text"], 300)
    without_eos.backend_tokenizer.post_processor = processors.ByteLevel()
    with pytest.raises(ValueError, match="must close every text with its EOS"):
        tokenize_pairs(pairs, without_eos)


def test_token_lengths_count_the_rows_that_are_there(corpus, tiny_tokenizer):
    pairs = corpus(["a", "", "a b c", "?" * 30, "?!"], ["x y", "z", "!", "x", "?!?"])
    tokens, counts = tokenize_pairs(pairs, tiny_tokenizer, max_source_tokens=20)
    assert counts.kept == 3
    source, target = token_lengths(tokens)
    assert source.dtype == target.dtype == np.int64
    assert source.tolist() == [len(ids) for ids in tokens["input_ids"]]
    assert target.tolist() == [len(ids) for ids in tokens["labels"]]
    assert [array.tolist() for array in token_lengths(tokens.select([2, 0]))] == [
        [source[2], source[0]],
        [target[2], target[0]],
    ]
    assert [array.shape for array in token_lengths(tokens.select([]))] == [(0,), (0,)]


# Batches of tokens


def random_lengths(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(2.6, 0.4, count).astype(int), 2, longest)
    target = np.clip((source * rng.normal(1.1, 0.2, count)).astype(int), 2, longest)
    return source, target


def batches_of(sampler, epoch):
    sampler.set_epoch(epoch)
    return list(sampler)


def assert_valid_epoch(sampler, batches, source, target, budget, max_rows=None):
    assert len(batches) == len(sampler)
    assert len(sampler) % sampler.multiple_of == 0
    assert Counter(i for batch in batches for i in batch) == Counter(range(len(source)))
    for batch in batches:
        assert batch
        assert len(batch) * max(source[i] for i in batch) <= budget
        assert len(batch) * max(target[i] for i in batch) <= budget
        assert max_rows is None or len(batch) <= max_rows


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)
    | st.lists(st.sampled_from([(1, 1), (1, 40), (40, 1), (7, 8)]), min_size=1, max_size=200),
    extra_budget=st.integers(0, 200),
    multiple_of=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    max_rows=st.none() | st.integers(1, 6),
    shuffle=st.booleans(),
)
def test_every_batch_is_within_budget_and_every_sentence_occurs_once(
    lengths, extra_budget, multiple_of, seed, max_rows, shuffle
):
    source, target = (list(side) for side in zip(*lengths, strict=True))
    budget = max(*source, *target) + extra_budget
    fewest = len(TokenBatchSampler(source, target, budget, max_rows=max_rows, shuffle=False))
    options = {"multiple_of": multiple_of, "seed": seed, "max_rows": max_rows, "shuffle": shuffle}
    if len(source) // multiple_of * multiple_of < fewest:
        # No multiple leaves a sentence for each batch and a batch for each sentence.
        with pytest.raises(ValueError, match="processes x accumulation"):
            TokenBatchSampler(source, target, budget, **options)
        return
    sampler = TokenBatchSampler(source, target, budget, **options)
    for epoch in range(4):
        assert_valid_epoch(sampler, batches_of(sampler, epoch), source, target, budget, max_rows)


def test_the_number_of_batches_is_constant_over_many_epochs_and_seeds():
    source, target = random_lengths(700)
    for budget in (60, 127, 479):  # one more would allow many more shapes: 128 and 480 have many divisors
        lengths = set()
        for seed in range(3):
            sampler = TokenBatchSampler(source, target, budget, seed=seed)
            lengths.add(len(sampler))
            for epoch in range(25):
                assert_valid_epoch(sampler, batches_of(sampler, epoch), source, target, budget)
        assert len(lengths) == 1


def test_a_plan_with_too_many_batches_falls_back_on_one_that_fits(monkeypatch):
    source, target = random_lengths(500)
    sampler = TokenBatchSampler(source, target, 256)
    # From now on every random order is a bad one: long and short sentences in turn.
    bad = np.argsort(source)
    bad = np.stack([bad[:250], bad[250:][::-1]], axis=1).reshape(-1)
    monkeypatch.setattr(sampler, "_random_order", lambda rng: bad)
    assert len(sampler._cut(bad)) - 1 > len(sampler)
    first, second = batches_of(sampler, 0), batches_of(sampler, 1)
    for batches in (first, second):
        assert_valid_epoch(sampler, batches, source, target, 256)
    assert first != second


def test_batches_follow_from_seed_and_epoch_alone():
    source, target = random_lengths(400)

    def epoch_of(seed, epoch, before=()):
        sampler = TokenBatchSampler(source, target, 300, multiple_of=2, seed=seed)
        for other in before:
            batches_of(sampler, other)
        np.random.seed(epoch)
        torch.manual_seed(epoch)
        return batches_of(sampler, epoch)

    assert epoch_of(1, 5) == epoch_of(1, 5, before=(0, 3, 9)) == epoch_of(1, 5, before=(5,))
    assert epoch_of(1, 5) != epoch_of(1, 6)
    assert epoch_of(1, 5) != epoch_of(2, 5)
    assert epoch_of(0, 1) != epoch_of(1, 0)


def test_a_batch_is_composed_anew_each_epoch():
    source, target = random_lengths(6000)
    sampler = TokenBatchSampler(source, target, 1024, seed=1)

    def partners(epoch):
        number = np.empty(len(source), dtype=int)
        for index, batch in enumerate(batches_of(sampler, epoch)):
            number[batch] = index
        return number

    rng = np.random.default_rng(0)
    shares = []
    for epoch in range(6):
        now, then = partners(epoch), partners(epoch + 1)
        left, right = rng.integers(len(source), size=(2, 400_000))
        together = (now[left] == now[right]) & (left != right)
        shares.append((then[left] == then[right])[together].mean())
    assert np.mean(shares) < 0.4
    # The order of the batches is not that of their lengths.
    longest = [source[batch].max() for batch in batches_of(sampler, 0)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


def test_sentences_of_like_length_share_a_batch_and_batches_are_full():
    source, target = random_lengths(20_000)
    sampler = TokenBatchSampler(source, target, 2048)
    kept = np.array([source.sum(), target.sum()])
    for epoch in range(3):
        padded, fill = np.zeros(2), []
        for batch in batches_of(sampler, epoch):
            widths = np.array([source[batch].max(), target[batch].max()])
            padded += len(batch) * widths
            fill.append(len(batch) * widths.max() / 2048)
        assert ((1 - kept / padded) < 0.08).all()
        assert np.mean(fill) > 0.95


def test_batches_of_one_update_are_of_like_size_but_of_mixed_lengths():
    source, target = random_lengths(3000)
    sampler = TokenBatchSampler(source, target, 512, multiple_of=8, seed=3)
    batches = batches_of(sampler, 2)
    costs = np.array([len(batch) * (source[batch].max() + target[batch].max()) for batch in batches]).reshape(-1, 8)
    longest = np.array([source[batch].max() for batch in batches]).reshape(-1, 8)
    overall = costs.std()
    assert np.mean(costs.std(axis=1)) <= overall
    # An update sees about the spread of lengths that the corpus has.
    assert np.mean(longest.std(axis=1)) > 0.6 * longest.std()


def test_without_shuffling_every_epoch_is_the_same_and_sorted():
    source, target = random_lengths(300)
    sampler = TokenBatchSampler(source, target, 256, shuffle=False, multiple_of=4)
    first = batches_of(sampler, 0)
    assert_valid_epoch(sampler, first, source, target, 256)
    assert batches_of(sampler, 3) == first
    assert batches_of(TokenBatchSampler(source, target, 256, shuffle=False, multiple_of=4, seed=9), 0) == first
    means = [source[batch].mean() for batch in first]
    assert np.corrcoef(means, np.arange(len(means)))[0, 1] > 0.9


def test_identical_lengths_are_shuffled_freely():
    sampler = TokenBatchSampler([5] * 60, [5] * 60, 50)
    assert len(sampler) == 6
    first, second = ([sorted(batch) for batch in batches_of(sampler, epoch)] for epoch in (0, 1))
    assert sorted(first) != sorted(second)
    assert {len(batch) for batch in first} == {10}


@pytest.mark.parametrize(
    "source, target, budget, options, message",
    [
        ([3, 9, 4], [3, 3, 3], 8, {}, "sentence 1 has 9 source tokens, more than tokens_per_batch=8"),
        ([3, 3, 4], [3, 3, 12], 8, {}, "sentence 2 has 12 target tokens"),
        ([3, 3], [3, 3], 8, {"multiple_of": 3}, "multiple_of=3 batches .* got 2"),
        ([8] * 5, [8] * 5, 8, {"multiple_of": 4}, "5 sentences need at least 5 batches"),
        ([3, 3], [3], 8, {}, r"\(2,\) and \(1,\)"),
        ([], [], 8, {}, "at least one pair"),
        ([3, 0], [3, 3], 8, {}, "at least 1 .* got 0 for sentence 1"),
        ([3], [3], 0, {}, "tokens_per_batch must be at least 1"),
        ([3], [3], 8, {"seed": -1}, "seed must be at least 0"),
        ([3], [3], 8, {"max_rows": 0}, "max_rows must be at least 1"),
    ],
)
def test_batches_that_cannot_be_made_are_refused(source, target, budget, options, message):
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler(source, target, budget, **options)


def test_lengths_must_be_integers_and_epochs_not_negative():
    with pytest.raises(TypeError, match="integers"):
        TokenBatchSampler([1.5], [1], 8)
    with pytest.raises(ValueError, match="epoch"):
        TokenBatchSampler([1], [1], 8).set_epoch(-1)


def test_no_multiple_above_the_trial_count_still_leaves_the_smallest_one():
    # 6 sentences of the whole budget and multiple_of 3: 6 batches, neither more nor fewer.
    sampler = TokenBatchSampler([8] * 6, [8] * 6, 8, multiple_of=3)
    assert sorted(batches_of(sampler, 1)) == [[i] for i in range(6)]


@pytest.fixture
def token_dataset():
    source, target = random_lengths(120, longest=20)
    rows = {
        "input_ids": [[i + 3] * (length - 1) + [EOS] for i, length in enumerate(source.tolist())],
        "labels": [[i + 3] * (length - 1) + [EOS] for i, length in enumerate(target.tolist())],
    }
    return datasets.Dataset.from_dict(rows), source, target


@pytest.mark.parametrize("workers", [0, 2])
def test_sampler_and_collator_work_in_a_data_loader(token_dataset, workers):
    dataset, source, target = token_dataset
    sampler = TokenBatchSampler(source, target, 100, seed=2)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=TranslationCollator(1), num_workers=workers)
    assert len(loader) == len(sampler)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        rows = [[int(row[0]) - 3 for row in batch["input_ids"]] for batch in loader]
        assert rows == batches_of(sampler, epoch)


def test_prepared_loader_can_be_resumed_in_the_middle_of_an_epoch(token_dataset):
    dataset, source, target = token_dataset

    def prepared():
        sampler = TokenBatchSampler(source, target, 100, seed=2)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=TranslationCollator(1))
        return accelerator.prepare(loader), sampler

    loader, sampler = prepared()
    loader.set_epoch(3)
    assert sampler.epoch == 3
    whole = [batch["labels"].tolist() for batch in loader]
    loader, _ = prepared()
    loader.set_epoch(3)
    assert [batch["labels"].tolist() for batch in skip_first_batches(loader, 4)] == whole[4:]


def test_processes_share_the_batches_of_an_epoch_without_repeating_one(token_dataset):
    _, source, target = token_dataset
    shards = []
    for process in range(2):
        sampler = TokenBatchSampler(source, target, 100, multiple_of=4)
        sampler.set_epoch(2)
        shards.append(list(BatchSamplerShard(sampler, 2, process, even_batches=False)))
        assert len(BatchSamplerShard(sampler, 2, process, even_batches=False)) == len(sampler) // 2
    assert len(shards[0]) == len(shards[1])
    assert Counter(i for shard in shards for batch in shard for i in batch) == Counter(range(len(source)))
    # Consecutive batches belong to the same update.
    assert [batch for pair in zip(*shards, strict=True) for batch in pair] == list(sampler)


def test_real_corpus_is_batched_with_little_padding(multi30k):
    pairs = load_pairs(source_files=multi30k / "train.en.gz", target_files=multi30k / "train.de.gz")
    assert len(pairs) == 29_000
    tokenizer = train_tokenizer((text for column in ("source", "target") for text in pairs[column]), 10_000)
    tokens, counts = tokenize_pairs(pairs, tokenizer)
    assert (counts.kept, counts.total) == (29_000, 29_000)
    source, target = token_lengths(tokens)
    sampler = TokenBatchSampler(source, target, 4096)
    batches = batches_of(sampler, 1)
    rows = np.array([len(batch) for batch in batches])
    for lengths in (source, target):
        padded = (rows * np.array([lengths[batch].max() for batch in batches])).sum()
        assert 1 - lengths.sum() / padded < 0.08
    assert len(sampler) < 1.02 * np.maximum(source, target).sum() / 4096 / 0.93


@pytest.mark.slow
def test_five_million_sentences_are_planned_within_seconds():
    source, target = random_lengths(5_000_000, longest=250)
    start = time.perf_counter()
    sampler = TokenBatchSampler(source, target, 4096, multiple_of=8)
    first = next(iter(sampler))
    assert time.perf_counter() - start < 60
    assert len(first) * max(source[first].max(), target[first].max()) <= 4096


# The collator


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.lists(st.integers(2, 90), min_size=1), st.lists(st.integers(2, 90), min_size=1)), min_size=1
    ),
    kind=st.sampled_from([list, lambda ids: np.array(ids, dtype=np.int32), torch.tensor]),
    multiple=st.none() | st.integers(1, 9),
)
def test_collator_pads_like_a_loop(pairs, kind, multiple):
    rows = [{"input_ids": kind(source), "labels": kind(target), "other": "x"} for source, target in pairs]
    batch = TranslationCollator(1, pad_to_multiple_of=multiple)(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for side, name, pad in ((0, "input_ids", 1), (1, "labels", -100)):
        longest = max(len(pair[side]) for pair in pairs)
        width = next(w for w in range(longest, longest + 10) if w % (multiple or 1) == 0)
        expected = [pair[side] + [pad] * (width - len(pair[side])) for pair in pairs]
        assert batch[name].tolist() == expected
        assert batch[name].dtype == torch.int64
    assert batch["attention_mask"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [
        [1] * len(pair[0]) + [0] * (batch["input_ids"].shape[1] - len(pair[0])) for pair in pairs
    ]


def test_collator_masks_padding_by_place_and_not_by_id():
    batch = TranslationCollator(pad_token_id=7, label_pad=0)(
        [{"input_ids": [7, 2], "labels": [5]}, {"input_ids": [2], "labels": [0, 5]}]
    )
    assert batch["input_ids"].tolist() == [[7, 2], [2, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[5, 0], [0, 5]]


def test_collator_does_without_labels():
    assert set(TranslationCollator(1)([{"input_ids": [5, 2]}])) == {"input_ids", "attention_mask"}


def test_collator_refuses_a_multiple_below_one():
    with pytest.raises(ValueError, match="pad_to_multiple_of"):
        TranslationCollator(1, pad_to_multiple_of=0)
