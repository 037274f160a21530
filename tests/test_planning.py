"""What methods would cost is close to what they cost, and asking changes nothing."""

from __future__ import annotations

from collections.abc import Callable

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
    federation = goldfish.InProcess(make_clients(), small_net, workers=1)
    trained = goldfish.train(federation, rounds=3, batch_size=8, learning_rate=0.1)
    advice = goldfish.plan(trained, [ASKED], methods={method: {}}, test=test_set)
    assert federation.sizes == {"client-1": 30, "client-2": 24, "client-3": 18}
    (reckoned,) = advice.estimates
    real = goldfish.unlearn(trained, [ASKED], method=method, test=test_set)
    if method != "goldfish-sprint":
        in_round = {"retrain": 70, "goldfish-warm": 74}[method]
        assert real.cost.samples == 3 * in_round
    assert reckoned.cost.samples == pytest.approx(real.cost.samples, rel=0.15)
    assert abs(reckoned.rounds - len(real.rounds)) <= 1
    if reckoned.rounds == len(real.rounds):
        assert reckoned.cost.bytes_sent == real.cost.bytes_sent


def estimate(method: str, seconds: float, refused: str | None = None) -> Estimate:
    guarantee = goldfish.METHODS[method].guarantee
    return Estimate(method, guarantee, 1, Cost(seconds=seconds), refused)


def test_the_fast_method_is_advised_where_it_is_worth_it() -> None:
    """At most half of the time of the cheapest exact method; else "just retrain"."""
    retrain = estimate("retrain", 10.0)
    assert advise([estimate("goldfish-sprint", 5.0), retrain])[0] == "goldfish-sprint"
    name, reason = advise([estimate("goldfish-sprint", 6.0), retrain])
    assert (name, reason) == (
        "retrain",
        "it is exact, and goldfish-sprint would still take 60% of its time",
    )
    refused = estimate("goldfish-sprint", 0.0, "client-1 leaves")
    assert advise([refused, retrain, estimate("sisa", 3.0)])[0] == "sisa"
    with pytest.raises(goldfish.ConfigError, match="No method can serve these requests"):
        advise([refused])
