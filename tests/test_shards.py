"""Tables made in parts: whatever stops the work, what is taken later is whole, and of this text and tokenizer."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import pytest

from conftest import TINY_CORPUS
from vanilla_transformer import data, shards
from vanilla_transformer.data import load_pairs, tokenize_pairs
from vanilla_transformer.preparation import family_of
from vanilla_transformer.tokenization import train_tokenizer


LINES = [(f"{source} {number}", f"{number} {target}") for number in range(3) for source, target in TINY_CORPUS]


@pytest.fixture(autouse=True)
def _parts_of_four_rows(request, monkeypatch):
    if "slow" not in request.keywords:
        monkeypatch.setattr(shards, "ROWS_PER_PART", 4)


def write_corpus(folder: Path, lines=LINES) -> dict[str, Path]:
    folder.mkdir(exist_ok=True)
    for number, side in enumerate(("source", "target")):
        (folder / side).write_text("".join(f"{pair[number]}\n" for pair in lines), encoding="utf-8")
    return {"source_files": folder / "source", "target_files": folder / "target"}


def by_hand(tokenizer, lines=LINES) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": tokenizer(source).input_ids, "labels": tokenizer(target).input_ids} for source, target in lines
    ]


def encode(files, tokenizer, cache, **options):
    return tokenize_pairs(load_pairs(**files, cache_dir=cache), tokenizer, cache_dir=cache, **options)[0]


def contents(cache: Path) -> dict[str, bytes]:
    """What the tables of a cache hold, by name of the file; none of it is unfinished."""
    paths = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    files = {str(path.relative_to(cache)): path.read_bytes() for path in paths}
    assert not [name for name in files if name.endswith(".tmp")]
    return files


@pytest.mark.parametrize("finished", [0, 1, 5, 7])
def test_an_encoding_that_was_stopped_goes_on_to_the_same_bytes(tmp_path, tiny_tokenizer, monkeypatch, finished):
    """30 pairs in parts of 4, a batch in each; stopped as if by a signal while a part was made."""
    files = write_corpus(tmp_path / "text")
    assert encode(files, tiny_tokenizer, tmp_path / "whole").to_list() == by_hand(tiny_tokenizer)
    done = []

    def stop(batch, tokenizer):
        if len(done) == finished:
            raise KeyboardInterrupt
        done.append(batch)
        return real(batch, tokenizer)

    real = data.encode_batch
    monkeypatch.setattr(data, "encode_batch", stop)
    with pytest.raises(KeyboardInterrupt):
        encode(files, tiny_tokenizer, tmp_path / "stopped")
    folders = list((tmp_path / "stopped").glob("tokens-*/"))
    assert len(folders) == (finished > 0)  # an empty one is not left behind
    for folder in folders:
        assert len(list(folder.glob("part-*.arrow"))) == finished
        (folder / "part-00007.arrow.1.tmp").write_bytes(b"what a killed process left")
    again = []
    monkeypatch.setattr(
        data, "encode_batch", lambda batch, tokenizer: (again.append(batch), real(batch, tokenizer))[1]
    )
    assert encode(files, tiny_tokenizer, tmp_path / "stopped").to_list() == by_hand(tiny_tokenizer)
    assert len(again) == 8 - finished
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_what_is_not_whole_is_never_taken(tmp_path, tiny_tokenizer):
    files = write_corpus(tmp_path / "text")
    encode(files, tiny_tokenizer, tmp_path)
    whole = contents(tmp_path)
    parts = sorted(path for kind in ("pairs", "tokens") for path in tmp_path.glob(f"{kind}-*/*"))
    assert len(parts) == 2 + 9
    for path in parts:
        for damage in (lambda path: path.unlink(), lambda path: os.truncate(path, path.stat().st_size // 2)):
            damage(path)
            assert encode(files, tiny_tokenizer, tmp_path).to_list() == by_hand(tiny_tokenizer)
            assert contents(tmp_path) == whole


def test_a_part_cut_short_at_the_end_of_a_row_is_made_anew(tmp_path, tiny_tokenizer):
    """As of a run that was stopped: no whole.json to compare with, and what is left can be read."""
    files = write_corpus(tmp_path / "text")
    encode(files, tiny_tokenizer, tmp_path)
    (folder,) = tmp_path.glob("tokens-*/")
    (folder / "whole.json").unlink()
    (folder / "part-00001.arrow").write_bytes((folder / "part-00007.arrow").read_bytes())  # two rows, not four
    assert encode(files, tiny_tokenizer, tmp_path).to_list() == by_hand(tiny_tokenizer)


def test_another_text_or_tokenizer_never_takes_the_cache(tmp_path, tiny_tokenizer):
    files = write_corpus(tmp_path / "text")
    encode(files, tiny_tokenizer, tmp_path)
    other = train_tokenizer([text for pair in LINES for text in pair], 420)
    assert by_hand(other) != by_hand(tiny_tokenizer)
    assert encode(files, other, tmp_path).to_list() == by_hand(other)
    changed = [(target, source) for source, target in LINES]
    times = [(path.stat().st_atime_ns, path.stat().st_mtime_ns) for path in files.values()]
    for path, time_of in zip(write_corpus(tmp_path / "text", changed).values(), times, strict=True):
        os.utime(path, ns=time_of)
    assert encode(files, tiny_tokenizer, tmp_path).to_list() == by_hand(tiny_tokenizer, changed)
    moved = write_corpus(tmp_path / "elsewhere")
    assert len(list(tmp_path.glob("tokens-*/"))) == 3
    encode(moved, tiny_tokenizer, tmp_path)
    assert len(list(tmp_path.glob("tokens-*/"))) == 3  # the same text under another name is the same text


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    files = write_corpus(tmp_path / "text")
    real = data.iterate_pairs

    def growing(paths):
        with open(files["source_files"], "a") as file:
            file.write("one more\n")
        yield from islice(real(paths), len(LINES))

    monkeypatch.setattr(data, "iterate_pairs", growing)
    with pytest.raises(ValueError, match="source changed while it was read"):
        load_pairs(**files, cache_dir=tmp_path)
    monkeypatch.setattr(data, "iterate_pairs", real)
    write_corpus(tmp_path / "text")
    assert load_pairs(**files, cache_dir=tmp_path)["source"][:] == [source for source, _ in LINES]


def test_overwriting_makes_everything_anew(tmp_path, tiny_tokenizer):
    files = write_corpus(tmp_path / "text")
    encode(files, tiny_tokenizer, tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.glob("*/*.arrow")}
    whole = contents(tmp_path)
    for path in before:
        os.link(path, tmp_path / f"kept-{path.name}-{path.stat().st_ino}")  # or its number would be given away again
    pairs = load_pairs(**files, cache_dir=tmp_path, overwrite_cache=True)
    tokenize_pairs(pairs, tiny_tokenizer, cache_dir=tmp_path, overwrite_cache=True)
    assert not [path for path, number in before.items() if path.stat().st_ino == number]
    assert {name: content for name, content in contents(tmp_path).items() if "kept" not in name} == whole


def test_one_makes_the_table_and_the_other_waits_for_it(tmp_path, tiny_tokenizer, monkeypatch):
    files = write_corpus(tmp_path / "text")
    pairs = load_pairs(**files, cache_dir=tmp_path)
    begun, may_end, batches, results = threading.Event(), threading.Event(), [], []
    real = data.encode_batch

    def slowly(batch, tokenizer):
        batches.append(batch)
        begun.set()
        may_end.wait(60)
        return real(batch, tokenizer)

    monkeypatch.setattr(data, "encode_batch", slowly)

    def work():
        results.append(tokenize_pairs(pairs, tiny_tokenizer, cache_dir=tmp_path)[0].to_list())

    workers = [threading.Thread(target=work) for _ in range(2)]
    workers[0].start()
    assert begun.wait(60)
    workers[1].start()
    time.sleep(0.1)
    may_end.set()
    for worker in workers:
        worker.join(60)
    assert results == [by_hand(tiny_tokenizer)] * 2
    assert len(batches) == 8


def test_large_tables_have_a_bounded_number_of_parts(monkeypatch):
    monkeypatch.setattr(shards, "ROWS_PER_PART", 50_000)
    for rows, parts in ((1, 1), (50_000, 1), (50_001, 2), (5_000_000, 100), (10**9, 100)):
        assert -(-rows // shards.rows_per_part(rows)) == parts


# --- 200,000 pairs, in processes of their own ------------------------------------------------------------------------

ENCODER = """
import sys
from transformers import AutoTokenizer
from vanilla_transformer import shards
from vanilla_transformer.data import load_pairs, tokenize_pairs
if __name__ == "__main__":
    source, target, tokenizer, rows_per_part, cache = sys.argv[1:]
    shards.ROWS_PER_PART, shards.ROWS_WORTH_PROCESSES = int(rows_per_part), 1
    pairs = load_pairs(source_files=source, target_files=target, cache_dir=cache)
    tokenize_pairs(pairs, AutoTokenizer.from_pretrained(tokenizer), cache_dir=cache, num_proc=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pairs, rows_per_part", [(60_000, 10_000), (250_000, 50_000)])
def test_a_killed_encoding_goes_on_in_two_processes(tmp_path, tiny_tokenizer, monkeypatch, pairs, rows_per_part):
    """SIGKILL, after the first part is there: no process stays behind, and the parts that were done are kept."""
    lines = [LINES[number % 30] for number in range(pairs)]
    lines = [(f"{source} {number}", f"{number} {target}") for number, (source, target) in enumerate(lines)]
    files = write_corpus(tmp_path / "text", lines)
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "encode.py").write_text(ENCODER)
    environment = {**os.environ, "PYTHONPATH": str(Path(shards.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "encode.py"), *map(str, files.values()), str(tmp_path / "tokenizer")]
    command.append(str(rows_per_part))
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, str(killed)], env=environment, stderr=subprocess.DEVNULL)
    try:
        done = wait_for(lambda: list(killed.glob("tokens-*/part-*.arrow")) or process.poll() is not None)
        family = family_of(process.pid)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert len(family) >= 4  # itself, the server that forks, two that encode
    wait_for(lambda: not [pid for pid in family if is_running(pid)])
    assert not list(killed.glob("tokens-*/whole.json"))
    written = {path: path.stat().st_mtime_ns for path in done}
    subprocess.run([*command, str(killed)], env=environment, check=True, stderr=subprocess.DEVNULL)
    assert {path: path.stat().st_mtime_ns for path in done} == written
    monkeypatch.setattr(shards, "ROWS_PER_PART", rows_per_part)
    one_process = encode(files, tiny_tokenizer, tmp_path / "whole")
    assert len(one_process) == pairs
    assert contents(killed) == contents(tmp_path / "whole")
    for start in range(0, pairs, rows_per_part):  # across the borders of the parts
        rows = slice(max(start - 500, 0), start + 500)
        part = one_process[rows]
        assert [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)] == by_hand(
            tiny_tokenizer, lines[rows]
        )


