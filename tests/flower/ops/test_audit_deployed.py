"""An audit over a real deployment: nodes with data of their own, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from goldfish.audits import AUDIT, Audit
from goldfish.cli import app
from goldfish.flower.ops.up import Deployment

CONFIG = """
engine = "flower"
[data]
name = "npz"
path = "test.npz"
members = ["client-1", "client-2"]
[model]
name = "mlp"
options = {{ hidden = 32 }}
[training]
rounds = 1
local_epochs = 40
learning_rate = 0.1
batch_size = 10
[deletion]
samples = "ids.txt"
[unlearning]
methods = ["retrain"]
rounds = 1
[flower]
{flower}
"""


def write_data(folder: Path) -> None:
    """Write images with labels by chance: whatever a model gets right it remembers.

    Each of two clients has 60 of them, the server 90; the first client removes half of its own.
    """
    draw = np.random.default_rng(0)

    def images(count: int) -> tuple[Any, Any]:
        return draw.integers(0, 255, (count, 6, 6, 1)).astype(np.uint8), draw.integers(0, 3, count)

    for number in (1, 2):
        x, y = images(60)
        ids = [f"{number}-{n}" for n in range(60)]
        np.savez(folder / f"client-{number}.npz", x_train=x, y_train=y, ids_train=ids)
    x, y = images(90)
    np.savez(folder / "test.npz", x_test=x, y_test=y)
    (folder / "ids.txt").write_text("".join(f"client-1 1-{n}\n" for n in range(30)))


@pytest.mark.deployment
def test_nodes_with_data_of_their_own_are_audited(tmp_path: Path, alone: None) -> None:
    """Origin has the removed samples by heart, and is found out by what its client tells."""
    write_data(tmp_path)

    def goldfish(*words: str) -> None:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, (words, done.output, done.exception)

    deployment = Deployment(tmp_path / "state", 2)
    for number in (1, 2):
        child = deployment.children[f"node-{number}"]
        command = list(child.command)
        place = command.index("--node-config") + 1
        command[place] += f' data="npz" path="{tmp_path}/client-{number}.npz"'
        deployment.children[child.name] = replace(child, command=command)
    table = "".join(f"{k} = {json.dumps(v)}\n" for k, v in deployment.settings.items())
    (tmp_path / "config.toml").write_text(CONFIG.format(flower=table))
    run = tmp_path / "run"
    with deployment:
        goldfish("run", str(tmp_path / "config.toml"), "--out", str(run))
        goldfish("audit", str(run), "--tier", "quick")
    found = Audit.read(run / AUDIT)
    assert found.removed == 30
    assert (origin := found.quick["origin"].membership) is not None
    assert (retrained := found.quick["retrain"].membership) is not None
    assert retrained.low < 0.5 < origin.low
    store = deployment.node_folder(1) / "client.sqlite"
    with contextlib.closing(sqlite3.connect(store)) as db:
        assert db.execute("SELECT COUNT(*) FROM state WHERE digest IS NOT NULL").fetchone() == (0,)
