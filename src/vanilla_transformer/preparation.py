"""What a command spends before its training begins: the time to the first batch, and the memory until then."""

import os
import threading
import time
from pathlib import Path

from transformers import TrainerCallback
from transformers.utils import logging

from vanilla_transformer.hub import TrainingRun


logger = logging.get_logger(__name__)

_MIB = 2**20


class MemoryWatch:
    """Looks, from time to time, how much memory this process and all those that descend from it take up together.

    Where there is no `/proc` (elsewhere than on Linux) nothing is measured.

    Args:
        seconds: Between two looks.
    """

    def __init__(self, seconds: float = 0.25):
        self.seconds = seconds
        self.resident, self.without_files = 0, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if Path("/proc/self/statm").is_file():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> tuple[int, int] | None:
        """Most bytes seen resident, and most seen without the pages of mapped files; None where nothing was seen.

        Memory that processes share is counted for each of them.
        """
        if self._thread is None:
            return None
        self._ended.set()
        self._thread.join()
        self._look()
        return self.resident, self.without_files

    def _watch(self) -> None:
        while not self._ended.wait(self.seconds):
            self._look()

    def _look(self) -> None:
        pages = [pages_of(process) for process in family_of(os.getpid())]
        size = os.sysconf("SC_PAGE_SIZE")
        self.resident = max(self.resident, size * sum(resident for resident, _ in pages))
        self.without_files = max(self.without_files, size * sum(resident - files for resident, files in pages))


def family_of(process: int) -> list[int]:
    """A process and all that descend from it, as far as they are still there."""
    family = [process]
    for each in family:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                family += map(int, children.read_text().split())
            except OSError:  # it has ended meanwhile
                continue
    return family


def pages_of(process: int) -> tuple[int, int]:
    """Pages of a process in memory, and how many of them belong to files; none of one that has ended."""
    try:
        resident, files = Path(f"/proc/{process}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0, 0
    return int(resident), int(files)


class FirstBatch(TrainerCallback):
    """Logs, when the first batch of a training is there, how long that took and how much memory, and notes both.

    Args:
        run: The record to note it in.
        started: `time.perf_counter()` when the command started.
        memory: Has been watching since then.
    """

    def __init__(self, run: TrainingRun, started: float, memory: MemoryWatch):
        self.run, self.started, self.memory = run, started, memory
        self.seen = False

    def on_step_begin(self, args, state, control, **kwargs):
        """Called when the first micro-batches of an update are there."""
        if self.seen:
            return
        self.seen = True
        seconds = time.perf_counter() - self.started
        self.run.first_batch_seconds = round(seconds, 1)
        told = f"first batch after {seconds:.1f} seconds"
        if (peak := self.memory.stop()) is not None:
            resident, without_files = (round(each / _MIB) for each in peak)
            self.run.peak_memory_mib, self.run.peak_memory_without_files_mib = resident, without_files
            told += f"; peak memory {resident:,} MiB, {without_files:,} MiB without the pages of mapped files"
        if args.should_log:
            logger.info(told)


__all__ = ["FirstBatch", "MemoryWatch"]
