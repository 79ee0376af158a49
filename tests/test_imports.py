"""Imports form the documented graph, and importing the package stays cheap and without side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[1] / "src" / "vanilla_transformer"
# Which of the package's modules each may import; a module that is not named may import any but commands.
ALLOWED = {
    "configuration_vanilla_transformer": set(),
    "generation_vanilla_transformer": {"configuration_vanilla_transformer"},
    "modeling_vanilla_transformer": {"configuration_vanilla_transformer", "generation_vanilla_transformer"},
    "pipeline_vanilla_transformer": set(),
}
MODEL_IS_AN_ARGUMENT = (
    *("tokenization", "data", "evaluation", "corpora", "visualization", "translation"),
    *("shards", "mixing", "streaming"),
)


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports when it runs, TYPE_CHECKING blocks left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", None) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                found.add(name.split(".")[0])
            elif name == "vanilla_transformer":
                found.add("__init__")
            elif name.startswith("vanilla_transformer."):
                found.add(name.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("vanilla_transformer.")
            }
    return found


MODULES = {path.stem: imports_of(path) for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize("module", ALLOWED)
def test_shipped_modules_import_only_what_the_graph_allows(module):
    assert MODULES[module] <= ALLOWED[module]


@pytest.mark.parametrize("module", MODEL_IS_AN_ARGUMENT)
def test_the_model_arrives_as_an_argument(module):
    assert not MODULES[module] & {"modeling_vanilla_transformer", "training", "__init__"}


def test_nothing_imports_the_commands():
    assert not [module for module, found in MODULES.items() if "commands" in found]


def test_imports_have_no_cycle():
    remaining = {module: found & set(MODULES) for module, found in MODULES.items()}
    while remaining:
        free = [module for module, found in remaining.items() if not found & set(remaining) - {module}]
        assert free, f"a cycle among {sorted(remaining)}"
        for module in free:
            del remaining[module]


def test_no_module_has_a_name_that_says_nothing():
    assert not {"utils", "helpers", "common"} & set(MODULES)


def test_importing_the_package_leaves_the_trainer_and_the_drawing_libraries_alone():
    script = (
        "import sys, vanilla_transformer\n"
        "heavy = ['accelerate', 'datasets', 'sacrebleu', 'matplotlib', 'babel', 'num2words', 'tensorboard', 'yaml']\n"
        "import transformers, torch\n"
        "print([name for name in heavy if name in sys.modules and name not in before])"
    )
    # What transformers itself brings in with the same classes does not count.
    before = (
        "import sys\n"
        "from transformers import AutoModelForSeq2SeqLM, GenerationMixin, Pipeline, PreTrainedModel\n"
        "from transformers import pipeline, pipelines\n"
        "before = set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", before + script],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
