"""How alike two models' predictions are: divergence, distance and a test of confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from goldfish.errors import ConfigError, DataError, DivergenceError
from goldfish.evaluation.scores import checked_labels, checked_logits


@dataclass(frozen=True)
class WelchTest:
    """Welch's two-sided t-test. All fields fit in JSON: what would be infinite is None."""

    p: float
    """Probability of a difference at least this large between samples of equal means."""
    statistic: float | None
    """Welch's t, positive where the first mean is larger."""
    effect_size: float | None
    """Cohen's d: difference of the means over the pooled standard deviation."""


def jsd(p_logits: Tensor, q_logits: Tensor) -> float:
    """Return the Jensen-Shannon divergence of two models, in [0, ln 2].

    Natural logarithm, softmax vectors, mean over the samples. With ``m = (p + q) / 2``, the
    logarithm of ``p / m`` is ``ln 2 + log sigmoid(log p - log q)``: no quotient, no log of 0.
    """
    p, q = _checked_pair(p_logits, q_logits)
    log_p, log_q = p.log_softmax(dim=1), q.log_softmax(dim=1)
    ratio = log_p - log_q
    from_p = log_p.exp() * (math.log(2) + F.logsigmoid(ratio))
    from_q = log_q.exp() * (math.log(2) + F.logsigmoid(-ratio))
    divergence = (from_p + from_q).sum(dim=1) / 2
    return divergence.mean().clamp(0, math.log(2)).item()


def jsd_distance(p_logits: Tensor, q_logits: Tensor) -> float:
    """Return the square root of :func:`jsd`, in [0, sqrt(ln 2)]."""
    return math.sqrt(jsd(p_logits, q_logits))


def l2(p_logits: Tensor, q_logits: Tensor) -> float:
    """Return the Euclidean distance of the softmax vectors, mean over samples, in [0, sqrt 2]."""
    p, q = _checked_pair(p_logits, q_logits)
    distance: Tensor = (p.softmax(dim=1) - q.softmax(dim=1)).square().sum(dim=1).sqrt()
    return distance.mean().item()


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's softmax probability in its label."""
    logits = checked_logits(logits)
    labels = checked_labels(labels, *logits.shape)
    return logits.softmax(dim=1).gather(1, labels.unsqueeze(1)).squeeze(1)


def welch(a: Tensor, b: Tensor) -> WelchTest:
    """Return Welch's two-sided t-test between two samples, such as two models' confidences.

    Where neither sample varies there is no t to compute: equal means give p = 1, t = 0 and d = 0;
    different ones give p = 0, and None for t and d, whose limits are infinite.
    """
    from scipy.special import stdtr  # here, since importing scipy takes its time

    mean_a, variance_a = _moments(a)
    mean_b, variance_b = _moments(b)
    difference = mean_a - mean_b
    if variance_a + variance_b == 0:
        return WelchTest(0.0, None, None) if difference else WelchTest(1.0, 0.0, 0.0)

    squared_error = variance_a / len(a) + variance_b / len(b)
    share = variance_a / len(a) / squared_error
    freedom = 1 / (share**2 / (len(a) - 1) + (1 - share) ** 2 / (len(b) - 1))
    statistic = difference / math.sqrt(squared_error)
    spread = (len(a) - 1) * variance_a + (len(b) - 1) * variance_b
    pooled = math.sqrt(spread / (len(a) + len(b) - 2))
    return WelchTest(
        p=float(2 * stdtr(freedom, -abs(statistic))),
        statistic=statistic,
        effect_size=difference / pooled,
    )


def paired_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p of a paired t-test, such as two methods under the same seeds.

    None for a single pair. Where the differences do not vary, p is 1 if they are 0 and else 0.
    """
    from scipy.special import stdtr

    if len(a) != len(b):
        raise ConfigError(f"A paired test needs pairs, got {len(a)} and {len(b)} numbers.")
    if len(a) < 2:
        return None
    pairs = zip(a, b, strict=True)
    mean, variance = _moments(torch.tensor([x - y for x, y in pairs], dtype=torch.float64))
    if variance == 0:
        return 0.0 if mean else 1.0
    statistic = mean / math.sqrt(variance / len(a))
    return float(2 * stdtr(len(a) - 1, -abs(statistic)))


def _moments(sample: Tensor) -> tuple[float, float]:
    """Return mean and unbiased variance, exact for a constant sample."""
    if sample.ndim != 1 or len(sample) < 2:
        raise DataError(
            f"The t-test needs one number for each of at least 2 samples, got the shape "
            f"{tuple(sample.shape)}."
        )
    if not bool(sample.isfinite().all()):
        raise DivergenceError(
            "The t-test was given numbers that are not finite: a model behind them has diverged."
        )
    sample = sample.detach().cpu().double()
    if sample.min() == sample.max():  # rounding in the mean would make it vary
        return sample[0].item(), 0.0
    return sample.mean().item(), sample.var(correction=1).item()


def _checked_pair(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    if p_logits.shape != q_logits.shape:
        raise ConfigError(
            f"Two models are compared on the same samples and classes, but their logits have the "
            f"shapes {tuple(p_logits.shape)} and {tuple(q_logits.shape)}."
        )
    return checked_logits(p_logits), checked_logits(q_logits)
