"""The engine's rounds against a plain PyTorch loop of the same model, taking turns.

All are slowed by a noisy machine alike, so the ratios hold where the seconds do not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from goldfish.data import TensorExamples, load, removal
from goldfish.data import partition as partitions
from goldfish.errors import DataError
from goldfish.federation import InProcess
from goldfish.models import model_factory
from goldfish.models.pooling import MaxPool2x2
from goldfish.stepping import Precision
from goldfish.types import Client, DeletionRequest, ModelFactory
from goldfish.workflow import Trained, train, unlearn

BATCH = 100
RATE = 0.01
PLAIN_SAMPLES = 20_000
"""Samples of a plain loop's turn."""

DATASETS = {"lenet5": "mnist", "lenet5-cifar": "cifar-10"}
"""What a model is measured on; the ResNets take CIFAR-10's shape too."""


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    model: str = "lenet5"
    clients: Sequence[int] = (5, 100)
    samples: int = 60_000
    device: str = "cpu"
    precision: Precision = "fp32"
    local_epochs: int = 1
    repetitions: int = 3
    compiled: bool = False
    data_dir: Path | None = None


@dataclass
class Measured:
    """Images a second of each repetition, and what was spent before the first."""

    name: str
    rates: list[float] = field(default_factory=list)
    preparation: float = 0.0

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)


def load_images(work: Workload) -> tuple[TensorExamples, str]:
    """Return the images on the device, and what they are: the dataset, or noise of its shape."""
    name = DATASETS.get(work.model, "cifar-10")
    try:
        data = load(name, work.data_dir).train
        if len(data) >= work.samples:
            images, labels = data.images[: work.samples], data.labels[: work.samples]
            kept = TensorExamples(images, labels, mean=data.mean, std=data.std)
            return kept.to(work.device), name
    except DataError:
        pass
    shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
    images = torch.randint(0, 256, (work.samples, *shape), dtype=torch.uint8)
    labels = torch.arange(work.samples) % 10
    noise = TensorExamples(images, labels, mean=[0.5] * shape[0], std=[0.5] * shape[0])
    return noise.to(work.device), f"noise in the shape of {name}"


def factory_for(work: Workload) -> ModelFactory:
    """Return what builds the model."""
    shape = (1, 28, 28) if DATASETS.get(work.model) == "mnist" else (3, 32, 32)
    return model_factory(work.model, num_classes=10, image_shape=shape)


def plain_loop(model: nn.Module, data: TensorExamples, samples: int) -> float:
    """Train the way a tutorial writes it, on all of torch's threads; return images a second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    model.train()
    begin = time.perf_counter()
    for positions in torch.randperm(len(data))[:samples].split(BATCH):
        inputs, labels = data.batch(positions)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    loss.item()  # waits for a GPU
    return samples / (time.perf_counter() - begin)


def in_torchs_layers(model: nn.Module) -> nn.Module:
    """Return the model with PyTorch's own pooling, as a plain loop's author would have it."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, MaxPool2x2):
                setattr(module, name, nn.MaxPool2d(2))
    return model


class Bench:
    """A federation of one size: its training rounds, and unlearning on it."""

    def __init__(self, work: Workload, data: TensorExamples, clients: int) -> None:
        self._work = work
        self._data = data
        self.partition = partitions.partition(data, clients)
        members = [Client(i, part) for i, part in partitions.split(data, self.partition).items()]
        self._federation = InProcess(
            members, factory_for(work), device=work.device, compiled=work.compiled
        )

    def train(self, rounds: int = 1) -> Trained:
        """Train for some rounds."""
        work = self._work
        return train(
            self._federation,
            rounds=rounds,
            learning_rate=RATE,
            batch_size=BATCH,
            local_epochs=work.local_epochs,
            precision=work.precision,
        )

    def rate(self) -> float:
        """Return the images a second of a training round."""
        return _rate(self.train())

    def unlearning(
        self, trained: Trained, method: str, requests: Sequence[DeletionRequest], rounds: int
    ) -> tuple[float, float]:
        """Return the seconds of a round, and the images a second after the first."""
        test = TensorExamples(self._data.images[:10_000], self._data.labels[:10_000])
        settings: dict[str, Any] = {"local_stop": False} if method == "goldfish" else {}
        done = unlearn(trained, requests, method=method, rounds=rounds, test=test, **settings)
        later = [r.cost for r in done.rounds[1:]] or [done.rounds[0].cost]
        rate = sum(c.samples for c in later) / sum(c.seconds for c in later)
        return done.cost.seconds / rounds, rate

    def samples_of_one_client(self) -> list[DeletionRequest]:
        """Return a request for a quarter of the first client's samples."""
        client_id, ids = next(iter(self.partition.clients.items()))
        return [DeletionRequest(client_id, sample_ids=ids[: len(ids) // 4])]

    def a_class_of_all(self) -> list[DeletionRequest]:
        """Return requests of all clients for one class: every client takes the complete step."""
        return removal.requests_for_class(self.partition, 0)


def _rate(trained: Trained) -> float:
    return trained.cost.samples / trained.cost.seconds


def measure_training(
    work: Workload, data: TensorExamples
) -> Iterator[tuple[str, dict[str, Measured]]]:
    """Yield, after each turn, what was done and all that is known."""
    model = in_torchs_layers(factory_for(work)()).to(work.device)
    plain = Measured("plain loop")
    measured = {plain.name: plain}
    benches: dict[str, Bench] = {}
    _timed_plain(plain, model, data, min(work.samples, PLAIN_SAMPLES) // 10, warm_up=True)
    yield "plain loop, warm-up", measured
    for clients in work.clients:
        name = f"engine, {clients} clients"
        benches[name] = Bench(work, data, clients)
        measured[name] = Measured(name)
        begin = time.perf_counter()
        benches[name].train()
        measured[name].preparation = time.perf_counter() - begin
        yield f"{name}, warm-up", measured
    for turn in range(1, work.repetitions + 1):
        for name, bench in benches.items():
            _timed_plain(plain, model, data, min(work.samples, PLAIN_SAMPLES))
            measured[name].rates.append(bench.rate())
            yield f"{name}, turn {turn}", measured


def _timed_plain(
    plain: Measured, model: nn.Module, data: TensorExamples, samples: int, warm_up: bool = False
) -> None:
    threads = torch.get_num_threads()
    rate = plain_loop(model, data, samples)
    torch.set_num_threads(threads)
    if not warm_up:
        plain.rates.append(rate)
