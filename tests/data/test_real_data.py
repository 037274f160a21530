"""The real datasets, where $GOLDFISH_DATA has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from goldfish.data import DATASETS, available, load

COUNTS = {
    "mnist": (60_000, 10_000, 5421, 6742),
    "fashion-mnist": (60_000, 10_000, 6000, 6000),
    "cifar-10": (50_000, 10_000, 5000, 5000),
    "cifar-100": (50_000, 10_000, 500, 500),
}
"""Training and test samples, and samples of the smallest and the largest training class."""


def channel_statistics(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation a channel, of all images.

    All of them, since a part misleads: MNIST's images at even positions are darker than those at
    odd ones, by 14 standard errors.
    """
    total, squares = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for chunk in images.split(5000):
        scaled = chunk.double() / 255
        total += scaled.sum((0, 2, 3))
        squares += scaled.square().sum((0, 2, 3))
    count = images.numel() / images.shape[1]
    mean = total / count
    return mean.tolist(), (squares / count - mean.square()).sqrt().tolist()


@pytest.mark.skipif("GOLDFISH_DATA" not in os.environ, reason="$GOLDFISH_DATA is not set")
@pytest.mark.parametrize("name", COUNTS)
def test_counts_labels_and_normalisation(name: str) -> None:
    if not next(entry for entry in available() if entry.name == name).present:
        pytest.skip(f"{name} is not in $GOLDFISH_DATA")
    data = load(name)
    histogram = data.train.labels.bincount(minlength=data.num_classes)
    found = (len(data.train), len(data.test), int(histogram.min()), int(histogram.max()))
    assert found == COUNTS[name]
    assert len(data.test.labels.unique()) == data.num_classes == len(data.class_names)
    mean, std = channel_statistics(data.train.images)
    assert data.train.mean == pytest.approx(mean, abs=6e-5)  # the constants have 4 decimals
    assert data.train.std == pytest.approx(std, abs=6e-5)


def test_cifar_100_has_the_publishers_class_names() -> None:
    names = Path(os.environ.get("GOLDFISH_DATA", "")) / "cifar-100-binary" / "fine_label_names.txt"
    if not names.is_file():
        pytest.skip("$GOLDFISH_DATA has no names of cifar-100")
    assert DATASETS["cifar-100"].classes == tuple(names.read_text().split())
