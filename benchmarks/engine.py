"""How fast the engine trains, as ratios to a plain PyTorch loop run beside it.

    python benchmarks/engine.py [--clients 5] [--samples 12000] [--repetitions 3]

Synthetic 28x28 images, LeNet-5, batch 100. Plain loop, engine and Goldfish take turns, so that
a noisy machine slows all of them; the median of the repetitions is reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.data import partition as partitions
from goldfish.models import model_factory
from goldfish.types import Client, DeletionRequest

BATCH = 100


def plain_loop(examples: TensorExamples, model: nn.Module) -> None:
    """One epoch the way a tutorial writes it, on all of torch's threads."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for positions in torch.randperm(len(examples)).split(BATCH):
        inputs, labels = examples.batch(positions)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=12000)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    images = torch.randint(0, 256, (options.samples, 1, 28, 28), dtype=torch.uint8)
    data = TensorExamples(images, torch.arange(options.samples) % 10)
    test = TensorExamples(images[:2000], data.labels[:2000])
    factory = model_factory("lenet5", num_classes=10, image_shape=(1, 28, 28))
    parts = partitions.split(data, partitions.partition(data, options.clients))
    federation = goldfish.InProcess([Client(i, part) for i, part in parts.items()], factory)
    trained = goldfish.train(federation, rounds=1, learning_rate=0.01)
    first = parts["client-1"]
    requests = [DeletionRequest("client-1", sample_ids=list(first.ids)[: len(first) // 4])]
    plain_model = factory()
    work: dict[str, Callable[[], object]] = {
        "plain loop": lambda: plain_loop(data, plain_model),
        "training round": lambda: goldfish.train(federation, rounds=1, learning_rate=0.01),
        "retrain round": lambda: goldfish.unlearn(trained, requests, method="retrain", rounds=1),
        "goldfish round": lambda: goldfish.unlearn(
            trained, requests, method="goldfish", rounds=1, test=test
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.repetitions):
        for name, call in work.items():
            times[name].append(seconds(call))
    median = {name: statistics.median(taken) for name, taken in times.items()}
    threads = f"{torch.get_num_threads()} threads, {federation.workers} workers"
    print(f"LeNet-5, {options.clients} clients, {options.samples} images, {threads}")
    for name, value in median.items():
        print(f"  {name:<15} {value:7.2f} s   {options.samples / value:9,.0f} images/s")
    print(f"  engine / plain loop        {median['plain loop'] / median['training round']:.2f}")
    print(f"  goldfish / retrain round   {median['goldfish round'] / median['retrain round']:.2f}")


if __name__ == "__main__":
    main()
