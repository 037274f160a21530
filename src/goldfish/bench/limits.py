"""What the machine can do at best, measured: a large matrix product, and a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from goldfish.settings import Precision
from goldfish.training.batches import Batch
from goldfish.training.sgd import Objective

REPETITIONS = 5


@dataclass(frozen=True)
class Limits:
    """The measured limits of a machine."""

    flops: float
    """Floating-point operations a second of a large matrix product."""
    bytes_copied: float
    """Bytes a second of a large copy, read and written."""


def measure_limits(device: str, precision: Precision = "fp32") -> Limits:
    """Measure with all cores, or on the GPU, in the arithmetic of the training."""
    gpu = device == "cuda"
    side = 8192 if gpu else 2048
    numbers = torch.randn(side, side, device=device)
    if precision == "bf16":
        numbers = numbers.bfloat16()
    source = torch.empty((2**30 if gpu else 2**28) // 4, device=device)
    target = torch.empty_like(source)
    product = _fastest(lambda: numbers @ numbers, gpu)
    copy = _fastest(lambda: target.copy_(source), gpu)
    return Limits(2 * side**3 / product, 2 * source.numel() * 4 / copy)


def step_flops(model: nn.Module, objective: Objective, batch: Batch) -> int:
    """Count the floating-point operations of a forward and a backward pass on a batch."""
    counter = FlopCounterMode(display=False)
    with counter:
        objective(model, batch).total.backward()
    return int(counter.get_total_flops())


def _fastest(work: Callable[[], Tensor], gpu: bool) -> float:
    """Return the median seconds of a call."""
    taken = []
    for _ in range(REPETITIONS + 1):
        begin = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])
