"""Pure arithmetic on model parameters. Nothing here changes its arguments.

Integer buffers (BatchNorm's counter of batches) are never averaged, scaled or subtracted: they
are taken from the first operand as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from goldfish.types import Params


def params_of(model: nn.Module) -> Params:
    """Return a detached copy, on the CPU, of all weights and all buffers of ``model``."""
    state = {name: t.detach() for name, t in model.state_dict().items()}
    if all(t.device.type == "cpu" for t in state.values()):
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in state.items()}
    # From a GPU all values come in one copy for each type, not in one for each tensor.
    flat = {dtype: values.cpu() for dtype, values in flatten(state).items()}
    return {name: t.clone() for name, t in unflatten(flat, state).items()}


def flatten(params: Params) -> dict[torch.dtype, Tensor]:
    """Return the values of all tensors in a row, for each type of number."""
    rows: dict[torch.dtype, list[Tensor]] = {}
    for t in params.values():
        rows.setdefault(t.dtype, []).append(t.reshape(-1))
    return {dtype: torch.cat(row) for dtype, row in rows.items()}


def unflatten(flat: Mapping[torch.dtype, Tensor], like: Params) -> Params:
    """Return views of the values, in the names and shapes of ``like``, which was flattened so."""
    places = dict.fromkeys(flat, 0)
    params = {}
    for name, t in like.items():
        begin = places[t.dtype]
        places[t.dtype] = begin + t.numel()
        params[name] = flat[t.dtype][begin : begin + t.numel()].view(t.shape)
    return params


def weighted_mean(all_params: Iterable[Params], weights: Sequence[float]) -> Params:
    """Return ``sum_i w_i p_i / sum_i w_i``.

    Computed as a running mean, which reads one model at a time and returns the very bits of the
    first model when all models are equal.
    """
    like: Params = {}
    mean: dict[torch.dtype, Tensor] = {}
    total = 0.0
    for params, weight in zip(all_params, weights, strict=True):
        if weight == 0:
            continue
        total += weight
        if not like:
            like = {name: torch.empty_like(t, device="meta") for name, t in params.items()}
            mean = flatten(params)
            continue
        share = weight / total
        new = flatten({name: params[name] for name in like})
        for dtype, values in mean.items():
            if dtype.is_floating_point:
                change = new[dtype].sub_(values)
                # Where nothing changes the value stays as it is: -0.0 + 0.0 would be 0.0.
                mean[dtype] = torch.where(change == 0, values, values + share * change)
    if not like or not total > 0:
        raise ValueError("weighted_mean needs at least one model and a positive sum of weights.")
    return {name: t.clone() for name, t in unflatten(mean, like).items()}


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
    rows = flatten({name: t for name, t in params.items() if t.is_floating_point()})
    return all(bool(torch.isfinite(row).all()) for row in rows.values())


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
