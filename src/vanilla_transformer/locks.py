"""One run at a time in a folder: two that write there at once would mix their files."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows, where a folder cannot be locked
    fcntl = None  # type: ignore[assignment]

_held: set[int] = set()


@contextlib.contextmanager
def sole_writer(folder: str | os.PathLike, advice: str) -> Iterator[None]:
    """The right to write into a folder, for one process at a time; others are refused.

    The lock is the system's, on the folder itself: it ends with this process, in whatever way that ends, though
    workers that it has started live on, and no file is left behind. Where the file system knows no locks, as some
    networks' do not, nobody is refused.

    Args:
        folder: Made where it does not exist, with those that it lies in; what was made and is still empty at the end
            is removed.
        advice: What whoever is refused is to do.

    Raises:
        BlockingIOError: Another process holds it.
    """
    path = Path(os.path.abspath(folder))
    made = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(path, advice)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not one that the next run has made in its place, or that is in use
            if descriptor is None or os.path.samestat(os.fstat(descriptor), os.stat(path)):
                for each in made:
                    each.rmdir()
        if descriptor is not None:
            _held.discard(descriptor)
            os.close(descriptor)


def _locked(path: Path, advice: str) -> int | None:
    """A descriptor that holds the lock; None where there are none."""
    if fcntl is None:
        return None
    while True:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise BlockingIOError(f"another run is writing into {path}: {advice}") from error
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                _held.add(descriptor)
                return descriptor
        os.close(descriptor)  # the run before has just ended and taken its folder away
        path.mkdir(exist_ok=True)


def _let_go() -> None:
    """In a process that was forked: else the lock would outlive the run for as long as its workers."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


__all__ = ["sole_writer"]
