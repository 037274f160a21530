"""CIFAR-10 and CIFAR-100, in the publisher's binary and in its Python (pickle) layout."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from goldfish.errors import DataError

_SHAPE = (-1, 3, 32, 32)
_PIXELS = 3 * 32 * 32


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
    if not isinstance(pixels, _Array) or not isinstance(labels, list):
        raise DataError(f"{path}: 'data' or {labels_key!r} is missing.")
    if not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(f"{path}: {labels_key!r} holds something else than labels.")
    images = torch.from_numpy(pixels.pixels(path).copy()).view(_SHAPE)
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(images)} images but {len(labels)} labels.")
    return images, torch.tensor(labels, dtype=torch.int64)


class _Array:
    """What a pickle says of an array; no more than what the publisher's files hold is read."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self, path: Path) -> npt.NDArray[np.uint8]:
        """Return the array, if it is one of bytes with the pixels of an image in each row."""
        match self.state:
            case (1, (int(count), int(width)), _Type("u1"), False | 0, str() | bytes() as content):
                # Text: of Python 2, or bytes that Python 3 wrote as text.
                raw = content if isinstance(content, bytes) else content.encode("latin1", "ignore")
                if width == _PIXELS and len(raw) == count * width:
                    return np.frombuffer(raw, np.uint8).reshape(count, width)
        raise DataError(f"{path}: the images are no array of uint8 (N, {_PIXELS}).")


@dataclass
class _Type:
    """The type of an array's numbers, by name."""

    name: Any

    def __setstate__(self, state: Any) -> None:
        """Take the rest of what a pickle says of a type; for bytes it says nothing."""


def _encode(text: Any, encoding: Any) -> str:
    """Leave bytes the text that they are in the file: they are made once, where they are used."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes are written as latin1")
    return text


# What a pickle of a plain array calls, and what is called in its place: nothing of numpy's, which
# would build an array over any bytes that it is given. Numpy moved its core in version 2.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): lambda name, *_: _Type(name),
    ("_codecs", "encode"): _encode,
}


class _ArraysOnly(pickle._Unpickler):
    """Reads plain arrays and Python values, and runs nothing else.

    It is the unpickler in Python: the one in C fills the memory when a file asks for it.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")  # the publisher had Python 2
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise DataError(
                f"{self.path}: refused, since this pickle would run {module}.{name}. Only plain "
                "arrays are read. Do not open this file elsewhere."
            ) from None


def _load_pickle(path: Path) -> dict[Any, Any]:
    try:
        content = _ArraysOnly(path.read_bytes(), path).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a CIFAR batch.")
    return content
