"""What tests with real Flower processes share: a trial, and waiting with a limit."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from goldfish.experiments.config import load_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, Scenario
from goldfish.federation.in_process import InProcess
from goldfish.flower.ops.up import Deployment
from goldfish.types import Failure, RoundReplies, Task

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


FRAGILE = '''
"""A model that a test can hold up or let fail, on one node at a time."""

import os
import time
from pathlib import Path

from torch import Tensor, nn


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        here = Path(os.environ.get("FLWR_HOME", "/nowhere"))
        if (here / "fail").exists():
            raise RuntimeError("the disk is on fire")
        if (here / "hold").exists():
            (here / "held").touch()
            while (here / "hold").exists():
                time.sleep(0.05)
        return self.net(images)
'''

CONFIG = """
seed = 3
engine = "flower"
[data]
name = "digits"
clients = {nodes}
[model]
name = "fragile:Fragile"
[training]
rounds = {rounds}
batch_size = 20
learning_rate = 0.05
quorum = 0.3
[deletion]
rate = 0.1
backdoor_target = 7
[unlearning]
methods = ["goldfish"]
rounds = 1
"""


class Trial:
    """An experiment on a real deployment, whose clients a test can hold up or let fail."""

    def __init__(self, folder: Path, nodes: int, rounds: int, keys: Path | None) -> None:
        self.folder = folder
        self.config = folder / "trial.toml"
        self.out = folder / "out"
        self._output = folder / "output"
        self.deployment = Deployment(folder / "state", nodes, keys=keys, models=["fragile:Fragile"])
        table = "".join(f"{k} = {json.dumps(v)}\n" for k, v in self.deployment.settings.items())
        self.config.write_text(f"{CONFIG.format(nodes=nodes, rounds=rounds)}\n[flower]\n{table}")

    def flag(self, node: int, name: str) -> Path:
        """Return the file that holds a node's client up (``hold``) or lets it fail (``fail``)."""
        return self.deployment.node_folder(node) / "flwr" / name

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Start ``goldfish run`` with this configuration, or go on with it."""
        again = (self.out / "config.toml").exists()
        what = [str(self.out), "--resume"] if again else [str(self.config), "--out", str(self.out)]
        command = [sys.executable, "-m", "goldfish", "run", *what, "--threads", "1", *options]
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
            )

    def finish(self, run: subprocess.Popen[bytes], seconds: float = 300) -> None:
        """Wait for a run that must succeed."""
        try:
            run.wait(seconds)
        finally:
            run.kill()
            run.wait()
        assert run.returncode == 0, self.said + self.logs()

    @property
    def said(self) -> str:
        """What the runs printed so far."""
        return self._output.read_text()

    def wait_until(self, holds: Callable[[], object], run: subprocess.Popen[bytes]) -> None:
        """Wait until something holds, while the run goes on."""
        end = time.monotonic() + 2 * LIMIT
        while not holds():
            assert run.poll() is None, self.said + self.logs()
            assert time.monotonic() < end, "it did not happen in time\n" + self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of all logs, for a test that failed."""
        children = self.deployment.children.values()
        return "\n".join(f"--- {child.name}\n{child.last_words(25)}" for child in children)

    def rounds(self, phase: str) -> list[dict[str, Any]]:
        """Return the finished rounds of a phase."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["phase"] == phase]

    def carried_out(self, node: int) -> list[tuple[str, int]]:
        """Return the phase and round of every step that a client has done, from its own store."""
        database = self.deployment.node_folder(node) / "client.sqlite"
        with contextlib.closing(sqlite3.connect(database)) as store:
            return list(store.execute("SELECT phase, round FROM done ORDER BY at"))

    def undisturbed(
        self, lost: Mapping[tuple[str, int], Collection[str]] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Run the same experiment in this process, and return its models by phase.

        ``lost`` names the clients that do not answer in a round of a phase.
        """

        def engine(scenario: Scenario, machine: Machine, run_id: str) -> InProcess:
            federation = in_process(scenario, machine, run_id)
            everybody = federation.run

            def run(tasks: Sequence[Task[Any]]) -> RoundReplies:
                context = tasks[0].context
                gone = (lost or {}).get((context.phase, context.round), ())
                there = [u for u in everybody(tasks).updates if u.client_id not in gone]
                return RoundReplies(there, [Failure(name, "Lost", "") for name in gone])

            federation.run = run  # type: ignore[method-assign]
            return federation

        config = load_config(self.config, ["engine=in-process"])
        out = self.folder / "undisturbed"
        for _ in run_experiment(config, out, Machine(threads=1), engine=engine):
            pass
        return self.models(out)

    def models(self, out: Path | None = None) -> dict[str, dict[str, Tensor]]:
        """Return the final models of a run by phase."""
        files = ((out or self.out) / "checkpoints").glob("*.safetensors")
        return {path.stem: load_file(path) for path in files}


@pytest.fixture
def trial(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes_of: Callable[[Path], dict[int, str]],
) -> Iterator[Callable[..., Trial]]:
    """Return a function that makes a trial; its processes end with the test."""
    (tmp_path / "fragile.py").write_text(FRAGILE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(tmp_path)

    def make(nodes: int, rounds: int, keys: Path | None = None) -> Trial:
        return Trial(tmp_path, nodes, rounds, keys)

    yield make
    sys.modules.pop("fragile", None)
