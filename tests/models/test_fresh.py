"""Fresh parameters: new in every weight and every buffer, equal for equal seeds."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from goldfish.errors import ConfigError
from goldfish.models import MODELS, fresh_params, model_factory
from goldfish.types import ModelFactory


def _factory(name: str) -> ModelFactory:
    return model_factory(name, num_classes=10, image_shape=(3, 32, 32))


def _is_constant(tensor: Tensor) -> bool:
    """Whether all entries are equal, as in what is initialised to zeros or ones."""
    return bool((tensor == tensor.flatten()[0]).all())


@pytest.mark.parametrize("name", MODELS)
def test_two_seeds_differ_in_every_random_tensor(name: str) -> None:
    one, two = fresh_params(_factory(name), 1), fresh_params(_factory(name), 2)
    random = [key for key in one if not _is_constant(one[key])]
    assert random
    assert set(random) >= {key for key in one if one[key].ndim > 1}
    for key in random:
        assert (one[key] == two[key]).double().mean() < 0.01, key


@pytest.mark.parametrize("name", MODELS)
def test_one_seed_gives_the_same_bits(name: str) -> None:
    one, two = (fresh_params(_factory(name), 1, "student", 3) for _ in range(2))
    assert one.keys() == two.keys() == _factory(name)().state_dict().keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_purpose_counts() -> None:
    one, two = (fresh_params(_factory("mlp"), 1, purpose) for purpose in ("student", "teacher"))
    assert not torch.equal(one["1.weight"], two["1.weight"])


def test_batch_norm_buffers_are_the_initial_ones() -> None:
    params = fresh_params(_factory("resnet20"), 1)
    buffers = {key: tensor for key, tensor in params.items() if "running" in key or "num_" in key}
    assert len(buffers) == 3 * 19  # mean, variance, counter for each of 19 convolutions
    for key, tensor in buffers.items():
        assert (tensor == (1 if key.endswith("running_var") else 0)).all(), key


def test_the_result_is_detached_and_the_global_generator_untouched() -> None:
    state = torch.get_rng_state()
    params = fresh_params(_factory("mlp"), 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(tensor.requires_grad for tensor in params.values())


def test_a_factory_that_returns_a_cached_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="same object twice"):
        fresh_params(functools.cache(lambda: nn.Linear(2, 2)), 0)


def test_a_factory_whose_models_share_a_buffer_is_refused() -> None:
    norm = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(ConfigError, match=r"share the tensor '1\."):
        fresh_params(lambda: nn.Sequential(nn.Linear(2, 2), norm), 0)


def test_a_model_without_memory_is_not_mistaken_for_a_shared_one() -> None:
    assert fresh_params(nn.Identity, 0) == {}
    assert fresh_params(lambda: nn.PReLU(0), 0)["weight"].shape == (0,)
