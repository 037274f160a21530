"""Audits whose answers are known beforehand: is each model judged as it must be?

    python benchmarks/known_answers.py --datasets mnist cifar-10 --data-dir DIR
    python benchmarks/known_answers.py --datasets mnist --class-label 3 --data-dir DIR

Trains oracles, models that were trained with the removed samples, retrained ones, one at half of
the step size, one for half as long, one for twice as long and a half-trained one, and prints the
verdict on each as a table. There is little data and a long training, so that single samples leave a
trace: in all of MNIST they hardly do (docs/audit.md). With a class label this class is removed
instead of three tenths of a client's samples. The tests do the same with the embedded digits.
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
from goldfish.evaluation.audit import Measured, audit_verdict, of_classes
from goldfish.experiments.audit_models import STEP_SIZES
from goldfish.experiments.config import parse_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.evaluator import removed_classes
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
    shorter: Measured
    """Retrained for half as many rounds."""
    longer: Measured
    """Retrained for twice as many rounds."""
    half_trained: Measured
    """Retrained for one round of one epoch."""
    removed: Examples
    test: Examples
    gone: Sequence[int]
    """Classes of which no sample remains."""

    def verdict(
        self, unlearned: Sequence[Measured], oracles: Sequence[Measured] | None = None
    ) -> AuditVerdict:
        """Judge models beside the oracles, or others."""
        beside = self.oracles if oracles is None else oracles
        labels = (self.removed.labels, self.test.labels)
        return audit_verdict(unlearned, beside, *labels, self.origins, self.gone)

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


def make(dataset: str, machine: Machine, class_label: int | None = None) -> Models:
    """Train the models: 12 oracles, 4 origins, 5 retrained ones, and four others."""
    deletion = {} if class_label is None else {"deletion": {"class_label": class_label}}
    config = parse_config({**SETTINGS[dataset], **deletion})
    usual = config.training
    scenario = build_scenario(config, machine)
    federation, workspace = in_process(scenario, machine, ""), LocalWorkspace(scenario.model)
    removed, test = scenario.removed, scenario.test
    if removed is None:
        raise SystemExit("The clients alone know their samples: nothing to audit here.")
    gone = removed_classes(scenario)
    counts = ~of_classes(test.labels, gone)

    def measured(params: Params) -> Measured:
        module = workspace.load("audit", params).module
        on_removed, on_test = predict(module, removed), predict(module, test)
        right = (on_test.argmax(dim=1) == test.labels)[counts].double().mean().item()
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
        retrained(302, rounds=max(1, usual.rounds // 2)),
        retrained(303, rounds=2 * usual.rounds),
        retrained(301, rounds=1, local_epochs=1),
        removed,
        test,
        gone,
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
        "retrained for half as long": models.verdict([models.shorter]),
        "retrained for twice as long": models.verdict([models.longer]),
    }
    yield "| model | memory | on unseen | accuracy | verdict |"
    yield "|---|---|---|---|---|"
    for name, verdict in judged.items():
        told = [
            "" if value is None else f"{value.value:+.2f} ± {value.half:.2f}"
            for value in (verdict.memory, verdict.general, verdict.accuracy)
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
    parser.add_argument("--class-label", type=int, help="remove this class")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    machine = Machine(options.data_dir, options.device, compiled=options.device == "cpu")
    for dataset in options.datasets:
        models = make(dataset, machine, options.class_label)
        samples = f"{len(models.removed)} removed and {len(models.test)} unseen samples"
        print(f"{dataset}, {samples}\n", *table(models), "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
