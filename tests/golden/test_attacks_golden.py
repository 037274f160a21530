"""Per-example attacks against values derived by hand."""

from __future__ import annotations

import math

import pytest
import torch

from goldfish.evaluation.attacks import (
    counted,
    epsilon,
    gaussian_distance,
    klom,
    likelihood_ratios,
    margins,
    membership,
    roc_points,
    true_positives,
)
from goldfish.evaluation.audit import (
    Shifted,
    Shifts,
    band,
    difference,
    effective,
    group_weights,
    in_strata,
    shifts,
)
from goldfish.evaluation.harm import harm


def column(*values: float) -> torch.Tensor:
    """Return the margins of one sample under several models."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_a_margin_is_the_log_odds_of_the_label() -> None:
    """Softmax of (ln 6, ln 1, ln 3) is (0.6, 0.1, 0.3).

    Label 0: ln(0.6 / 0.4) = ln 1.5. Label 1: ln(0.1 / 0.9) = -ln 9.
    """
    logits = torch.tensor([[math.log(6), 0.0, math.log(3)]] * 2)
    found = margins(logits, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(1.5), -math.log(9)])


def test_a_sure_model_has_a_finite_margin() -> None:
    """The probability p rounds to 1, and ln(p / (1 - p)) would be infinite; the logits say 100."""
    assert margins(torch.tensor([[100.0, 0.0]]), torch.tensor([0])).item() == pytest.approx(100)


def test_gaussian_distance() -> None:
    """Jeffreys' divergence of N(1, 1) and N(3, 4).

    Margins (0, 1, 2) have mean 1 and variance 1; (1, 3, 5) mean 3 and variance 4. The squared
    shift is 4: (1 + 4) / 4 = 1.25 and (4 + 4) / 1 = 8, half of the sum is 4.625, minus 1: 3.625.
    """
    assert gaussian_distance(column(0, 1, 2), column(1, 3, 5)).item() == pytest.approx(3.625)


def test_gaussian_distance_with_equal_spreads_is_the_squared_shift() -> None:
    """(0, 1, 2) and (2, 3, 4): a shift of 2 standard deviations, hence 4."""
    assert gaussian_distance(column(0, 1, 2), column(2, 3, 4)).item() == pytest.approx(4)


def test_klom() -> None:
    """Two bins from 0 to 4: the unlearned models 3 and 0, the oracles 1 and 2.

    Half a model more in each bin: (3.5, 0.5) / 4 and (1.5, 2.5) / 4. The divergence is
    0.875 ln(3.5 / 1.5) + 0.125 ln(0.5 / 2.5).
    """
    expected = 0.875 * math.log(3.5 / 1.5) + 0.125 * math.log(0.2)
    assert klom(column(0, 0.5, 1), column(1, 3, 4), bins=2).item() == pytest.approx(expected)


def test_likelihood_ratios() -> None:
    """The unlearned models (0, 2, 4) against the oracles (9, 10, 11).

    The first unlearned model, at 0: the others of its side have mean 3 and variance 2, the oracles
    mean 10 and variance 1. ln densities without the constant: -9 / 4 - ln(2) / 2 and -100 / 2.
    The first oracle, at 9: the unlearned side has mean 2 and variance 4, the other oracles mean
    10.5 and variance 1/2: -49 / 8 - ln 2 and -1.5 ** 2 - ln(1/2) / 2.
    """
    ours, theirs = likelihood_ratios(column(0, 2, 4), column(9, 10, 11))
    assert ours[0].item() == pytest.approx(-9 / 4 - math.log(2) / 2 + 50)
    expected = (-49 / 8 - math.log(2)) - (-2.25 + math.log(2) / 2)
    assert theirs[0].item() == pytest.approx(expected)


def test_true_positives_at_a_false_positive_rate() -> None:
    """Ten negatives 0 to 9: at 10 % one may be above the threshold, which then is 8.

    Of the positives 7, 8, 8.5, 12 two are above 8.
    """
    found = true_positives(torch.tensor([7, 8, 8.5, 12]), torch.arange(10.0), 0.1)
    assert (found.rate, found.count) == (0.5, 4)


def test_roc_points() -> None:
    """Positives 3 and 1, negatives 0 and 2: above 2 there is one positive and no negative.

    The first point allows one of two negatives: at threshold 1 both positives pass and one
    negative does. The last allows all.
    """
    found = roc_points(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 2.0]))
    assert found[0] == pytest.approx((0.5, 1.0))
    assert found[-1] == (1.0, 1.0)
    half = roc_points(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 2.0, 2.5, -1.0]))
    assert half[0] == pytest.approx((0.25, 0.5)), "one of four: at most 2.5 alone may pass"


def test_membership() -> None:
    """Class 0: removed 3 and 1 against unseen 0 and 2; class 1: removed 5 against unseen 4 and 5.

    3 beats both, 1 beats one, 5 beats one and ties with one: shares 1, 1/2 and 3/4, mean 3/4. Their
    squares are 1/8; with 1/12 of one more sample the variance is 5/24 / 3, a third of which is
    5/216. Unseen samples are beaten by a share of the removed ones of their class: 0 by all, 2 by
    half, variance 1/8; 4 by all, 5 by half: 1/8. Weights 2/3 and 1/3: (4/9 + 1/9) * 1/8 / 2 =
    5/144. Half of the interval is Student's quantile for 2 degrees, 4.30, times the root of
    5/216 + 5/144: 1.04; it is cut at 0 and 1.

    Of 3, 4, ..., 12 all beat the unseen 0 and 2: no spread but that of one more sample, 1/12 / 10.
    Half of the interval is 2.262157 (9 degrees) times the root of 1/1200.
    """
    found = membership(
        torch.tensor([3.0, 1.0, 5.0]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0.0, 2.0, 4.0, 5.0]),
        torch.tensor([0, 0, 1, 1]),
    )
    assert found is not None
    assert (found.rate, found.low, found.high, found.count) == (0.75, 0.0, 1.0, 3)
    zeros = torch.zeros(10, dtype=torch.long)
    found = membership(torch.arange(3.0, 13), zeros, torch.tensor([0.0, 2.0]), zeros[:2])
    assert found is not None
    assert (found.rate, found.high, found.count) == (1.0, 1.0, 10)
    assert found.low == pytest.approx(1 - 2.262157 * math.sqrt(1 / 1200), rel=1e-6)


def test_harm() -> None:
    """Two classes, so a margin is the difference of the two logits.

    Client a: both right before; after it the first has margin 1 - 2 = -1 and is wrong. Client b:
    its sample was wrong (-1) and is right (+1). The margins change by -3, 0 and +2.
    """
    labels = torch.tensor([0, 1, 1])
    before = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    after = torch.tensor([[1.0, 2.0], [0.0, 3.0], [0.0, 1.0]])
    found = harm(before, after, labels, ["x", "y", "z"], ["a", "a", "b"])
    assert (found.clients["a"].before, found.clients["a"].after) == (100, 50)
    assert (found.clients["b"].before, found.clients["b"].after) == (0, 100)
    assert (found.lost, found.gained, found.samples) == (1, 1, 3)
    (worst,) = found.most_affected
    assert (worst.id, worst.client_id, worst.before, worst.after) == ("x", "a", 2, -1)


def test_wilson_interval() -> None:
    """0 of 10: low 0; high = z^2 / (n + z^2) with z = 1.95996, that is 3.8415 / 13.8415."""
    found = counted(0, 10)
    assert found.low == pytest.approx(0, abs=1e-12)
    assert found.high == pytest.approx(3.8414588 / 13.8414588, rel=1e-6)


def test_epsilon() -> None:
    """Four models a side, with one of each on the wrong side of every good threshold.

    Unlearned (0, 1, 2, 9), oracles (-1, 6, 7, 8). "At most 2" takes three of four unlearned
    models and one oracle: f = g = 1/4, ln((1 - delta - 1/4) / (1/4)) = ln(3 - 4 delta). No other
    threshold is better; "at least 9" has f = 0 with g = 3/4 and is left out.
    """
    found = epsilon(column(0, 1, 2, 9), column(-1, 6, 7, 8), delta=1e-5).item()
    assert found == pytest.approx(math.log(3 - 4e-5))


def test_epsilon_of_sides_that_do_not_overlap_is_infinite() -> None:
    """The threshold 5 has f = g = 0."""
    assert epsilon(column(0, 1), column(5, 6)).item() == math.inf


def test_difference_of_models() -> None:
    """Unlearned (3, 5), oracles (1, 2, 3): means 4 and 2.

    Squares 2 and 2 over 3 degrees of freedom: variance 4/3; times (1/2 + 1/3) = 10/9. The 99.5 %
    quantile of Student's t with 3 degrees is 5.840909.
    """
    found = difference([3, 5], [1, 2, 3])
    assert found.value == pytest.approx(2)
    assert found.half == pytest.approx(5.840909 * math.sqrt(10 / 9), rel=1e-6)


def test_the_band_of_a_further_oracle() -> None:
    """Oracles 1, 2, 3: variance 2 / 2 = 1, times 1 + 1/3; t with 2 degrees is 9.924843."""
    assert band([1, 2, 3]) == pytest.approx(9.924843 * math.sqrt(4 / 3), rel=1e-6)


def test_shifts() -> None:
    """One sample. Oracles 1, 2, 3: mean 2, variance 1, which is also the mean over all samples.

    The spread is the root of (1 + 1) / 2. An unlearned model at 4 is shifted by 2. The oracle at 1
    is compared with the mean 2.5 of the others: -1.5; that at 2 with 2: 0. For the square of the
    first the variance is that of the others, 2 and 3, alone: 1.5^2 over (1/2 + 1) / 2 = 3/4. Where
    all samples, also elsewhere, have the mean variance 7, the spread is 2, the root of (1 + 7) / 2,
    and 3/4 is 15/4.
    """
    for usual, spread, of_others in ((None, 1, 3 / 4), (7.0, 2, 15 / 4)):
        ours, theirs = shifts(column(4), column(1, 2, 3), usual=usual)
        assert ours.mean.tolist() == pytest.approx([2 / spread])
        assert ours.square.tolist() == pytest.approx([4 / spread**2])
        assert theirs.mean.tolist() == pytest.approx([-1.5 / spread, 0, 1.5 / spread])
        square = 1.5**2 / of_others
        assert theirs.square.tolist() == pytest.approx([square, 0, square])


def test_the_error_of_the_samples() -> None:
    """Two models whose shifts are 1, 3 and 2, 6 on two removed samples: variances 1 and 4.

    Their mean is 2.5. Those of the oracles vary by 0.5, so that 2 are left: with 2 samples, 1. On
    unseen samples the models vary less than the oracles, which adds nothing. The standard error is
    the root, 1. As a further error beside that of the golden difference, 10/9, it makes half of
    the interval 5.840909 * sqrt(10/9 + 1).
    """
    removed = Shifts(torch.tensor([2.0, 4.0]), torch.tensor([5.0, 20.0]))
    noise = Shifts(torch.zeros(3), torch.full((3,), 0.5))
    shifted = Shifted((removed, noise), (noise, removed), (2, 100))
    assert shifted.error == pytest.approx(1)
    found = difference([3, 5], [1, 2, 3], shifted.error)
    assert found.half == pytest.approx(5.840909 * math.sqrt(10 / 9 + 1), rel=1e-6)
    assert found.of_samples == pytest.approx(5.840909, rel=1e-6)


def test_how_many_equal_samples_weighed_ones_are_worth() -> None:
    """Weights 2, 1, 1: (2 + 1 + 1)^2 / (4 + 1 + 1) = 8/3. Equal weights count each sample."""
    assert effective(torch.tensor([2.0, 1.0, 1.0])) == pytest.approx(8 / 3)
    assert effective(torch.full((5,), 0.1)) == pytest.approx(5)


def test_strata() -> None:
    """Two classes. Class 0 has 60 unseen samples, 0 to 59: three strata, of at least 20 each.

    Their ends are the lower quantiles 1/3 and 2/3 of 0 to 59: the samples at 59/3 and 118/3,
    rounded down, 19 and 39. Class 1 has 39: one stratum. Strata of class 0 are 0, 1 and 2, that of
    class 1 is 5, as there may be five of each; class 2 has no unseen sample. A removed sample is in
    that where its mean margin lies, also beyond all unseen ones.
    """
    unseen = torch.cat([torch.zeros(60), torch.ones(39)]).long()
    removed = torch.tensor([0, 0, 0, 0, 0, 1, 2])
    ease = torch.cat(
        [torch.tensor([-5.0, 19, 20, 40, 99, 20, 0]), torch.arange(60), torch.arange(39)]
    )
    found = in_strata(torch.cat([removed, unseen]), ease, unseen)
    assert found[:7].tolist() == [0, 0, 1, 2, 2, 5, 10]
    assert found[7:].bincount().tolist() == [20, 20, 20, 0, 0, 39]


def test_strata_of_margins_that_are_alike() -> None:
    """Forty samples share the lowest margin, 0, the others have 10 to 69: no stratum is empty.

    The lower quantiles 1/5 to 4/5 of 100 samples are those at 19, 39, 59 and 79: 0, 0, 29 and 49. A
    removed sample at 5 is with those up to 29.
    """
    ease = torch.cat([torch.tensor([5.0]), torch.zeros(40), torch.arange(10.0, 70)])
    found = in_strata(torch.zeros(101).long(), ease, torch.zeros(100).long())
    assert found[0] == 1
    assert found[1:].bincount().tolist() == [40, 20, 20, 20]


def test_group_weights() -> None:
    """Removed in 0, 0, 1; unseen in 0, 1, 1, 2: group 0 has 2 for 1 sample, group 1 has 1 for 2."""
    found = group_weights(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 2]))
    assert found.tolist() == [2, 0.5, 0.5, 0]
