"""A project over a real deployment: SuperLink, SuperNodes and apps are processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.project.conftest import SETTINGS, write_data
from tests.project.test_on_flower import where
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.flower.ops.up import Deployment
from goldfish.project.project import Project


@pytest.mark.deployment
def test_the_commands_of_a_project_reach_a_node_and_purge_it(tmp_path: Path) -> None:
    """One round each, by typed commands; then the folders of project and node are searched.

    Every message is a process. ``test_on_flower.py`` has several nodes, without processes.
    """
    write_data(tmp_path / "data.npz")
    data = np.load(tmp_path / "data.npz")
    folder = tmp_path / "project"
    said = []

    def goldfish(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--project", str(folder)])
        assert done.exit_code == 0, (words, done.output, done.exception)
        said.append(done.stdout)
        return done.stdout

    with Deployment(tmp_path / "state", 1, path=tmp_path / "data.npz") as deployment:
        table = "".join(f"{k} = {json.dumps(v)}\n" for k, v in deployment.settings.items())
        settings = SETTINGS.replace("data.npz", "../data.npz").format(more="")
        for old, new in (("clients = 3", "clients = 1"), ("rounds = 2", "rounds = 1")):
            settings = settings.replace(old, new)
        Project.init(folder)
        (folder / "goldfish.toml").write_text(f'engine = "flower"\n{settings}[flower]\n{table}')
        goldfish("train")
        removed = goldfish("clients", "client-1").split()[:2]
        (tmp_path / "ids.txt").write_text("\n".join(removed))
        goldfish("forget", "--client", "client-1", "--samples", str(tmp_path / "ids.txt"))
        goldfish("unlearn", "--method", "retrain")
        assert "clients/client-1/v1 (client state)" in goldfish("purge")
        assert "No request waits." in goldfish("status")
    pixels = dict(zip(data["ids_train"].tolist(), data["x_train"], strict=True))
    needles = {f"id of {name}": name.encode() for name in removed}
    needles |= {f"pixels of {name}": pixels[name].tobytes() for name in removed}
    assert where(needles, folder, tmp_path / "state") == set()
    with Project.open(folder) as project:
        assert [r.state for r in project.ledger.requests()] == ["closed"]
        assert project.ledger.verify() == []
