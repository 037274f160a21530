"""What holds for the temperature (11) and the weights (12), whatever clients do."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from goldfish.errors import ConfigError
from goldfish.unlearning.extension import adaptive_temperature, adaptive_weights

counts = st.integers(1, 10**9)


@given(st.floats(1, 1e6, exclude_min=True), counts)
def test_nothing_removed_gives_the_initial_temperature_exactly(initial: float, kept: int) -> None:
    assert adaptive_temperature(initial, kept, 0) == initial


@given(st.integers(2, 10**6), st.data())
def test_the_temperature_decreases_in_the_removed_share(total: int, data: st.DataObject) -> None:
    """T0 = 3 keeps T above 1 down to the last sample: 3 / e = 1.10."""
    less = data.draw(st.integers(0, total - 1))
    more = data.draw(st.integers(less + 1, total))
    high = adaptive_temperature(3, total - less, less)
    low = adaptive_temperature(3, total - more, more)
    assert 1 < low < high <= 3


@given(st.floats(1, 100, exclude_min=True), st.floats(0.05, 5), counts, st.integers(0, 10**9))
def test_the_temperature_is_equation_11_or_an_error(
    initial: float, alpha: float, kept: int, removed: int
) -> None:
    """Never at or below 1."""
    expected = alpha * initial * math.exp(kept / (kept + removed))
    try:
        temperature = adaptive_temperature(initial, kept, removed, alpha)
    except ConfigError:
        assert expected <= 1 + 1e-9
    else:
        assert temperature > 1
        assert temperature == pytest.approx(expected, rel=1e-12)


error_values = st.one_of(
    st.floats(0, 1),
    st.floats(0, 1e300),
    st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0, 1e300]),
)


@st.composite
def client_errors(draw: st.DrawFn) -> list[float]:
    """Draw the errors of up to 1000 clients: a few values, repeated, in some order."""
    few = draw(st.lists(error_values, min_size=1, max_size=6))
    many = draw(st.sampled_from([0, 0, 1, 50, 1000]))
    filler = draw(error_values)
    return (few + [filler] * many)[:1000]


@given(client_errors())
@example([1.0] + [0.0] * 999)
@example([0.0] + [1e300] * 999)
@example([1e300] + [5e-324] * 999)
@example([5e-324, 0.0, 0.0])
@example([0.1] * 7)
def test_weights_are_positive_finite_and_add_up_to_1(errors: list[float]) -> None:
    weights = adaptive_weights(errors)
    assert len(weights) == len(errors)
    assert all(weight > 0 and math.isfinite(weight) for weight in weights)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-9)


@given(client_errors())
@example([1.0] + [0.0] * 999)
def test_a_larger_error_never_has_the_larger_weight(errors: list[float]) -> None:
    weights = adaptive_weights(errors)
    ranked = sorted(zip(errors, weights, strict=True))
    for (error, weight), (larger, smaller) in itertools.pairwise(ranked):
        if error == larger:
            assert weight == smaller
        else:
            assert weight >= smaller * (1 - 1e-12)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=20, unique=True))
def test_different_errors_have_different_weights(errors: list[int]) -> None:
    """Errors of 0 to 1 in steps of a millionth, as test sets give them: the order is strict."""
    weights = adaptive_weights([error / 10**6 for error in errors])
    ranked = [weight for _, weight in sorted(zip(errors, weights, strict=True))]
    assert all(weight > smaller for weight, smaller in itertools.pairwise(ranked))


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=20), st.floats(0.01, 100))
def test_weights_do_not_depend_on_the_unit_of_the_error(errors: list[float], factor: float) -> None:
    """So the mean over K entries or their sum make no difference in (12)."""
    scaled = adaptive_weights([error * factor for error in errors])
    assert scaled == pytest.approx(adaptive_weights(errors), rel=1e-9)
