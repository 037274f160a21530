"""What tests with real Flower processes share: finding them, and waiting with a limit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT = 60.0


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return a function that waits until something holds, or fails."""

    def wait(holds: Callable[[], object], seconds: float = LIMIT) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.05)

    return wait


def find_processes(folder: Path) -> dict[int, str]:
    """Return the ids and commands of all processes whose Flower home lies in ``folder``.

    They are found wherever they hang in the tree of processes, orphans too.
    """
    mark = f"FLWR_HOME={folder}/".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if mark in environment:
            found[int(process.name)] = command
    return found


@pytest.fixture
def processes_of(tmp_path: Path) -> Iterator[Callable[[Path], dict[int, str]]]:
    """Return a function that finds a deployment's processes; afterwards none is left."""
    yield find_processes
    for pid in find_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)
