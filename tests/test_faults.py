"""Broken files, full disks, diverging runs and killed processes: one clear line, and nothing that was good is lost.

VANILLA_TRANSFORMER_FULL=1 makes the slow tests long: 20 kills in place of 3.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

import vanilla_transformer_cli as cli
from conftest import TINY_CORPUS
from small_models import small_model
from test_training import logged, resumable
from vanilla_transformer.training import fault_of_checkpoint, last_whole_checkpoint


FULL = os.environ.get("VANILLA_TRANSFORMER_FULL", "0") not in ("", "0")

SHAPE = ["d_model=16", "d_ff=32", "num_heads=2", "encoder_layers=1", "decoder_layers=1"]
SMALL = ["--preset", "tiny", "--config_overrides", *SHAPE, "--vocab_size", "300", "--tokens_per_batch", "200"]
QUICK = ["--disable_tqdm", "true", "--use_cpu", "true", "--report_to", "none", "--learning_rate", "0.001"]


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory) -> Path:
    """A model's folder: weights, configuration, decoding settings, tokenizer."""
    path = tmp_path_factory.mktemp("model")
    model = small_model(vocab_size=len(tiny_tokenizer), decoder_layers=2)
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    """Two text files of training."""
    path = tmp_path_factory.mktemp("text")
    for side, name in enumerate(("source", "target")):
        (path / name).write_text("".join(f"{pair[side]}\n" for pair in TINY_CORPUS * 3), encoding="utf-8")
    return {"--train_source": str(path / "source"), "--train_target": str(path / "target")}


def flags(text: dict[str, str]) -> list[str]:
    return [item for pair in text.items() for item in pair]


def run(capsys, *argv: object) -> tuple[int, list[str]]:
    """Exit code and the lines of stderr that are no progress of transformers."""
    capsys.readouterr()
    try:
        code = cli.main([*map(str, argv)])
    except SystemExit as exit:
        code = exit.code
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    return code, [line for line in lines if line.startswith("vanilla-transformer") or "Traceback" in line]


def contents(path: Path) -> dict[str, str]:
    """A digest of each file below a folder."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")


# --- Broken models ---------------------------------------------------------------------------------------------------

DAMAGES = {
    "cut weights": (lambda path: cut(path / "model.safetensors"), "the weights in {} cannot be used"),
    "cut header": (lambda path: cut(path / "model.safetensors", 0.001), "the weights in {} cannot be used"),
    "empty weights": (lambda path: cut(path / "model.safetensors", 0), "the weights in {} cannot be used"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "no safetensors in the folder {}"),
    "cut tokenizer": (lambda path: cut(path / "tokenizer.json"), "the tokenizer in {} cannot be used"),
    "no tokenizer": (
        lambda path: [(path / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        "no tokenizer in the folder {}",
    ),
    "cut config": (lambda path: cut(path / "config.json"), "cannot open the model {}"),
    "cut decoding": (lambda path: cut(path / "generation_config.json"), "{}/generation_config.json is not JSON"),
    "fewer words": (lambda path: change_config(path, vocab_size=100), "{} cannot be used: their shapes are not those"),
    "more words": (lambda path: change_config(path, vocab_size=9999), "{} cannot be used: their shapes are not those"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_one_line_for_every_command_that_opens_it(capsys, tmp_path, folder, text, damage):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    breaks, told = DAMAGES[damage]
    breaks(broken)
    before = contents(broken)
    source, output = text["--train_source"], tmp_path / "output"
    for command in (
        ["translate", "--input", source, "--output", output],
        ["score", "--source", source, "--target", source, "--output", output],
        ["evaluate", "--source", source, "--reference", source, "--json", output],
        ["convert", "--to", "marian", "--output_dir", output],
        ["train", *flags(text), *QUICK, "--max_steps", "1", "--output_dir", output],
    ):
        code, errors = run(capsys, *command, "--model", broken)
        assert (code, len(errors)) == (2, 1), (command[0], errors)
        assert told.format(broken) in errors[0], (command[0], errors)
        assert not output.exists(), command[0]
    assert contents(broken) == before


def test_a_tokenizer_of_another_model_is_told(capsys, tmp_path, folder, text):
    """The words of the tokenizer have no rows in the model."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words.update({f"word{number}": len(words) + number for number in range(100)})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    code, errors = run(capsys, "translate", "--model", other, "--input", text["--train_source"])
    assert (code, len(errors)) == (2, 1)
    assert "it is not the tokenizer of this model" in errors[0]


