"""The audit of a model version: beside models that never had the samples that it forgot.

A project trains on removed samples never again, so there is one model on each side of the removal:
the version, and the one before it. All others are oracles (:mod:`goldfish.evaluation.audit`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from goldfish.data import TensorExamples
from goldfish.evaluation.audit import audit_verdict
from goldfish.experiments.audit_models import ORACLE, kept_path, measured
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.scenario import Scenario
from goldfish.results import Progress
from goldfish.types import Params

ORACLES = 16
"""How many oracles an audit has unless told: with one model beside them, 8 are often too few."""


def kept_margins(before: Path, version: int, name: str, number: int) -> Path:
    """Return where an audit of a version keeps the margins of a model on removed samples.

    They lie in the folder of the version ``before``, which knew these samples: a purge deletes it.
    """
    return kept_path(before, f"v{version}-{name}", number)


def audit_version(
    version: int,
    scenario: Scenario,
    removed: TensorExamples,
    device: str,
    before: Path,
    models: Sequence[Params],
    make: Callable[[int], Params],
    amount: int,
) -> Generator[Progress, None, dict[str, Any]]:
    """Compare a version with ``amount`` oracles, and return what the ledger is to tell of it.

    ``models`` are the one that knew the removed samples, which lies in the folder ``before``, and
    the one that forgot them; ``make`` makes an oracle.
    """
    compared = (Evaluator(scenario, device), removed, scenario.test)
    oracles = []
    for number in range(1, amount + 1):
        yield Progress(phase=ORACLE, round=number - 1, rounds=amount)
        path = kept_margins(before, version, ORACLE, number)
        oracles.append(measured(path, partial(make, number), *compared))
        yield Progress(phase=ORACLE, round=number, rounds=amount)
    origin, own = (
        measured(kept_margins(before, version, "model", place), partial(dict, params), *compared)
        for place, params in enumerate(models)
    )
    labels = (removed.labels.cpu(), scenario.test.labels.cpu())
    found = audit_verdict([own], oracles, *labels, [origin])
    return {
        **found.model_dump(exclude={"models", "oracles"}),
        "removed": len(removed),
        "unseen": len(scenario.test),
        "oracles": amount,
    }
