"""The quickstart runs as it is typed, with one round of training and a small model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.test_documents import blocks
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.project.project import Project

SHORTER = [
    ("rounds = 10", "rounds = 1"),
    ("local_epochs = 2", "local_epochs = 1"),
    ('name = "lenet5"', 'name = "mlp"'),
]


def type_in(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Do what a shell does with a line of the page: the few things that its lines use."""
    command, _, target = line.partition(" > ")
    command, _, head = command.partition(" | head -n ")
    program, *words = shlex.split(command)
    if program == "cd":
        monkeypatch.chdir(words[0])
        return ""
    if program == "rm":
        Path(words[0]).unlink()
        return ""
    assert program == "goldfish", line
    if words[0] == "plan":
        words += ["--method", "retrain", "--method", "goldfish-sprint"]  # the others take a while
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (line, done.output, done.exception)
    said = done.stdout
    if head:
        said = "".join(said.splitlines(keepends=True)[: int(head)])
    if target:
        Path(target).write_text(said)
    return said


def test_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = {}
    for block in blocks("console"):
        for line in block.text.splitlines() if block.document == "quickstart.md" else ():
            said[line] = type_in(line, monkeypatch)
            if line == "goldfish init my-project":
                settings = tmp_path / "my-project" / "goldfish.toml"
                text = settings.read_text()
                for long, short in SHORTER:
                    assert long in text
                    text = text.replace(long, short)
                settings.write_text(text)
    with Project.open(tmp_path / "my-project") as project:
        assert [r.state for r in project.ledger.requests()] == ["closed"] * 3
        assert [v.number for v in project.ledger.versions()] == [1, 2, 3, 4]
        assert project.ledger.verify() == []
    assert re.search(r"R-0001: client-1, 60 samples\. Due on", "".join(said.values()))
    assert "Nothing is wrong with this pack." in "".join(said.values())
    assert Path("lineage.png").exists()
