from __future__ import annotations

import pytest
import torch
from torch import Tensor

from goldfish.data import RandomCropFlip
from goldfish.errors import ConfigError
from goldfish.randomness import generator


def slow_crop_flip(images: Tensor, draws: torch.Generator, padding: int) -> Tensor:
    """Pad, cut and flip one image after the other: the oracle."""
    count, channels, height, width = images.shape
    offsets = torch.randint(0, 2 * padding + 1, (2, count), generator=draws)
    flips = torch.rand(count, generator=draws) < 0.5
    out = []
    for image, down, right, flip in zip(images, *offsets.tolist(), flips.tolist(), strict=True):
        padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding)
        padded[:, padding : padding + height, padding : padding + width] = image
        cut = padded[:, down : down + height, right : right + width]
        out.append(cut.flip(2) if flip else cut)
    return torch.stack(out)


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((16, 3, 8, 8), 4), ((9, 1, 5, 7), 2), ((1, 2, 3, 3), 5), ((4, 1, 6, 6), 0)],
)
def test_it_equals_the_slow_way(shape: tuple[int, ...], padding: int) -> None:
    images = torch.randn(shape, generator=generator(0, "images"))
    transform = RandomCropFlip(padding)
    fast = transform.apply(images, transform.draw(len(images), generator(1, "crop")))
    assert torch.equal(fast, slow_crop_flip(images, generator(1, "crop"), padding))


def test_images_move_and_flip_and_the_input_stays() -> None:
    images = torch.arange(1.0, 65.0).view(1, 1, 8, 8).repeat(200, 1, 1, 1)
    before = images.clone()
    transform = RandomCropFlip()
    changed = transform.apply(images, transform.draw(len(images), generator(2, "crop")))
    assert torch.equal(images, before)
    assert len({tuple(image.flatten().tolist()) for image in changed}) > 50
    rising = changed[:, 0, 4, 4] > changed[:, 0, 4, 3]
    assert 60 < int(rising.sum()) < 140


@pytest.mark.parametrize("inputs", [torch.zeros(2, 7), torch.zeros(2, 1, 5, 5).long()])
def test_what_is_no_image_is_refused_in_words(inputs: Tensor) -> None:
    transform = RandomCropFlip()
    drawn = transform.draw(2, generator(0, "draws"))
    with pytest.raises(ConfigError, match="leave augment off"):
        transform.apply(inputs, drawn)
