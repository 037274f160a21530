"""Metrics: pure functions on logits and labels, and what a run costs. Percentages: 0 to 100."""

from __future__ import annotations

from goldfish.evaluation.accuracy import Scores, score
from goldfish.evaluation.backdoor import backdoor_success
from goldfish.evaluation.cost import round_cost
from goldfish.evaluation.memory import (
    Matched,
    class_matched,
    sample_hits,
    sample_losses,
)
from goldfish.evaluation.similarity import (
    WelchTest,
    confidence,
    jsd,
    jsd_distance,
    l2,
    paired_p,
    welch,
)
from goldfish.results import Cost

__all__ = [
    "Cost",
    "Matched",
    "Scores",
    "WelchTest",
    "backdoor_success",
    "class_matched",
    "confidence",
    "jsd",
    "jsd_distance",
    "l2",
    "paired_p",
    "round_cost",
    "sample_hits",
    "sample_losses",
    "score",
    "welch",
]
