"""Translation in parts: whatever stops it, and however many processes share it, line i belongs to line i."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import vanilla_transformer_cli as cli
from small_models import small_model
from vanilla_transformer import resumable
from vanilla_transformer.locks import sole_writer
from vanilla_transformer.resumable import identity_of_model, process_number, write_in_parts


ROOT = Path(__file__).resolve().parents[1]
WORDS = ["red", "train", "leaves", "at", "seven", "dog", "sleeps", "under", "table", "cat"]


def sentences(count: int) -> list[str]:
    """Lines of unlike length, one in seven of them blank."""
    return [
        "" if number % 7 == 3 else " ".join(WORDS[(number * step) % 10] for step in range(1, 2 + number % 5))
        for number in range(count)
    ]


@pytest.fixture
def source(tmp_path) -> str:
    path = tmp_path / "source.txt"
    path.write_text("".join(f"line {number}\n" for number in range(1, 11)), encoding="utf-8")
    return str(path)


class Doubling:
    """Two lines for each, with its number; counts what it was asked, and fails at a part on request."""

    def __init__(self, fails_at: int = 0, error: BaseException | None = None):
        self.asked: list[int] = []
        self.fails_at = fails_at
        self.error = error or OSError(28, "No space left on device", "part")

    def __call__(self, lines, first_line):
        self.asked.append(first_line)
        for number, line in enumerate(lines, first_line):
            if number == self.fails_at:
                raise self.error
            yield f"{number}: {line}"
            yield line.upper()


def doubled(count: int = 10) -> str:
    return "".join(f"{number}: line {number}\nLINE {number}\n" for number in range(1, count + 1))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "part"), KeyboardInterrupt()])
def test_what_was_done_before_an_error_is_not_done_again(source, tmp_path, error):
    output = tmp_path / "output.txt"
    output.write_text("of an earlier day\n")
    first = Doubling(fails_at=8, error=error)
    with pytest.raises(type(error)):
        write_in_parts(source, str(output), {"beams": 4}, first, lines_per_part=3)
    assert first.asked == [1, 4, 7]
    assert output.read_text() == "of an earlier day\n"
    parts = sorted(path.name for path in Path(f"{output}.parts").iterdir())
    assert parts == ["part-000000", "part-000001", "run.json"]
    second = Doubling()
    write_in_parts(source, str(output), {"beams": 4}, second, lines_per_part=3)
    assert second.asked == [7, 10]
    assert output.read_text() == doubled()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output.txt", "source.txt"]


def test_parts_of_another_run_are_refused_and_stay(source, tmp_path):
    output = str(tmp_path / "output.txt")
    with pytest.raises(OSError, match="No space"):
        write_in_parts(source, output, {"beams": 4, "model": "a"}, Doubling(fails_at=5), lines_per_part=3)
    for settings, told in (({"beams": 5, "model": "a"}, "other beams"), ({"beams": 4}, "other model")):
        with pytest.raises(ValueError, match=rf"{told}\); remove it to start anew"):
            write_in_parts(source, output, settings, Doubling(), lines_per_part=3)
    with pytest.raises(ValueError, match="other lines_per_part"):
        write_in_parts(source, output, {"beams": 4, "model": "a"}, Doubling(), lines_per_part=4)
    Path(source).write_text("".join(f"line {number}\n" for number in range(10, 0, -1)), encoding="utf-8")
    with pytest.raises(ValueError, match="other source"):
        write_in_parts(source, output, {"beams": 4, "model": "a"}, Doubling(), lines_per_part=3)
    part = (Path(f"{output}.parts") / "part-000000").read_text()
    assert part == f"{doubled(3)}end of part, {len(doubled(3))} bytes before\n"
    for broken in ("[]", "{"):
        (Path(f"{output}.parts") / "run.json").write_text(broken)
        with pytest.raises(ValueError, match="is no record of a run"):
            write_in_parts(source, output, {"beams": 4, "model": "a"}, Doubling(), lines_per_part=3)
    (Path(f"{output}.parts") / "run.json").unlink()
    with pytest.raises(ValueError, match="is not empty and no folder of parts"):
        write_in_parts(source, output, {"beams": 4, "model": "a"}, Doubling(), lines_per_part=3)


@pytest.mark.parametrize("left", [0, 1, 20, -1])
def test_a_part_that_was_cut_short_is_made_again(source, tmp_path, left):
    """As a machine that fails may leave it: not a line is lost."""
    output = tmp_path / "output.txt"
    with pytest.raises(OSError, match="No space"):
        write_in_parts(source, str(output), {}, Doubling(fails_at=8), lines_per_part=3)
    part = Path(f"{output}.parts") / "part-000001"
    part.write_bytes(part.read_bytes()[:left])
    second = Doubling()
    write_in_parts(source, str(output), {}, second, lines_per_part=3)
    assert second.asked == [4, 7, 10]
    assert output.read_text() == doubled()


@pytest.mark.parametrize("lines", [4, 10, 20])
def test_a_source_that_changes_meanwhile_is_told_and_no_output_appears(source, tmp_path, lines):
    """Shorter, as long as before, or longer; even if it is put back, no part of the other text is used."""
    output, before = tmp_path / "output.txt", Path(source).read_text()

    def changing(part, first_line):
        yield from part
        Path(source).write_text("".join(f"other {number}\n" for number in range(lines)), encoding="utf-8")

    with pytest.raises(ValueError, match="was changed while it was translated; remove "):
        write_in_parts(source, str(output), {}, changing, lines_per_part=3)
    Path(source).write_text(before, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other source\); remove it to start anew"):
        write_in_parts(source, str(output), {}, Doubling(), lines_per_part=3)
    assert not output.exists()
    shutil.rmtree(f"{output}.parts")
    write_in_parts(source, str(output), {}, Doubling(), lines_per_part=3)
    assert output.read_text() == doubled()


def test_a_process_that_is_waited_for_is_named(source, tmp_path, monkeypatch):
    """Of two, the other one never comes."""
    monkeypatch.setattr(resumable, "process_number", lambda: (0, 2))
    monkeypatch.setattr(resumable, "meetings", lambda: contextlib.nullcontext(lambda: None))
    monkeypatch.setattr(resumable, "SECONDS_OF_SILENCE", 60)
    told, clock = [], iter(range(0, 1000, 50))
    monkeypatch.setattr(resumable.logger, "warning", told.append)

    def tired(seconds):
        if len(told) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(resumable, "time", SimpleNamespace(sleep=tired, monotonic=lambda: next(clock)))
    with pytest.raises(KeyboardInterrupt):
        write_in_parts(source, str(tmp_path / "output.txt"), {}, Doubling(), lines_per_part=3)
    assert told == ["waits for 2 parts of other processes, part-000001 of process 1 first"] * 2


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(source, tmp_path):
    """In a container each process may have the number 1."""
    output = tmp_path / "output.txt"
    (tmp_path / f".output.txt.{os.getpid()}.tmp").write_text("half")
    folder = Path(f"{output}.parts")
    with pytest.raises(OSError, match="No space"):
        write_in_parts(source, str(output), {}, Doubling(fails_at=5), lines_per_part=3)
    (folder / f".part-000001.{os.getpid()}.tmp").write_text("half")
    write_in_parts(source, str(output), {}, Doubling(), lines_per_part=3)
    assert output.read_text() == doubled()
    assert not folder.exists()


def test_what_someone_keeps_in_the_folder_of_parts_stays(source, tmp_path):
    output, mine = str(tmp_path / "output.txt"), tmp_path / "output.txt.parts" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(ValueError, match="is not empty and no folder of parts"):
        write_in_parts(source, output, {}, Doubling())
    mine.unlink()

    def leaving_a_note(lines, first_line):
        mine.write_text("mine")
        yield from Doubling()(lines, first_line)

    write_in_parts(source, output, {}, leaving_a_note)
    assert Path(output).read_text() == doubled()
    assert [path.name for path in mine.parent.iterdir()] == ["notes.txt"]


def test_settings_may_change_as_long_as_no_part_is_done(source, tmp_path):
    output = str(tmp_path / "output.txt")
    with pytest.raises(OSError, match="No space"):
        write_in_parts(source, output, {"beams": 4}, Doubling(fails_at=1), lines_per_part=3)
    write_in_parts(source, output, {"beams": 5}, Doubling(), lines_per_part=3)
    assert Path(output).read_text() == doubled()


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer_config.json",
        "config.json",
        "model.safetensors",
        "decoder.onnx",
        "model.bin",
    ],
)
def test_a_model_is_another_one_after_any_change_that_translations_depend_on(model, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / name).touch()  # some are of other engines
    before = identity_of_model(str(folder))
    (folder / "README.md").write_text("A card.")
    (folder / "training_run.json").write_text("{}")
    assert identity_of_model(str(folder)) == before
    os.utime(folder / name, ns=(1, 1))
    assert identity_of_model(str(folder)) != before


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_two_runs_do_not_make_one_output_at_the_same_time(tmp_path):
    """Before its first part is there, the record of a run could be replaced by that of another."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("a\nb\n")

    def work_and_be_disturbed(lines, first):
        with pytest.raises(BlockingIOError, match="wait for its end, or give another --output"):
            write_in_parts(str(source), str(output), {"beams": 5}, Doubling())
        yield from Doubling()(lines, first)

    write_in_parts(str(source), str(output), {"beams": 4}, work_and_be_disturbed)
    assert output.read_text() == "1: a\nA\n2: b\nB\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("count", [0, 1, 9, 10])
