"""What must hold for every method in the registry, found by the tests themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.params import digest
from goldfish.types import Client, DeletionRequest

MakeClients = Callable[..., list[Client]]
NAMES = sorted(goldfish.METHODS)
REQUESTS = {
    "samples": [DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])],
    "class": [DeletionRequest(f"client-{n}", class_label=2) for n in (1, 2, 3)],
    "client": [DeletionRequest("client-3")],
    "two clients": [
        DeletionRequest("client-1", sample_ids=["c1-0"]),
        DeletionRequest("client-2", sample_ids=["c2-5", "c2-6"]),
    ],
}


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    return goldfish.train(federation, rounds=3, learning_rate=0.1, batch_size=8)


def test_there_are_methods() -> None:
    assert NAMES
    assert all(goldfish.METHODS[name].name == name for name in NAMES)


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_deletion(
    trained: goldfish.Trained, test_set: TensorExamples, name: str, kind: str
) -> None:
    result = goldfish.unlearn(trained, REQUESTS[kind], method=name, rounds=2, test=test_set)
    assert [record.index for record in result.rounds] == [1, 2]
    assert all(not record.failures for record in result.rounds)
    assert result.rounds[-1].scores is not None
    asked = 2 if kind == "client" else 3
    size = sum(t.numel() * t.element_size() for t in result.params.values())
    assert result.rounds[-1].cost.bytes_sent == 2 * asked * size
    assert result.cost.steps > 0
    assert digest(result.params) != digest(trained.params)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bits_other_seed_others(
    trained: goldfish.Trained, test_set: TensorExamples, name: str
) -> None:
    def once(seed: int) -> str:
        request = REQUESTS["samples"]
        result = goldfish.unlearn(trained, request, method=name, rounds=2, test=test_set, seed=seed)
        return digest(result.params)

    assert once(1) == once(1) != once(2)


@pytest.mark.parametrize("name", NAMES)
def test_a_deletion_that_leaves_nothing_is_an_error(
    trained: goldfish.Trained, test_set: TensorExamples, name: str
) -> None:
    everything = [
        DeletionRequest(f"client-{n}", class_label=label) for n in (1, 2, 3) for label in range(3)
    ]
    with pytest.raises(goldfish.ConfigError, match="No client has any data left"):
        goldfish.unlearn(trained, everything, method=name, rounds=1, test=test_set)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_sample_id_is_an_error_not_a_skipped_client(
    trained: goldfish.Trained, test_set: TensorExamples, name: str
) -> None:
    """A request that cannot be honoured must not be passed over as one failed client."""
    request = DeletionRequest("client-1", sample_ids=["c1-0", "nobody"])
    with pytest.raises(goldfish.ConfigError, match="does not hold sample 'nobody'"):
        goldfish.unlearn(trained, [request], method=name, rounds=1, test=test_set)
