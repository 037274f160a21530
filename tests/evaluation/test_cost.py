"""Costs add up, and a round's cost is what its clients report."""

from __future__ import annotations

import json

from goldfish.evaluation import Cost, round_cost
from goldfish.types import Failure, Round, Update


def _update(client_id: str, steps: float, samples: float) -> Update:
    metrics = {"loss": 0.5, "steps": steps, "samples": samples}
    return Update(client_id, {}, int(samples), metrics)


def test_costs_add_up_and_what_is_kept_is_a_maximum() -> None:
    costs = [Cost(1.5, 2, 200, 10, 70), Cost(0.5, 3, 300, 20, 50)]
    assert sum(costs, Cost()) == Cost(2.0, 5, 500, 30, 70)


def test_nothing_is_neutral() -> None:
    cost = Cost(1.5, 2, 200, 10, 70)
    assert cost + Cost() == Cost() + cost == cost


def test_a_rounds_cost() -> None:
    """Steps 3 + 4 = 7, samples 300 + 400 = 700; the client that failed reports nothing."""
    updates = [_update("a", 3.0, 300.0), _update("b", 4.0, 400.0)]
    failures = [Failure(client_id="c", error="TimeoutError", cause="no answer")]
    finished = Round(index=1, params={}, updates=updates, failures=failures, bytes_sent=99)
    assert round_cost(finished, 1.25, 8) == Cost(1.25, 7, 700, 99, 8)


def test_as_dict_goes_to_json_and_back() -> None:
    cost = Cost(1.5, 2, 200, 10, 70)
    assert Cost(**json.loads(json.dumps(cost.as_dict()))) == cost