# --- Disks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def room_for(size: int):
    """No file can grow beyond `size` bytes inside: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def disk(path: Path, options: str):
    """A disk of its own, in memory; the test is skipped where this process may not mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("this process may not mount a disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def writers(folder: Path, source: str) -> dict[str, list]:
    """Commands that write, without the place to write to."""
    greedy = ["--num_beams", "1", "--max_new_tokens", "4"]
    return {
        "translate": ["translate", "--model", folder, "--input", source, *greedy, "--output"],
        "resumable": ["translate", "--model", folder, "--input", source, *greedy, "--resumable", "--output"],
        "score": ["score", "--model", folder, "--source", source, "--target", source, "--output"],
        "average": ["average", "--checkpoints", folder, "--output_dir"],
        "convert": ["convert", "--to", "marian", "--model", folder, "--output_dir"],
    }


@pytest.mark.parametrize("command", ["translate", "resumable", "score", "average", "convert"])
def test_without_room_for_it_no_output_appears_and_the_old_one_stays(capsys, tmp_path, folder, text, command):
    output = tmp_path / "output"
    if command in ("translate", "resumable", "score"):
        output.write_text("the old one\n", encoding="utf-8")
    before = contents(tmp_path)
    with room_for(40):
        code, errors = run(capsys, *writers(folder, text["--train_source"])[command], output)
    assert (code, len(errors)) == (2, 1), errors
    assert "File too large" in errors[0]
    assert {name: digest for name, digest in contents(tmp_path).items() if ".parts" not in name} == before


@pytest.mark.parametrize("argv", [["--help"], ["translate"]], ids=["help", "translate"])
def test_standard_output_that_takes_nothing_is_one_line(folder, text, argv):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    if argv == ["translate"]:
        argv = writers(folder, text["--train_source"])["translate"][:-1]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent), "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, cli.__file__, *map(str, argv)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "No space left on device" in done.stderr


def test_a_read_only_disk_is_told_before_any_work(capsys, tmp_path, folder, text):
    with disk(tmp_path / "disk", "size=1m,ro") as path:
        train = ["train", *flags(text), *SMALL, *QUICK, "--max_steps", "1", "--output_dir"]
        for command in (*writers(folder, text["--train_source"]).values(), train):
            code, errors = run(capsys, *command, path / "output")
            assert (code, len(errors)) == (2, 1), errors
            assert f"no permission to write into {path}" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [8, 60, 400, 500, 560, 640, 700, 712])
def test_a_disk_that_fills_up_in_training_leaves_the_last_checkpoint_whole(capsys, tmp_path, text, kilobytes):
    """Wherever the disk ends: at the vocabulary, in a checkpoint's weights, code or optimizer, or after it."""
    with disk(tmp_path / "disk", f"size={kilobytes}k") as path:
        steps = ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
        train = ["train", *flags(text), *SMALL, *QUICK, *steps, "--output_dir", path / "run"]
        code, errors = run(capsys, *train)
        errors = [line for line in errors if "INFO" not in line]
        assert (code, len(errors)) == (2, 1), errors
        assert "No space left on device" in errors[0] or "as on a full disk" in errors[0]
        last = last_whole_checkpoint(path / "run")
        assert last is None or last in errors[0]
        shutil.copytree(path, tmp_path / "larger")
    if last is not None:
        assert run(capsys, *train[:-1], tmp_path / "larger" / "run", "--resume_from_checkpoint", "true")[0] == 0


