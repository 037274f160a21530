"""Metrics on vectors of two or three numbers, each expected value derived by hand."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import t
from torch import Tensor, tensor

from goldfish.evaluation.memory import class_matched, sample_hits, sample_losses
from goldfish.evaluation.scores import backdoor_success, score
from goldfish.evaluation.similarity import confidence, jsd, jsd_distance, l2, paired_p, welch
from goldfish.results import Interval


def logits_of(*rows: list[float]) -> Tensor:
    """Return logits whose softmax is ``rows``; adding a constant must not matter, so add one."""
    return tensor(rows, dtype=torch.float64).log() + 3


ONE_HOT_LOGITS = tensor([[200.0, -200.0], [-200.0, 200.0]])
"""Softmax (1, 0) and (0, 1), up to 1e-173."""


def test_score() -> None:
    """Two samples, three classes, both of class 0.

    Softmax (1/2, 1/4, 1/4): right. Loss -ln(1/2) = ln 2. Error (-1/2, 1/4, 1/4), squares
    1/4 + 1/16 + 1/16 = 6/16.
    Softmax (1/4, 1/2, 1/4): wrong. Loss ln 4 = 2 ln 2. Error (-3/4, 1/2, 1/4), squares
    9/16 + 4/16 + 1/16 = 14/16.
    Accuracy 50; loss 3/2 ln 2; MSE (6/16 + 14/16) / 6 = 20/96 = 5/24. Classes 1 and 2 are absent.
    """
    scores = score(logits_of([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]), tensor([0, 0]), 3)
    assert scores.accuracy == 50.0
    assert scores.loss == pytest.approx(1.5 * math.log(2))
    assert scores.mse == pytest.approx(5 / 24)
    assert scores.per_class == (50.0, None, None)


def test_backdoor_success() -> None:
    """Three of four rows have their largest entry in column 1: 75 %."""
    logits = tensor([[0.0, 1, 0], [0, 2, 1], [5, 1, 0], [-3, -1, -2]])
    assert backdoor_success(logits, 1) == 75.0


def test_jsd_of_certain_and_opposite_models_is_ln_2() -> None:
    """With p = (1, 0), q = (0, 1), m = (1/2, 1/2): KL(p, m) = KL(q, m) = ln 2."""
    assert jsd(ONE_HOT_LOGITS, ONE_HOT_LOGITS.flip(0)) == pytest.approx(math.log(2), rel=1e-15)
    assert jsd_distance(ONE_HOT_LOGITS, ONE_HOT_LOGITS.flip(0)) == pytest.approx(
        math.sqrt(math.log(2)), rel=1e-15
    )


def test_jsd_of_two_samples() -> None:
    """With p = (3/4, 1/4), q = (1/4, 3/4), m = (1/2, 1/2).

    KL(p, m) = 3/4 ln(3/2) + 1/4 ln(1/2) = 3/4 ln 3 - ln 2 = KL(q, m), so JSD = 3/4 ln 3 - ln 2
    = 0.1308. The second sample is equal on both sides: 0. The mean is half of it.
    """
    p = logits_of([0.75, 0.25], [0.9, 0.1])
    q = logits_of([0.25, 0.75], [0.9, 0.1])
    expected = (0.75 * math.log(3) - math.log(2)) / 2
    assert jsd(p, q) == pytest.approx(expected)
    assert jsd_distance(p, q) == pytest.approx(math.sqrt(expected))


def test_l2() -> None:
    """(3/4, 1/4) to (1/4, 3/4): sqrt(1/4 + 1/4) = sqrt(1/2); equal rows: 0. Mean sqrt(1/2) / 2.

    The certain and opposite models are sqrt 2 apart.
    """
    p = logits_of([0.75, 0.25], [0.9, 0.1])
    q = logits_of([0.25, 0.75], [0.9, 0.1])
    assert l2(p, q) == pytest.approx(math.sqrt(0.5) / 2)
    assert l2(ONE_HOT_LOGITS, ONE_HOT_LOGITS.flip(0)) == pytest.approx(math.sqrt(2))


def test_confidence() -> None:
    """The softmax entry itself: column 1 of both rows, then columns 0 and 2."""
    logits = logits_of([0.5, 0.3, 0.2], [0.1, 0.2, 0.7])
    assert confidence(logits, torch.tensor([1, 1])).tolist() == pytest.approx([0.3, 0.2])
    assert confidence(logits, tensor([0, 2])).tolist() == pytest.approx([0.5, 0.7])


def test_welch_with_one_degree_of_freedom() -> None:
    """Of a = (4, 6), b = (1, 1): means 5 and 1, variances ((-1)**2 + 1**2) / 1 = 2 and 0.

    Squared error 2/2 + 0 = 1, t = 4. All of it comes from a, so there is 2 - 1 = 1 degree of
    freedom: a Cauchy distribution, p = 2 * (1/2 - atan(4) / pi) = 1 - 2 atan(4) / pi = 0.156.
    Pooled variance (1 * 2 + 1 * 0) / 2 = 1, so d = 4.
    """
    result = welch(tensor([4.0, 6.0]), tensor([1.0, 1.0]))
    assert result.statistic == pytest.approx(4)
    assert result.effect_size == pytest.approx(4)
    assert result.p == pytest.approx(1 - 2 * math.atan(4) / math.pi)


def test_paired_p() -> None:
    """Differences 1, 2, 3: mean 2, variance 1, t = 2 / sqrt(1/3) = sqrt(12), 2 degrees of freedom.

    With 2 degrees of freedom P(|T| > t) = 1 - t / sqrt(t^2 + 2) = 1 - sqrt(12 / 14) = 0.0741799.
    """
    assert paired_p([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(0.0741799, abs=1e-6)
    assert paired_p([1.0], [2.0]) is None
    assert paired_p([1.0, 2.0], [1.0, 2.0]) == 1
    assert paired_p([1.0, 2.0], [0.0, 1.0]) == 0


def test_welch_with_unequal_sizes() -> None:
    """Of a = (1, 2, 3), b = (2, 4, 6, 8): means 2 and 5, variances 1 and 20/3.

    Squared error 1/3 + 5/3 = 2, t = -3 / sqrt 2.
    Freedom 2**2 / ((1/3)**2 / 2 + (5/3)**2 / 3) = 4 / (1/18 + 25/27) = 4 * 54/53 = 216/53.
    Pooled variance (2 * 1 + 3 * 20/3) / 5 = 22/5, so d = -3 / sqrt(4.4).
    """
    result = welch(tensor([1.0, 2, 3]), tensor([2.0, 4, 6, 8]))
    assert result.statistic == pytest.approx(-3 / math.sqrt(2))
    assert result.effect_size == pytest.approx(-3 / math.sqrt(4.4))
    assert result.p == pytest.approx(2 * t.sf(3 / math.sqrt(2), 216 / 53))


def test_class_matched() -> None:
    """Removed: 0.1 and 0.3 of class 0, 0.2 of class 1; unseen: 0.5, 0.7 and 0.8, 1.2, and class 2.

    Class 0 weighs 2/3, class 1 weighs 1/3, class 2 nothing. Unseen mean 2/3 * 0.6 + 1/3 * 1 =
    11/15, removed mean 0.2 = 3/15, gap 8/15. (With the unseen classes as they are, half and half,
    it would be 0.8 - 0.2 = 0.6; with class 2 in it far more.)
    Unseen variances 0.02 and 0.08, together 2/3 * 0.02 + 1/3 * 0.08 = 0.04. Removed samples lie
    0.5, 0.3 and 0.8 below the mean of their class: variance 0.19 / 3 = 0.0633, the larger one.
    Squared error 0.19 / 9 + (4/9 * 0.02 / 2 + 1/9 * 0.08 / 2) = 0.19/9 + 0.08/9 = 0.03. The first
    part comes from three samples, with 2 degrees of freedom, and so does the second, from four
    unseen ones in two classes: together 0.27^2 / (0.19^2 / 2 + 0.08^2 / 2) = 3.430588. Half of the
    interval is Student's 97.5 % quantile of that, 2.968, times sqrt(0.03).
    """
    found = class_matched(
        tensor([0.1, 0.2, 0.3]),
        tensor([0, 1, 0]),
        tensor([0.8, 0.5, 1.2, 0.7, 9.0, 9.0]),
        tensor([1, 0, 1, 0, 2, 2]),
    )
    assert found is not None
    assert found.removed_mean == pytest.approx(0.2)
    assert found.unseen_mean == pytest.approx(11 / 15)
    assert found.difference.value == pytest.approx(8 / 15)
    half = t.ppf(0.975, 3.430588) * math.sqrt(0.03)
    assert found.difference.high - found.difference.value == pytest.approx(half, abs=1e-5)
    assert found.difference.value - found.difference.low == pytest.approx(half, abs=1e-5)
    assert (found.removed, found.unseen, found.left_out) == (3, 4, 0)


def test_class_matched_takes_the_spread_of_unseen_samples_where_it_is_larger() -> None:
    """Two equal removed samples have no spread of their own; a third is of a class nobody has.

    Unseen 0, 1, 2: mean 1, variance 1. Gap 1 - 0 = 1, squared error 1/2 + 1/3 = 5/6, 2 degrees of
    freedom: half of the interval is 4.30265 * sqrt(5/6) = 3.92776.
    """
    found = class_matched(
        tensor([0.0, 0.0, 5.0]), tensor([3, 3, 4]), tensor([0.0, 1, 2, 7]), tensor([3, 3, 3, 4])
    )
    assert found is not None
    assert (found.removed, found.unseen, found.left_out) == (2, 3, 1)
    assert found.difference.value == pytest.approx(1)
    assert found.difference.high == pytest.approx(1 + 3.92776, abs=1e-4)


def test_gaps_of_two_models_are_compared_sample_by_sample() -> None:
    """Two models' losses; the gap of their differences is the difference of their gaps.

    Removed: 0.1, 0.9 and 0.2, 1.0; unseen: 0.3, 1.1 and 0.2, 1.0, all of one class. Gaps
    0.7 - 0.5 = 0.2 and 0.6 - 0.6 = 0, difference 0.2. The differences are -0.1, -0.1 and 0.1, 0.1:
    they do not vary, so the interval has no width, where that of the first gap alone spans
    12.7062 * sqrt(0.32 / 2 + 0.32 / 2) = 7.2 to each side (1 degree of freedom, variances 0.32).
    """
    mine, theirs = tensor([0.1, 0.9]), tensor([0.2, 1.0])
    mine_unseen, theirs_unseen = tensor([0.3, 1.1]), tensor([0.2, 1.0])
    one = tensor([0, 0])
    alone = class_matched(mine, one, mine_unseen, one)
    paired = class_matched(mine - theirs, one, mine_unseen - theirs_unseen, one)
    assert alone is not None
    assert paired is not None
    assert alone.difference.high - alone.difference.value == pytest.approx(
        12.7062 * math.sqrt(0.32), abs=1e-3
    )
    assert paired.difference.value == pytest.approx(0.2)
    assert paired.difference.low == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize(
    ("difference", "low", "high", "expected"),
    [
        (0.05, 0.01, 0.09, "remembers"),
        (0.02, 0.001, 0.039, "remembers"),
        (0.019, 0.018, 0.020, "alike"),  # certain, and too small to matter
        (0.50, -0.1, 1.1, "alike"),  # large, and perhaps chance
        (-0.05, -0.09, -0.01, "over-forgets"),
        (-0.019, -0.020, -0.018, "alike"),
        (-0.50, -1.1, 0.1, "alike"),
    ],
)
def test_finding(difference: float, low: float, high: float, expected: str) -> None:
    """0 must lie outside of the interval, and the difference be at least 0.02, to either side."""
    assert Interval(value=difference, low=low, high=high).finding == expected


def test_losses_and_hits_of_samples() -> None:
    """Softmax (3/4, 1/4), label 0: right, ln(4/3). (1/4, 3/4), label 0: wrong, ln 4."""
    logits = logits_of([0.75, 0.25], [0.25, 0.75])
    assert sample_losses(logits, tensor([0, 0])).tolist() == pytest.approx(
        [math.log(4 / 3), math.log(4)]
    )
    assert sample_hits(logits, tensor([0, 0])).tolist() == [100.0, 0.0]
