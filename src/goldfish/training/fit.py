"""The only training loop (:func:`fit`) and the only inference loop (:func:`predict`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish.errors import DataError, DivergenceError
from goldfish.hardware.gpu import to_cpu
from goldfish.settings import TrainingSettings
from goldfish.training.batches import Batch, BatchSource, logits_of
from goldfish.training.sgd import AfterStep, Loss, Objective, Precondition, Sgd
from goldfish.training.workspace import LoadedModel
from goldfish.types import Examples

PREDICTED_AT_ONCE = 200
PREDICTED_AT_ONCE_BY_GPU = 2000
"""Samples in a batch of :func:`predict`: what a device does fastest."""


@dataclass(frozen=True)
class Fitted:
    """What :func:`fit` did: the mean risk of each epoch, and its cost."""

    epoch_risks: Sequence[float]
    steps: int
    samples: int
    teacher_samples: int = 0
    """Samples that passed through a teacher; filled in by the caller of :func:`fit`."""
    fisher_samples: int = 0
    """Samples whose own gradients were squared; filled in by the caller too."""


def fit(
    model: LoadedModel,
    num_examples: int,
    batches: BatchSource,
    objective: Objective,
    settings: TrainingSettings,
    *,
    learning_rate: float,
    generator: torch.Generator,
    stop: Callable[[Sequence[float]], bool] | None = None,
    max_steps: int | None = None,
    precondition: Precondition | None = None,
    after_step: AfterStep | None = None,
) -> Fitted:
    """Train ``model`` in place with SGD; the order of the samples comes from ``generator``.

    ``stop`` is asked after each epoch with the mean risks so far and ends the training early, as
    does having taken ``max_steps`` steps. ``precondition`` may change the gradients before a step;
    ``after_step`` gets the model after it and the loss before it, and True ends the training. A
    loss that is not finite raises :class:`DivergenceError` at the end of its epoch.
    """
    sgd = Sgd(settings.momentum, settings.weight_decay, settings.precision)
    trainer = model.trainer(batches, objective, sgd, learning_rate, precondition, after_step)
    if not num_examples:
        raise DataError("There is no sample to train on.")
    all_sizes = batch_sizes(num_examples, settings.batch_size)
    epoch_risks: list[float] = []
    steps = samples = 0
    for epoch in range(1, settings.local_epochs + 1):
        order = torch.randperm(num_examples, generator=generator)
        sizes = all_sizes if max_steps is None else all_sizes[: max_steps - steps]
        done = trainer.run(order[: sum(sizes)], sizes)
        steps += done.steps
        samples += done.samples
        if not math.isfinite(done.total):
            raise DivergenceError(f"the loss became {done.total} in local epoch {epoch}")
        epoch_risks.append(done.risk / done.steps)
        if done.ended or steps == max_steps or (stop is not None and stop(epoch_risks)):
            break
    return Fitted(epoch_risks, steps, samples)


def batch_sizes(count: int, size: int) -> list[int]:
    """Return the sizes of the mini-batches of ``count`` samples.

    A single left-over sample joins the batch before it: BatchNorm cannot train on one sample.
    """
    whole, rest = divmod(count, size)
    sizes = [size] * whole + [rest] * (rest > 0)
    if len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def cross_entropy_objective(model: nn.Module, batch: Batch) -> Loss:
    """Return the mean cross-entropy, the usual loss of training."""
    loss = F.cross_entropy(model(batch.inputs), batch.labels)
    return Loss(loss, risk=loss)


def predict(model: nn.Module, examples: Examples, batch_size: int | None = None) -> Tensor:
    """Return the logits of all examples, on the CPU, in order; always in evaluation mode."""
    device = next(model.parameters()).device
    size = batch_size or (PREDICTED_AT_ONCE if device.type == "cpu" else PREDICTED_AT_ONCE_BY_GPU)
    batches = torch.arange(len(examples)).split(size)
    return all_logits(model, (examples.batch(b)[0].to(device) for b in batches), to_cpu)


def all_logits(
    model: nn.Module,
    batches: Iterable[Tensor],
    bring: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Tensor:
    """Return the logits of all batches of inputs, each brought by ``bring`` to where it is kept."""
    return torch.cat([bring(logits_of(model, inputs).float()) for inputs in batches])
