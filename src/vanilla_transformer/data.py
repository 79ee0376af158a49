"""Parallel text: from files or a dataset to pairs, from pairs to token ids, and to batches of bounded size.

``load_pairs`` reads text, ``tokenize_pairs`` encodes it once (both keep their result on disk, see `shards`, and map it
into memory, so that the corpus may be larger than the memory), ``TokenBatchSampler`` plans the batches of an epoch and
``TranslationCollator`` pads one batch. The batches follow Vaswani et al. 2017, 5.1: "Sentence pairs were
batched together by approximate sequence length. Each training batch contained a set of sentence pairs containing
approximately 25000 source tokens and 25000 target tokens."
"""

import codecs
import functools
import gzip
import hashlib
import heapq
import json
import logging
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, Value, load_dataset, load_from_disk
from datasets import Sequence as ListOf
from datasets import config as datasets_config
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.fingerprint import Hasher
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vanilla_transformer.shards import WHOLE, cache_folder, make_from_rows, make_in_parts, making, open_table


logger = logging.getLogger(__name__)

# Part of every fingerprint: raise it when the meaning of a cached result changes.
_CACHE_VERSION = 2

_SOURCE_AND_TARGET = ("source", "target")

# What `load_dataset` opens by the ending of the file's name.
_DATASET_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}

PathLike = str | os.PathLike


# ---------------------------------------------------------------------------------------------------------------------
# Lines of text
# ---------------------------------------------------------------------------------------------------------------------


def read_lines(path: PathLike) -> Iterator[str]:
    r"""Reads a UTF-8 text file line by line.

    A line ends at ``\n`` and nowhere else: U+2028, U+0085, form feed, the file separators and a lone ``\r`` stay
    inside their line. An ``\r`` just before the ``\n`` (or at the very end of the file) and a byte order mark at the
    start of the file are dropped. A last line without ``\n`` counts; a ``\n`` at the end of the file starts no further
    line. Blank lines are kept.

    Args:
        path: The file; read through gzip when its name ends in ``.gz``; ``-`` means standard input.

    Returns:
        An iterator over the lines, without their ends. Only one line is held at a time.

    Raises:
        FileNotFoundError: There is no such file (raised at once, not on the first line).
        ValueError: ``path`` is a folder, the gzip data are broken or cut short, or bytes are not UTF-8 (the message
            names the file and the line, counted from 1).
    """
    if os.fspath(path) != "-":
        _require_file(path)
    return _iterate_lines(path)


def _iterate_lines(path: PathLike) -> Iterator[str]:
    name = _display_name(path)
    if os.fspath(path) == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed; give a file, or open it")
        yield from _decoded_lines(sys.stdin.buffer, name)
        return
    with gzip.open(path, "rb") if _is_gzip(path) else open(path, "rb") as file:
        yield from _decoded_lines(file, name)


def _decoded_lines(file: Any, name: str) -> Iterator[str]:
    number = 0
    lines = iter(file)
    while True:
        try:
            # Iteration over a binary file splits at b"\n" alone; text mode or str.splitlines() would split elsewhere.
            raw = next(lines, None)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                f"{name}, after line {number}: expected gzip data because of the name's ending, but they are broken "
                f"or cut short ({error}); fetch or compress the file again"
            ) from error
        if raw is None:
            return
        if number == 0 and raw.startswith(codecs.BOM_UTF8):
            raw = raw[len(codecs.BOM_UTF8) :]
            if not raw:
                continue  # a file that holds the mark and nothing else has no line
        number += 1
        if raw.endswith(b"\n"):
            raw = raw[:-1]
        if raw.endswith(b"\r"):
            raw = raw[:-1]
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: expected UTF-8 text, got the byte 0x{raw[error.start]:02x} at byte "
                f"{error.start + 1} of the line; convert the file to UTF-8 first (for example with iconv)"
            ) from None


def read_parallel(
    source: PathLike | Sequence[PathLike], target: PathLike | Sequence[PathLike]
) -> tuple[list[str], list[str]]:
    """Reads parallel files whole, line i of the source belonging to line i of the target; blank lines stay in place.

    Meant for validation and test sets; a training corpus goes through `load_pairs`, which does not hold it in memory.

    Args:
        source: File or list of files of the source language, see `read_lines`.
        target: File or list of files of the target language, as many as for the source and in the same order.

    Returns:
        The source lines and the target lines, equally many.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: The numbers of files or, in one pair of files, the numbers of lines differ; or there is no line at
            all; or a file cannot be read (see `read_lines`).
    """
    source_lines: list[str] = []
    target_lines: list[str] = []
    for source_line, target_line in iterate_pairs(paired_files(source, target)):
        source_lines.append(source_line)
        target_lines.append(target_line)
    return source_lines, target_lines


