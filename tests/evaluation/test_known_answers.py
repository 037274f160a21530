"""Audits of small federations on digits whose answers are known; the models are trained once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from goldfish.audits import AuditVerdict
from goldfish.evaluation.attacks import likelihood_ratios, margins, true_positives
from goldfish.evaluation.audit import Measured, audit_verdict
from goldfish.experiments.config import parse_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.methods import Trained
from goldfish.models import fresh_params
from goldfish.settings import TrainingSettings
from goldfish.training.fit import predict
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Params
from goldfish.workflow import train, unlearn

TRAINING = TrainingSettings(rounds=3, local_epochs=10, learning_rate=0.02, batch_size=10)
"""Long enough for 80 samples to be learned by heart."""


@dataclass(frozen=True)
class Models:
    """24 of the 80 samples are removed."""

    oracles: Sequence[Measured]
    """At three step sizes, in turn."""
    origins: Sequence[Measured]
    retrained: Sequence[Measured]
    """Under seeds of their own, at the usual step size."""
    slower: Measured
    """Retrained at half of the step size."""
    half_trained: Measured
    """Retrained for one epoch."""
    verdict: Callable[..., AuditVerdict]
    """Judges models beside the oracles, or others."""


@pytest.fixture(scope="module")
def models() -> Models:
    config = parse_config(
        {
            "data": {"name": "digits", "clients": 2, "limit_train": 80},
            "model": {"name": "mlp"},
            "deletion": {"rate": 0.3},
        }
    )
    machine = Machine(workers=1, threads=1)
    scenario = build_scenario(config, machine)
    federation, workspace = in_process(scenario, machine, ""), LocalWorkspace(scenario.model)
    removed, test = scenario.removed, scenario.test
    assert removed is not None
    assert len(removed) == 24

    def measured(params: Params) -> Measured:
        module = workspace.load("audit", params).module
        on_removed, on_test = predict(module, removed), predict(module, test)
        right = (on_test.argmax(dim=1) == test.labels).double().mean().item()
        return Measured(
            margins(on_removed, removed.labels), margins(on_test, test.labels), 100 * right
        )

    def retrained(seed: int, factor: float = 1.0, **changed: int) -> Measured:
        rate = {"learning_rate": factor * TRAINING.learning_rate}
        training = TRAINING.model_copy(update={**rate, **changed})
        fresh = fresh_params(federation.model, seed, "initial")
        untrained = Trained(federation, fresh, training, seed)
        return measured(unlearn(untrained, scenario.requests, method="retrain").params)

    def origin(seed: int) -> Measured:
        return measured(train(federation, seed=seed, **TRAINING.model_dump()).params)

    oracles = [retrained(100 + n, (1.0, 0.8, 1.25)[n % 3]) for n in range(12)]
    origins = [origin(seed) for seed in range(4)]

    def verdict(
        unlearned: Sequence[Measured], beside: Sequence[Measured] = oracles
    ) -> AuditVerdict:
        return audit_verdict(unlearned, beside, removed.labels, test.labels, origins)

    return Models(
        oracles,
        origins,
        [retrained(200 + seed) for seed in range(5)],
        retrained(300, 0.5),
        retrained(301, rounds=1, local_epochs=1),
        verdict,
    )


def test_an_untouched_model_remembers(models: Models) -> None:
    for untouched in (models.origins, models.origins[:1]):
        assert models.verdict(untouched).word == "remembers"


def test_a_retrained_model_is_indistinguishable_in_5_of_5_seeds(models: Models) -> None:
    assert [models.verdict([one]).word for one in models.retrained] == ["indistinguishable"] * 5
    assert models.verdict(models.retrained).word == "indistinguishable"


def test_random_answers_on_removed_samples_are_over_forgetting(models: Models) -> None:
    """The logits of the removed samples are drawn anew: all else is a retrained model's."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 10
    noise = margins(torch.randn(24, 10, generator=draw), labels)
    assert models.verdict([replace(models.retrained[0], removed=noise)]).word == "over-forgets"


def test_a_half_trained_model_is_damaged(models: Models) -> None:
    assert models.verdict([models.half_trained]).word == "damaged"


def test_one_oracle_is_not_enough(models: Models) -> None:
    assert models.verdict(models.origins, models.oracles[:1]).word == "not enough evidence"


def test_another_step_size_is_not_a_memory(models: Models) -> None:
    assert models.verdict([models.slower]).word != "remembers"


def test_the_attack_finds_what_is_learned_by_heart_and_nothing_else(models: Models) -> None:
    """At 1 % false positives: at least ten times as many true ones, and about as many."""
    oracles = torch.stack([model.removed for model in models.oracles])

    def rate(attacked: Sequence[Measured]) -> float:
        ours = torch.stack([model.removed for model in attacked])
        return true_positives(*likelihood_ratios(ours, oracles), 0.01).rate

    assert rate(models.origins) >= 0.1
    assert rate(models.retrained) <= 0.03
