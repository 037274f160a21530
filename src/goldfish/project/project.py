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
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from goldfish.errors import ConfigError, StoreError, unknown
from goldfish.experiments.engine import EngineFactory, in_process
from goldfish.experiments.evaluator import Evaluator
from goldfish.experiments.runner import recorded_phase
from goldfish.experiments.scenario import Machine
from goldfish.files import make_folder, write_whole
from goldfish.flower.submit import project_on_flower
from goldfish.methods import METHODS, Trained
from goldfish.planning import Advice, plan
from goldfish.project import FILE, find_project
from goldfish.project.asking import Registry, refuse_named
from goldfish.project.entries import PENDING, Artefact, Kind, Request, Version
from goldfish.project.folder import ProjectFolder, private, remove
from goldfish.project.ledger import TOLD, Ledger
from goldfish.project.settings import TEMPLATE, ProjectSettings
from goldfish.project.unlearning_pass import UnlearningPass, requests_begun
from goldfish.project.versions import Versions, facts_of, left_out_of
from goldfish.results import Progress
from goldfish.store import KeptHistory
from goldfish.types import Federation
from goldfish.workflow import Work, original_training, own_training, training_plan

IN_PROCESS: EngineFactory = partial(in_process, remember=True)
"""The engine whose clients live in this process: they never train on removed samples again."""


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
            facts = facts_of(
                evaluator.measure(done.params),
                [r.cost for r in done.records],
                left_out=left_out_of(evaluator),
            )
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
            evaluator = Evaluator(scenario, machine.device)
            final, left_out = evaluator.measure(trained.params), left_out_of(evaluator)
            facts = facts_of(final, [], left_out=left_out)
            make_folder(self.files.work(1))  # as long as it is there, the version is in the making
            return self._versions.publish(trained, "import", facts, {})

    def current(self) -> Version:
        """Return the newest model version that was not rejected."""
        return self._versions.current()

    def load(self, version: Version, federation: Federation) -> Trained:
        """Return a model version, once its file is seen to be the one that was written."""
        return self._versions.load(version, federation)

    def written(self, version: Version) -> Path:
        """Return the model file of a version, once it is seen to be the one that was written."""
        return self._versions.written(version)

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
                    why = f"{request.client} was told of it, and may train without the samples now"
                elif request.state != "closed":
                    why += ": 'goldfish reject' takes the new version back first"
                raise ConfigError(f"{request_id} cannot be withdrawn any more: {why}.")
            if request.kind == "samples" and request.state != "withdrawn":
                self._refuse_named(reason, self.ledger.content(request_id).ids)
            making = self.files.work(len(self.ledger.versions()) + 1)
            if request_id in requests_begun(making):
                remove(making)
            self.ledger.withdraw(request_id, reason)
            self.files.forget_class(request_id)
        return self.ledger.request(request_id)

    def plan(self, machine: Machine, methods: Sequence[str] = ()) -> ProjectPlan:
        """Say what each of these methods, or of all, would cost for the pending requests.

        Times are those of a few measured steps, scaled by what the training took here.
        """
        newest = self._versions.newest(machine, IN_PROCESS)  # methods are rehearsed here
        work = UnlearningPass(self.files, self.ledger, newest)
        asked = work.ask(self.pending())
        tables = self.settings.tables
        advice = plan(
            newest.trained,
            asked.requests,
            methods={n: self.settings.methods.get(n, {}) for n in methods or METHODS},
            rounds=tables.unlearning.rounds,
            test=newest.holdings.test.to(machine.device),
            seconds_per_sample=self.seconds_per_sample(),
        )
        shards = work.shards(asked.of_clients())
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
            newest = self._versions.newest(machine, self.engine)
            self._versions.purge_clients(newest.trained.federation)
            work = UnlearningPass(self.files, self.ledger, newest, method, self.tell)
            yield from work.run(machine.device)

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
        self,
        machine: Machine | None = None,
        *,
        dry_run: bool = False,
        anyway: bool = False,
        newest: int | None = None,
        without: Sequence[str] = (),
    ) -> list[Artefact]:
        """Delete what descends from removed samples, and return it; requests are then closed.

        To purge is to accept the version that is ``newest`` when it is called: there is no way
        back, and one that is made meanwhile was not looked at. On Flower clients delete
        what they keep, too. As long as one cannot be reached, requests are not closed: its part is
        quarantined, and deleted by the next purge or unlearning that reaches it. Requests are
        closed ``without`` clients that never come back; what they keep stays outstanding. A version
        that still knows what it should have forgotten is accepted ``anyway`` only.
        """
        for client in without:
            if client not in self.files.manifest().clients:
                hint = "'goldfish status' names those that are outstanding. Nothing was deleted."
                raise ConfigError(unknown("client", client, self.files.manifest().clients, hint))
        old = self.ledger.artefacts("quarantined")
        if dry_run or not (old or self.ledger.requests("measured")):
            return old
        if not anyway and (found := self.still_known()):
            raise ConfigError(
                f"{found}: nothing was deleted. Run 'goldfish reject', then 'goldfish unlearn "
                "--method retrain'; or let 'goldfish audit' look closer. 'goldfish purge --anyway' "
                "accepts it all the same."
            )
        newest = newest or self.current().number
        if self.engine is None:
            what = json.dumps([newest, list(without)])
            list(self.hand_over("purge", machine or Machine(), what))
        else:
            with self.working():
                if (now := self.current().number) != newest:
                    raise StoreError(
                        f"v{newest} is not the newest version any more: it is v{now}. Nothing was "
                        "deleted. Look at it ('goldfish status'), then run 'goldfish purge' again."
                    )
                self._versions.purge(machine or Machine(), self.engine, without)
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
