"""Processes end with their parent's wish, also when it is in a hurry or was killed itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from goldfish.errors import DeploymentError
from goldfish.flower.ops.processes import Child, stop
from goldfish.flower.ops.up import Deployment

STUBBORN = ["/bin/sh", "-c", "trap '' TERM; echo there; while true; do sleep 0.1; done"]


def stubborn(name: str, folder: Path) -> Child:
    return Child(name, STUBBORN, dict(os.environ), folder / f"{name}.log")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A deployment whose processes are no Flower, and do not end when they are asked to."""
    made = Deployment(tmp_path / "state", 2)
    made.children = {name: stubborn(name, tmp_path) for name in made.children}
    made._claim_folder()
    yield made
    for child in made.children.values():
        child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_a_child_ends_by_a_signal_that_its_parent_ignores(
    number: signal.Signals, tmp_path: Path, ignoring: None
) -> None:
    child = Child("patient", ["/bin/sleep", "60"], dict(os.environ), tmp_path / "log")
    child.start()
    try:
        assert child.process is not None
        os.kill(child.pid, number)
        assert child.process.wait(10) == -number
    finally:
        child.kill()


def interrupt(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_stop_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = [stubborn(name, tmp_path) for name in ("one", "two")]
    for child in children:
        child.start()
    monkeypatch.setattr("goldfish.flower.ops.processes.time.sleep", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            stop(children)
        assert not any(child.running for child in children)
    finally:
        for child in children:
            child.kill()


def test_a_second_interruption_leaves_no_process_and_no_lock(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in deployment.children:
        deployment.start_child(name)
    monkeypatch.setattr("goldfish.flower.ops.processes.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        deployment.stop()
    assert not any(child.running for child in deployment.children.values())
    monkeypatch.undo()
    again = Deployment(deployment.folder, 1)
    again._claim_folder()
    again._release_folder()


def test_a_folder_that_is_taken_names_the_processes_that_hold_it(deployment: Deployment) -> None:
    """The children hold it too, so that those of a parent that was killed can be ended."""
    for name in deployment.children:
        deployment.start_child(name)
    deployment.children["node-1"].kill()
    deployment.start_child("node-1")
    deployment._release_folder()  # as when this process were killed
    pids = " ".join(str(child.pid) for child in deployment.children.values())
    with pytest.raises(DeploymentError, match=rf"process {os.getpid()}\. .* kill {pids}$"):
        Deployment(deployment.folder, 1).start()
    assert deployment.folder.stat().st_mode & 0o077 == 0
