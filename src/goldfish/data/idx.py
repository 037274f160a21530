"""The IDX files of MNIST and Fashion-MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from goldfish.errors import DataError

_UNSIGNED_BYTE = 0x08


def read(image_path: Path, label_path: Path) -> tuple[Tensor, Tensor]:
    """Return the images (uint8, ``[N, 1, H, W]``) and the labels (int64) of two files."""
    images, labels = _read(image_path, dimensions=3), _read(label_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels."
        )
    return images.unsqueeze(1), labels.long()


def _read(path: Path, dimensions: int) -> Tensor:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
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
