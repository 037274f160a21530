"""Equations (7) to (10) and the shard planner, each expected value derived by hand."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from goldfish.errors import ConfigError
from goldfish.types import Params
from goldfish.unlearning.optimization import (
    ShardOption,
    combine,
    excess_empirical_risk,
    plan_shards,
    recover_shards,
    shard_checkpoint,
)

EXACT = 1e-6


def values(params: Params | None) -> list[float]:
    assert params is not None
    flat: list[float] = params["w"].tolist()
    return flat


def approx(*expected: float) -> object:
    return pytest.approx(list(expected), abs=EXACT)


MODELS: dict[int, Params] = {
    0: {"w": tensor([6.0, 0.0])},
    1: {"w": tensor([0.0, 3.0])},
    2: {"w": tensor([2.0, 4.0])},
}
SIZES = {0: 1, 1: 2, 2: 3}
"""After the deletion; |D| = 6."""
EMPTIED = {0: 0, 1: 2, 2: 3}
"""The deletion took all of shard 0; |D| = 5."""


# Equation (7).


def test_excess_empirical_risk() -> None:
    """Mean of (1, 1/2, 3/10) = 18/10 / 3 = 6/10; 6/10 - 1/2 = 1/10."""
    assert excess_empirical_risk([1.0, 0.5, 0.3], 0.5) == pytest.approx(0.1, abs=EXACT)


def test_excess_empirical_risk_is_a_distance() -> None:
    """Mean of (2/10, 4/10) = 3/10; |3/10 - 1| = 7/10, though the student is the better one."""
    assert excess_empirical_risk([0.2, 0.4], 1.0) == pytest.approx(0.7, abs=EXACT)


# Equation (8).


def test_client_model() -> None:
    """1/6 (6, 0) + 2/6 (0, 3) + 3/6 (2, 4) = (1, 0) + (0, 1) + (1, 2) = (2, 3)."""
    assert values(combine(MODELS, SIZES)) == approx(2, 3)


def test_client_model_without_the_emptied_shard() -> None:
    """2/5 (0, 3) + 3/5 (2, 4) = (6/5, 6/5 + 12/5) = (6/5, 18/5), whether shard 0 has a model."""
    assert values(combine(MODELS, EMPTIED)) == approx(6 / 5, 18 / 5)
    without = {i: MODELS[i] for i in (1, 2)}
    assert values(combine(without, EMPTIED)) == approx(6 / 5, 18 / 5)


# Equation (9).


def test_checkpoint() -> None:
    """Shard 0 hit. As printed: 2/6 (0, 3) + 3/6 (2, 4) = (0, 1) + (1, 2) = (1, 3).

    The coefficients add up to 5/6; divided by that: 6/5 (1, 3) = (6/5, 18/5).
    """
    assert values(shard_checkpoint(MODELS, SIZES, [0], literal=True)) == approx(1, 3)
    assert values(shard_checkpoint(MODELS, SIZES, [0])) == approx(6 / 5, 18 / 5)


def test_checkpoint_of_several_hit_shards() -> None:
    """Shards 0 and 1 hit. As printed: 3/6 (2, 4) = (1, 2); divided by 1/2: (2, 4)."""
    assert values(shard_checkpoint(MODELS, SIZES, [1, 0], literal=True)) == approx(1, 2)
    assert values(shard_checkpoint(MODELS, SIZES, {0, 1})) == approx(2, 4)


def test_checkpoint_after_a_shard_was_emptied() -> None:
    """Sizes after the deletion: 2/5 (0, 3) + 3/5 (2, 4) = (6/5, 18/5), and 2/5 + 3/5 = 1.

    So the printed coefficients and the normalised ones agree.
    """
    assert values(shard_checkpoint(MODELS, EMPTIED, [0], literal=True)) == approx(6 / 5, 18 / 5)
    assert values(shard_checkpoint(MODELS, EMPTIED, [0])) == approx(6 / 5, 18 / 5)


def test_checkpoint_of_an_emptied_and_a_hit_shard() -> None:
    """Shard 0 emptied, shard 1 hit: 3/5 (2, 4) = (6/5, 12/5); divided by 3/5: (2, 4)."""
    assert values(shard_checkpoint(MODELS, EMPTIED, [0, 1], literal=True)) == approx(6 / 5, 12 / 5)
    assert values(shard_checkpoint(MODELS, EMPTIED, [0, 1])) == approx(2, 4)


@pytest.mark.parametrize("literal", [False, True])
def test_no_checkpoint_when_every_shard_with_data_was_hit(literal: bool) -> None:
    assert shard_checkpoint(MODELS, SIZES, [0, 1, 2], literal=literal) is None
    assert shard_checkpoint(MODELS, EMPTIED, [1, 2], literal=literal) is None


# Equation (10).


def test_weights_of_the_hit_shard() -> None:
    """6/1 ((3/2, 7/2) - (1, 3)) = 6 (1/2, 1/2) = (3, 3), with (1, 3) from the test of (9)."""
    client = {"w": tensor([1.5, 3.5])}
    recovered = recover_shards(client, MODELS, SIZES, [0])
    assert list(recovered) == [0]
    assert values(recovered[0]) == approx(3, 3)


def test_weights_of_an_unretrained_shard_come_back() -> None:
    """With the client model (2, 3) of the test of (8): 6 ((2, 3) - (1, 3)) = (6, 0), the old."""
    assert values(recover_shards({"w": tensor([2.0, 3.0])}, MODELS, SIZES, [0])[0]) == approx(6, 0)


def test_weights_of_several_hit_shards() -> None:
    """Only their sum is known: 6/3 ((3/2, 7/2) - 3/6 (2, 4)) = 2 (1/2, 3/2) = (1, 3) for both."""
    recovered = recover_shards({"w": tensor([1.5, 3.5])}, MODELS, SIZES, [0, 1])
    assert sorted(recovered) == [0, 1]
    assert values(recovered[0]) == approx(1, 3)
    assert values(recovered[1]) == approx(1, 3)


def test_the_old_models_of_hit_shards_are_not_needed() -> None:
    """Of (10) only the other shards are an argument: the numbers of the test above."""
    recovered = recover_shards({"w": tensor([1.5, 3.5])}, {2: MODELS[2]}, SIZES, [0, 1])
    assert values(recovered[1]) == approx(1, 3)


def test_weights_after_a_shard_was_emptied() -> None:
    """Shards 0 (emptied) and 1 hit: 5/2 ((3/2, 7/2) - 3/5 (2, 4)) = 5/2 (3/10, 11/10)

    = (3/4, 11/4); shard 0 has no weights.
    """
    recovered = recover_shards({"w": tensor([1.5, 3.5])}, MODELS, EMPTIED, [0, 1])
    assert list(recovered) == [1]
    assert values(recovered[1]) == approx(3 / 4, 11 / 4)


def test_no_weights_when_only_emptied_shards_were_hit() -> None:
    assert recover_shards({"w": tensor([1.5, 3.5])}, MODELS, EMPTIED, [0]) == {}


def test_all_shards_hit_get_the_client_model() -> None:
    """Nothing is subtracted and 6/6 = 1."""
    recovered = recover_shards({"w": tensor([1.5, 3.5])}, {}, SIZES, [0, 1, 2])
    assert [values(recovered[i]) for i in range(3)] == [[1.5, 3.5]] * 3


def test_shards_without_a_model_count_as_hit() -> None:
    """Shard 0 alone was hit, and shard 1 has data and no model: with all hit, 6/6 = 1."""
    some: list[dict[int, Params]] = [{}, {2: MODELS[2]}]
    for models in some:
        recovered = recover_shards({"w": tensor([1.5, 3.5])}, models, SIZES, [0])
        assert [values(recovered[i]) for i in range(3)] == [[1.5, 3.5]] * 3


def test_shard_arithmetic_leaves_integer_counters_alone() -> None:
    """The counter 7 of the client's model, the counter 5 of the first shard: never scaled."""
    client = {"w": tensor([2.0, 3.0]), "count": tensor(7)}
    models = {i: {**m, "count": tensor(5 + i)} for i, m in MODELS.items()}
    recovered = recover_shards(client, models, SIZES, [0])[0]["count"]
    start = shard_checkpoint(models, SIZES, [0], literal=True)
    assert start is not None
    for counter, expected in [
        (recovered, 7),
        (combine(models, SIZES)["count"], 5),
        (start["count"], 6),
    ]:
        assert counter.dtype == torch.int64
        assert counter.item() == expected