class FromTheFirstCheckpointOn(TrainerCallback):
    """Leaves no room for files of more than `size` bytes once a checkpoint is written."""

    def __init__(self, stack: contextlib.ExitStack, size: int):
        self.stack, self.size = stack, size

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 5:
            self.stack.enter_context(room_for(self.size))


@pytest.mark.parametrize("size", [5000, 20_000], ids=["weights", "optimizer"])
def test_a_checkpoint_without_room_for_it_names_the_one_to_go_on_from(tmp_path, size):
    model, trainer = resumable(tmp_path)
    with contextlib.ExitStack() as stack:
        trainer.add_callback(FromTheFirstCheckpointOn(stack, size))
        with pytest.raises(OSError, match="the checkpoint of update 10 could not be written") as raised:
            trainer.train()
    assert f"The last whole checkpoint is {tmp_path / 'checkpoint-5'}" in str(raised.value)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


# --- Runs that diverge -----------------------------------------------------------------------------------------------


class PoisonedAt(TrainerCallback):
    """Makes the loss, the gradient or the weights of one update infinite or undefined."""

    def __init__(self, model, update: int, what: str, value: float):
        self.model, self.update, self.what, self.value, self.now = model, update, what, value, False
        self.weights: dict[str, torch.Tensor] = {}
        if what == "loss":
            model.register_forward_hook(self.poison_loss)
        elif what == "gradient":
            model.get_input_embeddings().weight.register_hook(self.poison_gradient)

    def poison_loss(self, module, inputs, output):
        if self.now:
            output["loss"] = output["loss"] * self.value
        return output

    def poison_gradient(self, gradient):
        if self.now:
            gradient = gradient.clone()
            gradient[7, 3] = self.value
        return gradient

    def on_step_begin(self, args, state, control, **kwargs):
        self.now = state.global_step + 1 == self.update
        if self.now:
            self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def on_step_end(self, args, state, control, **kwargs):
        if self.now and self.what == "weights":
            with torch.no_grad():
                self.model.get_input_embeddings().weight[3, 1] = self.value


@pytest.mark.parametrize(
    "what, value, update, told",
    [
        ("loss", math.nan, 7, "the loss of update 7 is nan"),
        ("loss", math.inf, 7, "the loss of update 7 is inf"),
        ("gradient", -math.inf, 7, "the gradient of update 7 is infinite or undefined"),
        ("weights", math.nan, 10, "update 10 left weights that are infinite or undefined"),
        ("weights", math.inf, 12, "update 12 left weights that are infinite or undefined"),
    ],
    ids=["loss nan", "loss inf", "gradient", "weights saved", "weights last"],
)
def test_a_run_that_diverges_stops_and_leaves_the_last_checkpoint_as_it_was(tmp_path, what, value, update, told):
    """save_total_limit 1: a checkpoint of lost weights would take the place of the good one."""
    model, trainer = resumable(tmp_path, save_total_limit=1)
    poison = PoisonedAt(model, update, what, value)
    trainer.add_callback(poison)
    good: dict[str, str] = {}

    class Remember(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            good.clear()
            good.update(contents(tmp_path))

    trainer.add_callback(Remember())
    with pytest.raises(FloatingPointError, match=told) as raised:
        trainer.train()
    last = tmp_path / f"checkpoint-{10 if update > 10 else 5}"
    assert f"The last whole checkpoint is {last}" in str(raised.value)
    assert good == contents(tmp_path)
    assert last_whole_checkpoint(tmp_path) == str(last)
    if what != "weights":
        for name, weights in model.state_dict().items():
            assert torch.equal(weights, poison.weights[name]), name


def test_a_training_that_diverges_is_one_line_and_saves_no_model(capsys, tmp_path, text):
    steps = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "1", "--lr_scheduler_type", "constant"]
    quick = [*QUICK[:-1], "1e30"]
    code, errors = run(capsys, "train", *flags(text), *SMALL, *quick, *steps, "--output_dir", tmp_path / "run")
    errors = [line for line in errors if "INFO" not in line]
    assert (code, len(errors)) == (2, 1), errors
    assert "training has diverged: " in errors[0]
    assert not (tmp_path / "run" / "model.safetensors").exists()


