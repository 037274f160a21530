"""Kill a project at random points of train, unlearn and purge, and look whether anything is lost.

    python benchmarks/kills_project.py --points 200

A small project goes its way again and again. Each command is started in a process of
its own and killed (``kill -9``) after a random part of the time that it takes, a few times, and
then left to its end. After every kill the ledger must verify, every version that it names must be
whole, and no request may be in two versions. At each end the models must have the bits of a project
that was never killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch  # noqa: F401 (this and the next: once here, and not in every process)
import scipy.special  # noqa: F401

from goldfish.experiments.scenario import Machine
from goldfish.files import sha256_of
from goldfish.params import digest
from goldfish.project.project import Project
from goldfish.store import load_checkpoint

MACHINE = Machine(workers=1)
SMALLER = (
    ('name = "digits"', 'name = "npz"\npath = "../data.npz"'),
    ('name = "lenet5"', 'name = "mlp"'),
    ("rounds = 10", "rounds = 3"),
)
STEPS: dict[str, Callable[[Project], object]] = {
    "train": lambda project: list(project.train(MACHINE)),
    "unlearn": lambda project: list(project.unlearn(MACHINE)),
    "purge": lambda project: project.purge(),
}


def start(folder: Path, step: str) -> int:
    """Do a step in a process of its own; return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with Project.open(folder) as project:
            STEPS[step](project)
        status = 0
    except BaseException as error:
        print(f"{step}: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def finish(folder: Path, step: str) -> float:
    """Let a step come to its end; return the seconds it took."""
    begin = time.perf_counter()
    _, status = os.waitpid(start(folder, step), 0)
    if status:
        raise SystemExit(f"{step} failed in {folder}")
    return time.perf_counter() - begin


def kill(folder: Path, step: str, after: float) -> bool:
    """Start a step and kill it after so many seconds; tell whether it was still at work."""
    child = start(folder, step)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def in_child(look: Callable[[Path], list[str]], folder: Path) -> list[str]:
    """Look at a project in a process of its own: this one must start no threads before it forks."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writer, "w") as out:
            out.write("\n".join(look(folder)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        found = answer.read().splitlines()
    os.waitpid(child, 0)
    return found


def problems(folder: Path) -> list[str]:
    """Say what is wrong with a project after a kill."""
    with Project.open(folder) as project:
        found = project.ledger.verify()
        versions = {version.number: version for version in project.ledger.versions()}
        for artefact in project.ledger.artefacts("current"):
            path = folder / artefact.path
            if not path.exists() or sha256_of(path) != artefact.sha256:
                found.append(f"{artefact.path} is not whole")
        handled = [request for version in versions.values() for request in version.requests]
        found += [f"{r} was handled twice" for r in set(handled) if handled.count(r) > 1]
        asked = project.ledger.requests()
        if asked and not {r.id for r in asked if r.state in ("measured", "closed")} <= set(handled):
            found.append("a request is done, and in no version")
    return found


def bits(folder: Path) -> list[str]:
    """Return the digests of the models that are there."""
    with Project.open(folder) as project:
        return [
            digest(load_checkpoint(folder / artefact.path).params)
            for artefact in project.ledger.artefacts("current", "quarantined")
        ]


def ask(folder: Path) -> list[str]:
    """File a request for three samples of a client."""
    with Project.open(folder) as project:
        samples = project.samples(MACHINE)["client-1"][:3]
        return [project.forget("client-1", samples=samples, machine=MACHINE).id]


def new(folder: Path) -> Path:
    """Make a project that takes a moment."""
    images = np.random.default_rng(0).integers(0, 255, (90, 8, 8), dtype=np.uint8)
    labels = np.arange(90) % 3
    ids = np.array([f"sample-{place}" for place in range(90)])
    np.savez(
        folder.parent / "data.npz",
        x_train=images,
        y_train=labels,
        ids_train=ids,
        x_test=images,
        y_test=labels,
    )
    path = Project.init(folder)
    text = path.read_text()
    for large, small in SMALLER:
        text = text.replace(large, small)
    path.write_text(text)
    return folder


def main(points: int, each: int, seed: int) -> None:
    """Kill, look, go on, until there were so many kills."""
    draw = random.Random(seed)
    killed = dict.fromkeys(STEPS, 0)
    with tempfile.TemporaryDirectory() as place:
        whole = new(Path(place) / "whole")
        seconds: dict[str, float] = {}
        expected: dict[str, list[str]] = {}
        for step in STEPS:
            if step == "unlearn":
                in_child(ask, whole)
            seconds[step] = finish(whole, step)
            expected[step] = in_child(bits, whole)
        cycle = 0
        while sum(killed.values()) < points:
            cycle += 1
            folder = new(Path(place) / f"project-{cycle}")
            for step in STEPS:
                if step == "unlearn":
                    in_child(ask, folder)
                for _ in range(each):
                    if step == "unlearn" and not in_child(pending, folder):
                        break  # the kill came after the end
                    killed[step] += kill(folder, step, draw.uniform(0, seconds[step]))
                    if found := in_child(problems, folder):
                        raise SystemExit(f"{folder} after a kill in {step}: {found}")
                if step != "unlearn" or in_child(pending, folder):
                    finish(folder, step)
                if in_child(bits, folder) != expected[step]:
                    raise SystemExit(f"{folder}: other bits after {step}")
                if found := in_child(problems, folder):
                    raise SystemExit(f"{folder} at the end of {step}: {found}")
            left = [path for path in folder.rglob("*") if path.name.endswith(".part")]
            if left or not in_child(closed, folder):
                raise SystemExit(f"{folder}: not at its end, or left behind: {left}")
    words = ", ".join(f"{count} in {step}" for step, count in killed.items())
    print(f"{sum(killed.values())} kills ({words}) in {cycle} projects: nothing lost.")


def pending(folder: Path) -> list[str]:
    """Return the requests that wait."""
    with Project.open(folder) as project:
        return [request.id for request in project.pending()]


def closed(folder: Path) -> list[str]:
    """Return the requests that are closed."""
    with Project.open(folder) as project:
        return [request.id for request in project.ledger.requests("closed")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a project at random points.")
    parser.add_argument("--points", type=int, default=200, help="How many kills.")
    parser.add_argument("--each", type=int, default=3, help="Kills of a command before its end.")
    parser.add_argument("--seed", type=int, default=0, help="Of the random points.")
    options = parser.parse_args()
    main(options.points, options.each, options.seed)
