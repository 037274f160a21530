"""Whether a model treats removed samples like unseen ones of the same classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from goldfish.errors import ConfigError, DivergenceError
from goldfish.evaluation.scores import checked_labels, checked_logits
from goldfish.results import Interval

LEAST_UNSEEN = 2
"""A class with fewer unseen samples has no spread to compare with, and is left out."""


@dataclass(frozen=True)
class Matched:
    """Unseen samples against removed ones, the classes in the proportions of the removed ones."""

    removed_mean: float
    unseen_mean: float
    difference: Interval
    """Unseen minus removed: of losses the memory gap, above 0 where the model remembers."""
    removed: int
    """How many removed samples were compared."""
    unseen: int
    """With how many unseen ones."""
    left_out: int
    """Removed samples whose class has fewer than two unseen samples."""


def sample_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's cross-entropy, natural logarithm."""
    logits = checked_logits(logits)
    return F.cross_entropy(logits, checked_labels(labels, *logits.shape), reduction="none")


def sample_hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return 100 for each sample whose largest logit is the label's, else 0: a mean in percent."""
    logits = checked_logits(logits)
    labels = checked_labels(labels, *logits.shape)
    return 100 * (logits.argmax(dim=1) == labels).double()


def class_matched(
    removed: Tensor, removed_labels: Tensor, unseen: Tensor, unseen_labels: Tensor
) -> Matched | None:
    """Compare a number of each removed sample with that of unseen ones of the same class.

    The numbers are losses, for the memory gap; differences of two models' losses on the same
    samples, for the difference of their gaps; or hits, for the two accuracies. Each class of the
    unseen samples weighs as much as it does among the removed ones. None where no class has two
    unseen samples.

    The interval is Student's. The spread of the removed samples is taken to be at least that of
    unseen ones of their classes: most losses are tiny and a few are large, so that a handful of
    samples often holds no large one, and its own spread would make any difference look certain.
    Where their own is larger it counts, with Welch's degrees of freedom.
    """
    from scipy.special import stdtrit  # here, since importing scipy takes its time

    removed, removed_labels = _checked(removed, removed_labels)
    unseen, unseen_labels = _checked(unseen, unseen_labels)
    matched = by_class(removed, removed_labels, unseen, unseen_labels)
    if not matched:
        return None
    ours = torch.cat([ours for ours, _ in matched])
    beyond = torch.cat([theirs.mean() - ours for ours, theirs in matched])
    spread = error = 0.0
    for own, theirs in matched:
        share, variance = len(own) / len(ours), theirs.var(correction=1).item()
        spread += share * variance
        error += share**2 * variance / len(theirs)
    count = sum(len(theirs) for _, theirs in matched)
    freedom = float(count - len(matched))
    own_spread = beyond.var(correction=1).item() if len(ours) > 1 else 0.0
    if own_spread > spread:
        spread, of_removed = own_spread, own_spread / len(ours)
        squares = of_removed**2 / (len(ours) - 1) + error**2 / freedom
        freedom = (of_removed + error) ** 2 / squares
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(spread / len(ours) + error)
    difference = beyond.mean().item()
    return Matched(
        removed_mean=ours.mean().item(),
        unseen_mean=ours.mean().item() + difference,
        difference=Interval(value=difference, low=difference - half, high=difference + half),
        removed=len(ours),
        unseen=count,
        left_out=len(removed) - len(ours),
    )


def by_class(
    removed: Tensor, removed_labels: Tensor, unseen: Tensor, unseen_labels: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return what there is of removed and of unseen samples for each class that can be compared."""
    pairs = (
        (removed[removed_labels == label], unseen[unseen_labels == label])
        for label in removed_labels.unique().tolist()
    )
    return [(ours, theirs) for ours, theirs in pairs if len(theirs) >= LEAST_UNSEEN]


def _checked(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if values.ndim != 1 or values.shape != labels.shape:
        raise ConfigError(
            f"Samples are compared by one number and one label each, not by the shapes "
            f"{tuple(values.shape)} and {tuple(labels.shape)}."
        )
    if not bool(values.isfinite().all()):
        raise DivergenceError(
            "Samples are compared by numbers that are not finite: a model behind them has diverged."
        )
    return values.detach().cpu().double(), labels.detach().cpu()
