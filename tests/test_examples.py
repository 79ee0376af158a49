"""Every script in scripts/examples runs as its docstring says, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from translators import varied_model
from vanilla_transformer.translation import load_translator, translate_lines


ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "scripts" / "examples"
COLOURS = {"red": "rote", "green": "grüne", "blue": "blaue"}
NUMBERS = {"two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
THINGS = {"hats": "Hüte", "dogs": "Hunde", "books": "Bücher", "chairs": "Stühle"}
PAIRS = [
    (f"{number} {colour} {thing}", f"{NUMBERS[number]} {COLOURS[colour]} {THINGS[thing]}")
    for number in NUMBERS
    for colour in COLOURS
    for thing in THINGS
]
RAN = {
    "ablate.py": "test_ablate_prints_the_loss_of_the_paper_and_of_each_variant",
    "export.py": "test_export_translates_alike_with_all_three",
    "fine_tune.py": "test_train_and_fine_tune_leave_models_that_know_their_text",
    "share.py": "test_share_lists_the_model_and_the_space",
    "train_on_your_files.py": "test_train_and_fine_tune_leave_models_that_know_their_text",
}


def run(script: str, *arguments: object, cwd: Path) -> str:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the scripts run, with the text in it."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def text(folder) -> list[str]:
    """Two files."""
    names = [f"train.{language}" for language in ("en", "de")]
    for index, name in enumerate(names):
        (folder / name).write_text("".join(f"{pair[index]}\n" for pair in PAIRS), encoding="utf-8")
    return names


@pytest.fixture(scope="module")
def trained(folder, text) -> str:
    """What train_on_your_files.py prints; its model is in the folder `run`."""
    arguments = ("--output_dir", "run", "--vocab_size", 300, "--max_steps", 150)
    return run("train_on_your_files.py", *text, *arguments, cwd=folder)


def test_every_example_is_short_tells_how_to_call_it_and_is_run_here():
    scripts = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.iterdir() if path.suffix == ".py"}
    assert set(scripts) == set(RAN)
    assert set(RAN.values()) <= set(globals())
    for name, content in scripts.items():
        assert len(content.splitlines()) <= 40, name
        assert f"\npython scripts/examples/{name} " in content, name
        assert re.search(r"^from vanilla_transformer", content, re.MULTILINE), name
        assert "vanilla_transformer_cli" not in content, name


@pytest.mark.slow
def test_share_lists_the_model_and_the_space(tmp_path, tiny_tokenizer):
    varied_model(tiny_tokenizer).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    told = run("share.py", "model", "user/en-de", "--license", "mit", "--dry_run", cwd=tmp_path)
    assert re.search(r"^model user/en-de: \d+ files, such as README.md", told, re.MULTILINE)
    assert re.search(r"^Space user/en-de-page: \d+ files, such as README.md, app.py", told, re.MULTILINE)
    assert "sent" not in told


@pytest.mark.slow
def test_train_and_fine_tune_leave_models_that_know_their_text(folder, trained):
    source, _ = PAIRS[0]
    model, tokenizer = load_translator(str(folder / "run"))
    found = [best.text for best, *_ in translate_lines(model, tokenizer, [pair[0] for pair in PAIRS])]
    assert sum(each == pair[1] for each, pair in zip(found, PAIRS, strict=True)) > 0.5 * len(PAIRS), found
    assert trained.splitlines()[-1] == f"{source} -> {found[0]}"

    for name, column in (("new.en", 1), ("new.de", 0)):  # the other way round: nothing of it is known yet
        (folder / name).write_text("".join(f"{pair[column]}\n" for pair in PAIRS), encoding="utf-8")
    told = run("fine_tune.py", "run", "new.en", "new.de", "--output_dir", "tuned", "--max_steps", 60, cwd=folder)
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after", told).groups())
    assert after < before / 2
    assert (folder / "tuned" / "model.safetensors").is_file()


@pytest.mark.slow
def test_ablate_prints_the_loss_of_the_paper_and_of_each_variant(folder, text):
    told = run("ablate.py", *text, "--max_steps", 20, "num_heads=1", "norm_first=true", cwd=folder)
    losses = dict(re.findall(r"^(.+): ([\d.]+) nats a token$", told, re.MULTILINE))
    assert list(losses) == ["the paper", "num_heads=1", "norm_first=true"]
    assert len(set(losses.values())) == 3, "a variant that changes nothing"


@pytest.mark.slow
def test_export_translates_alike_with_all_three(folder, trained):
    pytest.importorskip("ctranslate2")
    told = run("export.py", "run", "--text", PAIRS[0][0], "--output_dir", "exported", cwd=folder)
    texts = dict(re.findall(r"^(ours|marian|ctranslate2): (.*)$", told, re.MULTILINE))
    assert texts["ours"] == trained.splitlines()[-1].partition(" -> ")[2]
    assert texts["ours"] == texts["marian"] == texts["ctranslate2"], texts
