"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, in the paper's two versions."""

from __future__ import annotations

from torch import nn

from goldfish.errors import ConfigError
from goldfish.hardware.blocked import BlockedFeatures

CONV_CHANNELS = (6, 16)
HIDDEN = (120, 84)
KERNEL = 5


class LeNet5(BlockedFeatures):
    """The paper's LeNet-5 for MNIST: 2 convolutions, 2 max-poolings, 2 fully connected layers.

    The first convolution pads by 2, as is usual for 28 x 28 images (28 -> 14 -> 5 pixels a side).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        side = _side_after_features("LeNet5", image_size, padding=2)
        super().__init__(
            *_features(in_channels, padding=2),
            nn.Flatten(),
            nn.Linear(CONV_CHANNELS[1] * side * side, HIDDEN[0]),
            nn.ReLU(),
            nn.Linear(HIDDEN[0], num_classes),
            repeats=len(CONV_CHANNELS),
        )


class LeNet5Cifar(BlockedFeatures):
    """The paper's modified LeNet-5 for CIFAR-10: as above with 3 fully connected layers.

    Nothing is padded, so 32 x 32 images shrink as in the original network (32 -> 14 -> 5).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        side = _side_after_features("LeNet5Cifar", image_size, padding=0)
        super().__init__(
            *_features(in_channels, padding=0),
            nn.Flatten(),
            nn.Linear(CONV_CHANNELS[1] * side * side, HIDDEN[0]),
            nn.ReLU(),
            nn.Linear(*HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN[1], num_classes),
            repeats=len(CONV_CHANNELS),
        )


def _features(in_channels: int, padding: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, CONV_CHANNELS[0], KERNEL, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(*CONV_CHANNELS, KERNEL),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def _side_after_features(name: str, image_size: int, padding: int) -> int:
    """Return the side of the last feature map, or say that the image is too small for one."""
    smallest = 16 - 2 * padding  # (16 - 4) / 2 = 6, (6 - 4) / 2 = 1 pixel left
    if image_size < smallest:
        raise ConfigError(
            f"{name} needs images of at least {smallest} x {smallest} pixels, not {image_size} x "
            f"{image_size}: its two convolutions and poolings would leave no pixel. Enlarge the "
            "images, or choose 'mlp' or a ResNet."
        )
    after_first = (image_size + 2 * padding - KERNEL + 1) // 2
    return (after_first - KERNEL + 1) // 2
