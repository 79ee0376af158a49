"""scripts/bench.py: the operations that it divides by are those that torch counts."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from small_models import small_model, words


SPEC = importlib.util.spec_from_file_location("bench", Path(__file__).parents[1] / "scripts" / "bench.py")
bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench)


@pytest.mark.parametrize("overrides", [{}, {"d_k": 6, "d_v": 5}, {"encoder_layers": 4, "d_ff": 40, "vocab_size": 67}])
def test_operations_of_an_update_are_those_that_torch_counts(overrides):
    model = small_model(attn_implementation="eager", **overrides).train()
    labels = words(3, 7)
    labels[0, 4:] = -100  # no logits there
    batch = {"input_ids": words(3, 5), "labels": labels}
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    # The loss also multiplies the states by the sum of the matrix's rows, d_model numbers, which nobody would count.
    mean_logits = 2 * model.config.d_model * bench.target_tokens(batch)
    assert counter.get_total_flops() == pytest.approx(bench.operations(model.config, batch), abs=mean_logits)


def test_every_engine_trains_on_the_same_batches(capsys):
    command = [
        "train",
        "--precision",
        "float32",
        "--shape",
        "tiny",
        "--vocab_size",
        "300",
        "--tokens_per_batch",
        "256",
        "--updates",
        "1",
    ]
    assert bench.main([*command, "--rounds", "1"]) == 0
    table = capsys.readouterr().out
    for engine in ("ours", "marian sdpa", "marian eager", "nn.Transformer"):
        assert f"| {engine} |" in table
    assert torch.get_default_dtype() == torch.float32
