"""What each method of a run would cost, before the run or after it: ``goldfish plan CONFIG``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from goldfish.errors import ConfigError
from goldfish.experiments.config import Config
from goldfish.experiments.engine import in_process
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.methods import METHODS, Trained
from goldfish.models import fresh_params
from goldfish.planning import Advice, Estimate, plan
from goldfish.results import ORIGIN, Result
from goldfish.store import RESULT, KeptHistory, RunDirectory, load_checkpoint


def plan_run(
    config: Config, machine: Machine, methods: Sequence[str] = (), run: Path | None = None
) -> Advice:
    """Say what each of these methods, or of all, would cost for a configuration's deletion.

    With the directory of its ``run``, methods start from the trained model and from what was kept
    for them, and times are scaled by what the training took. No model is trained for it: without a
    run they start from a fresh one. How often a method tries again may depend on the model; what a
    step costs does not.
    """
    if config.data.members is not None:
        raise ConfigError(
            "data.members: the clients have data of their own, and methods are rehearsed where the "
            "data is. Plan with data of the same size."
        )
    scenario = build_scenario(config, machine, run)
    federation = in_process(scenario, machine, "")
    weights = fresh_params(federation.model, config.seed, "initial")
    fresh = Trained(federation, weights, config.training, config.seed)
    origin = fresh if run is None else _as_run(fresh, run, config)
    seconds = None
    if run is not None and (run / RESULT).exists():
        cost = Result.read(run / RESULT).methods[ORIGIN].cost
        seconds = None if cost is None else cost.seconds / cost.samples
    written = {n: own.model_dump(exclude_unset=True) for n, own in config.methods.items()}
    advice = plan(
        origin,
        scenario.requests,
        methods={name: written.get(name, {}) for name in methods or METHODS},
        training=config.unlearning_training,
        rounds=config.unlearning.rounds,
        test=scenario.test,
        seconds_per_sample=seconds,
    )
    estimates = [_in_words(own, config, trained=origin is not fresh) for own in advice.estimates]
    return replace(advice, estimates=estimates)


def _in_words(own: Estimate, config: Config, *, trained: bool) -> Estimate:
    """Say of a method that needs more than a model why it was not looked at, in a run's words."""
    method = METHODS[own.method]
    settings = config.methods.get(own.method, method.settings())
    if method.prepare is not None:
        return replace(own, refused=f"{own.method} has a training of its own: it is not rehearsed.")
    if own.refused is None or not method.kept_rounds(settings, config.training.rounds):
        return own
    if own.method not in config.unlearning.methods:
        why = "keeps nothing for it: name it in unlearning.methods"
    elif not trained:
        why = "keeps for it, once it is trained: then plan for its directory"
    else:
        return own
    return replace(own, refused=f"{own.method} needs client updates that the run {why}.")


def _as_run(fresh: Trained, path: Path, config: Config) -> Trained:
    """Return the federation as a run left it after its training; fresh where there is none.

    Of a run with several seeds it is the first.
    """
    for place in (path, path / f"seed-{config.seed}"):
        run = RunDirectory(place)
        file = run.checkpoint_path(ORIGIN)
        if not file.exists() or not (done := load_checkpoint(file)).final:
            continue
        kept = {index for rounds in config.kept_rounds.values() for index in rounds}
        return replace(
            fresh,
            params=done.params,
            history=KeptHistory(run, kept),
            memo=done.memo,
            states=done.states or None,
        )
    return fresh
