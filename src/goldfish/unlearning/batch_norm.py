"""Keeps removed samples out of the running statistics that BatchNorm layers save.

Remaining and removed samples pass the student together. In a BatchNorm layer the remaining ones are
normalised among themselves, as if they were alone, and their statistics alone reach the running
ones. The removed ones are normalised by the statistics of the remaining ones, as in evaluation. (By
the running ones they cannot be: those of a fresh model lag behind it by some twenty steps, in which
a deep network that is normalised by them has logits in the thousands.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from goldfish.hardware.residual import FIRST


@contextmanager
def statistics_of_first(model: nn.Module, count: int) -> Iterator[None]:
    """Let BatchNorm layers take their statistics from the first ``count`` samples of a batch alone.

    Concerned are BatchNorm layers, those derived from them too, in training mode that keep running
    statistics; one that is used twice in a pass keeps those of its last use. All other layers are
    left alone, so that a model without BatchNorm has the bits that it would have.
    """
    layers = [
        _Layer(module, count)
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
    ]
    try:
        yield
        factors = [layer.factor for layer in layers]
        for factor in set(factors):
            alike = [layer for layer, own in zip(layers, factors, strict=True) if own == factor]
            running = [t for layer in alike for t in layer.running]
            torch._foreach_lerp_(running, [t for layer in alike for t in layer.taken], factor)
    finally:
        for layer in layers:
            layer.restore()


class _Layer:
    """A BatchNorm layer, set up so that a pass leaves the statistics of its first samples."""

    def __init__(self, norm: _BatchNorm, count: int) -> None:
        self._norm = norm
        self._momentum = norm.momentum
        self._own_forward = vars(norm).get("forward")
        self.running = self.taken
        norm.momentum = 1.0  # only the newest batch counts
        norm.running_mean, norm.running_var = (t.clone() for t in self.running)
        vars(norm)["forward"] = partial(_apart, norm, norm.forward, count)
        if self._own_forward is None:
            vars(norm)[FIRST] = count

    @property
    def taken(self) -> list[Tensor]:
        """The mean and the variance that the layer holds."""
        return [cast("Tensor", self._norm.running_mean), cast("Tensor", self._norm.running_var)]

    @property
    def factor(self) -> float:
        """The weight of a new batch in the running statistics."""
        if self._momentum is not None:
            return self._momentum
        return 1 / float(cast("Tensor", self._norm.num_batches_tracked))

    def restore(self) -> None:
        """Make the layer what it was, apart from the values of its statistics."""
        self._norm.training = True
        self._norm.momentum = self._momentum
        self._norm.running_mean, self._norm.running_var = self.running
        del vars(self._norm)["forward"]
        vars(self._norm).pop(FIRST, None)
        if self._own_forward is not None:
            vars(self._norm)["forward"] = self._own_forward


def _apart(
    norm: _BatchNorm, forward: Callable[[Tensor], Tensor], count: int, inputs: Tensor
) -> Tensor:
    """Pass the first samples in training mode, then the others in evaluation mode."""
    first, others = inputs.split([count, len(inputs) - count])
    outputs = forward(first)
    norm.training = False
    linked = _Linked.apply(  # type: ignore[no-untyped-call]
        first, others, norm.running_mean, norm.running_var, norm.eps
    )
    outputs = torch.cat([outputs, forward(linked)])
    norm.training = True
    return outputs


class _Linked(torch.autograd.Function):
    """``others``, whose gradients also reach the samples that their statistics come from.

    In evaluation mode statistics are constants. With constants here, the others' gradient would
    have a part that changes nothing: adding one number to all activations also moves their mean.
    """

    @staticmethod
    def forward(
        ctx: Any, first: Tensor, others: Tensor, mean: Tensor, var: Tensor, eps: float
    ) -> Tensor:
        """Return ``others``."""
        ctx.save_for_backward(first, others, mean, var)
        ctx.eps = eps
        return others.view_as(others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by way of mean and variance, and the direct one.

        With z = (others - mean) / sqrt(var + eps) and G the gradient to others, that to the mean is
        -sum G, and that to the variance -sum G (others - mean) / (2 (var + eps)).
        """
        (gradient,) = gradients
        first, others, mean, var = ctx.saved_tensors
        across = [d for d in range(first.dim()) if d != 1]
        shape = [-1 if d == 1 else 1 for d in range(first.dim())]
        mean, var = mean.view(shape), var.view(shape)
        count = first.numel() // first.shape[1]
        by_mean = -gradient.sum(across, keepdim=True, dtype=mean.dtype) / count
        by_var = -(gradient * (others - mean)).sum(across, keepdim=True) / (var + ctx.eps)
        by_var /= count - 1
        to_first = torch.addcmul(by_mean - by_var * mean, first.to(mean.dtype), by_var)
        return to_first.to(first.dtype), gradient, None, None, None
