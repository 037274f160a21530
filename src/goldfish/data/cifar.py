"""CIFAR-10 and CIFAR-100, in the publisher's binary and in its Python (pickle) layout."""

from __future__ import annotations

import _codecs
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from goldfish.errors import DataError

_SHAPE = (3, 32, 32)
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


@dataclass(frozen=True)
class Layout:
    """Where one edition of a CIFAR dataset keeps what."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    """Bytes before the pixels of a binary record; the last is the label. 0 means pickles."""
    labels_key: str = ""
    """Where a pickle keeps the labels."""

    def missing_files(self, data_dir: Path) -> tuple[str, ...]:
        """Return the names of the files that the folder lacks."""
        names = (*self.train, *self.test)
        return tuple(name for name in names if not (data_dir / self.folder / name).is_file())


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = {
    "cifar-10": (
        Layout(
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _BATCHES),
            ("test_batch.bin",),
            label_bytes=1,
        ),
        Layout("cifar-10-batches-py", _BATCHES, ("test_batch",), 0, labels_key="labels"),
    ),
    "cifar-100": (
        Layout("cifar-100-binary", ("train.bin",), ("test.bin",), label_bytes=2),
        Layout("cifar-100-python", ("train",), ("test",), 0, labels_key="fine_labels"),
    ),
}
"""The layouts of each dataset; the first is the one that ``goldfish data fetch`` writes."""


def find(name: str, data_dir: Path) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout that is there and what it lacks: a complete one where there is one."""
    layouts = LAYOUTS[name]
    missing = [layout.missing_files(data_dir) for layout in layouts]
    best = min(range(len(layouts)), key=lambda i: len(missing[i]) > 0)
    return layouts[best], missing[best]


def read_split(
    data_dir: Path, layout: Layout, split: str, num_classes: int, remedy: str
) -> tuple[Tensor, Tensor]:
    """Return images (uint8, ``[N, 3, 32, 32]``) and labels (int64) of ``train`` or ``test``."""
    images, labels = [], []
    for name in layout.train if split == "train" else layout.test:
        path = data_dir / layout.folder / name
        pixels, classes = (
            _read_binary(path, layout.label_bytes, remedy)
            if layout.label_bytes
            else _read_pickle(path, layout.labels_key, remedy)
        )
        if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
            raise DataError(
                f"{path}: labels {int(classes.min())} to {int(classes.max())} are out of range; "
                f"labels are 0 to {num_classes - 1}. {remedy}"
            )
        images.append(pixels)
        labels.append(classes)
    return torch.cat(images).view(-1, *_SHAPE), torch.cat(labels)


def fine_label_names(data_dir: Path, layout: Layout, remedy: str) -> tuple[str, ...] | None:
    """Return CIFAR-100's class names where the folder holds them."""
    folder = data_dir / layout.folder
    text_file, pickle_file = folder / "fine_label_names.txt", folder / "meta"
    if layout.label_bytes and text_file.is_file():
        path, names = text_file, text_file.read_text(encoding="utf-8").split()
    elif not layout.label_bytes and pickle_file.is_file():
        path, names = pickle_file, _load_pickle(pickle_file, remedy).get("fine_label_names", [])
    else:
        return None
    if len(names) != 100:
        raise DataError(f"{path}: {len(names)} class names, 100 were expected. {remedy}")
    return tuple(str(name) for name in names)


def _read_binary(path: Path, label_bytes: int, remedy: str) -> tuple[Tensor, Tensor]:
    record = label_bytes + _PIXELS
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). {remedy}") from error
    if len(content) == 0 or len(content) % record:
        raise DataError(
            f"{path}: {len(content)} bytes are not a whole number of records of {record} bytes; "
            f"the file is truncated or damaged. {remedy}"
        )
    records = torch.from_numpy(content.reshape(-1, record))
    return records[:, label_bytes:].contiguous(), records[:, label_bytes - 1].long()


def _read_pickle(path: Path, labels_key: str, remedy: str) -> tuple[Tensor, Tensor]:
    content = _load_pickle(path, remedy)
    pixels, labels = content.get("data"), content.get(labels_key)
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list):
        raise DataError(f"{path}: 'data' or {labels_key!r} is missing. {remedy}")
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(
            f"{path}: images are {pixels.dtype} {pixels.shape}, uint8 (N, {_PIXELS}) was "
            f"expected. {remedy}"
        )
    if len(pixels) != len(labels):
        raise DataError(f"{path}: {len(pixels)} images but {len(labels)} labels. {remedy}")
    return torch.from_numpy(pixels.copy()), torch.tensor(labels, dtype=torch.int64)


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
                "arrays are read. Do not open this file elsewhere; delete it."
            ) from None


def _load_pickle(path: Path, remedy: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, path).load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path}: cannot be read ({error}). {remedy}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a CIFAR batch. {remedy}")
    return content
