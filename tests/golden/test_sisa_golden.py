"""SISA's aggregation and its work, each expected value derived by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn, tensor

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods.sisa import SISA, SisaSettings, epochs_of, place_of, separate
from goldfish.settings import TrainingSettings
from goldfish.training.workspace import LocalWorkspace, join
from goldfish.types import Client, DeletionRequest, Params

SLICES = 3
EPOCHS = 2
SLICE_SIZE = 4


def linear(first: float) -> Params:
    """Return a model that gives class 0 this probability on the input (1)."""
    return {"weight": tensor([[math.log(first)], [math.log(1 - first)]]), "bias": torch.zeros(2)}


def test_the_mean_probability_decides() -> None:
    """Members say (9/10, 1/10), (4/10, 6/10), (4/10, 6/10): the mean is (17/30, 13/30).

    So class 0 wins, where two of three votes are for class 1. Without the first member, whose
    shard was emptied, the mean is (4/10, 6/10).
    """
    workspace = LocalWorkspace(lambda: nn.Linear(1, 2))
    models = [linear(0.9), linear(0.4), linear(0.4)]
    for kept, expected in [(models, [17 / 30, 13 / 30]), (models[1:], [0.4, 0.6])]:
        logits = workspace.load("ensemble", join(kept)).module(torch.ones(1, 1))
        assert logits.softmax(dim=-1)[0].tolist() == pytest.approx(expected, abs=1e-6)
        assert logits.exp()[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_members_come_apart_in_order() -> None:
    """Eleven members: the place after "members." is a number, 10 comes after 9."""
    models = [linear((1 + n) / 20) for n in range(11)]
    apart = separate(join(models))
    assert len(apart) == 11
    for model, again in zip(models, apart, strict=True):
        assert sorted(again) == ["bias", "weight"]
        assert torch.equal(model["weight"], again["weight"])


@pytest.mark.parametrize(
    ("rounds", "local_epochs", "slices", "expected"),
    [(20, 2, 4, 16), (20, 1, 4, 8), (10, 1, 1, 10), (3, 1, 9, 1), (1, 1, 20, 1)],
)
def test_epochs_per_slice(rounds: int, local_epochs: int, slices: int, expected: int) -> None:
    """2 e' / (R + 1): 80/5 = 16, 40/5 = 8, 20/2 = 10, 6/10 -> 1, 2/21 -> at least 1.

    16 epochs over 1/4, 2/4, 3/4 and 4/4 of the data are 16 * 10/4 = 40 = 20 * 2 passes.
    """
    training = TrainingSettings(rounds=rounds, local_epochs=local_epochs)
    assert epochs_of(SisaSettings(slices=slices), training) == expected
    assert epochs_of(SisaSettings(slices=slices, epochs_per_slice=7), training) == 7


def client_of_equal_slices() -> tuple[Client, list[list[str]]]:
    """Return a client with 4 samples in each of 3 slices, and the ids of each slice."""
    settings = SisaSettings(slices=SLICES)
    by_slice: list[list[str]] = [[] for _ in range(SLICES)]
    for number in range(1000):
        _, place = place_of(str(number), "a", 0, settings)
        if len(by_slice[place]) < SLICE_SIZE:
            by_slice[place].append(str(number))
    ids = [sample_id for slice_ids in by_slice for sample_id in slice_ids]
    assert len(ids) == SLICES * SLICE_SIZE
    inputs = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(0))
    return Client("a", TensorExamples(inputs, torch.arange(len(ids)) % 2, ids)), by_slice


@pytest.fixture
def trained() -> Callable[[], goldfish.Trained]:
    def build() -> goldfish.Trained:
        client, _ = client_of_equal_slices()
        federation = goldfish.InProcess([client], lambda: nn.Linear(3, 2), remember=False)
        return goldfish.train(
            federation,
            method=SISA,
            slices=SLICES,
            epochs_per_slice=EPOCHS,
            batch_size=SLICE_SIZE,
            learning_rate=0.1,
        )

    return build


def test_steps_of_training(trained: Callable[[], goldfish.Trained]) -> None:
    """Batches of one slice's size: 2 epochs of 1, 2 and 3 batches are 2 * 6 = 12 steps.

    They process 12 * 4 = 48 samples.
    """
    assert (trained().cost.steps, trained().cost.samples) == (12, 48)


@pytest.mark.parametrize(
    ("hit", "steps", "samples"), [(0, 12, 2 * (3 + 7 + 11)), (1, 10, 2 * (7 + 11)), (2, 6, 2 * 11)]
)
def test_steps_of_a_deletion(
    trained: Callable[[], goldfish.Trained], hit: int, steps: int, samples: int
) -> None:
    """One sample of slice j goes: 2 epochs of j, ..., 3 batches, the fuller ones one short.

    j = 1: 2 (1 + 2 + 3) = 12 steps; j = 2: 2 (2 + 3) = 10; j = 3: 2 * 3 = 6.
    """
    _, by_slice = client_of_equal_slices()
    request = DeletionRequest("a", sample_ids=by_slice[hit][:1])
    cost = goldfish.unlearn(trained(), [request], method=SISA).cost
    assert (cost.steps, cost.samples) == (steps, samples)


def test_expected_steps_of_a_deletion(trained: Callable[[], goldfish.Trained]) -> None:
    """The paper's 2/3 + 1/(3R) of the training, when every sample is as likely to go: 7/9.

    A hit in slice j redoes j + ... + R of 1 + ... + R parts. Over all j that is on average
    sum_i i^2 / R = (R + 1)(2R + 1)/6, of R (R + 1)/2, so (2R + 1)/(3R) = 7/9 for R = 3. Counted:
    (12 + 10 + 6)/3 = 28/3 of 12.
    """
    origin = trained()
    _, by_slice = client_of_equal_slices()
    steps = [
        goldfish.unlearn(origin, [DeletionRequest("a", sample_ids=[i])], method=SISA).cost.steps
        for slice_ids in by_slice
        for i in slice_ids
    ]
    assert sum(steps) / len(steps) / origin.cost.steps == pytest.approx(7 / 9)
