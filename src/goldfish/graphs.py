"""Training steps recorded as CUDA graphs: one launch replays all kernels of a step.

A small model's kernels are shorter than the time that Python needs to start them. A recorded step
reads its draws from tables on the device, row by row, and advances the row itself, so a replay
needs nothing from the host.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from goldfish.feeds import Draw, ExampleFeed, Gatherer, stack
from goldfish.stepping import Epoch, Objective, Sgd, Trainer, TrainingStep

logger = logging.getLogger(__name__)

ROWS = 256
"""Draws that a table holds; longer epochs fill it again."""

WARM_UP = 3
"""Steps that are taken before one is recorded: libraries choose and set up their kernels."""

WORTH_RECORDING = 8
"""Steps of one shape in an epoch from which recording pays."""

KEPT_RECORDINGS = 8
"""Trainings of different kinds that a model keeps the recorded steps of."""

Step: TypeAlias = Callable[[Draw], object]
"""A training step on one draw, all of whose parts are on the device."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do the recorded work again."""


Record: TypeAlias = Callable[[Callable[[], None]], Graph]
"""Records work, without doing it."""

_recording = threading.Lock()
"""CUDA records one graph at a time."""


def record_on_device(work: Callable[[], None]) -> Graph:
    """Record ``work`` on the current stream, without doing it."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    with (
        _recording,
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        work()
    return graph


class Replay:
    """A training step for draws of one shape, recorded when that is worth it."""

    def __init__(self, step: Step, record: Record) -> None:
        self._step = step
        self._record = record
        self._graph: Graph | None = None
        self._tables: Draw | None = None
        self._row = torch.empty(0)
        self._walked = 0
        self.refusal: str | None = None
        """Why the step cannot be recorded; None when nothing speaks against it."""

    def run(self, draws: Draw, *, worth_recording: bool) -> None:
        """Take one step for each of the stacked draws, in order."""
        count = len(draws.positions)
        taken = 0
        if worth_recording and self._graph is None and self.refusal is None:
            taken = min(count, max(0, WARM_UP - self._walked))
            self._walk(draws, 0, taken)
            if taken < count:
                self._try_to_record(draws)
        if self._graph is None or self._tables is None:
            self._walk(draws, taken, count)
            return
        for begin in range(taken, count, ROWS):
            end = min(begin + ROWS, count)
            self._row.zero_()
            for table, part in zip(self._tables, draws, strict=True):
                if table is not None and part is not None:
                    table[: end - begin].copy_(part[begin:end])
            for _ in range(begin, end):
                self._graph.replay()

    def _walk(self, draws: Draw, begin: int, end: int) -> None:
        for place in range(begin, end):
            self._step(draws.map(lambda part, place=place: part[place]))  # type: ignore[misc]
        self._walked += end - begin

    def _try_to_record(self, draws: Draw) -> None:
        tables = draws.map(lambda part: part.new_zeros(ROWS, *part.shape[1:]))
        row = torch.zeros(1, dtype=torch.int64, device=draws.positions.device)

        def one_step() -> None:
            self._step(tables.map(lambda table: table.index_select(0, row).squeeze(0)))
            row.add_(1)

        try:
            self._graph = self._record(one_step)
        except RuntimeError as error:
            self.refusal = str(error).strip().partition("\n")[0]
            return
        self._tables, self._row = tables, row


class Recorder:
    """Keeps the recorded steps of one model on a GPU, for all trainings that are alike.

    Alike are trainings with one objective on one dataset: the clients of a federation.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        self._model = weakref.ref(model)
        self._record = record
        self._kept: OrderedDict[Hashable, RecordedTrainer] = OrderedDict()

    def trainer(
        self,
        feed: ExampleFeed,
        objective: Objective,
        sgd: Sgd,
        learning_rate: float,
    ) -> Trainer:
        """Return what takes the steps of a training, recorded before or still to be recorded."""
        key = (feed.gather, objective, sgd)
        if key not in self._kept:
            rate = torch.tensor(learning_rate, device=feed.gather.device)
            step = TrainingStep(cast("nn.Module", self._model()), objective, sgd, rate)
            self._kept[key] = RecordedTrainer(step, feed.gather, self._record)
            while len(self._kept) > KEPT_RECORDINGS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key].start(feed, learning_rate)


class RecordedTrainer:
    """Takes the steps of an epoch by replaying recorded ones."""

    def __init__(self, step: TrainingStep, gather: Gatherer, record: Record) -> None:
        self._step = step
        self._record = record
        self._replays: dict[Hashable, Replay] = {}
        self._feed: ExampleFeed | None = None
        self._on_draw: Callable[[Draw], object] = lambda draw: step(lambda: gather(draw))

    def start(self, feed: ExampleFeed, learning_rate: float) -> Self:
        """Begin a training: its data, its step size, no momentum yet."""
        self._feed = feed
        self._step.restart(learning_rate)
        return self

    def run(self, batches: Sequence[Tensor]) -> Epoch:
        """Take a step for each of the batches."""
        feed = cast("ExampleFeed", self._feed)
        self._step.sums.zero_()
        draws = [feed.draw(positions) for positions in batches]
        count = Counter(draw.shapes for draw in draws)
        for shapes, alike in itertools.groupby(draws, key=lambda draw: draw.shapes):
            if shapes not in self._replays:
                self._replays[shapes] = Replay(self._on_draw, self._record)
            replay = self._replays[shapes]
            replay.run(
                feed.locate(stack(list(alike)).map(self._upload)),
                worth_recording=count[shapes] >= WORTH_RECORDING,
            )
            if replay.refusal is not None:
                _log_once(type(self._step.model).__name__, replay.refusal)
        total, risk = self._step.sums.tolist()
        return Epoch(len(draws), sum(d.num_samples for d in draws), total, risk)

    def _upload(self, part: Tensor) -> Tensor:
        device = self._step.sums.device
        return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part


_recorders: weakref.WeakKeyDictionary[nn.Module, Recorder] = weakref.WeakKeyDictionary()
"""The models on a GPU whose steps may be recorded."""


def allow_recording(model: nn.Module, record: Record = record_on_device) -> None:
    """Let the steps of a model be recorded; from then on its weights must not move."""
    _recorders[model] = Recorder(model, record)


def recorder_of(model: nn.Module) -> Recorder | None:
    """Return what keeps a model's recorded steps; None where they may not be recorded."""
    return _recorders.get(model)


@functools.cache
def _log_once(model: str, reason: str) -> None:
    logger.warning(
        "The training step of %s cannot be recorded as a CUDA graph (%s): it trains step by step, "
        "which is slower and gives the same result.",
        model,
        reason,
    )
