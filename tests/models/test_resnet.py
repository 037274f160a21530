"""The ResNets have the size and the shortcuts of He et al. 2016, section 4.2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from goldfish.errors import ConfigError
from goldfish.models import ResNet
from goldfish.models.resnet import BasicBlock


@pytest.mark.parametrize(
    ("depth", "exact", "in_millions"),
    [(20, 269_722, 0.27), (32, 464_154, 0.46), (56, 853_018, 0.85)],
)
def test_parameter_counts_are_the_papers(depth: int, exact: int, in_millions: float) -> None:
    """Depth 6n + 2, 10 classes; a 3 x 3 convolution from a to b channels has 9ab weights, its
    BatchNorm 2b.

    Input: 9*3*16 + 2*16 = 464. Output: 64*10 + 10 = 650.
    A block at one width w: 2 * (9*w*w + 2*w), so 4672, 18560 and 73984 at 16, 32 and 64.
    The first block of stages 2 and 3 reads half the channels, so has 9*(w/2)*w weights fewer:
    9*16*32 = 4608 and 9*32*64 = 18432.
    In all (4672 + 18560 + 73984) n - 4608 - 18432 + 464 + 650 = 97216 n - 21926:
    n = 3: 269722; n = 5: 464154; n = 9: 853018.
    """
    count = sum(parameter.numel() for parameter in ResNet(depth).parameters())
    assert count == exact == 97_216 * (depth - 2) // 6 - 21_926
    assert round(count / 1e6, 2) == in_millions


@pytest.mark.parametrize("depth", [20, 32, 56])
def test_depth_counts_the_layers_with_weights(depth: int) -> None:
    layers = [m for m in ResNet(depth).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


def test_shortcut_takes_every_second_pixel_and_fills_channels_with_zeros() -> None:
    """Of a 1-channel image 0..15 in rows of 4, pixels 0, 2, 8 and 10 stay; channel 2 is zero."""
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    shortcut = BasicBlock(1, 2).shortcut(image)
    assert shortcut.tolist() == [[[[0, 2], [8, 10]], [[0, 0], [0, 0]]]]


def test_shortcut_at_one_width_is_the_identity() -> None:
    image = torch.rand(1, 2, 4, 4)
    assert torch.equal(BasicBlock(2, 2).shortcut(image), image)


@pytest.mark.parametrize("size", [8, 15, 28, 32])
def test_any_image_size(size: int) -> None:
    assert ResNet(8, 4, 1).eval()(torch.rand(2, 1, size, size)).shape == (2, 4)


@pytest.mark.parametrize("depth", [2, 10, 51])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"6n \\+ 2 .* not {depth}"):
        ResNet(depth)


def test_convolutions_start_with_kaiming_variance() -> None:
    """Kaiming: variance 2 / fan_in; the last convolution has fan_in 9 * 64, 36864 weights."""
    torch.manual_seed(0)
    last = ResNet(20).blocks[-1]
    assert isinstance(last, BasicBlock)
    assert last.conv2.weight.var().item() == pytest.approx(2 / 576, rel=0.05)
