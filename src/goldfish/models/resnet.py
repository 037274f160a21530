"""ResNets for small images: He et al. 2016, "Deep Residual Learning", section 4.2.

Depth ``6n + 2``: one convolution, three stages of ``n`` blocks with 16, 32 and 64 channels, one
fully connected layer. Shortcuts have no parameters (option A).
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from goldfish.errors import ConfigError
from goldfish.hardware.residual import ResidualLayers

STAGE_CHANNELS = (16, 32, 64)


class BasicBlock(ResidualLayers):
    """Two 3 x 3 convolutions beside a shortcut.

    Where the block halves the image, the shortcut takes every second pixel and fills the new
    channels with zeros (option A).
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.new_channels = out_channels - in_channels
        self.stride = 2 if self.new_channels else 1
        self.conv1 = _conv3x3(in_channels, out_channels, self.stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(residual(x) + shortcut(x))``."""
        inner, x = self.layer(x, self.conv1, self.bn1)
        return self.layer(inner, self.conv2, self.bn2, self.shortcut(x))[0]

    def shortcut(self, x: Tensor) -> Tensor:
        """Return ``x``, subsampled and zero-padded to the shape of the residual."""
        if not self.new_channels:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class ResNet(ResidualLayers):
    """A ResNet of depth ``6n + 2``. Any image size; 32 x 32 is what it was made for."""

    def __init__(self, depth: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ConfigError(
                f"A ResNet for small images has a depth of 6n + 2 (8, 14, 20, 32, 56, ...), "
                f"not {depth}."
            )
        blocks_per_stage = (depth - 2) // 6
        self.conv = _conv3x3(in_channels, STAGE_CHANNELS[0])
        self.bn = nn.BatchNorm2d(STAGE_CHANNELS[0])
        outputs = [channels for channels in STAGE_CHANNELS for _ in range(blocks_per_stage)]
        widths = pairwise([STAGE_CHANNELS[0], *outputs])
        self.blocks = nn.Sequential(*(BasicBlock(*channels) for channels in widths))
        self.fc = nn.Linear(STAGE_CHANNELS[-1], num_classes)
        self.apply(_kaiming)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        features: Tensor = self.blocks(self.layer(x, self.conv, self.bn)[0])
        logits: Tensor = self.fc(features.mean(dim=(2, 3)))
        return logits


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


def _kaiming(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
