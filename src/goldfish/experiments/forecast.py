"""What each method of a run would cost, before the run or after it: ``goldfish plan CONFIG``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from goldfish.errors import ConfigError
from goldfish.experiments.config import load_config
from goldfish.experiments.engine import in_process
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.methods import METHODS, Trained
from goldfish.models import fresh_params
from goldfish.planning import Advice, plan
from goldfish.results import ORIGIN, Result
from goldfish.store import CONFIG, RESULT


def plan_run(path: Path, machine: Machine, methods: Sequence[str] = ()) -> Advice:
    """Say what each of these methods, or of all, would cost for a configuration's deletion.

    ``path`` is a configuration, or the directory of a run: then times are scaled by what its
    training took. No model is trained for it: what a step costs does not depend on its weights.
    """
    config = load_config(path / CONFIG if path.is_dir() else path)
    if config.data.members is not None:
        raise ConfigError(
            "data.members: the clients have data of their own, and methods are rehearsed where the "
            "data is. Plan with data of the same size."
        )
    scenario = build_scenario(config, machine, path if path.is_dir() else None)
    federation = in_process(scenario, machine, "")
    weights = fresh_params(federation.model, config.seed, "initial")
    origin = Trained(federation, weights, config.training, config.seed)
    seconds = None
    if (path / RESULT).exists():
        cost = Result.read(path / RESULT).methods[ORIGIN].cost
        seconds = None if cost is None else cost.seconds / cost.samples
    written = {n: own.model_dump(exclude_unset=True) for n, own in config.methods.items()}
    return plan(
        origin,
        scenario.requests,
        methods={name: written.get(name, {}) for name in methods or METHODS},
        training=config.unlearning_training,
        rounds=config.unlearning.rounds,
        test=scenario.test,
        seconds_per_sample=seconds,
    )
