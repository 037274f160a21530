"""The ways that docs/architecture.md describes are those that a real run takes."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from typer.testing import CliRunner

from goldfish.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
CONFIG = """
[data]
name = "digits"
clients = 2
[model]
name = "mlp"
[training]
rounds = 1
batch_size = 200
[deletion]
rate = 0.1
[unlearning]
methods = ["goldfish"]
rounds = 1
"""


def way(heading: str) -> list[str]:
    """Return the functions of a table, each as module.function or module.Class.method."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w/]+)\.py` \| `([\w.]+)` \|", section, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [f"goldfish.{path.replace('/', '.')}:{function}" for _, path, function in rows]


def code_of(name: str) -> CodeType:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    code: CodeType = getattr(found, "__wrapped__", found).__code__
    return code


def test_the_way_of_a_run_and_of_a_client_step_is_as_documented(tmp_path: Path) -> None:
    """Each named function exists and is called, and first called in the order of the table."""
    run, step = way("The way of one run"), way("The way of one client step")
    assert 0 < len(run) <= 15
    assert 0 < len(step) <= 12
    wanted = {code_of(name): name for name in {*run, *step}}
    calls: list[str] = []

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code in wanted:
            calls.append(wanted[frame.f_code])

    (tmp_path / "small.toml").write_text(CONFIG)
    command = [
        "run",
        str(tmp_path / "small.toml"),
        "--out",
        str(tmp_path / "run"),
        "--workers",
        "1",
    ]
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        done = CliRunner().invoke(app, command)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert done.exit_code == 0, done.output
    assert [name for name in dict.fromkeys(calls) if name in run] == run
    begin = calls.index("goldfish.methods.goldfish:goldfish_step")
    last_run = max(n for n in range(begin) if calls[n] == step[0])
    of_step = calls[last_run:]
    assert [name for name in dict.fromkeys(of_step) if name in step] == step


def test_the_tree_is_the_one_of_the_project() -> None:
    """Every module and package stands in the tree, and every file that the page names exists."""
    text, source = PAGE.read_text(), PAGE.parents[1] / "src" / "goldfish"
    tree = text.split("src/goldfish/\n")[1].split("\ntests/")[0]
    named = set(re.findall(r"^  ([\w/.]+)", tree, re.MULTILINE))
    there = {f.name for f in source.glob("*.py")} - {"__main__.py"}
    there |= {f"{f.parent.relative_to(source)}/" for f in source.glob("*/**/__init__.py")}
    assert named >= there - {"experiments/presets/"}
    for name in re.findall(r"`([\w/]+\.(?:py|c))`", text):
        assert list(source.rglob(name)), f"docs/architecture.md names {name}"
