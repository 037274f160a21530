"""One step of training, and the obvious way to take the steps of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from goldfish.errors import ConfigError
from goldfish.settings import Precision
from goldfish.training.batches import Batch, BatchSource
from goldfish.training.swap import Places


@dataclass(frozen=True)
class Loss:
    """What a step minimises, and the part of it that measures fitness on the remaining data."""

    total: Tensor
    risk: Tensor


Objective: TypeAlias = Callable[[nn.Module, Batch], Loss]
"""The loss of a model on a batch; has no state and draws no random numbers."""

Precondition: TypeAlias = Callable[[nn.Module, Batch, nn.Module], None]
"""Changes the gradients in place, between the backward pass on the batch and the step.

It gets the model, the batch, and what computed the logits: the model or its :class:`HalfCopy`.
"""


@runtime_checkable
class Recordable(Hashable, Protocol):
    """A precondition that says what a recording of its steps must know."""

    @property
    def recordable(self) -> bool:
        """Whether its steps can be recorded."""

    @property
    def state(self) -> Sequence[Tensor]:
        """All that it changes beside the gradients: tensors that stay where they are."""

    def __call__(self, model: nn.Module, batch: Batch, computes: nn.Module, /) -> None:
        """Change the gradients in place."""


AfterStep: TypeAlias = Callable[[nn.Module, Loss], bool]
"""Gets the model after a step and the loss before it; True ends the training."""


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


class FusedSgd:
    """SGD with momentum: ``torch.optim.SGD(fused=True)`` to the bit, by the kernel it calls.

    PyTorch's optimisers import its compiler when they are first used, which takes a second: much
    for a client's process that lives for one round.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], sgd: Sgd, learning_rate: float | Tensor
    ) -> None:
        self._weights = list(weights)
        self._sgd = sgd
        self._rate = learning_rate
        self.velocities = [torch.zeros_like(w) for w in self._weights] if sgd.momentum else []

    def restart(self, learning_rate: float) -> None:
        """Begin again, at rest, with another step size in the tensor that was given at first."""
        cast("Tensor", self._rate).fill_(learning_rate)
        if self.velocities:
            torch._foreach_zero_(self.velocities)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights that have gradients."""
        moving = [index for index, weight in enumerate(self._weights) if weight.grad is not None]
        torch._fused_sgd_(
            [self._weights[index] for index in moving],
            [cast("Tensor", self._weights[index].grad) for index in moving],
            [self.velocities[index] for index in moving] if self.velocities else [],
            weight_decay=self._sgd.weight_decay,
            momentum=self._sgd.momentum,
            lr=self._rate,  # type: ignore[arg-type]
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class TrainingStep:
    """A step of SGD on a batch; ``sums`` adds up total and risk of all, on the model's device."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        sgd: Sgd,
        learning_rate: float | Tensor,
        precondition: Precondition | None = None,
    ) -> None:
        device = next(model.parameters()).device
        _set_precision(sgd.precision, device)
        self.model = model
        self._precision = sgd.precision
        self._half = HalfCopy(model) if sgd.precision == "bf16" else None
        self._objective = objective
        self._precondition = precondition
        self.optimizer = FusedSgd(model.parameters(), sgd, learning_rate)
        self._norms = [
            module
            for module in model.modules()
            if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
        ]
        self.sums = torch.zeros(2, device=device)
        self._total, self._risk = self.sums

    def restart(self, learning_rate: float) -> None:
        """Begin another training of this kind: its step size, no momentum yet."""
        _set_precision(self._precision, self.sums.device)
        self.optimizer.restart(learning_rate)

    def __call__(self, gather: Callable[[], Batch]) -> tuple[Batch, Loss]:
        """Gather a batch and take the step."""
        self.optimizer.zero_grad()
        if self._half is None:
            batch = gather()
            loss = self._objective(self.model, batch)
            loss.total.backward()
        else:
            batch, loss = self._half.backward(gather, self._objective)
        if self._precondition is not None:
            self._precondition(self.model, batch, self._half or self.model)
        self.optimizer.step()
        if loss.risk is loss.total:
            self.sums += loss.total.detach()
        else:
            self._total += loss.total.detach()
            self._risk += loss.risk.detach()
        return batch, loss

    @contextmanager
    def practice(self) -> Iterator[None]:
        """Take steps without consequences: at the end all values are what they were."""
        changing = [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.optimizer.velocities,
            self.sums,
        ]
        if isinstance(self._precondition, Recordable):
            changing += self._precondition.state
        with torch.no_grad():
            before = [t.clone() for t in changing]
        device = self.sums.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
        with torch.no_grad():
            for t, value in zip(changing, before, strict=True):
                t.copy_(value)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out the counters of BatchNorm, which cost a kernel a layer: see :meth:`count`."""
        counters = [norm.num_batches_tracked for norm in self._norms]
        if any(norm.momentum is None for norm in self._norms):  # the counter is their momentum
            raise RuntimeError("a BatchNorm layer averages over all batches")
        try:
            for norm in self._norms:
                norm.num_batches_tracked = None
            yield
        finally:
            for norm, counter in zip(self._norms, counters, strict=True):
                norm.num_batches_tracked = counter

    def count(self, steps: int) -> None:
        """Let the counters of BatchNorm count steps that did not count themselves."""
        if self._norms and steps:
            torch._foreach_add_([cast("Tensor", n.num_batches_tracked) for n in self._norms], steps)


class HalfCopy(nn.Module):
    """A model that computes with bfloat16 copies of its weights, which stay float32 themselves.

    All weights are copied, and all gradients brought back, by one kernel each: autocast would use
    two for every weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._places = Places(model)
        norms = {
            id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters()
        }
        copied = {n: p for n, p in model.named_parameters() if id(p) not in norms}
        self._originals: list[Tensor] = list(copied.values())
        self._copies = {
            name: p.detach().bfloat16().requires_grad_(p.requires_grad)
            for name, p in copied.items()
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the model says, computed with the copies."""
        if inputs.dim() == 4 and inputs.is_floating_point():
            inputs = inputs.to(torch.bfloat16, memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16), self._places.holding(self._copies):
            logits: Tensor = self.model(inputs)
        return logits.float()

    def backward(self, gather: Callable[[], Batch], objective: Objective) -> tuple[Batch, Loss]:
        """Gather a batch, compute the loss on it, and leave its gradients in the model."""
        copies = list(self._copies.values())
        with torch.no_grad():
            torch._foreach_copy_(copies, self._originals)
        for copy in copies:
            copy.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            batch = gather()
            loss = objective(self, batch)
        loss.total.backward()
        pairs = [
            (o, c.grad) for o, c in zip(self._originals, copies, strict=True) if c.grad is not None
        ]
        for original, _ in pairs:
            original.grad = torch.empty_like(original)
        with torch.no_grad():
            torch._foreach_copy_([cast("Tensor", o.grad) for o, _ in pairs], [g for _, g in pairs])
        return batch, loss


@dataclass(frozen=True)
class PlainTrainer:
    """Takes one step after the other: the obvious way, on any device."""

    step: TrainingStep
    batches: BatchSource
    after_step: AfterStep | None = None

    def run(self, order: Tensor, sizes: Sequence[int]) -> Epoch:
        """Take a step for each batch of these sizes of ``order``, until ``after_step`` ends it."""
        self.step.model.train()
        self.step.sums.zero_()
        ended, steps, samples = False, 0, 0
        for positions in order.split(list(sizes)):
            batch, loss = self.step(partial(self.batches, positions))
            samples += len(batch.labels) + (0 if batch.removed is None else len(batch.removed[1]))
            steps += 1
            ended = self.after_step is not None and self.after_step(self.step.model, loss)
            if ended:
                break
        total, risk = self.step.sums.tolist()
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
