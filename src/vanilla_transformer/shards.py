"""Tables on disk that are made in parts: several processes make them, a killed run goes on, a half is never taken.

A table is a folder of Arrow files, `part-00000.arrow` and so on, each written under another name and then moved to its
own, and a `whole.json` that is written last and holds the size of each. Who opens the table asks for `whole.json` and
for those sizes; who makes it keeps the parts that are there. One process makes a table at a time, for which there is a
lock beside the folder.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from datasets import config as datasets_config
from datasets.utils import tqdm
from huggingface_hub.utils import WeakFileLock

from vanilla_transformer.translation import naming_what_is_full


logger = logging.getLogger(__name__)

WHOLE = "whole.json"
ROWS_PER_PART = 50_000  # a second or two of work
MOST_PARTS = 100  # each is an open file for as long as the table is used
ROWS_PER_BATCH = 1000
# Below, several processes would take longer to start than one takes to do the work.
ROWS_WORTH_PROCESSES = 200_000
_SECONDS_BETWEEN_REPORTS = 30.0

Encode = Callable[[dict[str, list]], dict[str, list]]


def cache_folder(cache_dir: str | os.PathLike | None = None) -> Path:
    """Where tables are kept: `cache_dir`, or by default `vanilla_transformer` in the cache of `datasets`.

    That is `HF_DATASETS_CACHE`, by default `~/.cache/huggingface/datasets`.
    """
    return Path(datasets_config.HF_DATASETS_CACHE) / "vanilla_transformer" if cache_dir is None else Path(cache_dir)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rows_per_part(total: int) -> int:
    """Rows in each part but the last of a table of `total` rows; it follows from nothing else."""
    return max(ROWS_PER_PART, -(-total // MOST_PARTS))


@contextlib.contextmanager
def making(folder: Path, overwrite: bool) -> Iterator[None]:
    """The right to make a table, for one process at a time.

    Args:
        folder: Of the table; it exists afterwards.
        overwrite: Whether what it holds is thrown away first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_name(f"{folder.name}.lock")):
        if overwrite:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where nothing came of it


def open_table(folder: Path, fingerprint: str) -> Dataset | None:
    """The table in a folder, mapped into memory; None where it is not whole, or not what was written.

    Each file is read once for its checksum: a number that a disk has changed would be trained on without a word.

    Args:
        folder: Of the table.
        fingerprint: What the dataset is to be known by.
    """
    try:
        record = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
        sizes: dict[str, int] = record["bytes"]
        sums: dict[str, int] = record["crc32"]
        damaged = sorted(
            name
            for name, size in sizes.items()
            if os.path.getsize(folder / name) != size or checksum(folder / name) != sums[name]
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        damaged, sizes = [WHOLE], {}
    if damaged or not sizes:
        logger.warning("%s is damaged (%s) and made anew", folder, ", ".join(damaged))
        for name in (WHOLE, *damaged):
            (folder / name).unlink(missing_ok=True)
        return None
    parts = [Dataset.from_file(str(folder / name)) for name in sorted(sizes)]
    return Dataset(concatenate_datasets(parts).data if len(parts) > 1 else parts[0].data, fingerprint=fingerprint)


def make_from_rows(folder: Path, batches: Iterable[dict[str, list]], schema: pa.Schema) -> None:
    """Makes a table of one part out of batches of rows, for what is read rather than computed.

    Args:
        folder: Of the table; see `making`.
        batches: Columns by name.
        schema: Of the columns.
    """
    _remove_unfinished(folder)
    _write_table(folder / _name_of(0), batches, schema)
    _declare_whole(folder, [_name_of(0)])


def make_in_parts(
    folder: Path, rows: Dataset, encode: Encode, schema: pa.Schema, *, num_proc: int | None = None, description: str
) -> None:
    """Makes a table out of another one, a row out of each; parts that are there are kept.

    Args:
        folder: Of the table; see `making`.
        rows: What it is made of; read in each process from its files.
        encode: Makes columns of columns; it can be pickled.
        schema: Of the columns made.
        num_proc: Processes, at most; None means this one alone. A small table is made by this one.
        description: What the work is called in messages.

    Raises:
        ChildProcessError: A process was killed from outside; the parts that were finished stay.
    """
    size = rows_per_part(len(rows))
    starts = range(0, len(rows), size)
    _remove_unfinished(folder)
    lengths = {part: min(size, len(rows) - start) for part, start in enumerate(starts)}
    missing = [part for part, length in lengths.items() if not _is_part(folder / _name_of(part), length)]
    still = sum(lengths[part] for part in missing)
    if still < len(rows):
        logger.info("%s: goes on with the %d pairs of %d that are done", description, len(rows) - still, len(rows))
    processes = min(num_proc or 1, len(missing)) if still >= ROWS_WORTH_PROCESSES else 1
    work = (str(folder), rows, encode, schema, size)
    report = _Report(description, len(rows), len(rows) - still)
    if processes == 1:
        for part in missing:
            _write_part(part, *work)
            report.add(lengths[part])
    else:
        with _context() as context:
            pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=work)
            try:
                futures = {pool.submit(_write_part_of_worker, part): part for part in missing}
                for future in as_completed(futures):
                    future.result()
                    report.add(lengths[futures[future]])
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    f"{description}: one of {processes} processes ended before its work was done, perhaps for want of "
                    "memory; what is finished is kept: start again, with fewer processes (--preprocessing_num_workers)"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)
    report.close()
    _declare_whole(folder, [_name_of(part) for part in lengths])


