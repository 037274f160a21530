"""Training steps, and other work on a GPU, recorded as CUDA graphs: one launch replays all kernels.

A small model's kernels are shorter than the time that Python needs to start them. A recorded step
reads its draws from tables on the device, row by row, and advances the row itself, so a replay
needs nothing from the host.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from goldfish.hardware.gpu import to_cpu, work_given
from goldfish.training.batches import Draw, ExampleBatches, Gatherer, fold
from goldfish.training.sgd import Epoch, Objective, Recordable, Sgd, TrainingStep

logger = logging.getLogger(__name__)

ROWS = 64
"""Draws that a table holds; longer epochs fill it again."""

AHEAD = 16
"""Steps between two events that a :class:`Pace` records."""

KEPT_SHAPES = 64
"""Shapes of batches that a training keeps recorded; more are walked through step by step."""

KEPT_RECORDINGS = 8
"""Trainings of different kinds that a model keeps the recorded steps of."""


Action: TypeAlias = Callable[[], None]

RecordWork: TypeAlias = Callable[[Action], Action]
"""Records work, without doing it, and returns what does it again."""

_recording = threading.Lock()
"""CUDA records one graph at a time."""


class DeviceRecord:
    """Records work on the current stream of a GPU.

    All recordings use the same memory for what lives within a step, as no two are replayed at once.
    A model that could not be recorded once is not tried again.
    """

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._refusal: str | None = None

    def __call__(self, work: Action) -> Action:
        """Record ``work``, without doing it, and return what does it again."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with (
                _recording,
                torch.cuda.graph(
                    graph, self._memory, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                work()
        except RuntimeError as error:
            self._refusal = str(error)
            raise
        return graph.replay


class Pace:
    """Limits how many steps wait in the GPU's queue.

    A thread that adds to a full queue is blocked, and it would keep its turn meanwhile. So it
    waits earlier, and gives its turn up (:mod:`goldfish.hardware.gpu`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._wait: Action | None = None

    def start(self) -> None:
        """Begin with an empty queue."""
        self._steps, self._wait = 0, None

    def step(self) -> None:
        """Count a step. Every ``AHEAD`` steps, record an event and wait for the one before it."""
        self._steps += 1
        if self._steps % AHEAD == 0:
            wait, self._wait = self._wait, work_given(self._device)
            if wait is not None:
                wait()


class Replay:
    """A training step for draws of one shape, recorded when the first of them comes.

    ``take`` takes the step on one draw, all of whose parts are on the device.
    """

    def __init__(
        self, step: TrainingStep, take: Callable[[Draw], object], record: RecordWork, pace: Pace
    ) -> None:
        self._step = step
        self._take = take
        self._record = record
        self._pace = pace
        self._replay: Action | None = None
        self._tables: Draw | None = None
        self._row = torch.empty(0)
        self.refusal: str | None = None
        """Why the step cannot be recorded; None as long as no reason is known."""

    @property
    def recorded(self) -> bool:
        """Whether steps are replayed, in the mode that the model was in when they were recorded."""
        return self._replay is not None

    def run(self, draws: Draw) -> None:
        """Take one step for each of the stacked draws, in order."""
        replay = self._recorded_for(draws)
        if replay is None:
            walk(self._take, draws)
            return
        for begin in range(0, len(draws.positions), ROWS):
            count = min(ROWS, len(draws.positions) - begin)
            self._row.zero_()
            for table, part in zip(cast("Draw", self._tables), draws, strict=True):
                if table is not None and part is not None:
                    table[:count].copy_(part[begin : begin + count])
            for _ in range(count):
                replay()
                self._pace.step()
            self._step.count(count)

    def _recorded_for(self, draws: Draw) -> Action | None:
        """Return the recorded step for draws like these; None when it cannot be recorded."""
        if self._replay is None and self.refusal is None:
            self._tables = draws.map(lambda part: part.new_zeros(ROWS, *part.shape[1:]))
            self._row = torch.zeros(1, dtype=torch.int64, device=draws.positions.device)
            with self._step.practice():  # libraries choose and set up their kernels
                walk(self._take, draws.map(lambda part: part[:1]))
            try:
                with self._step.uncounted():
                    self._replay = self._record(self._take_next)
            except RuntimeError as error:
                self.refusal = str(error).strip().partition("\n")[0]
        return self._replay

    def _take_next(self) -> None:
        """Do the work that is recorded: a step on the row that comes next."""
        tables = cast("Draw", self._tables)
        self._take(tables.map(lambda table: table.index_select(0, self._row).squeeze(0)))
        self._row.add_(1)


class Repeat:
    """Action on tensors that stay where they are, recorded when it is first asked for."""

    def __init__(self, work: Callable[[], Tensor], record: RecordWork) -> None:
        self._work = work
        self._record = record
        self._replay: Action | None = None
        self._refused = False
        self._result = torch.empty(0)

    def __call__(self) -> Tensor:
        """Do the work and return its result."""
        if self._replay is None and not self._refused:
            self._work()  # libraries set up their kernels
            try:
                self._replay = self._record(self._do)
            except RuntimeError as error:
                logger.info("repeated without recording: %s", error)
                self._refused = True
        if self._replay is None:
            return self._work()
        self._replay()
        return self._result.clone()

    def _do(self) -> None:
        self._result = self._work()


def walk(step: Callable[[Draw], object], draws: Draw) -> None:
    """Take the steps of stacked draws one by one, without recording them."""
    for index in range(len(draws.positions)):
        step(draws.map(lambda part, at=index: part[at]))  # type: ignore[misc]


class Recorder:
    """Keeps the recorded steps of one model on a GPU, for all trainings that are alike.

    Alike are trainings with one objective on one dataset, such as those of a federation's clients,
    and with one preconditioner where there is one. Once a step is recorded, the model's weights
    must stay where they are in memory.
    """

    def __init__(self, model: nn.Module, record: RecordWork) -> None:
        @functools.lru_cache(maxsize=KEPT_RECORDINGS)
        def kept(
            gather: Gatherer, objective: Objective, sgd: Sgd, precondition: Recordable | None
        ) -> RecordedTrainer:
            rate = torch.zeros((), device=gather.device)
            step = TrainingStep(model, objective, sgd, rate, precondition)
            return RecordedTrainer(step, gather, record)

        self._kept = kept

    def trainer(
        self,
        batches: ExampleBatches,
        objective: Objective,
        sgd: Sgd,
        learning_rate: float,
        precondition: Recordable | None = None,
    ) -> RecordedTrainer:
        """Return what takes the steps of a training, recorded before or still to be recorded."""
        trainer = self._kept(batches.gather, objective, sgd, precondition)
        return trainer.start(batches, learning_rate)


class RecordedTrainer:
    """Takes the steps of an epoch by replaying recorded ones."""

    def __init__(self, step: TrainingStep, gather: Gatherer, record: RecordWork) -> None:
        self._step = step
        self._temperature = temperature = torch.ones((), device=step.sums.device)
        # No method of this object: a replay, which holds it, would keep the object alive.
        self._take = lambda draw: step(partial(gather, draw, temperature))
        self._record = record
        self._pace = Pace(step.sums.device)
        self._replays: dict[Hashable, Replay] = {}
        self._batches: ExampleBatches | None = None

    def start(self, batches: ExampleBatches, learning_rate: float) -> Self:
        """Begin a training: its data and temperature, its step size, no momentum yet."""
        self._batches = batches
        self._step.restart(learning_rate)
        self._temperature.fill_(batches.temperature)
        return self

    def run(self, order: Tensor, sizes: Sequence[int]) -> Epoch:
        """Take a step for each of the batches."""
        batches = cast("ExampleBatches", self._batches)
        self._step.sums.zero_()
        self._pace.start()
        device = self._step.sums.device
        drawn, removed = batches.draw(order, sizes)
        sent = drawn.map(lambda part: part.to(device, non_blocking=True))
        for alike in fold(batches.locate(sent), sizes, removed):
            self._take_all(alike)
        total, risk = to_cpu(self._step.sums).tolist()
        return Epoch(len(sizes), sum(sizes) + sum(removed), total, risk)

    def _take_all(self, draws: Draw) -> None:
        replay = self._replays.get(draws.shapes)
        if replay is None or not replay.recorded:
            self._step.model.train()
        if replay is None:
            if len(self._replays) == KEPT_SHAPES or any(
                other.refusal is not None for other in self._replays.values()
            ):
                walk(self._take, draws)
                return
            replay = Replay(self._step, self._take, self._record, self._pace)
            self._replays[draws.shapes] = replay
        replay.run(draws)
        if replay.refusal is not None:
            _log_once(type(self._step.model).__name__, replay.refusal)


@functools.cache
def _log_once(model: str, reason: str) -> None:
    logger.warning(
        "The training step of %s cannot be recorded as a CUDA graph (%s): it trains step by step, "
        "which is slower and gives the same result.",
        model,
        reason,
    )
