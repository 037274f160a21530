"""Updates of a round that are too many for the memory wait in a temporary file.

The server reads them one at a time, so its memory does not grow with the number of clients.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from goldfish.params import flatten, num_bytes
from goldfish.types import Params, Task, Update

IN_MEMORY = 8 * 2**20
"""Bytes of updates that a round may keep in memory."""


def keep(update: Update, spool: Spool | None) -> Update:
    """Return the update with its parameters in the spool, where the round has one."""
    return update if spool is None else replace(update, params=spool.put(update.params))


class Spool:
    """A temporary file of models; it is deleted when nobody needs any of them."""

    @classmethod
    def for_answers(cls, tasks: Sequence[Task]) -> Self | None:
        """Return a spool for the updates of a round; None where they fit into memory.

        They are expected to be as large as what the tasks bring.
        """
        expected = sum(num_bytes(params) for task in tasks for params in task.arrays.values())
        return cls() if expected > IN_MEMORY else None

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="goldfish-")  # noqa: SIM115
        self._end = 0
        self._lock = threading.Lock()

    def put(self, params: Params) -> Params:
        """Write a model and return it as parameters that are read when they are asked for."""
        rows = flatten(params)
        content = b"".join(row.view(torch.uint8).numpy().tobytes() for row in rows.values())
        with self._lock:
            begin = self._end
            self._end += len(content)
        written = 0
        while written < len(content):
            written += os.pwrite(self._file.fileno(), content[written:], begin + written)
        starts = {}
        for dtype, row in rows.items():
            starts[dtype] = begin
            begin += row.nbytes
        places = {}
        for name, t in params.items():
            places[name] = _Place(starts[t.dtype], t.shape, t.dtype)
            starts[t.dtype] += t.nbytes
        return SpooledParams(self, places)

    def read(self, begin: int, size: int) -> bytearray:
        """Return bytes that were written."""
        content = bytearray(size)
        read = 0
        while read < size:
            read += os.preadv(self._file.fileno(), [memoryview(content)[read:]], begin + read)
        return content


@dataclass(frozen=True)
class _Place:
    begin: int
    shape: torch.Size
    dtype: torch.dtype


class SpooledParams(Mapping[str, Tensor]):
    """Parameters in a :class:`Spool`: every look at a tensor reads it from the file."""

    def __init__(self, spool: Spool, places: Mapping[str, _Place]) -> None:
        self._spool = spool
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        size = place.shape.numel() * place.dtype.itemsize
        if size == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        content = self._spool.read(place.begin, size)
        return torch.frombuffer(content, dtype=place.dtype).view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
