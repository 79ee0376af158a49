"""The demo: what it saves opens in the pipeline, what it reports can be counted again, nothing half-made is left."""

import json
import re

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, pipeline

from small_models import small_model, words
from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands import demo
from vanilla_transformer.commands.demo import (
    demo_parser,
    fastest_thread_count,
    folder_in_the_making,
    main,
    readable,
    score,
)
from vanilla_transformer.corpora import CorpusPart, generate_numbers_corpus
from vanilla_transformer.translation import translate_lines


SHORT = ["--max_steps", "3", "--train_size", "1500", "--test_size", "8"]


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory):
    """The folder of a demo that hardly trains, and what it printed on stdout and stderr."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "saved"
    capture = pytest.MonkeyPatch()
    printed: list[str] = []
    capture.setattr("builtins.print", lambda *texts, **_: printed.append(" ".join(map(str, texts))))
    try:
        assert main([*SHORT, "--output_dir", str(folder), "--seed", "5"]) == 0
    finally:
        capture.undo()
    return folder, "\n".join(printed)


def test_the_folder_opens_in_the_pipeline_and_translates_as_the_model_does(short_demo):
    folder, _ = short_demo
    translate = pipeline("translation", model=str(folder))
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [best.text for best, *_ in translate_lines(model, tokenizer, ["one hundred and five"])]
    assert [result["translation_text"] for result in translate("one hundred and five")] == expected


def test_the_reported_scores_are_those_of_the_saved_model(short_demo):
    folder, printed = short_demo
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    test = generate_numbers_corpus(train_size=1500, validation_size=0, test_size=8, seed=5).test
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    translations = [best.text for best, *_ in translate_lines(model, tokenizer, test.sources)]
    again = score(test, translations)
    assert {name: results[name] for name in again} == again
    assert results["training"]["updates"] == 3
    assert f"exact match {results['exact_match']:.1f} %" in printed
    assert f"BLEU        {results['bleu']['score']:.2f}" in printed
    assert "version:" in results["bleu"]["signature"]


def test_five_translations_of_held_out_lines_are_printed(short_demo):
    _, printed = short_demo
    test = generate_numbers_corpus(train_size=1500, validation_size=0, test_size=8, seed=5).test
    shown = re.findall(r"^  (.+)\n    -> ", printed, flags=re.M)
    assert len(shown) == len(set(shown)) == 5
    assert set(shown) <= set(test.sources)


def test_the_attention_of_a_sentence_is_drawn(short_demo):
    folder, _ = short_demo
    with Image.open(folder / "attention.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 200


def test_nothing_else_is_left_behind(short_demo):
    folder, _ = short_demo
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert not [file for file in folder.iterdir() if file.is_dir()], "no checkpoints"


def test_exact_match_counts_equal_lines_of_each_kind():
    lines = CorpusPart(["a", "b", "c", "d"], ["eins", "zwei", "drei", "vier"], ["number", "number", "time", "time"])
    results = score(lines, ["eins", "zwei ", "drei", "vier"])
    assert results["lines"] == 4
    assert results["exact_match"] == 75.0
    assert results["exact_match_by_kind"] == {"number": 50.0, "time": 100.0}
    assert "exact match 75.0 %  (number 50.0, time 100.0)" in readable({**results, "training": {"seconds": 1.0}})


def test_a_failure_leaves_an_older_folder_as_it_was(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    (folder / "notes.txt").write_text("mine")

    def interrupted():
        with folder_in_the_making(folder) as making:
            (making / "config.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [file.name for file in tmp_path.iterdir()] == ["demo"]
    assert (folder / "config.json").read_text() == "old"
    with folder_in_the_making(folder) as making:
        (making / "config.json").write_text("new")
    assert (folder / "config.json").read_text() == "new"
    assert (folder / "notes.txt").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["demo"]


def test_missing_matplotlib_is_told_before_the_training(monkeypatch, tmp_path):
    def missing(*_):
        raise ImportError('pip install "vanilla-transformer[demo]"')

    monkeypatch.setattr(demo, "attention_figure", missing)
    monkeypatch.setattr(demo, "train", lambda *_, **__: pytest.fail("it trained"))
    with pytest.raises(ImportError, match="vanilla-transformer"):
        main([*SHORT, "--output_dir", str(tmp_path / "demo")])


@pytest.mark.parametrize("name", ["file", "file/below", "file/below/that"])
def test_an_output_folder_that_is_a_file_is_one_line_and_exit_code_2(tmp_path, capsys, name):
    (tmp_path / "file").write_text("something good")
    with pytest.raises(SystemExit) as exit_of:
        demo_parser().parse_args(["--output_dir", str(tmp_path / name)])
    assert exit_of.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("vanilla-transformer demo: error: argument --output_dir: ")
    assert "is a file" in error
    assert error.count("\n") == 1
    assert (tmp_path / "file").read_text() == "something good"


@pytest.mark.parametrize("gain, expected", [(5.0, True), (0.6, False)])
def test_bfloat16_is_used_only_where_it_is_faster(tmp_path, monkeypatch, gain, expected):
    used = []

    class Stop(Exception):
        pass

    def arguments(**settings):
        used.append(settings["bf16"])
        raise Stop

    monkeypatch.setattr(demo, "bfloat16_gain", lambda: gain)
    monkeypatch.setattr(demo, "VanillaTransformerTrainingArguments", arguments)
    with pytest.raises(Stop):
        main([*SHORT, "--output_dir", str(tmp_path / "demo")])
    assert used == [expected]


def test_the_faster_number_of_threads_is_taken_and_the_model_left_as_it_was(monkeypatch):
    model = small_model(dropout=0.1)
    batch = {"input_ids": words(2, 5), "labels": words(2, 4)}
    now = {1: 0.0, "threads": 4}
    monkeypatch.setattr(torch, "get_num_threads", lambda: now["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: now.update(threads=threads))

    def clock(seconds_of):
        def perf_counter():
            now[1] += seconds_of[now["threads"]]
            return now[1]

        return perf_counter

    for seconds_of, fastest in (({1: 1.0, 4: 5.0}, 1), ({1: 3.0, 4: 2.0}, 4)):
        monkeypatch.setattr(demo.time, "perf_counter", clock(seconds_of))
        assert fastest_thread_count(model, batch, repetitions=1) == fastest
        assert now["threads"] == 4
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_the_demo_translates_95_of_100_held_out_lines_exactly(tmp_path):
    assert main(["--output_dir", str(tmp_path / "demo")]) == 0
    results = json.loads((tmp_path / "demo" / "results.json").read_text(encoding="utf-8"))
    assert results["exact_match"] >= 95
    translate = pipeline("translation", model=str(tmp_path / "demo"))
    assert translate("one hundred and five")[0]["translation_text"] == "einhundertfünf"
