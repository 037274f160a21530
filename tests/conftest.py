"""Shared by all tests: determinism settings and a small federation that trains in a second."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from goldfish.data import TensorExamples
from goldfish.types import Client

settings.register_profile("goldfish", deadline=None, derandomize=True)
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
    """Begin with the tests of whole deployments: of two workers the first then gets them all."""
    items.sort(key=lambda item: item.get_closest_marker("deployment") is None)


@pytest.fixture
def alone() -> Iterator[None]:
    """Let one test with a whole deployment run at a time: together they crowd each other out."""
    with (Path(tempfile.gettempdir()) / "goldfish-deployment-test.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