def iterate_pairs(files: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of lines of all the pairs of files, and raises where the files do not fit each other."""
    total = 0
    for source, target in files:
        pairs = zip_longest(read_lines(source), read_lines(target))
        for number, (source_line, target_line) in enumerate(pairs):
            if source_line is None or target_line is None:
                longer = number + 1 + sum(1 for _ in pairs)
                source_count, target_count = (longer, number) if target_line is None else (number, longer)
                raise ValueError(
                    f"parallel files must have equally many lines, but {_display_name(source)} has {source_count} and "
                    f"{_display_name(target)} has {target_count}; line i of one must be the translation of line i of "
                    f"the other"
                )
            total += 1
            yield source_line, target_line
    if total == 0:
        names = ", ".join(_display_name(path) for pair in files for path in pair)
        raise ValueError(f"expected at least one line of text, but all of these are empty: {names}")


def paired_files(
    source: PathLike | Sequence[PathLike], target: PathLike | Sequence[PathLike]
) -> list[tuple[str, str]]:
    sources, targets = _as_paths(source), _as_paths(target)
    if not sources or len(sources) != len(targets):
        raise ValueError(
            f"expected as many target files as source files, and at least one, got {len(sources)} source files "
            f"{sources} and {len(targets)} target files {targets}"
        )
    if (sources + targets).count("-") > 1:
        raise ValueError("only one file of a parallel corpus can be standard input ('-'), got it more than once")
    for path in sources + targets:
        if path != "-":
            _require_file(path)
    return list(zip(sources, targets, strict=True))


def _as_paths(paths: PathLike | Sequence[PathLike]) -> list[str]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    return [str(os.fspath(path)) for path in paths]


def _require_file(path: PathLike) -> None:
    if os.path.isdir(path):
        raise ValueError(f"expected a text file, but {os.fspath(path)} is a folder")
    if not os.path.exists(path):
        raise FileNotFoundError(f"no such file: {os.fspath(path)}")


def _display_name(path: PathLike) -> str:
    return "standard input" if os.fspath(path) == "-" else str(os.fspath(path))


def _is_gzip(path: PathLike) -> bool:
    return str(os.fspath(path)).lower().endswith(".gz")


# ---------------------------------------------------------------------------------------------------------------------
# Pairs of text
# ---------------------------------------------------------------------------------------------------------------------


def load_pairs(
    *,
    source_files: PathLike | Sequence[PathLike] | None = None,
    target_files: PathLike | Sequence[PathLike] | None = None,
    dataset: PathLike | None = None,
    dataset_config: str | None = None,
    split: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    cache_dir: PathLike | None = None,
    overwrite_cache: bool = False,
) -> Dataset:
    """Opens a parallel corpus, either from plain files or from a dataset, without holding it in memory.

    Text files are converted once, into ``cache_dir``. The cache knows them by their content, so that a changed file is
    read anew and the same file is not.

    Args:
        source_files: Text file or files of the source language (``.gz`` by name), see `read_lines`.
        target_files: Text file or files of the target language, in the same order.
        dataset: In place of files: the name of a dataset on the Hub, a folder written by ``save_to_disk``, a folder
            of data files, or one ``.json``, ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` file. Its text is either in
            a column ``translation`` that holds ``{language: text}``, or in one text column for each language.
        dataset_config: Configuration of the dataset, for example ``de-en``; None means its default.
        split: Split of the dataset, for example ``train`` or ``train[:1000]``; None means the only one it has.
        source_lang: Language code in ``translation``, or name of the text column, of the source; None means the
            column ``source``. Not used with files.
        target_lang: The same for the target; None means the column ``target``.
        cache_dir: Folder for what is converted; None means ``vanilla_transformer`` in the cache of `datasets`
            (``HF_DATASETS_CACHE``), and for a dataset that cache itself.
        overwrite_cache: Whether the text is read anew although the cache has it.

    Returns:
        A dataset with the text columns ``source`` and ``target``. Blank lines are in it. Line breaks inside a
        dataset's text are kept as characters.

    Raises:
        FileNotFoundError: A file or dataset does not exist.
        ValueError: Both or neither of files and dataset are given, the corpus is empty, numbers of lines differ, a
            split or column is missing (the message names those that exist), or a file cannot be read (see
            `read_lines`).
    """
    if dataset is not None:
        if source_files is not None or target_files is not None:
            raise ValueError("expected either dataset or source_files and target_files, got both")
        opened = open_dataset(
            dataset, dataset_config, split, source_lang, target_lang, cache_dir=cache_dir, overwrite=overwrite_cache
        )
        pairs = _text_columns(opened, str(os.fspath(dataset)), source_lang, target_lang)
        if len(pairs) == 0:
            raise ValueError(f"expected at least one pair of sentences, but dataset {os.fspath(dataset)!r} is empty")
        return pairs
    if source_files is None or target_files is None:
        raise ValueError(
            f"expected dataset, or both source_files and target_files, got source_files={source_files!r} and "
            f"target_files={target_files!r}"
        )
    if split is not None or dataset_config is not None:
        raise ValueError(
            f"split and dataset_config belong to dataset, but text files were given with split={split!r} and "
            f"dataset_config={dataset_config!r}; leave them out"
        )
    return _load_files(paired_files(source_files, target_files), cache_dir, overwrite_cache)


_TEXT_SCHEMA = pa.schema([(side, pa.string()) for side in _SOURCE_AND_TARGET])


def _load_files(files: list[tuple[str, str]], cache_dir: PathLike | None, overwrite: bool) -> Dataset:
    paths = [*chain.from_iterable(files)]
    require_regular_files(paths)
    before = [_state_of(path) for path in paths]
    content = []
    for path in paths:
        with open(path, "rb") as file:
            content.append((_is_gzip(path), _content_hash(file)))
    fingerprint = Hasher.hash((_CACHE_VERSION, "pairs", content))
    folder = cache_folder(cache_dir) / f"pairs-{fingerprint}"
    with making(folder, overwrite):
        table = open_table(folder, fingerprint)
        if table is None:
            make_from_rows(folder, _text_batches(iterate_pairs(files)), _TEXT_SCHEMA)
            if changed := [path for path, state in zip(paths, before, strict=True) if _state_of(path) != state]:
                (folder / WHOLE).unlink()  # what was read may not be what was hashed
                raise ValueError(f"{changed[0]} changed while it was read; start again when it is complete")
            table = open_table(folder, fingerprint)
    if table is None:
        raise OSError(f"{folder} was changed while it was made; start again")
    return table


def require_regular_files(paths: Sequence[str]) -> None:
    for path in paths:
        if path == "-" or not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(
                f"text to train or validate on is read more than once, but {_display_name(path)} is no regular file; "
                "save it to a file first"
            )


def _state_of(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def _text_batches(pairs: Iterator[tuple[str, str]]) -> Iterator[dict[str, list[str]]]:
    while held := list(islice(pairs, 10_000)):
        sources, targets = zip(*held, strict=True)
        yield {"source": list(sources), "target": list(targets)}


def _content_hash(file: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _root_cause(error: BaseException) -> BaseException:
    """Finds, under the wrapping of `datasets`, the error that tells the user what to do."""
    while isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def open_dataset(
    dataset: PathLike,
    config: str | None,
    split: str | None,
    source_lang: str | None,
    target_lang: str | None,
    *,
    cache_dir: PathLike | None = None,
    overwrite: bool = False,
    streaming: bool = False,
) -> Any:
    name = str(os.fspath(dataset))
    path = Path(name)
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _pick_split(load_from_disk(name), name, split)

    options: dict[str, Any] = {}
    if path.is_file():
        endings = [ending.lower() for ending in path.suffixes if ending.lower() not in (".gz", ".bz2", ".xz", ".zst")]
        builder = _DATASET_BUILDERS.get(endings[-1]) if endings else None
        if builder is None:
            raise ValueError(
                f"expected a dataset file that ends in one of {', '.join(_DATASET_BUILDERS)}, got {name}; give plain "
                f"text as source_files and target_files"
            )
        if config is not None:
            raise ValueError(f"a dataset file has no configurations, got dataset_config={config!r} for {name}")
        if builder == "csv":
            # Otherwise the sentences "None" and "NA" would be read as missing, and "0042" as the number 42.
            columns = {source_lang or "source": str, target_lang or "target": str}
            options = {"keep_default_na": False, "converters": columns}
            if endings[-1] == ".tsv":
                options["sep"] = "\t"
        source_of_data, options["data_files"] = builder, str(path.resolve())
    elif path.is_dir():
        source_of_data = str(path.resolve())
    elif path.is_absolute() or name.startswith(".") or name.count("/") > 1 or path.suffix in _DATASET_BUILDERS:
        # No dataset of the Hub has such a name, so the user meant a local one.
        raise FileNotFoundError(f"no such dataset file or folder: {name}")
    else:
        source_of_data = name

    if cache_dir is not None:
        options["cache_dir"] = os.fspath(cache_dir)
    if overwrite:
        options["download_mode"] = "reuse_cache_if_exists"  # the files as they are, the tables made of them anew
    is_expression = split is not None and any(sign in split for sign in "[+")
    if streaming and is_expression:
        raise ValueError(f"a stream can only be that of a whole split, got split={split!r} of dataset {name!r}")
    if getattr(datasets_config, "HF_DATASETS_TRUST_REMOTE_CODE", False) is None:
        # Older versions would ask at the terminal whether a dataset's own script may run.
        datasets_config.HF_DATASETS_TRUST_REMOTE_CODE = False
    try:
        # For a plain name the dictionary of all splits: a missing one is then reported with the names of the others.
        opened = load_dataset(
            source_of_data, config, split=split if is_expression else None, streaming=streaming, **options
        )
    except DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"dataset {name!r} is neither a local file or folder nor found on the Hub ({error})"
        ) from None
    except DatasetGenerationError as error:
        raise ValueError(f"dataset {name!r} cannot be read: {_root_cause(error)}") from error
    except (ValueError, RuntimeError) as error:  # one of datasets' own for a script, which it no longer runs
        raise ValueError(f"dataset {name!r} cannot be read: {error}") from error
    return _pick_split(opened, name, None if is_expression else split)


def _pick_split(opened: Any, name: str, split: str | None) -> Any:
    if isinstance(opened, Mapping):
        if split is None and len(opened) == 1:
            return next(iter(opened.values()))
        if split is None or split not in opened:
            given = "no split was given" if split is None else f"split {split!r} was asked for"
            raise ValueError(f"dataset {name!r} has the splits {list(opened)}, but {given}; pass one of them as split")
        return opened[split]
    # A single table without a name counts as training data only: for validation it would be the training data again.
    own_split = "train" if getattr(opened, "split", None) is None else str(opened.split)
    if split is not None and split != own_split:
        raise ValueError(
            f"dataset {name!r} is one table (split {own_split!r}), but split {split!r} was asked for; leave split "
            f"out, or save a DatasetDict that has it"
        )
    return opened


def _text_columns(dataset: Dataset, name: str, source_lang: str | None, target_lang: str | None) -> Dataset:
    """Gives the two text columns their names; the text itself stays where it is on disk."""
    columns = list(dataset.column_names)
    wanted = (source_lang or "source", target_lang or "target")
    if wanted[0] == wanted[1]:
        raise ValueError(f"source_lang and target_lang must differ, got {wanted[0]!r} for both")
    if "translation" in columns:
        flat = dataset.select_columns(["translation"]).flatten()
        prefix = "translation."
        languages = [column[len(prefix) :] for column in flat.column_names if column.startswith(prefix)]
        if set(wanted) <= set(languages):
            dataset, chosen = flat, (prefix + wanted[0], prefix + wanted[1])
        elif languages:
            raise ValueError(
                f"expected the languages {wanted[0]!r} and {wanted[1]!r} in the column 'translation' of dataset "
                f"{name!r}, but found {languages}; pass source_lang and target_lang out of these"
            )
        else:
            raise ValueError(
                f"expected {{language: text}} in the column 'translation' of dataset {name!r}, but found "
                f"{dataset.features['translation']}"
            )
    elif set(wanted) <= set(columns):
        chosen = wanted
    else:
        raise ValueError(
            f"expected a column 'translation', or the text columns {wanted[0]!r} and {wanted[1]!r}, in dataset "
            f"{name!r}, but found columns {columns}; pass source_lang and target_lang out of these"
        )
    for column in chosen:
        kind = getattr(dataset.features[column], "dtype", None)
        if kind not in ("string", "large_string"):
            raise ValueError(
                f"expected text in the column {column!r} of dataset {name!r}, but it holds "
                f"{dataset.features[column]}; convert it to strings first"
            )
    selected = dataset.select_columns(list(chosen))
    return selected.rename_columns(dict(zip(chosen, _SOURCE_AND_TARGET, strict=True)))


# ---------------------------------------------------------------------------------------------------------------------
# Pairs of token ids
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairCounts:
    """What became of the pairs of a corpus in `tokenize_pairs`; ``total == kept + blank + too_long``.

    Attributes:
        total: Number of pairs given.
        kept: Number of pairs in the result.
        blank: Pairs dropped because a side was empty or white space only.
        too_long: Pairs dropped because a side had more tokens than its limit (and none was blank).
        truncated: Pairs kept with at least one side cut to its limit.
    """

    total: int
    kept: int
    blank: int
    too_long: int
    truncated: int


def tokenize_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_tokens: int | None = None,
    max_target_tokens: int | None = None,
    drop: bool = True,
    num_proc: int | None = None,
    description: str = "",
    cache_dir: PathLike | None = None,
    overwrite_cache: bool = False,
) -> tuple[Dataset, PairCounts]:
    """Encodes the pairs of `load_pairs`, once: the result is kept on disk, see `shards`, and mapped into memory.

    The cache holds all pairs at full length and is found again by the text and the tokenizer; the limits are applied
    afterwards, so that changing them encodes nothing anew. A call that was killed is gone on with by the next one.

    Args:
        pairs: Dataset with the text columns ``source`` and ``target``. A missing text (None) counts as blank.
        tokenizer: Any tokenizer that closes a text with EOS, for instance one of `train_tokenizer`.
        max_source_tokens: Greatest number of source tokens, EOS included; None means ``tokenizer.model_max_length``.
        max_target_tokens: The same for the target.
        drop: True (training): a pair with a blank or an over-long side is dropped as a pair, and counted. False
            (evaluation): every pair is kept, row i of the result belongs to row i of ``pairs``; a blank side becomes
            EOS alone, an over-long side is cut to its limit with EOS kept, and a warning names the line.
        num_proc: Number of processes that encode, at most; None means one (in which fast tokenizers use several
            threads), and so it is for small corpora.
        description: What the corpus is called in messages, for example ``training``.
        cache_dir: Folder for the result; None means ``vanilla_transformer`` in the cache of `datasets`. Pairs that
            are in memory and not on disk are encoded in memory.
        overwrite_cache: Whether the pairs are encoded anew although the cache has them.

    Returns:
        A dataset with the columns ``input_ids`` and ``labels`` (lists of int32, EOS last in both), and the counts.

    Raises:
        ValueError: A limit is below 2, columns are missing, the tokenizer has no EOS or does not append it, ``pairs``
            is empty, or no pair is left (the message gives the counts).
    """
    corpus = description or "parallel corpus"
    limits = (
        token_limit("max_source_tokens", max_source_tokens, tokenizer),
        token_limit("max_target_tokens", max_target_tokens, tokenizer),
    )
    if not set(_SOURCE_AND_TARGET) <= set(pairs.column_names):
        raise ValueError(f"expected the text columns 'source' and 'target', got {pairs.column_names}; see load_pairs")
    if len(pairs) == 0:
        raise ValueError(f"{corpus}: expected at least one pair of sentences, got none")
    blank_lengths = require_eos(tokenizer)

    pairs = pairs.select_columns(list(_SOURCE_AND_TARGET))
    fingerprint = Hasher.hash((_CACHE_VERSION, "tokenize", pairs._fingerprint, _tokenizer_identity(tokenizer)))
    encode = functools.partial(encode_batch, tokenizer=tokenizer)
    if pairs.cache_files:
        folder = cache_folder(cache_dir) / f"tokens-{fingerprint}"
        encoded = _encoded_on_disk(folder, fingerprint, pairs, encode, overwrite_cache, num_proc, f"Encoding {corpus}")
    else:
        encoded = pairs.map(
            encode,
            batched=True,
            remove_columns=pairs.column_names,
            features=_TOKEN_FEATURES,
            new_fingerprint=fingerprint,
            desc=f"Encoding {corpus}",
        )

    source_lengths, target_lengths = token_lengths(encoded)
    # Text without a visible character was encoded as the empty string, so its length tells.
    blank = (source_lengths <= blank_lengths[0]) | (target_lengths <= blank_lengths[1])
    too_long = (source_lengths > limits[0]) | (target_lengths > limits[1])
    if not drop:
        counts = PairCounts(len(encoded), len(encoded), 0, 0, int(too_long.sum()))
        if counts.truncated:
            _warn_truncated(corpus, (source_lengths, target_lengths), limits)
            encoded = encoded.map(
                _truncate_batch,
                fn_kwargs={"limits": limits},
                batched=True,
                features=_TOKEN_FEATURES,
                new_fingerprint=Hasher.hash((_CACHE_VERSION, "truncate", encoded._fingerprint, limits)),
                desc=f"Truncating {corpus}",
            )
        return encoded, counts

    kept = np.flatnonzero(~(blank | too_long))
    counts = PairCounts(len(encoded), len(kept), int(blank.sum()), int((too_long & ~blank).sum()), 0)
    why = (
        f"{counts.blank} with a blank side, {counts.too_long} with more than {limits[0]} source or {limits[1]} target "
        f"tokens"
    )
    if counts.kept == 0:
        raise ValueError(
            f"{corpus}: none of the {counts.total} pairs can be used: {why}; raise the limits or mend the text"
        )
    if counts.kept < counts.total:
        dropped = counts.total - counts.kept
        logger.warning("%s: dropped %d of %d pairs: %s", corpus, dropped, counts.total, why)
        encoded = encoded.select(kept)
    else:
        logger.info("%s: all %d pairs are used", corpus, counts.total)
    return encoded, counts


_TOKEN_FEATURES = Features({"input_ids": ListOf(Value("int32")), "labels": ListOf(Value("int32"))})
_TOKEN_SCHEMA = pa.schema([(column, pa.list_(pa.int32())) for column in _TOKEN_FEATURES])


def _encoded_on_disk(
    folder: Path,
    fingerprint: str,
    pairs: Dataset,
    encode: Callable[[dict[str, list]], dict[str, list]],
    overwrite: bool,
    num_proc: int | None,
    description: str,
) -> Dataset:
    with making(folder, overwrite):
        table = open_table(folder, fingerprint)
        if table is None:
            make_in_parts(folder, pairs, encode, _TOKEN_SCHEMA, num_proc=num_proc, description=description)
            table = open_table(folder, fingerprint)
    if table is None:
        raise OSError(f"{folder} was changed while it was made; start again")
    return table


def encode_batch(batch: dict[str, list[str | None]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    sources, targets = ([_visible(text) for text in batch[column]] for column in _SOURCE_AND_TARGET)
    return {"input_ids": _encode(tokenizer, text=sources), "labels": _encode(tokenizer, text_target=targets)}


def _encode(tokenizer: PreTrainedTokenizerBase, **texts: list[str]) -> list[list[int]]:
    """Token ids of sources (`text`) or of targets (`text_target`), EOS included, at full length."""
    if type(tokenizer) is PreTrainedTokenizerFast:  # not one with rules of its own in Python, or for one side
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        (lines,) = texts.values()
        return [encoding.ids for encoding in backend.encode_batch_fast(lines)]  # half again as fast as the call below
    # verbose=False: over-long sentences are reported by tokenize_pairs, with their numbers.
    options = {"truncation": False, "padding": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(**texts, **options)["input_ids"]


def _visible(text: str | None) -> str:
    return "" if text is None or not text.strip() else text


def _truncate_batch(batch: dict[str, list[list[int]]], limits: tuple[int, int]) -> dict[str, list[list[int]]]:
    return {
        column: [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in batch[column]]
        for column, limit in zip(("input_ids", "labels"), limits, strict=True)
    }


def _warn_truncated(corpus: str, lengths: tuple[np.ndarray, np.ndarray], limits: tuple[int, int]) -> None:
    for row in np.flatnonzero((lengths[0] > limits[0]) | (lengths[1] > limits[1])):
        for side, side_lengths, limit in zip(_SOURCE_AND_TARGET, lengths, limits, strict=True):
            if side_lengths[row] > limit:
                logger.warning(
                    "%s, line %d: %s of %d tokens truncated to %d (EOS kept)",
                    *(corpus, row + 1, side, side_lengths[row], limit),
                )


def token_limit(name: str, value: int | None, tokenizer: PreTrainedTokenizerBase) -> int:
    limit = tokenizer.model_max_length if value is None else value
    if limit < 2:
        raise ValueError(f"{name} must be at least 2 (one token and EOS), got {limit}")
    return int(limit)


def require_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Checks that both sides end in EOS; returns the numbers of tokens of an empty source and an empty target."""
    eos_token_id = tokenizer.eos_token_id
    samples = [*_encode(tokenizer, text=["", "a"]), *_encode(tokenizer, text_target=["", "a"])]
    if eos_token_id is None or any(not ids or ids[-1] != eos_token_id for ids in samples):
        raise ValueError(
            f"the tokenizer must close every text with its EOS token ({tokenizer.eos_token!r}), or the model never "
            f"learns to stop, but it encodes 'a' as {tokenizer.convert_ids_to_tokens(samples[1])}; train one with "
            f"train_tokenizer, or give it a post-processor that appends EOS"
        )
    return len(samples[0]), len(samples[2])


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What decides the ids a tokenizer gives; stays the same after use, saving and loading.

    Hashing the object itself would not: a fast tokenizer remembers the truncation and padding of its last call.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Hasher.hash(tokenizer)
    rules = json.loads(backend.to_str())
    rules["truncation"] = rules["padding"] = None
    attributes = ("split_special_tokens", "eos_token_id", "src_lang", "tgt_lang")
    return (
        type(tokenizer).__name__,
        json.dumps(rules, sort_keys=True),
        [repr(getattr(tokenizer, attribute, None)) for attribute in attributes],
    )


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids, as far as their rules tell, or, without such, their vocabularies."""
    if any(getattr(each, "backend_tokenizer", None) is None for each in (one, other)):
        return one.get_vocab() == other.get_vocab()
    return _tokenizer_identity(one)[1] == _tokenizer_identity(other)[1]


def token_lengths(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Counts the tokens of each pair of a dataset of `tokenize_pairs`.

    Args:
        dataset: Dataset with the list columns ``input_ids`` and ``labels``.

    Returns:
        The source lengths and the target lengths, int64 arrays of shape (pairs,), EOS counted.
    """
    # Read off the offsets of the whole columns: fetching the rows themselves would take a minute for five million.
    rows = None if dataset._indices is None else dataset._indices.column(0).to_numpy()
    source, target = (
        pc.list_value_length(dataset.data.column(column)).to_numpy().astype(np.int64)
        for column in ("input_ids", "labels")
    )
    return (source, target) if rows is None else (source[rows], target[rows])


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of bounded size whose sentences are of like length, in a new composition each epoch.

    In every batch, rows x longest row <= ``tokens_per_batch`` (padding counted) for the source side and for the target
    side each. Every index occurs exactly once an epoch, and the number of batches is the same in all epochs and a
    multiple of ``multiple_of``, so that a Trainer can count its updates beforehand and no process waits in vain. The
    plan of an epoch follows from the lengths, ``seed`` and ``epoch`` alone: it is the same in every process and after
    a restart.

    How an epoch is planned: the sentences, in random order, are sorted by the length of one side (source or target,
    drawn by lot) and laid out in strips of several batches each, at a random offset; inside its strip each is sorted
    by the length of the other side, upwards in one strip and downwards in the next, so that neighbours stay alike
    across the border. The sequence is cut into batches as large as the budget lets them be. The width of the strips
    balances the padding of the two sides. Since the number of cuts varies a little from epoch to epoch, a number that
    trial plans stayed within is fixed beforehand: a plan with fewer batches has some of them split, a plan with more
    is drawn again, and in the last resort the sentences only change places with those of equal lengths.

    Use it as ``DataLoader(dataset, batch_sampler=TokenBatchSampler(...))`` and call ``set_epoch`` before each epoch.

    Args:
        source_lengths: Tokens of each source sentence, EOS counted, at least 1; shape (pairs,), see `token_lengths`.
        target_lengths: The same for the target.
        tokens_per_batch: Greatest number of tokens, padding counted, of one batch on one side.
        multiple_of: Number of processes x accumulation steps: that many consecutive batches make one update. They are
            of like size (not of like sentence length).
        seed: Seed of the shuffling, 0 or greater.
        shuffle: False keeps one plan, sorted by length, for all epochs.
        max_rows: Greatest number of sentences of one batch; None means no further limit.

    Raises:
        TypeError: The lengths are no integers.
        ValueError: The lengths do not fit each other, there are none, one is below 1 or above ``tokens_per_batch``
            (the message names the sentence), there are fewer sentences than ``multiple_of``, or no multiple of it
            lies between the number of batches needed and the number of sentences.

    Source:
        Vaswani et al. 2017, 5.1 (which gives the size of the batches and "approximate sequence length").
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray,
        tokens_per_batch: int,
        *,
        multiple_of: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        max_rows: int | None = None,
    ):
        for name, value, least in (
            ("tokens_per_batch", tokens_per_batch, 1),
            ("multiple_of", multiple_of, 1),
            ("seed", seed, 0),
            ("max_rows", 1 if max_rows is None else max_rows, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self._lengths = _checked_lengths(source_lengths, target_lengths, tokens_per_batch)
        self.tokens_per_batch = tokens_per_batch
        self.multiple_of = multiple_of
        self.seed = seed
        self.shuffle = shuffle
        self.max_rows = max_rows
        self.epoch = 0
        self._longest = np.maximum(*self._lengths)
        # The share of a batch that a sentence takes up.
        self._shares = self._longest / tokens_per_batch
        if max_rows is not None:
            self._shares = np.maximum(self._shares, 1 / max_rows)
        self._strip_widths = _strip_widths(*self._lengths, batches=float(self._shares.sum()))
        self._batch_count = self._fix_batch_count()
        self._planned: tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None

    def __len__(self) -> int:
        """Number of batches, the same in every epoch."""
        return self._batch_count

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches of the present epoch as lists of indices."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._plan(self.epoch))
        order, starts, ends = self._planned[1]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield order[start:end].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, counted from 0, whose batches the next iteration yields."""
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or greater, got {epoch}")
        self.epoch = int(epoch)

    def _fix_batch_count(self) -> int:
        sentences = len(self._longest)
        if sentences < self.multiple_of:
            raise ValueError(
                f"multiple_of={self.multiple_of} batches (processes x accumulation steps) need as many sentences, got "
                f"{sentences}; use fewer processes or accumulation steps, or more data"
            )
        fewest = len(self._cut(self._fixed_order(None))) - 1
        counts = [fewest]
        if self.shuffle:
            # A stream of random numbers of its own, so that the seed does not change the number of batches.
            trials = 8 if sentences < 200_000 else 3
            counts = [len(self._cut(self._random_order(np.random.default_rng(trial)))) - 1 for trial in range(trials)]
        for count in (max(fewest, *counts), fewest):
            rounded = -(-count // self.multiple_of) * self.multiple_of
            if rounded <= sentences:
                return rounded
        raise ValueError(
            f"{sentences} sentences need at least {fewest} batches of tokens_per_batch={self.tokens_per_batch}, and "
            f"no multiple of {self.multiple_of} (processes x accumulation steps) lies between these two numbers; "
            f"raise tokens_per_batch, or use fewer processes or accumulation steps, or more data"
        )

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Plans one epoch: the sentences in order, and where each batch starts and ends in it."""
        if not self.shuffle:
            order = self._fixed_order(None)
            bounds = self._split(order, self._cut(order))
            return order, bounds[:-1], bounds[1:]
        rng = np.random.default_rng((self.seed, epoch))
        for _ in range(8):
            order = self._random_order(rng)
            bounds = self._cut(order)
            if len(bounds) - 1 <= self._batch_count:
                break
        else:
            order = self._fixed_order(rng)
            bounds = self._cut(order)
        bounds = self._split(order, bounds)
        batches = self._shuffled_batches(order, bounds, rng)
        return order, bounds[:-1][batches], bounds[1:][batches]

    def _random_order(self, rng: np.random.Generator) -> np.ndarray:
        first = int(rng.integers(2))
        order = rng.permutation(len(self._longest))
        # A stable sort leaves sentences of equal length in the random order.
        order = order[np.argsort(self._lengths[first][order], kind="stable")]
        if rng.integers(2):
            # Cut from the other end: the borders between the batches fall elsewhere.
            order = order[::-1]
        return self._sorted_in_strips(order, first, rng)

    def _fixed_order(self, rng: np.random.Generator | None) -> np.ndarray:
        """Orders by lengths alone: every epoch has the same sequence of lengths, hence the same number of batches."""
        sentences = len(self._longest)
        order = np.arange(sentences) if rng is None else rng.permutation(sentences)
        order = order[np.lexsort((self._lengths[1][order], self._lengths[0][order]))]
        return self._sorted_in_strips(order, 0, None)

    def _sorted_in_strips(self, order: np.ndarray, first: int, rng: np.random.Generator | None) -> np.ndarray:
        offset, turn = (0.0, 0) if rng is None else (rng.random(), int(rng.integers(2)))
        position = np.cumsum(self._shares[order])
        strip = np.floor(position / self._strip_widths[first] + offset).astype(np.int64)
        length = self._lengths[1 - first][order]
        key = np.where((strip + turn) % 2 == 0, length, self.tokens_per_batch - length)
        key += strip * (self.tokens_per_batch + 1)
        if rng is not None:
            # Ties would keep the order of the first sort, and the same sentences would meet more often.
            shuffled = rng.permutation(len(order))
            order, key = order[shuffled], key[shuffled]
        return order[np.argsort(key, kind="stable")]

    def _cut(self, order: np.ndarray) -> np.ndarray:
        """Cuts the sequence into batches, each as large as possible; returns the borders, from 0 to all sentences."""
        longest = self._longest[order]
        budget = self.tokens_per_batch
        row_limit = budget if self.max_rows is None else self.max_rows
        rows = np.arange(1, min(budget, row_limit, len(order)) + 1)
        bounds = [0]
        start = 0
        while start < len(order):
            window = np.maximum.accumulate(longest[start : start + min(budget // int(longest[start]), row_limit)])
            # rows x longest never falls as rows are added, so counting those that fit gives the last that fits.
            start += int(np.count_nonzero(window * rows[: len(window)] <= budget))
            bounds.append(start)
        return np.asarray(bounds, dtype=np.int64)

    def _split(self, order: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Splits the most expensive batches until there are exactly ``len(self)``."""
        rows = np.diff(bounds)
        missing = self._batch_count - len(rows)
        if missing == 0:
            return bounds
        parts = np.ones(len(rows), dtype=np.int64)
        costs = self._costs(order, bounds)
        queue = [(-cost, batch) for batch, cost in enumerate(costs.tolist()) if rows[batch] > 1]
        heapq.heapify(queue)
        for _ in range(missing):
            _, batch = heapq.heappop(queue)
            parts[batch] += 1
            if parts[batch] < rows[batch]:
                heapq.heappush(queue, (-costs[batch] / parts[batch], batch))
        extra = [
            bounds[batch] + rows[batch] * np.arange(1, parts[batch]) // parts[batch]
            for batch in np.flatnonzero(parts > 1)
        ]
        return np.sort(np.concatenate([bounds, *extra]))

    def _costs(self, order: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Source and target tokens of each batch together, padding counted."""
        longest = sum(np.maximum.reduceat(lengths[order], bounds[:-1]) for lengths in self._lengths)
        return np.diff(bounds) * longest

    def _shuffled_batches(self, order: np.ndarray, bounds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Puts the batches in random order, those of one update (``multiple_of`` in a row) being of like cost."""
        batches = rng.permutation(len(bounds) - 1)[: self._batch_count]
        if self.multiple_of == 1:
            return batches
        # Coarse steps: within one, chance alone decides, so that an update mixes sentences of all lengths.
        step = np.floor(np.log(self._costs(order, bounds)[batches]) / np.log(1.25))
        groups = batches[np.argsort(step, kind="stable")].reshape(-1, self.multiple_of)
        return rng.permuted(rng.permutation(groups), axis=1).reshape(-1)


def _checked_lengths(
    source_lengths: Sequence[int] | np.ndarray, target_lengths: Sequence[int] | np.ndarray, tokens_per_batch: int
) -> tuple[np.ndarray, np.ndarray]:
    lengths = (np.asarray(source_lengths), np.asarray(target_lengths))
    if lengths[0].ndim != 1 or lengths[0].shape != lengths[1].shape or lengths[0].size == 0:
        raise ValueError(
            f"expected one source length and one target length for each of at least one pair, got arrays of shape "
            f"{lengths[0].shape} and {lengths[1].shape}"
        )
    for side, array in zip(_SOURCE_AND_TARGET, lengths, strict=True):
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"{side}_lengths must be integers, got {array.dtype}")
        if array.min() < 1:
            index = int(array.argmin())
            raise ValueError(
                f"{side}_lengths must be at least 1 (EOS counts), got {array[index]} for sentence {index}"
            )
        if array.max() > tokens_per_batch:
            index = int(array.argmax())
            raise ValueError(
                f"sentence {index} has {array[index]} {side} tokens, more than tokens_per_batch={tokens_per_batch}; "
                f"raise tokens_per_batch or drop long pairs (max_{side}_tokens of tokenize_pairs)"
            )
    return lengths[0].astype(np.int64), lengths[1].astype(np.int64)


def _strip_widths(source: np.ndarray, target: np.ndarray, batches: float) -> tuple[float, float]:
    """Batches per strip when the first sort is by source, and when it is by target.

    With w batches in a strip there are batches / w strips, so a batch spans about std(first) * w / batches of the
    lengths of the side sorted first, and std(second, given the first) / w of those of the other: equal where
    w = sqrt(batches * std(second given first) / std(first)).
    """
    deviations = (source.std(), target.std())
    if min(deviations) == 0:
        correlation = 0.0
    else:
        correlation = float(np.corrcoef(source, target)[0, 1])
    unexplained = np.sqrt(max(0.0, 1.0 - correlation**2))
    widths = []
    for first, second in ((0, 1), (1, 0)):
        # A side that is constant needs no sorting: all of the corpus is one strip then.
        ratio = deviations[second] * unexplained / deviations[first] if deviations[first] > 0 else batches
        widths.append(float(np.clip(np.sqrt(batches * ratio), 1.0, max(1.0, batches))))
    return widths[0], widths[1]


class TranslationCollator:
    """Pads the pairs of one batch on the right and makes tensors of them.

    Args:
        pad_token_id: Fills ``input_ids``.
        label_pad: Fills ``labels``; -100 is what the loss leaves out.
        pad_to_multiple_of: Rounds both widths up to a multiple of it, for hardware that prefers such shapes; None
            means that the longest row decides.

    Source:
        The rows come from `tokenize_pairs`; the model shifts ``labels`` to the right itself.
    """

    def __init__(self, pad_token_id: int, label_pad: int = -100, pad_to_multiple_of: int | None = None):
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be None or at least 1, got {pad_to_multiple_of}")
        self.pad_token_id = pad_token_id
        self.label_pad = label_pad
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes one batch.

        Args:
            rows: Pairs with ``input_ids`` and, but for prediction, ``labels``: lists or arrays of integers, EOS last.
                Other keys are left out.

        Returns:
            ``input_ids`` and ``attention_mask`` (1 token, 0 padding), both of shape (rows, longest source), and
            ``labels``, shape (rows, longest target); int64.
        """
        input_ids, kept = self._pad([row["input_ids"] for row in rows], self.pad_token_id)
        batch = {"input_ids": input_ids, "attention_mask": kept}
        if "labels" in rows[0]:
            batch["labels"], _ = self._pad([row["labels"] for row in rows], self.label_pad)
        return batch

    def _pad(self, sequences: Sequence[Any], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = np.fromiter(map(len, sequences), dtype=np.int64, count=len(sequences))
        width = int(lengths.max())
        if self.pad_to_multiple_of is not None:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        kept = np.arange(width) < lengths[:, None]
        padded = np.full(kept.shape, pad, dtype=np.int64)
        # Row by row, the kept places in order are the sequences in order.
        padded[kept] = np.concatenate([np.asarray(sequence, dtype=np.int64) for sequence in sequences])
        return torch.from_numpy(padded), torch.from_numpy(kept.astype(np.int64))
