"""Whether a trigger still works: the attacker's view of a model."""

from __future__ import annotations

from torch import Tensor

from goldfish.errors import ConfigError
from goldfish.evaluation._checks import checked_logits


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
