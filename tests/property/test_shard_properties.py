"""What holds for shards, equations (8) to (10), whatever the data and the deletions are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from goldfish import params as P  # noqa: N812
from goldfish.data import Subset, TensorExamples
from goldfish.errors import ConfigError
from goldfish.types import Client, Params
from goldfish.unlearning.optimization import (
    combine,
    partition_shards,
    recover_shards,
    shard_checkpoint,
)

SEEDS = st.integers(0, 2**40)


@st.composite
def sharded_models(
    draw: st.DrawFn, dtype: torch.dtype
) -> tuple[dict[int, Params], dict[int, int], list[int]]:
    """Draw shard models, their sizes (some may be empty), and which were hit (at least one)."""
    count = draw(st.integers(1, 6))
    values = st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3)
    models: dict[int, Params] = {
        i: {
            "w": torch.tensor(draw(values), dtype=dtype),
            "steps": torch.tensor(draw(st.integers(0, 9))),
        }
        for i in range(count)
    }
    sizes = {i: draw(st.integers(0, 50)) for i in range(count)}
    sizes[draw(st.integers(0, count - 1))] = draw(st.integers(1, 50))
    hit = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    return models, sizes, hit


def with_data(models: dict[int, Params], sizes: dict[int, int]) -> dict[int, Params]:
    return {i: model for i, model in models.items() if sizes[i]}


@given(sharded_models(torch.float64))
def test_10_inverts_8(case: tuple[dict[int, Params], dict[int, int], list[int]]) -> None:
    """One hit shard gets its own weights back; the sum of several, their mean for each."""
    models, sizes, hit = case
    lost = [i for i in hit if sizes[i]]
    recovered = recover_shards(combine(models, sizes), models, sizes, hit)
    assert sorted(recovered) == sorted(lost)
    if lost:
        of_hit = sum(sizes[i] * models[i]["w"] for i in lost) / sum(sizes[i] for i in lost)
        for model in recovered.values():
            assert torch.allclose(model["w"], torch.as_tensor(of_hit), atol=1e-11, rtol=0)


@given(sharded_models(torch.float32))
def test_10_inverts_8_in_single_precision(
    case: tuple[dict[int, Params], dict[int, int], list[int]],
) -> None:
    """Rounding of the client's model is magnified by |D| / |D_i|, and by no more."""
    models, sizes, hit = case
    lost = [i for i in hit if sizes[i]]
    assume(len(lost) == 1)
    magnified = sum(sizes.values()) / sizes[lost[0]]
    recovered = recover_shards(combine(models, sizes), models, sizes, hit)[lost[0]]["w"]
    assert recovered.dtype == torch.float32
    assert torch.allclose(recovered, models[lost[0]]["w"], atol=1e-5 * magnified, rtol=0)


@given(
    sharded_models(torch.float32), st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3)
)
def test_8_holds_again_after_10(
    case: tuple[dict[int, Params], dict[int, int], list[int]], retrained: list[float]
) -> None:
    """Whatever the retrained client model is, the shards add up to it again."""
    models, sizes, hit = case
    client = {"w": torch.tensor(retrained), "steps": torch.tensor(77)}
    recovered = recover_shards(client, models, sizes, hit)
    assume(recovered)
    again = combine({**with_data(models, sizes), **recovered}, sizes)
    assert torch.allclose(again["w"], client["w"], atol=1e-4, rtol=0)
    assert all(model["steps"].item() == 77 for model in recovered.values())


@given(sharded_models(torch.float32))
def test_shard_arithmetic_does_not_change_its_arguments(
    case: tuple[dict[int, Params], dict[int, int], list[int]],
) -> None:
    models, sizes, hit = case
    client = combine(models, sizes)
    before = [P.digest(client), *(P.digest(model) for model in models.values())]
    recover_shards(client, models, sizes, hit)
    shard_checkpoint(models, sizes, hit)
    shard_checkpoint(models, sizes, hit, literal=True)
    combine(models, sizes)
    assert [P.digest(client), *(P.digest(model) for model in models.values())] == before


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=8),
    st.integers(1, 10**6),
)
def test_8_of_equal_models_is_that_model_bit_for_bit(
    values: list[float], sizes: list[int], last: int
) -> None:
    """Negative zeros have a test of their own, in test_params_properties.py."""
    model = {"w": torch.tensor(values) + 0.0, "steps": torch.tensor(3)}
    sizes = [*sizes, last]
    combined = combine(dict.fromkeys(range(len(sizes)), model), dict(enumerate(sizes)))
    assert P.digest(combined) == P.digest(model)


