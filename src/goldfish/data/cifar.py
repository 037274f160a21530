"""CIFAR-10 and CIFAR-100, in the publisher's binary and in its Python (pickle) layout."""

from __future__ import annotations

import _codecs
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from goldfish.errors import DataError

_SHAPE = (-1, 3, 32, 32)
_PIXELS = 3 * 32 * 32

# All that a pickle of plain numpy arrays refers to; numpy moved its core in version 2.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _codecs.encode,
}


def read_binary(path: Path, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Return images (uint8, ``[N, 3, 32, 32]``) and labels (int64) of a binary batch.

    A record is ``label_bytes`` bytes, of which the last is the label, and then the pixels.
    """
    record = label_bytes + _PIXELS
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if len(content) == 0 or len(content) % record:
        raise DataError(
            f"{path}: {len(content)} bytes are not a whole number of records of {record} bytes; "
            f"the file is truncated or damaged."
        )
    records = torch.from_numpy(content.reshape(-1, record))
    return records[:, label_bytes:].reshape(_SHAPE), records[:, label_bytes - 1].long()


def read_pickle(path: Path, labels_key: str) -> tuple[Tensor, Tensor]:
    """Return images and labels, as above, of a pickled batch, which has the labels under a key."""
    content = _load_pickle(path)
    pixels, labels = content.get("data"), content.get(labels_key)
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise DataError(f"{path}: 'data' or {labels_key!r} is missing.")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(
            f"{path}: images are {pixels.dtype} {pixels.shape}, uint8 (N, {_PIXELS}) was expected."
        )
    if len(pixels) != len(labels):
        raise DataError(f"{path}: {len(pixels)} images but {len(labels)} labels.")
    return torch.from_numpy(pixels.copy()).view(_SHAPE), torch.tensor(labels, dtype=torch.int64)


class _ArraysOnly(pickle.Unpickler):
    """Reads plain numpy arrays and Python values, and runs nothing else."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="latin1")  # the publisher wrote them with Python 2
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise DataError(
                f"{self.path}: refused, since this pickle would run {module}.{name}. Only plain "
                "arrays are read. Do not open this file elsewhere."
            ) from None


def _load_pickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, path).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a CIFAR batch.")
    return content
