"""All of ``goldfish bench``: what is measured in which order, and the rows of its table.

What the machine can do at best is measured too: a large matrix product, and a large copy.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from goldfish.bench.child import ENGINE, FLOWER, ROUNDS, Whole, run_whole
from goldfish.bench.plain import in_its_process
from goldfish.bench.rounds import (
    BATCH,
    Measured,
    Tell,
    Workload,
    load_images,
    measure_training,
    measure_unlearning,
)
from goldfish.data import TensorExamples
from goldfish.settings import Precision
from goldfish.training.batches import Batch
from goldfish.training.fit import cross_entropy_objective
from goldfish.training.sgd import Objective

REPETITIONS = 5
"""How often a limit of the machine is measured."""


Row: TypeAlias = tuple[str, str, str]
"""A line of the table: what it is, its value in words, and how it compares."""


def _row(name: str, value: str, ratio: float | None = None, to: str = "") -> Row:
    return name, value, "" if ratio is None else f"{ratio:.2f} {to}"


def machine_in_words(device: str) -> str:
    """Say where the figures come from."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return f"{where}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def flower_can_simulate() -> bool:
    """Tell whether Flower and Ray are installed."""
    return find_spec("flwr") is not None and find_spec("ray") is not None


def bench(work: Workload, tell: Tell) -> list[Row]:
    """Return the rows; ``tell`` is told what is being done."""
    data, what = load_images(work)
    tell(what)
    with in_its_process(work) as plain:
        training = measure_training(work, data, plain, tell)
    engine = training[f"engine, {work.clients[0]} clients"].median
    unlearning = measure_unlearning(work, data, tell)
    tell("a large matrix product and a large copy")
    fastest = max(measured.median for measured in training.values())
    rows = [
        *_training_rows(training),
        *_unlearning_rows(unlearning, engine),
        *_limit_rows(work, data, fastest),
    ]
    return [*rows, *_whole_rows(work, tell)] if work.device == "cpu" else rows


def _training_rows(training: dict[str, Measured]) -> list[Row]:
    plain = training["plain loop"].median
    rows = []
    for name, measured in training.items():
        low, high = min(measured.turns), max(measured.turns)
        value = f"{measured.median:,.0f} images/s ({low:,.0f} to {high:,.0f})"
        rows.append(_row(name, value, measured.median / plain, "of the plain loop"))
    longest = max(m.preparation for m in training.values())
    rows.append(_row("before the first turn, at most", f"{longest:.1f} s"))
    return rows


def _unlearning_rows(unlearning: dict[str, Measured], engine: float) -> list[Row]:
    first, later = (
        [unlearning[f"{m}: {which} round"].median for m in ("retrain", "goldfish")]
        for which in ("first", "later")
    )
    retrain, goldfish = (a + 9 * b for a, b in zip(first, later, strict=True))
    rate = unlearning["goldfish: rate"].median
    return [
        _row("a round of retrain, after the first", f"{later[0]:.2f} s"),
        _row("a round of goldfish", f"{later[1]:.2f} s", later[1] / later[0], "of retrain's"),
        _row("ten rounds of retrain", f"{retrain:.1f} s"),
        _row("ten rounds of goldfish", f"{goldfish:.1f} s", goldfish / retrain, "of retrain's"),
        _row("complete Goldfish step", f"{rate:,.0f} images/s", rate / engine, "of training"),
    ]


def _limit_rows(work: Workload, data: TensorExamples, rate: float) -> list[Row]:
    most_flops, most_bytes = measure_limits(work.device, work.precision)
    model = work.factory()().to(work.device)
    inputs, labels = data.batch(torch.arange(BATCH))
    flops = step_flops(model, cross_entropy_objective, Batch(inputs, labels)) / BATCH
    return [
        _row("large copy", f"{most_bytes / 1e9:,.1f} GB/s"),
        _row("large matrix product", f"{most_flops / 1e12:,.3f} TFLOP/s"),
        _row(
            "training, fastest",
            f"{flops * rate / 1e12:,.3f} TFLOP/s",
            flops * rate / most_flops,
            "of the matrix product",
        ),
    ]


def _whole_rows(work: Workload, tell: Tell) -> list[Row]:
    rows = []
    for clients in work.clients:
        tell(f"a process of its own, {clients} clients")
        own = run_whole(ENGINE, work, clients)
        rows.append(_whole_row(f"engine, {clients} clients", own))
        if flower_can_simulate():
            tell(f"Flower's simulation, {clients} clients")
            flower = run_whole(FLOWER, work, clients)
            rows += [
                _whole_row(f"Flower's simulation, {clients} clients", flower),
                _row(
                    f"rounds of the engine, {clients} clients",
                    f"{own.rate:,.0f} images/s against {flower.rate:,.0f}",
                    own.rate / flower.rate,
                    "of Flower's",
                ),
                _row(
                    f"with start-up, {clients} clients",
                    f"{own.seconds:.1f} s against {flower.seconds:.1f}",
                    own.seconds / flower.seconds,
                    "of Flower's time",
                ),
            ]
    if not flower_can_simulate():
        rows.append(_row("Flower's simulation", "not installed: pip install 'flwr[simulation]'"))
    return rows


def _whole_row(name: str, whole: Whole) -> Row:
    memory = "" if whole.peak is None else f", peak memory {whole.peak / 2**30:.2f} GiB"
    return _row(f"{ROUNDS} rounds with start-up: {name}", f"{whole.seconds:.1f} s{memory}")


def measure_limits(device: str, precision: Precision) -> tuple[float, float]:
    """Return the operations a second of a large matrix product and the bytes a second of a copy.

    With all cores, or on the GPU, in the arithmetic of the training; a byte is read and written.
    """
    gpu = device == "cuda"
    side = 8192 if gpu else 2048
    numbers = torch.randn(side, side, device=device)
    if precision == "bf16":
        numbers = numbers.bfloat16()
    source = torch.empty((2**30 if gpu else 2**28) // 4, device=device)
    target = torch.empty_like(source)
    product = _fastest(lambda: numbers @ numbers, gpu)
    copy = _fastest(lambda: target.copy_(source), gpu)
    return 2 * side**3 / product, 2 * source.numel() * 4 / copy


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
