"""Whole trainings in processes of their own: their time with start-up, and their peak memory."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from goldfish.bench.rounds import Bench, Workload, load_images
from goldfish.errors import ConfigError

ENGINE = "goldfish.bench.child"
FLOWER = "goldfish.bench.flower_simulation"
ROUNDS = 3
POLL = 0.2
"""Seconds between two looks at the memory."""


@dataclass(frozen=True)
class Whole:
    """A training in a process of its own."""

    seconds: float
    """From the start of the process to its end."""
    rate: float
    """Images a second of its rounds."""
    peak: int | None
    """Bytes of the process and of those it started, at most; None where that is not told."""


def run_whole(module: str, work: Workload, clients: int) -> Whole:
    """Run a module that trains for some rounds and prints what they took."""
    command = [sys.executable, "-P", "-m", module, *arguments(work, clients)]
    begin = time.perf_counter()
    with subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _tree_bytes(process.pid))
            time.sleep(POLL)
        out, err = process.communicate()
        seconds = time.perf_counter() - begin
    if process.returncode:
        raise failure(module, err.decode(errors="replace"))
    told = json.loads(out.decode().strip().splitlines()[-1])
    rate = told["samples"] / statistics.median(told["rounds"])
    return Whole(seconds, rate, peak or None)


def failure(what: str, complaints: str) -> ConfigError:
    """Return the error for a process that failed: the last line of what it complained of."""
    last = complaints.strip().splitlines()[-1:]
    return ConfigError(f"{what} failed: {''.join(last)}")


def arguments(work: Workload, clients: int) -> list[str]:
    """Return a workload as arguments for :func:`parse`."""
    options = ["--model", work.model, "--clients", str(clients), "--samples", str(work.samples)]
    if work.data_dir is not None:
        options += ["--data-dir", str(work.data_dir)]
    options += ["--device", work.device]
    if work.compiled:
        options.append("--compile")
    return options


def parse(argv: Sequence[str] | None = None) -> Workload:
    """Read the arguments of a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args(argv)
    return Workload(
        given.model,
        clients=(given.clients,),
        samples=given.samples,
        device=given.device,
        compiled=given.compile,
        data_dir=given.data_dir,
    )


def _tree_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, shared pages counted by their share."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        parents.setdefault(parent, []).append(int(folder.name))
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += parents.get(one, [])
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def main() -> None:
    """Train with the engine and print the seconds of the rounds."""
    work = parse()
    data, _ = load_images(work)
    bench = Bench(work, data, work.clients[0])
    rounds = [record.cost.seconds for record in bench.train(ROUNDS).rounds]
    print(json.dumps({"rounds": rounds, "samples": len(data)}))  # noqa: T201


if __name__ == "__main__":
    main()
