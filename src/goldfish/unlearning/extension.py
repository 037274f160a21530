"""The extension module: adaptive temperature, equation (11); adaptive weights, (12) and (13)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from goldfish.errors import ConfigError

LOWEST_EXPONENT = -700.0
"""exp of anything lower is 0 in double precision, and a weight must stay positive."""


def adaptive_temperature(
    initial: float, num_retained: int, num_removed: int, alpha: float = 1 / math.e
) -> float:
    """Return the client's temperature, equation (11): alpha T0 exp(|D_r| / (|D_r| + |D_f|)).

    With the default ``alpha = 1/e`` a client that removes nothing gets exactly T0.
    """
    share = num_retained / (num_retained + num_removed)
    temperature = initial * (alpha * math.e) * math.exp(share - 1)
    if temperature <= 1:
        raise ConfigError(
            f"The adaptive temperature is {temperature:.3g} for a client that keeps "
            f"{num_retained} samples and removes {num_removed}. At 1 or below, soft labels turn "
            f"into hard ones. Raise temperature (now {initial:g}) above "
            f"{math.ceil(1000 * initial / temperature) / 1000:g}, or set "
            "adaptive_temperature = false."
        )
    return temperature


def adaptive_weights(errors: Sequence[float]) -> list[float]:
    """Return the clients' weights, equation (12), divided by their sum as in (13).

    ``errors`` are the clients' mean squared errors on the server's test set. Equal errors, a
    single client, and errors that are all 0 give equal weights.
    """
    mean = sum(errors) / len(errors)
    if mean == 0:
        return [1 / len(errors)] * len(errors)
    weights = [math.exp(max(-(error - mean) / mean, LOWEST_EXPONENT)) for error in errors]
    return [weight / sum(weights) for weight in weights]
