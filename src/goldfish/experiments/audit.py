"""An audit of a run: its methods, and retraining, again under other seeds, compared by margins.

For every further seed the federation is trained and unlearns once more, and an oracle is trained
without the removed samples. Who holds what and what is removed stay those of the run. Each model's
margins are kept in ``audit/``, so that an audit that was interrupted, or one with more models, goes
on with what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from goldfish.data import TensorExamples
from goldfish.errors import ConfigError, StoreError, unknown
from goldfish.evaluation.attacks import (
    Rate,
    gaussian_distance,
    likelihood_ratios,
    margins,
    true_positives,
)
from goldfish.evaluation.audit import LEAST_ORACLES, AuditVerdict, Measured, audit_verdict
from goldfish.experiments.config import Config, load_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.methods import METHODS, Method, Trained
from goldfish.models import fresh_params
from goldfish.randomness import derive_seed
from goldfish.results import ORIGIN, YARDSTICK, Part, Progress
from goldfish.settings import TrainingSettings
from goldfish.store import (
    CONFIG,
    RESULT,
    Checkpoint,
    claim,
    load_checkpoint,
    save_checkpoint,
    write_whole,
)
from goldfish.types import Params
from goldfish.workflow import train, unlearn

FOLDER, AUDIT, ORACLE = "audit", "audit.json", "oracle"

STEP_SIZES = (1.0, 0.8, 1.25)
"""Models of all kinds differ in step size too, in turn: even retraining can be told apart by it."""

FALSE_RATE = 0.01
"""At which false positive rate the attack's true positive rate is told."""


class Distances(Part):
    """Median distance of margins between two groups of models, on two kinds of samples."""

    removed: float
    unseen: float


class AuditedMethod(AuditVerdict):
    """What the models of one method show beside the oracles."""

    distances: Distances
    """From the oracles, with half of the models a side, as in :attr:`Audit.noise`."""
    attack: Rate
    """True positive rate of U-LiRA on removed samples at a false positive rate of 1 %."""


class Audit(Part):
    """The whole of ``audit.json``."""

    models: int
    """How many models of each method, and how many oracles."""
    removed: int
    unseen: int
    noise: Distances
    """Between one half of the oracles and the other."""
    methods: dict[str, AuditedMethod]
    """Origin, which unlearned nothing, comes first."""


def audit_run(
    run: Path, machine: Machine, *, models: int = 8, methods: Sequence[str] = ()
) -> Iterator[Progress]:
    """Yield the progress of an audit; ``audit.json`` in the run directory holds it at the end.

    ``models`` is how many federations are trained and unlearn again, and how many oracles there
    are; ``methods`` are by default all of the run's. The untouched model, origin, is always
    audited too: an audit that does not find its memory would find no other.
    """
    if models < LEAST_ORACLES:
        raise ConfigError(
            f"An audit compares at least {LEAST_ORACLES} models of each kind, not {models}."
        )
    config = load_config(run / CONFIG)
    names = list(methods or config.unlearning.methods)
    for name in names:
        if name not in config.unlearning.methods:
            hint = f"The run has {', '.join(config.unlearning.methods)}."
            raise ConfigError(unknown("method", name, config.unlearning.methods, hint))
    if not (run / RESULT).exists():
        raise StoreError(f"{run} is not finished. First: goldfish run {run} --resume")
    with claim(run / FOLDER / "lock"):
        work = _Work(config, run, machine)
        makers: dict[str, Callable[[int], Params]] = {ORACLE: work.oracle, ORIGIN: work.origin}
        makers |= {name: partial(work.unlearned, METHODS[name]) for name in names}
        measured: dict[str, list[Measured]] = {name: [] for name in makers}
        for number in range(1, models + 1):
            for name, make in makers.items():
                yield Progress(phase=name, round=number - 1, rounds=models)
                measured[name].append(work.measured(name, number, make))
                yield Progress(phase=name, round=number, rounds=models)
        write_whole(run / AUDIT, work.audit(measured).model_dump_json(indent=1) + "\n")


