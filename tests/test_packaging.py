"""What the project imports, it declares and pins."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETUP["project"]
OF_FLOWER = ("flower", "bench")
"""Where the packages of the ``flower`` extra may be imported."""
OF_TORCH = "triton"
"""What comes with PyTorch for CUDA, and is used where it is there."""


def normal(name: str) -> str:
    return re.split(r"[\[<>=!~;, ]", name)[0].lower().replace("_", "-")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_every_import_is_declared() -> None:
    always = {normal(name) for name in PROJECT["dependencies"]}
    flower = {normal(name) for name in PROJECT["optional-dependencies"]["flower"]}
    homes = packages_distributions()
    own = ROOT / "src" / "goldfish"
    found = set()
    for path in own.rglob("*.py"):
        of_flower = path.relative_to(own).parts[0] in OF_FLOWER or path.name == "server_app.py"
        for module in set(imported(path)) - sys.stdlib_module_names - {"goldfish", OF_TORCH}:
            names = {normal(name) for name in homes[module]}
            assert names & (always | flower if of_flower else always), f"{path} imports {module}"
            found |= names
    assert found >= always | flower, "a dependency is declared and not used"


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(line) for line in lines if "==" in line}
    extras = PROJECT["optional-dependencies"].values()
    declared = [*PROJECT["dependencies"], *(name for extra in extras for name in extra)]
    assert {normal(name) for name in declared} <= pinned


def test_every_file_beside_the_code_is_shipped() -> None:
    """C code, presets, the page's template: each is found by a pattern, and each pattern finds."""
    own = ROOT / "src" / "goldfish"
    patterns = SETUP["tool"]["setuptools"]["package-data"]["goldfish"]
    found = {pattern: set(own.glob(pattern)) for pattern in patterns}
    assert all(found.values()), found
    there = {path for path in own.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in there if path.suffix != ".py"} == set().union(*found.values())
