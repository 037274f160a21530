"""The loop that a tutorial has, in a process of its own: what the engine is compared with.

Nothing that the engine sets for its process helps it there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from goldfish.bench.child import argument, failure, parse
from goldfish.bench.rounds import BATCH, RATE, Workload, load_images
from goldfish.types import Examples

SAMPLES = 20_000
"""Samples of a turn."""


def plain_loop(model: nn.Module, data: Examples, samples: int) -> float:
    """Train the way a tutorial writes it, on all of torch's threads; return images a second."""
    begin = time.perf_counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model.train()
    for positions in torch.randperm(len(data))[:samples].split(BATCH):
        inputs, labels = data.batch(positions)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    loss.item()  # a GPU is waited for
    return samples / (time.perf_counter() - begin)


def plain_model(work: Workload) -> nn.Module:
    """Return the model in PyTorch's own layers, as the author of a plain loop has it."""
    model = work.factory()()
    return (nn.Sequential(*model) if isinstance(model, nn.Sequential) else model).to(work.device)


@contextmanager
def in_its_process(work: Workload) -> Iterator[Callable[[], float]]:
    """Start the process; yield what trains there once and returns images a second."""
    own = argument(work, work.clients[0])
    command = [sys.executable, "-P", "-m", "goldfish.bench.plain", own]
    with (
        tempfile.TemporaryFile(mode="w+", errors="replace") as complaints,
        subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
        ) as process,
    ):

        def turn() -> float:
            said, heard = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
            try:
                said.write("go\n")
                said.flush()
                return float(heard.readline())
            except (BrokenPipeError, ValueError):
                process.wait()
                complaints.seek(0)
                raise failure("The plain loop", complaints.read()) from None

        try:
            turn()  # it warms up
            yield turn
        finally:
            process.kill()


def main() -> None:
    """Train once for every line that comes in, and print images a second."""
    work = parse(sys.argv[1])
    data, _ = load_images(work)
    model = plain_model(work)
    for _ in sys.stdin:
        print(plain_loop(model, data, min(len(data), SAMPLES)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
