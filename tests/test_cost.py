"""Costs add up, and a round's cost is what its clients report."""

from __future__ import annotations

from dataclasses import replace

from goldfish.results import Cost
from goldfish.types import Failure, Round, Update
from goldfish.workflow import round_cost


def _update(client_id: str, steps: float, samples: float) -> Update:
    metrics = {"loss": 0.5, "steps": steps, "samples": samples}
    return Update(client_id, {}, int(samples), metrics)


def test_costs_add_up_and_what_is_kept_is_a_maximum() -> None:
    one = Cost(seconds=1.5, steps=2, samples=200, bytes_sent=10, bytes_kept=70, teacher_samples=40)
    two = Cost(seconds=0.5, steps=3, bytes_kept=50, fisher_samples=1, measured_samples=400)
    both = Cost(seconds=2.0, steps=5, samples=200, bytes_sent=10, bytes_kept=70, teacher_samples=40)
    both = both.model_copy(update={"fisher_samples": 1, "measured_samples": 400})
    assert sum([one, two], Cost()) == both
    assert one + Cost() == Cost() + one == one


def test_a_rounds_cost() -> None:
    """Steps 3 + 4 = 7, samples 300 + 400 = 700; the client that failed reports nothing."""
    updates = [_update("a", 3.0, 300.0), _update("b", 4.0, 400.0)]
    failures = [Failure(client_id="c", error="TimeoutError", cause="no answer")]
    finished = Round(index=1, params={}, updates=updates, failures=failures, bytes_sent=99)
    assert round_cost(finished, 1.25, 8) == Cost(
        seconds=1.25, steps=7, samples=700, bytes_sent=99, bytes_kept=8
    )


def test_each_kind_of_sample_has_its_name() -> None:
    """A teacher looked at 30 samples, gradients were squared of 12, and one client measured 5.

    The server measured 2,000: 2,005 with the client's.
    """
    taught, fisher, measured = (_update(name, 1.0, 10.0) for name in "abc")
    updates = [
        replace(taught, metrics={**taught.metrics, "teacher_samples": 30.0}),
        replace(fisher, metrics={**fisher.metrics, "fisher_samples": 12.0}),
        replace(measured, metrics={**measured.metrics, "measured_samples": 5.0}),
    ]
    cost = round_cost(Round(1, {}, updates, (), 0), 0.0, by_server=2000)
    assert (cost.samples, cost.teacher_samples, cost.fisher_samples) == (30, 30, 12)
    assert cost.measured_samples == 2005
