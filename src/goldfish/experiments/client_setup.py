"""What a client is told of an experiment, so that it can build its data and model where it is.

Names and ids only: the data itself is read on the client's own machine.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from goldfish.data import Backdoor, Partition, Subset, TensorExamples, load, load_half, poison
from goldfish.data import partition as partitions
from goldfish.errors import ConfigError
from goldfish.models import model_factory
from goldfish.types import Examples, ModelFactory, Scalar

STRICT = ConfigDict(extra="forbid")
"""What arrives has no names beside those that are known."""


def key_of(salt: str, sample_id: str, client: str | None = None) -> str:
    """Return a sample's key: a digest of its id under a salt. With ``client`` ids are its own."""
    name = sample_id if client is None else f"{client}\0{sample_id}"
    return hmac.digest(bytes.fromhex(salt), name.encode(), "sha256").hex()[:32]


@dataclass(frozen=True)
class ModelSetup:
    """The model, by name, and what its factory needs to know of the data."""

    __pydantic_config__ = STRICT
    name: str
    options: Mapping[str, Scalar]
    num_classes: int
    image_shape: tuple[int, int, int]

    def factory(self) -> ModelFactory:
        """Return what builds the model."""
        return model_factory(
            self.name,
            num_classes=self.num_classes,
            image_shape=self.image_shape,
            options=self.options,
        )


@dataclass(frozen=True)
class ClientSetup:
    """One client's part of an experiment."""

    __pydantic_config__ = STRICT
    client_id: str
    model: ModelSetup
    class_names: tuple[str, ...]
    dataset: str | None = None
    """The dataset that all clients share; None for a client that has data of its own."""
    path: str | None = None
    """Where a dataset of one's own lies on the server; a client reads it where itself says."""
    ids: tuple[str, ...] = ()
    """The samples of the shared dataset that the client holds, in order."""
    poisoned: tuple[str, ...] = ()
    """Those of them that carry the trigger and the attacker's label."""
    backdoor: Backdoor | None = None
    canaries: Mapping[str, int] = field(default_factory=dict)
    """Those of them that have a wrong label, and which."""
    salt: str | None = None
    """In a project samples are known by their keys under this salt, and never by their ids."""
    gone: tuple[str, ...] = ()
    """In a project: those of ``ids`` that were removed. What is not there any more is too."""

    def to_json(self) -> str:
        """Return the setup as text, the same for equal setups."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ClientSetup:
        """Read a setup back; what is not one is refused."""
        try:
            return _READER.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))[:100]
            raise ConfigError(
                f"A client's setup cannot be read ({where}: {first['msg'][:200]}). Server and "
                "client need the same version of Goldfish."
            ) from None


_READER = TypeAdapter(ClientSetup)


def shared_examples(
    setup: ClientSetup, data_dir: Path | None = None, path: Path | None = None
) -> Subset:
    """Read the shared dataset and return the client's part, with the trigger where it belongs.

    ``path`` is where a dataset of one's own lies here: a server cannot name a file of this machine.
    """
    if setup.path is not None and path is None:
        raise ConfigError(
            f"{setup.client_id} reads only what its own node-config names: start its node with "
            f'path="...", where the data ({setup.dataset}) lies there.'
        )
    own = path if setup.path else None
    train = load(setup.dataset or "", data_dir, path=own, class_names=setup.class_names).train
    if setup.salt is not None:
        return left_of(setup, with_keys(train, setup.salt))
    if setup.poisoned:
        train = with_trigger(train, setup.poisoned, setup.backdoor)
    train = with_canaries(train, setup.canaries)
    one = Partition("explicit", 0, {setup.client_id: setup.ids})
    return partitions.split(train, one)[setup.client_id]


def own_examples(setup: ClientSetup, kind: str, path: Path) -> TensorExamples:
    """Read the data that the client has of its own, and see that it fits the federation's model."""
    examples, _ = load_half(kind, path, "train", setup.class_names)
    shape = tuple(examples.images.shape[1:])
    if shape != setup.model.image_shape:
        raise ConfigError(
            f"{path}: a sample has the shape {list(shape)}, but the federation's model takes "
            f"{list(setup.model.image_shape)}."
        )
    if setup.salt is not None and are_positions(examples.ids):
        raise ConfigError(
            f"{path}: samples have no ids but their positions, which mean other samples once one "
            "is deleted. Give them ids (ids_train, or files in folders): a project needs them."
        )
    if setup.salt is not None and not setup.ids:
        refuse_nameless(str(path), examples.ids)
    return examples


def refuse_nameless(where: str, ids: Iterable[str]) -> None:
    """Raise where no request could name a sample, before a project is bound to it."""
    for sample_id in ids:
        if not sample_id.strip() or "\n" in sample_id:
            raise ConfigError(
                f"{where}: a sample has the id {sample_id!r}. Requests name samples by a file with "
                "one id a line, and it can have no such line. Give the sample another id."
            )


def are_positions(ids: Sequence[str]) -> bool:
    """Tell whether ids are places in the data, and no names."""
    return list(ids) == [str(place) for place in range(len(ids))]


def with_keys(examples: TensorExamples, salt: str, client: str | None = None) -> TensorExamples:
    """Return the examples under their keys; with ``client`` their ids are that client's own."""
    keys = [key_of(salt, sample_id, client) for sample_id in examples.ids]
    return TensorExamples(
        examples.images, examples.labels, keys, mean=examples.mean, std=examples.std
    )


def left_of(setup: ClientSetup, examples: TensorExamples) -> Subset:
    """Return what is left of the samples that a project's client had at first, in their order."""
    place = {key: position for position, key in enumerate(examples.ids)}
    gone = set(setup.gone)
    return Subset(examples, [place[k] for k in setup.ids if k in place and k not in gone])


def with_trigger(
    train: TensorExamples, poisoned: tuple[str, ...], backdoor: Backdoor | None
) -> TensorExamples:
    """Return the examples with trigger and target label on the samples of these ids."""
    if backdoor is None:
        raise ConfigError("Samples are to carry a trigger, but no backdoor is described.")
    place = {sample_id: position for position, sample_id in enumerate(train.ids)}
    unknown = [sample_id for sample_id in poisoned if sample_id not in place]
    if unknown:
        raise ConfigError(f"The data has no sample {unknown[0]!r}, which is to carry a trigger.")
    return poison(train, torch.tensor([place[sample_id] for sample_id in poisoned]), backdoor)


def with_canaries(train: TensorExamples, canaries: Mapping[str, int]) -> TensorExamples:
    """Return the examples with the label of each canary; other ids are passed over."""
    if not canaries:
        return train
    labels = train.labels.clone()
    for position, sample_id in enumerate(train.ids):
        if sample_id in canaries:
            labels[position] = canaries[sample_id]
    return TensorExamples(train.images, labels, train.ids, mean=train.mean, std=train.std)


def on_device(examples: Subset, device: str) -> Examples:
    """Return a client's examples with their tensors on ``device``."""
    if device == "cpu" or not isinstance(examples.examples, TensorExamples):
        return examples
    return Subset(examples.examples.to(device), examples.positions.cpu())
