"""The server's test set: what equation (12) and the stops of methods measure models with."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish.data import Subset
from goldfish.hardware.gpu import to_cpu, work_given
from goldfish.randomness import generator
from goldfish.training.fit import PREDICTED_AT_ONCE, PREDICTED_AT_ONCE_BY_GPU, all_logits, predict
from goldfish.training.graphs import DeviceRecord, Repeat
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Examples, ModelFactory, Params


def measured_samples(clients: int) -> int:
    """Return on how many test samples the server measures each of so many clients.

    2000 for up to ten clients; for more, 10,000 of all clients of a round together, but at least
    100 of each: measuring must not cost as much as the training.
    """
    return 2000 if clients <= 10 else max(100, 10_000 // clients)


def mean_squared_error(logits: Tensor, labels: Tensor) -> float:
    """Return the mean squared difference between softmax vector and one-hot label."""
    return _squared_errors(logits, labels).mean().item()


def _squared_errors(logits: Tensor, labels: Tensor) -> Tensor:
    errors = F.softmax(logits, dim=-1).scatter_(-1, labels[..., None], -1.0, reduce="add")
    return errors.square_()


@dataclass(frozen=True)
class ServerScore:
    """A model on the server's test set."""

    loss: float
    mse: float


class ServerTest:
    """Measures models on the server's test set; of a larger one ``samples`` are drawn, once."""

    def __init__(
        self, factory: ModelFactory, examples: Examples, samples: int, seed: int = 0
    ) -> None:
        order = torch.randperm(len(examples), generator=generator(seed, "server"))
        measured = Subset(examples, order[:samples].sort().values)
        on_gpu = examples.labels.device.type == "cuda"
        self._measure = (_OnGpu if on_gpu else _OnThreads)(factory, measured)
        self._samples = len(measured)
        self._labels = measured.labels.cpu()
        self._measured_since = 0

    def score(self, params: Params) -> ServerScore:
        """Measure a model."""
        return self.scores([params])[0]

    def scores(self, models: Sequence[Params]) -> list[ServerScore]:
        """Measure several models."""
        self._measured_since += self._samples * len(models)
        return self._measure.scores(models)

    def class_losses(self, params: Params) -> tuple[float | None, ...]:
        """Return a model's mean loss on the samples of each class; None where there is none."""
        self._measured_since += self._samples
        logits = self._measure.logits(params)
        losses = F.cross_entropy(logits, self._labels, reduction="none")
        of_class = [losses[self._labels == label] for label in range(logits.shape[-1])]
        return tuple(own.mean().item() if len(own) else None for own in of_class)

    def take_measured(self) -> int:
        """Return how many samples times models were measured since the last call of this."""
        measured, self._measured_since = self._measured_since, 0
        return measured


class _OnThreads:
    """Measures models side by side, each part of the data on one thread."""

    PART = 5 * PREDICTED_AT_ONCE
    """Samples of a part: few models, or an odd number of them, keep all threads busy too."""

    def __init__(self, factory: ModelFactory, examples: Examples) -> None:
        places = torch.arange(len(examples)).split(self.PART)
        self._parts = [Subset(examples, part) for part in places]
        self._labels = examples.labels
        self._workers = os.cpu_count() or 1
        self._workspaces: queue.SimpleQueue[LocalWorkspace] = queue.SimpleQueue()
        for _ in range(self._workers):
            self._workspaces.put(LocalWorkspace(factory))

    def scores(self, models: Sequence[Params]) -> list[ServerScore]:
        """Measure all models."""
        count = len(self._parts)
        with self._pool() as pool:
            of_parts = [params for params in models for _ in range(count)]
            logits = list(pool.map(self._logits, of_parts, self._parts * len(models)))
            joined = [logits[at : at + count] for at in range(0, len(logits), count)]
            return list(pool.map(self._score, joined))

    def logits(self, params: Params) -> Tensor:
        """Return what a model says of all samples."""
        with self._pool() as pool:
            return torch.cat(list(pool.map(partial(self._logits, params), self._parts)))

    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._workers, "", torch.set_num_threads, (1,))

    def _logits(self, params: Params, part: Examples) -> Tensor:
        workspace = self._workspaces.get()
        try:
            return predict(workspace.load("server", params).module, part)
        finally:
            self._workspaces.put(workspace)

    def _score(self, parts: Sequence[Tensor]) -> ServerScore:
        logits = torch.cat(list(parts))
        loss = F.cross_entropy(logits, self._labels).item()
        return ServerScore(loss, mean_squared_error(logits, self._labels))


class _OnGpu:
    """Measures models one after the other, by recorded work, and waits for all of them once."""

    def __init__(self, factory: ModelFactory, examples: Examples) -> None:
        self._inputs, self._labels = examples.batch(torch.arange(len(examples)))
        work_given(self._labels.device)()  # they are read on another stream
        self._workspace = LocalWorkspace(factory, self._labels.device)
        self._record = DeviceRecord()
        self._predictions: dict[nn.Module, Repeat] = {}

    def scores(self, models: Sequence[Params]) -> list[ServerScore]:
        """Measure all models."""
        with self._workspace.active():
            logits = torch.stack([self._logits(params) for params in models])
            labels = self._labels.expand(len(models), -1)
            losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)
            errors = _squared_errors(logits, labels).mean((1, 2))
            found = to_cpu(torch.stack([losses, errors], dim=1))
        return [ServerScore(loss, mse) for loss, mse in found.tolist()]

    def logits(self, params: Params) -> Tensor:
        """Return what a model says of all samples, on the CPU."""
        with self._workspace.active():
            return to_cpu(self._logits(params))

    def _logits(self, params: Params) -> Tensor:
        module = self._workspace.load("server", params).module
        if module not in self._predictions:
            parts = self._inputs.split(PREDICTED_AT_ONCE_BY_GPU)
            self._predictions[module] = Repeat(partial(all_logits, module, parts), self._record)
        return self._predictions[module]()