# --- Processes that die ----------------------------------------------------------------------------------------------


class KillsAWorker(TrainerCallback):
    """SIGKILL to a process that this one started."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 9:  # in the midst of an epoch
            children = multiprocessing.active_children()
            os.kill(children[-1].pid, signal.SIGKILL)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_of_the_loader_that_is_killed_is_told_with_the_way_on(tmp_path, workers):
    _, trainer = resumable(tmp_path, dataloader_num_workers=workers, max_steps=2000, save_steps=2000)
    trainer.args.save_steps = trainer.state.save_steps = 5
    trainer.add_callback(KillsAWorker())
    with pytest.raises(ChildProcessError, match="a worker process of the data loader died at update") as raised:
        trainer.train()
    assert last_whole_checkpoint(tmp_path) in str(raised.value)


class Reports(TrainerCallback):
    """Sends a byte through a pipe after each update."""

    def __init__(self, connection):
        self.connection = connection

    def on_step_end(self, args, state, control, **kwargs):
        self.connection.send_bytes(b".")


def train_to_the_end(folder: Path, max_steps: int, connection) -> None:
    """Body of a process that is killed: starts a run, or goes on with it."""
    torch.set_num_threads(1)
    resumes = last_whole_checkpoint(folder) is not None
    settings = {"max_steps": max_steps, "save_steps": 2, "save_total_limit": 3}
    model, trainer = resumable(folder, seed=5 if resumes else 0, **settings)
    trainer.add_callback(Reports(connection))
    trainer.train(resume_from_checkpoint=True if resumes else None)
    torch.save([model.state_dict(), logged(trainer, "loss")], folder / "end.pt")


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_bit_identical_with_an_undisturbed_one(tmp_path):
    """SIGKILL at moments by lot: every other one while a checkpoint is being written, the rest anywhere."""
    kills, lot = 20 if FULL else 3, random.Random(6)
    max_steps = 14 * kills
    context = multiprocessing.get_context("forkserver")  # one that never computed a gradient, so that its children may
    context.set_forkserver_preload(["conftest", "test_training"])

    def start(folder: Path):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=train_to_the_end, args=(folder, max_steps, theirs))
        process.start()
        theirs.close()
        return process, ours

    def finish(folder: Path) -> tuple[dict[str, torch.Tensor], list[float], float]:
        began = time.perf_counter()
        process, connection = start(folder)
        with contextlib.suppress(EOFError):
            while True:
                connection.recv_bytes()
        process.join(500)
        assert process.exitcode == 0
        return *torch.load(folder / "end.pt", weights_only=True), time.perf_counter() - began

    expected, expected_losses, seconds = finish(tmp_path / "whole")
    folder, half_written = tmp_path / "killed", 0
    for number in range(kills):
        known = set(folder.glob("checkpoint-*"))
        process, connection = start(folder)
        for _ in range(lot.randint(1, 8)):
            connection.recv_bytes()
        if number % 2 == 0:
            known |= set(folder.glob("checkpoint-*"))
            while process.is_alive() and not set(folder.glob("checkpoint-*")) - known:
                time.sleep(0.0002)
            time.sleep(lot.uniform(0, 0.02))
        else:
            time.sleep(lot.uniform(0, 2 * seconds / max_steps))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run was over before it could be killed"
        connection.close()
        half_written += any(fault_of_checkpoint(path) for path in folder.glob("checkpoint-*"))
    weights, losses, _ = finish(folder)
    assert half_written >= kills // 5
    assert losses == expected_losses
    assert len(losses) == max_steps
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
