"""The library's two verbs, as a user calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods import Plan, ordinary
from goldfish.params import digest, params_of
from goldfish.training import Settings
from goldfish.types import Client, DeletionRequest, Round

MakeClients = Callable[..., list[Client]]
REQUEST = DeletionRequest("client-1", sample_ids=["c1-1", "c1-2"])


class Slow(Dataset[tuple[Tensor, int]]):
    """A dataset that gives one sample at a time, as most do."""

    def __init__(self, examples: TensorExamples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.examples.images[index], int(self.examples.labels[index])


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    federation = goldfish.InProcess(make_clients(), small_net)
    return goldfish.train(federation, rounds=4, learning_rate=0.1, batch_size=8)


def test_training_learns(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    result = goldfish.train(federation, rounds=15, learning_rate=0.1, batch_size=8, test=test_set)
    first, last = result.rounds[0].scores, result.rounds[-1].scores
    assert first is not None
    assert last is not None
    assert last.accuracy > 80 > first.accuracy
    assert result.cost.samples == 15 * 72
    assert digest(params_of(result.model)) == digest(result.params)
    assert not result.model.training


def test_any_torch_dataset_gives_the_bits_of_the_tensors(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    fast = make_clients()
    slow = [Client(c.id, Slow(c.retained)) for c in fast]  # type: ignore[arg-type]
    results = [goldfish.train(goldfish.InProcess(c, small_net), rounds=2) for c in (fast, slow)]
    assert digest(results[0].params) == digest(results[1].params)


def test_settings_of_training_and_method_are_told_apart(
    trained: goldfish.Trained, test_set: TensorExamples
) -> None:
    result = goldfish.unlearn(
        trained, [REQUEST], rounds=1, test=test_set, temperature=5.0, local_epochs=3, delta=0.0
    )
    assert result.cost.steps == 3 * (4 + 3 + 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 5.0}, "Unknown setting 'temprature'. Did you mean 'temperature'?"),
        ({"temperature": 0.5}, "temperature: Input should be greater than 1"),
        ({"learning_rate": -1.0}, "learning_rate: Input should be greater than 0"),
        ({"method": "goldfsh"}, "Unknown method 'goldfsh'. Did you mean 'goldfish'?"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"method": "retrain", "mu_c": 1.0}, "retrain takes: none"),
    ],
)
def test_wrong_settings_are_refused_in_words(
    trained: goldfish.Trained, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(goldfish.ConfigError) as error:
        goldfish.unlearn(trained, [REQUEST], **settings)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_requests_must_name_a_client(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match="Did you mean 'client-1'"):
        goldfish.unlearn(trained, [DeletionRequest("client1")], rounds=1)
    with pytest.raises(goldfish.ConfigError, match="no deletion request"):
        goldfish.unlearn(trained, [], rounds=1)


def test_a_method_of_ones_own(trained: goldfish.Trained) -> None:
    """A researcher's method is a value of the same type; here: fine-tune on what remains."""

    class NoSettings(Settings):
        """None."""

    def fine_tune(plan: Plan, _settings: Settings) -> Iterator[Round]:
        assert plan.original is not None
        return ordinary.train(plan, plan.original)

    own = goldfish.Method("fine-tune", "Go on without it.", NoSettings, ordinary.STEPS, fine_tune)
    result = goldfish.unlearn(trained, [REQUEST], method=own, rounds=2)
    assert result.method == "fine-tune"
    assert len(result.rounds) == 2


def test_divergence_names_client_and_round(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    with pytest.raises(goldfish.DivergenceError, match=r"client-\d in round \d+ of origin"):
        goldfish.train(federation, rounds=20, learning_rate=1e12, batch_size=4)


def test_aggregation_by_server_error(
    make_clients: MakeClients, small_net: type[nn.Module], test_set: TensorExamples
) -> None:
    def result(**settings: object) -> str:
        federation = goldfish.InProcess(make_clients(), small_net)
        trained = goldfish.train(federation, rounds=1, **settings)  # type: ignore[arg-type]
        return digest(trained.params)

    assert result(aggregation="adaptive", test=test_set) != result(test=test_set) == result()
    with pytest.raises(goldfish.ConfigError, match="server's test set"):
        result(aggregation="adaptive")


def test_augmentation_changes_training(small_net: type[nn.Module]) -> None:
    """On images, crops and flips give other weights, the same for the same seed."""
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorExamples(images, torch.arange(20) % 2)

    def result(*, augment: bool) -> str:
        federation = goldfish.InProcess(
            [Client("a", data)], lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        )
        return digest(goldfish.train(federation, rounds=1, augment=augment).params)

    assert result(augment=True) == result(augment=True) != result(augment=False)
