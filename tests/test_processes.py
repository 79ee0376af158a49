"""Training in several processes: on with another number of them, sharded models, and two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

import vanilla_transformer_cli
from test_train_command import QUICK, SMALL, files, flags, launched, trainer_state  # noqa: F401
from test_training import arguments


SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train.py"


def common(files, *more: str) -> list[str]:  # noqa: F811
    """Arguments of a short run without dropout, whose losses are all logged."""
    arguments = [*flags(files, "--train"), *SMALL, *QUICK, "--tokens_per_batch", "200", "--logging_steps", "1"]
    arguments[arguments.index("dropout=0.1")] = "dropout=0.0"
    return [*arguments, "--learning_rate", "0.001", *more]


def losses_of(folder: Path) -> list[float]:
    return [entry["loss"] for entry in trainer_state(folder)["log_history"] if "loss" in entry]


def assert_same_run(one: Path, other: Path, updates: int) -> None:
    """Losses and weights in float32."""
    assert len(losses_of(one)) == updates
    assert losses_of(other) == pytest.approx(losses_of(one), rel=1e-6, abs=1e-6)
    before, after = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6, msg=name)


# --- Another number of processes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, files, processes):  # noqa: F811
    """Processes x accumulation stay 2; the checkpoint lies in the midst of an epoch."""
    steps = ["--save_strategy", "steps", "--save_steps", "7", "--max_steps", "12"]
    arguments = common(files, *steps)
    first, then = ([*arguments, "--gradient_accumulation_steps", str(2 // each)] for each in processes)
    launched(processes[0], *first, "--output_dir", tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint-7"
    assert trainer_state(checkpoint)["epoch"] % 1 > 0
    launched(processes[1], *then, "--output_dir", tmp_path / "rest", "--resume_from_checkpoint", checkpoint)
    assert_same_run(tmp_path / "whole", tmp_path / "rest", 12)


# --- Sharded models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "accelerate"])
def test_sharding_without_an_accelerator_is_refused_not_left_out(tmp_path, monkeypatch, how):
    """accelerate would train whole copies there, as if nothing had been said."""
    if how == "accelerate":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="on a processor accelerate knows none"):
        arguments(tmp_path, **({"fsdp": True} if how == "argument" else {}))


SHARDED = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import conftest
from small_models import small_model
from test_training import collated, random_pairs
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
model = small_model(std=0.1).train()
assert model.lm_head.weight is model.model.encoder.embed_tokens.weight is model.model.decoder.embed_tokens.weight
if count > 1:
    mesh = init_device_mesh("cpu", (count,))
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = sum(each.to_local().numel() for each in model.parameters())
    assert own < 0.7 * sum(each.numel() for each in model.parameters())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for update in range(6):
    rows = list(random_pairs([(5, 6)] * 4, seed=100 * update))
    batch = collated(rows[rank * 4 // count : (rank + 1) * 4 // count])
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean / count)
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
whole = get_model_state_dict(model, options=options) if count > 1 else model.state_dict()
if rank == 0:
    small_model().save_pretrained(sys.argv[1], state_dict=whole)
    torch.save(torch.stack(losses), sys.argv[1] + "/losses.pt")
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(*command: object, prefix: tuple[str, ...] = (), **settings: object) -> subprocess.Popen:
    """A launcher of torch with such settings, for the processor."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(vanilla_transformer_cli.__file__).parent)
    flags_of_launcher = [f"--{name}={value}" for name, value in settings.items()]
    line = [*prefix, sys.executable, "-m", "torch.distributed.run", *flags_of_launcher, *map(str, command)]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_a_sharded_model_with_its_three_tied_matrices_trains_as_a_whole_one(tmp_path):
    """FSDP2 of torch itself on two processes: equal losses, half the weights in each, one whole folder saved."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    for count in (1, 2):
        with torchrun(
            script, tmp_path / str(count), rdzv_backend="c10d", rdzv_endpoint="localhost:0", nproc_per_node=count
        ) as process:
            output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
    one, two = (torch.load(tmp_path / name / "losses.pt", weights_only=True) for name in ("1", "2"))
    assert one[-1] < one[0]
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-6)
    before, after = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).state_dict() for name in ("1", "2"))
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6, msg=name)


# --- Two machines ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts():
    """Two network namespaces with a cable between them, as (namespace, device, address) each."""
    number = os.getpid() % 10_000
    hosts = [
        (f"host{number}{name}", f"veth{number}{name}", f"10.99.{number % 250}.{last}") for name, last in ("a1", "b2")
    ]

    def ip(*command: str) -> bool:
        try:
            done = subprocess.run(["ip", *command], capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0

    try:
        made = all(ip("netns", "add", namespace) for namespace, _, _ in hosts)
        made = made and ip("link", "add", hosts[0][1], "type", "veth", "peer", "name", hosts[1][1])
        for namespace, device, address in hosts:
            made = made and ip("link", "set", device, "netns", namespace)
            made = made and ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            made = made and ip("-n", namespace, "link", "set", device, "up")
            made = made and ip("-n", namespace, "link", "set", "lo", "up")
        if not made:
            pytest.skip("this process may not make network namespaces, or there is no iproute2")
        yield hosts
    finally:
        for namespace, _, _ in hosts:
            ip("netns", "del", namespace)


@pytest.mark.slow
def test_two_hosts_train_as_one_process_with_accumulation_of_two(tmp_path, files, two_hosts):  # noqa: F811
    """torchrun on each of two hosts that see each other by a network only (and, as users have it, one file system)."""
    given = common(files, "--max_steps", "8", "--save_strategy", "no")
    launched(1, *given, "--gradient_accumulation_steps", "2", "--output_dir", tmp_path / "one")
    running = []
    for rank, (namespace, device, _) in enumerate(two_hosts):
        inside = ("ip", "netns", "exec", namespace, "env", f"GLOO_SOCKET_IFNAME={device}")
        place = {"nnodes": 2, "node_rank": rank, "nproc_per_node": 1}
        place |= {"master_addr": two_hosts[0][2], "master_port": 29531}
        command = [SCRIPT, "--ddp_backend", "gloo", *given, "--output_dir", tmp_path / "two"]
        running.append(torchrun(*command, prefix=inside, **place))
    outputs = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert_same_run(tmp_path / "one", tmp_path / "two", 8)
