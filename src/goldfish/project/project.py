"""A project: one's own federation, its model versions, and the requests to forget.

Every call that changes something can be killed at any time and called again: files appear whole,
and what the ledger says happened, happened.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from goldfish.data import TensorExamples
from goldfish.errors import ConfigError, DataError, DivergenceError, QuorumError, StoreError
from goldfish.experiments.engine import EngineFactory, in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.evidence import Outcome
from goldfish.experiments.runner import recorded_phase
from goldfish.experiments.scenario import Machine
from goldfish.federation import InProcess
from goldfish.files import make_folder, write_whole
from goldfish.flower.submit import project_on_flower
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
from goldfish.planning import EXACT, FAST, Advice, plan
from goldfish.project import FILE, find_project
from goldfish.project.asking import Asked, Registry, in_library, refuse_named
from goldfish.project.folder import ProjectFolder, private, remove
from goldfish.project.holdings import next_census
from goldfish.project.ledger import (
    PENDING,
    TOLD,
    Artefact,
    Kind,
    Ledger,
    Request,
    Version,
)
from goldfish.project.settings import AUTO, TEMPLATE, ProjectSettings
from goldfish.project.traces import traces
from goldfish.project.versions import Newest, Versions, facts_of, measures_of
from goldfish.results import MARGINS, Cost, Part, Progress
from goldfish.store import KeptHistory
from goldfish.types import DeletionRequest, Federation, States
from goldfish.unlearning.optimization import shard_numbers
from goldfish.workflow import (
    Work,
    bind,
    original_training,
    own_training,
    refuse_training,
    trained_after,
    training_plan,
    unlearning_plan,
)

IN_PROCESS: EngineFactory = partial(in_process, remember=True)
"""The engine whose clients live in this process: they never train on removed samples again."""
BEGUN = "pass.json"


class _Pass(Part):
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

    def write(self, path: Path) -> None:
        """Write it so that :meth:`begun` sees a change."""
        write_whole(path, self._sealed().model_dump_json(exclude_unset=True))

    @classmethod
    def begun(cls, path: Path) -> Self:
        """Read what was written."""
        found = cls.read(path)
        if found != found._sealed():
            raise StoreError(
                f"{path} was changed after it was written. Begin anew: delete {path.parent}, and "
                "run 'goldfish unlearn'."
            )
        return found

    def _sealed(self) -> Self:
        rest = self.model_dump_json(exclude={"sha256"}, exclude_unset=True)
        return self.model_copy(update={"sha256": hashlib.sha256(rest.encode()).hexdigest()})


@dataclass(frozen=True)
class ProjectPlan:
    """What it takes to handle the pending requests."""

    advice: Advice
    shards: Mapping[str, Sequence[int]]
    """The shards of each client whose data is removed, from 1 on; one shard is all its data."""
    artefacts: Sequence[str]
    """The models and updates that know the data, and will be superseded."""


class Project:
    """A project directory. :meth:`init` makes one, :meth:`open` opens it; a context manager.

    With ``engine = "flower"`` in its settings, what needs the clients is handed over to a server
    app, where ``engine`` is set. ``tell`` gets what the user should know meanwhile.
    """

    def __init__(self, files: ProjectFolder, ledger: Ledger) -> None:
        self.files = files
        self.folder = files.path
        self.ledger = ledger
        self._versions = Versions(files, ledger)
        self.engine: EngineFactory | None = None if files.settings.on_flower else IN_PROCESS
        self.tell: Callable[[str], None] = lambda _sentence: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.ledger.close()

    @staticmethod
    def init(folder: Path) -> Path:
        """Make a project directory with a configuration that works as it stands; return that."""
        path = folder / FILE
        try:
            if path.exists():
                raise StoreError(f"{folder} is a project already: it has a {FILE}.")
            with private():
                make_folder(folder)
                folder.chmod(0o700)
                write_whole(path, TEMPLATE)
        except OSError as error:
            raise StoreError(
                f"No project can be made in {folder}: {error.strerror}. It needs a folder of your "
                "own, in which you may write: 'goldfish init DIR'."
            ) from error
        return path

    @classmethod
    def open(cls, folder: Path, *, to_read: bool = False) -> Project:
        """Open the project of this folder, or of the nearest one above it.

        With ``to_read`` it may lie where nothing can be written.
        """
        found = find_project(folder)
        if found is None:
            raise ConfigError(
                f"{folder} is no project: there is no {FILE}, here or above. "
                "'goldfish init DIR' makes one; --project DIR names one."
            )
        settings = ProjectSettings.read(found / FILE)
        files, url = ProjectFolder(found, settings), settings.tables.ledger
        place = url if "://" in url else found / url
        if not Path(place).exists() and "://" not in url:
            files.refuse_other_ledger(0, str(place))  # before an empty one is made
        try:
            with private():
                ledger = Ledger.open(place)
        except StoreError:
            if not to_read or not Path(place).exists():
                raise
            ledger = Ledger.open(place, read_only=True)
        try:
            files.refuse_other_ledger(len(ledger.versions()), ledger.name)
        except BaseException:
            ledger.close()
            raise
        return cls(files, ledger)

    @property
    def settings(self) -> ProjectSettings:
        """What ``goldfish.toml`` says."""
        return self.files.settings

    # Versions

    def train(self, machine: Machine) -> Iterator[Progress]:
        """Train version 1, or go on with it; yield the progress.

        As long as there is no version, settings and data are read anew: a training that began with
        others starts over. Nothing is yielded where a version is there already.
        """
        if self.engine is None:
            yield from self.hand_over("train", machine)
            return
        with self.working():
            if self.ledger.versions():
                self.files.refuse_changes()
                return
            holdings = self.files.holdings(machine, self.engine)
            training, seed = self.settings.tables.training, self.settings.tables.seed
            own = self.settings.own_training
            scenario = holdings.scenario({}, machine.device)
            federation = self.engine(scenario, machine, holdings.run_id)
            kept: set[int] = set()
            if own is None:
                todo = training_plan(federation, training, seed, scenario.test)
                work: Work = original_training
                for name in self.settings.tables.unlearning.keep_for:
                    of_method = self.settings.of_method(name)
                    kept.update(METHODS[name].kept_rounds(of_method, training.rounds))
                trained_by: Any = sorted(kept)
            else:
                of_own = self.settings.of_method(own.name)
                todo, work = own_training(federation, own, of_own, training, seed, scenario.test)
                trained_by = [own.name, of_own.model_dump(mode="json")]
            begun = json.dumps([self.settings.pinned, trained_by, holdings.content])
            rounds, discarded = self.files.first_rounds(hashlib.sha256(begun.encode()).hexdigest())
            if discarded:
                self.tell("Settings or data were changed: the interrupted training starts over.")
            history = KeptHistory(rounds, kept)
            evaluator = Evaluator(scenario, machine.device)
            done = yield from recorded_phase(todo, work, rounds, evaluator, history=history)
            trained = Trained(
                federation,
                done.params,
                training,
                seed,
                phase=todo.phase,
                history=history,
                method=None if own is None else own.name,
                memo=done.memo,
                states=done.states,
            )
            facts = facts_of(evaluator.measure(done.params), [r.cost for r in done.records])
            if self.settings.on_flower:
                facts["kept"] = {client: [todo.phase] for client in federation.client_ids}
            self._versions.publish(trained, "train", facts, {})

    def adopt(self, checkpoint: Path, machine: Machine) -> Version:
        """Take a model that was trained elsewhere, with this project's data, as version 1."""
        if self.engine is None:
            list(self.hand_over("import", machine, str(checkpoint.resolve())))
            return self.current()
        with self.working():
            if self.ledger.versions():
                raise StoreError(
                    f"{self.folder} has a model already. 'goldfish import' is for a new project."
                )
            if self.files.in_training:
                raise StoreError(
                    f"{self.folder} has a model in training. Go on with 'goldfish train', or "
                    f"delete {self.files.work(1)} to import one."
                )
            state = _read_state(checkpoint)
            holdings = self.files.holdings(machine, self.engine)
            tables = self.settings.tables
            scenario = holdings.scenario({}, machine.device)
            federation = self.engine(scenario, machine, holdings.run_id)
            values = tables.training.model_dump()
            trained = Trained.from_state_dict(federation, state, seed=tables.seed, **values)
            facts = facts_of(Evaluator(scenario, machine.device).measure(trained.params), [])
            make_folder(self.files.work(1))  # as long as it is there, the version is in the making
            return self._versions.publish(trained, "import", facts, {})

    def current(self) -> Version:
        """Return the newest model version that was not rejected."""
        return self._versions.current()

    def load(self, version: Version, federation: Federation) -> Trained:
        """Return a model version, once its file is seen to be the one that was written."""
        return self._versions.load(version, federation)

    def samples(self, machine: Machine) -> dict[str, list[str]]:
        """Return the ids of the samples that each client has, less those that are removed.

        Of clients with data of their own they are known by their keys alone.
        """
        version, holdings = self.current(), self.files.holdings(machine)
        clients = holdings.clients(self.files.gone(version.number))
        return {c.id: [holdings.ids.get(key, key) for key in c.retained.ids] for c in clients}

    @property
    def class_names(self) -> Sequence[str]:
        """The classes of the model, in order; none in a project of an earlier Goldfish."""
        self.current()
        return self.files.pinned().class_names

    # Requests

    def pending(self) -> list[Request]:
        """Return the requests that are still to be handled, oldest first."""
        return self.ledger.requests(*PENDING)

    def forget(
        self,
        client: str,
        *,
        samples: Sequence[str] | None = None,
        label: int | None = None,
        machine: Machine,
        reason: str = "",
        requested_at: datetime | None = None,
    ) -> Request:
        """File a request: samples by id, a class, or (neither given) all that the client has.

        It is checked against what the client had when the model was trained. The same request
        again is the one that was filed.
        """
        version = self.current()
        self.files.refuse_changes()
        registry = Registry.of_version(self.files, version.number)
        left = registry.left(client)
        if not left:
            raise ConfigError(
                f"{client} has left with all of its data: v{version.number} is free of it."
            )
        kind: Kind = "all"
        content: Sequence[str] = ()
        if samples is not None:
            kind, content = "samples", tuple(registry.named(client, samples))
            if self.files.pinned().data is not None:
                self.files.holdings(machine)  # it refuses other data than that of the training
            registry.check_samples(client, content, self.ledger.requests("measured", "closed"))
        elif label is not None:
            kind, content = "class", (str(label),)
            classes = len(self.files.pinned().class_names)
            if label < 0 or 0 < classes <= label:
                raise ConfigError(
                    f"The model has no class {label}: it has 0 to {classes - 1}. Nothing was filed."
                )
        pending = [(other, self.ledger.content(other.id).ids) for other in self.pending()]
        for other, asked in pending:
            if (other.client, other.kind, asked) == (client, kind, content):
                return other
        theirs = self.settings.members is not None  # then a client alone knows its classes
        of_class = "class" in (kind, *(other.kind for other, _ in pending)) and not theirs
        holdings = self.files.holdings(machine) if of_class else None
        unknown = theirs and kind == "class"
        keys = registry.keys(client, kind, content, holdings) & left
        if holdings is not None and not keys:
            why = f"{client} has no sample of class {label}."
            if lost := len(holdings.missing(client) - registry.gone[client]):
                why = (
                    f"{client} has no sample of class {label} in the data any more. {lost} of its "
                    "samples that the model was trained with are not there, and may be of this "
                    "class: name their ids with --samples."
                )
            raise ConfigError(f"{why} Nothing was filed.")
        named = {client: keys}
        for other, asked in pending:
            seen = self.files.of_class(other.id) or ()
            own = registry.keys(other.client, other.kind, asked, holdings, seen)
            named[other.client] = named.get(other.client, set()) | own
        if registry.empties(named):
            raise ConfigError(
                "With this request all data of all clients is asked for, and no model can be made "
                "of none. Nothing was filed: delete the project's folder instead."
            )
        if kind == "samples":
            self._refuse_named(reason, content)
        with self.ledger.together():
            known = {request.id for request in self.ledger.requests()}
            filed = self.ledger.file(
                client,
                kind,
                content,
                count=None if unknown else len(keys),
                reason=reason,
                requested_at=requested_at,
                due_days=self.settings.tables.requests.due_days,
            )
            if kind == "class" and not unknown and filed.id not in known:
                self.files.keep_class(filed.id, keys)
        return filed

    def withdraw(self, request_id: str, reason: str) -> Request:
        """Take a request back that is not handled yet; what it names is forgotten.

        A pass in the making that would honour it is discarded. On Flower it is too late once its
        client was told: the client trains without the samples then.
        """
        with self.working():
            request = self.ledger.request(request_id)
            told = any(event.kind == TOLD for event in self.ledger.events(request_id))
            if request.state not in (*PENDING, "withdrawn") or told:
                why = f"it is {request.state}"
                if request.state in PENDING:
                    why = f"{request.client} was told of it, and trains without the samples"
                elif request.state != "closed":
                    why += ": 'goldfish reject' takes the new version back first"
                raise ConfigError(f"{request_id} cannot be withdrawn any more: {why}.")
            if request.kind == "samples" and request.state != "withdrawn":
                self._refuse_named(reason, self.ledger.content(request_id).ids)
            making = self.files.work(len(self.ledger.versions()) + 1)
            if (making / BEGUN).exists() and request_id in _Pass.begun(making / BEGUN).requests:
                remove(making)
            self.ledger.withdraw(request_id, reason)
            self.files.forget_class(request_id)
        return self.ledger.request(request_id)

    def plan(self, machine: Machine, methods: Sequence[str] = ()) -> ProjectPlan:
        """Say what each of these methods, or of all, would cost for the pending requests.

        Times are those of a few measured steps, scaled by what the training took here.
        """
        now = self._versions.newest(machine, IN_PROCESS)  # methods are rehearsed here
        asked = self._ask(self.pending(), now)
        tables = self.settings.tables
        advice = plan(
            now.trained,
            asked.requests,
            methods={n: self.settings.methods.get(n, {}) for n in methods or METHODS},
            rounds=tables.unlearning.rounds,
            test=now.holdings.test.to(machine.device),
            seconds_per_sample=self.seconds_per_sample(),
        )
        shards = self._shards(now, asked.of_clients())
        for request in self.ledger.requests("received"):
            self.ledger.move(request.id, "planned", advised=advice.method)
        return ProjectPlan(advice, shards, [a.path for a in self.ledger.artefacts("current")])

    # Unlearning

    def unlearn(self, machine: Machine, method: str | None = None) -> Iterator[Progress]:
        """Handle all pending requests in one pass and make a new version; yield the progress.

        A pass that was interrupted goes on, with the requests that it began with. Where "auto" took
        the fast method, and it failed, or its model lost too much accuracy or still knows what it
        should have forgotten, the pass retrains. No version is made where nothing is left to do:
        other requests have removed it all.
        """
        if self.engine is None:
            yield from self.hand_over("unlearn", machine, method or "")
            return
        with self.working():
            now = self._versions.newest(machine, self.engine)
            self._versions.purge_clients(now.trained.federation)
            rounds = self.files.rounds(len(self.ledger.versions()) + 1)
            found_to_do = self._begin(now, rounds.path, method)
            if found_to_do is None:
                remove(rounds.path)
                return
            begun, asked = found_to_do
            scenario = now.holdings.scenario(
                now.registry.gone, machine.device, asked.requests, asked.of_clients()
            )
            evaluator = Evaluator(scenario, machine.device)
            before = evaluator.measure(now.trained.params, asked.requests)
            images = evaluator.test_images().accuracy
            base = max(before.accuracy, self._base_accuracy(now, images))
            states = now.trained.states or {}
            while True:
                todo = self._todo(begun.method, now, asked, scenario.test)
                way, own = METHODS[begun.method], self.settings.of_method(begun.method)
                for request in begun.requests:
                    self.ledger.advance(request, "running", method=begun.method)
                try:
                    _refuse_missing(todo, asked, begun.method)
                    work = bind(way.unlearn, own)
                    done = yield from recorded_phase(todo, work, rounds, evaluator, states)
                    lost = _lost(todo, done, asked)
                except (ConfigError, DataError, DivergenceError, QuorumError) as error:
                    if not begun.auto:
                        self.ledger.fail(begun.requests, str(error))
                        remove(rounds.path)
                        raise
                    tried = {"failed": str(error)}
                else:
                    found = evaluator.measure(done.params, asked.requests)
                    tried = measures_of(found)
                    made = {"measures": tried, "before": measures_of(before)}
                    known = traces({**made, "guarantee": way.guarantee})
                    if not begun.auto or not (known or base - found.accuracy >= MARGINS.collapse):
                        break
                    tried |= {"traces": known} if known else {}
                spent = sum((r.cost for r in rounds.load(todo.phase)[1]), Cost())
                then = {"method": EXACT, "auto": False, "tried": tried, "spent": spent}
                begun = begun.model_copy(update=then)
                begun.write(rounds.path / BEGUN)
            if way.guarantee == "exact":
                base = found.accuracy
            facts = facts_of(
                found,
                [record.cost for record in done.records],
                begun.spent,
                guarantee=way.guarantee,
                notes=list(notes_of(way, todo, own)),
                before=measures_of(before),
                base={"accuracy": base, "images": images},
                tried={FAST: begun.tried} if begun.tried else {},
                settings={"rounds": todo.rounds, **own.model_dump(mode="json")},
            )
            failed = {r: lost[d] for r, d in asked.by_request.items() if d in lost}
            honoured = [r for r in asked.by_request if r not in failed]
            removed = asked.of_clients(honoured)
            leaves = [d for d in todo.requests if deletion_kind(d) == "client"]
            after = replace(
                trained_after(todo, done.params, done.memo, []),
                # What knew removed samples is not kept, and no client has them any more.
                history={},
                states=_free(done.states, states, way, removed),
                honoured=[d for d in leaves if d not in lost],
            )
            if way.prepare is not None or self.settings.tables.training.shards > 1:
                facts["shards"] = self._shards(now, removed)
            if self.settings.on_flower:
                facts["kept"] = _phases(now.version, todo, way, removed)
            gone = {c: keys | removed.get(c, set()) for c, keys in now.registry.gone.items()}
            parent = now.version.number
            self._versions.publish(
                after, begun.method, facts, gone, parent=parent, requests=honoured
            )
            for request, reason in failed.items():
                self.ledger.fail([request], reason)

    # What becomes of versions

    def reject(self) -> Version:
        """Take the newest version back, as long as the one before is not purged; return that.

        Its requests are open again. A pass that was interrupted, which started from it, is
        discarded.
        """
        with self.working():
            self._versions.reject()
        return self.current()

    def purge(
        self, machine: Machine | None = None, *, dry_run: bool = False, anyway: bool = False
    ) -> list[Artefact]:
        """Delete what descends from removed samples, and return it; requests are then closed.

        To purge is to accept the newest version: there is no way back. On Flower clients delete
        what they keep, too. As long as one cannot be reached, requests are not closed: its part is
        quarantined, and deleted by the next purge or unlearning that reaches it. A version that
        still knows what it should have forgotten is accepted ``anyway`` only.
        """
        old = self.ledger.artefacts("quarantined")
        if dry_run or not (old or self.ledger.requests("measured")):
            return old
        if not anyway and (found := self.still_known()):
            raise ConfigError(
                f"{found}: nothing was deleted. Run 'goldfish reject', then 'goldfish unlearn "
                "--method retrain'; or let 'goldfish audit' look closer. 'goldfish purge --anyway' "
                "accepts it all the same."
            )
        if self.engine is None:
            list(self.hand_over("purge", machine or Machine()))
        else:
            with self.working():
                self._versions.purge(machine or Machine(), self.engine)
        left = {artefact.path for artefact in self.ledger.artefacts("quarantined")}
        return [artefact for artefact in old if artefact.path not in left]

    def still_known(self) -> str:
        """Say what the newest version still knows of what it should have forgotten, if anything.

        It comes down from those that it was made from, back to one of an exact method, or to one
        that was accepted: the version before that is purged.
        """
        return self._versions.still_known()

    def outstanding(self) -> list[str]:
        """Return the clients that must still delete what they keep, since a purge or a reject."""
        return sorted({artefact.client for artefact in self._versions.kept_by_clients()})

    # Parts of the above

    def seconds_per_sample(self) -> float | None:
        """Return how long a sample took in the first version that was trained here."""
        costs = (version.facts["cost"] for version in self.ledger.versions())
        return next((cost["seconds"] / cost["samples"] for cost in costs if cost["samples"]), None)

    def written(self, version: Version) -> Path:
        """Return the model file of a version, once it is seen to be the one that was written."""
        return self._versions.written(version)

    def hand_over(self, command: str, machine: Machine, what: str = "") -> Iterator[Progress]:
        """Let a server app, which can reach the clients, carry a command out."""
        with private():
            yield from project_on_flower(
                self.settings.tables.flower,
                self.folder / "work" / "flower",  # where it tells what it does
                machine,
                {"project": str(self.folder), "command": command, "what": what},
                tell=self.tell,
            )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let this process alone change the project, and clear what a killed one left."""
        with self.files.working():
            self._versions.clear()
            yield

    def _refuse_named(self, reason: str, ids: Sequence[str]) -> None:
        if self.files.pinned().data is None:  # positions are no names: any number could be one
            refuse_named(reason, ids)

    def _ask(self, requests: Sequence[Request], now: Newest, *, begun: bool = False) -> Asked:
        if not requests:
            raise ConfigError("No request waits: there is nothing to unlearn.")
        contents = {request.id: self.ledger.content(request.id).ids for request in requests}
        holdings = now.holdings
        if holdings.elsewhere and not isinstance(now.trained.federation, InProcess):
            asked = []
            for r in requests:
                keys = now.registry.keys(r.client, r.kind, contents[r.id], None)
                asked.append(in_library(r, contents[r.id], keys))
            holdings = next_census(holdings, now.trained.federation, asked)
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
        seen = {r.id: self.files.of_class(r.id) or () for r in requests}
        return now.registry.resolve(requests, contents, holdings, seen)

    def _shards(self, now: Newest, removed: Mapping[str, set[str]]) -> dict[str, list[int]]:
        """Return the shards of each client that hold what is removed; the first one is 1."""
        tables, own, touched = self.settings.tables, now.trained.method, {}
        for client, keys in removed.items():
            ids = now.registry.manifest.clients[client]
            shard = shard_numbers(client, ids, tables.training.shards, tables.seed)
            if own is not None and isinstance(
                division := self.settings.of_method(own), SisaSettings
            ):
                shard = {key: place_of(key, client, tables.seed, division)[0] for key in keys}
            touched[client] = sorted({shard[key] + 1 for key in keys})
        return touched

    def _without_absent(self, asked: Asked, now: Newest, method: str | None) -> Asked:
        """Leave the requests of clients that are not there open, and end those that are done.

        A client that leaves need not be there, unless the method asks for its help.
        """
        for request in asked.done:
            self.ledger.advance(request, "measured", note="there was nothing left of it")
        if not asked.by_request:
            return asked
        needed = self._todo(self._way(asked, now, method), now, asked, now.holdings.test).askers
        if self.settings.on_flower:
            with self.ledger.together():
                for request in asked.by_request:
                    self.ledger.record(TOLD, {}, request)
        absent = set(file(now.trained.federation, asked.requests, now.trained.honoured))
        away = [
            r
            for r, own in asked.by_request.items()
            if own.client_id in absent
            and (deletion_kind(own) != "client" or own.client_id in needed)
        ]
        self.ledger.fail(away, "the client was not there")
        left = {r: own for r, own in asked.by_request.items() if r not in away}
        if not left:
            raise QuorumError(
                f"No client that asked is there ({', '.join(sorted(absent))}): the requests stay "
                "open."
            )
        return replace(asked, by_request=left)

    def _begin(self, now: Newest, folder: Path, method: str | None) -> tuple[_Pass, Asked] | None:
        """Return the pass that was interrupted, or a new one, and what it is to honour.

        One that started from another version, which was rejected since, or with other settings is
        discarded; so is one without the requests for samples that are not in the data any more.
        None: there is nothing left to do.
        """
        path, origin = folder / BEGUN, (now.version.number, now.version.sha256)
        unlearning = self.settings.tables.unlearning
        chosen = [unlearning.method, unlearning.rounds, self.settings.methods]
        settings = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
        begun = _Pass.begun(path) if path.exists() else None
        if begun is not None and (begun.parent, begun.parent_sha256) != origin:
            remove(folder)
            begun = None
        if begun is not None and begun.settings not in ("", settings):
            self.tell("Settings were changed: the interrupted pass starts over.")
            remove(folder)
            begun = None
        if begun is not None:
            if method not in (None, begun.method):
                raise ConfigError(
                    f"{folder.name} is being made with {begun.method}. Go on without --method, or "
                    f"delete {folder} to begin anew."
                )
            waiting = list(map(self.ledger.request, begun.requests))
            try:
                return begun, self._ask(waiting, now, begun=True)
            except DataError:
                if {request.id for request in self.pending()} <= set(begun.requests):
                    raise
            self._ask(self.pending(), now)  # it raises where newer requests do not name them either
            self.tell("A newer request is for samples that were deleted: the pass starts over.")
            remove(folder)
        asked = self._without_absent(self._ask(self.pending(), now), now, method)
        if not asked.by_request:
            return None
        name = self._way(asked, now, method)
        begun = _Pass(
            method=name,
            auto=name == FAST and (method or unlearning.method) == AUTO,
            requests=list(asked.by_request),
            parent=now.version.number,
            parent_sha256=now.version.sha256,
            settings=settings,
        )
        # It raises before anything is noted.
        _refuse_missing(self._todo(name, now, asked, now.holdings.test), asked, name)
        begun.write(path)
        return begun, asked

    def _way(self, asked: Asked, now: Newest, method: str | None) -> str:
        """Return the method to take; ``method`` is the one that was asked for by name."""
        name = method or self.settings.tables.unlearning.method
        if name != AUTO:
            return name
        leaves = any(deletion_kind(request) == "client" for request in asked.requests)
        return now.trained.method or (EXACT if leaves or asked.missing else FAST)

    def _todo(self, name: str, now: Newest, asked: Asked, test: TensorExamples) -> Plan:
        """Return how a method makes the next version; raise where it cannot do what is asked."""
        method, tables = method_named(name), self.settings.tables
        own = self.settings.of_method(name)
        refuse_training(now.trained, method, own)
        return unlearning_plan(
            now.trained,
            asked.requests,
            method,
            own,
            training=tables.training,
            rounds=tables.unlearning.rounds or tables.training.rounds,
            seed=tables.seed + now.version.number,  # each version has draws of its own
            test=test,
        )

    def _base_accuracy(self, now: Newest, images: int) -> float:
        """Return the accuracy of the last version that was trained, and not repaired.

        It is 0 where another number of test images stood behind it: those of other classes.
        """
        version, versions = now.version, {found.number: found for found in self.ledger.versions()}
        while "base" not in version.facts and version.facts.get("guarantee", "exact") != "exact":
            version = versions[version.parent or 1]
        measures = version.facts["measures"]
        behind = 0 if "removed_class_accuracy" in measures else len(now.holdings.test)
        base = {"accuracy": measures["accuracy"], "images": behind, **version.facts.get("base", {})}
        return float(base["accuracy"]) if base["images"] == images else 0.0


def _refuse_missing(todo: Plan, asked: Asked, method: str) -> None:
    """Raise where a method needs samples that are not in the data any more."""
    if asked.missing and todo.askers:
        raise ConfigError(
            f"{asked.missing} of the samples that are to be forgotten are not in the data any "
            f"more, and {method} must show them to the old model once more. Use a method that "
            "starts anew: --method retrain."
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


def _read_state(path: Path) -> Mapping[str, Any]:
    """Read a state dict: safetensors, or what torch.save wrote."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"There is no checkpoint {path}.") from None
    except (OSError, SafetensorError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path} cannot be read as a state dict ({type(error).__name__}). Write one with "
            "safetensors.torch.save_file or torch.save(model.state_dict(), ...)."
        ) from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path} holds a {type(found).__name__}, and no state dict.")
    return found
