"""scikit-learn's 1797 digits, enlarged to MNIST's size."""

from __future__ import annotations

import torch
from torch import nn

from goldfish.data.folder import RawSplit
from goldfish.randomness import generator

_SIDE = 28
_BRIGHTEST = 16  # scikit-learn's pixels run from 0 to 16
_TEST_SHARE = 0.2
_SEED = 0


def read() -> tuple[RawSplit, RawSplit]:
    """Return a training and a test split, always the same; ids are scikit-learn's order."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / _BRIGHTEST
    large = nn.functional.interpolate(small, size=(_SIDE, _SIDE), mode="bilinear")
    images = (large * 255).round().to(torch.uint8)
    labels = torch.tensor(targets, dtype=torch.int64)
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
