"""How good a model's predictions are, on clean data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from goldfish.errors import ConfigError
from goldfish.evaluation._checks import checked_labels, checked_logits


@dataclass(frozen=True)
class Scores:
    """The quality of one model on one dataset."""

    accuracy: float
    """Samples whose largest logit is the label's, in percent."""
    loss: float
    """Mean cross-entropy, natural logarithm."""
    mse: float
    """Squared error between softmax vector and one-hot label, mean over samples and classes;
    the ``me`` of equation (12)."""
    per_class: tuple[float | None, ...]
    """Accuracy on the samples of each class, in percent; None where the data has none."""


def score(logits: Tensor, labels: Tensor, num_classes: int) -> Scores:
    """Return the scores of ``logits`` (samples, classes) against ``labels`` (samples)."""
    logits = checked_logits(logits)
    if logits.shape[1] != num_classes:
        raise ConfigError(
            f"The model has {logits.shape[1]} outputs, but the data has {num_classes} classes. "
            "Build the model with the number of classes of the data."
        )
    labels = checked_labels(labels, len(logits), num_classes)
    hit = logits.argmax(dim=1) == labels
    totals = torch.bincount(labels, minlength=num_classes).tolist()
    hits = torch.bincount(labels[hit], minlength=num_classes).tolist()
    error = logits.softmax(dim=1) - F.one_hot(labels, num_classes)
    return Scores(
        accuracy=100 * sum(hits) / len(labels),
        loss=F.cross_entropy(logits, labels).item(),
        mse=error.square().mean().item(),
        per_class=tuple(
            100 * right / total if total else None
            for right, total in zip(hits, totals, strict=True)
        ),
    )
