"""Random changes to a batch of training images, in whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from goldfish.errors import ConfigError


@dataclass(frozen=True)
class RandomCropFlip:
    """Shift each image by up to ``padding`` pixels and mirror every second one, at random.

    Each image is padded with zeros on all sides, cut to its old size at a random place, and flipped
    left to right with probability 1/2.
    """

    padding: int = 4

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return three numbers for each of ``count`` images: down, right, and 1 for a flip.

        First all offsets are drawn, then the flips.
        """
        offsets = torch.randint(0, 2 * self.padding + 1, (2, count), generator=generator)
        flips = torch.rand(count, generator=generator) < 0.5
        return torch.cat([offsets, flips.long()[None]]).T

    def apply(self, inputs: Tensor, drawn: Tensor) -> Tensor:
        """Return images ``[B, C, H, W]`` shifted and mirrored as ``drawn`` says."""
        if inputs.dim() != 4 or not inputs.is_floating_point():
            raise ConfigError(
                "augment = true shifts and mirrors images, and these inputs are "
                f"{inputs.dtype} of shape {list(inputs.shape[1:])}: leave augment off."
            )
        count, channels, height, width = inputs.shape
        device = inputs.device
        down, right, flips = drawn.to(device).unbind(1)
        rows = down[:, None] + torch.arange(height, device=device)
        columns = right[:, None] + torch.arange(width, device=device)
        columns = torch.where(flips[:, None] == 1, columns.flip(1), columns)
        padded = nn.functional.pad(inputs, (self.padding,) * 4)
        return padded[
            torch.arange(count, device=device)[:, None, None, None],
            torch.arange(channels, device=device)[None, :, None, None],
            rows[:, None, :, None],
            columns[:, None, None, :],
        ]
