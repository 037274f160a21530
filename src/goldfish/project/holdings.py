"""Who holds what in a project: the clients' data, under names that tell nothing.

No file of a project holds a sample's id. A sample is known by its *key*, a digest of its id under
the project's salt: whoever reads a file of the project cannot tell which sample is meant, and the
project still knows a removed sample when it meets it again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goldfish.data import DatasetExamples, Partition, Subset, TensorExamples, as_examples
from goldfish.errors import ConfigError, DataError, QuorumError
from goldfish.experiments.client_setup import (
    ClientSetup,
    ModelSetup,
    are_positions,
    key_of,
    refuse_nameless,
    with_keys,
)
from goldfish.experiments.engine import EngineFactory
from goldfish.experiments.scenario import Machine, Scenario, divide, load_data, load_test
from goldfish.methods.records import census
from goldfish.project.settings import ProjectSettings
from goldfish.types import Client, ClientState, DeletionRequest, Examples, Federation, ModelFactory


@dataclass(frozen=True)
class Holdings:
    """The data of all clients as it is there now, and the server's test set."""

    manifest: Partition
    """The keys of all samples that each client had when the project was trained."""
    data: Mapping[str, Examples]
    """What is there of it."""
    test: TensorExamples
    told: ClientSetup
    """What every client is told of the federation; of itself see :meth:`scenario`."""
    ids: Mapping[str, str]
    """The id of each sample that is there, by its key; never written."""
    digest: str | None
    """Of the data, where ids are positions in it, which mean nothing in other data."""
    classes: Mapping[tuple[str, int], set[str]] = field(default_factory=dict)
    """What of a client's data is of a class, where it alone knows, and was asked."""

    @property
    def elsewhere(self) -> bool:
        """Whether clients have data of their own: ``data`` only stands for it, in number."""
        return self.told.dataset is None

    @property
    def run_id(self) -> str:
        """The name under which clients keep what belongs to the project."""
        return key_of(str(self.told.salt), "run", "project")

    def held(self, there: Mapping[str, Sequence[str]]) -> Holdings:
        """Return this with what clients with data of their own say that they hold.

        Of those that say nothing, all is taken to be there.
        """
        keys = {**self.manifest.clients, **there}
        stand_ins = {client: StandIns(self.test, own) for client, own in keys.items()}
        return replace(self, data={c: Subset(own, range(len(own))) for c, own in stand_ins.items()})

    @property
    def model(self) -> ModelFactory:
        """What builds the model."""
        return self.told.model.factory()

    @property
    def content(self) -> str:
        """A digest of what a training depends on: who holds what, and the data that is here.

        Inputs of datasets that are read sample by sample are left out: they may be random.
        """
        found = hashlib.sha256(json.dumps(list(self.manifest.clients.items())).encode())
        tensors = [self.test.labels, self.test.images]
        for held in () if self.elsewhere else self.data.values():
            tensors.append(held.labels)
            if isinstance(held, Subset) and isinstance(held.examples, TensorExamples):
                tensors.append(held.examples.images[held.positions])
        for tensor in tensors:
            found.update(tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def missing(self, client: str) -> set[str]:
        """Return the keys of a client's samples that are not there any more."""
        return set(self.manifest.clients[client]).difference(self.data[client].ids)

    def of_class(self, client: str, label: int) -> set[str]:
        """Return the keys of a client's samples of a class, of those that are there."""
        if (client, label) in self.classes:
            return self.classes[client, label]
        held = self.data[client]
        return {k for k, own in zip(held.ids, held.labels.tolist(), strict=True) if own == label}

    def clients(self, gone: Mapping[str, Collection[str]]) -> list[Client]:
        """Return the clients without the samples that are gone, for an engine.

        These, and what is missing, are tombstones: shards stay as they were.
        """
        clients = []
        for client_id, keys in self.manifest.clients.items():
            held, lost = self.data[client_id], set(gone.get(client_id, ()))
            left = [place for place, key in enumerate(held.ids) if key not in lost]
            there = {held.ids[place] for place in left}
            state = ClientState(tombstones=set(keys) - there)
            clients.append(Client(client_id, Subset(held, left), state=state))
        return clients

    def scenario(
        self,
        gone: Mapping[str, Collection[str]],
        device: str,
        requests: Sequence[DeletionRequest] = (),
        removed: Mapping[str, Collection[str]] | None = None,
    ) -> Scenario:
        """Return the clients, and what models are measured by.

        The samples that are ``gone`` are left out; ``removed`` are the keys that requests name.
        Classes of which nothing is left are in no accuracy, where the data is here.
        """
        clients = self.clients(gone)
        left = {c for client in clients for c in client.retained.labels.unique().tolist()}
        absent = [] if self.elsewhere else sorted(set(self.test.labels.tolist()) - left)
        parts, holders = [], []
        for client in clients:
            wanted = set() if self.elsewhere else set((removed or {}).get(client.id, ()))
            found = [p for p, key in enumerate(client.retained.ids) if key in wanted]
            if found:
                parts.append(_in_memory(Subset(client.retained, found)))
                holders += [client.id] * len(found)
        together = None
        if parts:
            together = TensorExamples(
                torch.cat([part.images for part in parts]),
                torch.cat([part.labels for part in parts]),
                [sample_id for part in parts for sample_id in part.ids],
            ).to(device)
        none = torch.zeros(len(holders), dtype=torch.bool)
        return Scenario(
            clients=clients,
            model=self.model,
            setups={
                client.id: replace(
                    self.told,
                    client_id=client.id,
                    ids=tuple(self.manifest.clients[client.id]),
                    gone=tuple(sorted(client.state.tombstones)),
                )
                for client in clients
            },
            partition=self.manifest,
            stages=[list(requests)],
            test=self.test.to(device),
            class_names=self.told.class_names,
            removed=together,
            poisoned=none,
            canaries=none,
            true_labels=[] if together is None else together.labels.tolist(),
            holders=holders,
            absent=absent,
        )


def load_holdings(
    settings: ProjectSettings,
    folder: Path,
    machine: Machine,
    salt: str,
    manifest: Partition | None,
    class_names: Sequence[str] | None = None,
) -> Holdings:
    """Read the data that a project names.

    Who holds what is as in ``manifest``, if there is one; the model's classes are ``class_names``,
    whatever the data has now, if there are any.
    """
    if ":" in settings.tables.data.name or ":" in settings.tables.model.name:
        sys.path.append(str(folder))
    if settings.own_data:
        return _own(settings, salt, manifest, class_names)
    if settings.members is not None:
        return _elsewhere(settings, machine, salt, manifest, class_names)
    seed, named = settings.tables.seed, settings.tables.data
    data = load_data(named, seed, machine.data_dir, class_names)
    plain = data.train
    train = with_keys(plain, salt)
    if manifest is None:
        refuse_nameless(named.path or named.name, plain.ids)
        key = dict(zip(plain.ids, train.ids, strict=True))
        parts = divide(named, seed, plain)
        clients = {c: tuple(key[i] for i in ids) for c, ids in parts.clients.items()}
        manifest = Partition(parts.kind, seed, clients)
    on_device = train.to(machine.device)
    drawn = named.limit_train is not None  # then ids are places in what it was drawn from
    places = all(map(str.isdecimal, plain.ids)) if drawn else are_positions(plain.ids)
    return Holdings(
        manifest,
        _held(manifest, dict.fromkeys(manifest.clients, on_device)),
        data.test,
        _told(settings, salt, data.test, data.class_names),
        dict(zip(train.ids, plain.ids, strict=True)),
        _digest([plain]) if places else None,
    )


def first_census(
    holdings: Holdings,
    engine: EngineFactory,
    machine: Machine,
    before: Mapping[str, tuple[str, ...]],
) -> Holdings:
    """Let clients with data of their own say what they hold: the manifest of the project.

    Of those that are not there it is what they said ``before``, if the others still say the same.
    """
    scenario = holdings.scenario({}, machine.device)
    unknown = {client: replace(own, ids=(), gone=()) for client, own in scenario.setups.items()}
    federation = engine(replace(scenario, setups=unknown), machine, holdings.run_id)
    found = census(federation, federation.client_ids, refuse=True)
    there = {client: tuple(keys) for client, keys in found.items()}
    if all(keys == before.get(client) for client, keys in there.items()):
        there = {**before, **there}
    lacking = [client for client in federation.client_ids if not there.get(client)]
    if lacking:
        raise QuorumError(
            f"{', '.join(lacking)} did not say what it holds: it is not there, or has no samples. "
            "A training begins with all members."
        )
    own = {client: there[client] for client in federation.client_ids}
    return replace(holdings, manifest=Partition("members", 0, own)).held({})


def next_census(
    holdings: Holdings, federation: Federation, asked: Sequence[DeletionRequest]
) -> Holdings:
    """Let them say what they hold now, and of classes that are asked for."""
    classes: dict[tuple[str, int], set[str]] = {}
    for label in sorted({r.class_label for r in asked if r.class_label is not None}):
        clients = [r.client_id for r in asked if r.class_label == label]
        for client, keys in census(federation, clients, asked, label).items():
            classes[client, label] = set(keys)
    there = census(federation, federation.client_ids, asked)
    return replace(holdings.held(there), classes=classes)


def _elsewhere(
    settings: ProjectSettings,
    machine: Machine,
    salt: str,
    manifest: Partition | None,
    known: Sequence[str] | None,
) -> Holdings:
    """Read the server's test set; what clients hold, by ``manifest``, is on their own machines."""
    named = settings.tables.data
    test, class_names = load_test(named, machine.data_dir, known)
    told = replace(_told(settings, salt, test, class_names), dataset=None, path=None)
    if manifest is None:  # one unknown sample each, until they have said what they hold
        unknown = {name: (key_of(salt, "", name),) for name in settings.members or ()}
        manifest = Partition("members", 0, unknown)
    return Holdings(manifest, {}, test, told, {}, None).held({})


class StandIns:
    """As many samples of a test set as a client has of its own, under its keys: for a plan."""

    def __init__(self, test: TensorExamples, keys: Sequence[str]) -> None:
        self.ids = keys
        self._test = test
        self._places = torch.arange(len(keys)) % len(test)

    @property
    def labels(self) -> Tensor:
        """The labels of the test samples."""
        return self._test.labels[self._places]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of test samples."""
        return self._test.batch(self._places[positions.cpu()])


def _own(
    settings: ProjectSettings,
    salt: str,
    manifest: Partition | None,
    class_names: Sequence[str] | None,
) -> Holdings:
    """Read data by the user's own function."""
    clients, test = _call(settings.tables.data.name)
    named: dict[str, Examples] = {}
    ids: dict[str, str] = {}
    for client_id, examples in clients.items():
        if manifest is None and not len(examples):
            raise DataError(
                f"data.name: {settings.tables.data.name} returns no samples for {client_id!r}. "
                "Leave this client out, or look whether its file is empty."
            )
        if manifest is None:
            whose = f"data.name: {settings.tables.data.name} returns data of {client_id!r}"
            refuse_nameless(whose, examples.ids)
        named[client_id] = _with_keys(examples, salt, client_id)
        ids |= dict(zip(named[client_id].ids, examples.ids, strict=True))
    if manifest is None:
        manifest = Partition("own", 0, {c: tuple(own.ids) for c, own in named.items()})
    in_memory = _in_memory(test)
    positional = [own for own in clients.values() if are_positions(own.ids)]
    most = max(int(own.labels.max()) for own in (in_memory, *clients.values()) if len(own))
    names = class_names or list(map(str, range(most + 1)))
    if most >= len(names):
        raise DataError(
            f"data.name: {settings.tables.data.name} returns the label {most}, but the model has "
            f"{len(names)} classes, counted from 0."
        )
    return Holdings(
        manifest,
        _held(manifest, named),
        in_memory,
        _told(settings, salt, in_memory, names),
        ids,
        _digest(positional) if positional else None,
    )


def _call(name: str) -> tuple[dict[str, Examples], Examples]:
    """Call the user's function and check what it returns."""
    module, _, attribute = name.partition(":")
    try:
        load = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"data.name: {name} cannot be loaded ({type(error).__name__}: {error}"
            f"{_where(error)}). It names a function in a Python file of the project's folder."
        ) from error
    try:
        found: Any = load()
    except Exception as error:
        raise ConfigError(
            f"data.name: {name} raised {type(error).__name__}: {error}{_where(error)}. It is "
            "called without arguments."
        ) from error
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Mapping):
        raise ConfigError(
            f"data.name: {name} returns the data of each client by its name, as a dict, and the "
            "server's test set: (clients, test)."
        )
    clients = {
        str(client): _read(name, f"the data of client {str(client)!r}", data)
        for client, data in found[0].items()
    }
    if not clients:
        raise DataError(f"data.name: {name} returns the data of no client.")
    test = _read(name, "the server's test set", found[1])
    if not len(test):
        raise DataError(
            f"data.name: {name} returns no samples as the server's test set. Its file may be empty."
        )
    return clients, test


