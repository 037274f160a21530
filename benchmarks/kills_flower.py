"""Kill -9 at random moments of a run on Flower: same bits, or a failure that is stated.

    python benchmarks/kills_flower.py --out DIR --kills 200 --seconds 3600

One deployment of two nodes on loopback; run after run of a small experiment on digits. In each run
up to four processes are killed, one after the other, each at a random moment: a client app, a
SuperNode with all that it runs, the SuperLink, or the server app. What was killed is started again,
and a run that ends in words is resumed. Then its models are compared with those of an undisturbed
run in one process. Every kill is one line of ``DIR/kills.csv``. The sweep ends when it has so many,
or when its seconds are used up; the same command goes on where it ended.

The outcome of a run, which all of its kills share:

- *same bits*: it says that it is done, and all models are those of the undisturbed run;
- *stated*: it is done with other models, and its rounds name the clients that did not answer;
- *not done*: it never said that it is done, however often it was resumed;
- *WRONG*: it says that it is done, and its models are others without a word. There must be none.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from goldfish.experiments.config import load_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine
from goldfish.flower.ops.up import Deployment
from goldfish.params import digest
from goldfish.store import load_checkpoint

CONFIG = """
engine = "flower"
[data]
name = "digits"
clients = 2
[model]
name = "mlp"
[training]
rounds = 1
batch_size = 50
learning_rate = 0.05
quorum = 1.0
[deletion]
rate = 0.1
[unlearning]
methods = ["goldfish"]
rounds = 1
[flower]
timeout = 240
"""
COLUMNS = ("run", "victim", "after_seconds", "rounds_done", "resumed", "outcome", "last_words")
KILLS_A_RUN = 4
MOST_SECONDS = 600.0
"""A run that takes longer than this, with all that is resumed of it, is not done."""


class Sweep:
    """A deployment, and the runs on it that are disturbed."""

    def __init__(self, folder: Path, deployment: Deployment, draws: random.Random) -> None:
        self._folder, self._deployment, self._draws = folder, deployment, draws
        self._victims: Mapping[str, Callable[[], bool]] = {
            "client app": lambda: self._kill_one("flwr-clientapp"),
            "SuperNode": self._kill_node,
            "SuperLink": self._kill_superlink,
            "server app": lambda: self._kill_one("flwr-serverapp"),
        }

    def run(
        self, number: int, expected: Mapping[str, str], usual: float
    ) -> list[dict[str, object]]:
        """Disturb one run, and return a line for each kill.

        A kill comes at most ``usual`` seconds after the start, or after the kill before it.
        """
        out = self._folder / f"run-{number}"
        shutil.rmtree(out, ignore_errors=True)
        kills: list[dict[str, object]] = []
        resumed, end = 0, time.monotonic() + MOST_SECONDS
        process = self._start(out)
        began = time.monotonic()
        moment = began + self._draws.uniform(0, usual)
        try:
            while time.monotonic() < end:
                if process.poll() == 0:
                    break
                if process.poll() is not None:
                    resumed += 1
                    process = self._start(out)
                if time.monotonic() >= moment and len(kills) < KILLS_A_RUN:
                    victim = self._draws.choice(list(self._victims))
                    after = round(time.monotonic() - began, 1)
                    rounds = len(_rounds(out))
                    if self._victims[victim]():
                        kills.append(
                            {"victim": victim, "after_seconds": after, "rounds_done": rounds}
                        )
                        moment = time.monotonic() + self._draws.uniform(0, usual)
                self._revive()
                time.sleep(0.1)
            done = process.poll() == 0
        finally:
            process.kill()
            process.wait()
        outcome = self._outcome(out, expected, done=done)
        said = (self._folder / "output").read_text(errors="replace").strip().splitlines()
        words = "" if outcome == "same bits" else (said or [""])[-1][:200]
        shared = {"run": number, "resumed": resumed, "outcome": outcome, "last_words": words}
        if outcome == "same bits":
            shutil.rmtree(out)
        return [{**kill, **shared} for kill in kills]

    def _outcome(self, out: Path, expected: Mapping[str, str], *, done: bool) -> str:
        if not done:
            return "not done"
        if models_of(out) == expected:
            return "same bits"
        return "stated" if any(line["failures"] for line in _rounds(out)) else "WRONG"

    def _start(self, out: Path) -> subprocess.Popen[bytes]:
        again = (out / "config.toml").exists()
        config = str(self._folder / "kills.toml")
        what = [str(out), "--resume"] if again else [config, "--out", str(out)]
        command = [sys.executable, "-m", "goldfish", "run", *what, "--threads", "1"]
        with (self._folder / "output").open("wb") as output:
            return subprocess.Popen(
                command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT
            )

    def _kill_one(self, program: str) -> bool:
        """Kill one of this deployment's processes of a program, if there is any."""
        mark = f"FLWR_HOME={self._deployment.folder}/".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                ours = mark in (process / "environ").read_bytes()
            except OSError:
                continue
            if ours and any(word.endswith(program.encode()) for word in words[:2]):
                found.append(int(process.name))
        if found:
            os.kill(self._draws.choice(sorted(found)), signal.SIGKILL)
        return bool(found)

    def _kill_node(self) -> bool:
        number = self._draws.randint(1, self._deployment.nodes)
        self._deployment.children[f"node-{number}"].kill()
        return True

    def _kill_superlink(self) -> bool:
        self._deployment.children["superlink"].kill()
        return True

    def _revive(self) -> None:
        """Start again what is not there, as a service manager does."""
        children = self._deployment.children
        if not children["superlink"].running:
            self._deployment.start_superlink()
        for name, child in children.items():
            if not child.running:
                self._deployment.start_child(name)


