"""What methods would cost is close to what they cost, and asking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import goldfish
from goldfish.data import TensorExamples
from goldfish.planning import Estimate, advise
from goldfish.results import Cost
from goldfish.types import Client, DeletionRequest, ModelFactory

ASKED = DeletionRequest("client-1", sample_ids=["c1-1", "c1-2"])


@pytest.mark.parametrize("method", ["retrain", "goldfish-warm", "goldfish-sprint"])
def test_the_estimate_is_the_cost(
    make_clients: Callable[..., list[Client]],
    small_net: ModelFactory,
    test_set: TensorExamples,
    method: str,
) -> None:
    """Of 72 samples 2 go: a round of retrain has 70. One of goldfish-warm has 4 more: each of the 4
    batches of the asker's 28 samples comes with at least one that is removed.

    A sprint is rehearsed as it goes, since a single client asks.
    """
    clients = make_clients()
    federation = goldfish.InProcess(clients, small_net, workers=1)
    trained = goldfish.train(federation, rounds=3, batch_size=8, learning_rate=0.1)
    advice = goldfish.plan(trained, [ASKED], methods={method: {}}, test=test_set)
    assert not any(client.state.tombstones for client in clients)
    (reckoned,) = advice.estimates
    real = goldfish.unlearn(trained, [ASKED], method=method, test=test_set)
    if method != "goldfish-sprint":
        in_round = {"retrain": 70, "goldfish-warm": 74}[method]
        assert real.cost.samples == 3 * in_round
    assert reckoned.cost.samples == pytest.approx(real.cost.samples, rel=0.15)
    assert abs(reckoned.rounds - len(real.rounds)) <= 1
    if reckoned.rounds == len(real.rounds):
        assert reckoned.cost.bytes_sent == real.cost.bytes_sent


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (DeletionRequest("client-1", sample_ids=["c1-77"]), "does not hold sample 'c1-77'"),
        (DeletionRequest("client-1", class_label=7), "holds no sample of class 7"),
    ],
)
def test_a_request_that_names_nothing_is_not_planned(
    make_clients: Callable[..., list[Client]],
    small_net: ModelFactory,
    request_: DeletionRequest,
    words: str,
) -> None:
    """fed-recovery asks no client, and most methods pass over a class that is not there."""
    federation = goldfish.InProcess(make_clients(), small_net)
    trained = goldfish.train(federation, rounds=1, keep_for=["fed-recovery"])
    with pytest.raises(goldfish.ConfigError, match=words):
        goldfish.plan(trained, [request_])


MOST_OF_ONE = [
    DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(26)]),
    *(DeletionRequest(f"client-{n}", sample_ids=[f"c{n}-0"]) for n in (2, 3)),
]
ALL_OF_ONE = [
    DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(30)]),
    *MOST_OF_ONE[1:],
]


@pytest.mark.parametrize("remember", [True, False])
@pytest.mark.parametrize("requests", [MOST_OF_ONE, ALL_OF_ONE], ids=["most", "all"])
def test_clients_that_lose_other_shares_are_rehearsed_apart(
    make_clients: Callable[..., list[Client]],
    small_net: ModelFactory,
    test_set: TensorExamples,
    requests: list[DeletionRequest],
    remember: bool,
) -> None:
    """The client that loses most, or all, comes first, and says nothing of the others."""
    federation = goldfish.InProcess(make_clients(), small_net, workers=1, remember=remember)
    trained = goldfish.train(federation, rounds=3, batch_size=8, learning_rate=0.1)
    methods: dict[str, dict[str, Any]] = {"retrain": {}, "goldfish": {}}
    advice = goldfish.plan(trained, requests, methods=methods, test=test_set)
    for reckoned in advice.estimates:
        real = goldfish.unlearn(trained, requests, method=reckoned.method, test=test_set).cost
        assert reckoned.cost.samples == pytest.approx(real.samples, rel=0.1)
        assert reckoned.cost.teacher_samples == pytest.approx(real.teacher_samples, rel=0.1)


def test_askers_of_other_sizes_are_rehearsed_apart(
    make_clients: Callable[..., list[Client]], small_net: ModelFactory, test_set: TensorExamples
) -> None:
    """A sprint has so many steps, however large the client is: 8 for each, and then one each."""
    federation = goldfish.InProcess(make_clients((320, 20)), small_net, workers=1)
    trained = goldfish.train(federation, rounds=20, batch_size=4, learning_rate=0.01)
    asked = [
        DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(20)]),
        DeletionRequest("client-2", sample_ids=["c2-0"]),
    ]
    own = {"sprint_steps": 8, "most_turns": 1, "anneal_rounds": 1, "anneal_share": 1e-6}
    advice = goldfish.plan(trained, asked, methods={"goldfish-sprint": own}, test=test_set)
    assert advice.estimates[0].cost.steps == 2 * 8 + 2


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_first_round_and_later_ones_are_rehearsed_apart(
    make_clients: Callable[..., list[Client]],
    small_net: ModelFactory,
    test_set: TensorExamples,
    rounds: int,
) -> None:
    """With shared shards the first one retrains the shard that was hit, and others all shards."""
    clients = make_clients((24, 24, 24))
    federation = goldfish.InProcess(clients, small_net, workers=1)
    trained = goldfish.train(federation, rounds=3, batch_size=4, shards=3)
    asked = [DeletionRequest("client-1", sample_ids=["c1-1"])]
    given: dict[str, Any] = {"rounds": rounds, "test": test_set}
    (reckoned,) = goldfish.plan(trained, asked, methods={"goldfish": {}}, **given).estimates
    real = goldfish.unlearn(trained, asked, method="goldfish", **given)
    assert reckoned.cost.steps == real.cost.steps


def estimate(method: str, seconds: float, refused: str | None = None, steps: int = 500) -> Estimate:
    guarantee = goldfish.METHODS[method].guarantee
    return Estimate(method, guarantee, 1, Cost(seconds=seconds, steps=steps), refused)


def test_the_fast_method_is_advised_where_it_is_worth_it() -> None:
    """At most half of the time of the cheapest exact method; else "just retrain".

    So it is where the two clients take fewer than 250 steps each in all of the retraining.
    """
    retrain = estimate("retrain", 10.0)
    assert advise([estimate("goldfish-sprint", 5.0), retrain], 2)[0] == "goldfish-sprint"
    short = estimate("retrain", 10.0, steps=499)
    name, reason = advise([estimate("goldfish-sprint", 1.0), short], 2)
    assert (name, "fewer than 250 steps a client" in reason) == ("retrain", True)
    name, reason = advise([estimate("goldfish-sprint", 6.0), retrain], 2)
    assert (name, reason) == (
        "retrain",
        "it is exact, and goldfish-sprint would still take 60% of its time",
    )
    refused = estimate("goldfish-sprint", 0.0, "client-1 leaves")
    assert advise([refused, retrain, estimate("sisa", 3.0)], 2)[0] == "sisa"
    with pytest.raises(goldfish.ConfigError, match="No method can serve these requests"):
        advise([refused], 2)


def test_what_was_not_looked_at_is_not_said_to_be_refused() -> None:
    retrain, fast = estimate("retrain", 10.0), estimate("goldfish-sprint", 2.0)
    assert advise([retrain], 2) == ("retrain", "it is exact; goldfish-sprint was not looked at")
    assert "no exact method was looked at" in advise([fast], 2)[1]
    refused = estimate("retrain", 0.0, refused="no")
    assert "that was looked at can serve" in advise([fast, refused], 2)[1]
    refused = estimate("goldfish-sprint", 0.0, refused="no")
    assert "goldfish-sprint cannot serve these requests" in advise([retrain, refused], 2)[1]
    with pytest.raises(goldfish.ConfigError, match="No method was looked at"):
        advise([], 2)
