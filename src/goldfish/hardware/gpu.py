"""How threads share a GPU, and how models get there and back.

Python runs one thread at a time, and threads that start work on a GPU would pass that right to each
other at every operation, which takes longer than the operations. So a worker keeps its *turn*
until it waits for the GPU. A model's values travel in one row for each type of number.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from goldfish.params import FlatParams, flatten, shapes_of
from goldfish.types import Params


class Turn:
    """One thread at a time has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn and keep it."""
        with self._lock:
            self._mine.held = True
            try:
                yield
            finally:
                self._mine.held = False

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let others have it meanwhile; nothing happens in a thread that does not have it."""
        if not getattr(self._mine, "held", False):
            yield
            return
        self._mine.held = False
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._mine.held = True


turn = Turn()
"""The turn of all workers. There is one for all GPUs, because there is one Python interpreter."""

_mine = threading.local()


@contextmanager
def working_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Have the turn, and give a GPU all work on this stream."""
    with turn.taken(), torch.cuda.stream(stream):
        _mine.stream = stream
        try:
            yield
        finally:
            _mine.stream = None


def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream; to ask PyTorch takes longer than to give the GPU some work."""
    stream: torch.cuda.Stream | None = getattr(_mine, "stream", None)
    if stream is not None and stream.device == device:
        return stream
    return torch.cuda.current_stream(device)


def open_queues() -> None:
    """Let a GPU take work from up to 32 streams at a time; the default is eight.

    It is too late for this once CUDA was used in the process; nothing else depends on it.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def work_given(device: torch.device) -> Callable[[], None]:
    """Return what waits until all work that the device has been given on this stream is done."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event(blocking=True)
    done.record(_stream(device))

    def wait() -> None:
        with turn.given_up():
            done.synchronize()

    return wait


def to_cpu(values: Tensor) -> Tensor:
    """Return the values on the CPU; while a GPU still computes them, others have their turn."""
    if values.device.type != "cuda":
        return values.cpu()
    landing = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    landing.copy_(values, non_blocking=True)
    work_given(values.device)()
    return landing.clone()


class DeviceRows:
    """The values of a module on a GPU, which are read and replaced all at once."""

    def __init__(self, module: nn.Module) -> None:
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self._slots = {name: _slot(module, name) for name in state}
        copies = {
            name: torch.empty_like(t, requires_grad=False, memory_format=torch.contiguous_format)
            for name, t in state.items()
        }
        self._copies = FlatParams(flatten(copies), shapes_of(copies))
        self._alike: dict[torch.dtype, list[str]] = {}
        for name, t in copies.items():
            self._alike.setdefault(t.dtype, []).append(name)

    def fits(self, params: Params) -> bool:
        """Tell whether the parameters have the names, shapes and types of the module's."""
        return shapes_of(params) == self._copies.shapes

    @torch.no_grad()
    def load(self, params: Params) -> None:
        """Replace all values."""
        device = next(iter(self._copies.rows.values())).device
        self._copy(_sent.find(params, device), self._state())

    @torch.no_grad()
    def read(self) -> FlatParams:
        """Return a copy of all values on the CPU."""
        self._copy(self._state(), self._copies)
        rows = {dtype: to_cpu(row) for dtype, row in self._copies.rows.items()}
        return FlatParams(rows, self._copies.shapes)

    def _state(self) -> Params:
        return {name: owner[key] for name, (owner, key) in self._slots.items()}

    def _copy(self, source: Params, target: Params) -> None:
        for names in self._alike.values():
            torch._foreach_copy_([target[n] for n in names], [source[n] for n in names])


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Tensor], str]:
    """Return where a module holds a tensor: a change of memory layout puts a new one there."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    held = owner._parameters if key in owner._parameters else owner._buffers
    return cast("dict[str, Tensor]", held), key


class _Sent:
    """The models that were sent to a GPU last: all clients of a round begin with the same one.

    Only rows are kept, which nobody changes; what a user may have changed is sent again.
    """

    KEPT = 4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[Params, FlatParams, torch.cuda.Event]] = {}

    def find(self, params: Params, device: torch.device) -> FlatParams:
        """Return the parameters on the device, for use on the current stream."""
        if not isinstance(params, FlatParams):
            return self._send(params, device)
        stream = _stream(device)
        key = (id(params), device)
        with self._lock:
            if key in self._kept:
                _, sent, arrived = self._kept.pop(key)
            else:
                sent, arrived = self._send(params, device), torch.cuda.Event()
                arrived.record(stream)
            # The parameters are kept as well, so that no others can have their id.
            self._kept[key] = params, sent, arrived
            if len(self._kept) > self.KEPT:
                del self._kept[next(iter(self._kept))]  # the one that was used longest ago
        if not arrived.query():
            stream.wait_event(arrived)
        for row in sent.rows.values():
            row.record_stream(stream)
        return sent

    def _send(self, params: Params, device: torch.device) -> FlatParams:
        rows = {dtype: row.to(device, non_blocking=True) for dtype, row in flatten(params).items()}
        return FlatParams(rows, shapes_of(params))


_sent = _Sent()
