"""The census: clients with data of their own say which samples they hold, by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import NonNegativeInt

from goldfish.errors import ConfigError
from goldfish.methods.method import by_client
from goldfish.methods.steps import answer
from goldfish.settings import Settings
from goldfish.types import (
    MOST_NAMES,
    Client,
    Context,
    DeletionRequest,
    Federation,
    Step,
    Task,
    Update,
    Workspace,
)


class CensusSettings(Settings):
    """Which samples a client is to name."""

    label: NonNegativeInt | None = None
    """Those of this class; None: all."""
    start: NonNegativeInt = 0
    """Those from this place on: a message holds so many."""


def census(
    federation: Federation,
    clients: Sequence[str],
    requests: Sequence[DeletionRequest] = (),
    label: int | None = None,
    *,
    refuse: bool = False,
) -> dict[str, list[str]]:
    """Return what each of these clients holds, all or of one class; who is not there is left out.

    What ``requests`` name is asked for now, and counts as held. With ``refuse`` a client that says
    that a setting of it is wrong ends it.
    """
    asked, context = by_client(requests), Context(phase="census")
    found: dict[str, list[str]] = {}
    more, start = list(clients), 0
    while more:
        settings = CensusSettings(label=label, start=start)
        tasks = [Task(c, CENSUS, {}, settings, context, requests=asked.get(c, ())) for c in more]
        replies = federation.run(tasks)
        for failure in replies.failures:
            if refuse and failure.error == "ConfigError":
                raise ConfigError(f"{failure.client_id}: {failure.cause}")
            found.pop(failure.client_id, None)
        for update in replies.updates:
            found.setdefault(update.client_id, []).extend(update.names)
        more = [update.client_id for update in replies.updates if len(update.names) == MOST_NAMES]
        start += MOST_NAMES
    return {client: list(dict.fromkeys(names)) for client, names in found.items()}


def census_step(task: Task[CensusSettings], client: Client, _workspace: Workspace) -> Update:
    """Name the samples that the client holds, in the order of its data.

    Which are of a class is told only where the class is asked for: then they are removed.
    """
    label = task.settings.label
    if label is not None and all(request.class_label != label for request in task.requests):
        raise ConfigError(f"Nobody asks that class {label} be removed: its samples are not named.")
    held = [client.retained, *([] if client.removed is None else [client.removed])]
    pairs = [pair for own in held for pair in zip(own.ids, own.labels.tolist(), strict=True)]
    wanted = [key for key, own in pairs if label in (None, own)]
    start = task.settings.start
    names = tuple(wanted[start : start + MOST_NAMES])
    return replace(answer(task, {}, 0, []), names=names)


CENSUS = Step("census", census_step, CensusSettings)
