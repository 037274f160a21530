"""The queue of ``benchmarks/fast.py``: it ends when its time is up and goes on from there."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fast.py"


def queue(out: Path, seconds: float) -> str:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--device", "cpu"]
    command += ["--seconds", str(seconds), "--datasets", "digits", "--clients", "5"]
    command += ["--partitions", "iid", "--seeds", "1", "--rounds", "1"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_queue_goes_on_where_it_ended_and_adds_each_run_once(tmp_path: Path) -> None:
    """No time at all is enough to begin with the one run, and not to end it."""
    assert "to be continued" in queue(tmp_path, 0.01)
    assert not (tmp_path / "fast.csv").exists()
    assert "digits-5-iid-0: done" in queue(tmp_path, 600)
    assert queue(tmp_path, 600) == ""
    with (tmp_path / "fast.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert list(rows) == [
        *("origin", "retrain", "retrain-tuned", "goldfish", "goldfish-warm", "goldfish-sprint"),
        "retrain-short",
    ]
    assert all(float(row["samples"]) > 0 and row["gap"] for row in rows.values())
    assert rows["retrain-short"]["rounds"] == "1"
