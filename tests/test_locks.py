"""One run at a time in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from vanilla_transformer import locks
from vanilla_transformer.locks import sole_writer


pytest.importorskip("fcntl", reason="folders can be locked where there is fcntl")

HOLDER = """
import os, sys, time
from vanilla_transformer import locks
from vanilla_transformer.locks import sole_writer
with sole_writer(sys.argv[1], "wait"):
    into, out = os.pipe()
    child = os.fork()
    if child:
        os.read(into, 1)
        print(child, flush=True)
    else:
        os.write(out, b"x")
    time.sleep(600)
"""


def test_another_process_is_refused_until_the_first_is_gone_though_its_workers_live_on(tmp_path):
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        worker = int(holder.stdout.readline())
        try:
            with (
                pytest.raises(BlockingIOError, match=rf"another run is writing into {folder}: go away"),
                sole_writer(folder, "go away"),
            ):
                pass
            assert folder.is_dir()
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # which is still there
            with sole_writer(folder, "go away"):
                pass
        finally:
            holder.kill()
            os.kill(worker, signal.SIGKILL)


def test_the_right_can_be_had_again_and_of_two_folders_at_once(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for _ in range(2):
        with sole_writer(one, ""), sole_writer(two, ""), pytest.raises(BlockingIOError), sole_writer(one, ""):
            pass


@pytest.mark.parametrize("kept", ["file", "folder"])
def test_only_an_empty_folder_of_its_own_making_is_taken_away(tmp_path, kept):
    folder = tmp_path / "run"
    if kept == "folder":
        folder.mkdir()
    with sole_writer(folder, ""):
        if kept == "file":
            (folder / "file").touch()
    assert folder.is_dir()
    with sole_writer(tmp_path / "new", ""):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()


def test_a_lock_on_a_folder_that_vanishes_that_moment_is_taken_again(tmp_path, monkeypatch):
    """A run that ends takes its folder of parts away; a lock on what is gone would keep nobody out."""
    folder, lock, calls = tmp_path / "run", locks.fcntl.flock, []

    def the_run_before_ends(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:
            folder.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(locks.fcntl, "flock", the_run_before_ends)
    with sole_writer(folder, ""):
        assert folder.is_dir()
        with pytest.raises(BlockingIOError), sole_writer(folder, ""):
            pass


def test_what_was_made_for_it_is_taken_away_too(tmp_path):
    with sole_writer(tmp_path / "a" / "b" / "run", ""):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


def test_the_folder_of_the_next_run_is_left_to_it(tmp_path):
    folder = tmp_path / "run"
    with sole_writer(folder, ""):
        folder.rename(tmp_path / "away")
        folder.mkdir()
    assert folder.is_dir()
