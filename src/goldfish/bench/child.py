"""Whole trainings in processes of their own: their time with start-up, and their peak memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from goldfish.bench.rounds import Bench, Workload, load_images
from goldfish.errors import ConfigError

ENGINE = "goldfish.bench.child"
FLOWER = "goldfish.bench.flower_simulation"
ROUNDS = 3
POLL = 0.2
"""Seconds between two looks at the memory."""
WORKLOAD = TypeAdapter(Workload)


@dataclass(frozen=True)
class Whole:
    """A training in a process of its own."""

    seconds: float
    """From the start of the process to its end."""
    rate: float
    """Images a second of its rounds."""
    peak: int | None
    """Most bytes of the process and its children at a time; None where the system does not say."""


def run_whole(module: str, work: Workload, clients: int) -> Whole:
    """Run a module that trains for some rounds and prints what they took."""
    command = [sys.executable, "-P", "-m", module, argument(work, clients)]
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


def argument(work: Workload, clients: int) -> str:
    """Return a workload, for so many clients, as text for :func:`parse`.

    One local epoch in fp32, which is what all children do.
    """
    own = replace(work, clients=(clients,), local_epochs=1, precision="fp32")
    return WORKLOAD.dump_json(own).decode()


def parse(argument: str) -> Workload:
    """Read the argument of a child."""
    return WORKLOAD.validate_json(argument)


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
    work = parse(sys.argv[1])
    data, _ = load_images(work)
    bench = Bench(work, data, work.clients[0])
    rounds = [record.cost.seconds for record in bench.train(ROUNDS).rounds]
    print(json.dumps({"rounds": rounds, "samples": len(data)}))  # noqa: T201


if __name__ == "__main__":
    main()
