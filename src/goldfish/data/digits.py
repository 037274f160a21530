"""scikit-learn's 1797 digits, enlarged to MNIST's size."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from goldfish.data.folder import RawSplit
from goldfish.errors import DataError
from goldfish.randomness import generator

_SIDE = 28
_BRIGHTEST = 16  # scikit-learn's pixels run from 0 to 16
_TEST_SHARE = 0.2
_SEED = 0


def read() -> tuple[RawSplit, RawSplit]:
    """Return a training and a test split, always the same; ids are scikit-learn's order."""
    table = _table()
    small = table[:, :-1].float().view(-1, 1, 8, 8) / _BRIGHTEST
    large = nn.functional.interpolate(small, size=(_SIDE, _SIDE), mode="bilinear")
    images = (large * 255).round().to(torch.uint8)
    labels = table[:, -1].long()
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    draw = generator(_SEED, "digits split")
    for digit in range(10):
        positions = (labels == digit).nonzero().flatten()
        shuffled = positions[torch.randperm(len(positions), generator=draw)]
        is_test[shuffled[: round(len(positions) * _TEST_SHARE)]] = True
    train, test = (
        RawSplit(images[mask], labels[mask], tuple(map(str, mask.nonzero().flatten().tolist())))
        for mask in (~is_test, is_test)
    )
    return train, test


def _table() -> torch.Tensor:
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