def test_a_file_of_any_length_comes_out_whole(tmp_path, count):
    source, output = tmp_path / "in.gz", tmp_path / "out.gz"
    with gzip.open(source, "wt", encoding="utf-8") as file:
        file.writelines(f"line {number}\n" for number in range(1, count + 1))
    write_in_parts(str(source), str(output), {}, Doubling(), lines_per_part=3)
    assert gzip.decompress(output.read_bytes()).decode() == doubled(count)


def test_a_link_stays_one_and_a_mode_is_kept(source, tmp_path):
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.touch(mode=0o600)
    link.symlink_to(real)
    write_in_parts(source, str(link), {}, Doubling(), lines_per_part=3)
    assert link.is_symlink()
    assert real.read_text() == doubled()
    assert real.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("source_name, output_name", [("-", "out.txt"), ("{}", "-"), ("{}", "/dev/null")])
def test_only_files_have_parts(source, tmp_path, monkeypatch, source_name, output_name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="a translation in parts needs a file as"):
        write_in_parts(source_name.format(source), output_name, {}, Doubling())


def test_a_process_without_a_place_among_the_others_is_refused(monkeypatch):
    for rank, world in (("2", "2"), ("-1", "2"), ("one", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(ValueError, match="RANK"):
            process_number()


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    model = small_model(vocab_size=len(tiny_tokenizer))
    model.generation_config.max_new_tokens_over_source = 3
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("flags", [[], ["--n_best", "2"], ["--output_format", "jsonl"]], ids=str)
def test_parts_give_the_lines_that_the_whole_gives(model, tmp_path, monkeypatch, flags):
    """Numbers of lines too, which go on from part to part."""
    monkeypatch.setattr(resumable.write_in_parts, "__kwdefaults__", {"lines_per_part": 8, "poll_seconds": 0.1})
    source = tmp_path / "source.txt"
    source.write_text("".join(f"{line}\n" for line in sentences(30)), encoding="utf-8")
    common = ["translate", "--model", str(model), "--input", str(source), *flags]
    assert cli.main([*common, "--output", str(tmp_path / "whole")]) == 0
    assert cli.main([*common, "--output", str(tmp_path / "parts"), "--resumable"]) == 0
    whole, parts = ((tmp_path / name).read_text().splitlines() for name in ("whole", "parts"))
    if "jsonl" in flags:
        whole, parts = ([json.loads(line)["hypotheses"][0]["text"] for line in lines] for lines in (whole, parts))
    assert parts == whole
    assert len({line for line in whole if line}) > 5


def test_another_model_of_the_same_name_does_not_go_on(model, tmp_path, capsys):
    source = tmp_path / "source.txt"
    source.write_text("a dog sleeps\n", encoding="utf-8")
    common = ["translate", "--model", str(model), "--input", str(source), "--output", str(tmp_path / "out")]
    folder = tmp_path / "out.parts"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"model": [str(model), ["model.safetensors", 1, 2]]}))
    (folder / "part-000000").write_text("of another model\n")
    assert cli.main([*common, "--resumable"]) == 2
    assert "holds parts of another run" in capsys.readouterr().err


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **changes}


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node")
ACCELERATE = ("accelerate.commands.launch", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_machines", "1")
SEVERAL_OF_ACCELERATE = (*ACCELERATE, "--multi_gpu", "--main_process_port", "0", "--num_processes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, processes, lines",
    [(TORCHRUN, 2, 9000), (TORCHRUN, 3, 2500), (SEVERAL_OF_ACCELERATE, 2, 2500)],
)
def test_several_processes_share_a_file_and_the_lines_are_in_order(model, tmp_path, launcher, processes, lines):
    """Also one more process than there are parts."""
    source = tmp_path / "source.txt"
    source.write_text("".join(f"{line}\n" for line in sentences(lines)), encoding="utf-8")
    common = ["--model", str(model), "--num_beams", "1", "--input", str(source)]
    assert cli.main(["translate", *common, "--output", str(tmp_path / "alone")]) == 0
    launch = [sys.executable, "-m", *launcher, str(processes)]
    command = [*launch, str(ROOT / "scripts" / "translate.py"), *common, "--output", str(tmp_path / "shared")]
    done = subprocess.run(
        command, env=environment(CUDA_VISIBLE_DEVICES=""), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "has started one process" not in done.stderr
    assert (tmp_path / "shared").read_bytes() == (tmp_path / "alone").read_bytes()
    assert not (tmp_path / "shared.parts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [1, 2])
def test_accelerate_that_starts_one_process_of_two_on_a_processor_is_told(model, tmp_path, asked):
    """It does so without a word of its own."""
    source, output = tmp_path / "source.txt", tmp_path / "output"
    source.write_text("a dog sleeps\n", encoding="utf-8")
    launch = [sys.executable, "-m", *ACCELERATE, "--cpu", "--num_processes", str(asked)]
    translate = [str(ROOT / "scripts" / "translate.py"), "--model", str(model), "--input", str(source)]
    done = subprocess.run(
        [*launch, *translate, "--output", str(output)], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(output.read_text(encoding="utf-8").splitlines()) == 1
    assert done.stderr.count("accelerate launch has started one process") == asked - 1


def heed_signals() -> None:
    """In the new process: whoever started the tests may have had these signals ignored, as for a background job."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_translation_that_is_killed_goes_on_where_it_stopped(model, tmp_path, ends_by):
    source, output = tmp_path / "source.txt", tmp_path / "output"
    source.write_text("".join(f"{line}\n" for line in sentences(9000)), encoding="utf-8")
    common = ["translate", "--model", str(model), "--num_beams", "1", "--input", str(source)]
    command = [sys.executable, "-m", "vanilla_transformer_cli", *common, "--output", str(output), "--resumable"]
    parts = Path(f"{output}.parts")
    interrupted = 0
    for _ in range(20):
        process = subprocess.Popen(
            command, env=environment(), stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
        )
        before = len(list(parts.glob("part-*")))
        while process.poll() is None and len(list(parts.glob("part-*"))) <= before:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(ends_by)
        errors = process.communicate(timeout=120)[1]
        assert "Traceback" not in errors
        if process.returncode == 0:
            break
        interrupted += 1
        if not output.exists():  # else the signal came between the last part and the end, or while parts were removed
            assert len(list(parts.glob("part-*"))) > before, "each attempt must bring the work forward"
    assert process.returncode == 0
    assert interrupted >= 2
    assert cli.main([*common, "--output", str(tmp_path / "alone")]) == 0
    assert output.read_bytes() == (tmp_path / "alone").read_bytes()
    assert not parts.exists()


@pytest.mark.parametrize("removed", [0, 1, 3])
def test_a_run_that_is_killed_when_all_is_done_is_only_tidied_up_by_the_next(source, tmp_path, monkeypatch, removed):
    """Between the output's appearance and the end of its parts; `removed` of three parts are gone already."""
    output = tmp_path / "out"
    parts = Path(f"{output}.parts")

    def is_killed(folder):
        for part in range(removed):
            (folder / f"part-{part:06d}").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resumable, "clear", is_killed)
        with pytest.raises(KeyboardInterrupt):
            write_in_parts(source, str(output), {}, Doubling(), lines_per_part=4)
    assert output.read_text() == doubled()
    assert len(list(parts.glob("part-*"))) == 3 - removed
    again = Doubling()
    write_in_parts(source, str(output), {}, again, lines_per_part=4)
    assert again.asked == [1, 5, 9][:removed]
    assert output.read_text() == doubled()
    assert not parts.exists()


REFUSED = """
import sys
from vanilla_transformer.resumable import write_in_parts
write_in_parts(sys.argv[1], sys.argv[2], {}, lambda lines, first: lines)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be locked there")
def test_where_the_first_process_is_refused_the_others_end_too(source, tmp_path):
    """They wait for it, and nobody but a launcher would end them."""
    output = str(tmp_path / "out")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with sole_writer(f"{output}.parts", ""):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", REFUSED, source, output],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": rank, **settings},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in "01"
        ]
        errors = [process.communicate(timeout=240)[1] for process in processes]
    assert "BlockingIOError: another run is writing into" in errors[0]
    assert all(process.returncode for process in processes)
