"""scripts/exchange.py: every direction is in the table, with figures that show what is equal and what is not."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from conftest import TINY_CORPUS
from small_models import small_model
from translators import varied_model
from vanilla_transformer.evaluation import corpus_scores
from vanilla_transformer.translation import load_translator, translate_lines


SPEC = importlib.util.spec_from_file_location("exchange", Path(__file__).parents[1] / "scripts" / "exchange.py")
exchange = importlib.util.module_from_spec(SPEC)
sys.modules["exchange"] = exchange  # where its dataclasses look for their types
SPEC.loader.exec_module(exchange)

INWARD = ["marian in", "nn_transformer in", "fairseq in", "annotated in", "joeynmt in"]
SOURCES = [source[:12] for source, _ in TINY_CORPUS[:4]] + [""]
REFERENCES = [target for _, target in TINY_CORPUS[:4]] + [""]


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Arguments that name a text and its translation."""
    for name, lines in (("source", SOURCES), ("reference", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]


def saved(model, tokenizer, tmp_path) -> list[str]:
    """Arguments that name a model."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return ["--model", str(tmp_path / "model")]


def rows_of(tmp_path, capsys, arguments: list[str]) -> dict[str, dict]:
    """Rows of the JSON by direction; the table has the same ones."""
    short = ["--rounds", "1", "--max_new_tokens", "12", "--num_beams", "3", "--json", str(tmp_path / "table.json")]
    assert exchange.main([*arguments, *short]) == 0
    rows = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))["rows"]
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:] if line.startswith("|")] == [
        row["direction"] for row in rows
    ]
    return {row["direction"]: row for row in rows}


def only(*names: str) -> list[str]:
    return [each for name in names for each in ("--only", name)]


def test_weights_that_come_in_under_other_names_are_the_same_model(tiny_tokenizer, tmp_path, files, capsys):
    model = small_model(vocab_size=len(tiny_tokenizer), norm_first=True, tie_word_embeddings=False, seed=5)
    rows = rows_of(tmp_path, capsys, [*saved(model, tiny_tokenizer, tmp_path), *files, *only(*INWARD)])
    assert set(rows) == {"ours", *INWARD}
    # Marian is post-norm.
    assert rows.pop("marian in")["bleu"] is None
    for name in INWARD[1:]:
        # JoeyNMT adds 1e-6 to variances, which here are around 1, and not 1e-5.
        assert rows[name]["difference"] < (1e-2 if name == "joeynmt in" else 1e-4), name
        assert (rows[name]["greedy"], rows[name]["beams"]) == (5, 5), name
    assert "learned" not in rows["nn_transformer in"]["note"]
    translated = [
        each[0].text
        for each in translate_lines(
            *load_translator(str(tmp_path / "model")),
            SOURCES,
            num_beams=3,
            length_penalty=0.0,
            early_stopping=False,
            max_new_tokens=12,
        )
    ]
    assert len(set(translated)) >= 4
    bleu = corpus_scores(translated, [REFERENCES])["bleu"]["score"]
    assert all(row["bleu"] == pytest.approx(bleu) for row in rows.values())


def test_what_is_not_the_same_is_seen(tiny_tokenizer, tmp_path, files, capsys, monkeypatch):
    """One matrix of one layer is changed on the way."""
    write = exchange.WRITERS["nn_transformer"]

    def write_another(model, tokenizer, folder):
        write(model, tokenizer, folder)
        state = torch.load(folder / "model.pt", weights_only=True)
        state["transformer.decoder.layers.1.multihead_attn.out_proj.weight"] *= -1
        torch.save(state, folder / "model.pt")

    monkeypatch.setitem(exchange.WRITERS, "nn_transformer", write_another)
    model = saved(varied_model(tiny_tokenizer), tiny_tokenizer, tmp_path)
    rows = rows_of(tmp_path, capsys, [*model, *files, *only("nn_transformer in", "fairseq in")])
    assert rows["nn_transformer in"]["difference"] > 0.1
    assert rows["nn_transformer in"]["beams"] < 5
    # This model has a bias in the output, for which fairseq has no place.
    assert rows["fairseq in"]["bleu"] is None
    assert rows["fairseq in"]["note"] == "the output there has no bias"


@pytest.mark.slow
def test_every_direction_is_in_the_table(tiny_tokenizer, tmp_path, files, capsys):
    pytest.importorskip("ctranslate2")
    pytest.importorskip("onnxruntime")
    model = saved(varied_model(tiny_tokenizer), tiny_tokenizer, tmp_path)
    rows = rows_of(tmp_path, capsys, [*model, *files, "--folder", str(tmp_path / "kept")])
    engines = [f"{engine} {precision}" for engine in ("ctranslate2", "onnx") for precision in ("float32", "int8")]
    assert set(rows) == {"ours", "marian out", *INWARD, *engines}
    for name in ("nn_transformer in", "annotated in", *engines):
        row = rows[name]
        is_exact = "int8" not in name
        assert (row["difference"] < 2e-3) == is_exact, name  # of logits that reach some hundreds
        if is_exact:
            assert (row["greedy"], row["beams"]) == (5, 5), name
        files_of_it = (tmp_path / "kept" / (name.replace(" out", ""))).rglob("*")
        assert row["megabytes"] == pytest.approx(sum(each.stat().st_size for each in files_of_it) / 1e6)
        assert row["speed"] > 0


def test_a_mistake_is_told_in_one_line(tiny_tokenizer, tmp_path, files, capsys):
    (tmp_path / "reference").write_text("one\n", encoding="utf-8")
    assert exchange.main(["--model", str(tmp_path / "none"), *files]) == 2
    error = capsys.readouterr().err
    assert "has 5 lines and" in error
    assert error.count("\n") == 1
