"""A configuration that runs in seconds, and two ways to run the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import goldfish_here

SMALL = """
seed = 0
[data]
name = "digits"
clients = 3
[model]
name = "mlp"
[training]
rounds = 3
batch_size = 20
learning_rate = 0.05
[deletion]
rate = 0.1
backdoor_target = 7
[unlearning]
methods = ["goldfish", "retrain"]
rounds = 3
"""

Goldfish = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def command() -> list[str]:
    """Return the beginning of a command in a process of its own."""
    return [sys.executable, "-m", "goldfish"]


@pytest.fixture
def goldfish_cli(tmp_path: Path) -> Goldfish:
    """Return a function that runs the command line in this process."""
    return partial(goldfish_here, tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory of one complete run with one worker, and what was printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(SMALL)
    done = goldfish_here(folder, "run", "small.toml", "--out", "out", "--workers", 1)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout
