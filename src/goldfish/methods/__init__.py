"""The unlearning methods: one file each, all values of one type."""

from __future__ import annotations

from typing import Any

from goldfish.errors import ConfigError, unknown
from goldfish.methods.fed_eraser import FED_ERASER
from goldfish.methods.fed_recovery import FED_RECOVERY
from goldfish.methods.goldfish import GOLDFISH, GOLDFISH_WARM
from goldfish.methods.goldfish_sprint import GOLDFISH_SPRINT
from goldfish.methods.gradient_ascent import GRADIENT_ASCENT
from goldfish.methods.incompetent_teacher import INCOMPETENT_TEACHER
from goldfish.methods.method import (
    Method,
    Plan,
    count_kept_models,
    deletion_kind,
    federated_rounds,
    not_honoured,
    notes_of,
    refuse_few,
    refuse_unhandled,
)
from goldfish.methods.rapid_retrain import RAPID_RETRAIN
from goldfish.methods.retrain import RETRAIN, RETRAIN_TUNED
from goldfish.methods.sisa import SISA
from goldfish.methods.trained import RoundRecord, Trained, load

METHODS: dict[str, Method[Any]] = {
    "goldfish": GOLDFISH,
    "goldfish-sprint": GOLDFISH_SPRINT,
    "goldfish-warm": GOLDFISH_WARM,
    "retrain": RETRAIN,
    "retrain-tuned": RETRAIN_TUNED,
    "rapid-retrain": RAPID_RETRAIN,
    "incompetent-teacher": INCOMPETENT_TEACHER,
    "sisa": SISA,
    "fed-eraser": FED_ERASER,
    "fed-recovery": FED_RECOVERY,
    "gradient-ascent": GRADIENT_ASCENT,
}


def method_named(name: str) -> Method[Any]:
    """Return the method of this name, or say which one was probably meant."""
    if name not in METHODS:
        raise ConfigError(unknown("method", name, METHODS, "'goldfish methods' lists all."))
    return METHODS[name]


__all__ = [
    "METHODS",
    "Method",
    "Plan",
    "RoundRecord",
    "Trained",
    "count_kept_models",
    "deletion_kind",
    "federated_rounds",
    "load",
    "method_named",
    "not_honoured",
    "notes_of",
    "refuse_few",
    "refuse_unhandled",
]
