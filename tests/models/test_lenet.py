"""The two LeNets have the layers that the paper lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from goldfish.errors import ConfigError
from goldfish.models import LeNet5, LeNet5Cifar


def _count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_lenet5_is_the_papers() -> None:
    """2 conv, 2 max-pool, 2 fully connected.

    6 * (25 + 1) + 16 * (6 * 25 + 1) + 120 * (16 * 5 * 5 + 1) + 10 * 121
    = 156 + 2416 + 48120 + 1210 = 51902 parameters.
    """
    model = LeNet5()
    assert [_count(model, kind) for kind in (nn.Conv2d, nn.MaxPool2d, nn.Linear)] == [2, 2, 2]
    assert sum(parameter.numel() for parameter in model.parameters()) == 51_902


def test_lenet5_cifar_is_the_papers() -> None:
    """2 conv, 2 max-pool, 3 fully connected.

    6 * (3 * 25 + 1) + 16 * (6 * 25 + 1) + 120 * (16 * 5 * 5 + 1) + 84 * 121 + 10 * 85
    = 456 + 2416 + 48120 + 10164 + 850 = 62006 parameters.
    """
    model = LeNet5Cifar()
    assert [_count(model, kind) for kind in (nn.Conv2d, nn.MaxPool2d, nn.Linear)] == [2, 2, 3]
    assert sum(parameter.numel() for parameter in model.parameters()) == 62_006


@pytest.mark.parametrize(("model", "smallest"), [(LeNet5, 12), (LeNet5Cifar, 16)])
def test_every_size_that_fits_works_and_smaller_ones_are_refused(
    model: type[LeNet5] | type[LeNet5Cifar], smallest: int
) -> None:
    for size in range(smallest, smallest + 9):
        assert model(4, 2, size)(torch.rand(1, 2, size, size)).shape == (1, 4)
    with pytest.raises(ConfigError, match=f"at least {smallest} x {smallest} pixels"):
        model(4, 2, smallest - 1)
