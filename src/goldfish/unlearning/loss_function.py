"""The loss function module: hard, confusion and distillation loss, equations (1) to (6).

Every function takes logits and returns a scalar; every term is a mean over its own mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from goldfish.errors import ConfigError, unknown

RemovedTermName: TypeAlias = Literal["capped", "smooth", "literal"]

FOCAL_GAMMA = 2.0
"""The focusing exponent that the focal loss's authors recommend."""


@dataclass(frozen=True)
class HardLoss:
    """A loss between prediction and label."""

    of_samples: Callable[[Tensor, Tensor], Tensor]
    """Returns the loss of each sample, from logits and labels."""
    of_a_uniform_guess: Callable[[int], float]
    """Returns the loss of a uniform guess, from the number of classes: the cap of L_f."""


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.pow(1 - torch.exp(-losses), FOCAL_GAMMA) * losses


CROSS_ENTROPY = HardLoss(partial(F.cross_entropy, reduction="none"), math.log)
HARD_LOSSES: dict[str, HardLoss] = {
    "cross-entropy": CROSS_ENTROPY,
    "focal": HardLoss(_focal, lambda classes: (1 - 1 / classes) ** FOCAL_GAMMA * math.log(classes)),
    "nll": CROSS_ENTROPY,
}
"""The hard losses by name.

For a softmax classifier the negative log likelihood of the log-softmax *is* the cross-entropy;
``nll`` exists because the paper lists it.
"""


def hard_loss(name: str) -> HardLoss:
    """Return the hard loss of this name; a name that is not known is an error."""
    if name not in HARD_LOSSES:
        hint = f"Choose one of {', '.join(HARD_LOSSES)}."
        raise ConfigError(unknown("hard loss", name, HARD_LOSSES, hint))
    return HARD_LOSSES[name]


def removed_loss(
    logits: Tensor,
    labels: Tensor,
    kind: str = "cross-entropy",
    term: RemovedTermName = "capped",
    targets: Tensor | None = None,
) -> Tensor:
    """Return L_f of equation (1), the loss on removed data, which the total *subtracts*.

    - ``capped``: each sample's loss counts up to that of a uniform guess. Past "knows nothing"
      there is nothing to gain, so the total stays bounded below. With ``targets``, each counts up
      to its own, which is at most that.
    - ``smooth``: log(1 - p_y / 2), in [-ln 2, 0], bounded with a gradient everywhere.
    - ``literal``: the plain loss, as printed. It has no upper bound, and the total diverges.
    """
    if term not in (terms := get_args(RemovedTermName)):
        hint = f"Choose one of {', '.join(terms)}."
        raise ConfigError(unknown("removed term", term, terms, hint))
    if term == "smooth":
        of_label = F.softmax(logits, dim=-1).gather(1, labels[:, None])
        return torch.log1p(-of_label / 2).mean()
    losses = hard_loss(kind).of_samples(logits, labels)
    if term == "capped":
        cap = hard_loss(kind).of_a_uniform_guess(logits.shape[-1])
        losses = losses.clamp(max=cap if targets is None else targets.clamp(max=cap))
    return losses.mean()


def confusion_loss(removed_logits: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return the confusion loss, equation (2): the mean deviation of the predicted probabilities.

    The square root of the population variance is the norm of the centred vector over sqrt(K);
    the norm's gradient at 0 is 0, where that of a square root would be infinite. ``shares``, from 0
    to 1, say how much each sample is to be confused.
    """
    probabilities = F.softmax(removed_logits, dim=-1)
    centred = probabilities - probabilities.mean(dim=-1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(centred, dim=-1)
    if shares is not None:
        norms = norms * shares
    return norms.mean() / math.sqrt(removed_logits.shape[-1])


def confusion_shares(targets: Tensor | None, classes: int) -> Tensor | None:
    """Return how much removed samples with these targets are to be confused.

    A uniform guess is what confusion ends in: a share of its loss is as large a share of it.
    """
    if targets is None:
        return None
    return (targets / CROSS_ENTROPY.of_a_uniform_guess(classes)).clamp(max=1.0)


def soften(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return softened probabilities, equations (3) and (4)."""
    return F.softmax(logits / temperature, dim=-1)


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float | Tensor,
    *,
    square_scaling: bool = False,
) -> Tensor:
    """Return the distillation loss, equation (5): soft cross-entropy at ``temperature``.

    ``square_scaling`` multiplies by the usual T^2, which the paper does not have.
    """
    targets = soften(teacher_logits, temperature)
    loss = F.cross_entropy(student_logits / temperature, targets)
    return loss * temperature**2 if square_scaling else loss


def goldfish_loss(
    hard: Tensor, confusion: Tensor | float, distillation: Tensor | float, mu_c: float, mu_d: float
) -> Tensor:
    """Return the total, equation (6)."""
    return hard + mu_c * confusion + mu_d * distillation