def _read(name: str, what: str, data: object) -> Examples:
    """Return what the user's function returned as examples, with labels that can be read."""
    try:
        examples = as_examples(data)
        _ = examples.labels  # of a dataset they are read now, sample by sample
    except Exception as error:
        said = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"data.name: {name} returns {what}, which cannot be read: {said}{_where(error)}"
        ) from error
    return examples


def _where(error: BaseException) -> str:
    """Say where in the user's own code an error arose: in what Python did not install."""
    installed = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
    here = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*installed, here, "<"))
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _held(manifest: Partition, data: Mapping[str, Examples]) -> dict[str, Examples]:
    """Return, of each client, the samples of the manifest that are there, in its order."""
    held: dict[str, Examples] = {}
    places: dict[int, dict[str, int]] = {}
    for client_id, keys in manifest.clients.items():
        examples = data.get(client_id)
        if examples is None:
            held[client_id] = Subset(next(iter(data.values())), [])
            continue
        if id(examples) not in places:
            places[id(examples)] = {key: place for place, key in enumerate(examples.ids)}
        place = places[id(examples)]
        held[client_id] = Subset(examples, [place[key] for key in keys if key in place])
    return held


def _told(
    settings: ProjectSettings, salt: str, test: TensorExamples, class_names: Sequence[str]
) -> ClientSetup:
    """Return what all clients are told: the model, where the data is, how samples are named."""
    model, data = settings.tables.model, settings.tables.data
    shape = tuple(test.images.shape[1:])
    setup = ModelSetup(model.name, model.options, len(class_names), shape)  # type: ignore[arg-type]
    return ClientSetup("", setup, tuple(class_names), data.name, data.path, salt=salt)


def _digest(parts: Iterable[Examples]) -> str:
    """Return a digest of data: ids, labels and inputs, in order."""
    content = hashlib.sha256()
    for examples in parts:
        known = _in_memory(examples)
        content.update("\n".join(known.ids).encode())
        for tensor in (known.labels, known.images):
            content.update(tensor.cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


def _with_keys(examples: Examples, salt: str, client: str) -> Examples:
    if isinstance(examples, TensorExamples):
        return with_keys(examples, salt, client)
    if isinstance(examples, DatasetExamples):
        keys = [key_of(salt, sample_id, client) for sample_id in examples.ids]
        keyed = DatasetExamples(examples.dataset, keys)
        keyed.labels = examples.labels  # to read them takes the whole dataset
        return keyed
    raise DataError(
        f"A client's data is a dataset or TensorExamples, not {type(examples).__name__}."
    )


def _in_memory(examples: Examples) -> TensorExamples:
    """Return examples as tensors, their inputs as a model sees them."""
    if isinstance(examples, TensorExamples):
        return examples
    inputs, labels = examples.batch(torch.arange(len(examples)))
    return TensorExamples(inputs, labels, list(examples.ids))
