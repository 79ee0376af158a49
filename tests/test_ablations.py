"""`scripts/ablations.py`: rows of Table 3 trained on small text, kept, and put beside the paper's."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import vanilla_transformer_cli
from vanilla_transformer import VanillaTransformerConfig, list_presets
from vanilla_transformer.presets import TABLE_3
from vanilla_transformer.training import VanillaTransformerTrainer


ROOT = Path(__file__).parents[1]
NUMBERS = [("one", "ein"), ("two", "zwei"), ("three", "drei"), ("four", "vier"), ("six", "sechs")]
THINGS = [("trains", "Züge"), ("apples", "Äpfel"), ("rivers", "Flüsse"), ("gardens", "Gärten")]
ACTIONS = [("wait", "warten"), ("fall down", "fallen herunter"), ("are here", "sind hier")]
PAIRS = [
    tuple(" ".join([*words, "."]) for words in zip(*choice, strict=True))
    for choice in itertools.product(NUMBERS, THINGS, ACTIONS)
]
# d_model 16, eight heads of 2: B_dk32 has d_k 1, C_N2 two layers.
SHAPE = ["--shrink", "32", "--config_overrides", "encoder_layers=1", "decoder_layers=1"]
QUICK = ["--tokens_per_batch", "200", "--learning_rate", "0.02", "--warmup_steps", "10", "--vocab_size", "300"]
QUICK += ["--use_cpu", "true", "--disable_tqdm", "true", "--report_to", "none", "--generation_num_beams", "1"]
LAST = ["--save_strategy", "no", "--eval_strategy", "no"]


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("ablations_script", ROOT / "scripts" / "ablations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("text")
    found = {}
    for part, pairs in {"train": PAIRS[:50], "validation": PAIRS[5::7]}.items():
        for index, side in enumerate(("source", "target")):
            path = folder / f"{part}.{side}"
            path.write_text("".join(f"{pair[index]}\n" for pair in pairs), encoding="utf-8")
            found[f"--{part}_{side}"] = str(path)
    return found


def flags(files: dict[str, str]) -> list[str]:
    return [item for pair in files.items() for item in pair]


def cells(page: str) -> dict[str, list[str]]:
    """The first cell of each row of a Markdown table, and the others."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows[2:]}


def parameters_by_hand(vocab_size: int, d_k: int) -> int:
    """One layer a side of d_model 16, d_ff 64, eight heads with values of 2."""
    attention = 2 * 16 * 8 * d_k + 2 * 16 * 8 * 2
    feed_forward = 16 * 64 + 64 + 64 * 16 + 16
    return vocab_size * 16 + 3 * attention + 2 * feed_forward + 5 * 2 * 16