class _Work:
    """Makes and measures the models of an audit, each under a seed of its own."""

    def __init__(self, config: Config, run: Path, machine: Machine) -> None:
        scenario = build_scenario(config, machine, run)
        if len(scenario.stages) > 1:
            raise ConfigError("A run with later requests (deletion.then) cannot be audited yet.")
        self._config = config
        self._scenario = scenario
        self._folder = run / FOLDER
        self._federation = in_process(scenario, machine, "")
        self._evaluator = Evaluator(scenario, machine.device)
        self._trainings: dict[tuple[int, str | None], Trained] = {}
        self._removed, self._unseen = self._compared()

    def measured(self, name: str, number: int, make: Callable[[int], Params]) -> Measured:
        """Return what is kept of a model's measurement; else make the model and measure it."""
        path = self._folder / f"{name}-{number}.safetensors"
        if path.exists():
            kept = load_checkpoint(path)
            accuracy = float(kept.memo["accuracy"])
            return Measured(kept.params["removed"], kept.params["unseen"], accuracy)
        params = make(number)
        tensors = {
            kind: margins(self._evaluator.logits(params, examples), examples.labels)
            for kind, examples in (("removed", self._removed), ("unseen", self._unseen))
        }
        accuracy = self._evaluator.measure(params).accuracy
        save_checkpoint(path, Checkpoint(number, tensors, memo={"accuracy": accuracy}))
        return Measured(tensors["removed"], tensors["unseen"], accuracy)

    def oracle(self, number: int) -> Params:
        """Return a model that was trained without the removed samples, as long as the original."""
        training = _varied(self._config.training, number)
        seed = derive_seed(self._config.seed, ORACLE, number)  # no other model has it
        fresh = fresh_params(self._federation.model, seed, "initial")
        untrained = Trained(self._federation, fresh, training, seed)
        return unlearn(untrained, self._scenario.requests, method=YARDSTICK).params

    def origin(self, number: int) -> Params:
        """Return a model that was trained with them."""
        return self._trained(number, None).params

    def unlearned(self, method: Method[Any], number: int) -> Params:
        """Return a model that was trained with them and then unlearned them."""
        own = self._config.methods[method.name].model_dump()
        training = _varied(self._config.unlearning_training, number)
        return unlearn(
            self._trained(number, method.name if method.prepare is not None else None),
            self._scenario.requests,
            method=method,
            rounds=self._config.unlearning.rounds,
            test=self._scenario.test,
            **{**training.model_dump(exclude={"rounds"}), **own},  # a name of both is the method's
        ).params

    def _trained(self, number: int, own: str | None) -> Trained:
        """Train once under a seed, for all methods that start from the same training."""
        if (number, own) not in self._trainings:
            self._trainings = {key: t for key, t in self._trainings.items() if key[0] == number}
            settings = _varied(self._config.training, number).model_dump()
            if own is not None:
                settings |= self._config.methods[own].model_dump()
            kept = {
                name: self._config.methods[name].model_dump()
                for name in self._config.unlearning.methods
                if own is None and METHODS[name].prepare is None
            }
            seed = self._config.seed + number
            self._trainings[number, own] = train(
                self._federation, seed=seed, method=own, keep_for=kept, **settings
            )
        return self._trainings[number, own]

    def _compared(self) -> tuple[TensorExamples, TensorExamples]:
        """Return removed samples, if possible without a trigger, and unseen ones like them."""
        scenario, clean = self._scenario, self._evaluator.clean_removed
        if scenario.removed is None:
            raise ConfigError(
                "Only the clients of this run have the removed samples: it cannot be audited here."
            )
        if clean is not None:
            return clean, scenario.test
        if scenario.triggered is None:
            raise ConfigError("The run has no unseen samples to compare removed ones with.")
        return scenario.removed, scenario.triggered

    def audit(self, measured: Mapping[str, Sequence[Measured]]) -> Audit:
        """Return the audit of all models."""
        labels = (self._removed.labels.cpu(), self._unseen.labels.cpu())
        oracles = measured[ORACLE]
        methods = {}
        for name, own in measured.items():
            if name == ORACLE:
                continue
            ratios = likelihood_ratios(*(_on_removed(side) for side in (own, oracles)))
            methods[name] = AuditedMethod(
                **audit_verdict(own, oracles, *labels, measured[ORIGIN]).model_dump(),
                distances=_distances(own[::2], oracles[1::2]),
                attack=true_positives(*ratios, FALSE_RATE),
            )
        return Audit(
            models=len(oracles),
            removed=len(self._removed),
            unseen=len(self._unseen),
            noise=_distances(oracles[::2], oracles[1::2]),
            methods=methods,
        )


def _varied(training: TrainingSettings, number: int) -> TrainingSettings:
    rate = training.learning_rate * STEP_SIZES[number % len(STEP_SIZES)]
    return training.model_copy(update={"learning_rate": rate})


def _on_removed(models: Sequence[Measured]) -> torch.Tensor:
    return torch.stack([model.removed for model in models])


def _distances(ours: Sequence[Measured], theirs: Sequence[Measured]) -> Distances:
    removed = gaussian_distance(_on_removed(ours), _on_removed(theirs))
    unseen = [torch.stack([model.unseen for model in side]) for side in (ours, theirs)]
    return Distances(
        removed=removed.median().item(), unseen=gaussian_distance(*unseen).median().item()
    )
