"""The models of an audit: the run's own, and others that are made under seeds of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from goldfish.data import TensorExamples
from goldfish.evaluation.attacks import margins
from goldfish.evaluation.audit import Measured
from goldfish.experiments.config import Config
from goldfish.experiments.engine import EngineFactory, in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.runner import phase_name, stage_rounds
from goldfish.experiments.scenario import Machine, Scenario
from goldfish.methods import METHODS, Method, Trained
from goldfish.methods.auditing import PHASE, drop
from goldfish.models import fresh_params
from goldfish.randomness import derive_seed
from goldfish.results import ORIGIN, YARDSTICK
from goldfish.settings import TrainingSettings
from goldfish.store import Checkpoint, RunDirectory, load_checkpoint, run_id_of, save_checkpoint
from goldfish.types import Examples, Federation, NotHonoured, Params
from goldfish.workflow import Unlearned, train, unlearn

FOLDER, ORACLE = "audit", "oracle"

STEP_SIZES = (1.0, 0.8, 1.25)
"""Models of all kinds differ in step size too, in turn: even retraining can be told apart by it."""


def kept_path(run: Path, name: str, number: int) -> Path:
    """Return where an audit keeps what it needs of a model."""
    return run / FOLDER / f"{name}-{number}.safetensors"


def measured(
    path: Path,
    make: Callable[[], Params],
    evaluator: Evaluator,
    removed: TensorExamples,
    unseen: TensorExamples,
) -> Measured:
    """Return what is kept of a model's measurement; else make the model, and measure it.

    What is kept of other samples, since some were deleted meanwhile, is made anew.
    """
    if path.exists():
        kept = load_checkpoint(path)
        found = Measured(
            kept.params["removed"], kept.params["unseen"], float(kept.memo["accuracy"])
        )
        if (len(found.removed), len(found.unseen)) == (len(removed), len(unseen)):
            return found
    params = make()
    on_unseen = evaluator.logits(params, unseen)
    test = evaluator.scenario.test
    on_test = on_unseen if test is unseen else evaluator.logits(params, test)
    found = Measured(
        margins(evaluator.logits(params, removed), removed.labels),
        margins(on_unseen, unseen.labels),
        evaluator.scores(on_test).accuracy,
    )
    tensors = {"removed": found.removed, "unseen": found.unseen}
    save_checkpoint(path, Checkpoint(0, tensors, memo={"accuracy": found.accuracy}))
    return found


def varied(training: TrainingSettings, number: int) -> TrainingSettings:
    """Return the settings of a training with the step size of this model."""
    rate = training.learning_rate * STEP_SIZES[number % len(STEP_SIZES)]
    return training.model_copy(update={"learning_rate": rate})


def measuring_test(training: TrainingSettings, test: Examples) -> Examples | None:
    """Return the server's test set where a training weighs clients by it, and none elsewhere.

    With one, every round would be scored too, which nobody looks at here.
    """
    return test if training.aggregation == "adaptive" else None


@dataclass
class AuditModels:
    """Finds the run's models, and makes others like them."""

    config: Config
    scenario: Scenario
    run: Path
    machine: Machine
    engine: EngineFactory | None
    """Makes the federation that trains; None: its clients live in this process."""
    names: Sequence[str]
    """The methods that are audited."""

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.scenario, self.machine.device)
        self._make = partial(self.engine or in_process, self.scenario, self.machine)
        self._here = self._make("") if self.engine is None else None
        self._open: dict[str, Federation] = {}
        self._phases = {PHASE}
        """Under which clients may keep something."""
        self._trainings: dict[tuple[int, str | None], Trained] = {}

    def federation(self, name: str) -> Federation:
        """Return the run's federation, under another name than in the run.

        Clients in other processes keep things under that name. They drop those of the last one.
        """
        if self._here is not None:
            return self._here
        if name not in self._open:
            self.close()
            self._open = {name: self._make(f"{run_id_of(self.run)}-{name}")}
        return self._open[name]

    def close(self) -> None:
        """Let clients in other processes drop what they keep of the audit."""
        for federation in self._open.values():
            if any(federation.bytes_kept(phase) for phase in self._phases):
                drop(federation)
        self._open = {}

    def final(self, name: str) -> Params:
        """Return the model that the run ended with."""
        stage = 1 if name == ORIGIN else len(self.scenario.stages)
        path = RunDirectory(self.run).checkpoint_path(phase_name(name, stage))
        return load_checkpoint(path).params

    def oracle(self, number: int) -> Params:
        """Return a model that was trained without the removed samples, as long as the original."""
        federation = self.federation(f"{ORACLE}-{number}")
        training = varied(self.config.training, number)
        seed = derive_seed(self.config.seed, ORACLE, number)  # no other model has it
        fresh = fresh_params(federation.model, seed, "initial")
        untrained = Trained(federation, fresh, training, seed)
        measuring = measuring_test(training, self.scenario.test)
        made = unlearn(untrained, self.scenario.requests, method=YARDSTICK, test=measuring)
        self._phases.add(made.trained.phase)
        return made.params

    def origin(self, number: int) -> Params:
        """Return a model that was trained with them."""
        return self._trained(number, None).params

    def unlearned(self, method: Method[Any], number: int) -> Params:
        """Return a model that was trained with them and then unlearned them, stage by stage."""
        config = self.config
        training = varied(config.unlearning_training, number).model_dump(exclude={"rounds"})
        own = config.methods[method.name].model_dump()  # a name of both is the method's
        model: Trained | Unlearned
        model = self._trained(number, method.name if method.prepare is not None else None)
        lost: Sequence[NotHonoured] = ()
        for place, requests in enumerate(self.scenario.stages, start=1):
            model = unlearn(
                model,
                [*(left.request for left in lost), *requests],
                method=method,
                rounds=stage_rounds(config, place),
                test=self.scenario.test,
                **{**training, **own},
            )
            lost = model.not_honoured
            self._phases.add(model.trained.phase)
        return model.params

    def _trained(self, number: int, own: str | None) -> Trained:
        """Train once under a seed, for all methods that start from the same training."""
        if (number, own) not in self._trainings:
            self._trainings = {key: t for key, t in self._trainings.items() if key[0] == number}
            settings = varied(self.config.training, number).model_dump()
            if own is not None:
                settings |= self.config.methods[own].model_dump()
            kept = {
                name: self.config.methods[name].model_dump()
                for name in self.names
                if own is None and METHODS[name].prepare is None
            }
            seed = self.config.seed + number
            federation = self.federation(f"{FOLDER}-{number}")
            measuring = measuring_test(self.config.training, self.scenario.test)
            self._trainings[number, own] = train(
                federation, seed=seed, method=own, keep_for=kept, test=measuring, **settings
            )
            self._phases.add(self._trainings[number, own].phase)
        return self._trainings[number, own]
