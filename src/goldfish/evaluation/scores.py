"""How good a model's predictions are, on clean data and on data with a trigger."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from goldfish.errors import ConfigError, DataError, DivergenceError


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


def backdoor_success(triggered_logits: Tensor, target: int) -> float:
    """Return the percentage of rows that the model assigns to the attacker's ``target``.

    The rows are *triggered* test images whose true class is not the target; the caller leaves the
    others out, since they count as a success without any backdoor.
    """
    logits = checked_logits(triggered_logits)
    if not 0 <= target < logits.shape[1]:
        raise ConfigError(
            f"The backdoor's target {target} is not a class of the model (0 to "
            f"{logits.shape[1] - 1})."
        )
    hits = int((logits.argmax(dim=1) == target).sum())
    return 100 * hits / len(logits)


def checked_logits(logits: Tensor) -> Tensor:
    """Return the logits in double precision on the CPU, or say what is wrong with them."""
    if logits.ndim != 2:
        raise ConfigError(
            f"Logits must have the shape (samples, classes), not {tuple(logits.shape)}."
        )
    if logits.numel() == 0:
        raise DataError("There is nothing to evaluate: the data has no samples (or no classes).")
    broken = int((~logits.isfinite()).any(dim=1).sum())
    if broken:
        raise DivergenceError(
            f"The model's outputs are not finite numbers for {broken} of {len(logits)} samples: "
            "training diverged. Lower the learning rate, or bound the loss on the removed data."
        )
    return logits.detach().cpu().double()


def checked_labels(labels: Tensor, samples: int, num_classes: int) -> Tensor:
    """Return the labels as int64 on the CPU, one a sample and each below ``num_classes``."""
    if labels.shape != (samples,):
        raise ConfigError(
            f"Expected one label for each of {samples} samples, not the shape "
            f"{tuple(labels.shape)}."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise DataError(
            f"Labels go from {low} to {high}, but the classes of the model from 0 to "
            f"{num_classes - 1}. Check the number of classes."
        )
    return labels.detach().cpu().to(torch.int64)
