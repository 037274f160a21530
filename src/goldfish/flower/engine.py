"""The engine across machines: a federation over a Flower grid.

The server's side: every task becomes a message to the node that says it is the task's client, and
is asked for again and again until the answer is there, the time is over, or the retries are spent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from goldfish.errors import ConfigError, DivergenceError, WireError, plain, unknown
from goldfish.federation.settings import FlowerSettings
from goldfish.federation.spool import Spool, keep
from goldfish.flower import wire
from goldfish.types import Failure, ModelFactory, RoundReplies, States, Task, Update
from goldfish.version import __version__

logger = logging.getLogger("flwr.goldfish")  # so that it appears in Flower's own log

LOST = {3: "MessageLost", 4: "ReplyLost", 5: "NodeUnavailable", 8: "ClientAppCrashed"}
"""Flower's codes of errors that may pass: the task is sent again."""
NODES_EVERY = 1.0
"""Seconds between two looks at which nodes are there."""


@dataclass
class _Job:
    """An order on its way to an answer."""

    task: Task[Any]
    order: wire.Order
    began: float
    spool: Spool | None = None
    """Where the update waits when a round's are too many for the memory."""
    node: int | None = None
    message: str | None = None
    """The message that is out; None when there is none."""
    deadline: float = 0.0
    tries: int = 0
    wanted: set[str] = field(default_factory=set)
    """What the client said it does not have."""
    lost: str = ""
    """What went wrong with the last try."""
    outcome: Update | Failure | None = None

    @property
    def client_id(self) -> str:
        return self.task.client_id

    @property
    def after(self) -> str:
        """What went wrong before, as the end of a sentence."""
        return f" after {self.lost}" if self.lost else ""

    def fail(self, error: str, cause: str, *, final: bool = False) -> None:
        self.outcome = Failure(self.client_id, plain(error), plain(cause), final)


