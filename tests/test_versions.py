"""The oldest packages that pyproject.toml allows are those that CI tests with, and those that the README names."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings along on Python 3.10

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Linters and type checkers are no part of what the tests run with.
EXTRAS = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"}
REQUIREMENTS = [Requirement(line) for line in sum(EXTRAS.values(), PROJECT["dependencies"])]
FLOORS = {
    each.name: [Version(part.version) for part in each.specifier if part.operator == ">="]
    for each in REQUIREMENTS
    if each.name != PROJECT["name"]
}


@pytest.fixture(scope="module")
def oldest() -> dict[str, Version]:
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    assert len(dict(pins)) == len(pins)
    return {name: Version(version) for name, version in pins}


@pytest.mark.parametrize("name", sorted(FLOORS.keys() - {"torch"}))
def test_each_floor_is_the_version_that_ci_tests_with(name, oldest):
    assert FLOORS[name] == [oldest[name]]


def test_the_readme_names_the_floors_of_torch_and_transformers():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (torch_floor,), (transformers_floor,) = FLOORS["torch"], FLOORS["transformers"]
    named = re.search(r"torch (\S+) or newer, and for transformers (\S+) or newer", text)
    assert [Version(version) for version in named.groups()] == [torch_floor, transformers_floor]


def test_the_readme_names_the_oldest_python():
    (floor,) = re.fullmatch(r">=(\S+)", PROJECT["requires-python"]).groups()
    assert f"Python {floor} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
