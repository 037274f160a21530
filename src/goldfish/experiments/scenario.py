"""From a configuration to the federation, the deletion requests and the test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from goldfish.data import Backdoor, Partition, TensorExamples, load, poison, removal, triggered_test
from goldfish.data import partition as partitions
from goldfish.errors import ConfigError
from goldfish.experiments.config import Config, DeletionSettings
from goldfish.federation import InProcess
from goldfish.models import model_factory
from goldfish.types import Client, DeletionRequest


@dataclass(frozen=True)
class Scenario:
    """Everything that all phases of a run share."""

    federation: InProcess
    partition: Partition
    requests: Sequence[DeletionRequest]
    removed: TensorExamples
    """The removed samples as the clients trained on them: with trigger, where there is one."""
    true_labels: Sequence[int]
    """The labels of the removed samples before any poisoning."""
    holders: Sequence[str]
    """Which client holds each removed sample."""
    test: TensorExamples
    triggered: TensorExamples | None
    backdoor: Backdoor | None
    num_classes: int
    class_names: Sequence[str]


def build_scenario(
    config: Config, *, data_dir: Path | None, device: str, workers: int | None
) -> Scenario:
    """Load the data, divide it, choose what is removed, poison it, and make the federation."""
    data = load(
        config.data.name,
        data_dir,
        path=None if config.data.path is None else Path(config.data.path),
    )
    partition = _partition(config, data.train)
    backdoor = None
    if config.deletion.backdoor_target is not None:
        backdoor = Backdoor(
            config.deletion.backdoor_target,
            config.deletion.backdoor_source,
            size=config.deletion.trigger_size,
        )
    requests = _requests(config.deletion, partition, data.train, backdoor, config.seed)
    holders = _holders(requests, partition, data.train)
    place = {sample_id: position for position, sample_id in enumerate(data.train.ids)}
    positions = torch.tensor([place[sample_id] for sample_id in holders], dtype=torch.long)
    true_labels = data.train.labels[positions].tolist()
    train = data.train
    if backdoor is not None:
        train = poison(train, positions[backdoor.eligible(train.labels[positions])], backdoor)
    if len(data.image_shape) != 3:
        shape = f"{data.image_shape}"
        raise ConfigError(f"Runs need images (channels, height, width); {data.name} has {shape}.")
    train, test = train.to(device), data.test.to(device)
    federation = InProcess(
        [Client(client_id, part) for client_id, part in partitions.split(train, partition).items()],
        model_factory(
            config.model.name,
            num_classes=data.num_classes,
            image_shape=(data.image_shape[0], data.image_shape[1], data.image_shape[2]),
            options=config.model.options,
        ),
        workers=workers,
        device=device,
    )
    return Scenario(
        federation=federation,
        partition=partition,
        requests=requests,
        removed=TensorExamples(
            train.images[positions],
            train.labels[positions],
            list(holders),
            mean=train.mean,
            std=train.std,
        ),
        true_labels=true_labels,
        holders=list(holders.values()),
        test=test,
        triggered=None if backdoor is None else triggered_test(test, backdoor),
        backdoor=backdoor,
        num_classes=data.num_classes,
        class_names=data.class_names,
    )


def _partition(config: Config, train: TensorExamples) -> Partition:
    settings = config.data
    if settings.partition == "explicit":
        return partitions.explicit(Path(settings.manifest or ""))
    return partitions.partition(
        train, settings.clients, kind=settings.partition, alpha=settings.alpha, seed=config.seed
    )


def _requests(
    deletion: DeletionSettings,
    partition: Partition,
    train: TensorExamples,
    backdoor: Backdoor | None,
    seed: int,
) -> list[DeletionRequest]:
    if deletion.rate is not None:
        eligible = None if backdoor is None else backdoor.eligible(train.labels)
        return removal.choose_rate(partition, train, deletion.rate, seed, eligible)
    if deletion.clients is not None:
        return removal.requests_for_clients(partition, deletion.clients)
    if deletion.samples is not None:
        return removal.requests_for_samples(partition, _read_ids(Path(deletion.samples)))
    label = deletion.class_label
    members = [i for i, own in zip(train.ids, train.labels.tolist(), strict=True) if own == label]
    if not members:
        raise ConfigError(f"deletion.class_label: no training sample is of class {label}.")
    if backdoor is None and label is not None:
        return removal.requests_for_class(partition, label)
    # Poisoned samples change their label: they are asked for by id.
    return removal.requests_for_samples(partition, members)


def _holders(
    requests: Sequence[DeletionRequest], partition: Partition, train: TensorExamples
) -> dict[str, str]:
    """Return the ids of all removed samples and the client that holds each."""
    label_of = dict(zip(train.ids, train.labels.tolist(), strict=True))
    holders: dict[str, str] = {}
    for request in requests:
        held = partition.clients[request.client_id]
        if request.sample_ids is not None:
            chosen = list(request.sample_ids)
        elif request.class_label is not None:
            chosen = [sample_id for sample_id in held if label_of[sample_id] == request.class_label]
        else:
            chosen = list(held)
        holders |= dict.fromkeys(chosen, request.client_id)
    return holders


def _read_ids(path: Path) -> list[str]:
    try:
        ids = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deletion.samples: {path} cannot be read: {error}.") from None
    if not ids:
        raise ConfigError(f"deletion.samples: {path} is empty; write one sample id a line.")
    return ids
