"""Readers of the published datasets: scikit-learn's digits, IDX files, and CIFAR in two layouts."""

from __future__ import annotations

import functools
import gzip
import io
import pickle
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from goldfish.data.folder import RawSplit
from goldfish.errors import DataError
from goldfish.randomness import generator

_BRIGHTEST_DIGIT = 16  # scikit-learn's pixels run from 0 to 16
_TEST_SHARE = 0.2
_IDX_BYTES = 0x08  # an IDX file of unsigned bytes
_SHAPE = (-1, 3, 32, 32)
_PIXELS = 3 * 32 * 32


def read_digits() -> list[RawSplit]:
    """Return scikit-learn's 1797 digits, enlarged to MNIST's size: a training and a test split.

    They are always the same; ids are scikit-learn's order.
    """
    table = _digits_table()
    small = table[:, :-1].float().view(-1, 1, 8, 8) / _BRIGHTEST_DIGIT
    large = nn.functional.interpolate(small, size=(28, 28), mode="bilinear")
    images = (large * 255).round().to(torch.uint8)
    labels = table[:, -1].long()
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    draw = generator(0, "digits split")
    for digit in range(10):
        positions = (labels == digit).nonzero().flatten()
        shuffled = positions[torch.randperm(len(positions), generator=draw)]
        is_test[shuffled[: round(len(positions) * _TEST_SHARE)]] = True
    return [
        RawSplit(images[mask], labels[mask], tuple(map(str, mask.nonzero().flatten().tolist())))
        for mask in (~is_test, is_test)
    ]


@functools.cache
def _digits_table() -> Tensor:
    """Return one row an image: 64 pixels and the label.

    It is what ``load_digits`` reads; scikit-learn itself is not imported, which takes longer than
    training on it does, in every process.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("scikit-learn, which has the digits, is not installed: install it.")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as lines:
        return torch.from_numpy(np.loadtxt(lines, delimiter=","))


def read_idx(image_path: Path, label_path: Path) -> tuple[Tensor, Tensor]:
    """Return the images (uint8, ``[N, 1, H, W]``) and the labels (int64) of two IDX files.

    MNIST and Fashion-MNIST are of this kind; the files may be gzipped.
    """
    images, labels = _idx_tensor(image_path, dimensions=3), _idx_tensor(label_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels."
        )
    return images.unsqueeze(1), labels.long()


def _idx_tensor(path: Path, dimensions: int) -> Tensor:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, _IDX_BYTES, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path}: wrong magic number {content[:4].hex()}, {magic.hex()} was expected; this is "
            f"not an IDX file of {dimensions} dimensions."
        )
    if len(content) < header:
        raise DataError(f"{path}: truncated within its header.")
    shape = tuple(np.frombuffer(content, dtype=">u4", count=dimensions, offset=4).tolist())
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) != header + size:
        raise DataError(
            f"{path}: {len(content) - header} bytes of data, {size} were announced; the file is "
            "truncated or damaged."
        )
    values = np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
    return torch.from_numpy(values.copy())


def read_cifar_binary(path: Path, label_bytes: int) -> tuple[Tensor, Tensor]:
    """Return images (uint8, ``[N, 3, 32, 32]``) and labels (int64) of a binary CIFAR batch.

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


def read_cifar_pickle(path: Path, labels_key: str) -> tuple[Tensor, Tensor]:
    """Return images and labels, as above, of a pickled one, with the labels under a key."""
    try:
        content = _ArraysOnly(path.read_bytes(), path).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a CIFAR batch.")
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
        if (module, name) not in _ADMITTED:
            raise DataError(
                f"{self.path}: refused, since this pickle would run {module}.{name}. Only plain "
                "arrays are read. Do not open this file elsewhere."
            )
        return _ADMITTED[module, name]
