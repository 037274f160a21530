"""What is measured: a workload, its images, and the rounds of a federation on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from goldfish.data import TensorExamples, load, removal
from goldfish.data import partition as partitions
from goldfish.errors import DataError
from goldfish.federation import InProcess
from goldfish.methods import Trained
from goldfish.models import model_factory
from goldfish.results import Cost
from goldfish.settings import Precision
from goldfish.types import Client, DeletionRequest, ModelFactory
from goldfish.workflow import train, unlearn

BATCH = 100
RATE = 0.01
CLASSES = 10
UNLEARNING_ROUNDS = 3


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    model: str = "lenet5"
    clients: tuple[int, ...] = (5, 100)
    samples: int = 60_000
    device: str = "cpu"
    precision: Precision = "fp32"
    local_epochs: int = 1
    turns: int = 3
    compiled: bool = False
    data_dir: Path | None = None

    @property
    def dataset(self) -> str:
        """The dataset that the model is measured on."""
        return "mnist" if self.model == "lenet5" else "cifar-10"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of its images."""
        return (1, 28, 28) if self.dataset == "mnist" else (3, 32, 32)

    def factory(self) -> ModelFactory:
        """Return what builds the model."""
        return model_factory(self.model, num_classes=CLASSES, image_shape=self.image_shape)


def load_images(work: Workload) -> tuple[TensorExamples, str]:
    """Return images on the device, and what they are: the dataset, or noise of its shape."""
    what = work.dataset
    try:
        data = load(what, work.data_dir).train
    except DataError:
        data, what = _noise(work), f"noise in the shape of {what}"
    count = min(work.samples, len(data))
    kept = TensorExamples(data.images[:count], data.labels[:count], mean=data.mean, std=data.std)
    return kept.to(work.device), f"{count:,} images of {what}"


def _noise(work: Workload) -> TensorExamples:
    images = torch.randint(0, 256, (work.samples, *work.image_shape), dtype=torch.uint8)
    channels = work.image_shape[0]
    labels = torch.arange(work.samples) % CLASSES
    return TensorExamples(images, labels, mean=[0.5] * channels, std=[0.5] * channels)


class Bench:
    """A federation of one size: its training rounds, and unlearning on it."""

    def __init__(self, work: Workload, data: TensorExamples, clients: int) -> None:
        self._work = work
        self._test = TensorExamples(data.images[:10_000], data.labels[:10_000])
        self._partition = partitions.partition(data, clients)
        parts = partitions.split(data, self._partition)
        self._federation = InProcess(
            [Client(name, part) for name, part in parts.items()],
            work.factory(),
            device=work.device,
            compiled=work.compiled,
            remember=False,
        )

    def train(self, rounds: int = 1) -> Trained:
        """Train for some rounds."""
        return train(
            self._federation,
            rounds=rounds,
            learning_rate=RATE,
            batch_size=BATCH,
            local_epochs=self._work.local_epochs,
            precision=self._work.precision,
        )

    def rate(self) -> float:
        """Return the images a second of a training round."""
        cost = self.train().cost
        return cost.samples / cost.seconds

    def unlearning(
        self, trained: Trained, method: str, requests: Sequence[DeletionRequest]
    ) -> list[Cost]:
        """Return what the rounds of an unlearning cost.

        In the first one the teacher looks at all data once, and a GPU's steps are recorded.
        """
        settings: dict[str, Any] = {"local_stop": False} if method == "goldfish" else {}
        done = unlearn(
            trained, requests, method=method, rounds=UNLEARNING_ROUNDS, test=self._test, **settings
        )
        return [record.cost for record in done.rounds]

    def samples_of_one_client(self) -> list[DeletionRequest]:
        """Return a request for a quarter of the first client's samples."""
        client_id, ids = next(iter(self._partition.clients.items()))
        return [DeletionRequest(client_id, sample_ids=ids[: len(ids) // 4])]

    def a_class_of_all(self) -> list[DeletionRequest]:
        """Return requests of all clients for one class, so that each takes the complete step."""
        return removal.requests_for_class(self._partition, 0)
