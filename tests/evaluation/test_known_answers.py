"""Audits of small federations whose answers are known, by ``benchmarks/known_answers.py``.

On digits: 24 of the 80 samples, which are learned by heart, are removed. Models are trained once.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from goldfish.experiments.scenario import Machine

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "known_answers.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def models(script: dict[str, Any]) -> Any:
    made = script["make"]("digits", Machine(workers=1, threads=1))
    assert (len(made.removed), len(made.oracles)) == (24, 12)
    return made


def test_an_untouched_model_remembers(models: Any) -> None:
    for untouched in (models.origins, models.origins[:1]):
        assert models.verdict(untouched).word == "remembers"


def test_a_retrained_model_is_indistinguishable_in_5_of_5_seeds(models: Any) -> None:
    assert [models.verdict([one]).word for one in models.retrained] == ["indistinguishable"] * 5
    assert models.verdict(models.retrained).word == "indistinguishable"


def test_random_answers_on_removed_samples_are_over_forgetting(models: Any) -> None:
    assert models.verdict([models.at_random]).word == "over-forgets"


def test_a_half_trained_model_is_damaged(models: Any) -> None:
    assert models.verdict([models.half_trained]).word == "damaged"


def test_one_oracle_is_not_enough(models: Any) -> None:
    assert models.verdict(models.origins, models.oracles[:1]).word == "not enough evidence"


def test_another_step_size_is_not_a_memory(models: Any) -> None:
    assert models.verdict([models.slower]).word != "remembers"


def test_the_attack_finds_what_is_learned_by_heart_and_nothing_else(models: Any) -> None:
    """At 1 % false positives: at least ten times as many true ones, and about as many."""
    assert models.found(models.origins) >= 0.1
    assert models.found(models.retrained) <= 0.03


def test_a_class_that_is_gone(script: dict[str, Any]) -> None:
    """Untouched models know its unseen samples as well as the removed ones."""
    made = script["make"]("digits", Machine(workers=1, threads=1), 3)
    assert set(made.removed.labels.tolist()) == {3} == set(made.gone)
    for untouched in (made.origins, made.origins[:1]):
        assert made.verdict(untouched).word == "remembers"
    assert made.verdict(made.retrained).word == "indistinguishable"
    assert made.verdict([made.half_trained]).word == "damaged"


def test_the_table_has_a_row_for_each_answer(script: dict[str, Any], models: Any) -> None:
    rows = [line.strip("| ").split(" | ") for line in script["table"](models)]
    words = {row[0]: row[-1] for row in rows if row[0].startswith(("untouched", "half"))}
    assert words == {
        "untouched, four models": "*remembers*",
        "untouched, one model": "*remembers*",
        "half-trained": "*damaged*",
        "untouched, compared with one oracle": "*not enough evidence*",
    }
