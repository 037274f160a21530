"""The command line is thin and quick: nothing heavy is imported before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from goldfish.cli import app


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, goldfish.cli\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(goldfish.cli.app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'pydantic', 'PIL', 'flwr'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_help_tells_the_commands_of_a_project_from_those_of_experiments() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    begin, _, rest = said.partition("A project:")
    project, _, experiments = rest.partition("Experiments")
    for word, there in (("forget", project), ("audit", project), ("demo", experiments)):
        assert f"│ {word} " in there
    assert "keys " in project
    assert "'goldfish demo'" in begin


@pytest.mark.parametrize(
    "command",
    [["init", "app"], ["keys", "new", "keys"], ["up"], ["doctor"]],
    ids=lambda command: command[0],
)
def test_commands_for_flower_say_what_to_install(command: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['flwr'] = None\n"
        "from goldfish.cli import main\n"
        f"sys.argv = ['goldfish', 'flower', *{command}]\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'goldfish-fl[flower]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["import", "command"])
def test_ctrl_c_at_the_beginning_is_a_line(where: str) -> None:
    """While the command line is imported, and before a command's first step."""
    code = (
        "import os, signal, sys\n"
        "from goldfish.__main__ import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def interrupt(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "class Finder:\n"
        "    find_spec = interrupt\n"
        f"if {where!r} == 'import':\n"
        "    sys.meta_path.insert(0, Finder())\n"
        "else:\n"
        "    import goldfish.cli\n"
        "    goldfish.cli.app.registered_callback.callback = lambda **_: interrupt()\n"
        "from goldfish.__main__ import main\n"
        "sys.argv = ['goldfish', 'models']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")


def test_threads_of_pytorch_soon_sleep_while_they_wait() -> None:
    """GNU OpenMP reads it when PyTorch is imported; who has said how to wait is not overruled."""
    code = (
        "import contextlib, io, os, sys\n"
        "from goldfish.__main__ import main\n"
        "def spins(**said):\n"
        "    for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'):\n"
        "        os.environ.pop(name, None)\n"
        "    os.environ.update(said)\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main()\n"
        "    return os.environ.get('GOMP_SPINCOUNT')\n"
        "sys.argv = ['goldfish', '--version']\n"
        "print(spins(), spins(OMP_WAIT_POLICY='active'), spins(GOMP_SPINCOUNT='5'), end=' ')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "None", "5", "False"]


SHADOWS = ("numpy", "secrets", "click", "torch", "typer", "yaml")
OWN = """
from torch import nn
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""
CONFIG = """
[model]
name = "own:net"
[training]
rounds = 1
[deletion]
rate = 0.1
[unlearning]
methods = ["retrain"]
rounds = 1
"""


def test_modules_of_the_current_folder_are_not_run(tmp_path: Path) -> None:
    """A model of one's own is found there, after everything that is installed."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("open('was-here', 'a').write(__name__ + ' ')\n")
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "goldfish", "run", "own.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    "command",
    [
        "plan own.toml --method retrain",
        "reproduce figure-8a --quick --set model.name=own:net --set data.name=digits "
        "--set data.limit_train=400 --set data.limit_test=100 --set training.local_epochs=1",
    ],
)
def test_all_commands_find_a_model_of_the_current_folder(command: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.toml").write_text(CONFIG)
    line = [sys.executable, "-m", "goldfish", *command.split()]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_demo_has_no_file() -> None:
    said = CliRunner().invoke(app, ["demo", "--help"]).output
    assert "runs/demo" in said
    assert "file" not in said
