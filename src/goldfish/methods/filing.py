"""Filing deletion requests: every client that asks checks them against its data and remembers.

The engines do both for any task that carries requests. A task of its own reaches the clients before
any work is done, also those that a method would not ask: a client that leaves, or is not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from goldfish.errors import ConfigError
from goldfish.methods.method import by_client
from goldfish.methods.steps import answer
from goldfish.settings import Settings
from goldfish.types import (
    Client,
    Context,
    DeletionRequest,
    Federation,
    Step,
    Task,
    Update,
    Workspace,
)


def file(
    federation: Federation,
    requests: Sequence[DeletionRequest],
    honoured: Sequence[DeletionRequest] = (),
) -> list[str]:
    """Let the clients check and remember new requests; raise when one matches nothing.

    Returns the clients that did not answer: they are told by the first task that they are given. A
    class that is asked for at several clients may be missing at some of them, but not at all. Where
    a request names samples, only its client knows whether it holds them, so its word ends the run;
    other requests fit any data, and a client that refuses one has failed, no more.
    """
    earlier = by_client(honoured)
    context = Context(phase="filing")
    tasks = [
        Task(c, FILE, {}, Settings(), context, requests=own, honoured=earlier.get(c, ()))
        for c, own in by_client(requests).items()
    ]
    replies = federation.run(tasks)
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
    return [failure.client_id for failure in replies.failures]


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


FILE = Step("file", file_step, Settings, lambda task: list(map(class_count, classes_asked(task))))
