"""``goldfish flower up`` with real processes: it starts all of them and leaves none behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from goldfish.errors import DeploymentError, StoreError
from goldfish.flower.ops.keys import make_keys
from goldfish.flower.ops.processes import free_ports
from goldfish.flower.ops.up import Deployment

Eventually = Callable[[Callable[[], object]], None]
ProcessesOf = Callable[[Path], dict[int, str]]


def test_it_ends_with_everything_that_it_started(
    tmp_path: Path,
    eventually: Eventually,
    processes_of: ProcessesOf,
    start_process: Callable[..., subprocess.Popen[bytes]],
) -> None:
    command = [sys.executable, "-m", "goldfish", "flower", "up", "--nodes", "2"]
    (port,) = free_ports(1, "127.0.0.1")
    command += ["--state-dir", str(tmp_path / "state"), "--port", str(port)]
    output = tmp_path / "output"
    with output.open("wb") as file:
        up = start_process(command, stdout=file, stderr=subprocess.STDOUT)
    eventually(lambda: "Ctrl-C ends" in output.read_text() or up.poll() is not None)
    text = output.read_text()
    assert "2 nodes are online" in text
    assert "Every account of this machine can reach it" in text
    assert f"--set flower.superlink=127.0.0.1:{port} --set flower.insecure=true" in text
    with pytest.raises(DeploymentError, match=f"Port {port} of 127.0.0.1 is in use"):
        Deployment(tmp_path / "other", 1, port=port)
    commands = list(processes_of(tmp_path / "state").values())
    for name in ("flower-superlink", "flower-supernode", "flower-superexec"):
        assert any(name in command for command in commands)
    with pytest.raises(DeploymentError, match=rf"started by process {up.pid}\b"):
        Deployment(tmp_path / "state", 1).start()
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert processes_of(tmp_path / "state") == {}
    assert "Ended." in output.read_text()


def test_a_process_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, processes_of: ProcessesOf
) -> None:
    deployment = Deployment(tmp_path / "state", 1)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "superlink.db").write_text("not a database")
    with pytest.raises(DeploymentError, match=r"(?s)superlink ended .*superlink\.log.*database"):
        deployment.__enter__()
    assert processes_of(tmp_path / "state") == {}


def test_keys_that_do_not_suffice_are_refused_before_anything_starts(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys", 2)
    with pytest.raises(StoreError, match="has keys for 2 nodes, and 3 are to start"):
        Deployment(tmp_path / "state", 3, keys=made.folder)
    public = made.node_public(2).rename(tmp_path / "away")
    with pytest.raises(StoreError, match="all files of node 2 must be there"):
        Deployment(tmp_path / "state", 2, keys=made.folder)
    public.rename(made.node_public(2))
    made.server_key.unlink()
    with pytest.raises(StoreError, match=r"server\.key is not a readable private key"):
        Deployment(tmp_path / "state", 2, keys=made.folder)
    assert not (tmp_path / "state").exists()


def test_a_nodes_settings_are_read_back_by_flower(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path / "a place 🐟", 1, data_dir=tmp_path)
    command = list(deployment.children["node-1"].command)
    assert parse_config_args([command[command.index("--node-config") + 1]]) == {
        "partition-id": 0,
        "num-partitions": 1,
        "state-dir": str(tmp_path / "a place 🐟" / "node-1"),
        "data-dir": str(tmp_path),
    }
