"""Scores against a slow count, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from goldfish.errors import ConfigError, DataError, DivergenceError, GoldfishError
from goldfish.evaluation.scores import score


def test_scores_agree_with_a_loop() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 5), torch.randint(4, (50,))
    hits: list[list[float]] = [[] for _ in range(5)]
    squares, losses = [], []
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        probabilities = (row.exp() / row.exp().sum()).tolist()
        hits[label].append(100 * (probabilities.index(max(probabilities)) == label))
        losses.append(-torch.tensor(probabilities[label]).log().item())
        squares += [(p - (k == label)) ** 2 for k, p in enumerate(probabilities)]

    scores = score(logits, labels, 5)

    assert scores.accuracy == pytest.approx(sum(map(sum, hits)) / 50)
    assert scores.loss == pytest.approx(sum(losses) / 50, rel=1e-6)
    assert scores.mse == pytest.approx(sum(squares) / 250)
    assert scores.per_class == (*(pytest.approx(sum(h) / len(h)) for h in hits[:4]), None)


def test_a_perfect_and_a_hopeless_model() -> None:
    logits = 1000 * torch.eye(3)
    assert score(logits, torch.arange(3), 3).accuracy == 100
    assert score(logits, torch.arange(3), 3).mse == pytest.approx(0)
    assert score(logits, torch.tensor([1, 2, 0]), 3).accuracy == 0
    assert score(logits, torch.tensor([1, 2, 0]), 3).mse == pytest.approx(2 / 3)


def test_half_precision_and_gradients_are_no_obstacle() -> None:
    logits = torch.eye(3, dtype=torch.float16, requires_grad=True)
    assert score(logits, torch.arange(3, dtype=torch.uint8), 3).accuracy == 100


@pytest.mark.parametrize(
    ("logits", "labels", "error", "words"),
    [
        (torch.zeros(3), torch.zeros(3), ConfigError, "shape \\(samples, classes\\)"),
        (torch.zeros(0, 3), torch.zeros(0), DataError, "nothing to evaluate"),
        (torch.zeros(2, 4), torch.zeros(2), ConfigError, "4 outputs, but the data has 3 classes"),
        (torch.zeros(2, 3), torch.zeros(3), ConfigError, "one label for each of 2 samples"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), DataError, "from 0 to 3, but"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), DataError, "from -1 to 0, but"),
        (
            torch.tensor([[0.0, 0, 0], [0, torch.nan, 0]]),
            torch.zeros(2),
            DivergenceError,
            "not finite numbers for 1 of 2 samples: training diverged",
        ),
        (torch.full((2, 3), torch.inf), torch.zeros(2), DivergenceError, "2 of 2 samples"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    logits: Tensor, labels: Tensor, error: type[GoldfishError], words: str
) -> None:
    with pytest.raises(error, match=words):
        score(logits, labels, 3)
