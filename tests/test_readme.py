"""Every code block of the README runs, and what it names exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from small_models import randomise
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON_BLOCKS = [block for language, block in BLOCKS if language == "python"]
SHELL_BLOCKS = [block for language, block in BLOCKS if language == "sh"]
INSTALL_BLOCKS = [block for block in SHELL_BLOCKS if "-m venv" in block]
TRAINING_BLOCKS = [block for block in SHELL_BLOCKS if "-m venv" not in block]
# Long runs of real text are shortened, and small files written by the test take the place of the reader's.
SHORTER = {
    "--last 5": "--last 2",
    "--last 10": "--last 2",
    "--recipe multi30k_tokenized": "--recipe multi30k_tokenized --max_steps 4 --eval_steps 2 --save_steps 2",
    "--max_steps 3600": "--max_steps 4 --eval_steps 2 --save_steps 2",
    "--recipe multi30k_tiny": "--recipe multi30k_tiny --max_steps 4 --eval_steps 2 --save_steps 2",
}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def folder_with_demo(tmp_path_factory, tiny_tokenizer):
    """A working folder in which `demo` is a model, as after the first command."""
    folder = tmp_path_factory.mktemp("reader")
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tiny_tokenizer))
    model = VanillaTransformerForConditionalGeneration(config)
    randomise(model)
    model.save_pretrained(folder / "demo")
    tiny_tokenizer.save_pretrained(folder / "demo")
    return folder


def test_every_block_is_of_a_kind_that_is_run_here():
    assert {language for language, _ in BLOCKS} <= {"python", "sh", "text"}
    assert PYTHON_BLOCKS
    assert TRAINING_BLOCKS


def test_two_commands_install_and_run_the_demo_and_the_tests_as_ci_does():
    assert len(INSTALL_BLOCKS) == 2
    assert [block.strip().rsplit(maxsplit=1)[-1] for block in INSTALL_BLOCKS] == ["demo", "pytest"]
    assert all(len(block.strip().splitlines()) == 1 for block in INSTALL_BLOCKS)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    found = [
        [line for line in README.splitlines() if re.match(rf"^python3 -m venv .*{ending}$", line)]
        for ending in dict.fromkeys(re.findall(r"readme_command '([^']+)'", ci))
    ]
    assert sorted(found) == sorted([block.strip()] for block in INSTALL_BLOCKS)


@pytest.mark.parametrize("index", range(len(PYTHON_BLOCKS)))
def test_python_blocks_run(index, folder_with_demo):
    done = subprocess.run(
        [sys.executable, "-c", PYTHON_BLOCKS[index]],
        cwd=folder_with_demo,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for expected in re.findall(r"print\(.*\)  # (.+)", PYTHON_BLOCKS[index]):
        assert expected in done.stdout


@pytest.mark.slow
def test_shell_blocks_run_one_after_another(folder_with_demo):
    """What one block makes, the next ones use: they run as a reader runs them, in their order, in one folder."""
    for name, lines in {"train": 60, "val": 12, "test": 8}.items():
        numbers = range(lines)
        (folder_with_demo / f"{name}.en").write_text("".join(f"A man has {n} red hats.\n" for n in numbers))
        (folder_with_demo / f"{name}.de").write_text("".join(f"Ein Mann hat {n} rote Hüte.\n" for n in numbers))
    bin_folder = folder_with_demo / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, module in {"vanilla-transformer": "vanilla_transformer_cli", "sacrebleu": "sacrebleu"}.items():
        command = bin_folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    for block in TRAINING_BLOCKS:
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        done = subprocess.run(
            ["bash", "-ec", block],
            cwd=folder_with_demo,
            env=environment(PATH=f"{bin_folder}{os.pathsep}{os.environ['PATH']}"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr[-3000:]}"


def test_every_file_and_picture_that_pages_link_to_is_there():
    for page in ("README.md", "CONTRIBUTING.md", "docs/walkthrough.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or (ROOT / page).parent.joinpath(target).is_file(), f"{page}: {target}"
    pictures = {f"docs/pictures/{path.name}" for path in (ROOT / "docs" / "pictures").iterdir()}
    assert pictures == set(re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README))


def test_every_name_in_the_index_exists():
    rows = [line for line in README.splitlines() if line.startswith("| ") and "`" in line]
    sources = {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / "src" / "vanilla_transformer").glob("*.py")
    }
    tests = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    everything = "\n".join(sources.values()) + "\n".join(tests.values())
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row):
            if re.fullmatch(r"(\w+\.py::)?test_\w+", name):
                file, _, test = name.rpartition("::")
                where = tests[file] if file else tests["test_modeling.py"]
                assert f"def {test}(" in where, name
            elif re.fullmatch(r"test_\w+\.py", name):
                assert name in tests, name
            elif "::" in name:
                file, _, attribute = name.rpartition("::")
                assert re.search(rf"\b{attribute}\b", sources[file]), name
            elif re.fullmatch(r"[A-Za-z_]\w+(\.\w+)?", name):
                assert name.rpartition(".")[2] in everything, name


def test_every_departure_is_a_field_that_is_off_by_default():
    table = README.split("## Departures from the paper")[1].split("\n## ")[0]
    fields = [
        name
        for row in re.findall(r"^\| (`[^|]+) \|", table, flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    paper = VanillaTransformerConfig()
    known = {
        "norm_first": False, "final_norm": None, "attention_bias": False, "output_bias": False,
        "tie_word_embeddings": True, "position_embedding": "sinusoidal", "activation": "relu",
        "attention_dropout": 0.0, "activation_dropout": 0.0, "pruned_heads": None,
    }  # fmt: skip
    assert set(known) <= set(fields)
    assert {name: getattr(paper, name) for name in known} == known
