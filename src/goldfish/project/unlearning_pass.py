"""One unlearning pass: what it honours, how it makes the next version, and when it retrains.

What a pass began with stands in ``pass.json`` beside its rounds: one that was interrupted goes on
with the same requests and the same method, whatever was filed meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from goldfish.data import TensorExamples
from goldfish.errors import ConfigError, DataError, DivergenceError, QuorumError, StoreError
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.evidence import Outcome
from goldfish.experiments.runner import recorded_phase
from goldfish.federation import InProcess
from goldfish.files import write_whole
from goldfish.methods import (
    METHODS,
    Method,
    Plan,
    Trained,
    deletion_kind,
    method_named,
    not_honoured,
    notes_of,
)
from goldfish.methods.records import file
from goldfish.methods.sisa import SisaSettings, place_of
from goldfish.planning import EXACT, FAST
from goldfish.project.asking import Asked, in_library
from goldfish.project.entries import PENDING, Request, Version
from goldfish.project.folder import ProjectFolder, remove
from goldfish.project.holdings import Holdings, next_census
from goldfish.project.ledger import TOLD, Ledger
from goldfish.project.settings import AUTO
from goldfish.project.traces import traces
from goldfish.project.versions import Newest, Versions, facts_of, left_out_of, measures_of
from goldfish.results import MARGINS, Cost, Final, Part, Progress
from goldfish.store import RunDirectory
from goldfish.types import DeletionRequest, States
from goldfish.unlearning.optimization import shard_numbers
from goldfish.workflow import bind, refuse_training, trained_after, unlearning_plan

BEGUN = "pass.json"


class _Begun(Part):
    """The whole of ``pass.json``: what a version in the making is to honour, and how."""

    method: str
    auto: bool
    """It is the fast method, and nobody asked for it by name."""
    requests: list[str]
    parent: int | None = None
    """The version that it starts from; None in a pass of an earlier Goldfish."""
    parent_sha256: str = ""
    settings: str = ""
    """A digest of the settings that it began with; empty in a pass of an earlier Goldfish."""
    tried: dict[str, Any] | None = None
    """What the fast method's model scored, where that was not good enough, or why it failed."""
    spent: Cost = Cost()
    """What the fast method cost then."""
    sha256: str = ""
    """Of the rest."""

    remedy: ClassVar[str] = "Write it anew with 'rm -r {}; goldfish unlearn'."

    def write(self, folder: Path) -> None:
        """Write it so that :meth:`load` sees a change."""
        write_whole(folder / BEGUN, self._sealed().model_dump_json(exclude_unset=True))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read what was written in the folder of a pass, if one began there."""
        path = folder / BEGUN
        if not path.exists():
            return None
        found = cls.read(path)
        if found != found._sealed():
            raise StoreError(
                f"{path} was changed after it was written. Begin anew: delete {folder}, and "
                "run 'goldfish unlearn'."
            )
        return found

    def _sealed(self) -> Self:
        rest = self.model_dump_json(exclude={"sha256"}, exclude_unset=True)
        return self.model_copy(update={"sha256": hashlib.sha256(rest.encode()).hexdigest()})


def requests_begun(folder: Path) -> Sequence[str]:
    """Return the requests of the pass that was interrupted in this folder, if there is one."""
    begun = _Begun.load(folder)
    return () if begun is None else begun.requests


@dataclass(frozen=True)
class _Before:
    """What the new model is compared with."""

    final: Final
    """The version that the pass starts from."""
    accuracy: float
    """Of that version or of the last one that was not repaired: the higher one."""
    images: int
    """How many test images stand behind an accuracy."""
    left_out: int
    """How many do not, since nobody has their class any more."""


@dataclass(frozen=True)
class _Made:
    """The model that becomes the next version, and how it was made."""

    begun: _Begun
    """The pass at its end: its method is the one that made the model."""
    todo: Plan
    done: Outcome
    lost: Mapping[DeletionRequest, str]
    """The requests that it does not honour, and why."""
    final: Final

    @property
    def way(self) -> Method[Any]:
        """The method that made it."""
        return METHODS[self.begun.method]


@dataclass(frozen=True)
class UnlearningPass:
    """A pass over requests, from the newest version of a project to the next one.

    :meth:`ask` and :meth:`shards` say what it comes to; :meth:`run` carries it out.
    """

    files: ProjectFolder
    ledger: Ledger
    start: Newest
    method: str | None = None
    """The method that was asked for by name, in place of that of the settings."""
    tell: Callable[[str], None] = lambda _sentence: None
    """Gets what the user should know meanwhile."""

    def ask(self, requests: Sequence[Request], *, begun: bool = False) -> Asked:
        """Return what these requests come to.

        Clients with data of their own are asked what they have now. A request for a class whose
        client is not there fails; with ``begun``, when none may be left out any more, that raises.
        """
        if not requests:
            raise ConfigError("No request waits: there is nothing to unlearn.")
        contents = {request.id: self.ledger.content(request.id).ids for request in requests}
        holdings = self.start.holdings
        if holdings.elsewhere and not isinstance(self.start.trained.federation, InProcess):
            requests, holdings = self._asked_elsewhere(requests, contents, begun=begun)
        seen = {r.id: self.files.of_class(r.id) or () for r in requests}
        return self.start.registry.resolve(requests, contents, holdings, seen)

    def shards(self, removed: Mapping[str, set[str]]) -> dict[str, list[int]]:
        """Return the shards of each client that hold what is removed; the first one is 1."""
        settings, trained, touched = self.files.settings, self.start.trained, {}
        tables = settings.tables
        for client, keys in removed.items():
            ids = self.start.registry.manifest.clients[client]
            shard = shard_numbers(client, ids, tables.training.shards, tables.seed)
            if trained.method is not None and isinstance(
                division := settings.of_method(trained.method), SisaSettings
            ):
                shard = {key: place_of(key, client, tables.seed, division)[0] for key in keys}
            touched[client] = sorted({shard[key] + 1 for key in keys})
        return touched

    def run(self, device: str) -> Iterator[Progress]:
        """Handle all pending requests and make the next version; yield the progress.

        A pass that was interrupted goes on, with the requests that it began with. No version is
        made where nothing is left to do.
        """
        rounds = self.files.rounds(len(self.ledger.versions()) + 1)
        found_to_do = self._begin(rounds.path)
        if found_to_do is None:
            remove(rounds.path)
            return
        begun, asked = found_to_do
        scenario = self.start.holdings.scenario(
            self.start.registry.gone, device, asked.requests, asked.of_clients()
        )
        evaluator = Evaluator(scenario, device)
        final = evaluator.measure(self.start.trained.params, asked.requests)
        images = evaluator.test_images().accuracy
        base, left_out = self._base_accuracy(images), left_out_of(evaluator)
        before = _Before(final, max(final.accuracy, base), images, left_out)
        made = yield from self._make(begun, asked, rounds, evaluator, before)
        self._publish(made, asked, before)

    # Which requests, and which method

    def _asked_elsewhere(
        self, requests: Sequence[Request], contents: Mapping[str, Sequence[str]], *, begun: bool
    ) -> tuple[Sequence[Request], Holdings]:
        """Ask clients with data of their own what they have now, and what of it is of a class.

        Return that, and the requests for which it is known.
        """
        asked = []
        for r in requests:
            keys = self.start.registry.keys(r.client, r.kind, contents[r.id], None)
            asked.append(in_library(r, contents[r.id], keys))
        holdings = next_census(self.start.holdings, self.start.trained.federation, asked)
        known = holdings.classes
        away = [
            r
            for r in requests
            if r.kind == "class" and (r.client, int(contents[r.id][0])) not in known
        ]
        requests = [r for r in requests if r not in away]
        if away and (begun or not requests):
            raise QuorumError(
                f"{away[0].client} is not there, and it alone knows which of its samples "
                f"{away[0].id} names. Try again when it is back."
            )
        self.ledger.fail((r.id for r in away), "the client was not there")
        for r in requests:
            if r.kind == "class" and self.files.of_class(r.id) is None:
                self.files.keep_class(r.id, known[r.client, int(contents[r.id][0])])
        return requests, holdings

    def _begin(self, folder: Path) -> tuple[_Begun, Asked] | None:
        """Return the pass that was interrupted, or a new one, and what it is to honour.

        One without the requests for samples that are not in the data any more is discarded. None:
        there is nothing left to do.
        """
        unlearning = self.files.settings.tables.unlearning
        chosen = [unlearning.method, unlearning.rounds, self.files.settings.methods]
        settings = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
        begun = self._interrupted(folder, settings)
        if begun is not None:
            waiting = list(map(self.ledger.request, begun.requests))
            try:
                return begun, self.ask(waiting, begun=True)
            except DataError:
                if {request.id for request in self._pending()} <= set(begun.requests):
                    raise
            self.ask(self._pending())  # it raises where newer requests do not name them either
            self.tell("A newer request is for samples that were deleted: the pass starts over.")
            remove(folder)
        asked = self._without_absent(self.ask(self._pending()))
        if not asked.by_request:
            return None
        name = self._way(asked)
        begun = _Begun(
            method=name,
            auto=name == FAST and (self.method or unlearning.method) == AUTO,
            requests=list(asked.by_request),
            parent=self.start.version.number,
            parent_sha256=self.start.version.sha256,
            settings=settings,
        )
        # It raises before anything is noted.
        _refuse_missing(self._todo(name, asked, self.start.holdings.test), asked, name)
        begun.write(folder)
        return begun, asked

    def _interrupted(self, folder: Path, settings: str) -> _Begun | None:
        """Return the pass that was interrupted here, if it can go on.

        One that started from another version, which was rejected since, or with other settings is
        discarded.
        """
        begun, version = _Begun.load(folder), self.start.version
        if begun is None:
            return None
        if (begun.parent, begun.parent_sha256) != (version.number, version.sha256):
            remove(folder)
            return None
        if begun.settings not in ("", settings):
            self.tell("Settings were changed: the interrupted pass starts over.")
            remove(folder)
            return None
        if self.method not in (None, begun.method):
            raise ConfigError(
                f"{folder.name} is being made with {begun.method}. Go on without --method, or "
                f"delete {folder} to begin anew."
            )
        return begun

    def _pending(self) -> list[Request]:
        return self.ledger.requests(*PENDING)

    def _without_absent(self, asked: Asked) -> Asked:
        """Leave the requests of clients that are not there open, and end those that are done.

        A client that leaves need not be there, unless the method asks for its help.
        """
        for request in asked.done:
            self.ledger.advance(request, "measured", note="there was nothing left of it")
        if not asked.by_request:
            return asked
        needed = self._todo(self._way(asked), asked, self.start.holdings.test).askers
        trained, telling = self.start.trained, partial(self._note_told, asked)
        failures = file(trained.federation, asked.requests, trained.honoured, telling)
        absent = {failure.client_id for failure in failures}
        away = [
            r
            for r, own in asked.by_request.items()
            if own.client_id in absent
            and (deletion_kind(own) != "client" or own.client_id in needed)
        ]
        self.ledger.fail(away, "the client was not there")
        left = {r: own for r, own in asked.by_request.items() if r not in away}
        if not left:
            why = "; ".join(f"{own.client_id}: {own.cause or own.error}" for own in failures)
            raise QuorumError(
                f"No client that asked has answered ({why}): the requests stay open. Run "
                "'goldfish unlearn' again when they are there."
            )
        left_asked = replace(asked, by_request=left)
        self._note_told(left_asked, absent)  # those that leave: a round may tell them
        return left_asked

    def _note_told(self, asked: Asked, clients: Collection[str]) -> None:
        """Note that these clients are about to be told of what is asked of them."""
        if self.files.settings.on_flower:
            with self.ledger.together():
                for request, own in asked.by_request.items():
                    if own.client_id in clients:
                        self.ledger.record(TOLD, {}, request)

    def _way(self, asked: Asked) -> str:
        """Return the method to take."""
        name = self.method or self.files.settings.tables.unlearning.method
        if name != AUTO:
            return name
        leaves = any(deletion_kind(request) == "client" for request in asked.requests)
        return self.start.trained.method or (EXACT if leaves or asked.missing else FAST)

    def _todo(self, name: str, asked: Asked, test: TensorExamples) -> Plan:
        """Return how a method makes the next version; raise where it cannot do what is asked."""
        method, tables = method_named(name), self.files.settings.tables
        own = self.files.settings.of_method(name)
        refuse_training(self.start.trained, method, own)
        return unlearning_plan(
            self.start.trained,
            asked.requests,
            method,
            own,
            training=tables.training,
            rounds=tables.unlearning.rounds or tables.training.rounds,
            seed=tables.seed + self.start.version.number,  # each version has draws of its own
            test=test,
        )

    # How the next version is made

    def _base_accuracy(self, images: int) -> float:
        """Return the accuracy of the last version that was trained, and not repaired.

        It is 0 where another number of test images stood behind it: those of other classes.
        """
        versions = {found.number: found for found in self.ledger.versions()}
        version = self.start.version
        while "base" not in version.facts and version.facts.get("guarantee", "exact") != "exact":
            version = versions[version.parent or 1]
        measures = version.facts["measures"]
        behind = 0 if "removed_class_accuracy" in measures else len(self.start.holdings.test)
        base = {"accuracy": measures["accuracy"], "images": behind, **version.facts.get("base", {})}
        return float(base["accuracy"]) if base["images"] == images else 0.0

    def _make(
        self,
        begun: _Begun,
        asked: Asked,
        rounds: RunDirectory,
        evaluator: Evaluator,
        before: _Before,
    ) -> Generator[Progress, None, _Made]:
        """Let the method make a model.

        Where "auto" took the fast one, and it failed, or its model lost too much accuracy or still
        knows what it should have forgotten, the pass retrains.
        """
        while True:
            todo = self._todo(begun.method, asked, evaluator.scenario.test)
            way, own = METHODS[begun.method], self.files.settings.of_method(begun.method)
            for request in begun.requests:
                self.ledger.advance(request, "running", method=begun.method)
            try:
                _refuse_missing(todo, asked, begun.method)
                work, states = bind(way.unlearn, own), self.start.trained.states or {}
                done = yield from recorded_phase(todo, work, rounds, evaluator, states)
                lost = _lost(todo, done, asked)
            except (ConfigError, DataError, DivergenceError, QuorumError) as error:
                noted = error.said if isinstance(error, QuorumError) else str(error)
                if not begun.auto:
                    self.ledger.fail(begun.requests, noted)
                    remove(rounds.path)
                    raise
                self.tell(f"{begun.method} failed, and the pass retrains: {error}")
                tried = {"failed": noted}
            else:
                final = evaluator.measure(done.params, asked.requests)
                tried = measures_of(final)
                compared = {"measures": tried, "before": measures_of(before.final)}
                known = traces({**compared, "guarantee": way.guarantee})
                worse = before.accuracy - final.accuracy >= MARGINS.collapse
                if not begun.auto or not (known or worse):
                    return _Made(begun, todo, done, lost, final)
                tried |= {"traces": known} if known else {}
            spent = sum((r.cost for r in rounds.load(todo.phase)[1]), Cost())
            then = {"method": EXACT, "auto": False, "tried": tried, "spent": spent}
            begun = begun.model_copy(update=then)
            begun.write(rounds.path)

    # What it leaves

    def _publish(self, made: _Made, asked: Asked, before: _Before) -> None:
        """Publish what was made as the next version; requests that it does not honour failed."""
        failed = {r: made.lost[d] for r, d in asked.by_request.items() if d in made.lost}
        honoured = [r for r in asked.by_request if r not in failed]
        removed = asked.of_clients(honoured)
        gone = {c: keys | removed.get(c, set()) for c, keys in self.start.registry.gone.items()}
        Versions(self.files, self.ledger).publish(
            self._trained(made, removed),
            made.begun.method,
            self._facts(made, before, removed) | {"deleted_before": asked.missing},
            gone,
            parent=self.start.version.number,
            requests=honoured,
        )
        for request, reason in failed.items():
            self.ledger.fail([request], reason)

    def _trained(self, made: _Made, removed: Mapping[str, set[str]]) -> Trained:
        """Return the new model without what knew removed samples: no client has them any more."""
        leaves = [d for d in made.todo.requests if deletion_kind(d) == "client"]
        before = self.start.trained.states or {}
        return replace(
            trained_after(made.todo, made.done.params, made.done.memo, []),
            history={},
            states=_free(made.done.states, before, made.way, removed),
            honoured=[d for d in leaves if d not in made.lost],
        )

    def _facts(
        self, made: _Made, before: _Before, removed: Mapping[str, set[str]]
    ) -> dict[str, Any]:
        """Return what the ledger tells of the new version."""
        settings, begun, way = self.files.settings, made.begun, made.way
        own = settings.of_method(begun.method)
        accuracy = made.final.accuracy if way.guarantee == "exact" else before.accuracy
        facts = facts_of(
            made.final,
            [record.cost for record in made.done.records],
            begun.spent,
            guarantee=way.guarantee,
            notes=list(notes_of(way, made.todo, own)),
            left_out=before.left_out,
            before=measures_of(before.final),
            base={"accuracy": accuracy, "images": before.images},
            tried={FAST: begun.tried} if begun.tried else {},
            settings={"rounds": made.todo.rounds, **own.model_dump(mode="json")},
        )
        if way.prepare is not None or settings.tables.training.shards > 1:
            facts["shards"] = self.shards(removed)
        if settings.on_flower:
            facts["kept"] = _phases(self.start.version, made.todo, way, removed)
        return facts


def _refuse_missing(todo: Plan, asked: Asked, method: str) -> None:
    """Raise where a method needs samples that are not in the data any more."""
    if asked.missing and todo.askers:
        raise ConfigError(
            f"{sum(asked.missing.values())} of the samples that are to be forgotten are not in the "
            f"data any more, and {method} must show them to the old model once more. Use a method "
            "that starts anew: --method retrain."
        )


def _lost(todo: Plan, done: Outcome, asked: Asked) -> dict[DeletionRequest, str]:
    """Return the requests that a finished pass does not honour, and why; raise if none is."""
    absences = [record.absent for record in done.records]
    lost = {left.request: left.reason for left in not_honoured(todo, absences, done.params)}
    if lost.keys() >= set(asked.requests):
        raise QuorumError(
            f"No request was honoured ({next(iter(lost.values()))}). They stay open, and the "
            "newest model is the one of before."
        )
    return lost


def _free(
    states: States, before: States, way: Method[Any], touched: Mapping[str, object]
) -> States:
    """Return what clients keep for a new version: nothing that knows removed samples.

    Where shards were trained alone, those of clients that lost nothing are as they were.
    """
    if way.prepare is None:
        return states
    others = {c: dict(kept) for c, kept in before.items() if c not in touched}
    return {**others, **{c: {**others.get(c, {}), **kept} for c, kept in states.items()}}


def _phases(
    before: Version, todo: Plan, way: Method[Any], touched: Mapping[str, object]
) -> dict[str, list[str]]:
    """Return the phases of which each client may keep shard models: as :func:`_free`."""
    kept: Mapping[str, list[str]] = before.facts.get("kept", {}) if way.prepare is not None else {}
    return {
        client: [*([] if client in touched else kept.get(client, [])), todo.phase]
        for client in todo.federation.client_ids
    }
