"""The models by name, and a user's own as ``package.module:factory``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import nn

from goldfish.errors import ConfigError, unknown
from goldfish.models.custom import load_factory
from goldfish.models.fresh import fresh_params
from goldfish.models.lenet import LeNet5, LeNet5Cifar
from goldfish.models.resnet import ResNet
from goldfish.randomness import seeded_globally
from goldfish.types import ModelFactory, Scalar

__all__ = [
    "MLP",
    "MODELS",
    "ImageShape",
    "LeNet5",
    "LeNet5Cifar",
    "ModelSpec",
    "ResNet",
    "build_model",
    "fresh_params",
    "model_factory",
]

ImageShape: TypeAlias = tuple[int, int, int]
"""Channels, height, width."""


class MLP(nn.Sequential):
    """The smallest model, for images of any size: flattened, one hidden layer with ReLU."""

    def __init__(self, num_classes: int = 10, in_features: int = 784, hidden: int = 200) -> None:
        if not isinstance(hidden, int) or hidden < 1:
            raise ConfigError(
                f"'hidden' of the model 'mlp' must be a positive int, not {hidden!r}."
            )
        first, last = nn.Linear(in_features, hidden), nn.Linear(hidden, num_classes)
        super().__init__(nn.Flatten(), first, nn.ReLU(), last)


@dataclass(frozen=True)
class ModelSpec:
    """One named model."""

    factory: Callable[..., nn.Module]
    """Called with the number of classes, the image shape, and the options by keyword."""
    summary: str

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that the factory takes."""
        return tuple(inspect.signature(self.factory).parameters)[2:]


def _lenet(kind: type[LeNet5 | LeNet5Cifar], num_classes: int, shape: ImageShape) -> nn.Module:
    channels, height, width = shape
    if height != width:
        raise ConfigError(
            f"{kind.__name__} takes square images, not {height} x {width}. "
            "Crop or pad the images, or choose 'mlp' or a ResNet."
        )
    return kind(num_classes, channels, height)


def _resnet(depth: int, num_classes: int, image_shape: ImageShape) -> nn.Module:
    return ResNet(depth, num_classes, image_shape[0])


def _mlp(num_classes: int, image_shape: ImageShape, hidden: int = 200) -> nn.Module:
    return MLP(num_classes, math.prod(image_shape), hidden)


MODELS: dict[str, ModelSpec] = {
    "lenet5": ModelSpec(
        partial(_lenet, LeNet5), "LeNet-5, 2 fully connected layers (MNIST, Fashion-MNIST)"
    ),
    "lenet5-cifar": ModelSpec(
        partial(_lenet, LeNet5Cifar), "LeNet-5, 3 fully connected layers (CIFAR-10)"
    ),
    "resnet20": ModelSpec(partial(_resnet, 20), "ResNet of 20 layers for small images"),
    "resnet32": ModelSpec(partial(_resnet, 32), "ResNet of 32 layers for small images (CIFAR-10)"),
    "resnet56": ModelSpec(partial(_resnet, 56), "ResNet of 56 layers for small images (CIFAR-100)"),
    "mlp": ModelSpec(_mlp, "One hidden layer, 'hidden' wide (200)"),
}
"""The models by name: a new one is one more entry."""


def build_model(
    name: str,
    *,
    num_classes: int,
    image_shape: ImageShape,
    options: Mapping[str, Scalar] | None = None,
) -> nn.Module:
    """Return a new model. The arguments are those of :func:`model_factory`."""
    return model_factory(name, num_classes=num_classes, image_shape=image_shape, options=options)()


def model_factory(
    name: str,
    *,
    num_classes: int,
    image_shape: ImageShape,
    options: Mapping[str, Scalar] | None = None,
) -> ModelFactory:
    """Return a callable that builds a new model at each call; one is built here, to check.

    ``name`` is a key of ``MODELS``, or ``package.module:factory`` for a model of your own: that
    factory is called with ``**options`` only, so it must know the number of classes and the image
    shape by itself or take them as options.
    """
    options = options or {}
    if ":" in name:
        return load_factory(name, options)
    if name not in MODELS:
        hint = f"Choose one of {', '.join(MODELS)}, or your own as 'package.module:factory'."
        raise ConfigError(unknown("model", name, MODELS, hint))
    if num_classes < 2:
        raise ConfigError(f"A model needs at least 2 classes, not {num_classes}.")
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ConfigError(
            f"The image shape must be (channels, height, width), each at least 1, not "
            f"{image_shape}."
        )
    spec = MODELS[name]
    for option in options:
        if option not in spec.options:
            taken = ", ".join(sorted(spec.options)) or "none"
            hint = f"The options of the model {name!r}: {taken}."
            raise ConfigError(unknown("model option", option, spec.options, hint))
    factory = partial(spec.factory, num_classes, image_shape, **options)
    with seeded_globally(0, "check", name):
        factory()
    return factory
