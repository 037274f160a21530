"""The audit of a model version: beside models that never had the samples that it forgot.

A project trains on removed samples never again, so there is one model on each side of the removal:
the version, and the one before it. All others are oracles (:mod:`goldfish.evaluation.audit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from goldfish.errors import ConfigError
from goldfish.evaluation.audit import LEAST_ORACLES, audit_verdict, comparable
from goldfish.experiments.audit_models import ORACLE, kept_path, measured, measuring_test, varied
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.scenario import Machine
from goldfish.methods.auditing import drop
from goldfish.project.entries import Version
from goldfish.project.ledger import AUDIT
from goldfish.project.project import Project
from goldfish.project.settings import ProjectSettings
from goldfish.randomness import derive_seed
from goldfish.results import Progress
from goldfish.store import load_checkpoint
from goldfish.types import Examples, Federation, Params
from goldfish.workflow import train

ORACLES = 16
"""How many oracles an audit has unless told: with one model beside them, 8 are often too few."""


def audit(project: Project, machine: Machine, amount: int = ORACLES) -> Iterator[Progress]:
    """Compare the newest version with ``amount`` models that never had the samples it forgot.

    These oracles are trained as the first version was, under other seeds. What is found, with a
    verdict in words, is in :meth:`Ledger.audits`. An audit that was interrupted goes on where it
    was; so does one with more oracles.
    """
    version, before = _audited(project, amount)
    if project.engine is None:
        yield from project.hand_over(AUDIT, machine, str(amount))
        return
    with project.working():
        holdings = project.files.holdings(machine)
        had, gone = (project.files.gone(v.number) for v in (before, version))
        named = {client: keys - had[client] for client, keys in gone.items()}
        scenario = holdings.scenario(had, machine.device, removed=named)
        removed, unseen = scenario.removed, scenario.test
        if removed is None:
            raise ConfigError(
                f"The samples that v{version.number} forgot are not in the data any more: there is "
                "nothing to compare. Audit a version before you delete them."
            )
        free = holdings.scenario(gone, machine.device)
        rest = [client for client in free.clients if len(client.retained)]
        setups = {client.id: free.setups[client.id] for client in rest}
        engine = partial(project.engine, replace(free, clients=rest, setups=setups), machine)
        models = [load_checkpoint(project.written(v)).params for v in (before, version)]
        folder = project.files.version(before.number)
        evaluator = Evaluator(scenario, machine.device)
        compared = (evaluator, removed, unseen)
        oracles = []
        for number in range(1, amount + 1):
            yield Progress(phase=ORACLE, round=number - 1, rounds=amount)
            federation = partial(engine, f"{holdings.run_id}-{ORACLE}-{number}")
            make = partial(_oracle, project.settings, federation, unseen, number)
            oracles.append(measured(_kept(folder, version, ORACLE, number), make, *compared))
            yield Progress(phase=ORACLE, round=number, rounds=amount)
        origin, own = (
            measured(_kept(folder, version, "model", place), partial(dict, params), *compared)
            for place, params in enumerate(models)
        )
        labels = (removed.labels.cpu(), unseen.labels.cpu())
        found = audit_verdict([own], oracles, *labels, [origin], evaluator.removed_classes)
        facts = {
            **found.model_dump(exclude={"models", "oracles"}),
            "removed": int(comparable(*labels, evaluator.removed_classes).sum()),
            "unseen": len(unseen),
            "oracles": amount,
        }
        if project.ledger.audits().get(version.number) != facts:
            project.ledger.record(AUDIT, facts, f"v{version.number}")


def audit_forecast(project: Project, amount: int = ORACLES) -> float:
    """Return about how many seconds an audit takes, by what versions cost to make."""
    version, before = _audited(project, amount)
    sample = project.seconds_per_sample() or 0.0
    gone, training = project.files.gone(version.number), project.settings.tables.training
    held = project.files.manifest().clients
    samples = sum(len(keys) - len(gone[client]) for client, keys in held.items())
    epochs = training.rounds * training.local_epochs * training.participation
    folder, numbers = project.files.version(before.number), range(1, amount + 1)
    left = sum(not _kept(folder, version, ORACLE, number).exists() for number in numbers)
    return left * epochs * samples * sample


def _audited(project: Project, amount: int) -> tuple[Version, Version]:
    """Return the newest version and the one before it, or say why there is no audit."""
    version = project.current()
    if amount < LEAST_ORACLES:
        raise ConfigError(f"An audit has at least {LEAST_ORACLES} oracles, not {amount}.")
    if version.parent is None:
        raise ConfigError(
            f"v{version.number} forgot nothing: there is nothing to audit before a "
            "'goldfish unlearn'."
        )
    if project.settings.members is not None:
        raise ConfigError(
            "The clients have data of their own (data.members): this folder knows none of the "
            "removed samples, and cannot look at them. Audit a run of such clients instead "
            "('goldfish run', then 'goldfish audit'; docs/audit.md)."
        )
    before = next(v for v in project.ledger.versions() if v.number == version.parent)
    if not project.files.model(before.number).exists():
        raise ConfigError(
            f"v{before.number} is purged, the last model that knew what v{version.number} forgot: "
            "there is nothing left to compare. Audit a version before 'goldfish purge'."
        )
    return version, before


def _kept(before: Path, version: Version, name: str, number: int) -> Path:
    """Return where an audit of a version keeps the margins of a model on removed samples.

    They lie in the folder of the version ``before``, which knew these samples: a purge deletes it.
    """
    return kept_path(before, f"v{version.number}-{name}", number)


def _oracle(
    settings: ProjectSettings, engine: Callable[[], Federation], test: Examples, number: int
) -> Params:
    """Train a model as the first version was, by clients without the removed samples."""
    own, seed = settings.own_training, settings.tables.seed
    values = varied(settings.tables.training, number).model_dump()
    if own is not None:
        values |= settings.of_method(own.name).model_dump()
    federation = engine()
    trained = train(
        federation,
        seed=derive_seed(seed, ORACLE, number),
        method=own,
        test=measuring_test(settings.tables.training, test),
        **values,
    )
    if federation.bytes_kept(trained.phase):
        drop(federation)  # what clients keep of it stands under that name alone
    return trained.params
