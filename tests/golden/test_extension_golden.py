"""Equations (11) to (13) and the error that they rest on, each value derived by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn, tensor

from goldfish.data import TensorExamples
from goldfish.errors import ConfigError
from goldfish.params import params_of, weighted_mean
from goldfish.training.server_test import ServerTest, mean_squared_error, measured_samples
from goldfish.unlearning.basic_model import GoldfishSettings, client_temperature
from goldfish.unlearning.extension import adaptive_temperature, adaptive_weights

LN2 = math.log(2)
EXACT = 1e-6


# Equation (11).


def test_temperature_of_a_client_that_removes_30_percent() -> None:
    """With alpha = 1/e: 3 e^(-1) e^(7/10) = 3 e^(-3/10) = 3 * 0.74081822 = 2.22245466."""
    assert adaptive_temperature(3, 70, 30) == pytest.approx(2.22245466, abs=EXACT)
    assert adaptive_temperature(3, 700, 300) == pytest.approx(2.22245466, abs=EXACT)


def test_temperature_with_another_factor() -> None:
    """With alpha = 1: 3 e^(7/10) = 3 * 2.01375271 = 6.04125812."""
    assert adaptive_temperature(3, 70, 30, alpha=1) == pytest.approx(6.04125812, abs=EXACT)


def test_temperature_of_a_client_that_removes_nothing() -> None:
    """3 e^(-1) e^1 = 3, to the last bit."""
    assert adaptive_temperature(3, 100, 0) == 3


def test_temperature_by_the_settings() -> None:
    """Adaptive: 3 e^(-3/10), as above; with alpha = 1/2: 3/2 e^(7/10) = 3.02062906.

    Switched off: T0, whatever is removed.
    """
    assert client_temperature(GoldfishSettings(), 70, 30) == pytest.approx(2.22245466, abs=EXACT)
    half = GoldfishSettings(temperature_alpha=0.5)
    assert client_temperature(half, 70, 30) == pytest.approx(3.02062906, abs=EXACT)
    assert client_temperature(GoldfishSettings(adaptive_temperature=False), 70, 30) == 3


def test_a_temperature_of_1_or_below_is_refused_in_words() -> None:
    """1.2 e^(-3/10) = 0.88898187. T0 has to be above e^(3/10) = 1.34985881.

    The message names the temperature, both sizes, the setting with its value, and both ways out.
    """
    with pytest.raises(ConfigError) as caught:
        adaptive_temperature(1.2, 70, 30)
    message = str(caught.value)
    for words in [
        "temperature is 0.889",
        "keeps 70 samples",
        "removes 30",
        "Raise temperature (now 1.2) above 1.35",
        "adaptive_temperature = false",
    ]:
        assert words in message


def test_any_temperature_above_the_one_that_the_error_names_will_do() -> None:
    """2.5 e^(-93/100) = 0.9864; T0 has to be above e^(93/100) = 2.53450918, so not 2.53."""
    with pytest.raises(ConfigError) as caught:
        adaptive_temperature(2.5, 7, 93)
    named = re.search(r"above ([0-9.]*[0-9])", str(caught.value))
    assert named is not None
    assert adaptive_temperature(float(named[1]) + 1e-4, 7, 93) > 1


def test_a_temperature_of_exactly_1_is_refused() -> None:
    """1 * e^(-1) * e^1 = 1: not above 1."""
    with pytest.raises(ConfigError, match="At 1 or below"):
        adaptive_temperature(1.0, 10, 0)


# Equations (12) and (13).


def test_weights_of_three_clients() -> None:
    """Errors 1/10, 2/10, 3/10, mean 2/10: exponents 1/2, 0, -1/2.

    e^(1/2) = 1.64872127, 1, e^(-1/2) = 0.60653066; sum 3.25525193. Divided by it:
    0.50648039, 0.30719589, 0.18632372.
    """
    weights = adaptive_weights([0.1, 0.2, 0.3])
    assert weights == pytest.approx([0.50648039, 0.30719589, 0.18632372], abs=EXACT)


def test_global_model_of_three_clients() -> None:
    """The weights above on (1, 0), (0, 1) and (2, 2).

    First: 0.50648039 + 2 * 0.18632372 = 0.87912783. Second: 0.30719589 + 0.37264744 = 0.67984333.
    """
    models = [{"w": tensor(row)} for row in ([1.0, 0.0], [0.0, 1.0], [2.0, 2.0])]
    mean = weighted_mean(models, adaptive_weights([0.1, 0.2, 0.3]))
    assert mean["w"].tolist() == pytest.approx([0.87912783, 0.67984333], abs=EXACT)


def test_equation_13_divides_by_the_sum_of_the_weights() -> None:
    """Weights 1, 2, 5 on 8, 4, 16: (8 + 8 + 80) / 8 = 12."""
    models = [{"w": tensor([value])} for value in (8.0, 4.0, 16.0)]
    assert weighted_mean(models, [1, 2, 5])["w"].tolist() == pytest.approx([12], abs=EXACT)


@pytest.mark.parametrize("errors", [[0.3], [0.3, 0.3, 0.3], [0.0, 0.0], [0.0]])
def test_equal_errors_give_equal_weights(errors: list[float]) -> None:
    assert adaptive_weights(errors) == pytest.approx([1 / len(errors)] * len(errors), abs=EXACT)


def test_a_perfect_client_beside_a_bad_one() -> None:
    """Errors 0 and 1, mean 1/2: exponents 1 and -1; weights e^2 : 1 = 7.38905610 : 1."""
    assert adaptive_weights([0.0, 1.0]) == pytest.approx(
        [7.38905610 / 8.38905610, 1 / 8.38905610], abs=EXACT
    )


# The mean squared error of (12).


def test_mean_squared_error() -> None:
    """Softmax (1/2, 1/4, 1/4), class 0: (-1/2, 1/4, 1/4), squares 4/16 + 1/16 + 1/16 = 6/16.

    Softmax (1/5, 1/5, 3/5), class 1: (1/5, -4/5, 3/5), squares (1 + 16 + 9) / 25 = 26/25.
    Mean over 6 numbers: (3/8 + 26/25) / 6 = 283/1200.
    """
    logits = tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 5, 1 / 5, 3 / 5]], dtype=torch.float64).log() - 1
    error = mean_squared_error(logits, tensor([0, 1]))
    assert error == pytest.approx(283 / 1200, abs=EXACT)


def test_server_score() -> None:
    """Logits (x ln 2, 0). x = 1: (2, 1) / 3; x = 2: (4, 1) / 5. Labels 0 and 1.

    Loss (ln(3/2) + ln 5) / 2 = ln(15/2) / 2. Errors (-1/3, 1/3) and (4/5, -4/5): squares 2/9 and
    32/25, mean over 4 numbers (2/9 + 32/25) / 4 = 169/450.
    """
    model = nn.Linear(1, 2, bias=False)
    params = {"weight": tensor([[LN2], [0.0]])}
    server = ServerTest(
        lambda: nn.Linear(1, 2, bias=False),
        TensorExamples(tensor([[1.0], [2.0]]), tensor([0, 1])),
        samples=2,
    )
    score = server.score(params)
    assert score.loss == pytest.approx(math.log(15 / 2) / 2, abs=EXACT)
    assert score.mse == pytest.approx(169 / 450, abs=EXACT)
    server.score(params_of(model))
    assert server.score(params) == score, "a model scored before leaves nothing behind"


def test_the_server_measures_on_a_part_that_is_drawn_once() -> None:
    """Of the two samples above one is drawn: the loss is ln(3/2) or ln 5, always the same one."""
    examples = TensorExamples(tensor([[1.0], [2.0]]), tensor([0, 1]))
    params = {"weight": tensor([[LN2], [0.0]])}
    losses = {
        ServerTest(lambda: nn.Linear(1, 2, bias=False), examples, 1, seed).score(params).loss
        for seed in (0, 0, 1, 2, 3)
    }
    assert {round(loss, 5) for loss in losses} == {0.40547, 1.60944}


@pytest.mark.parametrize(
    ("clients", "samples"), [(1, 2000), (10, 2000), (11, 909), (50, 200), (100, 100), (1000, 100)]
)
def test_on_how_many_samples_a_client_is_measured(clients: int, samples: int) -> None:
    """2000 for up to ten clients; then 10,000 / 11 = 909, 10,000 / 50 = 200, and at least 100."""
    assert measured_samples(clients) == samples