@given(sharded_models(torch.float64))
def test_the_checkpoint_is_free_of_hit_shards_and_the_literal_one_is_8_without_them(
    case: tuple[dict[int, Params], dict[int, int], list[int]],
) -> None:
    models, sizes, hit = case
    nan = {"w": torch.full((3,), torch.nan, dtype=torch.float64), "steps": torch.tensor(0)}
    poisoned = {i: nan if i in hit else model for i, model in models.items()}
    others = [i for i in models if i not in hit and sizes[i]]
    normalised = shard_checkpoint(poisoned, sizes, hit)
    literal = shard_checkpoint(poisoned, sizes, hit, literal=True)
    if not others:
        assert normalised is None
        assert literal is None
        return
    assert normalised is not None
    assert literal is not None
    summed = torch.stack([sizes[i] * models[i]["w"] for i in others]).sum(dim=0)
    kept, total = sum(sizes[i] for i in others), sum(sizes.values())
    assert torch.allclose(literal["w"], summed / total, atol=1e-12, rtol=0)
    assert torch.allclose(normalised["w"], summed / kept, atol=1e-12, rtol=0)


# The division of a client's data.


@st.composite
def clients(draw: st.DrawFn) -> tuple[Client, Client]:
    """Draw a client before and after a deletion; its ids are in no order."""
    count = draw(st.integers(1, 40))
    numbers = draw(st.permutations(range(count)))
    data = TensorExamples(
        torch.tensor(numbers, dtype=torch.float32)[:, None],
        torch.tensor(numbers),
        [f"sample-{number}" for number in numbers],
    )
    gone = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
    kept = [position for position in range(count) if position not in gone]
    name = draw(st.sampled_from(["client-1", "client-2"]))
    whole = Client(name, data)
    if not gone:
        return whole, whole
    return whole, Client(name, Subset(data, kept), Subset(data, gone))


def shard_of(client: Client, count: int, seed: int) -> dict[str, int]:
    return {
        id_: shard.index
        for shard in partition_shards(client, count, seed)
        for part in (shard.retained, shard.removed)
        if part is not None
        for id_ in part.ids
    }


@given(clients(), SEEDS, st.data())
def test_shards_cover_the_data_exactly_and_differ_by_at_most_one(
    case: tuple[Client, Client], seed: int, data: st.DataObject
) -> None:
    whole, client = case
    count = data.draw(st.integers(1, len(whole.retained)))
    shards = partition_shards(client, count, seed)
    assert [shard.index for shard in shards] == list(range(count))
    retained = [id_ for shard in shards for id_ in shard.retained.ids]
    removed = [id_ for shard in shards if shard.removed is not None for id_ in shard.removed.ids]
    assert sorted(retained) == sorted(client.retained.ids)
    assert sorted(removed) == sorted(client.removed.ids if client.removed is not None else [])
    sizes = [len(s.retained) + (0 if s.removed is None else len(s.removed)) for s in shards]
    assert max(sizes) - min(sizes) <= 1


@given(clients(), SEEDS, st.data())
def test_a_sample_stays_in_its_shard_whatever_else_is_deleted(
    case: tuple[Client, Client], seed: int, data: st.DataObject
) -> None:
    whole, client = case
    count = data.draw(st.integers(1, len(whole.retained)))
    assert shard_of(client, count, seed) == shard_of(whole, count, seed)


@given(clients(), SEEDS, st.data())
def test_the_order_of_the_data_does_not_matter(
    case: tuple[Client, Client], seed: int, data: st.DataObject
) -> None:
    whole, _ = case
    count = data.draw(st.integers(1, len(whole.retained)))
    backwards = Subset(whole.retained, list(range(len(whole.retained)))[::-1])
    again = Client(whole.id, backwards)
    assert shard_of(again, count, seed) == shard_of(whole, count, seed)


@given(clients(), SEEDS, st.data())
def test_a_shard_is_hit_when_it_loses_a_sample_and_holds_the_right_data(
    case: tuple[Client, Client], seed: int, data: st.DataObject
) -> None:
    """The number in a sample's id is its input and its label."""
    whole, client = case
    count = data.draw(st.integers(1, len(whole.retained)))
    for shard in partition_shards(client, count, seed):
        assert shard.hit == (shard.removed is not None and len(shard.removed) > 0)
        for part in (shard.retained, shard.removed):
            if part is None:
                continue
            inputs, labels = part.batch(torch.arange(len(part)))
            numbers = [int(id_.removeprefix("sample-")) for id_ in part.ids]
            assert labels.tolist() == numbers
            assert inputs[:, 0].tolist() == numbers


@given(clients(), SEEDS, st.integers(1, 5))
def test_more_shards_than_samples_are_refused(
    case: tuple[Client, Client], seed: int, extra: int
) -> None:
    """Samples that were removed still count: the division is that of before the deletion."""
    whole, client = case
    count = len(whole.retained)
    assert len(partition_shards(client, count, seed)) == count
    with pytest.raises(ConfigError) as caught:
        partition_shards(client, count + extra, seed)
    for words in (client.id, f"{count} samples", f"{count + extra} shards", "lower shards"):
        assert words in str(caught.value)


def test_seed_and_client_decide_the_shards() -> None:
    data = TensorExamples(torch.zeros(40, 1), torch.zeros(40, dtype=torch.int64))
    first = shard_of(Client("client-1", data), 4, seed=0)
    assert first != shard_of(Client("client-1", data), 4, seed=1)
    assert first != shard_of(Client("client-2", data), 4, seed=0)