def _seconds_undisturbed(
    folder: Path, deployment: Deployment, expected: Mapping[str, str]
) -> float:
    """Return how long a run on Flower takes without any kill, which has the same bits too."""
    began = time.monotonic()
    Sweep(folder, deployment, random.Random(0)).run(0, expected, math.inf)
    if (folder / "run-0").exists():
        sys.exit(f"A run without any kill is not the one in one process: {folder / 'run-0'}")
    return time.monotonic() - began


def models_of(out: Path) -> dict[str, str]:
    """Return the digest of each phase's model."""
    files = (out / "checkpoints").glob("*.safetensors")
    return {path.stem: digest(load_checkpoint(path).params) for path in files}


def _rounds(out: Path) -> list[dict[str, object]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Go on with the sweep, and print what came of all kills so far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600)
    options = parser.parse_args()
    folder, end = options.out.resolve(), time.monotonic() + options.seconds
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "kills.csv"
    if not table.exists():
        table.write_text(",".join(COLUMNS) + "\n")
    with table.open(newline="") as lines:
        done = list(csv.DictReader(lines))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the deployment ends with it
    with Deployment(folder / "state", 2) as deployment:
        own = "".join(f"{k} = {json.dumps(v)}\n" for k, v in deployment.settings.items())
        config = folder / "kills.toml"
        config.write_text(CONFIG + own)
        undisturbed = folder / "undisturbed"
        shutil.rmtree(undisturbed, ignore_errors=True)
        here = load_config(config, ["engine=in-process"])
        for _ in run_experiment(here, undisturbed, Machine(threads=1)):
            pass
        expected = models_of(undisturbed)
        usual = _seconds_undisturbed(folder, deployment, expected)
        number = max((int(line["run"]) for line in done), default=0)
        while len(done) < options.kills and time.monotonic() < end:
            number += 1
            sweep = Sweep(folder, deployment, random.Random(number))
            lines = sweep.run(number, expected, usual)
            with table.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerows(lines)
            done += [{name: str(line[name]) for name in COLUMNS} for line in lines]
            for line in lines:
                print(line, flush=True)
    counts = Counter((line["victim"], line["outcome"]) for line in done)
    for (victim, outcome), count in sorted(counts.items()):
        print(f"{victim:10}  {outcome:9}  {count}")
    print(f"{len(done)} kills")


if __name__ == "__main__":
    main()