def _name_of(part: int) -> str:
    return f"part-{part:05d}.arrow"


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)


def _is_part(path: Path, rows: int) -> bool:
    """Whether a part is there with all of its rows; what is not is removed."""
    if not path.is_file():
        return False
    try:
        with pa.memory_map(str(path)) as file:
            found = sum(batch.num_rows for batch in pa.ipc.open_stream(file))
    except (pa.ArrowException, OSError):
        found = -1
    if found != rows:
        path.unlink()
    return found == rows


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    found = 0
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            found = zlib.crc32(piece, found)
    return found


def _write_table(path: Path, batches: Iterable[dict[str, list]], schema: pa.Schema) -> None:
    """Writes an Arrow file that appears whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming_what_is_full(path), open(unfinished, "wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for columns in batches:
                    arrays = [pa.array(columns[field.name], type=field.type) for field in schema]
                    writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _declare_whole(folder: Path, names: list[str]) -> None:
    record = {
        "bytes": {name: os.path.getsize(folder / name) for name in names},
        "crc32": {name: checksum(folder / name) for name in names},
    }
    unfinished = folder / f"{WHOLE}.tmp"
    with naming_what_is_full(folder / WHOLE), open(unfinished, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / WHOLE)


def _write_part(part: int, folder: str, rows: Dataset, encode: Encode, schema: pa.Schema, size: int) -> None:
    start, end = part * size, min((part + 1) * size, len(rows))
    batches = (encode(rows[at : min(at + ROWS_PER_BATCH, end)]) for at in range(start, end, ROWS_PER_BATCH))
    _write_table(Path(folder) / _name_of(part), batches, schema)


@contextlib.contextmanager
def _context() -> Iterator[Any]:
    """How processes are started: not forked from this one, in which threads may hold locks.

    A server that has imported what is needed forks them, so that they share that memory; it ends with the work unless
    it was there before.
    """
    if sys.platform == "win32":
        yield multiprocessing.get_context("spawn")
        return
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__name__.rpartition('.')[0]}.data"])
    server: Any = getattr(forkserver, "_forkserver", None)
    was_there = getattr(server, "_forkserver_pid", None) is not None
    try:
        yield context
    finally:
        if not was_there and hasattr(server, "_stop"):  # else it keeps its memory for as long as this process lives
            server._stop()


_work: tuple[Any, ...] = ()  # of a worker process: the arguments of `_write_part` after the first


def _start_worker(*work: Any) -> None:
    """Prepares a worker process, and sees to it that it does not outlive the one that started it."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each has one core
    if (parent := multiprocessing.parent_process()) is not None:

        def follow() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def _write_part_of_worker(part: int) -> None:
    _write_part(part, *_work)


class _Report:
    """A progress bar, or, where bars are switched off, a line in the log now and then.

    Args:
        description: What the work is called.
        total: Rows in all.
        done: Rows that were done before.
    """

    def __init__(self, description: str, total: int, done: int):
        self.description, self.total, self.before, self.done = description, total, done, done
        self.bar = tqdm(total=total, initial=done, desc=description, unit=" pairs")
        self.start = self.told = time.perf_counter()

    def add(self, rows: int) -> None:
        """Counts rows that have been done."""
        self.done += rows
        self.bar.update(rows)
        now = time.perf_counter()
        if self.bar.disable and now - self.told > _SECONDS_BETWEEN_REPORTS:
            self.told = now
            speed = (self.done - self.before) / (now - self.start)
            logger.info("%s: %d of %d pairs, %.0f a second", self.description, self.done, self.total, speed)

    def close(self) -> None:
        """Ends the bar."""
        self.bar.close()


__all__ = ["cache_folder", "make_from_rows", "make_in_parts", "making", "open_table", "usable_cores"]