@pytest.fixture(scope="module")
def run(script, files, tmp_path_factory):
    """The folder of two rows of 80 updates, and what was printed."""
    output = tmp_path_factory.mktemp("ablations") / "table3"
    arguments = [*SHAPE, *QUICK, *LAST, *flags(files), "--max_steps", "80", "--output_dir", str(output)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert script.main(["--rows", "B_dk32", "base", *arguments]) == 0
    return output, printed.getvalue(), arguments


# --- A run ----------------------------------------------------------------------------------------------------------


def test_the_table_has_the_rows_in_the_papers_order_with_the_papers_figures_and_ours(run):
    output, page, _ = run
    assert page.startswith("Ours: SHRUNK")  # standard output has the page and nothing else
    table = cells(page)
    assert list(table) == ["base", "B_dk32"]
    results = {row["row"]: row for row in map(json.loads, (output / "results.jsonl").read_text().splitlines())}
    vocab_size = results["base"]["vocabulary"]
    for row, d_k in {"base": 2, "B_dk32": 1}.items():
        ours, expected = table[row], results[row]
        assert ours[0] == f"{parameters_by_hand(vocab_size, d_k):,}"
        assert ours[1:3] == [f"{expected['perplexity']:.2f}", f"{expected['bleu']:.1f}"]
    assert table["base"][5:] == ["65", "4.92", "25.8", "+0.00", "+0.0"]
    assert table["B_dk32"][5:] == ["60", "5.01", "25.4", "+0.09", "-0.4"]
    difference = results["B_dk32"]["bleu"] - results["base"]["bleu"]
    assert difference != 0
    assert table["B_dk32"][4] == f"{difference:+.1f}"
    assert table["B_dk32"][3] == f"{results['B_dk32']['perplexity'] - results['base']['perplexity']:+.2f}"


def test_the_page_says_that_the_shapes_are_shrunk_and_how_long_they_trained(run):
    _, page, _ = run
    assert "SHRUNK: d_model, d_ff, d_k and d_v are those of the paper divided by 32" in page
    assert "encoder_layers=1, decoder_layers=1 where the row does not say otherwise" in page
    assert "80 updates, vocabulary 300; validation text of 8 lines, beam 4, nrefs:1|case:mixed" in page


@pytest.mark.parametrize("row", ["base", "B_dk32"])
def test_perplexity_and_bleu_are_those_of_the_evaluate_command(run, row, files, tmp_path):
    output, _, _ = run
    report = tmp_path / "report.json"
    arguments = ["--source", files["--validation_source"], "--reference", files["--validation_target"]]
    model = ["--model", str(output / row), "--device", "cpu"]
    assert vanilla_transformer_cli.main(["evaluate", *model, *arguments, "--json", str(report)]) == 0
    expected = json.loads(report.read_text())
    (result,) = [
        each for each in map(json.loads, (output / "results.jsonl").read_text().splitlines()) if each["row"] == row
    ]
    assert result["bleu"] == pytest.approx(expected["bleu"]["score"], abs=1e-9)
    assert result["bleu"] > 5
    assert result["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
    assert result["updates"] == 80


def test_each_row_is_the_preset_divided_and_all_share_one_vocabulary(run):
    output, _, _ = run
    base, narrow = (AutoConfig.from_pretrained(output / row) for row in ("base", "B_dk32"))
    assert (base.d_model, base.d_ff, base.num_heads, base.head_dimensions) == (16, 64, 8, (2, 2))
    assert narrow.head_dimensions == (1, 2)
    different = {name for name, value in base.to_dict().items() if narrow.to_dict()[name] != value}
    assert different - {"_name_or_path"} == {"d_k"}
    vocabularies = {(output / folder / "tokenizer.json").read_text() for folder in ("tokenizer", "base", "B_dk32")}
    assert len(vocabularies) == 1


def test_rows_that_are_done_are_kept_and_new_ones_join_them(run, script, tmp_path, capsys):
    output, _, arguments = run
    folder = tmp_path / "table3"
    shutil.copytree(output, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    arguments = [*arguments[:-1], str(folder), "--logging_steps", "7"]
    assert script.main(["--rows", "base", *arguments]) == 0
    assert list(cells(capsys.readouterr().out)) == ["base", "B_dk32"]
    assert script.main(["--rows", "C_N2", "base", *arguments]) == 0
    table = cells(capsys.readouterr().out)
    assert list(table) == ["base", "B_dk32", "C_N2"]
    assert AutoConfig.from_pretrained(folder / "C_N2").encoder_layers == 2
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 1


def test_a_recipe_and_a_dataset_serve_as_they_do_for_train(script, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    for split, pairs in {"train": PAIRS[:40], "validation": PAIRS[40:44]}.items():
        lines = [json.dumps({"en": source, "de": target}) for source, target in pairs]
        (data / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"{{dataset: {data}, source_lang: en, target_lang: de, validation_split: validation, preset: big,\n"
        "vocab_size: 280, config_overrides: [encoder_layers=1, decoder_layers=1, dropout=0.25], max_steps: 2,\n"
        "tokens_per_batch: 200, use_cpu: true, save_strategy: 'no', eval_strategy: 'no', report_to: none}\n"
    )
    rows = ["--rows", "base", "D_drop0.2", "--shrink", "32", "--num_beams", "1"]
    assert script.main([*rows, "--recipe", str(recipe), "--output_dir", str(tmp_path / "out")]) == 0
    page = capsys.readouterr().out
    assert "2 updates, vocabulary 280; validation text of 4 lines, beam 1" in page
    assert list(cells(page)) == ["base", "D_drop0.2"]
    base, other = (AutoConfig.from_pretrained(tmp_path / "out" / row) for row in ("base", "D_drop0.2"))
    assert (base.num_heads, base.encoder_layers, base.dropout, other.dropout) == (8, 1, 0.25, 0.2)


# --- Stopped and started again --------------------------------------------------------------------------------------


def stop_at(patch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """Lets the call of that number raise what Ctrl-C raises."""
    original, calls = getattr(owner, name), itertools.count(1)

    def stopped(*args, **kwargs):
        if next(calls) == call:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, name, stopped)


@pytest.fixture(scope="module")
def undisturbed(script, files, tmp_path_factory):
    """Arguments of a run of two rows with checkpoints, its folder, and what it prints."""
    output = tmp_path_factory.mktemp("undisturbed") / "table3"
    saves = ["--save_strategy", "steps", "--save_steps", "4", "--eval_strategy", "no", "--num_beams", "1"]
    arguments = ["--rows", "base", "B_dk32", *SHAPE, *QUICK, *flags(files), *saves, "--max_steps", "10"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert script.main([*arguments, "--output_dir", str(output)]) == 0
    return arguments, output, printed.getvalue()


@pytest.mark.parametrize(
    "owner, name, call, steps_left",
    [
        (VanillaTransformerTrainer, "training_step", 17, 6),  # in the second row, after its checkpoint of 4 updates
        (VanillaTransformerTrainer, "training_step", 12, 10),  # in the second row, before its first checkpoint
        ("Ablations", "measure", 2, 0),  # trained but not measured
    ],
    ids=["after a checkpoint", "before a checkpoint", "before it is measured"],
)
def test_a_run_that_was_stopped_goes_on_and_ends_as_if_it_had_not_been(
    owner, name, call, steps_left, script, undisturbed, tmp_path, capsys, monkeypatch
):
    arguments, expected, page = undisturbed
    owner = getattr(script, owner) if isinstance(owner, str) else owner
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, owner, name, call)
        assert script.main([*arguments, "--output_dir", str(tmp_path / "stopped")]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err
    assert len((tmp_path / "stopped" / "results.jsonl").read_text().splitlines()) == 1
    steps, step = [], VanillaTransformerTrainer.training_step
    monkeypatch.setattr(VanillaTransformerTrainer, "training_step", lambda *a, **kw: steps.append(1) or step(*a, **kw))
    assert script.main([*arguments, "--output_dir", str(tmp_path / "stopped")]) == 0
    assert len(steps) == steps_left
    assert capsys.readouterr().out == page
    ours, theirs = (load_file(folder / "B_dk32" / "model.safetensors") for folder in (tmp_path / "stopped", expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- Mistakes -------------------------------------------------------------------------------------------------------


def fails(script, capsys, *arguments: str) -> str:
    """What the script says of a mistake: one line, exit code 2."""
    try:
        code = script.main(list(map(str, arguments)))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.startswith("ablations.py: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rows", "base", "C_N3"], "unknown row 'C_N3'; choose among all, base, A_h1"),
        (["--shrink", "24"], "--shrink 24 does not divide d_model=512 of row base"),
        (["--shrink", "64", "--rows", "A_h16"], "row A_h16: d_model must be divisible by num_heads, got d_model=8"),
        (["--shrink", "0"], "expected a whole number of at least 1, got '0'"),
        (["--config_overrides", "d_ff=64"], "--config_overrides d_ff: the rows differ in it; --shrink N divides"),
        (["--config_overrides", "layers=3"], "layers=3: expected NAME=VALUE with a field of the configuration"),
        (["--config_overrides", "dropout=2"], "dropout must lie in [0, 1), got dropout=2"),
        (["--preset", "tiny"], "--preset does not go with --rows"),
        (["--model", "runs/old"], "--model does not go with --rows"),
        (["--resume_from_checkpoint", "true"], "--resume_from_checkpoint does not go with --rows"),
        (["--max_stepss", "4"], "unrecognized arguments: --max_stepss 4"),
        (["--list"], "--list trains nothing and knows no --tokens_per_batch"),
        (["--train_source", "nowhere.en"], "there is no file nowhere.en"),
        (["--recipe", "nowhere"], "no recipe file 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(arguments, message, script, files, tmp_path, capsys):
    output = tmp_path / "out"
    given = [*QUICK, *flags(files), "--max_steps", "2", "--output_dir", output]
    rows = [] if "--rows" in arguments else ["--rows", "base"]
    assert message in fails(script, capsys, *given, *rows, *arguments)
    assert not list(tmp_path.iterdir())


def test_the_corpus_and_the_folder_are_asked_for(script, files, tmp_path, capsys):
    given = [*QUICK, "--rows", "base", "--max_steps", "2"]
    assert "--output_dir is missing" in fails(script, capsys, *given, *flags(files))
    training = [item for flag, path in files.items() if "train" in flag for item in (flag, path)]
    output = ["--output_dir", tmp_path / "out"]
    assert "--validation_split, are missing" in fails(script, capsys, *given, *training, *output)
    assert "--train_source and --train_target missing" in fails(script, capsys, *given, *output)
    assert not list(tmp_path.iterdir())


def test_results_of_other_settings_are_not_mixed(run, script, capsys):
    output, _, arguments = run
    before = (output / "results.jsonl").read_text()
    message = fails(script, capsys, *arguments, "--rows", "C_N2", "--max_steps", "90")
    assert "holds results with max_steps=80, now it is max_steps=90; give another --output_dir" in message
    message = fails(script, capsys, *arguments, "--rows", "C_N2", "--shrink", "16")
    assert "holds results with shrink=32, now it is shrink=16" in message
    message = fails(script, capsys, *arguments, "--rows", "C_N2", "--adam_beta2", "0.9")
    assert "holds results with adam_beta2=None, now it is adam_beta2=0.9" in message
    assert (output / "results.jsonl").read_text() == before


@pytest.mark.parametrize("name", ["settings.json", "results.jsonl"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_of_an_earlier_run_is_named(name, content, run, script, tmp_path, capsys):
    output, _, arguments = run
    for each in ("settings.json", "results.jsonl"):
        shutil.copy(output / each, tmp_path)
    (tmp_path / name).write_text(content)
    message = fails(script, capsys, "--rows", "base", *arguments[:-1], tmp_path)
    assert f"{tmp_path / name} is broken" in message


def test_a_folder_with_something_else_in_it_is_left_alone(script, files, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    message = fails(script, capsys, *QUICK, *flags(files), "--rows", "base", "--output_dir", tmp_path)
    assert "holds something else; give an empty or a new folder" in message
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_several_processes_are_refused(script, files, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = fails(script, capsys, *QUICK, *flags(files), "--rows", "base", "--output_dir", tmp_path / "out")
    assert "start it without a launcher" in message


# --- Tables ---------------------------------------------------------------------------------------------------------


def test_all_is_table_3_and_rows_come_in_its_order_once(script):
    assert script.chosen_rows(["all"]) == list(TABLE_3)
    assert script.chosen_rows(["all", "tiny", "base"]) == [*TABLE_3, "tiny"]
    assert script.chosen_rows(["big", "A_h4", "base", "A_h4"]) == ["base", "A_h4", "big"]


@pytest.mark.parametrize("row", list_presets())
def test_a_shrunk_row_is_to_the_shrunk_base_what_the_row_is_to_base(row, script):
    whole = VanillaTransformerConfig.from_preset(row)
    shrunk = VanillaTransformerConfig.from_preset(row, **script.row_overrides(row, 4))
    for name in ("d_model", "d_ff"):
        assert getattr(shrunk, name) * 4 == getattr(whole, name)
    assert [4 * size for size in shrunk.head_dimensions] == list(whole.head_dimensions)
    same = {name for name in whole.to_dict() if name not in ("d_model", "d_ff", "d_k", "d_v", "hidden_size")}
    assert {name: shrunk.to_dict()[name] for name in same} == {name: whole.to_dict()[name] for name in same}


def test_overrides_hold_for_every_row_but_one_that_is_about_the_same_field(script):
    given = ["dropout=0.3", "num_heads=4"]
    assert script.row_overrides("base", 1, given) == {"dropout": "0.3", "num_heads": "4"}
    assert script.row_overrides("D_drop0.2", 1, given) == {"dropout": 0.2, "num_heads": "4"}
    assert script.row_overrides("A_h16", 2, given) == {"dropout": "0.3", "num_heads": 16, "d_model": 256, "d_ff": 1024}


def test_without_base_there_are_no_differences_of_ours_but_the_papers(script):
    results = {"A_h1": {"parameters": 7, "perplexity": 3.456, "bleu": 12.34}}
    results["tiny"] = {"parameters": 6, "perplexity": 9.0, "bleu": 1.0}
    table = cells("\n".join(script.results_table(results)))
    assert table["A_h1"] == ["7", "3.46", "12.3", "", "", "", "5.29", "24.9", "+0.37", "-0.9"]
    assert table["tiny"] == ["6", "9.00", "1.0", "", "", "", "", "", "", ""]


def test_the_list_is_the_readmes_table(script, capsys):
    assert script.main(["--list"]) == 0
    heading, table = capsys.readouterr().out.split("\n\n", 1)
    assert heading == "Parameters at 37,000 words, shapes as in the paper; Table 3 of the paper."
    assert cells(table)["B_dk16"] == ["55,967,744", "58", "5.16", "25.1"]
    assert len(cells(table)) == 20
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_shrunk_list_says_so(script, capsys):
    assert script.main(["--list", "--shrink", "32", "--vocab_size", "300", "--rows", "C_N2", "tiny"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(
        "Parameters at 300 words, SHRUNK: d_model, d_ff, d_k and d_v are those of the paper divided"
    )
    layers = parameters_by_hand(300, 2) - 300 * 16
    assert cells(page)["C_N2"][0] == f"{300 * 16 + 2 * layers:,}"
    assert list(cells(page)) == ["C_N2", "tiny"]


def test_help_comes_without_the_slow_imports(script, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vanilla_transformer.presets", None)
    with pytest.raises(SystemExit) as stop:
        script.main(["--help"])
    assert stop.value.code == 0
    assert "--shrink N" in capsys.readouterr().out
