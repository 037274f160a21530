"""The versions of a project's model: how one comes to be, and what becomes of it.

The newest one is current. Those before it are quarantined, because they know samples that were
removed since: a reject brings the last of them back, and a purge deletes them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goldfish.errors import ConfigError, StoreError
from goldfish.experiments.engine import EngineFactory
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.scenario import Machine
from goldfish.files import sha256_of
from goldfish.methods import METHODS, Trained, load
from goldfish.methods.records import purge
from goldfish.project.asking import Registry
from goldfish.project.entries import CLIENT_STATE, CLIENTS, Artefact, ArtefactState, Version
from goldfish.project.folder import ProjectFolder, remove
from goldfish.project.holdings import Holdings
from goldfish.project.ledger import Ledger
from goldfish.project.traces import traces
from goldfish.results import Cost, Final
from goldfish.types import Federation


@dataclass(frozen=True)
class Newest:
    """The newest version with all that it takes to unlearn from it."""

    version: Version
    registry: Registry
    holdings: Holdings
    trained: Trained


@dataclass(frozen=True)
class Versions:
    """The model versions of a project: their files, and what the ledger says of them.

    Only a process that alone changes the project (:meth:`ProjectFolder.working`) calls what writes.
    """

    files: ProjectFolder
    ledger: Ledger

    def states(self) -> dict[int, str]:
        """Return what became of the model of each version: current, quarantined or purged."""
        models = (a for a in self.ledger.artefacts() if a.kind == "model")
        return {a.version: a.state for a in models if a.version is not None}

    def current(self) -> Version:
        """Return the newest version that was not rejected."""
        states = self.states()
        versions = [v for v in self.ledger.versions() if states.get(v.number) == "current"]
        if not versions:
            raise ConfigError(f"{self.files.path} has no model yet. Run 'goldfish train' first.")
        return versions[-1]

    def written(self, version: Version) -> Path:
        """Return the model file of a version, once it is seen to be the one that was written."""
        model = self.files.model(version.number)
        if not model.exists() or sha256_of(model) != version.sha256:
            raise StoreError(
                f"{model} is not the file that was written (its SHA-256 is another, or it is "
                "missing). Nothing was done: put it back from a backup."
            )
        return model

    def load(self, version: Version, federation: Federation) -> Trained:
        """Return a version to start from, once its file is seen to be the one that was written."""
        state = self.states().get(version.number)
        if state != "current":
            raise StoreError(
                f"v{version.number} is {state}: it knows samples that were removed since, and is "
                "no starting point any more."
            )
        return load(self.written(version).parent, federation)

    def newest(self, machine: Machine, engine: EngineFactory) -> Newest:
        """Return the newest version in a federation of the clients as they are now."""
        version = self.current()
        registry = Registry.of_version(self.files, version.number)
        holdings = self.files.holdings(machine)
        scenario = holdings.scenario(registry.gone, machine.device)
        federation = engine(scenario, machine, holdings.run_id)
        return Newest(version, registry, holdings, self.load(version, federation))

    def publish(
        self,
        trained: Trained,
        made_by: str,
        facts: Mapping[str, Any],
        gone: Mapping[str, set[str]],
        *,
        parent: int | None = None,
        requests: Sequence[str] = (),
    ) -> Version:
        """Write a version, then say so in the ledger, where older ones are quarantined.

        ``gone`` are the keys of the samples that it is free of, ``requests`` those that it honours;
        ``facts`` begin as :func:`facts_of`.
        """
        number = len(self.ledger.versions()) + 1
        sha256 = self.files.write_version(number, trained, gone)
        held = self.files.manifest().clients
        left = {client: set(keys) - gone.get(client, set()) for client, keys in held.items()}
        manifests = {c: self.ledger.manifest_digest(c, keys) for c, keys in left.items() if keys}
        fresh = parent is None or METHODS[made_by].guarantee == "exact"
        with self.ledger.together():
            version = self.ledger.add_version(
                made_by, sha256, parent=parent, requests=requests, **facts
            )
            old = self.ledger.artefacts("current")
            for artefact in old:
                self.ledger.move_artefact(artefact.path, "quarantined", by=f"v{number}")
            self.ledger.add_artefact(
                self.files.name(self.files.model(number)),
                "model",
                version=number,
                sha256=sha256,
                parents=[] if fresh else [a.path for a in old if a.kind == "model"],
                manifests=manifests,
            )
            others = {}
            if (history := self.files.version(number) / "history").exists():
                others[self.files.name(history)] = "updates"
            if self.files.settings.on_flower:
                others |= {f"{CLIENTS}/{client}/v{number}": CLIENT_STATE for client in manifests}
            for path, kind in others.items():
                self.ledger.add_artefact(path, kind, version=number, manifests=manifests)
            for request in requests:
                self.ledger.advance(request, "unlearned", version=number)
                self.ledger.advance(request, "measured", measures=facts["measures"])
        remove(self.files.work(number))
        return version

    def reject(self) -> None:
        """Take the newest version back, as long as the one before is not purged."""
        rejected = self.current()
        before = [a for a in self.ledger.artefacts() if a.version == rejected.parent]
        older = rejected.parent
        if older is None:
            raise ConfigError(
                f"v{rejected.number} cannot be rejected: it is the first version, and there is "
                "none to go back to."
            )
        if not before or any(a.state != "quarantined" for a in before):
            raise ConfigError(
                f"v{rejected.number} cannot be rejected: it was accepted by 'goldfish purge', "
                f"which deleted v{older}. There is no way back."
            )
        if not self.files.model(older).exists():
            raise ConfigError(
                f"v{rejected.number} cannot be rejected: a purge that was interrupted has "
                "deleted the version before it. Run 'goldfish purge' again."
            )
        remove(self.files.work(len(self.ledger.versions()) + 1))
        with self.ledger.together():
            for artefact in self.ledger.artefacts("current"):
                kept = artefact.kind == CLIENT_STATE  # it is there until its client is reached
                state: ArtefactState = "quarantined" if kept else "purged"
                self.ledger.move_artefact(artefact.path, state, rejected=True)
            for artefact in before:
                self.ledger.move_artefact(artefact.path, "current")
            answered = self.ledger.measured_since(f"v{rejected.number}")
            self.ledger.fail(answered, f"v{rejected.number} was rejected")
        remove(self.files.version(rejected.number))

    def still_known(self) -> str:
        """Say what the newest version still knows of what it should have forgotten, if anything.

        It comes down from those that it was made from, back to one of an exact method, or to one
        that was accepted: the version before that is purged.
        """
        versions, states = {v.number: v for v in self.ledger.versions()}, self.states()
        audits, version = self.ledger.audits(), self.current()
        while version.parent is not None and states[version.parent] == "quarantined":
            if found := traces(version.facts, audits.get(version.number)):
                return f"v{version.number} is not good enough, {found}"
            if version.facts.get("guarantee") == "exact":
                break
            version = versions[version.parent]
        return ""

    def purge(self, machine: Machine, engine: EngineFactory, without: Collection[str] = ()) -> None:
        """Delete what is quarantined, here and with the clients, and what done requests name.

        The requests are closed once nothing is left of it but what clients keep that are gone for
        ever: those they are to be closed ``without``.
        """
        old = [a for a in self.ledger.artefacts("quarantined") if a.kind != CLIENT_STATE]
        for artefact in old:
            remove(self.files.path / artefact.path)
        for number in {a.version for a in old if a.version is not None}:
            remove(self.files.version(number))
        with self.ledger.together():
            for artefact in old:
                self.ledger.move_artefact(artefact.path, "purged")
        done = self.ledger.requests("measured", "closed", "withdrawn")
        self.ledger.forget_ids(*(request.id for request in done))
        for request in done:
            self.files.forget_class(request.id)
        if self.kept_by_clients():
            self.purge_clients(self.newest(machine, engine).trained.federation)
        left = {artefact.client for artefact in self.ledger.artefacts("quarantined")}
        if left <= set(without):
            noted = {"without": sorted(left)} if left else {}
            with self.ledger.together():
                for request in self.ledger.requests("measured"):
                    self.ledger.move(request.id, "closed", **noted)

    def kept_by_clients(self) -> list[Artefact]:
        """Return what clients keep of versions that are purged or rejected."""
        over = {number for number, state in self.states().items() if state == "purged"}
        left = self.ledger.artefacts("quarantined")
        return [a for a in left if a.kind == CLIENT_STATE and a.version in over]

    def purge_clients(self, federation: Federation) -> None:
        """Let the clients that are there delete what they keep of versions that are over."""
        over = self.kept_by_clients()
        keep: dict[str, list[str]] = {artefact.client: [] for artefact in over}
        states = self.states()
        for version in self.ledger.versions():
            if states[version.number] != "purged":  # a reject may still bring it back
                for client, phases in version.facts.get("kept", {}).items():
                    keep.get(client, []).extend(phases)
        done = purge(federation, keep) if keep else []
        with self.ledger.together():
            for artefact in over:
                if artefact.client in done:
                    self.ledger.move_artefact(artefact.path, "purged")

    def clear(self) -> None:
        """Delete what a killed process left beside a version, or of one that is purged."""
        for number, state in self.states().items():
            remove(self.files.work(number))
            if state == "purged":
                remove(self.files.version(number))


def measures_of(final: Final) -> dict[str, Any]:
    """Return how good a model is, as the ledger tells it."""
    return final.model_dump(exclude_none=True, exclude={"per_class"})


def left_out_of(evaluator: Evaluator) -> int:
    """Return how many test samples are in no accuracy, since nobody has their class."""
    return len(evaluator.scenario.test) - evaluator.test_images().accuracy


def facts_of(
    final: Final, costs: Sequence[Cost], spent: Cost | None = None, **more: Any
) -> dict[str, Any]:
    """Return what the ledger tells of a version; ``spent`` is the cost of another try before."""
    cost = sum(costs, spent or Cost()).model_dump()
    return {"measures": measures_of(final), "rounds": len(costs), "cost": cost, **more}
