"""Costs add up, and a round's cost is what its clients report."""

from __future__ import annotations

import json
from dataclasses import replace

from goldfish.evaluation import Cost, round_cost
from goldfish.types import Failure, Round, Update


def _update(client_id: str, steps: float, samples: float) -> Update:
    metrics = {"loss": 0.5, "steps": steps, "samples": samples}
    return Update(client_id, {}, int(samples), metrics)


def test_costs_add_up_and_what_is_kept_is_a_maximum() -> None:
    costs = [Cost(1.5, 2, 200, 10, 70, 40, 5, 600), Cost(0.5, 3, 300, 20, 50, 2, 1, 400)]
    assert sum(costs, Cost()) == Cost(2.0, 5, 500, 30, 70, 42, 6, 1000)


def test_nothing_is_neutral() -> None:
    cost = Cost(1.5, 2, 200, 10, 70, 40, 5, 600)
    assert cost + Cost() == Cost() + cost == cost


def test_a_rounds_cost() -> None:
    """Steps 3 + 4 = 7, samples 300 + 400 = 700; the client that failed reports nothing."""
    updates = [_update("a", 3.0, 300.0), _update("b", 4.0, 400.0)]
    failures = [Failure(client_id="c", error="TimeoutError", cause="no answer")]
    finished = Round(index=1, params={}, updates=updates, failures=failures, bytes_sent=99)
    assert round_cost(finished, 1.25, 8) == Cost(1.25, 7, 700, 99, 8)


def test_each_kind_of_sample_has_its_name() -> None:
    """A teacher looked at 30 + 0, gradients were taken one by one of 0 + 12; one says nothing."""
    taught, fisher, plain = (_update(name, 1.0, 10.0) for name in "abc")
    updates = [
        replace(taught, metrics={**taught.metrics, "teacher_samples": 30.0}),
        replace(fisher, metrics={**fisher.metrics, "fisher_samples": 12.0}),
        plain,
    ]
    cost = round_cost(Round(1, {}, updates, (), 0), 0.0, measured_samples=2000)
    assert (cost.samples, cost.teacher_samples, cost.fisher_samples) == (30, 30, 12)
    assert cost.measured_samples == 2000


def test_as_dict_goes_to_json_and_back() -> None:
    cost = Cost(1.5, 2, 200, 10, 70, 40, 5, 600)
    assert Cost(**json.loads(json.dumps(cost.as_dict()))) == cost
