"""Properties of the divergences, and Welch's test against SciPy's."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind
from torch import Tensor

from goldfish.errors import ConfigError, DataError, DivergenceError
from goldfish.evaluation.similarity import WelchTest, confidence, jsd, jsd_distance, l2, welch

NUMBERS = st.floats(-50, 50)
no_deadline = settings(deadline=None)  # the first case also pays for torch to start


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw the logits of two models on the same samples."""
    samples, classes = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    row = st.lists(NUMBERS, min_size=classes, max_size=classes)
    rows = st.lists(row, min_size=samples, max_size=samples)
    return torch.tensor(draw(rows)), torch.tensor(draw(rows))


@no_deadline
@given(pairs())
def test_jsd_is_symmetric_and_bounded(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    assert 0 <= jsd(p, q) <= math.log(2)
    assert jsd(p, q) == jsd(q, p)
    assert jsd_distance(p, q) == math.sqrt(jsd(p, q))


@no_deadline
@given(pairs())
def test_jsd_is_what_its_definition_says(pair: tuple[Tensor, Tensor]) -> None:
    """The stable form against (KL(p, m) + KL(q, m)) / 2, with 0 log 0 = 0."""
    p, q = (logits.double().softmax(dim=1) for logits in pair)
    m = (p + q) / 2
    slow = (torch.xlogy(p, p / m) + torch.xlogy(q, q / m)).sum(dim=1).mean() / 2
    assert jsd(*pair) == pytest.approx(slow.item(), abs=1e-12)


@no_deadline
@given(pairs())
def test_l2_is_symmetric_and_bounded(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    assert 0 <= l2(p, q) <= math.sqrt(2) + 1e-12
    assert l2(p, q) == l2(q, p)


@no_deadline
@given(pairs())
def test_equal_models_are_exactly_alike(pair: tuple[Tensor, Tensor]) -> None:
    p, _ = pair
    assert jsd(p, p) == jsd_distance(p, p) == l2(p, p) == 0


@no_deadline
@given(pairs(), NUMBERS)
def test_a_shift_of_the_logits_changes_nothing(pair: tuple[Tensor, Tensor], by: float) -> None:
    p, q = (logits.double() for logits in pair)
    assert jsd(p + by, q) == pytest.approx(jsd(p, q), abs=1e-9)
    assert l2(p, q + by) == pytest.approx(l2(p, q), abs=1e-9)


def test_models_are_compared_on_the_same_samples() -> None:
    for measure in (jsd, jsd_distance, l2):
        with pytest.raises(ConfigError, match="shapes \\(2, 3\\) and \\(1, 3\\)"):
            measure(torch.zeros(2, 3), torch.zeros(1, 3))
        with pytest.raises(DivergenceError, match="diverged"):
            measure(torch.zeros(2, 3), torch.full((2, 3), torch.nan))
        with pytest.raises(DataError, match="nothing to evaluate"):
            measure(torch.zeros(0, 3), torch.zeros(0, 3))


def test_confidence_asks_for_a_class_of_the_model() -> None:
    with pytest.raises(DataError, match="from 0 to 3"):
        confidence(torch.zeros(2, 3), torch.tensor([3, 0]))
    with pytest.raises(ConfigError, match="one label for each of 2 samples"):
        confidence(torch.zeros(2, 3), torch.zeros(3))


SAMPLES = st.lists(st.integers(0, 1000), min_size=2, max_size=20, unique=True).map(
    lambda numbers: torch.tensor(numbers, dtype=torch.float64) / 1000
)


@no_deadline
@given(SAMPLES, SAMPLES)
def test_welch_agrees_with_scipy(a: Tensor, b: Tensor) -> None:
    ours, theirs = welch(a, b), ttest_ind(a.numpy(), b.numpy(), equal_var=False)
    assert ours.p == pytest.approx(float(theirs.pvalue))
    assert ours.statistic == pytest.approx(float(theirs.statistic), abs=1e-12)


@no_deadline
@given(SAMPLES, SAMPLES)
def test_welch_has_a_sign_and_two_sides(a: Tensor, b: Tensor) -> None:
    there, back = welch(a, b), welch(b, a)
    assert there.statistic is not None
    assert there.effect_size is not None
    assert there.p == pytest.approx(back.p)
    assert back.statistic == pytest.approx(-there.statistic)
    assert back.effect_size == pytest.approx(-there.effect_size)


def test_constant_samples_have_a_convention_that_fits_in_json() -> None:
    """0.1 is not a binary fraction: a mean over 3 and over 7 copies may differ in its last bit."""
    same = welch(torch.full((3,), 0.1), torch.full((7,), 0.1))
    different = welch(torch.full((3,), 0.1), torch.full((7,), 0.2))
    assert same == WelchTest(p=1.0, statistic=0.0, effect_size=0.0)
    assert different == WelchTest(p=0.0, statistic=None, effect_size=None)
    json.dumps(dataclasses.asdict(different), allow_nan=False)


@pytest.mark.parametrize("sample", [torch.tensor([1.0]), torch.zeros(2, 2), torch.tensor(1.0)])
def test_welch_needs_two_numbers_a_side(sample: Tensor) -> None:
    with pytest.raises(DataError, match="at least 2 samples"):
        welch(sample, torch.tensor([0.0, 1.0]))


def test_welch_refuses_what_is_not_finite() -> None:
    with pytest.raises(DivergenceError, match="not finite"):
        welch(torch.tensor([0.0, torch.nan]), torch.tensor([0.0, 1.0]))
