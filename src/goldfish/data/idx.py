"""The IDX files of MNIST and Fashion-MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from goldfish.errors import DataError

SPLITS = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTE = 0x08


def file_names(split: str) -> tuple[str, str]:
    """Return the names of the image and the label file of ``train`` or ``test``, without .gz."""
    prefix = SPLITS[split]
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def find(folder: Path, name: str) -> Path | None:
    """Return the file of this name in the folder, gzipped or not; None when there is neither."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def missing_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that the folder lacks."""
    names = [name for split in SPLITS for name in file_names(split)]
    return tuple(f"{name}.gz" for name in names if find(folder, name) is None)


def read_split(folder: Path, split: str, num_classes: int, remedy: str) -> tuple[Tensor, Tensor]:
    """Return images (uint8, ``[N, 1, H, W]``) and labels (int64) of ``train`` or ``test``."""
    image_name, label_name = file_names(split)
    image_path, images = _read(folder, image_name, 3, remedy)
    label_path, labels = _read(folder, label_name, 1, remedy)
    if len(images) != len(labels):
        raise DataError(
            f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels. "
            f"{remedy}"
        )
    if len(labels) and int(labels.max()) >= num_classes:
        raise DataError(
            f"{label_path}: label {int(labels.max())} is out of range; labels are 0 to "
            f"{num_classes - 1}. {remedy}"
        )
    return images.unsqueeze(1), labels.long()


def _read(folder: Path, name: str, dimensions: int, remedy: str) -> tuple[Path, Tensor]:
    path = find(folder, name)
    if path is None:
        raise DataError(f"{folder / name}.gz is missing (and so is {name}). {remedy}")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}). {remedy}") from error
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if content[:4] != magic:
        raise DataError(
            f"{path}: wrong magic number {content[:4].hex()}, {magic.hex()} was expected; this is "
            f"not an IDX file of {dimensions} dimensions. {remedy}"
        )
    if len(content) < header:
        raise DataError(f"{path}: truncated within its header. {remedy}")
    shape = tuple(np.frombuffer(content, dtype=">u4", count=dimensions, offset=4).tolist())
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) != header + size:
        raise DataError(
            f"{path}: {len(content) - header} bytes of data, {size} were announced; the file is "
            f"truncated or damaged. {remedy}"
        )
    values = np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
    return path, torch.from_numpy(values.copy())