def wait_for(condition, seconds: float = 900):
    """What the condition gives when it holds; the machine may be a busy one."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("table", ["pairs-*", "tokens-*"])
def test_a_byte_that_a_disk_has_changed_is_noticed_and_the_table_made_anew(tmp_path, tiny_tokenizer, caplog, table):
    files, cache = write_corpus(tmp_path / "text"), tmp_path / "cache"
    encode(files, tiny_tokenizer, cache)
    before = contents(cache)
    (part, *_) = sorted(cache.glob(f"{table}/part-*.arrow"))
    for place in range(100, part.stat().st_size, 500):
        content = bytearray(before[str(part.relative_to(cache))])
        content[place] ^= 0x40
        part.write_bytes(content)
        caplog.clear()
        assert encode(files, tiny_tokenizer, cache).to_list() == by_hand(tiny_tokenizer)
        assert f"{part.parent} is damaged ({part.name})" in caplog.text
        assert contents(cache) == before


def test_a_cache_without_room_is_named(tmp_path, tiny_tokenizer, monkeypatch):
    files, cache = write_corpus(tmp_path / "text"), tmp_path / "cache"

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.pa.ipc, "new_stream", full)
    with pytest.raises(OSError, match=r"No space left on device: .*cache/pairs-\w+/part-00000.arrow"):
        encode(files, tiny_tokenizer, cache)
