"""What clients do about their data without training: file requests, say what they hold, purge.

*Filing*: every client that asks checks its deletion requests against its data, and when none was
refused, they all remember them. The engines do both for any task that carries requests. A task of
its own reaches the clients before any work is done, also those that a method would not ask: a
client that leaves, or is not drawn.
*Census*: clients with data of their own say which samples they hold, by their keys. *Purging*:
clients delete what they keep that descends from samples which were removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    Failure,
    Federation,
    RoundReplies,
    Step,
    Task,
    Update,
    Workspace,
)


def file(
    federation: Federation,
    requests: Sequence[DeletionRequest],
    honoured: Sequence[DeletionRequest] = (),
    telling: Callable[[Collection[str]], None] = lambda _clients: None,
) -> list[Failure]:
    """Let the clients check and remember new requests; raise when one matches nothing.

    Returns why clients did not answer: they are told by the first task that they are given. Of
    those that are told now, ``telling`` hears before they are: who does not answer is not. A
    class that is asked for at several clients may be missing at some of them, but not at all. Where
    a request names samples, only its client knows whether it holds them, so its word ends the run;
    other requests fit any data, and a client that refuses one has failed, no more. All requests
    are checked before any is remembered: what is refused leaves no trace at any client.
    """
    asked = list(requests)
    away: list[Failure] = []
    for step in (CHECK, FILE):
        if step is FILE:
            telling({request.client_id for request in asked})
        replies = _told(step, federation, asked, honoured)
        _refuse_misfits(requests, replies)
        away += replies.failures
        absent = {failure.client_id for failure in replies.failures}
        asked = [request for request in asked if request.client_id not in absent]
        if not asked:
            break
    return away


def look(
    federation: Federation,
    requests: Sequence[DeletionRequest],
    honoured: Sequence[DeletionRequest] = (),
) -> None:
    """Let the clients check new requests as in :func:`file`, and remember none of them."""
    _refuse_misfits(requests, _told(CHECK, federation, requests, honoured))


def _told(
    step: Step[Settings],
    federation: Federation,
    requests: Sequence[DeletionRequest],
    honoured: Sequence[DeletionRequest],
) -> RoundReplies:
    """Return what the clients answer that are told of requests."""
    earlier, context = by_client(honoured), Context(phase="filing")
    return federation.run(
        [
            Task(c, step, {}, Settings(), context, requests=own, honoured=earlier.get(c, ()))
            for c, own in by_client(requests).items()
        ]
    )


def _refuse_misfits(requests: Sequence[DeletionRequest], replies: RoundReplies) -> None:
    """Raise where a client says that a request matches nothing."""
    names_samples = {request.client_id for request in requests if request.sample_ids is not None}
    for failure in replies.failures:
        sure = failure.final or failure.client_id in names_samples
        if failure.error == "ConfigError" and sure:
            raise ConfigError(f"{failure.client_id}: {failure.cause}")
    held = {update.client_id: update.metrics for update in replies.updates}
    for label in dict.fromkeys(r.class_label for r in requests if r.class_label is not None):
        asked = [r.client_id for r in requests if r.class_label == label]
        if all(client in held and not held[client][class_count(label)] for client in asked):
            who = f"Client {asked[0]!r} holds no"
            if len(asked) > 1:
                who = f"None of the {len(asked)} clients that were asked holds a"
            raise ConfigError(f"{who} sample of class {label}: nothing would be removed.")


def file_step(task: Task[Settings], client: Client, _workspace: Workspace) -> Update:
    """Say how many samples of each class that is asked for the client removes."""
    labels = [] if client.removed is None else client.removed.labels.tolist()
    counts = {class_count(label): labels.count(label) for label in classes_asked(task)}
    return answer(task, {}, 0, [], counts)


def classes_asked(task: Task[Settings]) -> list[int]:
    """Return the classes that the client is asked to remove."""
    return [r.class_label for r in task.requests if r.class_label is not None]


def class_count(label: int) -> str:
    """Return the name of the metric that counts a class."""
    return f"class-{label}"


def _counted(task: Task[Settings]) -> list[str]:
    return list(map(class_count, classes_asked(task)))


CHECK = Step("check", file_step, Settings, _counted, only_looks=True)
FILE = Step("file", file_step, Settings, _counted)


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


CENSUS = Step("census", census_step, CensusSettings, only_looks=True)


class PurgeSettings(Settings):
    """What a client may keep."""

    keep: list[str]
    """The phases whose shard models know nothing of removed samples."""


def purge(federation: Federation, keep: Mapping[str, Sequence[str]]) -> list[str]:
    """Let clients delete all that they keep, but for these phases of each; return who did."""
    context = Context(phase="purging")
    tasks = [
        Task(client, PURGE, {}, PurgeSettings(keep=list(phases)), context)
        for client, phases in keep.items()
    ]
    return [update.client_id for update in federation.run(tasks).updates]


def purged(task: Task[PurgeSettings]) -> Update:
    """Return the answer of a client that has deleted it."""
    return answer(task, {}, 0, [])


PURGE = Step("purge", lambda task, _client, _workspace: purged(task), PurgeSettings)
"""What a client keeps is on its own disk, and the engine there deletes it. In one process nothing
outlives the engine."""
