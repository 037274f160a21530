"""What a method's teacher looks at: once a phase, counted, and the very inputs of the student."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import DatasetExamples, TensorExamples
from goldfish.params import digest
from goldfish.results import Cost
from goldfish.training.batches import reads_alike
from goldfish.types import Client, DeletionRequest, Examples

MakeClients = Callable[..., list[Client]]

REQUEST = [DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(6)])]
REMAINING = (24, 24, 18)
TAUGHT = ("goldfish", "goldfish-warm", "incompetent-teacher")
ROUNDS = 3


class Watched(nn.Module):
    """Keeps what its copies see: in training mode, and in evaluation mode."""

    trained: list[Tensor]
    asked: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.trained if self.training else self.asked
        seen.append(inputs.detach().clone())
        logits: Tensor = self.layers(inputs)
        return logits


def watched() -> type[Watched]:
    """Return a model whose copies start to keep what they see anew."""
    Watched.trained, Watched.asked = [], []
    return Watched


def train(clients: list[Client], model: type[nn.Module], **settings: Any) -> goldfish.Trained:
    federation = goldfish.InProcess(clients, model, workers=1)
    return goldfish.train(federation, rounds=1, batch_size=8, learning_rate=0.1, **settings)


def unlearn(trained: goldfish.Trained, method: str, **settings: Any) -> Cost:
    """Unlearn without a test set: in evaluation mode there are teachers alone."""
    own: dict[str, Any] = {"adaptive_weights": False} if method == "goldfish" else {}
    Watched.trained, Watched.asked = [], []
    return goldfish.unlearn(trained, REQUEST, method=method, rounds=ROUNDS, **own, **settings).cost


def seen() -> int:
    return sum(map(len, Watched.asked))


def incompetent(method: str, epochs: int = 1) -> int:
    """Return the samples that the incompetent teacher is asked about, at each step.

    24 remaining samples in batches of 8 are 3 steps, each with 8 * 6 / 24 = 2 of the 6 removed.
    """
    return ROUNDS * epochs * 6 if method == "incompetent-teacher" else 0


@pytest.mark.parametrize("method", TAUGHT)
def test_a_teacher_looks_at_the_remaining_samples_once(
    make_clients: MakeClients, method: str
) -> None:
    cost = unlearn(train(make_clients(), watched()), method, local_epochs=2)
    expected = sum(REMAINING) + incompetent(method, epochs=2)
    assert cost.teacher_samples == seen() == expected


@pytest.mark.parametrize("method", TAUGHT)
def test_what_another_method_asked_before_is_not_used(
    make_clients: MakeClients, method: str
) -> None:
    """Each pays for its own teacher, whatever ran before it, and so does the same one again."""
    trained = train(make_clients(), watched())
    alone = unlearn(train(make_clients(), watched()), method).teacher_samples
    for other in TAUGHT:
        unlearn(trained, other)
        assert unlearn(trained, method).teacher_samples == seen() == alone, other


@pytest.mark.parametrize("method", TAUGHT)
def test_the_next_phase_takes_the_place_of_the_last(make_clients: MakeClients, method: str) -> None:
    """On an engine that keeps what clients cached; so do another deletion and another teacher."""
    trained = train(make_clients(), watched())
    chosen = goldfish.METHODS[method]
    own = chosen.settings.parse({"adaptive_weights": False} if method == "goldfish" else {})
    plan = goldfish.workflow.unlearning_plan(
        trained, REQUEST, chosen, own, training=trained.settings, rounds=2, seed=0
    )
    asked = []
    for phase in (method, f"{method}.2", f"{method}.2"):
        Watched.asked = []
        rounds = list(chosen.unlearn(replace(plan, phase=phase), own))
        asked.append(seen() - 2 * incompetent(method) // ROUNDS)
        counted = sum(u.metrics["teacher_samples"] for r in rounds for u in r.updates)
        assert counted == seen()
    assert asked == [sum(REMAINING), sum(REMAINING), 0]
    Watched.asked = []
    more = [replace(REQUEST[0], sample_ids=[f"c1-{i}" for i in range(10)])]
    list(chosen.unlearn(replace(plan, phase=f"{method}.2", requests=more), own))
    assert {20, *REMAINING} > {len(batch) for batch in Watched.asked if len(batch) > 8} == {20}
    taught = replace(trained, params=plan.fresh)
    other = replace(plan, phase=f"{method}.2", requests=more, trained=taught)
    Watched.asked = []
    list(chosen.unlearn(other, own))
    assert [len(batch) for batch in Watched.asked if len(batch) > 8] == [20, 24, 18]
    federation = trained.federation
    assert isinstance(federation, goldfish.InProcess)
    assert all(len(client.state.cache) == 1 for client in federation._clients.values())


@pytest.mark.parametrize("method", ["goldfish", "goldfish-warm"])
def test_every_shard_has_its_own_logits(make_clients: MakeClients, method: str) -> None:
    """All shards of all clients are trained by the last round, each asked about once."""
    trained = train(make_clients(), watched(), shards=3)
    assert unlearn(trained, method).teacher_samples == seen() == sum(REMAINING)


class Pictures(nn.Module):
    """Looks at images, which can be augmented."""

    asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            Pictures.asked += len(inputs)
        logits: Tensor = self.layers(inputs)
        return logits


@pytest.mark.parametrize("method", TAUGHT)
def test_with_augmentation_every_look_is_counted(method: str) -> None:
    """24 remaining samples in each of 2 epochs of 3 rounds, and their removed companions."""
    images = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    ids = [f"c1-{i}" for i in range(30)]
    clients = [Client("client-1", TensorExamples(images, torch.arange(30) % 3, ids))]
    settings = {"augment": True, "local_epochs": 2}
    trained = train(clients, Pictures, **settings)
    Pictures.asked = 0
    stop = {} if method == "incompetent-teacher" else {"local_stop": False}
    cost = unlearn(trained, method, **stop)
    assert cost.teacher_samples == Pictures.asked == ROUNDS * 2 * 24 + incompetent(method, epochs=2)


@pytest.mark.parametrize("method", ["goldfish", "goldfish-warm"])
def test_with_augmentation_the_local_stop_asks_once(method: str) -> None:
    """About the 24 remaining samples as they are, beside every look at augmented ones."""
    images = torch.randn(30, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    ids = [f"c1-{i}" for i in range(30)]
    clients = [Client("client-1", TensorExamples(images, torch.arange(30) % 3, ids))]
    trained = train(clients, Pictures, augment=True, local_epochs=2)
    Pictures.asked = 0
    cost = unlearn(trained, method, delta=0.0)
    assert cost.teacher_samples == Pictures.asked == 24 + ROUNDS * 2 * 24


def test_methods_without_a_teacher_ask_none(make_clients: MakeClients) -> None:
    trained = train(make_clients(), watched())
    assert unlearn(trained, "retrain").teacher_samples == seen() == 0


# Datasets that draw at random.


class Noise:
    """A dataset whose samples are other ones at every reading."""

    def __init__(self, examples: Examples, draw: Callable[[], Tensor]) -> None:
        self.inputs, labels = examples.batch(torch.arange(len(examples)))
        self.labels = labels.tolist()
        self.draw = draw

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return self.inputs[position] + self.draw(), self.labels[position]


DRAWS: dict[str, Callable[[], Tensor]] = {
    "torch": lambda: torch.randn(6),
    "torch, seldom": lambda: (torch.rand(1) < 0.01) * torch.ones(6),
    "numpy": lambda: torch.from_numpy(np.random.randn(6)).float(),  # noqa: NPY002
    "python": lambda: torch.full((6,), random.random()),
}


def noisy(client: Client, draw: Callable[[], Tensor]) -> Client:
    ids = client.retained.ids
    return replace(client, retained=DatasetExamples(Noise(client.retained, draw), ids))


@pytest.mark.parametrize("draw", DRAWS)
def test_data_that_draws_is_noticed(make_clients: MakeClients, draw: str) -> None:
    (client, *_) = make_clients()
    before = torch.get_rng_state()
    assert not reads_alike(noisy(client, DRAWS[draw]).retained)
    assert torch.equal(before, torch.get_rng_state())


def test_data_that_does_not_draw_is_noticed(make_clients: MakeClients) -> None:
    (client, *_) = make_clients()
    assert reads_alike(noisy(client, lambda: torch.zeros(6)).retained)
    assert reads_alike(goldfish.data.Subset(noisy(client, lambda: torch.ones(6)).retained, [3]))


class NeverRead(TensorExamples):
    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("the data was read")


def test_tensors_are_alike_without_a_look(make_clients: MakeClients) -> None:
    data = make_clients()[0].retained
    assert isinstance(data, TensorExamples)
    never = NeverRead(data.images, data.labels)
    assert reads_alike(never)
    assert reads_alike(goldfish.data.Subset(never, [0, 1]))


@pytest.mark.parametrize("method", TAUGHT)
@pytest.mark.parametrize("draw", ["torch", "numpy"])
def test_a_teacher_sees_what_the_student_sees(
    make_clients: MakeClients, method: str, draw: str
) -> None:
    """With random transforms in the dataset, at every step and in every round."""
    trained = train([noisy(client, DRAWS[draw]) for client in make_clients()], watched())
    cost = unlearn(trained, method)
    asked = {tuple(row) for batch in Watched.asked for row in batch.tolist()}
    for batch in Watched.trained:
        removed = 2 if len(batch) == 10 else 0
        assert all(tuple(row) in asked for row in batch[: len(batch) - removed].tolist())
    assert cost.teacher_samples == seen() == ROUNDS * sum(REMAINING) + incompetent(method)


@pytest.mark.parametrize("method", TAUGHT)
def test_a_dataset_that_does_not_draw_has_the_bits_of_tensors(
    make_clients: MakeClients, small_net: type[nn.Module], method: str
) -> None:
    found = []
    for change in (lambda client: client, lambda client: noisy(client, lambda: torch.zeros(6))):
        trained = train([change(client) for client in make_clients()], small_net)
        own: dict[str, Any] = {"adaptive_weights": False} if method == "goldfish" else {}
        result = goldfish.unlearn(trained, REQUEST, method=method, rounds=2, **own)
        found.append((digest(result.params), result.cost.teacher_samples))
    assert found[0] == found[1]
