"""The engine for one machine: clients run on worker threads, each with its own generator."""

from __future__ import annotations

import heapq
import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from goldfish.data import as_examples, removal
from goldfish.errors import ConfigError, DivergenceError
from goldfish.federation.spool import Spool, keep
from goldfish.hardware.blocked import compiled_early
from goldfish.params import num_bytes
from goldfish.randomness import seeded_globally
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import (
    Client,
    ClientState,
    DeletionRequest,
    Failure,
    ModelFactory,
    RoundReplies,
    States,
    Task,
    Update,
)

logger = logging.getLogger(__name__)

GPU_WORKERS = 25
"""Clients that train on a GPU at a time, unless told otherwise: small models do not fill it."""


class InProcess:
    """A federation whose clients all live in this process.

    ``clients`` hold their data as ``Examples`` or as any map-style ``torch`` dataset; ``model``
    builds a new model at each call. The results do not depend on ``workers``, the number of clients
    that run at a time: each step has generators of its own. ``threads`` are torch's for one client;
    by default one, or with fewer clients than cores their share of the cores. Another number of
    threads may change the last bits, and so may ``compiled``, which has models compiled: LeNets on
    the CPU as in :mod:`goldfish.hardware.native`, ResNets on a GPU as in
    :mod:`goldfish.hardware.residual`, others by torch.compile, after a pause at the start. On a
    GPU (``device="cuda"``) each worker has a stream of its own, on which recorded training steps
    are replayed; ``graphs=False`` takes them singly. A client that was asked to remove samples
    leaves them out of everything from then on, until their ids are taken out of its
    ``state.tombstones``; ``remember=False`` is for experiments, which train with them again.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        model: ModelFactory,
        *,
        workers: int | None = None,
        threads: int | None = None,
        device: str = "cpu",
        graphs: bool = True,
        compiled: bool = False,
        remember: bool = True,
    ) -> None:
        if isinstance(model, nn.Module) or not callable(model):
            raise ConfigError(
                "model is a function that builds a new nn.Module at each call, not "
                f"{type(model).__name__}; for a class of yours, pass the class itself."
            )
        if isinstance(clients, Client) or not all(isinstance(c, Client) for c in clients):
            raise ConfigError("clients is a list of goldfish.Client values.")
        ids = [client.id for client in clients]
        for wrong in (client_id for client_id in ids if not isinstance(client_id, str)):
            raise ConfigError(f"A client's id is a string: write Client({str(wrong)!r}, ...).")
        doubles = sorted({i for i in ids if ids.count(i) > 1})
        if not clients or doubles:
            what = f"these ids are used twice: {', '.join(doubles)}" if doubles else "there is none"
            raise ConfigError(f"A federation needs clients with different ids, and {what}.")
        for name, number in (("workers", workers), ("threads", threads)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} must be at least 1, not {number}.")
        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise ConfigError(f"device is 'cpu' or 'cuda', not {device!r}.") from error
        cores = os.cpu_count() or 1
        self.model = compiled_early(model, device) if compiled else model
        self.device = device
        usual = GPU_WORKERS if kind == "cuda" else cores
        self.workers = min(workers or usual, len(clients))
        self.threads = threads or max(1, cores // len(clients))
        self._clients: dict[str, Client] = {}
        for client in clients:
            state = ClientState(client.state.arrays, client.state.tombstones)
            data = as_examples(client.retained)
            self._clients[client.id] = replace(client, retained=data, state=state)
        self._remember = remember
        workspaces = [
            LocalWorkspace(self.model, device, graphs=graphs, compiled=compiled)
            for _ in range(self.workers)
        ]
        self._shared = _pool(workspaces)
        # What is recorded of a client's training on a GPU can be replayed where it was recorded.
        pools = [_pool([workspace]) for workspace in workspaces]
        self._pinned = _pin(self._clients.values(), pools) if kind == "cuda" else {}
        self._executor: ThreadPoolExecutor | None = None
        self._split: dict[str, tuple[_Asked, Client]] = {}
        self._global_draws: bool | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def client_ids(self) -> Sequence[str]:
        """The ids of all clients, in the order in which they were given."""
        return list(self._clients)

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        """Run all tasks; a client that raises becomes a :class:`Failure`."""
        if self._global_draws is None:
            self._global_draws = self._draws_globally()
        if self._executor is None:
            own = (self.threads,)
            self._executor = ThreadPoolExecutor(self.workers, "", torch.set_num_threads, own)
        spool = Spool.for_answers(tasks)
        end = threading.Event()
        try:
            futures = [
                self._executor.submit(self._work, job, spool, end) for job in self._jobs(tasks)
            ]
            answered = {place: o for future in futures for place, o in future.result()}
        except BaseException:
            end.set()
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
            raise
        outcomes = [answered[place] for place in range(len(tasks))]
        return RoundReplies(
            [o for o in outcomes if isinstance(o, Update)],
            [o for o in outcomes if isinstance(o, Failure)],
        )

    def states(self) -> States:
        """Return what the clients keep."""
        return {c.id: dict(c.state.arrays) for c in self._clients.values() if c.state.arrays}

    def restore(self, states: States) -> None:
        """Put back what :meth:`states` returned; what clients had cached beside it is dropped."""
        for client in self._clients.values():
            client.state.arrays.clear()
            client.state.arrays.update(states.get(client.id, {}))
            client.state.cache.clear()

    @property
    def removed(self) -> Mapping[str, Sequence[str]]:
        """The ids of the samples that each client remembers to leave out."""
        tombstones = {c.id: sorted(c.state.tombstones) for c in self._clients.values()}
        return {client_id: ids for client_id, ids in tombstones.items() if ids}

    def remember(self, removed: Mapping[str, Sequence[str]]) -> None:
        """Let clients leave out these samples too, which another process has removed."""
        for client in self._clients.values():
            client.state.tombstones.update(removed.get(client.id, ()))

    def bytes_kept(self, phase: str) -> int:
        """Return how many bytes the clients keep under the name of a phase."""
        return sum(
            num_bytes(params)
            for client in self._clients.values()
            for key, params in client.state.arrays.items()
            if key.startswith(f"{phase}/")
        )

    def sizes(self, task: Task[Any]) -> tuple[int, int]:
        """Return how many samples a client keeps, and how many it removes, in a task."""
        client = self._client(task)
        return len(client.retained), 0 if client.removed is None else len(client.removed)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Take back what the clients keep and remember by the end."""
        before = self._snapshot()
        try:
            yield
        finally:
            self._take_back(before)

    @contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Take back what the clients keep and remember where a ConfigError ends it."""
        before = self._snapshot()
        try:
            yield
        except ConfigError:
            self._take_back(before)
            raise

    def _snapshot(self) -> tuple[States, Mapping[str, set[str]]]:
        return self.states(), {c.id: set(c.state.tombstones) for c in self._clients.values()}

    def _take_back(self, before: tuple[States, Mapping[str, set[str]]]) -> None:
        states, remembered = before
        self.restore(states)
        for client in self._clients.values():
            client.state.tombstones.intersection_update(remembered[client.id])
        self._split.clear()

    def _jobs(self, tasks: Sequence[Task[Any]]) -> list[_Job]:
        """Return what workers do: all tasks of the clients pinned to a workspace, else one task.

        The one with the most data comes first: begun last, it would keep one worker busy alone.
        """
        jobs: dict[_Pool | int, _Job] = {}
        for place, task in enumerate(tasks):
            pinned = self._pinned.get(task.client_id)
            job = jobs.setdefault(pinned or place, _Job(pinned or self._shared, []))
            job.tasks.append((place, task))
        return sorted(jobs.values(), key=self._work_of, reverse=True)

    def _work_of(self, job: _Job) -> int:
        return sum(len(self._clients[task.client_id].retained) for _, task in job.tasks)

    def _work(
        self, job: _Job, spool: Spool | None, end: threading.Event
    ) -> list[tuple[int, Update | Failure]]:
        workspace = job.free.get()  # a round that was interrupted may still be at work there
        try:
            return [
                (place, self._answer(task, workspace, spool))
                for place, task in job.tasks
                if not end.is_set()
            ]
        finally:
            job.free.put(workspace)

    def _answer(
        self, task: Task[Any], workspace: LocalWorkspace, spool: Spool | None
    ) -> Update | Failure:
        try:
            with ExitStack() as stack:
                # In this order: who has the turn must not wait for a client that waits for it.
                if self._global_draws:
                    purpose = (str(task.context.round), task.client_id)
                    stack.enter_context(self._one_at_a_time)
                    stack.enter_context(seeded_globally(task.context.seed, *purpose))
                stack.enter_context(workspace.active())
                update = task.step.run(task, self._client(task), workspace)
            return keep(update, spool)
        except Exception as error:
            logger.info("%s failed in step %s", task.client_id, task.step.name, exc_info=True)
            final = isinstance(error, ConfigError | DivergenceError)
            return Failure(task.client_id, type(error).__name__, str(error) or repr(error), final)

    def _client(self, task: Task[Any]) -> Client:
        """Return the client with its data split by the task's requests, as in the round before."""
        whole = self._clients[task.client_id]
        if task.step.only_looks:
            return removal.split(whole, task.requests, task.honoured)
        tombstones = whole.state.tombstones
        asked = (*task.requests,), (*task.honoured,), frozenset(tombstones)
        before, client = self._split.get(task.client_id, (None, whole))
        if before != asked:
            client = removal.split(whole, task.requests, task.honoured)
            if self._remember:
                tombstones |= removal.to_remember(client)
            self._split[task.client_id] = (*asked[:2], frozenset(tombstones)), client
        return client

    def _draws_globally(self) -> bool:
        """Tell whether model or data draw from torch's global generator (dropout, transforms).

        Threads share that generator, so clients with such a model, or such data at any of them,
        train one after the other, each from a seed of its own; otherwise the bits would depend on
        who comes first.
        """
        model_known = False
        for client in self._clients.values():
            data = removal.split(client, ()).retained
            if not len(data):
                continue
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model = None if model_known else self.model().train()
                before = torch.get_rng_state()
                try:
                    inputs, _ = data.batch(torch.tensor([0, 0]))
                    if model is not None:
                        model(inputs.cpu())
                        model_known = True
                except Exception:
                    logger.info("%s could not be probed", client.id, exc_info=True)
                if not torch.equal(before, torch.get_rng_state()):
                    return True
        return False


_Asked: TypeAlias = tuple[tuple[DeletionRequest, ...], tuple[DeletionRequest, ...], frozenset[str]]
"""By what a client's data is split: requests now, earlier ones, and its tombstones."""

_Pool: TypeAlias = queue.SimpleQueue[LocalWorkspace]
"""Workspaces that no worker uses at the moment."""


class _Job(NamedTuple):
    """Tasks, with their places among all, that one worker does one after the other."""

    free: _Pool
    tasks: list[tuple[int, Task[Any]]]


def _pool(workspaces: Iterable[LocalWorkspace]) -> _Pool:
    pool: _Pool = queue.SimpleQueue()
    for workspace in workspaces:
        pool.put(workspace)
    return pool


def _pin(clients: Iterable[Client], pools: Sequence[_Pool]) -> dict[str, _Pool]:
    """Pin each client to one pool, so that all pools have about as much data to train on."""
    loads = [(0, place) for place in range(len(pools))]
    pinned = {}
    for client in clients:
        load, place = heapq.heappop(loads)
        pinned[client.id] = pools[place]
        heapq.heappush(loads, (load + len(client.retained), place))
    return pinned
