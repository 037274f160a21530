"""Audits whose answers are known beforehand: is each model judged as it must be?

    python benchmarks/known_answers.py --datasets mnist cifar-10 --data-dir DIR

Trains oracles, models that were trained with the removed samples, retrained ones, one at half of
the step size and a half-trained one, and prints the verdict on each as a table. There is little
data and a long training, so that single samples leave a trace: in all of MNIST they hardly do
(docs/audit.md). The tests do the same with the embedded digits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from goldfish.audits import AuditVerdict
from goldfish.evaluation.attacks import likelihood_ratios, margins, true_positives
from goldfish.evaluation.audit import Measured, audit_verdict
from goldfish.experiments.audit_models import STEP_SIZES
from goldfish.experiments.config import parse_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.methods import Trained
from goldfish.models import fresh_params
from goldfish.training.fit import predict
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Examples, Params
from goldfish.workflow import train, unlearn

SETTINGS: Mapping[str, dict[str, Any]] = {
    "digits": {
        "data": {"name": "digits", "clients": 2, "limit_train": 80},
        "model": {"name": "mlp"},
        "training": {"rounds": 3, "local_epochs": 10, "learning_rate": 0.02, "batch_size": 10},
        "deletion": {"rate": 0.3},
    },
    "mnist": {
        "data": {"name": "mnist", "clients": 5, "limit_train": 1000},
        "model": {"name": "lenet5"},
        "training": {"rounds": 20, "local_epochs": 4, "learning_rate": 0.02, "batch_size": 20},
        "deletion": {"rate": 0.3},
    },
    "cifar-10": {
        "data": {"name": "cifar-10", "clients": 5, "limit_train": 5000},
        "model": {"name": "lenet5-cifar"},
        "training": {"rounds": 15, "local_epochs": 2, "learning_rate": 0.01, "batch_size": 50},
        "deletion": {"rate": 0.3},
    },
}


@dataclass(frozen=True)
class Models:
    """What is known of each model, and the samples that it is known of."""

    oracles: Sequence[Measured]
    """At three step sizes, in turn."""
    origins: Sequence[Measured]
    """Trained with the removed samples."""
    retrained: Sequence[Measured]
    """Under seeds of their own, at the usual step size."""
    slower: Measured
    """Retrained at half of the step size."""
    half_trained: Measured
    """Retrained for one round of one epoch."""
    removed: Examples
    test: Examples

    def verdict(
        self, unlearned: Sequence[Measured], oracles: Sequence[Measured] | None = None
    ) -> AuditVerdict:
        """Judge models beside the oracles, or others."""
        beside = self.oracles if oracles is None else oracles
        return audit_verdict(unlearned, beside, self.removed.labels, self.test.labels, self.origins)

    @property
    def at_random(self) -> Measured:
        """The first retrained model, with drawn logits on the removed samples."""
        model = self.retrained[0]
        draw = torch.Generator().manual_seed(0)
        classes = int(self.test.labels.max()) + 1
        logits = torch.randn(len(self.removed), classes, generator=draw)
        return replace(model, removed=margins(logits, self.removed.labels))

    def found(self, attacked: Sequence[Measured]) -> float:
        """Return the share of removed samples that the attack finds at 1 % false positives."""
        oracles = torch.stack([model.removed for model in self.oracles])
        ours = torch.stack([model.removed for model in attacked])
        return true_positives(*likelihood_ratios(ours, oracles), 0.01).rate


def make(dataset: str, machine: Machine) -> Models:
    """Train the models: 12 oracles, 4 origins, 5 retrained ones, and two others."""
    config = parse_config(SETTINGS[dataset])
    usual = config.training
    scenario = build_scenario(config, machine)
    federation, workspace = in_process(scenario, machine, ""), LocalWorkspace(scenario.model)
    removed, test = scenario.removed, scenario.test
    if removed is None:
        raise SystemExit("The clients alone know their samples: nothing to audit here.")

    def measured(params: Params) -> Measured:
        module = workspace.load("audit", params).module
        on_removed, on_test = predict(module, removed), predict(module, test)
        right = (on_test.argmax(dim=1) == test.labels).double().mean().item()
        return Measured(
            margins(on_removed, removed.labels), margins(on_test, test.labels), 100 * right
        )

    def retrained(seed: int, factor: float = 1.0, **changed: int) -> Measured:
        rate = {"learning_rate": factor * usual.learning_rate}
        training = usual.model_copy(update={**rate, **changed})
        fresh = fresh_params(federation.model, seed, "initial")
        untrained = Trained(federation, fresh, training, seed)
        return measured(unlearn(untrained, scenario.requests, method="retrain").params)

    def origin(seed: int) -> Measured:
        return measured(train(federation, seed=seed, **usual.model_dump()).params)

    return Models(
        [retrained(100 + n, STEP_SIZES[n % len(STEP_SIZES)]) for n in range(12)],
        [origin(seed) for seed in range(4)],
        [retrained(200 + seed) for seed in range(5)],
        retrained(300, 0.5),
        retrained(301, rounds=1, local_epochs=1),
        removed,
        test,
    )


def table(models: Models) -> Iterator[str]:
    """Yield the verdict on each model as Markdown."""
    judged = {
        "untouched, four models": models.verdict(models.origins),
        "untouched, one model": models.verdict(models.origins[:1]),
        **{f"retrained, seed {n}": models.verdict([m]) for n, m in enumerate(models.retrained)},
        "retrained, all five": models.verdict(models.retrained),
        "answers at random on the removed samples": models.verdict([models.at_random]),
        "half-trained": models.verdict([models.half_trained]),
        "untouched, compared with one oracle": models.verdict(models.origins, models.oracles[:1]),
        "retrained at half of the step size": models.verdict([models.slower]),
    }
    yield "| model | memory | accuracy | verdict |"
    yield "|---|---|---|---|"
    for name, verdict in judged.items():
        told = [
            "" if value is None else f"{value.value:+.2f} ± {value.half:.2f}"
            for value in (verdict.memory, verdict.accuracy)
        ]
        yield f"| {name} | {' | '.join(told)} | *{verdict.word}* |"
    yield ""
    yield (
        f"Attack at 1 % false positives: {100 * models.found(models.origins):.1f} % of the removed "
        f"samples of untouched models, {100 * models.found(models.retrained):.1f} % of retrained "
        "ones."
    )


def main() -> None:
    """Train, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    machine = Machine(options.data_dir, options.device, compiled=options.device == "cpu")
    for dataset in options.datasets:
        models = make(dataset, machine)
        samples = f"{len(models.removed)} removed and {len(models.test)} unseen samples"
        print(f"{dataset}, {samples}\n", *table(models), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
