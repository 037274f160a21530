"""From a configuration to the clients, the deletion requests and the test data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from goldfish.data import (
    Backdoor,
    LabelledData,
    Partition,
    Subset,
    TensorExamples,
    load,
    load_half,
    poison,
    removal,
    triggered_test,
)
from goldfish.data import partition as partitions
from goldfish.errors import ConfigError, DataError, StoreError, unknown
from goldfish.experiments.client_setup import ClientSetup, ModelSetup, with_canaries
from goldfish.experiments.config import Config, DataSettings, DeletionSettings, Selection
from goldfish.files import write_whole
from goldfish.hardware.blocked import compiled_early
from goldfish.methods import deletion_kind
from goldfish.randomness import generator
from goldfish.types import Client, ClientState, DeletionRequest, ModelFactory, Scalar
from goldfish.unlearning.optimization import shard_numbers

PARTITION, REQUESTS = "partition.json", "requests.json"
PUT_BACK = "Put it back from a backup, or start the run anew with another --out."


@dataclass(frozen=True)
class Scenario:
    """Everything that all phases of a run share."""

    clients: Sequence[Client]
    """The clients with their data, for an engine that runs them here."""
    model: ModelFactory
    setups: Mapping[str, ClientSetup]
    """What each client is told, by its id, for an engine whose clients are on other machines."""
    partition: Partition | None
    """Who holds what; None where clients have data of their own, which nobody else knows."""
    stages: Sequence[Sequence[DeletionRequest]]
    """The requests that are filed at once, and after them the later ones, in order."""
    test: TensorExamples
    class_names: Sequence[str]
    removed: TensorExamples | None = None
    """The removed samples as the clients trained on them; None where only the clients have them."""
    poisoned: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Which of the removed samples carry the trigger, one bool a sample."""
    canaries: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Which of them are canaries: samples with a wrong label, one bool a sample."""
    true_labels: Sequence[int] = ()
    """The labels of the removed samples before any poisoning."""
    holders: Sequence[str] = ()
    """Which client holds each removed sample."""
    triggered: TensorExamples | None = None
    """Test images with the trigger."""
    backdoor: Backdoor | None = None
    absent: Sequence[int] = ()
    """Classes of which no client has a sample, before any request: they are in no accuracy."""
    missing: Sequence[str] = ()
    """Removed samples that have been deleted from the disk since they were asked for."""
    filed: _Filed | None = None
    """What a run directory keeps of the requests."""

    @property
    def plain(self) -> Tensor:
        """Which of the removed samples are what they were: no trigger, no wrong label."""
        return ~(self.poisoned | self.canaries)

    @property
    def num_classes(self) -> int:
        """How many classes the data has."""
        return len(self.class_names)

    @property
    def digest(self) -> str:
        """A SHA-256 of who holds what and who asks for what, in which order."""
        asked = [
            [(r.client_id, list(r.sample_ids or ()), r.class_label) for r in stage]
            for stage in self.stages
        ]
        who = list(self.setups) if self.partition is None else self.partition.digest
        content = json.dumps([who, asked])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def requests(self) -> list[DeletionRequest]:
        """All requests of all stages."""
        return [request for stage in self.stages for request in stage]

    def save(self, run: Path) -> None:
        """Write who holds what and who asks for what into a run directory."""
        if self.partition is not None:
            write_whole(run / PARTITION, self.partition.to_json())
        if self.filed is not None and not (run / REQUESTS).exists():
            write_whole(run / REQUESTS, json.dumps(asdict(self.filed)) + "\n")


@dataclass(frozen=True)
class Machine:
    """Where a run finds its data and how it uses the machine; no part of the configuration."""

    data_dir: Path | None = None
    device: str = "cpu"
    workers: int | None = None
    threads: int | None = None
    compiled: bool = False
    elsewhere: bool = False
    """A run that another machine began may go on here."""

    @property
    def facts(self) -> dict[str, Scalar]:
        """What the last bits depend on beside what a user sets."""
        device = torch.device(self.device).type
        if device == "cuda":
            device = f"cuda ({torch.cuda.get_device_name(self.device)})"
        return {
            "device": device,
            "torch": str(torch.__version__),
            "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        }


@dataclass(frozen=True)
class _Filed:
    """Who asks for what."""

    stages: Sequence[Sequence[DeletionRequest]]
    holders: Mapping[str, str]
    """The samples that are asked for, and the client that holds each, as far as it is known."""
    poisoned: Sequence[str]
    """Those of them that carry the trigger."""
    canaries: Mapping[str, int] = field(default_factory=dict)
    """Those of them that have a wrong label, and which."""
    class_names: Sequence[str] | None = None
    """The classes of the data when the run began; None in a run of an earlier Goldfish."""


def build_scenario(config: Config, machine: Machine, run: Path | None = None) -> Scenario:
    """Load the data, divide it, choose what is removed, and poison it.

    ``run`` is the directory of a run that goes on: who holds what and who asks for what is then
    what it was when the run began, whatever has become of the file of ids and of the samples.
    """
    filed = None if run is None else _read_filed(run)
    if config.data.members is not None:
        return _members_scenario(config, machine, config.data.members, filed)
    known = None if filed is None else filed.class_names
    data = load_data(config.data, config.seed, machine.data_dir, known)
    model = _model(config, data.train, data.class_names)
    if run is not None and filed is not None:
        partition = _read_partition(run)
    else:
        partition = divide(config.data, config.seed, data.train)
    backdoor = None
    if config.deletion.backdoor_target is not None:
        backdoor = Backdoor(
            config.deletion.backdoor_target,
            config.deletion.backdoor_source,
            size=config.deletion.trigger_size,
        )
    if filed is None:
        shards = config.training.shards if config.deletion.by_shard else None
        chooser = _Chooser(partition, data.train, config.seed, shards)
        filed = chooser.choose_all(config.deletion, backdoor)
        filed = replace(filed, class_names=data.class_names)
    position_of = {sample_id: position for position, sample_id in enumerate(data.train.ids)}
    missing = [sample_id for sample_id in filed.holders if sample_id not in position_of]
    holders = {i: client_id for i, client_id in filed.holders.items() if i in position_of}
    positions = torch.tensor([position_of[sample_id] for sample_id in holders], dtype=torch.long)
    triggered_ids = set(filed.poisoned)
    poisoned = torch.tensor([i in triggered_ids for i in holders], dtype=torch.bool)
    train = data.train
    if backdoor is not None:
        train = poison(train, positions[poisoned], backdoor)
    train = with_canaries(train, filed.canaries)
    train, test = train.to(machine.device), data.test.to(machine.device)
    return Scenario(
        clients=_clients(train, partition, missing),
        model=_factory(model, machine),
        setups={
            client_id: ClientSetup(
                client_id,
                model,
                data.class_names,
                config.data.name,
                config.data.path,
                tuple(ids),
                tuple(i for i in ids if i in triggered_ids),
                backdoor,
                {i: label for i, label in filed.canaries.items() if holders.get(i) == client_id},
            )
            for client_id, ids in partition.clients.items()
        },
        partition=partition,
        stages=filed.stages,
        removed=select(train, positions),
        poisoned=poisoned,
        canaries=torch.tensor([i in filed.canaries for i in holders], dtype=torch.bool),
        true_labels=data.train.labels[positions].tolist(),
        holders=list(holders.values()),
        test=test,
        triggered=None if backdoor is None else triggered_test(test, backdoor),
        backdoor=backdoor,
        class_names=data.class_names,
        missing=missing,
        filed=filed,
    )


def load_data(
    settings: DataSettings,
    seed: int,
    data_dir: Path | None,
    class_names: Sequence[str] | None = None,
) -> LabelledData:
    """Load the data that the settings name, or what they want of it.

    ``class_names`` are the classes that the data had at first, where that is known.
    """
    path = None if settings.path is None else Path(settings.path)
    data = load(settings.name, data_dir, path=path, class_names=class_names)
    return replace(
        data,
        train=_draw(data.train, settings.limit_train, seed, "train"),
        test=_draw(data.test, settings.limit_test, seed, "test"),
    )


def load_test(
    settings: DataSettings, data_dir: Path | None, class_names: Sequence[str] | None = None
) -> tuple[TensorExamples, tuple[str, ...]]:
    """Load the server's test set, with the names of the classes, where members have the rest.

    ``class_names`` are those that it had at first, where that is known.
    """
    if settings.path is not None:
        return load_half(settings.name, Path(settings.path), "test", class_names)
    data = load(settings.name, data_dir)
    return data.test, data.class_names


def _draw(examples: TensorExamples, count: int | None, seed: int, half: str) -> TensorExamples:
    """Return ``count`` of the examples, in their order; all where it is None."""
    if count is None:
        return examples
    if count > len(examples):
        raise ConfigError(f"data.limit_{half}: {count} of {len(examples)} samples; lower it.")
    order = torch.randperm(len(examples), generator=generator(seed, "samples", half))
    positions = order[:count].sort().values
    return select(examples, positions)


def _clients(
    train: TensorExamples, partition: Partition, missing: Sequence[str]
) -> Sequence[Client]:
    """Return the clients with their data, less what has been deleted since it was asked for."""
    lost = set(missing)
    left = {c: tuple(i for i in ids if i not in lost) for c, ids in partition.clients.items()}
    held = {c: ids for c, ids in left.items() if ids}
    parts = partitions.split(train, Partition(partition.kind, partition.seed, held))
    nothing = Subset(train, [])
    return [
        Client(
            client_id,
            parts.get(client_id, nothing),
            state=ClientState(tombstones=lost.intersection(ids)),
        )
        for client_id, ids in partition.clients.items()
    ]


def _members_scenario(
    config: Config, machine: Machine, members: Sequence[str], filed: _Filed | None
) -> Scenario:
    """Return the scenario of clients with data of their own: the server has a test set alone."""
    if config.engine != "flower":
        raise ConfigError('data.members have their data on their own machines: engine = "flower".')
    asked = config.deletion
    if any(
        value is not None for value in (asked.backdoor_target, asked.clean_rate, asked.canaries)
    ):
        raise ConfigError(
            "deletion: backdoor_target, clean_rate and canaries choose and change samples, and the "
            "data of data.members is out of reach: leave them out."
        )
    known = None if filed is None else filed.class_names
    test, class_names = load_test(config.data, machine.data_dir, known)
    model = _model(config, test, class_names)
    for what in (config.deletion, *config.deletion.then):
        if what.class_label is not None and what.class_label >= len(class_names):
            raise ConfigError(
                f"deletion.class_label: there is no class {what.class_label}; the test set has "
                f"{len(class_names)}, counted from 0."
            )
    nothing = select(test, torch.empty(0, dtype=torch.long))
    filed = filed or _Filed(_members_stages(config, members), {}, [], class_names=class_names)
    return Scenario(
        clients=[Client(name, nothing) for name in members],
        model=model.factory(),
        setups={name: ClientSetup(name, model, class_names) for name in members},
        partition=None,
        stages=filed.stages,
        test=test.to(machine.device),
        class_names=class_names,
        filed=filed,
    )


def _model(config: Config, test: TensorExamples, class_names: Sequence[str]) -> ModelSetup:
    shape = tuple(test.images.shape[1:])
    if len(shape) != 3:
        raise ConfigError(
            f"Runs need images (channels, height, width); {config.data.name} has samples of shape "
            f"{list(shape)}."
        )
    return ModelSetup(config.model.name, config.model.options, len(class_names), shape)


def _factory(model: ModelSetup, machine: Machine) -> ModelFactory:
    """Return what builds the models of a run; on a GPU those that only predict are compiled too."""
    compiled = machine.compiled and torch.device(machine.device).type != "cpu"
    return compiled_early(model.factory(), machine.device) if compiled else model.factory()


def _members_stages(config: Config, members: Sequence[str]) -> list[list[DeletionRequest]]:
    """Return the requests of all stages; nothing is asked for again, nor a client that has left."""
    left: set[str] = set()
    stages: list[list[DeletionRequest]] = []
    for what in (config.deletion, *config.deletion.then):
        before = [request for stage in stages for request in stage]
        wanted = [r for r in _members_requests(what, members) if r.client_id not in left]
        asked = [request for request in wanted if not removal.covered(request, before)]
        if not asked:
            raise ConfigError("deletion: all that is named is asked for already.")
        left.update(r.client_id for r in asked if deletion_kind(r) == "client")
        stages.append(asked)
    return stages


def _members_requests(what: Selection, members: Sequence[str]) -> list[DeletionRequest]:
    """Turn a selection into requests; whether a client holds what is named, it alone can tell."""
    if what.clients is not None:
        asked = [DeletionRequest(name) for name in dict.fromkeys(what.clients)]
    elif what.class_label is not None:
        asked = [DeletionRequest(name, class_label=what.class_label) for name in members]
    elif what.samples is not None:
        asked = _requests_of_lines(Path(what.samples))
    else:
        raise ConfigError(
            "deletion.rate chooses samples, and nobody here knows those of data.members: name "
            "clients, a class_label, or samples."
        )
    for request in asked:
        if request.client_id not in members:
            hint = f"data.members are {', '.join(members)}."
            raise ConfigError(unknown("client", request.client_id, members, hint))
    return asked


def _requests_of_lines(path: Path) -> list[DeletionRequest]:
    """Read a file of lines with a client's id and a sample's id each."""
    ids: dict[str, list[str]] = {}
    for line in map(str.strip, _read_ids(path)):
        client_id, _, sample_id = line.partition(" ")
        if not sample_id.strip():
            raise ConfigError(
                f"deletion.samples: {path} has the line {line!r}; with data.members a line is a "
                "client's id, a space, and a sample's id."
            )
        ids.setdefault(client_id, []).append(sample_id.strip())
    return [DeletionRequest(name, sample_ids=own) for name, own in ids.items()]


def select(examples: TensorExamples, positions: Tensor) -> TensorExamples:
    """Return some of the examples as examples of their own."""
    ids = [examples.ids[place] for place in positions.tolist()]
    return TensorExamples(
        examples.images[positions],
        examples.labels[positions],
        ids,
        mean=examples.mean,
        std=examples.std,
    )


class _Chooser:
    """Turns selections into requests; a sample that was asked for once is not chosen again."""

    def __init__(
        self, partition: Partition, train: TensorExamples, seed: int, shards: int | None
    ) -> None:
        self._partition = partition
        self._train = train
        self._seed = seed
        held = set().union(*partition.clients.values())
        labels = zip(train.ids, train.labels.tolist(), strict=True)
        self._label_of = {sample_id: label for sample_id, label in labels if sample_id in held}
        self._shard_of = shards and {
            sample_id: number
            for client_id, ids in partition.clients.items()
            for sample_id, number in shard_numbers(client_id, ids, shards, seed).items()
        }
        self._asked: set[str] = set()
        self._left: set[str] = set()

    def choose_all(self, deletion: DeletionSettings, backdoor: Backdoor | None) -> _Filed:
        """Return the requests of all stages, and which of the samples carry the trigger."""
        first = self._filed(self._requests(deletion, backdoor))
        poisoned = []
        if backdoor is not None:
            ids = list(self.held(first))
            hit = backdoor.eligible(torch.tensor([self._label_of[i] for i in ids]))
            poisoned = [i for i, yes in zip(ids, hit.tolist(), strict=True) if yes]
        if deletion.clean_rate is not None:  # of clients that ask for nothing else
            busy = {request.client_id for request in first}
            first += self._filed(self._at_rate(deletion.clean_rate, None, busy))
        canaries = self._canaries(deletion.canaries, first, poisoned)
        later = [self._filed(self._requests(what, None)) for what in deletion.then]
        held = self.held([request for stage in (first, *later) for request in stage])
        return _Filed([first, *later], held, poisoned, canaries)

    def _canaries(
        self, count: int | None, first: Sequence[DeletionRequest], poisoned: Sequence[str]
    ) -> dict[str, int]:
        """Draw removed samples without a trigger, and for each another label than its own."""
        if count is None:
            return {}
        if any(request.class_label is not None for request in first):
            raise ConfigError(
                "deletion.canaries have another label than their own, and class_label names "
                "samples by their label: leave one of them out."
            )
        hit = set(poisoned)
        plain = [sample_id for sample_id in self.held(first) if sample_id not in hit]
        if count >= len(plain):
            raise ConfigError(
                f"deletion.canaries: {count} of {len(plain)} removed samples without a trigger; "
                "some must keep their label to be compared with unseen ones. Lower it, or remove "
                "more."
            )
        draw = generator(self._seed, "canaries")
        classes = sorted(set(self._label_of.values()))
        found = {}
        for place in torch.randperm(len(plain), generator=draw)[:count].tolist():
            others = [label for label in classes if label != self._label_of[plain[place]]]
            choice = int(torch.randint(len(others), (1,), generator=draw))
            found[plain[place]] = others[choice]
        return found

    def _filed(self, requests: Sequence[DeletionRequest]) -> list[DeletionRequest]:
        """Return requests as they are filed: one that takes all that a client has left is a leave.

        A client that has left is not asked again.
        """
        asked = [r for r in requests if r.client_id not in self._left]
        if not asked:
            raise ConfigError("deletion: all that is named is asked for already.")
        self._asked.update(self.held(asked))
        held = self._partition.clients
        whole = [r.client_id for r in asked if self._asked.issuperset(held[r.client_id])]
        self._left.update(whole)
        return [DeletionRequest(r.client_id) if r.client_id in whole else r for r in asked]

    def held(self, requests: Sequence[DeletionRequest]) -> dict[str, str]:
        """Return the ids of all samples that the requests name, and the client that holds each."""
        holders: dict[str, str] = {}
        for request in requests:
            ids = self._partition.clients[request.client_id]
            if request.sample_ids is not None:
                ids = tuple(request.sample_ids)
            elif request.class_label is not None:
                ids = tuple(i for i in ids if self._label_of[i] == request.class_label)
            holders |= dict.fromkeys(ids, request.client_id)
        return holders

    def _requests(self, what: Selection, backdoor: Backdoor | None) -> list[DeletionRequest]:
        if what.rate is not None:
            eligible = None if backdoor is None else backdoor.eligible(self._train.labels)
            return self._at_rate(what.rate, eligible)
        if what.clients is not None:
            for client_id in what.clients:
                if self._asked.issuperset(self._partition.clients.get(client_id, [None])):
                    raise ConfigError(f"deletion: all data of {client_id} is asked for already.")
            return removal.requests_for_clients(self._partition, what.clients)
        if what.samples is not None:
            lines = _read_ids(Path(what.samples))
            named = [line if line in self._label_of else line.strip() for line in lines]
            ids = [i for i in named if i not in self._asked]
            return removal.requests_for_samples(self._partition, ids)
        label = what.class_label
        of_class = [i for i, own in self._label_of.items() if own == label]
        if label is None or not of_class:
            raise ConfigError(f"deletion.class_label: no client holds a sample of class {label}.")
        if backdoor is None and not self._asked:
            return removal.requests_for_class(self._partition, label)
        # Poisoned samples change their label: they are asked for by id.
        left = [i for i in of_class if i not in self._asked]
        if not left:
            raise ConfigError(f"deletion: all samples of class {label} are asked for already.")
        return removal.requests_for_samples(self._partition, left)

    def _at_rate(
        self, rate: float, eligible: Tensor | None, busy: Collection[str] = ()
    ) -> list[DeletionRequest]:
        """Choose a share of the *whole* training set among what has not been asked for.

        Nothing is chosen of clients that are ``busy``.
        """
        whole = sum(len(ids) for ids in self._partition.clients.values())
        left = {
            client_id: tuple(i for i in ids if i not in self._asked)
            for client_id, ids in self._partition.clients.items()
            if client_id not in busy
        }
        left = {client_id: ids for client_id, ids in left.items() if ids}
        if not left:
            raise ConfigError("deletion: no client has samples left to remove.")
        rest = Partition(self._partition.kind, self._partition.seed, left)
        share = min(rate * whole / sum(len(ids) for ids in left.values()), 1 - 1e-9)
        try:
            return removal.choose_rate(
                rest, self._train, share, self._seed, eligible, self._shard_of or None
            )
        except DataError as error:
            raise ConfigError(
                f"deletion: {rate:g} of the training set cannot be chosen: a client may lose 3/4 "
                "of what it has left, and a backdoor takes none of its target. Lower the rate."
            ) from error


def _read_filed(run: Path) -> _Filed | None:
    """Return what a run directory says was asked for; None where the run has not got so far."""
    path = run / REQUESTS
    if not path.exists():
        return None
    try:
        return TypeAdapter(_Filed).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError, ConfigError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise StoreError(
            f"{path}, which says who asked for what, cannot be read ({why}). {PUT_BACK}"
        ) from error


def _read_partition(run: Path) -> Partition:
    """Return what a run directory says of who holds what."""
    try:
        return partitions.explicit(run / PARTITION)
    except DataError as error:
        raise StoreError(
            f"{run / PARTITION}, which says who holds what, cannot be read: {error} {PUT_BACK}"
        ) from error


def divide(settings: DataSettings, seed: int, train: TensorExamples) -> Partition:
    """Return who holds what of the training data."""
    if settings.partition == "explicit":
        said = partitions.explicit(Path(settings.manifest or ""))
        partitions.split(train, said)  # says so where the data does not have a sample
        return said
    return partitions.partition(
        train, settings.clients, kind=settings.partition, alpha=settings.alpha, seed=seed
    )


def _read_ids(path: Path) -> list[str]:
    ids = removal.read_ids(path, "deletion.samples")
    if not ids:
        raise ConfigError(f"deletion.samples: {path} is empty; write one sample id a line.")
    return ids
