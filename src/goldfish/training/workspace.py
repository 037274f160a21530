"""The models that a worker trains and predicts with: one, or several as an ensemble."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from goldfish.hardware.gpu import DeviceRows, open_queues, working_on
from goldfish.hardware.memory import keep_freed_memory
from goldfish.params import READER
from goldfish.training.graphs import allow_recording
from goldfish.types import ModelFactory, Params

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
        f"{MEMBERS}{place}.{name}": t
        for place, params in enumerate(models)
        for name, t in params.items()
    }


def count_members(names: Iterable[str]) -> int:
    """Return how many models the parameters of these names hold together; 0 for a single one."""
    places = {n.split(".")[1] for n in names if n.startswith(MEMBERS)}
    return len(places)


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
        self._modules: dict[str, nn.Module] = {}
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

    def load(self, role: str, params: Params) -> nn.Module:
        """Return the module for ``role``, holding ``params``: one model, or an ensemble."""
        members = count_members(params)
        key = f"{role}/{members}"
        if key not in self._modules:
            # Its initial weights are not used: the caller's random numbers stay as they are.
            with _building, torch.random.fork_rng(devices=[]):
                built = [self._factory() for _ in range(members or 1)]
            self._modules[key] = self._ready(Ensemble(built) if members else built[0])
        module = self._modules[key]
        self._fill(module, params)
        return module

    def _fill(self, module: nn.Module, params: Params) -> None:
        """Copy the values into the module, to a GPU all of them at once."""
        rows: DeviceRows | None = getattr(module, READER, None)
        if rows is not None and rows.fit(params):
            rows.load(params)
        else:
            module.load_state_dict(dict(params))  # converts, or says what does not fit

    def _ready(self, module: nn.Module) -> nn.Module:
        module = module.to(self._device)
        if self._compiled:
            module.compile(dynamic=False)
        if self._stream is not None:
            setattr(module, READER, DeviceRows(module))
            if self._graphs:
                allow_recording(module)
        return module
