"""What holds for the arithmetic on parameters, whatever the models are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from goldfish import params as P  # noqa: N812
from goldfish.types import Params

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-1e3, 1e3, width=32)
SHAPES = {"conv.weight": (2, 1, 2), "norm.running_var": (2,), "scale": ()}


@st.composite
def models(draw: st.DrawFn, values: st.SearchStrategy[float] = moderate) -> Params:
    """Draw a model of three float tensors and the counter of a BatchNorm."""
    made: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        flat = draw(st.lists(values, min_size=size, max_size=size))
        made[name] = torch.tensor(flat).reshape(shape)
    made["norm.num_batches_tracked"] = torch.tensor(draw(st.integers(0, 2**53)))
    return made


def batch_norm_model(seed: int, batches: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        for _ in range(batches):
            model(torch.randn(5, 3))
    return model


# The weighted mean.


@given(models(finite), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_the_mean_of_equal_models_is_that_model_bit_for_bit(
    model: Params, weights: list[float]
) -> None:
    """Zeros are made positive here; the test below holds the negative ones."""
    model = {name: t + 0 for name, t in model.items()}
    mean = P.weighted_mean([model] * len(weights), weights)
    assert P.digest(mean) == P.digest(model)


def test_the_mean_of_equal_models_keeps_negative_zeros() -> None:
    model = {"w": torch.tensor([-0.0, 0.0, 1.0])}
    assert P.digest(P.weighted_mean([model, model], [1, 2])) == P.digest(model)


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5), st.integers(0, 5))
def test_the_mean_of_equal_batch_norm_models_is_that_model(
    weights: list[float], batches: int
) -> None:
    """All buffers included; the counter of batches is a whole number and stays one."""
    model = P.params_of(batch_norm_model(0, batches))
    mean = P.weighted_mean([dict(model) for _ in weights], weights)
    assert P.digest(mean) == P.digest(model)
    assert mean["1.num_batches_tracked"].dtype == torch.int64
    assert mean["1.num_batches_tracked"].item() == batches


def test_running_statistics_are_averaged_and_counters_are_not() -> None:
    """The counter is that of the first model, whatever the weights are."""
    one, two = (P.params_of(batch_norm_model(seed, seed)) for seed in (3, 8))
    mean = P.weighted_mean([one, two], [1, 3])
    for name in ("1.running_mean", "1.running_var", "0.weight"):
        assert torch.allclose(mean[name], one[name] / 4 + two[name] * 3 / 4, atol=1e-6)
    assert mean["1.num_batches_tracked"].item() == 3


def slow_mean(all_params: list[Params], weights: list[float]) -> Params:
    """Return the mean as the definition has it, in double precision."""
    return {
        name: sum(
            (w * p[name].double() for p, w in zip(all_params, weights, strict=True)),
            start=torch.zeros((), dtype=torch.float64),
        )
        / sum(weights)
        for name in SHAPES
    }


@given(
    st.lists(st.tuples(models(), st.floats(0, 1e3)), min_size=1, max_size=12),
    models(),
    st.floats(1e-3, 1e3),
)
def test_the_mean_is_the_slow_one(
    weighted: list[tuple[Params, float]], first: Params, weight: float
) -> None:
    """Values to 1000 in single precision: 12 steps of rounding stay below 0.002."""
    all_params = [first, *(params for params, _ in weighted)]
    weights = [weight, *(w for _, w in weighted)]
    fast, slow = P.weighted_mean(all_params, weights), slow_mean(all_params, weights)
    for name in SHAPES:
        assert fast[name].dtype == torch.float32
        assert fast[name].shape == first[name].shape
        assert torch.allclose(fast[name].double(), slow[name], rtol=0, atol=2e-3)
    counter = "norm.num_batches_tracked"
    assert fast[counter].item() == first[counter].item()


@given(st.lists(models(), min_size=1, max_size=4))
def test_the_mean_changes_no_model_and_shares_no_memory(all_params: list[Params]) -> None:
    before = [P.digest(params) for params in all_params]
    mean = P.weighted_mean(iter(all_params), [1.0] * len(all_params))
    for t in mean.values():
        t.zero_()
    assert [P.digest(params) for params in all_params] == before


# The trimmed mean and the bound on an update.


@given(st.lists(models(finite), min_size=1, max_size=7), st.data())
def test_a_trimmed_mean_lies_between_and_knows_no_order(
    all_params: list[Params], data: st.DataObject
) -> None:
    """Between the smallest and the largest that are not cut off, value by value."""
    count = len(all_params)
    cut = data.draw(st.integers(0, (count - 1) // 2))
    mean = P.trimmed_mean(all_params, cut)
    shuffled = P.trimmed_mean(data.draw(st.permutations(all_params)), cut)
    for name in SHAPES:
        ordered = torch.stack([params[name] for params in all_params]).sort(dim=0).values
        assert bool((ordered[cut] <= mean[name]).all())
        assert bool((mean[name] <= ordered[count - 1 - cut]).all())
        assert torch.equal(mean[name], shuffled[name])


@given(st.lists(models(), min_size=4, max_size=4), models(finite), st.integers(0, 4))
def test_one_hostile_client_of_five_moves_no_value_out_of_the_honest_range(
    honest: list[Params], hostile: Params, place: int
) -> None:
    """Whatever it sends and wherever it stands: for the median, and for one cut at each end."""
    everyone = [*honest[:place], hostile, *honest[place:]]
    for mean in (P.trimmed_mean(everyone, 2), P.trimmed_mean(everyone, 1)):
        for name in SHAPES:
            values = torch.stack([params[name] for params in honest])
            assert bool((values.amin(0) <= mean[name]).all())
            assert bool((mean[name] <= values.amax(0)).all())


@given(models(), models(finite), st.floats(1e-3, 1e6))
def test_a_shortened_update_is_no_longer_than_the_bound(
    start: Params, params: Params, most: float
) -> None:
    """Up to the rounding of single precision, by the largest of the values on the way."""
    near = P.shortened(start, params, most)
    values = sum(len(near[name].flatten()) for name in SHAPES)
    largest = 1e3 + most
    assert P.distance(start, near) <= most + values * 1.2e-7 * largest


@given(models(), models())
def test_sum_difference_and_multiple(one: Params, two: Params) -> None:
    """Float by float; whole numbers come from the first operand."""
    counter = "norm.num_batches_tracked"
    for name in SHAPES:
        assert torch.equal(P.add(one, two)[name], one[name] + two[name])
        assert torch.equal(P.subtract(one, two)[name], one[name] - two[name])
        assert torch.equal(P.scale(one, -2.5)[name], one[name] * -2.5)
    for result in (P.add(one, two), P.subtract(one, two), P.scale(one, -2.5)):
        assert result[counter].item() == one[counter].item()


@given(models(), models())
def test_distance(one: Params, two: Params) -> None:
    flat = torch.cat([(one[n].double() - two[n].double()).flatten() for n in SHAPES])
    assert P.distance(one, two) == pytest.approx(flat.norm().item(), rel=1e-9)
    assert P.distance(one, one) == 0


# The digest.


@given(models(finite), st.data())
def test_the_digest_changes_with_any_bit(model: Params, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(model)))
    bits = model[name].clone().reshape(-1).view(torch.uint8)
    bit = data.draw(st.integers(0, 8 * len(bits) - 1))
    bits[bit // 8] ^= 1 << bit % 8
    flipped = bits.view(model[name].dtype).reshape(model[name].shape)
    assert P.digest({**model, name: flipped}) != P.digest(model)


@given(models(finite), st.data())
def test_the_digest_changes_with_any_name(model: Params, data: st.DataObject) -> None:
    old = data.draw(st.sampled_from(sorted(model)))
    new = data.draw(st.text("abc.", min_size=1, max_size=5))
    renamed = {new if name == old else name: t for name, t in model.items()}
    assert P.digest(renamed) != P.digest(model)


@given(models(finite), st.data())
def test_the_digest_changes_with_shape_type_and_members(model: Params, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(model)))
    shaped = model[name].unsqueeze(0)
    same_bytes = model[name].view(
        torch.int32 if model[name].dtype == torch.float32 else torch.float64
    )
    fewer = {n: t for n, t in model.items() if n != name}
    digests = {P.digest(m) for m in (model, {**model, name: shaped}, {**model, name: same_bytes})}
    assert len({*digests, P.digest(fewer)}) == 4


@given(models(finite), models(finite))
def test_equal_digests_mean_equal_values(one: Params, two: Params) -> None:
    assume(any(not torch.equal(one[name], two[name]) for name in one))
    assert P.digest(one) != P.digest(two)


@given(models(finite))
def test_the_digest_does_not_depend_on_order_or_memory_layout(model: Params) -> None:
    backwards = {name: model[name] for name in sorted(model, reverse=True)}
    strided = {
        name: torch.stack([t, t], dim=-1)[..., 0] if t.dim() else t for name, t in model.items()
    }
    assert not strided["norm.running_var"].is_contiguous()
    assert P.digest(backwards) == P.digest(model) == P.digest(strided)
