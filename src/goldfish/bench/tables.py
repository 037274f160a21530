"""All of ``goldfish bench``: what is measured in which order, and the rows of its table.

What the machine can do at best is measured too: a large matrix product, and a large copy.
"""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from goldfish.bench.child import ENGINE, FLOWER, ROUNDS, Whole, run_whole
from goldfish.bench.plain import in_its_process
from goldfish.bench.rounds import BATCH, Bench, Workload, load_images
from goldfish.data import TensorExamples
from goldfish.training.batches import Batch
from goldfish.training.fit import cross_entropy_objective
from goldfish.training.sgd import Objective

REPETITIONS = 5
"""How often a limit of the machine is measured."""
Tell: TypeAlias = Callable[[str], object]
"""Is told what was done."""
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


def bench(work: Workload, tell: Tell) -> list[Row]:
    """Return the rows; ``tell`` is told what is being done."""
    data, what = load_images(work)
    tell(what)
    rates, rows = _training_rows(work, data, tell)
    rows += _unlearning_rows(work, data, rates[f"engine, {work.clients[0]} clients"], tell)
    tell("a large matrix product and a large copy")
    rows += _limit_rows(work, data, max(rates.values()))
    return [*rows, *_whole_rows(work, tell)] if work.device == "cpu" else rows


def _training_rows(
    work: Workload, data: TensorExamples, tell: Tell
) -> tuple[dict[str, float], list[Row]]:
    """Let the engine and a plain loop of the same model take turns; return images a second too.

    A noisy machine slows all of them alike, so the ratios hold where the seconds do not.
    """
    benches: dict[str, Bench] = {}
    turns: dict[str, list[float]] = defaultdict(list)
    longest = 0.0
    with in_its_process(work) as plain:
        for clients in work.clients:
            name = f"engine, {clients} clients"
            begin = time.perf_counter()
            benches[name] = Bench(work, data, clients)
            benches[name].train()
            longest = max(longest, time.perf_counter() - begin)
            tell(f"{name}: warm-up")
        for turn in range(1, work.turns + 1):
            for name, one in benches.items():
                turns["plain loop"].append(plain())
                turns[name].append(one.rate())
                tell(f"{name}: turn {turn}")
    rates = {name: median(found) for name, found in turns.items()}
    rows = [
        _row(
            name,
            f"{rates[name]:,.0f} images/s ({min(found):,.0f} to {max(found):,.0f})",
            rates[name] / rates["plain loop"],
            "of the plain loop",
        )
        for name, found in turns.items()
    ]
    return rates, [*rows, _row("before the first turn, at most", f"{longest:.1f} s")]


def _unlearning_rows(work: Workload, data: TensorExamples, engine: float, tell: Tell) -> list[Row]:
    """Measure both methods; ``engine`` is its rate in training.

    Seconds: one client removes a quarter of its samples. Rate: all clients remove a class.
    """
    bench = Bench(work, data, work.clients[0])
    trained = bench.train()
    first, later = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    rates: list[float] = []
    for turn in range(1, work.turns + 1):
        for method in ("retrain", "goldfish"):
            cost, *others = bench.unlearning(trained, method, bench.samples_of_one_client())
            first[method].append(cost.seconds)
            later[method] += [other.seconds for other in others]
            tell(f"{method}: turn {turn}")
        _, *others = bench.unlearning(trained, "goldfish", bench.a_class_of_all())
        rates += [other.samples / other.seconds for other in others]
        tell(f"complete Goldfish step: turn {turn}")
    theirs, ours = (median(seconds) for seconds in later.values())
    retrain, goldfish = (median(first[name]) + 9 * median(later[name]) for name in later)
    rate = median(rates)
    return [
        _row("a round of retrain, after the first", f"{theirs:.2f} s"),
        _row("a round of goldfish", f"{ours:.2f} s", ours / theirs, "of retrain's"),
        _row("ten rounds of retrain", f"{retrain:.1f} s"),
        _row("ten rounds of goldfish", f"{goldfish:.1f} s", goldfish / retrain, "of retrain's"),
        _row("complete Goldfish step", f"{rate:,.0f} images/s", rate / engine, "of training"),
    ]


def _limit_rows(work: Workload, data: TensorExamples, rate: float) -> list[Row]:
    """Measure a large matrix product and a large copy, in which a byte is read and written.

    With all cores, or on the GPU, in the arithmetic of the training.
    """
    gpu = work.device == "cuda"
    side = 8192 if gpu else 2048
    numbers = torch.randn(side, side, device=work.device)
    if work.precision == "bf16":
        numbers = numbers.bfloat16()
    source = torch.empty((2**30 if gpu else 2**28) // 4, device=work.device)
    target = torch.empty_like(source)
    most_flops = 2 * side**3 / _seconds(lambda: numbers @ numbers, gpu)
    most_bytes = 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), gpu)
    model = work.factory()().to(work.device)
    inputs, labels = data.batch(torch.arange(BATCH))
    flops = step_flops(model, cross_entropy_objective, Batch(inputs, labels)) / BATCH * rate
    return [
        _row("large copy", f"{most_bytes / 1e9:,.1f} GB/s"),
        _row("large matrix product", f"{most_flops / 1e12:,.3f} TFLOP/s"),
        _row(
            "training, fastest",
            f"{flops / 1e12:,.3f} TFLOP/s",
            flops / most_flops,
            "of the matrix product",
        ),
    ]


def _whole_rows(work: Workload, tell: Tell) -> list[Row]:
    rows = []
    simulated = find_spec("flwr") is not None and find_spec("ray") is not None
    for clients in work.clients:
        size = f"{clients} clients"
        tell(f"a process of its own, {size}")
        own = run_whole(ENGINE, work, clients)
        rows.append(_whole_row(f"engine, {size}", own))
        if simulated:
            tell(f"Flower's simulation, {size}")
            flower = run_whole(FLOWER, work, clients)
            rates = f"{own.rate:,.0f} images/s against {flower.rate:,.0f}"
            times = f"{own.seconds:.1f} s against {flower.seconds:.1f}"
            faster, longer = own.rate / flower.rate, own.seconds / flower.seconds
            rows += [
                _whole_row(f"Flower's simulation, {size}", flower),
                _row(f"rounds of the engine, {size}", rates, faster, "of Flower's"),
                _row(f"with start-up, {size}", times, longer, "of Flower's time"),
            ]
    if not simulated:
        rows.append(_row("Flower's simulation", "not installed: pip install 'flwr[simulation]'"))
    return rows


def _whole_row(name: str, whole: Whole) -> Row:
    memory = "" if whole.peak is None else f", peak memory {whole.peak / 2**30:.2f} GiB"
    return _row(f"{ROUNDS} rounds with start-up: {name}", f"{whole.seconds:.1f} s{memory}")


def step_flops(model: nn.Module, objective: Objective, batch: Batch) -> int:
    """Count the floating-point operations of a forward and a backward pass on a batch."""
    counter = FlopCounterMode(display=False)
    with counter:
        objective(model, batch).total.backward()
    return int(counter.get_total_flops())


def _seconds(work: Callable[[], Tensor], gpu: bool) -> float:
    """Return the median seconds of a call."""
    taken = []
    for _ in range(REPETITIONS + 1):
        begin = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])
