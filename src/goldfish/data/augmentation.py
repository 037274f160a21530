"""Random changes to a batch of training images, in whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def random_crop_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Shift each image by up to ``padding`` pixels and mirror every second one, at random.

    ``images`` is ``[B, C, H, W]``. Each image is padded with zeros on all sides, cut to its old
    size at a random place, and flipped left to right with probability 1/2. All draws come from
    ``generator``: first the offsets ``[2, B]`` (down, right), then the flips ``[B]``.
    """
    count, channels, height, width = images.shape
    device = images.device
    offsets = torch.randint(
        0, 2 * padding + 1, (2, count), generator=generator, device=generator.device
    ).to(device)
    flips = torch.rand(count, generator=generator, device=generator.device).to(device) < 0.5
    rows = offsets[0, :, None] + torch.arange(height, device=device)
    columns = offsets[1, :, None] + torch.arange(width, device=device)
    columns = torch.where(flips[:, None], columns.flip(1), columns)
    padded = nn.functional.pad(images, (padding,) * 4)
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
