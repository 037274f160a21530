"""Pure arithmetic on model parameters. Nothing here changes its arguments.

Integer buffers (BatchNorm's counter of batches) are never averaged, scaled or subtracted: they
are taken from the first operand as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn

from goldfish.types import Params

Shapes: TypeAlias = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and type of each tensor of a model, by name."""

SORTED_AT_ONCE = 4096
"""Values of each model that a trimmed mean sorts at a time."""


class RowParams(Mapping[str, Tensor]):
    """Parameters that stand in one row for each type of number."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    @property
    def rows(self) -> Mapping[torch.dtype, Tensor]:
        """All values, in the order of the names; not to be changed."""
        return flatten(dict(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class FlatParams(RowParams):
    """Parameters in rows in memory."""

    def __init__(self, rows: Mapping[torch.dtype, Tensor], shapes: Shapes) -> None:
        super().__init__(shapes)
        self._rows = rows

    @cached_property
    def _views(self) -> Mapping[str, Tensor]:
        offsets = dict.fromkeys(self._rows, 0)
        views = {}
        for name, (shape, dtype) in self.shapes.items():
            begin = offsets[dtype]
            offsets[dtype] = begin + shape.numel()
            views[name] = self._rows[dtype][begin : offsets[dtype]].view(shape)
        return views

    @property
    def rows(self) -> Mapping[torch.dtype, Tensor]:
        """All values, in the order of the names; not to be changed."""
        return self._rows

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]


class ShortenedParams(RowParams):
    """Parameters on the straight line from ``start``, at a share of the way to others.

    They are computed when they are looked at: what waits on disk stays there.
    """

    def __init__(self, start: Params, params: Params, share: float) -> None:
        super().__init__(shapes_of(params))
        self._start, self._params, self._share = start, params, share

    def __getitem__(self, name: str) -> Tensor:
        end = self._params[name]
        if not end.is_floating_point():
            return end
        begin = self._start[name].double()
        return (begin + (end.double() - begin) * self._share).to(end.dtype)


def shortened(start: Params, params: Params, most: float) -> Params:
    """Return ``params``, or where they are further than ``most`` from ``start``: there, no more."""
    moved = distance(start, params)
    return params if moved <= most else ShortenedParams(start, params, most / moved)


def shapes_of(params: Params) -> Shapes:
    """Return the shape and type of each tensor, by name."""
    if isinstance(params, RowParams):
        return params.shapes
    return {name: (t.shape, t.dtype) for name, t in params.items()}


def params_of(model: nn.Module) -> Params:
    """Return a detached copy, on the CPU, of all weights and all buffers of ``model``."""
    state = {name: t.detach() for name, t in model.state_dict().items()}
    rows = {dtype: row.cpu() for dtype, row in flatten(state).items()}
    return FlatParams(rows, shapes_of(state))


def flatten(params: Params) -> Mapping[torch.dtype, Tensor]:
    """Return the values of all tensors in a row, for each type of number; not to be changed."""
    if isinstance(params, RowParams):
        return params.rows
    rows: dict[torch.dtype, list[Tensor]] = {}
    for t in params.values():
        rows.setdefault(t.dtype, []).append(t.reshape(-1))
    return {dtype: torch.cat(row) for dtype, row in rows.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: on a busy machine, small tensors wait long for a second one.

    A thread that begins to compute in the meantime has one thread as well, unless told otherwise.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@one_thread()
def weighted_mean(all_params: Iterable[Params], weights: Sequence[float]) -> Params:
    """Return ``sum_i w_i p_i / sum_i w_i``.

    Computed as a running mean, which reads one model at a time and returns the very bits of the
    first model when all models are equal.
    """
    shapes: Shapes = {}
    mean: dict[torch.dtype, Tensor] = {}
    total = 0.0
    for params, weight in zip(all_params, weights, strict=True):
        if weight == 0:
            continue
        total += weight
        if not mean:
            shapes, mean = shapes_of(params), dict(flatten(params))
            continue
        in_order = list(params) == list(shapes)
        new = flatten(params if in_order else {name: params[name] for name in shapes})
        for dtype, values in mean.items():
            if dtype.is_floating_point:
                # In this order of subtractions equal values stay what they are, -0.0 too.
                mean[dtype] = values - (values - new[dtype]).mul_(weight / total)
    if not mean or not total > 0:
        raise ValueError("weighted_mean needs at least one model and a positive sum of weights.")
    return FlatParams(mean, shapes)


@one_thread()
def trimmed_mean(all_params: Sequence[Params], cut: int) -> Params:
    """Return the mean, value by value, without the ``cut`` smallest and the ``cut`` largest.

    Models count alike, in whatever order. With ``cut = (n - 1) // 2`` of n it is the median.
    It holds one tensor of all models at a time.
    """
    if not 0 <= 2 * cut < len(all_params):
        raise ValueError(f"trimmed_mean cannot cut {cut} at each end of {len(all_params)} models.")

    def middle(tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        if not first.is_floating_point():
            return first
        values = torch.stack([t.reshape(-1) for t in tensors])
        parts = [  # sorting takes four times the memory of what is sorted
            part.sort(dim=0).values[cut : len(tensors) - cut].double().mean(dim=0)
            for part in values.split(SORTED_AT_ONCE, dim=1)
        ]
        return torch.cat(parts).to(first.dtype).view(first.shape)

    return {name: middle([params[name] for params in all_params]) for name in all_params[0]}


def add(a: Params, b: Params) -> Params:
    """Return ``a + b``."""
    return {n: t + b[n] if t.is_floating_point() else t for n, t in a.items()}


def subtract(a: Params, b: Params) -> Params:
    """Return ``a - b``."""
    return {n: t - b[n] if t.is_floating_point() else t for n, t in a.items()}


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


def largest_change(before: Params, after: Params) -> float:
    """Return how far the value that moved most is from its old value, over the largest value.

    Infinite where the two do not hold the same tensors.
    """
    if {n: t.shape for n, t in before.items()} != {n: t.shape for n, t in after.items()}:
        return math.inf
    floats = [name for name, t in before.items() if t.is_floating_point() and t.numel()]
    moved = max((float((after[n] - before[n]).abs().max()) for n in floats), default=0.0)
    largest = max((float(before[n].abs().max()) for n in floats), default=0.0)
    return moved / largest if largest else math.inf if moved else 0.0


def num_bytes(params: Params) -> int:
    """Return how many bytes the parameters hold."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in shapes_of(params).values())


@one_thread()
def all_finite(params: Params) -> bool:
    """Tell whether no value is infinite or not a number."""
    rows = [row for dtype, row in flatten(params).items() if dtype.is_floating_point]
    # A sum is finite only when all of its terms are; looking at each of them takes longer.
    return all(math.isfinite(row.sum()) or bool(torch.isfinite(row).all()) for row in rows)


def digest(params: Params) -> str:
    """Return a SHA-256 over names, types, shapes and values: equal digests mean equal bits."""
    state = hashlib.sha256()
    for name in sorted(params):
        t = params[name].detach().cpu().contiguous()
        state.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        state.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
