"""The documents are true: their commands run, their code runs, what they name exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from goldfish.experiments.reference import reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_readmes_code_runs(tmp_path: Path) -> None:
    (code,) = blocks(README, "python")
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Cost(" in done.stdout
    assert (tmp_path / "unlearned.safetensors").exists()


def test_the_readmes_commands_run(tmp_path: Path) -> None:
    (config,) = blocks(README, "toml")
    (tmp_path / "experiment.toml").write_text(config)
    lines = [line for block in blocks(README, "console") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("goldfish ")]
    assert len(commands) >= 6
    for command in commands:
        done = run([sys.executable, "-m", *command], tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert (tmp_path / "runs" / "experiment" / "report.html").exists()
    makes = [shlex.split(line)[1] for line in lines if line.startswith("make ")]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makes == ["demo", "test"]
    assert set(makes) <= set(targets)


def test_every_command_is_documented() -> None:
    from typer.main import get_command

    from goldfish.cli import app

    group = get_command(app)
    names = []
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        names += [f"goldfish {name} {sub}" for sub in inner] if inner else [f"goldfish {name}"]
    assert len(names) >= 7
    documents = "".join(path.read_text() for path in DOCUMENTS) + (ROOT / "Makefile").read_text()
    for name in names:
        assert name in documents, f"no document speaks of '{name}'"


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), (
        "run: python -m goldfish.experiments.reference > docs/configuration.md"
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(path: Path) -> None:
    """Every `path/in/the/project` and every `test_name` in a document is there."""
    text = path.read_text()
    sources = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    for name in set(re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", text)):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in sources, f"{path.name} names {name}"
