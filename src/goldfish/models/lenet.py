"""LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, in the paper's two versions."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from goldfish.errors import ConfigError
from goldfish.hardware.blocked import BlockedFeatures

KERNEL = 5


class _LeNet(BlockedFeatures):
    """Two convolutions of 6 and 16 channels, each with max-pooling, and fully connected layers."""

    def __init__(
        self, num_classes: int, channels: int, image_size: int, padding: int, hidden: list[int]
    ) -> None:
        smallest = 16 - 2 * padding  # (16 - 4) / 2 = 6, (6 - 4) / 2 = 1 pixel left
        if image_size < smallest:
            raise ConfigError(
                f"{type(self).__name__} needs images of at least {smallest} x {smallest} pixels, "
                f"not {image_size} x {image_size}: its two convolutions and poolings would leave "
                "no pixel. Enlarge the images, or choose 'mlp' or a ResNet."
            )
        after_first = (image_size + 2 * padding - KERNEL + 1) // 2
        side = (after_first - KERNEL + 1) // 2
        layers = [
            nn.Conv2d(channels, 6, KERNEL, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, KERNEL),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ]
        for inputs, outputs in pairwise([16 * side * side, *hidden]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers, nn.Linear(hidden[-1], num_classes))


class LeNet5(_LeNet):
    """The paper's LeNet-5 for MNIST: 2 convolutions, 2 max-poolings, 2 fully connected layers.

    The first convolution pads by 2, as is usual for 28 x 28 images (28 -> 14 -> 5 pixels a side).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__(num_classes, in_channels, image_size, padding=2, hidden=[120])


class LeNet5Cifar(_LeNet):
    """The paper's modified LeNet-5 for CIFAR-10: as above with 3 fully connected layers.

    Nothing is padded, so 32 x 32 images shrink as in the original network (32 -> 14 -> 5).
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__(num_classes, in_channels, image_size, padding=0, hidden=[120, 84])
