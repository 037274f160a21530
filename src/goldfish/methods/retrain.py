"""Retraining from scratch (the paper's B1): the yardstick of every other method.

A fresh model, all weights and all buffers, trained on the remaining data alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from goldfish.methods import ordinary
from goldfish.methods.method import Method, Plan
from goldfish.training import Settings
from goldfish.types import Round


class RetrainSettings(Settings):
    """Retraining has no settings of its own: it uses those of the training."""


def unlearn(plan: Plan, _settings: Settings) -> Iterator[Round]:
    """Yield the rounds of ordinary training from the fresh model, without the removed data."""
    return ordinary.train(plan, plan.fresh)


RETRAIN = Method(
    name="retrain",
    summary="Train a fresh model on the remaining data (B1): exact, and the slowest.",
    settings=RetrainSettings,
    steps=ordinary.STEPS,
    unlearn=unlearn,
)
