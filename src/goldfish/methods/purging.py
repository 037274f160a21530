"""Purging: clients delete what they keep that descends from samples which were removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from goldfish.methods.steps import answer
from goldfish.settings import Settings
from goldfish.types import Context, Federation, Step, Task, Update


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
