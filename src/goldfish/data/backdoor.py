"""The backdoor that shows whether data is gone: a trigger patch and the attacker's label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from goldfish.data.examples import Subset, TensorExamples
from goldfish.errors import ConfigError, DataError


@dataclass(frozen=True)
class Backdoor:
    """A white square, bottom right in the image, that stands for the attacker's class."""

    target: int
    """The class that the attacker wants triggered images to get."""
    source: int | None = None
    """Attack images of this class only (the paper's variant); None attacks all but the target."""
    size: int = 3
    """Side of the square, in pixels."""

    def __post_init__(self) -> None:
        if self.target < 0:
            raise ConfigError(f"A backdoor's target is a class, from 0; not {self.target}.")
        if self.source == self.target:
            raise ConfigError(
                f"A backdoor from class {self.source} to the same class would change nothing. "
                "Choose two classes."
            )
        if self.size < 1:
            raise ConfigError(f"A backdoor's size is at least 1 pixel, not {self.size}.")

    def eligible(self, labels: Tensor) -> Tensor:
        """Return a mask of the samples that this backdoor attacks, by their true labels."""
        return labels != self.target if self.source is None else labels == self.source

    def stamp(self, images: Tensor) -> Tensor:
        """Return a copy of uint8 images ``[N, C, H, W]`` with the trigger on each."""
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(
                "A backdoor needs uint8 images [N, C, H, W], "
                f"not {images.dtype} {list(images.shape)}."
            )
        height, width = images.shape[-2:]
        if self.size > min(height, width):
            raise ConfigError(
                f"A backdoor of {self.size} pixels does not fit into images of {height}x{width}."
            )
        stamped = images.clone()
        stamped[:, :, -self.size :, -self.size :] = 255
        return stamped


def poison(examples: TensorExamples, positions: Tensor, backdoor: Backdoor) -> TensorExamples:
    """Return the examples with trigger and target label on the samples at ``positions``.

    The given examples stay as they are. A poisoning that would change nothing is an error.
    """
    positions = positions.to(examples.images.device)
    if len(positions) == 0:
        raise DataError("A backdoor needs samples to poison; no position was given.")
    _check_target(examples, backdoor)
    true_labels = examples.labels[positions]
    if bool((true_labels == backdoor.target).all()):
        raise DataError(
            f"All {len(positions)} samples to poison are of class {backdoor.target} already, the "
            "backdoor's target. Choose samples of other classes."
        )
    if backdoor.source is not None and not bool(backdoor.eligible(true_labels).all()):
        raise DataError(
            f"The backdoor attacks class {backdoor.source}, but some samples to poison are of "
            "another class. Choose among those that Backdoor.eligible marks."
        )
    images, labels = examples.images.clone(), examples.labels.clone()
    images[positions] = _visibly_stamped(examples.images[positions], backdoor)
    labels[positions] = backdoor.target
    return TensorExamples(images, labels, examples.ids, mean=examples.mean, std=examples.std)


def triggered_test(examples: TensorExamples, backdoor: Backdoor) -> TensorExamples:
    """Return the test images that the backdoor attacks, with the trigger and their true labels.

    These are the images whose class is not the target, or those of the source class alone. The
    share of them that a model assigns to ``backdoor.target`` is the attack's success.
    """
    _check_target(examples, backdoor)
    positions = backdoor.eligible(examples.labels).nonzero().flatten()
    if len(positions) == 0:
        wanted = "another class" if backdoor.source is None else f"class {backdoor.source}"
        raise DataError(f"There is no test image of {wanted} to put a trigger on.")
    images = _visibly_stamped(examples.images[positions], backdoor)
    part = Subset(examples, positions)
    return TensorExamples(images, part.labels, part.ids, mean=examples.mean, std=examples.std)


def _check_target(examples: TensorExamples, backdoor: Backdoor) -> None:
    if not bool((examples.labels == backdoor.target).any()):
        raise ConfigError(
            f"The backdoor's target {backdoor.target} is not a class of the data, which has "
            f"{examples.labels.unique().tolist()}."
        )


def _visibly_stamped(images: Tensor, backdoor: Backdoor) -> Tensor:
    stamped = backdoor.stamp(images)
    if torch.equal(stamped, images):
        raise DataError(
            "The trigger changes no pixel: all images are white there already, bottom right. "
            "Choose a larger one."
        )
    return stamped
