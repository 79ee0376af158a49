"""docs/walkthrough.md is what the script writes, and the shapes in it are those that the configuration asks for."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from translators import varied_model


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "walkthrough.md"


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("walkthrough_script", ROOT / "scripts" / "walkthrough.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_measured_numbers(page: str) -> str:
    """Probabilities differ from machine to machine in their last digits."""
    return re.sub(r"\| 0\.\d{3} \|", "| p |", page)


def test_the_page_is_what_the_script_writes(script, tmp_path):
    # The whole way: a model that does not know the sentence by heart would write another translation.
    assert script.main(["--output", str(tmp_path / "page.md")]) == 0
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert written.endswith("> `drei blaue Hüte`\n")
    committed = PAGE.read_text(encoding="utf-8")
    assert without_measured_numbers(written) == without_measured_numbers(committed)
    assert committed.count("| 0.") == 4, "steps"


def test_shapes_are_those_of_the_configuration(script, tiny_tokenizer):
    model = varied_model(tiny_tokenizer, num_heads=3, d_k=5, d_v=7, d_model=16, d_ff=24)
    text = "The red train leaves at seven."
    page = script.page(model, tiny_tokenizer, text, "a command")
    source = len(tiny_tokenizer(text)["input_ids"])
    target = len(model.generate(**tiny_tokenizer(text, return_tensors="pt"))[0]) - 1
    assert source != target
    encoder, decoder = page.split("## 3. ")[1].split("## 4. ")
    own, cross = decoder.split("Then attention of the target to the memory")
    words = len(tiny_tokenizer)
    for part, asks, answers in ((encoder, source, source), (own, target, target), (cross, target, source)):
        memory = "memory" if part is cross else "x"
        for row in (
            f"| Q = x W^Q | (1, {asks}, 15) |",
            f"| K = {memory} W^K | (1, {answers}, 15) |",
            f"| V = {memory} W^V | (1, {answers}, 21) |",
            f"| Q, in heads | (1, 3, {asks}, 5) |",
            f"| K, in heads | (1, 3, {answers}, 5) |",
            f"| V, in heads | (1, 3, {answers}, 7) |",
            f"| Q K^T / sqrt(d_k) | (1, 3, {asks}, {answers}) |",
            f"| weights times V | (1, 3, {asks}, 7) |",
            f"| heads side by side | (1, {asks}, 21) |",
            f"| times W^O | (1, {asks}, 16) |",
        ):
            assert row in part, row
    assert f"| max(0, x W_1 + b_1), equation (2) | (1, {source}, 24) |" in encoder
    assert f"| times the matrix: logits | (1, {target}, {words}) |" in cross
    assert f"| the embedding matrix | ({words}, 16) |" in page
    assert "after the first step (1, 3, 1, 5) of the target in each layer" in page
    assert f"and (1, 3, {source}, 5) of the memory" in page
    assert model.config._attn_implementation == "sdpa", "as it was"


def test_a_model_with_pruned_heads_is_refused_in_one_line(script, tmp_path, capsys, monkeypatch, tiny_tokenizer):
    model = varied_model(tiny_tokenizer, pruned_heads={"cross": [[0], [], []]})
    monkeypatch.setattr(script, "small_translator", lambda: (model, tiny_tokenizer))
    assert script.main(["--output", str(tmp_path / "page.md")]) == 2
    error = capsys.readouterr().err
    assert "heads were taken out of this model" in error
    assert error.count("\n") == 1


def test_a_blank_text_is_refused_in_one_line(script, tmp_path, capsys, monkeypatch, tiny_tokenizer):
    monkeypatch.setattr(script, "small_translator", lambda: (varied_model(tiny_tokenizer), tiny_tokenizer))
    assert script.main(["--text", " ", "--output", str(tmp_path / "page.md")]) == 2
    error = capsys.readouterr().err
    assert "the text is blank" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "page.md").exists()
