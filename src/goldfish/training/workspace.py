"""The models that a worker trains and predicts with: one, or several as an ensemble."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish.hardware.gpu import DeviceRows, open_queues, working_on
from goldfish.hardware.memory import keep_freed_memory
from goldfish.params import params_of
from goldfish.training.batches import BatchSource, ExampleBatches
from goldfish.training.graphs import DeviceRecord, RecordedTrainer, Recorder, RecordWork
from goldfish.training.sgd import (
    AfterStep,
    Objective,
    PlainTrainer,
    Precondition,
    Recordable,
    Sgd,
    TrainingStep,
)
from goldfish.types import ModelFactory, Params

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MEMBERS = "members."
"""How the names of an ensemble's parameters begin."""


class Ensemble(nn.Module):
    """Several models that predict together: the logarithm of their mean probabilities."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits whose softmax is the mean of the members' softmax vectors."""
        logs = torch.stack([F.log_softmax(member(inputs), dim=-1) for member in self.members])
        return torch.logsumexp(logs, dim=0) - math.log(len(self.members))


def join(models: Sequence[Params]) -> Params:
    """Return the parameters of an :class:`Ensemble` of these models."""
    return {
        f"{MEMBERS}{index}.{name}": t
        for index, params in enumerate(models)
        for name, t in params.items()
    }


def ensemble_size(names: Iterable[str]) -> int:
    """Return how many models the parameters of these names hold together; 0 for a single one."""
    indices = {n.split(".")[1] for n in names if n.startswith(MEMBERS)}
    return len(indices)


class LoadedModel:
    """A model to train or to predict with: its module, its parameters, and what trains it.

    With ``record`` its training steps are recorded and replayed (:mod:`goldfish.training.graphs`).
    """

    def __init__(self, module: nn.Module, record: RecordWork | None = None) -> None:
        self.module = module
        self._in_kernels = any(getattr(part, "in_kernels", False) for part in module.modules())
        self._by_pixel = False
        if self._in_kernels:  # they read weights in the order of the images
            self._lay_out(by_pixel=True)
        self.device = next(module.parameters()).device
        self._rows = DeviceRows(module) if self.device.type == "cuda" else None
        self._record = record
        self._recorder = None if record is None else Recorder(module, record)
        self._shared: dict[Hashable, object] = {}

    def _lay_out(self, *, by_pixel: bool) -> None:
        """Hold convolutions' weights pixel by pixel, as bf16 reads them fastest, or as usual."""
        order = torch.channels_last if by_pixel else torch.contiguous_format
        self.module.to(memory_format=order)  # type: ignore[call-overload]
        self._by_pixel = by_pixel

    def load(self, params: Params) -> None:
        """Replace all weights and buffers, on a GPU all of them at once."""
        if self._rows is not None and self._rows.fits(params):
            self._rows.load(params)
        else:
            self.module.load_state_dict(dict(params))  # converts, or says what does not fit

    def params(self) -> Params:
        """Return a copy, on the CPU, of all weights and buffers."""
        return params_of(self.module) if self._rows is None else self._rows.read()

    def shared(self, make: Callable[[nn.Module, K], T], key: K) -> T:
        """Return what ``make`` makes of the module and ``key``: one for all that ask for it."""
        if (make, key) not in self._shared:
            self._shared[make, key] = make(self.module, key)
        return cast("T", self._shared[make, key])

    def trainer(
        self,
        batches: BatchSource,
        objective: Objective,
        sgd: Sgd,
        learning_rate: float,
        precondition: Precondition | None = None,
        after_step: AfterStep | None = None,
    ) -> PlainTrainer | RecordedTrainer:
        """Return what takes the steps of a training: by replaying them where that can be done."""
        by_pixel = self._in_kernels or sgd.precision == "bf16"
        if by_pixel != self._by_pixel:
            self._lay_out(by_pixel=by_pixel)
            if self._record is not None:  # what was recorded uses the weights' old places
                self._recorder = Recorder(self.module, self._record)
        if (
            self._recorder is not None
            and after_step is None
            and isinstance(batches, ExampleBatches)
            and batches.gather.on_device
        ):
            if precondition is None:
                return self._recorder.trainer(batches, objective, sgd, learning_rate)
            if isinstance(precondition, Recordable) and precondition.recordable:
                return self._recorder.trainer(batches, objective, sgd, learning_rate, precondition)
        step = TrainingStep(self.module, objective, sgd, learning_rate, precondition)
        return PlainTrainer(step, batches, after_step)


_building = threading.Lock()
"""Held while a model is built: workers share torch's global generator."""


class LocalWorkspace:
    """The models of one worker: built once for each role, then loaded again and again.

    On a GPU a worker has a stream of its own (:meth:`active`), and with ``graphs`` the training
    steps of its models are recorded and replayed. With ``compiled`` models are compiled.
    """

    def __init__(
        self,
        factory: ModelFactory,
        device: torch.device | str = "cpu",
        *,
        graphs: bool = True,
        compiled: bool = False,
    ) -> None:
        keep_freed_memory()
        self._factory = factory
        self._device = torch.device(device)
        self._graphs = graphs
        self._compiled = compiled
        self._models: dict[tuple[str, int], LoadedModel] = {}
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            open_queues()
            self._stream = torch.cuda.Stream(self._device)
            self._usual = torch.cuda.default_stream(self._device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return the context in which this worker works."""
        if self._stream is None:
            yield
            return
        with working_on(self._stream):
            if not self._usual.query():  # data may be under way
                self._stream.wait_stream(self._usual)
            yield

    def load(self, role: str, params: Params) -> LoadedModel:
        """Return the model for ``role``, holding ``params``: one model, or an ensemble."""
        count = ensemble_size(params)
        key = (role, count)
        if key not in self._models:
            # Its initial weights are not used: the caller's random numbers stay as they are.
            with _building, torch.random.fork_rng(devices=[]):
                built = [self._factory() for _ in range(count or 1)]
            module = (Ensemble(built) if count else built[0]).to(self._device)
            if self._compiled:
                module.compile(dynamic=False)
            recorded = self._graphs and self._stream is not None
            self._models[key] = LoadedModel(module, DeviceRecord() if recorded else None)
        model = self._models[key]
        model.load(params)
        return model
