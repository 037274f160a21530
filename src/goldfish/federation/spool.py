"""Updates of a round that are too many for the memory wait in a temporary file.

The server reads them one at a time, so its memory does not grow with the number of clients.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from goldfish.params import RowParams, Shapes, flatten, num_bytes, shapes_of
from goldfish.types import Params, Task, Update

IN_MEMORY = 32 * 2**20
"""Bytes of updates that a round may keep in memory."""


def keep(update: Update, spool: Spool | None) -> Update:
    """Return the update with its parameters in the spool, where the round has one."""
    return update if spool is None else replace(update, params=spool.put(update.params))


class Spool:
    """A temporary file of models; it is deleted when nobody needs any of them."""

    @classmethod
    def for_answers(cls, tasks: Sequence[Task[Any]]) -> Self | None:
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
        return SpooledParams(self, begin, shapes_of(params))

    def read(self, begin: int, size: int) -> bytearray:
        """Return bytes that were written."""
        content = bytearray(size)
        read = 0
        while read < size:
            read += os.preadv(self._file.fileno(), [memoryview(content)[read:]], begin + read)
        return content


class SpooledParams(RowParams):
    """Parameters in a :class:`Spool`: they are read from the file whenever they are looked at."""

    def __init__(self, spool: Spool, begin: int, shapes: Shapes) -> None:
        super().__init__(shapes)
        self._spool = spool
        self._rows: dict[torch.dtype, tuple[int, int]] = {}
        self._places: dict[str, int] = {}
        for row in dict.fromkeys(dtype for _, dtype in shapes.values()):
            length = 0
            for name, (shape, dtype) in shapes.items():
                if dtype == row:
                    self._places[name] = begin + length * row.itemsize
                    length += shape.numel()
            self._rows[row] = begin, length
            begin += length * row.itemsize

    @property
    def rows(self) -> Mapping[torch.dtype, Tensor]:
        """All values, in the order of the names."""
        return {dtype: self._read(*place, dtype) for dtype, place in self._rows.items()}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self.shapes[name]
        return self._read(self._places[name], shape.numel(), dtype).view(shape)

    def _read(self, begin: int, length: int, dtype: torch.dtype) -> Tensor:
        if length == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._spool.read(begin, length * dtype.itemsize), dtype=dtype)
