"""A configuration that runs in seconds, and a way to run the command line for real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

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
    return [sys.executable, "-m", "goldfish"]


@pytest.fixture(scope="session")
def goldfish_in(command: list[str]) -> Goldfish:
    """Return a function that runs the command line in a folder."""

    def run(folder: Path, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **more.pop("env", {})},
            capture_output=True,
            text=True,
            check=False,
            **more,
        )

    return run


@pytest.fixture
def goldfish_cli(goldfish_in: Goldfish, tmp_path: Path) -> Goldfish:
    return partial(goldfish_in, tmp_path)


@pytest.fixture(scope="session")
def finished(goldfish_in: Goldfish, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory of one complete run with one worker, and what was printed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(SMALL)
    done = goldfish_in(folder, "run", "small.toml", "--out", "out", "--workers", 1)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout
