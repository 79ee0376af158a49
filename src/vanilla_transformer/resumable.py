"""A large file in parts: translated by several processes, and on from where a killed run stopped.

Beside the output `F` grows a folder `F.parts` with one file for each so many lines of the input. A part appears whole
or not at all, and its last line says how long it is, so that whoever starts again finds what is done. Processes share
the parts by number: they meet at the start and then need only a file system that all of them see. When all parts are
there the first process puts them together, in order, and removes the folder.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file, logging

from vanilla_transformer.data import read_lines
from vanilla_transformer.locks import sole_writer
from vanilla_transformer.translation import open_output


logger = logging.get_logger(__name__)

RUN = "run.json"
SECONDS_OF_SILENCE = 60  # between two lines that say what is waited for
LINES_PER_PART = 2000  # enough for batches of like length, few enough to lose little and to share evenly


def process_number() -> tuple[int, int]:
    """Number of this process and of all, as `accelerate launch` and `torchrun` tell; 0 of 1 without them."""
    try:
        number, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ValueError(f"RANK and WORLD_SIZE must be whole numbers: {error}") from error
    if not 0 <= number < count:
        raise ValueError(f"RANK must lie in [0, WORLD_SIZE={count}), got {number}.")
    return number, count


def warn_if_alone() -> None:
    """Says so where `accelerate launch` was asked for several processes and started this one only.

    Without a GPU it starts a single one, unless MPI does it; what it then sets, and what it leaves unset, tells.
    """
    others = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if launched and not any(name in os.environ for name in others):
        logger.warning(
            "accelerate launch has started one process, as it does without a GPU however many it is asked for; "
            "`accelerate launch --multi_gpu --num_processes N` or `torchrun --nproc_per_node N` starts N of them there"
        )


def local_device() -> str | None:
    """The GPU of this process among several on a machine; None where it is the only one, or there is no GPU."""
    if process_number()[1] == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def write_in_parts(
    source: str,
    output: str,
    settings: dict[str, Any],
    work: Callable[[list[str], int], Iterable[str]],
    *,
    lines_per_part: int = LINES_PER_PART,
    poll_seconds: float = 0.5,
) -> None:
    """Writes a file from another, line by line, in parts that a later call, or another process, need not do again.

    Args:
        source: A text file; UTF-8, .gz by name.
        output: The file to write, .gz by name. Only the first process writes it, when all parts are there.
        settings: Whatever the output depends on besides the source; JSON. Parts made with others are refused.
        work: Called with the lines of a part and the number of the first one, from 1; gives lines without their ends.
        lines_per_part: Lines of the source in each part but the last.
        poll_seconds: How often the first process looks for the parts of the others.

    Raises:
        ValueError: The source or the output is no file, or the source changes meanwhile; `F.parts` holds parts of
            another run, or RANK and WORLD_SIZE make no sense.
        BlockingIOError: Another run makes the same output just now.
        OSError: A file cannot be read or written; finished parts stay.
    """
    if source == "-" or not os.path.isfile(source):
        raise ValueError(f"a translation in parts needs a file as input, got {source}.")
    if output == "-" or (os.path.exists(output) and not os.path.isfile(output)):
        raise ValueError(f"a translation in parts needs a file as output, got {output}.")
    folder = Path(f"{output}.parts")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"no such folder: {folder.parent} (to write {Path(output).name} into)")
    with contextlib.ExitStack() as rights:
        work_in_parts(source, output, folder, settings, work, lines_per_part, poll_seconds, rights)


def work_in_parts(
    source: str,
    output: str,
    folder: Path,
    settings: dict[str, Any],
    work: Callable[[list[str], int], Iterable[str]],
    lines_per_part: int,
    poll_seconds: float,
    rights: contextlib.ExitStack,
) -> None:
    """`write_in_parts`; the right to write into the folder of parts is among the `rights` that end with it."""
    number, count = process_number()
    changed = os.stat(source).st_mtime_ns
    run = {"source": fingerprint(source), "lines_per_part": lines_per_part, **settings}

    def check_source() -> None:
        if os.stat(source).st_mtime_ns != changed and fingerprint(source) != run["source"]:
            with open_output(str(folder / RUN)) as file:  # so that nobody goes on with parts of before and after
                json.dump({**run, "source": "changed while it was translated"}, file)
            raise ValueError(f"{source} was changed while it was translated; remove {folder} and start again.")

    with meetings() as meet:
        if number == 0:  # where it is refused, the others notice that it has gone
            rights.enter_context(sole_writer(folder, "wait for its end, or give another --output."))
            claim(folder, run)
        meet()
        if number != 0:
            claim(folder, run)
        parts = -(-sum(1 for _ in read_lines(source)) // lines_per_part)
        mine = {part for part in range(number, parts, count) if not is_whole(folder / name_of(part))}
        meet()  # from here on nobody looks for what was done before, and so the first may clear it away at the end
    for part, first_line, lines in blocks(source, lines_per_part):
        if part in mine:
            with open_output(str(folder / name_of(part))) as file:
                size = 0
                for line in work(lines, first_line):
                    size += len(line.encode()) + 1
                    file.write(f"{line}\n")
                file.write(end_of_part(size))
    if number != 0:
        return
    wanted = [folder / name_of(part) for part in range(parts)]
    told, missing = time.monotonic(), wanted
    while missing := [path for path in missing if not is_whole(path)]:
        check_source()
        if count == 1:
            raise FileNotFoundError(f"{missing[0]} vanished while the others were made; start again.")
        if time.monotonic() - told > SECONDS_OF_SILENCE:
            told = time.monotonic()
            process = int(missing[0].name.partition("-")[2]) % count
            logger.warning(
                f"waits for {len(missing)} parts of other processes, {missing[0].name} of process {process} first"
            )
        time.sleep(poll_seconds)
    check_source()
    whole = folder / f"whole{'.gz' if output.lower().endswith('.gz') else ''}"
    with open_output(str(whole)) as file:
        for path in wanted:
            with open(path, encoding="utf-8", newline="\n") as part_file:
                held = next(part_file)
                for line in part_file:  # all but the last, which is the mark of the end
                    file.write(held)
                    held = line
    target = os.path.realpath(output)  # a symbolic link stays one
    if os.path.exists(target):
        shutil.copymode(target, whole)
    os.replace(whole, target)
    clear(folder)


@contextlib.contextmanager
def meetings() -> Iterator[Callable[[], None]]:
    """A function that returns when all processes have called it."""
    if process_number()[1] == 1:
        yield lambda: None
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield torch.distributed.barrier
    finally:
        torch.distributed.destroy_process_group()


def blocks(source: str, lines_per_part: int) -> Iterator[tuple[int, int, list[str]]]:
    """Number from 0, number of the first line from 1, and lines of each part."""
    lines, part = read_lines(source), 0
    while held := list(islice(lines, lines_per_part)):
        yield part, part * lines_per_part + 1, held
        part += 1


def name_of(part: int) -> str:
    """File of a part."""
    return f"part-{part:06d}"


def end_of_part(size: int) -> str:
    """The last line of a part with so many bytes before it."""
    return f"end of part, {size} bytes before\n"


def is_whole(path: Path) -> bool:
    """Whether a part is there and all of it, which a failure of the machine may have cut short."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 100))
            end = re.search(rb"(?:\A|\n)(end of part, (\d+) bytes before\n)\Z", file.read())
    except FileNotFoundError:
        return False
    return end is not None and int(end[2]) == size - len(end[1])


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder of parts, or finds it with parts that were made by the same settings.

    Raises:
        ValueError: They were made by others.
    """
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    path = folder / RUN
    folder.mkdir(exist_ok=True)
    parts = list(folder.glob("part-*"))
    if not path.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and no folder of parts; move it, or give another --output.")
    try:
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{path} is no record of a run; remove {folder} to start anew, or give another --output.")
    wanted = json.loads(text)
    if before != wanted and not parts and process_number()[0] == 0:  # nothing is lost
        with open_output(str(path)) as file:
            file.write(text)
        before = wanted
    if before == wanted:
        if parts and process_number()[0] == 0:
            logger.warning(f"goes on with the {sum(map(is_whole, parts))} parts in {folder}")
        return
    differs = sorted(key for key in {*before, *wanted} if before.get(key) != wanted.get(key))
    raise ValueError(
        f"{folder} holds parts of another run (other {', '.join(differs)}); remove it to start anew, or give another "
        "--output."
    )


def clear(folder: Path) -> None:
    """Removes what a run left in the folder of parts, and the folder, unless someone has put something into it."""
    for pattern in ("part-*", ".part-*.tmp", ".run.json.*.tmp", ".whole*.tmp", RUN):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def fingerprint(path: str) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return {"bytes": os.path.getsize(path), "sha256": digest.hexdigest()}


def identity_of_model(name: str, revision: str | None = None) -> list[Any]:
    """What tells a model from another of the same name: names, sizes and times of a folder's files; a Hub's commit.

    Those count that settings, weights and vocabularies are kept in, not records and scores.
    """
    if not os.path.isdir(name):
        path = cached_file(name, "config.json", revision=revision)
        return [name, Path(path).parent.name if path else None]
    told = (".json", ".safetensors", ".bin", ".onnx", ".data", ".spm", ".model", ".vocab", ".txt", ".jinja")
    untold = ("training_run.json", "trainer_state.json", "results.json")
    files = sorted(
        file
        for file in Path(name).iterdir()
        if file.is_file() and file.name.endswith(told) and not file.name.endswith(untold)
    )
    return [os.path.realpath(name), *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)]


__all__ = ["LINES_PER_PART", "process_number", "warn_if_alone", "write_in_parts"]