# The choice of the number of shards: rr * c1 - al * c2.

OPTIONS = [
    ShardOption(shards=1, rounds=10, accuracy=95),
    ShardOption(shards=3, rounds=6, accuracy=94),
    ShardOption(shards=6, rounds=4, accuracy=92),
]


@pytest.mark.parametrize(
    ("c1", "c2", "shards"),
    [
        (1, 0.5, 6),
        (1, 2, 3),
        (1, 10, 1),
        (0, 1, 1),
        (1, 0, 6),
    ],
)
def test_shard_planner(c1: float, c2: float, shards: int) -> None:
    """Rounds saved 0, 4, 6; points lost 0, 1, 3, for 1, 3 and 6 shards.

    c1 = 1: c2 = 1/2 gives 0, 7/2, 9/2; c2 = 2 gives 0, 2, 0; c2 = 10 gives 0, -6, -24; c2 = 0
    gives 0, 4, 6. With c1 = 0, c2 = 1: 0, -1, -3.
    """
    assert plan_shards(OPTIONS, c1, c2).shards == shards


def test_of_equal_options_fewer_shards_win() -> None:
    """c1 = c2 = 1: gains 0, 4 - 1 = 3 and 6 - 3 = 3. In whatever order they are given."""
    assert plan_shards(OPTIONS, 1, 1).shards == 3
    assert plan_shards(OPTIONS[::-1], 1, 1).shards == 3
    assert plan_shards(OPTIONS[::-1], 0, 0).shards == 1


def test_shard_planner_needs_one_shard_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="measure shards = 1"):
        plan_shards(OPTIONS[1:], 1, 1)
