"""A project directory: one's own federation, its model versions, and the requests to forget.

``goldfish.toml`` says what is trained, ``ledger.db`` what was asked and done, ``versions/vN`` holds
the model versions and ``work`` what is being made. Each call that changes something can be killed
at any time and called again: files appear whole, and what the ledger says happened, happened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from goldfish.data import Partition, TensorExamples
from goldfish.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    QuorumError,
    StoreError,
    unknown,
)
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.runner import recorded_phase
from goldfish.experiments.scenario import Machine
from goldfish.federation import InProcess
from goldfish.methods import (
    METHODS,
    Method,
    Plan,
    Trained,
    deletion_kind,
    load,
    method_named,
    not_honoured,
    notes_of,
)
from goldfish.methods.filing import file
from goldfish.methods.trained import MODEL
from goldfish.project.holdings import Holdings, key_of, load_holdings
from goldfish.project.ledger import Artefact, Kind, Ledger, Request, State, Version
from goldfish.project.settings import AUTO, FILE, TEMPLATE, ProjectSettings
from goldfish.results import Cost, Final, Part, Progress
from goldfish.settings import Settings
from goldfish.store import KeptHistory, RunDirectory, claim, write_whole
from goldfish.store.files import make_folder, sync_folder
from goldfish.store.runs import first_difference
from goldfish.types import DeletionRequest, States
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

PINNED, MANIFEST, LOCK = "project.json", "manifest.json", "lock"
GONE, PASS = "gone.json", "pass.json"
"""Of a version, the keys of what it is free of; of one in the making, what it is to honour."""
PENDING: tuple[State, ...] = ("received", "planned", "running", "failed")
"""Requests in these states are still to be handled; one that failed is tried again."""
WAY: tuple[State, ...] = ("received", "planned", "running", "unlearned", "audited", "closed")
FAST, EXACT = "goldfish-sprint", "retrain"
"""What "auto" takes: the fast method, or the one that can remove anything."""
LISTED = 10
"""So many ids an error lists."""


class _Pinned(Part):
    """The whole of ``project.json``: what a project is bound to since its first training."""

    version: int = 1
    salt: str
    settings: dict[str, Any]
    data: str | None
    """A digest of the data, where ids are positions in it."""


class _Pass(Part):
    """The whole of ``pass.json``: what a version in the making is to honour, and how."""

    method: str
    requests: list[str]


@dataclass(frozen=True)
class Asked:
    """What requests come to: for the library, and by the keys of the samples."""

    by_request: Mapping[str, DeletionRequest]
    """What is asked of the library, by the id of the request in the ledger."""
    keys: Mapping[str, set[str]]
    """The keys that each request names."""
    missing: int
    """How many of these samples are not there any more."""

    @property
    def requests(self) -> list[DeletionRequest]:
        """What the library is asked: equal requests once."""
        return list(dict.fromkeys(self.by_request.values()))

    def of_clients(self, requests: Sequence[str] | None = None) -> dict[str, set[str]]:
        """Return the keys that these requests, or all, name, by client."""
        found: dict[str, set[str]] = {}
        for request in self.by_request if requests is None else requests:
            client = self.by_request[request].client_id
            found[client] = found.get(client, set()) | self.keys[request]
        return found


class Project:
    """A project directory. :meth:`init` makes one, :meth:`open` opens it; a context manager."""

    def __init__(self, folder: Path, settings: ProjectSettings, ledger: Ledger) -> None:
        self.folder = folder
        self.settings = settings
        self.ledger = ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        self.ledger.close()

    @staticmethod
    def init(folder: Path) -> Path:
        """Make a project directory with a configuration that works as it stands."""
        path = folder / FILE
        if path.exists():
            raise StoreError(f"{folder} is a project already: it has a {FILE}.")
        with _private():
            write_whole(path, TEMPLATE)
        folder.chmod(0o700)
        return path

    @classmethod
    def open(cls, folder: Path) -> Project:
        """Open the project of this folder, or of the nearest one above it."""
        start = folder.resolve()
        found = next((f for f in (start, *start.parents) if (f / FILE).exists()), None)
        if found is None:
            raise ConfigError(
                f"{folder} is no project: there is no {FILE}, here or above. "
                "'goldfish init DIR' makes one; --project DIR names one."
            )
        settings = ProjectSettings.read(found / FILE)
        url = settings.tables.ledger
        with _private():
            return cls(found, settings, Ledger.open(url if "://" in url else found / url))

    # Versions

    def version_folder(self, number: int) -> Path:
        """Return where a model version lies."""
        return self.folder / "versions" / f"v{number}"

    def train(self, machine: Machine) -> Iterator[Progress]:
        """Train version 1, or go on with it; yield the progress.

        Nothing is yielded where a version is there already.
        """
        with self._working():
            if self.ledger.versions():
                self.refuse_changes()
                return
            holdings = self._holdings(machine, begin=True)
            run = self._work(1)
            tables = self.settings.tables
            federation = self._federation(holdings, {}, machine)
            scenario = holdings.scenario(holdings.clients({}), machine.device)
            own = _own_training(self.settings)
            kept: set[int] = set()
            if own is None:
                plan = training_plan(federation, tables.training, tables.seed, scenario.test)
                work: Work = original_training
                for name in tables.unlearning.keep_for:
                    needed = method_named(name)
                    of_method = self.settings.of_method(name)
                    kept.update(needed.kept_rounds(of_method, tables.training.rounds))
            else:
                plan, work = own_training(
                    federation,
                    own,
                    self.settings.of_method(own.name),
                    tables.training,
                    tables.seed,
                    scenario.test,
                )
            history = KeptHistory(run, kept)
            evaluator = Evaluator(scenario, machine.device)
            done = yield from recorded_phase(plan, work, run, evaluator, history=history)
            trained = Trained(
                federation,
                done.params,
                tables.training,
                tables.seed,
                phase=plan.phase,
                history=history,
                method=None if own is None else own.name,
                memo=done.memo,
                states=done.states,
            )
            facts = _facts(evaluator.measure(done.params), [r.cost for r in done.records])
            self._publish(trained, "train", facts, {})

    def adopt(self, checkpoint: Path, machine: Machine) -> Version:
        """Take a model that was trained elsewhere, with this project's data, as version 1."""
        with self._working():
            if self.ledger.versions() or self._work_folder(1).exists():
                raise StoreError(
                    f"{self.folder} has a model already, or one in training. 'goldfish import' "
                    "is for a new project."
                )
            state = _read_state(checkpoint)
            holdings = self._holdings(machine, begin=True)
            tables = self.settings.tables
            federation = self._federation(holdings, {}, machine)
            values = tables.training.model_dump()
            trained = Trained.from_state_dict(federation, state, seed=tables.seed, **values)
            scenario = holdings.scenario(holdings.clients({}), machine.device)
            facts = _facts(Evaluator(scenario, machine.device).measure(trained.params), [])
            return self._publish(trained, "import", facts, {})

    def current(self) -> Version:
        """Return the newest model version."""
        versions = self.ledger.versions()
        if not versions:
            raise ConfigError(f"{self.folder} has no model yet. Run 'goldfish train' first.")
        return versions[-1]

    def samples(self, machine: Machine) -> dict[str, list[str]]:
        """Return the ids of the samples that each client has, less those that are removed."""
        holdings = self._holdings(machine)
        clients = holdings.clients(self._gone(self.current().number))
        return {c.id: [holdings.ids[key] for key in c.retained.ids] for c in clients}

    # Requests

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
        self.refuse_changes()
        manifest = self._manifest()
        if client not in manifest.clients:
            hint = f"The project has {len(manifest.clients)} clients."
            raise ConfigError(unknown("client", client, manifest.clients, hint))
        gone = self._gone(version.number)
        left = set(manifest.clients[client]) - gone[client]
        if not left:
            raise ConfigError(
                f"{client} has left with all of its data: v{version.number} is free of it."
            )
        kind: Kind = "all"
        content: Sequence[str] = ()
        if samples is not None:
            kind, content = "samples", tuple(dict.fromkeys(samples))
            self._check_samples(client, content, manifest, gone[client], machine)
        elif label is not None:
            kind, content = "class", [str(label)]
        pending = self.pending()
        of_class = "class" in (kind, *(other.kind for other in pending))
        holdings = self._holdings(machine) if of_class else None
        keys = self._keys(client, kind, content, manifest, holdings)
        if not keys & left:
            raise ConfigError(f"{client} has no sample of class {label}: nothing was filed.")
        asked = {**gone, client: gone[client] | keys}
        for other in pending:
            named = self.ledger.content(other.id).ids
            own = self._keys(other.client, other.kind, named, manifest, holdings)
            asked[other.client] = asked[other.client] | own
        if all(asked[name].issuperset(held) for name, held in manifest.clients.items()):
            raise ConfigError(
                "With this request all data of all clients is asked for, and no model can be made "
                "of none: nothing was filed. Delete the project's folder instead."
            )
        return self.ledger.file(
            client,
            kind,
            content[0] if kind == "class" else content,
            count=len(keys & left),
            reason=reason,
            requested_at=requested_at,
            due_days=self.settings.tables.requests.due_days,
        )

    def _check_samples(
        self,
        client: str,
        ids: Sequence[str],
        manifest: Partition,
        gone: set[str],
        machine: Machine,
    ) -> None:
        """Raise where a client never had some of the samples, or none of them is left."""
        if not ids:
            raise ConfigError("No sample is named: nothing was filed.")
        if self._pinned().data is not None:
            self._holdings(machine)  # it refuses other data than that of the training
        key = self._namer(client)
        held = set(manifest.clients[client])
        strange = [sample_id for sample_id in ids if key(sample_id) not in held]
        if strange:
            more = f" and {len(strange) - LISTED} more" if len(strange) > LISTED else ""
            raise ConfigError(
                f"{client} never had {len(strange)} of these samples: "
                f"{', '.join(strange[:LISTED])}{more}. Nothing was filed."
            )
        if gone.issuperset(map(key, ids)):
            raise ConfigError(
                f"The newest model is free of all of these samples of {client}: nothing was filed."
            )

    def _namer(self, client: str) -> Callable[[str], str]:
        """Return what makes keys of a client's sample ids."""
        owner = client if self.settings.own_data else None
        return partial(key_of, self._pinned().salt, client=owner)

    def _keys(
        self,
        client: str,
        kind: Kind,
        content: Sequence[str],
        manifest: Partition,
        holdings: Holdings | None,
    ) -> set[str]:
        """Return the keys that a request names; for a class, of the samples that are there."""
        if kind == "samples":
            return set(map(self._namer(client), content))
        if kind == "class" and holdings is not None:
            return holdings.of_class(client, int(content[0]))
        return set(manifest.clients[client])

    # Unlearning

    def pending(self) -> list[Request]:
        """Return the requests that are still to be handled, oldest first."""
        return self.ledger.requests(*PENDING)

    def unlearn(self, machine: Machine, method: str | None = None) -> Iterator[Progress]:
        """Handle all pending requests in one pass and make a new version; yield the progress.

        A pass that was interrupted goes on, with the requests that it began with.
        """
        with self._working():
            parent = self.current()
            self.refuse_changes()
            holdings = self._holdings(machine)
            gone = self._gone(parent.number)
            work = self._work(parent.number + 1)
            begun = _Pass.read(work.path / PASS) if (work.path / PASS).exists() else None
            if begun is not None and method not in (None, begun.method):
                raise ConfigError(
                    f"v{parent.number + 1} is being made with {begun.method}. Go on without "
                    f"--method, or delete {work.path} to begin anew."
                )
            federation = self._federation(holdings, gone, machine)
            trained = self.load(parent, federation)
            chosen = self.pending()
            if begun is not None:
                chosen = [self.ledger.request(request) for request in begun.requests]
            asked = self._ask(chosen, holdings, gone)
            if begun is None:
                asked = self._without_absent(asked, federation, trained)
            scenario = holdings.scenario(
                holdings.clients(gone), machine.device, asked.requests, asked.of_clients()
            )
            way = self.choose(begun.method if begun else method, trained, asked)
            plan, own = self._plan(way, trained, asked, scenario.test, parent.number)
            if begun is None:
                begun = _Pass(method=way.name, requests=list(asked.by_request))
                write_whole(work.path / PASS, begun.model_dump_json())
            for request in begun.requests:
                self._advance(request, "running", method=way.name)
            evaluator = Evaluator(scenario, machine.device)
            try:
                done = yield from recorded_phase(
                    plan, bind(way.unlearn, own), work, evaluator, trained.states or {}
                )
            except (ConfigError, DataError, DivergenceError, QuorumError) as error:
                self._fail(begun.requests, str(error))
                shutil.rmtree(work.path)
                raise
            lost = {
                left.request: left.reason
                for left in not_honoured(plan, [r.absent for r in done.records], done.params)
            }
            failed = {r: lost[d] for r, d in asked.by_request.items() if d in lost}
            honoured = [r for r in asked.by_request if r not in failed]
            if not honoured:
                self._fail(failed, f"{way.name} did not honour it")
                shutil.rmtree(work.path)
                raise QuorumError(
                    f"No request was honoured: {next(iter(lost.values()))}. They stay open, and "
                    f"v{parent.number} stays the newest model."
                )
            after = trained_after(plan, done.params, done.memo, [])
            whole = [d for d in plan.requests if deletion_kind(d) == "client" and d not in lost]
            after = replace(
                after,
                history={},  # of updates that knew the removed samples
                states=_free(done.states, trained.states or {}, way, asked.of_clients()),
                honoured=whole,  # what else is gone, no client has any more
            )
            facts = _facts(
                evaluator.measure(done.params, plan.new),
                [r.cost for r in done.records],
                guarantee=way.guarantee,
                notes=list(notes_of(way, plan, own)),
                before=_measures(evaluator.measure(trained.params, plan.new)),
                asked=len(asked.by_request),
            )
            removed = asked.of_clients(honoured)
            free = {client: keys | removed.get(client, set()) for client, keys in gone.items()}
            exact = way.guarantee == "exact"
            self._publish(
                after, way.name, facts, free, parent=parent, requests=honoured, fresh=exact
            )
            for request, reason in failed.items():
                self._fail([request], reason)

    def choose(self, name: str | None, trained: Trained, asked: Asked) -> Method[Any]:
        """Return the method of this name, or of the settings; "auto" goes by what is asked."""
        name = name or self.settings.tables.unlearning.method
        if name == AUTO:
            leaves = any(deletion_kind(request) == "client" for request in asked.requests)
            name = trained.method or (EXACT if leaves or asked.missing else FAST)
        return method_named(name)

    def load(self, version: Version, federation: InProcess) -> Trained:
        """Return a model version, once its file is seen to be the one that was written."""
        folder = self.version_folder(version.number)
        state = {a.path: a.state for a in self.ledger.artefacts()}.get(self._name(folder / MODEL))
        if state != "current":
            raise StoreError(
                f"v{version.number} is {state}: it knows samples that were removed since, and is "
                "no starting point any more."
            )
        if not (folder / MODEL).exists() or _sha256(folder / MODEL) != version.sha256:
            raise StoreError(
                f"{folder / MODEL} is not the file that was written (its SHA-256 is another, or it "
                "is missing). Nothing was done: put it back from a backup."
            )
        return load(folder, federation)

    def _plan(
        self, way: Method[Any], trained: Trained, asked: Asked, test: TensorExamples, before: int
    ) -> tuple[Plan, Settings]:
        """Return what a method needs for a pass, or raise where it cannot do what is asked."""
        own = self.settings.of_method(way.name)
        refuse_training(trained, way, own)
        tables = self.settings.tables
        plan = unlearning_plan(
            trained,
            asked.requests,
            way,
            own,
            training=tables.training,
            rounds=tables.unlearning.rounds or tables.training.rounds,
            seed=tables.seed + before,  # each version has draws of its own
            test=test,
        )
        if asked.missing and plan.askers:
            raise ConfigError(
                f"{asked.missing} of the samples that are to be forgotten are not in the data any "
                f"more, and {way.name} must show them to the old model once more. Use a method "
                "that starts anew: --method retrain."
            )
        return plan, own

    def _ask(
        self, requests: Sequence[Request], holdings: Holdings, gone: Mapping[str, set[str]]
    ) -> Asked:
        """Turn requests of the ledger into those of the library."""
        if not requests:
            raise ConfigError("No request waits: there is nothing to unlearn.")
        manifest = holdings.manifest
        contents = {request.id: self.ledger.content(request.id).ids for request in requests}
        keys = {
            r.id: self._keys(r.client, r.kind, contents[r.id], manifest, holdings) - gone[r.client]
            for r in requests
        }
        named: dict[str, set[str]] = {client: set(lost) for client, lost in gone.items()}
        for request in requests:
            named[request.client] |= keys[request.id]
        lost = {c: holdings.missing(c) - named[c] for c in manifest.clients}
        if any(lost.values()):
            which = ", ".join(f"{len(own)} of {client}" for client, own in lost.items() if own)
            raise DataError(
                f"Samples that the model was trained with are not in the data any more, and no "
                f"request names them: {which}. Put them back, or file a request for them "
                "('goldfish forget'); nothing was done."
            )
        whole = {c for c, held in manifest.clients.items() if named[c].issuperset(held)}
        by_request = {}
        for r in requests:
            if not keys[r.id] and r.client not in whole:
                self._advance(r.id, "audited", note="an earlier request had removed all of it")
            elif r.client in whole:
                by_request[r.id] = DeletionRequest(r.client)
            elif r.kind == "class":
                by_request[r.id] = DeletionRequest(r.client, class_label=int(contents[r.id][0]))
            else:
                by_request[r.id] = DeletionRequest(r.client, sample_ids=sorted(keys[r.id]))
        if not by_request:
            raise ConfigError("The newest model is free of all that is asked for.")
        missing = sum(len(keys[r.id] & holdings.missing(r.client)) for r in requests)
        return Asked(by_request, keys, missing)

    def _without_absent(self, asked: Asked, federation: InProcess, trained: Trained) -> Asked:
        """Leave the requests of clients that are not there open."""
        absent = set(file(federation, asked.requests, trained.honoured))
        away = [r for r, own in asked.by_request.items() if own.client_id in absent]
        self._fail(away, "the client was not there")
        left = {r: own for r, own in asked.by_request.items() if r not in away}
        if not left:
            raise QuorumError(
                f"No client that asked is there ({', '.join(sorted(absent))}): the requests stay "
                "open."
            )
        return replace(asked, by_request=left)

    def _advance(self, request: str, state: State, **facts: Any) -> None:
        """Bring a request forward to a state, through those between; never back."""
        with self.ledger.together():
            now = self.ledger.request(request).state
            if now == "failed":
                now = self.ledger.move(request, "received").state
            for between in WAY[WAY.index(now) + 1 : WAY.index(state) + 1]:
                self.ledger.move(request, between, **(facts if between == state else {}))

    def _fail(self, requests: Iterable[str], reason: str) -> None:
        with self.ledger.together():
            for request in requests:
                if self.ledger.request(request).state != "failed":
                    self.ledger.move(request, "failed", reason=reason)

    # Purging

    def purge(self, *, dry_run: bool = False) -> list[Artefact]:
        """Delete what descends from removed samples, and return it; requests are then closed.

        To purge is to accept the newest version: there is no way back.
        """
        with self._working():
            old = self.ledger.artefacts("quarantined")
            done = self.ledger.requests("audited")
            if dry_run:
                return old
            for artefact in old:
                path = self.folder / artefact.path
                if path.is_dir():
                    shutil.rmtree(path)
                path.unlink(missing_ok=True)
            for folder in {self.version_folder(a.version) for a in old if a.version is not None}:
                if folder.exists():
                    shutil.rmtree(folder)
            if (versions := self.folder / "versions").exists():
                sync_folder(versions)
            with self.ledger.together():
                for artefact in old:
                    self.ledger.move_artefact(artefact.path, "purged")
                for request in done:
                    self.ledger.move(request.id, "closed")
            forgotten = [r.id for r in self.ledger.requests("closed") if self._names(r.id)]
            if forgotten:
                self.ledger.forget_ids(*forgotten)
            return old

    def _names(self, request: str) -> bool:
        """Tell whether the ledger still holds what a request names."""
        try:
            self.ledger.content(request)
        except StoreError:
            return False
        return True

    # Files

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Let this process alone change the project; what it writes is its owner's alone."""
        with _private(), claim(self.folder / LOCK, "choose another project"):
            for left_over in self.folder.glob("**/.*.part"):
                if left_over.is_dir():
                    shutil.rmtree(left_over)
                else:
                    left_over.unlink()
            for version in self.ledger.versions():  # made, but killed before the end
                shutil.rmtree(self._work_folder(version.number), ignore_errors=True)
            yield

    def _work(self, number: int) -> RunDirectory:
        """Return the folder in which a version is made, for its rounds."""
        folder = self._work_folder(number)
        make_folder(folder)
        return RunDirectory(folder)

    def _work_folder(self, number: int) -> Path:
        return self.folder / "work" / f"v{number}"

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _pinned(self) -> _Pinned:
        return _Pinned.read(self.folder / PINNED)

    def _manifest(self) -> Partition:
        try:
            return Partition.from_json((self.folder / MANIFEST).read_text())
        except (OSError, DataError) as error:
            raise StoreError(
                f"{self.folder / MANIFEST}, which says who holds what, cannot be read ({error}). "
                "Put it back from a backup."
            ) from error

    def _gone(self, number: int) -> dict[str, set[str]]:
        """Return the keys of the samples that a version is free of, of every client."""
        found = json.loads((self.version_folder(number) / GONE).read_bytes())
        return {client: set(found.get(client, ())) for client in self._manifest().clients}

    def refuse_changes(self) -> None:
        """Raise where the settings are not those that the model was trained with."""
        there = self._pinned().settings
        difference = first_difference(there, self.settings.pinned)
        if difference is not None:
            raise ConfigError(
                f"{self.folder / FILE} was changed since the model was trained ({difference}). Set "
                "it back, or train the changed federation in a new project."
            )

    def _holdings(self, machine: Machine, *, begin: bool = False) -> Holdings:
        """Read the data; with ``begin`` bind the project to it, unless that is done."""
        if begin and not (self.folder / PINNED).exists():
            salt = secrets.token_hex(32)
            holdings = load_holdings(self.settings, self.folder, machine, salt, None)
            write_whole(self.folder / MANIFEST, holdings.manifest.to_json())
            pinned = _Pinned(salt=salt, settings=self.settings.pinned, data=holdings.digest)
            write_whole(self.folder / PINNED, pinned.model_dump_json(indent=1) + "\n")
            return holdings
        self.refuse_changes()
        pinned = self._pinned()
        holdings = load_holdings(self.settings, self.folder, machine, pinned.salt, self._manifest())
        if pinned.data is not None and holdings.digest != pinned.data:
            raise DataError(
                "The data is not the one that the model was trained with, and its samples have no "
                "ids but their positions, which now mean other samples. Put it back as it was; "
                "give samples ids of their own before you delete any (docs/own-model.md)."
            )
        return holdings

    def _federation(
        self, holdings: Holdings, gone: Mapping[str, set[str]], machine: Machine
    ) -> InProcess:
        return InProcess(
            holdings.clients(gone),
            holdings.model,
            workers=machine.workers,
            threads=machine.threads,
            device=machine.device,
            compiled=machine.compiled,
        )

    def _publish(
        self,
        trained: Trained,
        made_by: str,
        facts: Mapping[str, Any],
        gone: Mapping[str, set[str]],
        *,
        parent: Version | None = None,
        requests: Sequence[str] = (),
        fresh: bool = True,
    ) -> Version:
        """Write a version, then say so in the ledger; older ones are quarantined.

        ``fresh``: it was made from newly initialised weights, and not from its parent.
        """
        number = 1 if parent is None else parent.number + 1
        folder = self.version_folder(number)
        part = folder.with_name(f".v{number}.part")
        for left_over in (part, folder):
            if left_over.exists():  # the ledger does not know it: killed before that
                shutil.rmtree(left_over)
        write_whole(part / GONE, json.dumps({c: sorted(keys) for c, keys in gone.items()}))
        trained.save(part)
        part.rename(folder)
        sync_folder(folder.parent)
        sha256 = _sha256(folder / MODEL)
        left = {c: set(keys) - gone.get(c, set()) for c, keys in self._manifest().clients.items()}
        manifests = {c: self.ledger.manifest_digest(c, keys) for c, keys in left.items() if keys}
        with self.ledger.together():
            before = None if parent is None else parent.number
            version = self.ledger.add_version(
                made_by, sha256, parent=before, requests=requests, **facts
            )
            old = [artefact.path for artefact in self.ledger.artefacts("current")]
            for path in old:
                self.ledger.move_artefact(path, "quarantined", by=f"v{number}")
            from_parent = [path for path in old if path.endswith(MODEL)]
            self.ledger.add_artefact(
                self._name(folder / MODEL),
                "model",
                version=number,
                sha256=sha256,
                parents=[] if fresh else from_parent,
                manifests=manifests,
            )
            if (folder / "history").exists():
                self.ledger.add_artefact(
                    self._name(folder / "history"),
                    "client updates",
                    version=number,
                    parents=[],
                    manifests=manifests,
                )
            for request in requests:
                self._advance(request, "unlearned", version=number)
                self._advance(request, "audited", measures=facts["measures"])
        shutil.rmtree(self._work_folder(number), ignore_errors=True)
        return version


def _own_training(settings: ProjectSettings) -> Method[Any] | None:
    """Return the method of the settings, where it has a training of its own."""
    name = settings.tables.unlearning.method
    return METHODS[name] if name != AUTO and METHODS[name].prepare is not None else None


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


def _measures(final: Final) -> dict[str, Any]:
    return final.model_dump(exclude_none=True, exclude={"per_class"})


def _facts(final: Final, costs: Sequence[Cost], **more: Any) -> dict[str, Any]:
    """Return what the ledger tells of a version."""
    total = sum(costs, Cost())
    return {"measures": _measures(final), "rounds": len(costs), "cost": total.model_dump(), **more}


def _read_state(path: Path) -> Mapping[str, Any]:
    """Read a state dict: safetensors, or what torch.save wrote."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _private() -> Iterator[None]:
    """Let files and folders that are made be their owner's alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
