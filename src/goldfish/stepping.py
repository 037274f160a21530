"""One step of training, and the obvious way to take the steps of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from goldfish.errors import ConfigError
from goldfish.feeds import Batch, Feed

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True)
class Loss:
    """What a step minimises, and the part of it that measures fitness on the remaining data."""

    total: Tensor
    risk: Tensor


Objective: TypeAlias = Callable[[nn.Module, Batch], Loss]
"""The loss of a model on a batch; has no state and draws no random numbers."""

Precondition: TypeAlias = Callable[[nn.Module, Batch], None]
"""Changes the gradients in place, between the backward pass on the batch and the step."""


@dataclass(frozen=True)
class Sgd:
    """What sets one kind of step apart from another, besides its size."""

    momentum: float = 0.9
    weight_decay: float = 0.0
    precision: Precision = "fp32"


@dataclass(frozen=True)
class Epoch:
    """What was done in an epoch: sums over its steps, and whether the training is to end."""

    steps: int
    samples: int
    total: float
    risk: float
    ended: bool = False


class Trainer(Protocol):
    """Takes the steps of an epoch."""

    def run(self, batches: Sequence[Tensor]) -> Epoch:
        """Take a step for each of the batches, given by their positions."""


class TrainingStep:
    """One step of SGD on a batch.

    ``sums`` collects the total and the risk of the steps, on the device of the model.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, sgd: Sgd, learning_rate: float | Tensor
    ) -> None:
        device = next(model.parameters()).device
        _set_precision(sgd.precision, device)
        self._half = sgd.precision == "bf16"
        if self._half:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = model
        self._objective = objective
        self._optimizer = torch.optim.SGD(
            model.parameters(),
            lr=learning_rate,
            momentum=sgd.momentum,
            weight_decay=sgd.weight_decay,
            fused=True,
        )
        self.sums = torch.zeros(2, device=device)

    def restart(self, learning_rate: float) -> None:
        """Begin another training with the step size tensor that was given at first."""
        for group in self._optimizer.param_groups:
            group["lr"].fill_(learning_rate)
            for weight in group["params"]:
                if group["momentum"]:
                    state = self._optimizer.state[weight]
                    state.setdefault("momentum_buffer", torch.zeros_like(weight)).zero_()

    def __call__(
        self, gather: Callable[[], Batch], precondition: Precondition | None = None
    ) -> tuple[Batch, Loss]:
        """Gather a batch and take the step."""
        with torch.autocast("cuda", torch.bfloat16) if self._half else nullcontext():
            batch = _channels_last(gather()) if self._half else gather()
            self._optimizer.zero_grad()
            loss = self._objective(self.model, batch)
        loss.total.backward()
        if precondition is not None:
            precondition(self.model, batch)
        self._optimizer.step()
        total, risk = self.sums
        total += loss.total.detach()
        risk += loss.risk.detach()
        return batch, loss


class PlainTrainer:
    """Takes one step after the other: the obvious way, on any device."""

    def __init__(
        self,
        step: TrainingStep,
        feed: Feed,
        precondition: Precondition | None = None,
        after_step: Callable[[nn.Module, Loss], bool] | None = None,
    ) -> None:
        self._step = step
        self._feed = feed
        self._precondition = precondition
        self._after_step = after_step

    def run(self, batches: Sequence[Tensor]) -> Epoch:
        """Take a step for each of the batches, until ``after_step`` ends it."""
        self._step.sums.zero_()
        ended, steps, samples = False, 0, 0
        for positions in batches:
            batch, loss = self._step(partial(self._feed, positions), self._precondition)
            samples += len(batch.labels) + (0 if batch.removed is None else len(batch.removed[1]))
            steps += 1
            ended = self._after_step is not None and self._after_step(self._step.model, loss)
            if ended:
                break
        total, risk = self._step.sums.tolist()
        return Epoch(steps, samples, total, risk, ended)


def _set_precision(precision: Precision, device: torch.device) -> None:
    """Choose how a GPU multiplies float32 numbers; refuse what the device does not have."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    elif precision != "fp32":
        raise ConfigError(
            f'precision = "{precision}" is for a CUDA GPU, and the model is on {device.type}: use '
            'precision = "fp32", or --device cuda.'
        )


def _channels_last(batch: Batch) -> Batch:
    """Return the batch with images in the layout that half-precision convolutions like."""

    def convert(inputs: Tensor) -> Tensor:
        return inputs.to(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs

    removed = None if batch.removed is None else (convert(batch.removed[0]), batch.removed[1])
    return replace(batch, inputs=convert(batch.inputs), removed=removed)
