"""scripts/bench.py: the operations that it divides by are those that torch counts."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import TINY_CORPUS
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "model"
    model = small_model(vocab_size=len(tiny_tokenizer))
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("text")
    for side in (0, 1):
        (folder / str(side)).write_text("".join(f"{pair[side]}\n" for pair in TINY_CORPUS), encoding="utf-8")
    return {"source": str(folder / "0"), "target": str(folder / "1")}


def test_every_engine_translates_the_same_file_by_the_same_rules(capsys, saved, text):
    """Marian with our weights finds the very lines that we find."""
    command = ["decode", "--model", str(saved), "--source", text["source"], "--target", text["target"]]
    command += ["--rounds", "1", "--length_penalty", "0", "--engines", "marian", "--threads", "1"]
    assert bench.main(command) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    names, ours, *others = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "---" not in row]
    assert [ours[0], *(other[0] for other in others)] == [
        "ours",
        "marian generate(), 8 rows",
        "marian generate(), 64 rows, sorted",
    ]
    place = names.index("lines as ours")
    assert [row[place] for row in others] == [f"{len(TINY_CORPUS)} of {len(TINY_CORPUS)}"] * 2
    bleu = names.index("BLEU")
    assert len({row[bleu] for row in (ours, *others)}) == 1


@pytest.mark.slow
def test_growth_is_measured_to_the_512th_token_and_leaves_the_model_as_it_was(capsys, saved, text):
    command = ["growth", "--model", str(saved), "--source", text["source"], "--lines", "3", "25", "--threads", "1"]
    assert bench.main(command) == 0
    out = capsys.readouterr().out
    assert "| decoder, tokens 257 to 512 | 512 |" in out
    assert "| lines translated | 25 |" in out
    exponent = float(out.split("fitted exponent of the length |")[1].split("|")[1])
    assert 0.3 < exponent < 2.5, "of the cost of a row, between constant and more than quadratic"
