"""The arithmetic on parameters: what it copies, what it refuses, what it counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn, tensor

from goldfish import params as P  # noqa: N812
from goldfish.types import Params


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_params_of_holds_weights_and_buffers() -> None:
    params = P.params_of(small_model())
    assert set(params) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert not any(t.requires_grad for t in params.values())


def test_params_of_is_a_copy() -> None:
    """Training the model afterwards, its buffers included, does not reach the copy."""
    model = small_model()
    params = P.params_of(model)
    before = P.digest(params)
    model(torch.randn(4, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert P.digest(params) == before
    assert P.digest(P.params_of(model)) != before


def test_weighted_mean_reads_one_model_at_a_time() -> None:
    """While it asks for the next model it holds no more than the last one, beside its mean.

    Weights 1, 1, 2, 4 on 0, 1, 2, 3: (1 + 4 + 12) / 8 = 17/8.
    """
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def models() -> Iterator[Params]:
        for index in range(4):
            alive.append(sum(reference() is not None for reference in made))
            values = tensor([float(index)])
            made.append(weakref.ref(values))
            yield {"w": values}
            del values

    mean = P.weighted_mean(models(), [1, 1, 2, 4])
    assert alive == [0, 1, 1, 1]
    assert mean["w"].tolist() == pytest.approx([17 / 8])


def test_weighted_mean_passes_over_a_weight_of_0() -> None:
    """2 * 8 / 2 = 8, wherever the model of weight 0 stands."""
    heavy, light = {"w": tensor([8.0])}, {"w": tensor([-3.0])}
    assert P.weighted_mean([heavy, light], [2, 0])["w"].tolist() == pytest.approx([8])
    assert P.weighted_mean([light, heavy], [0, 2])["w"].tolist() == pytest.approx([8])


def test_weighted_mean_passes_over_several_weights_of_0() -> None:
    """The sum of the weights is positive, so there is a mean: that of the last model."""
    models = [{"w": tensor([value])} for value in (1.0, 2.0, 8.0)]
    assert P.weighted_mean(models, [0, 0, 1])["w"].tolist() == pytest.approx([8])


@pytest.mark.parametrize(
    ("count", "weights"), [(0, []), (1, [0.0]), (1, [-1.0]), (1, [math.nan]), (2, [0.0, 0.0])]
)
def test_weighted_mean_of_nothing_is_refused(count: int, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one model and a positive sum of weights"):
        P.weighted_mean([{"w": tensor([1.0])}] * count, weights)


def test_weighted_mean_needs_a_weight_for_each_model() -> None:
    with pytest.raises(ValueError, match="zip"):
        P.weighted_mean([{"w": tensor([1.0])}] * 2, [1.0])


@pytest.mark.parametrize(
    ("values", "cut", "expected"),
    [
        ([1.0, -100.0, 2.0, 10.0, 3.0], 1, 2.0),  # (1 + 2 + 3) / 3
        ([1.0, -100.0, 2.0, 10.0, 3.0], 2, 2.0),  # the median of five
        ([100.0, 4.0, 1.0, 2.0], 1, 3.0),  # the median of four: (2 + 4) / 2
        ([3e38, 3e38, -3e38], 0, 1e38),  # no sum of float32 holds twice 3e38
    ],
)
def test_trimmed_mean(values: list[float], cut: int, expected: float) -> None:
    """The smallest and the largest go; counters are those of the first model."""
    models = [{"w": tensor([[v, 0.0]]), "count": tensor(n)} for n, v in enumerate(values)]
    mean = P.trimmed_mean(models, cut)
    assert mean["w"].tolist() == [[pytest.approx(expected), 0.0]]
    assert mean["w"].dtype == torch.float32
    assert mean["count"].item() == 0
    with pytest.raises(ValueError, match=r"cannot cut \d at each end"):
        P.trimmed_mean(models, len(models) // 2 + 1)


def test_shortened() -> None:
    """From (1, 1) to (4, 5) are 5; at most 1 of it leads to (1.6, 1.8), at most 5 all the way."""
    start = {"a": tensor([1.0]), "b": tensor([[1.0]]), "count": tensor(1)}
    end = {"a": tensor([4.0]), "b": tensor([[5.0]]), "count": tensor(7)}
    near = P.shortened(start, end, 1.0)
    assert [near["a"].item(), near["b"].item()] == pytest.approx([1.6, 1.8])
    assert near["count"].item() == 7
    assert near["b"].shape == (1, 1)
    assert P.digest(P.weighted_mean([near], [1.0])) == P.digest(near)
    assert P.shortened(start, end, 5.0) is end


def test_num_bytes() -> None:
    """Six float32 are 24 bytes, one int64 8, two float64 16: 48."""
    params = {
        "w": torch.zeros(2, 3),
        "count": tensor(3),
        "wide": torch.zeros(2, dtype=torch.float64),
    }
    assert P.num_bytes(params) == 48


def test_distance() -> None:
    """Differences 3 and 4, in different tensors: 5. Counters have no part in it."""
    one = {"a": tensor([1.0]), "b": tensor([[2.0]]), "count": tensor(1)}
    two = {"a": tensor([4.0]), "b": tensor([[-2.0]]), "count": tensor(100)}
    assert P.distance(one, two) == pytest.approx(5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_all_finite(bad: float) -> None:
    good = {"w": torch.ones(3), "count": tensor(1)}
    assert P.all_finite(good)
    assert not P.all_finite({**good, "b": tensor([[0.0, bad]])})


def test_digest_of_every_type_and_of_empty_tensors() -> None:
    """Each type is read by its bytes; an empty tensor still counts by its name and shape."""
    digests = {
        P.digest({"w": torch.ones(2, dtype=kind)})
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
    }
    shapes = {P.digest({"w": torch.ones(shape)}) for shape in ((0,), (0, 2), (2, 0))}
    assert len(digests) == 5
    assert len({*shapes, P.digest({})}) == 4
