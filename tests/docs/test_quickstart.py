"""The pages on projects run as they are typed, the quickstart with a small model and one round."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.docs.test_documents import blocks
from tests.flower.conftest import LocalGrid
from tests.project.test_on_flower import hand_over_to
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.experiments.scenario import Machine
from goldfish.project.project import Project

SHORTER = [
    ("rounds = 10", "rounds = 1"),
    ("local_epochs = 2", "local_epochs = 1"),
    ('name = "lenet5"', 'name = "mlp"\noptions = { hidden = 16 }'),
]


def type_in(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Do what a shell does with a line of the page: the few things that its lines use."""
    command, _, target = line.partition(" > ")
    command, _, head = command.partition(" | head -n ")
    program, *words = shlex.split(command)
    words = [
        name for word in words for name in (map(str, Path().glob(word)) if "*" in word else [word])
    ]
    if program == "cd":
        monkeypatch.chdir(words[0])
        return ""
    if program == "rm":
        Path(words[0]).unlink()
        return ""
    if program == "echo":
        Path(target).write_text(" ".join(words) + "\n")
        return ""
    assert program == "goldfish", line
    if words[0] == "plan":
        words += ["--method", "retrain", "--method", "goldfish-sprint"]  # the others take a while
    if words[0] == "audit":
        words += ["--models", "4"]  # as do more oracles
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (line, done.output, done.exception)
    said = done.stdout
    if head:
        said = "".join(said.splitlines(keepends=True)[: int(head)])
    if target:
        Path(target).write_text(said)
    return said


@pytest.mark.parametrize("engine", ["in-process", "flower"])
def test_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """On Flower with the real apps and messages; ``test_deployed.py`` has real processes."""
    monkeypatch.chdir(tmp_path)
    shorter = list(SHORTER)
    if engine == "flower":
        nodes = {n: {"partition-id": n, "state-dir": str(tmp_path / f"node-{n}")} for n in range(5)}
        hand_over_to(LocalGrid(nodes), monkeypatch)
        shorter += [("seed = 0", 'engine = "flower"'), ("# [flower]", "[flower]\npoll = 0.001")]
    said = {}
    for block in blocks("console"):
        for line in block.text.splitlines() if block.document == "quickstart.md" else ():
            said[line] = type_in(line, monkeypatch)
            if line == "goldfish init my-project":
                settings = tmp_path / "my-project" / "goldfish.toml"
                text = settings.read_text()
                for long, short in shorter:
                    assert long in text
                    text = text.replace(long, short)
                settings.write_text(text)
    with Project.open(tmp_path / "my-project") as project:
        assert [r.state for r in project.ledger.requests()] == ["closed"] * 3
        assert [v.number for v in project.ledger.versions()] == [1, 2, 3, 4]
        assert project.ledger.verify() == []
    assert re.search(r"R-0001: client-1, 60 samples\. Due on", "".join(said.values()))
    assert "Nothing is wrong with this pack" in "".join(said.values())
    assert Path("lineage.png").exists()


def test_the_page_on_ones_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hospitals as they might be; then the rows of who has left are deleted."""
    monkeypatch.chdir(tmp_path)
    Project.init(tmp_path)
    for block in blocks("python", "toml"):
        named = re.match(r"# ([\w.]+)\n", block.text)
        if named and block.document == "own-model.md":
            Path(named[1]).write_text(block.text)
    Path("hospitals").mkdir()
    for place in ("hospitals/north.csv", "hospitals/south.csv", "hospitals/west.csv", "test.csv"):
        rows = [f"patient-{n},{n % 3 / 3},{n % 5 / 5},{n % 7 / 7},{n % 2}" for n in range(30)]
        Path(place).write_text("\n".join(["id,age,pressure,sugar,ill", *rows]) + "\n")
    said = ""
    for block in blocks("console"):
        for line in block.text.splitlines() if block.document == "own-model.md" else ():
            said += type_in(line, monkeypatch)
    assert "R-0001: north, 1 sample." in said
    with Project.open(tmp_path) as project:
        assert project.current().made_by == "retrain"
        assert [r.state for r in project.ledger.requests()] == ["closed", "measured"]
        north = Path("hospitals/north.csv")
        north.write_text(re.sub(r"patient-7,.*\n", "", north.read_text()))
        Path("hospitals/south.csv").unlink()
        held = project.samples(Machine())
    assert {client: len(ids) for client, ids in held.items()} == {
        "north": 29,
        "south": 0,
        "west": 30,
    }