class FlowerFederation:
    """A federation whose clients are the nodes of a Flower grid.

    ``setups`` says for each client how it builds its data and model; ``run_id`` names what clients
    keep of this run on their own disks, and a second training needs another one. A node tells by
    itself which client it is, so nodes may come, go, and come back under another number.
    ``samples`` says how many samples clients have, where the server knows: none can say more.
    """

    def __init__(
        self,
        grid: Grid,
        setups: Mapping[str, str],
        model: ModelFactory,
        *,
        run_id: str,
        settings: FlowerSettings | None = None,
        samples: Mapping[str, int] | None = None,
        threads: int = 1,
    ) -> None:
        if not setups:
            raise ConfigError("A federation needs clients, and there is none.")
        self.model = model
        self.threads = threads
        self.bytes_on_wire = 0
        """Bytes of all messages so far, both ways."""
        self._grid = grid
        self._setups = dict(setups)
        self._run_id = run_id
        self._settings = settings or FlowerSettings()
        told = self._settings.clients
        for name in told:
            if name not in setups:
                hint = f"flower.clients names it; the run has {len(setups)} clients."
                raise ConfigError(unknown("client", name, setups, hint))
        self._nodes: dict[int, wire.Identity | wire.Failed] = {}
        self._asked: dict[str, int] = {}
        self._looked = 0.0
        self._missed: dict[str, float] = {}
        """Since when no node is this client, for those that are not there."""
        self._sure: set[int] = set()
        """Nodes that said once more who they are, after another one had said the same."""
        self._holds: dict[str, set[str]] = {client_id: set() for client_id in setups}
        self._kept: dict[tuple[str, str], int] = {}
        bounds = {name: own.samples for name, own in told.items() if own.samples is not None}
        most = self._settings.samples or wire.MOST - 1
        self._samples = {**dict.fromkeys(setups, most), **bounds, **(samples or {})}
        """The most samples that each client can have learned from."""

    @property
    def client_ids(self) -> Sequence[str]:
        """The ids of all clients, in the order in which they were given."""
        return list(self._setups)

    @property
    def workers(self) -> int:
        """All clients work at a time, each on its own node."""
        return len(self._setups)

    def greet(self) -> None:
        """Find out which node is which client, so that the first round need not wait for it.

        Returns when all clients are there, or after the settings' patience.
        """
        began = time.monotonic()
        while missing := [c for c in self._setups if self._node_of(c) is None]:
            if time.monotonic() - began >= self._settings.patience:
                self._missed |= dict.fromkeys(missing, began)
                return
            self._look_for_nodes()
            self._collect({})
            time.sleep(self._settings.poll)

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        """Send all tasks; a client that is missing, late or fails becomes a :class:`Failure`."""
        before, began = self.bytes_on_wire, time.monotonic()
        spool = Spool.for_answers(tasks)
        jobs = []
        for task in tasks:
            order = wire.Order.of(task, self._run_id, self._setups[task.client_id], self.threads)
            jobs.append(_Job(task, order, began, spool))
        self._looked = 0.0
        known = self._nodes.items()  # a node that was no client may have been mended since
        self._nodes = {node: who for node, who in known if isinstance(who, wire.Identity)}
        while waiting := [job for job in jobs if job.outcome is None]:
            self._look_for_nodes()
            self._send(waiting)
            self._collect({job.message: job for job in waiting if job.message is not None})
            self._give_up_late([job for job in waiting if job.outcome is None])
            if any(job.outcome is None for job in waiting):
                time.sleep(self._settings.poll)
        seconds, size = time.monotonic() - began, self.bytes_on_wire - before
        logger.info("%d tasks in %.1f s, %d bytes on the wire", len(tasks), seconds, size)
        outcomes = [job.outcome for job in jobs]
        return RoundReplies(
            [o for o in outcomes if isinstance(o, Update)],
            [o for o in outcomes if isinstance(o, Failure)],
        )

    def states(self) -> States:
        """Return nothing: what clients keep is on their own disks."""
        return {}

    def restore(self, states: States) -> None:
        """Do nothing: a client finds on its own disk what it had before a task's round."""

    def bytes_kept(self, phase: str) -> int:
        """Return how many bytes the clients keep of a phase, by their last answers."""
        return sum(size for (_, name), size in self._kept.items() if name == phase)

    def _look_for_nodes(self) -> None:
        """Find out which nodes are there, and ask new ones and rivals who they are."""
        now = time.monotonic()
        if now - self._looked < NODES_EVERY:
            return
        self._looked = now
        there = set(self._grid.get_node_ids())
        self._nodes = {node: who for node, who in self._nodes.items() if node in there}
        self._asked = {message: node for message, node in self._asked.items() if node in there}
        rivals = {node for client_id in self._setups for node in self._rivals(client_id)}
        self._sure &= rivals
        unsure = (there - self._nodes.keys()) | (rivals - self._sure)
        for node in sorted(unsure - set(self._asked.values())):
            message = self._push(RecordDict(), node, wire.IDENTIFY, self._settings.timeout)
            if message is not None:
                self._asked[message] = node

    def _send(self, jobs: Sequence[_Job]) -> None:
        """Send each order that is not out to the node that is its client, if there is one.

        One is sent again where the client came back as another node: the old one is gone.
        """
        now = time.monotonic()
        for job in jobs:
            node = self._node_of(job.client_id)
            if job.message is not None:
                if node in (None, job.node):
                    continue
                logger.info("%s is node %s now; its task is sent again", job.client_id, node)
            if node is None:
                self._missed.setdefault(job.client_id, now)
                continue
            self._missed.pop(job.client_id, None)
            holds = self._holds[job.client_id]
            send, setup = (job.order.kept - holds) | job.wanted, self._setups[job.client_id]
            content = wire.encode_order(job.order, job.task, setup, send)
            job.deadline = job.deadline or now + self._settings.timeout
            left = max(job.deadline - now, self._settings.poll)
            kind = f"train.{wire.action(job.order.step)}"
            job.message = self._push(content, node, kind, left)
            job.node = node

    def _node_of(self, client_id: str) -> int | None:
        """Return the node that is a client; two different ones are an error in the end."""
        own = self._nodes_of(client_id)
        # One store: a node that came back while its old number is still listed. The newest counts.
        return list(own)[-1] if own and not self._rivals(client_id) else None

    def _nodes_of(self, client_id: str) -> Mapping[int, wire.Identity]:
        return {
            node: who
            for node, who in self._nodes.items()
            if isinstance(who, wire.Identity) and who.client_id == client_id
        }

    def _rivals(self, client_id: str) -> list[int]:
        """Return the rival nodes of a client: nodes that say they are it, with different stores.

        One of them may be gone, and still be listed for a while. So each is asked again, and a
        node that answers again is surely there.
        """
        own = self._nodes_of(client_id)
        return list(own) if len({who.store for who in own.values()}) > 1 else []

    def _collect(self, jobs: Mapping[str, _Job]) -> None:
        """Pull what has arrived: answers, and nodes that say who they are."""
        if not jobs and not self._asked:
            return
        for reply in self._grid.pull_messages([*jobs, *self._asked]):
            about = reply.metadata.reply_to_message_id
            if reply.has_content():
                self.bytes_on_wire += wire.num_bytes_on_wire(reply.content)
            if about in self._asked:
                self._meet(self._asked.pop(about), reply)
            elif about in jobs:
                self._settle(jobs[about], reply)

    def _meet(self, node: int, reply: Message) -> None:
        """Note which client a node is."""
        if reply.has_error():
            if reply.error.code not in LOST:
                self._nodes[node] = wire.Failed(error="ClientAppError", cause=_words(reply.error))
            return
        try:
            who = wire.decode(reply.content, wire.Identity)
            if isinstance(who, wire.Identity):
                self._check(node, who)
        except (WireError, ConfigError) as error:
            who = wire.Failed.by(error)
        if isinstance(who, wire.Failed):
            logger.warning("node %d is no client: %s: %s", node, who.error, who.cause)
        elif node in self._nodes:
            self._sure.add(node)
        self._nodes[node] = who
        if isinstance(who, wire.Identity) and set(self._rivals(who.client_id)) - self._sure:
            self._looked = 0.0  # they are asked again at once

    def _check(self, node: int, who: wire.Identity) -> None:
        """Raise where a node has another version, or is not, by its key, the client it names."""
        if who.version != __version__:
            raise ConfigError(
                f"{who.client_id} has Goldfish {who.version}, the server {__version__}: install "
                "the same version on both."
            )
        bound = self._settings.nodes
        of_another = node in bound.values() and who.client_id not in bound
        if of_another or bound.get(who.client_id, node) != node:
            raise ConfigError(
                f"node {node} says that it is {who.client_id}; flower.clients has another node for "
                "that client, or another client for this node"
            )

    def _settle(self, job: _Job, reply: Message) -> None:
        """Take a client's answer, or send the order again."""
        job.message = None
        if reply.has_error():
            self._settle_error(job, reply.error)
            return
        try:
            answer = wire.decode_reply(reply.content, job.task.arrays.get("model", {}))
            if isinstance(answer, wire.Answer):
                counts = job.task.step.counts(job.task)
                wire.check_update(answer.update, counts, self._samples[job.client_id])
        except (WireError, DivergenceError) as error:
            job.fail(type(error).__name__, str(error))
            return
        if isinstance(answer, wire.Failed):
            job.fail(answer.error, answer.cause)
        elif isinstance(answer, wire.Missing):
            missing = set(answer.digests)
            if not missing or not missing <= job.order.kept or missing & job.wanted:
                cause = "the client asks for what it was sent, or for what nobody named"
                job.fail("WireError", cause)
                return
            logger.info("%s lacks %d constants; they are sent again", job.client_id, len(missing))
            job.wanted = missing
            self._holds[job.client_id] -= missing
        elif (answer.id, answer.update.client_id) != (job.order.id, job.client_id):
            job.fail("WireError", "the answer is to another task")
        else:
            job.outcome = keep(answer.update, job.spool)
            self._kept[job.client_id, job.task.context.phase] = answer.kept
            self._holds[job.client_id] |= job.order.kept

    def _settle_error(self, job: _Job, error: Error) -> None:
        name = LOST.get(error.code)
        if name is None:
            job.fail("ClientAppError", _words(error))
            return
        job.lost = f"{name}: {_words(error)}"
        job.tries += 1
        if error.code == 5 and job.node is not None:
            self._nodes.pop(job.node, None)
            self._looked = 0.0
        if job.tries > self._settings.retries:
            job.fail(name, f"{_words(error)} (tried {job.tries} times)")

    def _give_up_late(self, jobs: Sequence[_Job]) -> None:
        """Fail where an answer is overdue, or a client has been missed for too long.

        A node that is there and has not said yet who it is may be the one that is missed: then what
        was before this round does not count.
        """
        now = time.monotonic()
        for job in jobs:
            missed = self._missed.get(job.client_id, now)
            since = max(missed, job.began) if self._asked else missed
            alone = job.message is None and self._node_of(job.client_id) is None
            if job.deadline and now >= job.deadline:
                job.fail("Timeout", f"no answer within {self._settings.timeout:g} s{job.after}")
            elif alone and now - since >= self._settings.patience:
                self._fail_alone(job)

    def _fail_alone(self, job: _Job) -> None:
        """Say why there is no node to send the order to."""
        rivals = self._rivals(job.client_id)
        named = " and ".join(str(node) for node in rivals)
        if rivals and self._sure.issuperset(rivals):
            job.fail(
                "ConfigError",
                f"the nodes {named} both say that they are {job.client_id}, with "
                "states of their own: give each node a client-id of its own",
                final=True,
            )
        elif rivals:
            job.fail(
                "NotConnected",
                f"the nodes {named} have said that they are {job.client_id}, with states of their "
                f"own, and not all say so again{job.after}: one may be gone and still be listed",
            )
        else:
            strangers = [who.cause for who in self._nodes.values() if isinstance(who, wire.Failed)]
            hint = f"; one node is no client: {strangers[0]}" if strangers else ""
            job.fail(
                "NotConnected",
                f"no node said within {self._settings.patience:g} s that it is "
                f"{job.client_id}{job.after}{hint}",
            )

    def _push(self, content: RecordDict, node: int, kind: str, ttl: float) -> str | None:
        message = Message(content, node, kind, ttl=ttl)
        # One push for each: Flower refuses several big messages at once.
        pushed = [message_id for message_id in self._grid.push_messages([message]) if message_id]
        if not pushed:
            self._nodes.pop(node, None)  # it has left since we looked
            return None
        self.bytes_on_wire += wire.num_bytes_on_wire(content)
        return pushed[0]


def _words(error: Error) -> str:
    """Return the last line of an error's reason: the exception, without its traceback."""
    lines = (error.reason or "").strip().splitlines()
    return plain(lines[-1].strip()) if lines else f"Flower's error {error.code}"
