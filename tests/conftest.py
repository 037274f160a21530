"""Shared by all tests: determinism settings and a small federation that trains in a second."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from goldfish.cli import main
from goldfish.data import TensorExamples
from goldfish.terminal import console
from goldfish.types import Client

if not torch.cuda.is_available():  # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("goldfish", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("goldfish")
torch.set_num_threads(1)

CLASSES = 3
FEATURES = 6


def make_examples(count: int, seed: int, prefix: str = "s") -> TensorExamples:
    """Return separable points: the class is the largest of the first three features."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, FEATURES, generator=generator)
    labels = points[:, :CLASSES].argmax(dim=1)
    return TensorExamples(points, labels, [f"{prefix}{i}" for i in range(count)])


class SmallNet(nn.Module):
    """A model with everything that matters: weights, BatchNorm buffers, an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.out(torch.relu(self.norm(self.hidden(inputs))))
        return logits


@pytest.fixture
def small_net() -> type[SmallNet]:
    return SmallNet


@pytest.fixture
def make_clients() -> Callable[..., list[Client]]:
    def build(sizes: Sequence[int] = (30, 24, 18)) -> list[Client]:
        return [
            Client(f"client-{n}", make_examples(size, seed=n, prefix=f"c{n}-"))
            for n, size in enumerate(sizes, start=1)
        ]

    return build


@pytest.fixture
def test_set() -> TensorExamples:
    return make_examples(60, seed=99, prefix="t")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of whole deployments, half of them on each of the first two workers.

    They take minutes, in which they often wait; more than two at a time crowd each other out.
    """
    deployments = [item for item in items if item.get_closest_marker("deployment") is not None]
    others = [item for item in items if item not in deployments]
    half = len(deployments) // 2
    first, second = deployments[:half], deployments[half:]
    share = len(items) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    place = max(0, share - len(first))  # the second worker's tests begin there
    items[:] = [*first, *others[:place], *second, *others[place:]]


def goldfish_here(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder, in this process: a new one imports PyTorch for seconds."""
    out, err = io.StringIO(), io.StringIO()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in signals}
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patched.chdir(folder)
        patched.setenv("COLUMNS", "200")  # for processes that it starts
        patched.setattr(console, "width", 200)
        patched.setattr(sys, "argv", ["goldfish", *map(str, words)])
        patched.setattr(sys, "path", [*sys.path])  # to which a command may add
        with pytest.raises(SystemExit) as end:
            main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    code = end.value.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


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


def end_as_usual() -> None:
    """Undo what nohup and a shell's background do to a process, and so to what it starts."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def start_process(
    processes_of: Callable[[Path], dict[int, str]],
) -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Return a function that starts a process; it and what it started end with the test."""
    started: list[subprocess.Popen[Any]] = []

    def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        started.append(subprocess.Popen(command, preexec_fn=end_as_usual, **options))
        return started[-1]

    yield start
    for process in started:
        with process:  # closes its pipes
            process.terminate()  # it may have started others that it can end itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
