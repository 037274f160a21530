"""An audit where the samples are: clients compute margins, keep them, and tell means and counts.

The server shows the clients one model after the other (``LOOK``). A client keeps each model's
margins on its removed samples, and tells counts and shares. When it has seen all models, it
compares what it kept (``COMPARE``) and tells one mean for each; at the end it drops everything
(``DROP``). Nothing that it tells is about fewer samples than :attr:`goldfish.types.Client.fewest`,
and how much it tells does not grow with the samples that it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from goldfish.audits import ClientHarm, Harm, QuickAudit, Rate
from goldfish.errors import StoreError
from goldfish.evaluation.attacks import margins, membership
from goldfish.evaluation.audit import mean_variance, shifts
from goldfish.methods.method import by_client, deletion_kind
from goldfish.methods.records import class_count
from goldfish.methods.steps import answer
from goldfish.settings import Settings
from goldfish.training.fit import predict
from goldfish.types import (
    Client,
    Context,
    DeletionRequest,
    Federation,
    Params,
    Step,
    Task,
    Update,
    Workspace,
)

PHASE, AUDITED = "audit", "audited"
"""The phase of the tasks, and the name of the array that holds the model to look at."""


class LookSettings(Settings):
    """What a client is told of the model that it looks at."""

    name: str
    """Under which it keeps what it finds."""
    classes: Annotated[int, Field(ge=1, le=2**20)]
    """How many classes there are."""
    remaining: bool = False
    """Whether to look at remaining samples too."""
    before: str = ""
    """The model with which remaining samples are compared; empty: none."""
    unseen: tuple[float, ...] = ()
    """The model's margins on the server's unseen samples, for the membership attack."""
    unseen_labels: tuple[int, ...] = ()


class CompareSettings(Settings):
    """Which of the models that a client has looked at it compares."""

    models: tuple[str, ...]
    """Origin, and the model of each method."""
    oracles: tuple[str, ...]
    usual: float | None = None
    """The variance of margins between oracles, the mean over the removed samples of all clients;
    None: tell that over your own."""


def look_step(task: Task[LookSettings], client: Client, workspace: Workspace) -> Update:
    """Look at a model: keep its margins on removed samples, and tell counts and shares."""
    asked, removed = task.settings, client.removed
    module = workspace.load(AUDITED, task.arrays[AUDITED]).module
    kept: dict[str, Tensor] = {}
    found: dict[str, float] = dict.fromkeys(_counts(task), 0.0)
    if removed is not None and len(removed) < client.fewest:
        found["too_few"] = 1.0
    elif removed is not None:
        labels = removed.labels.cpu()
        own = kept["margins"] = margins(predict(module, removed), labels)
        counts = torch.bincount(labels, minlength=asked.classes).tolist()
        found |= {class_count(label): float(number) for label, number in enumerate(counts)}
        found["removed"] = float(len(removed))
        unseen = torch.tensor(asked.unseen, dtype=torch.float64)
        share = membership(own, labels, unseen, torch.tensor(asked.unseen_labels))
        if share is not None and share.count >= client.fewest:
            found |= {name: getattr(share, name) for name in ("rate", "low", "high")}
            found["matched"] = float(share.count)
    if asked.remaining and len(client.retained) >= max(client.fewest, 1):
        right = predict(module, client.retained).argmax(dim=1) == client.retained.labels.cpu()
        kept["right"] = right
        found |= {"remaining": float(len(right)), "right": float(right.sum())}
        if asked.before:
            change = right.int() - _kept(client, asked.before, "right").int()
            found |= {"lost": float((change < 0).sum()), "gained": float((change > 0).sum())}
    client.state.arrays[f"{PHASE}/{asked.name}"] = kept
    return answer(task, {}, 0, [], found)


def compare_step(task: Task[CompareSettings], client: Client, _workspace: Workspace) -> Update:
    """Tell each model's mean shift on the removed samples and that of its square.

    First, where the others are not known yet, tell how much oracles vary.
    """
    asked = task.settings
    ours, oracles = (
        torch.stack([_kept(client, name, "margins") for name in names])
        for names in (asked.models, asked.oracles)
    )
    if asked.usual is None:
        return answer(task, {}, 0, [], {"variance": mean_variance(oracles)})
    names = (*asked.models, *asked.oracles)
    sides = shifts(ours, oracles, usual=asked.usual)
    means, squares = (torch.cat(both).tolist() for both in zip(*sides, strict=True))
    told = dict(zip(names, means, strict=True))
    told |= dict(zip(map(_squared, names), squares, strict=True))
    return answer(task, {}, 0, [], told)


def drop_step(task: Task[Settings], client: Client, _workspace: Workspace) -> Update:
    """Drop all that the client keeps under the name of this run."""
    for key in list(client.state.arrays):
        del client.state.arrays[key]
    return answer(task, {}, 0, [])


def _squared(name: str) -> str:
    """Return the name under which the mean square of a model's shifts is told."""
    return f"{name} squared"


