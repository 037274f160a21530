"""Goldfish with a warm start: the student begins as a copy of the teacher. Ours, not the paper's.

All else is as in :mod:`goldfish.methods.goldfish`, but for the aggregation: the student is as good
as the teacher from the start, so that equation (12) would weigh down those clients that unlearn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from goldfish.methods.goldfish import GOLDFISH
from goldfish.unlearning.basic_model import GoldfishSettings


class GoldfishWarmSettings(GoldfishSettings):
    """The settings of Goldfish, with a student that starts from the teacher's weights."""

    student: Literal["fresh", "teacher"] = "teacher"
    """The student starts from fresh weights, as in the paper, or from the teacher's."""
    adaptive_weights: bool = False
    """Weigh clients by their error on the server's test set, equations (12) and (13)."""


GOLDFISH_WARM = replace(
    GOLDFISH,
    name="goldfish-warm",
    summary="Goldfish with a student that starts from the old model: fast, and leaves traces.",
    settings=GoldfishWarmSettings,
    kind="update adjustment",
    deletions=frozenset({"samples", "class"}),
    source="This project, after Wang, Zhu, Chen, Esteves-Verissimo: Goldfish",
)
