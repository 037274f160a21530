"""Metrics: pure functions on logits and labels, and what a run costs. Percentages: 0 to 100."""

from __future__ import annotations

from goldfish.evaluation.accuracy import Scores, score
from goldfish.evaluation.backdoor import backdoor_success
from goldfish.evaluation.cost import Cost, round_cost
from goldfish.evaluation.similarity import (
    WelchTest,
    confidence,
    jsd,
    jsd_distance,
    l2,
    paired_p,
    welch,
)

__all__ = [
    "Cost",
    "Scores",
    "WelchTest",
    "backdoor_success",
    "confidence",
    "jsd",
    "jsd_distance",
    "l2",
    "paired_p",
    "round_cost",
    "score",
    "welch",
]