def _kept(client: Client, name: str, what: str) -> Tensor:
    found = client.state.arrays.get(f"{PHASE}/{name}", {}).get(what)
    if found is None:
        raise StoreError(f"{client.id} keeps no {what} of {name!r}: start the audit again.")
    return found


def _counts(task: Task[LookSettings]) -> list[str]:
    """Return the names of all counts that are told of a model."""
    groups = ("removed", "too_few", "matched", "remaining", "right", "lost", "gained")
    return [*groups, *map(class_count, range(task.settings.classes))]


LOOK = Step("audit-look", look_step, LookSettings, _counts)
COMPARE = Step("audit-compare", compare_step, CompareSettings)
DROP = Step("audit-drop", drop_step, Settings)
STEPS: Sequence[Step[Any]] = (LOOK, COMPARE, DROP)


def drop(federation: Federation) -> None:
    """Let all clients drop what they keep under the name of this run."""
    for last in range(2):  # a client's store has what was there before the last task, too
        context = Context(phase=PHASE, round=2**47 + last)
        federation.run([Task(c, DROP, {}, Settings(), context) for c in federation.client_ids])


class Witnesses:
    """The clients of a federation, who are shown models; what they tell is added up here.

    Whoever does not answer once is not asked again: a comparison needs all models.
    """

    def __init__(
        self, federation: Federation, requests: Sequence[DeletionRequest], classes: int
    ) -> None:
        self._federation = federation
        self._requests = by_client(requests)
        self._num_classes = classes
        self._round = 0
        self._there = list(federation.client_ids)
        self._first: dict[str, Mapping[str, float]] = {}
        """What each client told of the first model, origin."""
        self._models: list[str] = []
        self._oracles: list[str] = []
        self.notes: list[str] = []
        """Who told nothing, and why."""

    @property
    def removed(self) -> dict[str, int]:
        """How many removed samples each client tells of, if any."""
        told = {c: int(self._first[c]["removed"]) for c in self._there if c in self._first}
        return {client_id: count for client_id, count in told.items() if count}

    @property
    def labels(self) -> Tensor:
        """The labels of these removed samples, by class."""
        counts = [
            sum(int(self._first[client_id][class_count(label)]) for client_id in self.removed)
            for label in range(self._num_classes)
        ]
        return torch.repeat_interleave(torch.arange(self._num_classes), torch.tensor(counts))

    def look(self, name: str, params: Params, unseen: Tensor, labels: Tensor) -> QuickAudit:
        """Show a model of the run, origin first; ``unseen`` are its margins on unseen samples."""
        origin = self._models[0] if self._models else ""
        settings = LookSettings(
            name=name,
            classes=self._num_classes,
            remaining=True,
            before=origin,
            unseen=tuple(unseen.tolist()),
            unseen_labels=tuple(labels.tolist()),
        )
        told = self._ask(LOOK, settings, self._there, {AUDITED: params})
        self._models.append(name)
        if not origin:
            self._first = told
            self._note_silence()
        return QuickAudit(
            membership=_membership(told.values()), harm=self._harm(told) if origin else None
        )

    def look_at_oracle(self, name: str, params: Params) -> None:
        """Show an oracle to the clients that have removed samples to compare on."""
        settings = LookSettings(name=name, classes=self._num_classes)
        self._ask(LOOK, settings, list(self.removed), {AUDITED: params})
        self._oracles.append(name)

    def shifts(self) -> dict[str, tuple[float, float]]:
        """Return each model's mean shift over the removed samples of all clients that tell.

        Beside it stands the mean of its square.
        """
        names: dict[str, Any] = {"models": self._models, "oracles": self._oracles}
        told = self._ask(COMPARE, CompareSettings(**names), list(self.removed))
        usual = self._mean(told, "variance")
        told = self._ask(COMPARE, CompareSettings(**names, usual=usual), list(self.removed))
        return {
            name: (self._mean(told, name), self._mean(told, _squared(name)))
            for name in (*self._models, *self._oracles)
        }

    def _mean(self, told: Mapping[str, Mapping[str, float]], name: str) -> float:
        """Return the mean over the samples of clients that tell the means over their own."""
        counts = self.removed
        total = sum(counts[client_id] for client_id in told)
        weighed = sum(counts[c] * own.get(name, math.nan) for c, own in told.items())
        return weighed / total if total else math.nan

    def _ask(
        self,
        step: Step[Any],
        settings: Settings,
        clients: Sequence[str],
        arrays: Mapping[str, Params] | None = None,
    ) -> dict[str, Mapping[str, float]]:
        """Ask some clients; who does not answer, or with what is no number, is left out."""
        self._round += 1
        context = Context(phase=PHASE, round=self._round)
        tasks = [
            Task(c, step, arrays or {}, settings, context, requests=self._requests.get(c, ()))
            for c in clients
        ]
        replies = self._federation.run(tasks)
        told = {update.client_id: update.metrics for update in replies.updates}
        lost = {failure.client_id: failure.cause for failure in replies.failures}
        for client_id, own in list(told.items()):
            by_class = sum(own.get(class_count(n), 0.0) for n in range(self._num_classes))
            if not all(map(math.isfinite, own.values())) or own.get("removed", 0.0) != by_class:
                lost[client_id] = "what it tells makes no sense"
                del told[client_id]
        for client_id, cause in lost.items():
            self._there.remove(client_id)
            self.notes.append(f"{client_id} is left out: {cause}")
        return told

    def _note_silence(self) -> None:
        """Say of which samples nobody tells."""
        few = "fewer than it tells of (min-audited in its node-config)"
        for client_id, own in self._first.items():
            asked = self._requests.get(client_id, ())
            named = {sample_id for request in asked for sample_id in request.sample_ids or ()}
            count = int(own["removed"])
            kinds = {deletion_kind(request) for request in asked}
            if own["too_few"]:
                self.notes.append(f"The removed samples of {client_id} are left out: {few}.")
            elif (asked and not count and kinds != {"class"}) or count < len(named):
                held = f"{count} of its {len(named)}" if count else "none of its"
                self.notes.append(f"{client_id} has {held} removed samples left to look at.")
            if not own["remaining"] and "client" not in kinds:
                self.notes.append(f"The remaining samples of {client_id} are left out: {few}.")

    def _harm(self, told: Mapping[str, Mapping[str, float]]) -> Harm | None:
        found = {c: own for c, own in told.items() if own["remaining"]}
        if not found:
            return None
        return Harm(
            clients={
                client_id: ClientHarm(
                    before=100 * self._first[client_id]["right"] / own["remaining"],
                    after=100 * own["right"] / own["remaining"],
                    samples=int(own["remaining"]),
                )
                for client_id, own in found.items()
            },
            lost=int(sum(own["lost"] for own in found.values())),
            gained=int(sum(own["gained"] for own in found.values())),
            samples=int(sum(own["remaining"] for own in found.values())),
            most_affected=[],
        )


def _membership(told: Iterable[Mapping[str, float]]) -> Rate | None:
    """Return the share over the samples of all clients.

    Its interval is the mean of theirs too: they compare with the same unseen samples, so their
    errors may go the same way. It is at most too wide.
    """
    found = [own for own in told if own["matched"] and {"rate", "low", "high"} <= own.keys()]
    count = sum(own["matched"] for own in found)
    if not count:
        return None
    rate, low, high = (
        sum(own["matched"] * own[name] for own in found) / count for name in ("rate", "low", "high")
    )
    return Rate(rate=rate, low=low, high=high, count=int(count))
