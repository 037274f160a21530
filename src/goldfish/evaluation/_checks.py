"""What every metric asks of its logits: a finite matrix with at least one row."""

from __future__ import annotations

import torch
from torch import Tensor

from goldfish.errors import ConfigError, DataError, DivergenceError


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
