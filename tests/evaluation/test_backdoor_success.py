"""Backdoor success: its ends, and what is refused."""

from __future__ import annotations

import pytest
import torch

from goldfish.errors import ConfigError, DataError, DivergenceError
from goldfish.evaluation.scores import backdoor_success


def test_none_and_all() -> None:
    logits = torch.tensor([[0.0, 9.0], [0.0, 9.0]])
    assert backdoor_success(logits, 0) == 0
    assert backdoor_success(logits, 1) == 100


def test_no_triggered_images_are_an_error_and_not_a_success() -> None:
    with pytest.raises(DataError, match="nothing to evaluate"):
        backdoor_success(torch.zeros(0, 10), 0)


@pytest.mark.parametrize("target", [-1, 10])
def test_the_target_must_be_a_class(target: int) -> None:
    with pytest.raises(ConfigError, match=f"target {target} is not a class"):
        backdoor_success(torch.zeros(1, 10), target)


def test_a_diverged_model_has_not_forgotten() -> None:
    with pytest.raises(DivergenceError, match="diverged"):
        backdoor_success(torch.full((1, 10), torch.nan), 0)
