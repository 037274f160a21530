"""Pure arithmetic on model parameters. Nothing here changes its arguments.

Integer buffers (BatchNorm's counter of batches) are never averaged, scaled or subtracted: they
are taken from the first operand as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from goldfish.types import Params


def params_of(model: nn.Module) -> Params:
    """Return a detached copy, on the CPU, of all weights and all buffers of ``model``."""
    return {
        name: t.detach().to("cpu", copy=True).contiguous() for name, t in model.state_dict().items()
    }


def weighted_mean(all_params: Iterable[Params], weights: Sequence[float]) -> Params:
    """Return ``sum_i w_i p_i / sum_i w_i``.

    Computed as a running mean, which reads one model at a time and returns the very bits of the
    first model when all models are equal.
    """
    mean: dict[str, Tensor] = {}
    total = 0.0
    for params, weight in zip(all_params, weights, strict=True):
        if weight == 0:
            continue
        total += weight
        if not mean:
            mean = {name: t.clone() for name, t in params.items()}
            continue
        share = weight / total
        for name, t in mean.items():
            if t.is_floating_point():
                change = params[name] - t
                # Where nothing changes the value stays as it is: -0.0 + 0.0 would be 0.0.
                mean[name] = torch.where(change == 0, t, t + share * change)
    if not mean or not total > 0:
        raise ValueError("weighted_mean needs at least one model and a positive sum of weights.")
    return mean


def add(a: Params, b: Params) -> Params:
    """Return ``a + b``."""
    return _elementwise(lambda x, y: x + y, a, b)


def subtract(a: Params, b: Params) -> Params:
    """Return ``a - b``."""
    return _elementwise(lambda x, y: x - y, a, b)


def scale(params: Params, factor: float) -> Params:
    """Return ``factor * params``."""
    return {n: t * factor if t.is_floating_point() else t for n, t in params.items()}


def distance(a: Params, b: Params) -> float:
    """Return the Euclidean distance between two models over all their floating-point values."""
    squares = [
        (t.double() - b[n].double()).square().sum().item()
        for n, t in a.items()
        if t.is_floating_point()
    ]
    return math.sqrt(sum(squares))


def num_bytes(params: Params) -> int:
    """Return how many bytes the parameters hold."""
    return sum(t.numel() * t.element_size() for t in params.values())


def all_finite(params: Params) -> bool:
    """Tell whether no value is infinite or not a number."""
    return all(bool(torch.isfinite(t).all()) for t in params.values() if t.is_floating_point())


def digest(params: Params) -> str:
    """Return a SHA-256 over names, types, shapes and values: equal digests mean equal bits."""
    state = hashlib.sha256()
    for name in sorted(params):
        t = params[name].detach().cpu().contiguous()
        state.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        state.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _elementwise(op: Callable[[Tensor, Tensor], Tensor], a: Params, b: Params) -> Params:
    return {n: op(t, b[n]) if t.is_floating_point() else t for n, t in a.items()}
