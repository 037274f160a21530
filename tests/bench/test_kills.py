"""A few kills of a project, by ``benchmarks/kills_project.py``; it takes 200 in some minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills_project.py"


def test_killed_commands_lose_nothing() -> None:
    command = [sys.executable, str(SCRIPT), "--points", "1", "--each", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost" in done.stdout
