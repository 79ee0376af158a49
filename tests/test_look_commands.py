"""The commands `attention` and `prune`, and the script prune_curve.py, as a user calls them."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import vanilla_transformer_cli as cli
from browser import Page
from conftest import TINY_CORPUS
from small_models import small_model
from translators import varied_marian, varied_model
from vanilla_transformer.evaluation import corpus_scores
from vanilla_transformer.hub import TrainingRun
from vanilla_transformer.pruning import attentions_of, comparable_across_layers, head_importance
from vanilla_transformer.translation import load_translator, translate_lines
from vanilla_transformer.visualization import all_attentions_of


TEXT = "The red train"
SCRIPT = Path(__file__).parents[1] / "scripts" / "prune_curve.py"


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("looked_at")
    varied_model(tiny_tokenizer).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    run = TrainingRun(source_lang="en", target_lang="de", updates=7)
    run.add_evaluation({"name": "test", "bleu": {"score": 1.0, "signature": "x"}})
    run.save(path)
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("text")
    for name, side in zip(("source", "target"), zip(*TINY_CORPUS, strict=True), strict=True):
        (path / name).write_text("".join(line + "\n" for line in side), encoding="utf-8")
    return ["--source", str(path / "source"), "--target", str(path / "target")]


def run(capsys, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in this process."""
    try:
        code = cli.main(list(map(str, argv)))
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


def test_attention_writes_a_page_of_the_models_translation(capsys, folder, tmp_path):
    page = tmp_path / "a.html"
    code, out, err = run(capsys, "attention", "--model", folder, "--text", TEXT, "--output", page, "--layer", "0")
    assert (code, err) == (0, "")
    model, tokenizer = load_translator(folder)
    found = all_attentions_of(model, tokenizer, TEXT)
    assert out == f"{TEXT}\n  -> {found.target_text}\nsaved to {page}\n"
    data = Page(page.read_text(encoding="utf-8")).data
    assert data["start"] == {"kind": "cross", "layer": 0, "head": None}
    (sentence,) = data["sentences"]
    for kind, layers in found.weights.items():
        for layer, weights in enumerate(layers):
            np.testing.assert_allclose(sentence["attention"][kind][layer]["weights"], weights, atol=1e-4)


def test_attention_makes_one_page_of_all_lines_that_are_not_blank(capsys, monkeypatch, folder, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A dog\n\n12\n"), encoding="utf-8"))
    page = tmp_path / "a.html"
    assert run(capsys, "attention", "--model", folder, "--input", "-", "--output", page)[0] == 0
    assert [each["source"] for each in Page(page.read_text()).data["sentences"]] == ["A dog", "12"]


@pytest.mark.parametrize(
    "what",
    [
        ["--text", TEXT, "--target", "Der rote Zug", "--kind", "decoder", "--head", "1"],
        ["--text", TEXT, "--kind", "cross", "--layer", "-1", "--head", "3"],
        ["--positions", "30"],
        ["--curves"],
    ],
    ids=lambda what: " ".join(what),
)
def test_attention_draws(capsys, folder, tmp_path, what):
    state = {"global_step": 2, "log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    arguments = ["--curves", tmp_path] if what == ["--curves"] else ["--model", folder, *what]
    picture = tmp_path / "a.svg"
    code, out, err = run(capsys, "attention", *arguments, "--output", picture)
    assert (code, err) == (0, "")
    assert out.endswith(f"saved to {picture}\n")
    assert b"</svg>" in picture.read_bytes()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "M", "--text", "a", "--output", "a.txt"], "must end in one of .html, .png, .svg, .pdf, got"),
        (["--model", "M", "--positions", "9", "--output", "a.html"], "must end in one of .png, .svg, .pdf, got"),
        (["--model", "M", "--text", " ", "--output", "a.html"], "--text is blank"),
        (["--text", "a", "--output", "a.html"], "--model is missing"),
        (["--model", "M", "--curves", ".", "--output", "a.png"], "--model is not for it"),
        (["--curves", ".", "--output", "a.png"], "holds no log of a training"),
        (["--model", "M", "--positions", "9", "--head", "1", "--output", "a.png"], "--head: for --text and --input"),
        (["--model", "M", "--input", "two", "--target", "b", "--output", "a.html"], "--target is the translation of"),
        (["--model", "M", "--input", "two", "--output", "a.png"], "a picture shows one sentence, but --input has 2"),
        (["--model", "M", "--input", "blank", "--output", "a.html"], "blank has no text"),
        (["--model", "M", "--input", "many", "--output", "a.html"], "at most 100 sentences, but many has more"),
        (["--model", "M", "--text", "a", "--layer", "7", "--output", "a.html"], "layer must lie between -3 and 2"),
        (["--model", "M", "--text", "a", "--head", "4", "--output", "a.png"], "has the heads 0, 1, 2, 3, got head 4"),
        (["--model", "learned", "--positions", "6", "--output", "a.png"], "max_position_embeddings=5"),
        (["--model", "marian", "--positions", "6", "--output", "a.png"], "looks into models of this package"),
        (["--model", "M", "--output", "a.html"], "one of the arguments --text --input --positions --curves is req"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_attention_is_one_line(capsys, monkeypatch, folder, tiny_tokenizer, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"two": "a\nb\n", "blank": "\n \n", "many": "a\n" * 101}.items():
        Path(name).write_text(text)
    if arguments[1] in ("learned", "marian"):
        learned = {"position_embedding": "learned", "max_position_embeddings": 5, "vocab_size": len(tiny_tokenizer)}
        model = small_model(**learned) if arguments[1] == "learned" else varied_marian(tiny_tokenizer)
        model.save_pretrained(arguments[1])
        tiny_tokenizer.save_pretrained(arguments[1])
    code, out, err = run(capsys, "attention", *(folder if each == "M" else each for each in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(Path().glob("a.*"))


def test_prune_writes_the_smaller_model_and_what_it_measured(capsys, folder, files, tmp_path):
    output, table, picture = tmp_path / "smaller", tmp_path / "heads.json", tmp_path / "heads.png"
    more = ["--ranking", "layer_norm", "--json", table, "--picture", picture]
    code, out, err = run(
        capsys, "prune", "--model", folder, *files, "--keep_fraction", "0.5", "--output_dir", output, *more
    )
    assert (code, err) == (0, "")
    model, tokenizer = load_translator(folder)
    sources, targets = (list(side) for side in zip(*TINY_CORPUS, strict=True))
    heads = head_importance(model, tokenizer, sources, targets)
    ranked = comparable_across_layers(heads)
    written = json.loads(table.read_text())["heads"]
    assert [each["importance"] for each in written] == pytest.approx([each.importance for each in heads], rel=1e-4)
    assert [each["rank_by"] for each in written] == pytest.approx([each.importance for each in ranked], rel=1e-4)
    assert sum(each["kept"] for each in written) == 16
    smaller = AutoModelForSeq2SeqLM.from_pretrained(output)
    by_rank = sorted(written, key=lambda each: -each["rank_by"])
    best_of_layer = {(each["kind"], each["layer"]): each["head"] for each in reversed(by_rank)}
    assert all(each["kept"] for each in written if best_of_layer[each["kind"], each["layer"]] == each["head"])
    left = {(each["kind"], each["layer"], each["head"]) for each in written if each["kept"]}
    assert left == {
        (kind, layer, head) for kind, layer in attentions_of(smaller) for head in smaller.config.heads_of(kind, layer)
    }
    assert f"16 of 32 heads kept, {smaller.num_parameters():,} of {model.num_parameters():,} parameters" in out
    assert picture.stat().st_size > 1000
    assert "[ ] is taken out, each attention keeps at least one\n" in out
    card = (output / "README.md").read_text()
    assert "pruned_heads" in card
    record = TrainingRun.load(output)
    assert (record.updates, record.evaluations) == (7, [])
    # What was written translates, without a word on standard error.
    source = tmp_path / "text"
    source.write_text(TEXT + "\n")
    code, out, err = run(capsys, "translate", "--model", output, "--input", source)
    (expected,) = translate_lines(smaller, tokenizer, [TEXT])
    assert (code, out, err) == (0, expected[0].text + "\n", "")


def test_prune_keeps_the_precision_that_the_weights_are_stored_in(capsys, tiny_tokenizer, files, tmp_path):
    model = varied_model(tiny_tokenizer).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    tiny_tokenizer.save_pretrained(tmp_path / "half")
    arguments = [*files, "--heads_kept", "32", "--output_dir", tmp_path / "same"]
    assert run(capsys, "prune", "--model", tmp_path / "half", *arguments)[0] == 0
    same = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "same", dtype="auto")
    assert same.config.pruned_heads is None
    for name, weight in model.state_dict().items():
        assert same.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(same.state_dict()[name], weight), name


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--heads_kept", "7", "--output_dir", "new"], "--heads_kept 7 is 7 heads; the model has 32, and 8 of them"),
        (["--keep_fraction", "0.1", "--output_dir", "new"], "--keep_fraction 0.1 is 3 heads"),
        (["--keep_fraction", "1.5", "--output_dir", "new"], "must lie above 0 and be at most 1, got 1.5"),
        (["--heads_kept", "9"], "--output_dir is missing"),
        (["--importance_only", "--output_dir", "new"], "not with --importance_only"),
        (["--importance_only", "--picture", "a.gif"], "--picture must end in one of .png, .svg, .pdf, got a.gif"),
        (["--importance_only", "--json", "a.png", "--picture", "a.png"], "must name different files"),
        (["--importance_only", "--json", "-"], "'-' is not one"),
        ([], "one of the arguments --heads_kept --keep_fraction --importance_only is required"),
        (["--importance_only", "--model", "marian"], "holds a MarianMTModel; prune takes models of this package"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_in_prune_is_one_line(
    capsys, monkeypatch, folder, files, tiny_tokenizer, tmp_path, arguments, message
):
    monkeypatch.chdir(tmp_path)
    if "marian" in arguments:
        varied_marian(tiny_tokenizer).save_pretrained("marian")
        tiny_tokenizer.save_pretrained("marian")
    code, out, err = run(capsys, "prune", "--model", folder, *files, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("new").exists()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prune_curve_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_curve_begins_with_the_whole_model_and_ends_with_one_head_an_attention(
    script, capsys, folder, files, tmp_path
):
    test = ["--test_source", files[1], "--test_reference", files[3], "--num_beams", "1", "--points", "3"]
    assert script.main(["--model", folder, *files, *test, "--output_dir", str(tmp_path / "curve")]) == 0
    results = json.loads((tmp_path / "curve" / "curve.json").read_text())
    model, tokenizer = load_translator(folder)
    sources, targets = (list(side) for side in zip(*TINY_CORPUS, strict=True))
    texts = [best.text for best, *_ in translate_lines(model, tokenizer, sources, num_beams=1)]
    expected = corpus_scores(texts, [targets])["bleu"]["score"]
    assert set(results["orders"]) == {"importance", "random"}
    for points in results["orders"].values():
        assert [point["heads"] for point in points] == [32, 20, 8]
        assert points[0]["bleu"] == pytest.approx(expected)
        assert points[0]["parameters"] == model.num_parameters() > points[1]["parameters"] > points[2]["parameters"]
    assert (tmp_path / "curve" / "curve.png").stat().st_size > 1000
    capsys.readouterr()


@pytest.mark.parametrize(
    "least, most, points, expected",
    [(8, 32, 4, [32, 24, 16, 8]), (8, 10, 9, [10, 9, 8]), (5, 5, 3, [5]), (12, 48, 1, [48, 12])],
)
def test_the_numbers_of_heads_are_even_steps(script, least, most, points, expected):
    assert script.counts(least, most, points) == expected
