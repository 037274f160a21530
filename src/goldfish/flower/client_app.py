"""The client's side on Flower: every message is a task, and every task one step of a method."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from goldfish.data import Subset, removal
from goldfish.errors import ConfigError, unknown
from goldfish.experiments.client_setup import (
    ClientSetup,
    left_of,
    on_device,
    own_examples,
    shared_examples,
    with_keys,
)
from goldfish.flower import wire
from goldfish.flower.client_store import ClientStore, StoredState, store_id
from goldfish.flower.node import Node
from goldfish.methods import METHODS, Method, auditing, fedavg, records
from goldfish.params import shapes_of
from goldfish.randomness import seeded_globally
from goldfish.training.workspace import MEMBERS, LocalWorkspace, ensemble_size
from goldfish.types import Client, Constant, Step, Task, Update
from goldfish.version import __version__

logger = logging.getLogger("flwr.goldfish")  # so that it appears in Flower's own log


def steps_of(methods: Iterable[Method[Any]]) -> dict[str, Step[Any]]:
    """Return the client's steps of all methods by name; one name stands for one step."""
    steps: dict[str, Step[Any]] = {}
    of_records = (records.CHECK, records.FILE, records.CENSUS, records.PURGE)
    shared: list[Step[Any]] = [fedavg.TRAIN, *of_records]
    own = [step for method in methods for step in method.steps]
    for step in (*shared, *auditing.STEPS, *own):
        if steps.setdefault(step.name, step) != step:
            raise ConfigError(f"Two methods call different steps {step.name!r}: rename one.")
    actions = {wire.action(name): name for name in steps}
    if len(actions) < len(steps) or not all(action.isidentifier() for action in actions):
        raise ConfigError(f"Flower cannot tell these steps apart: {sorted(steps)}.")
    return steps


STEPS: Mapping[str, Step[Any]] = steps_of(METHODS.values())

app = ClientApp()


@app.query(wire.IDENTIFY.partition(".")[2])
def identify(message: Message, context: Context) -> Message:
    """Say which client this node is."""
    try:
        node = Node.parse(context.node_config)
        store = store_id(node.state_dir)
        content = wire.encode(
            wire.Identity(client_id=node.client_id, store=store, version=__version__)
        )
    except Exception as error:
        logger.exception("this node cannot say which client it is")
        content = wire.encode(wire.Failed.by(error))
    return Message(content, reply_to=message)


def perform(message: Message, context: Context) -> Message:
    """Answer a task. An error is an answer too: the server is told its class and its text."""
    try:
        content = answer_order(message.content, Node.parse(context.node_config))
    except Exception as error:
        logger.exception("the task failed")
        content = wire.encode(wire.Failed.by(error))
    return Message(content, reply_to=message)


for _name in STEPS:
    app.train(wire.action(_name))(perform)


def answer_order(content: RecordDict, node: Node) -> RecordDict:
    """Carry an order out, or answer it from the store where it was carried out before."""
    received = wire.decode_order(content)
    order = received.order
    if order.client_id != node.client_id:
        raise ConfigError(f"The task is for {order.client_id}, and this node is {node.client_id}.")
    if order.step not in STEPS:
        hint = "Server and client need the same version of Goldfish."
        raise ConfigError(unknown("step", order.step, STEPS, hint))
    with ClientStore(node.state_dir) as store:
        missing = store.keep(received)
        if missing:
            return wire.encode(wire.Missing(digests=missing))
        known = store.answered(order)
        if known is not None:
            logger.info("task %.8s was answered before; the same answer is sent again", order.id)
            return wire.encode_answer(known)
        where = f"round {order.context.round} of {order.context.phase}"
        logger.info("task %.8s: %s, %s", order.id, order.step, where)
        task = task_of(received, store.constants(order))
        if task.step is records.PURGE:  # it needs neither data nor model
            store.purge(order, task.settings.keep)
            return wire.encode_answer(wire.Answer(order.id, records.purged(task), 0))
        setup, state = ClientSetup.from_json(store.setup(order)), store.state(order)
        torch.set_num_threads(order.threads)
        if setup.dataset is not None:  # an experiment, which trains with all of it again
            state.tombstones.clear()
        client = client_of(task, setup, state, node, store)
        if not task.step.only_looks and task.step not in (records.FILE, *auditing.STEPS):
            node.check_samples(len(client.retained))
        update = carry_out(task, setup, client, node)
        if task.step.only_looks:  # the data may be another the next time
            return wire.encode_answer(wire.Answer(order.id, update, 0))
        return wire.encode_answer(store.commit(order, update, state))


def task_of(received: wire.Received, constants: Mapping[str, Constant]) -> Task[Any]:
    """Return the task of an order, with the constants that the client keeps."""
    order, step = received.order, STEPS[received.order.step]
    return Task(
        order.client_id,
        step,
        {name: received.models[of] for name, of in order.arrays.items()},
        step.settings.parse(order.settings, order.step),
        order.context,
        order.training,
        order.requests,
        order.honoured,
        constants,
    )


def client_of(
    task: Task[Any], setup: ClientSetup, state: StoredState, node: Node, store: ClientStore
) -> Client:
    """Read the client's data and split it by what the task's requests name.

    Of a client with data of its own they are remembered, whatever becomes of the task, unless it
    only looks.
    """
    if setup.dataset is not None:
        if node.data is not None:
            raise ConfigError(
                f"This node has data of its own, but the run gives {node.client_id} a part of "
                f"{setup.dataset}: name the client in data.members, or start the node without data."
            )
        examples = shared_examples(setup, node.data_dir, node.path)
        if setup.salt is not None:
            state.tombstones |= set(setup.ids).difference(examples.ids)
        return _split(task, examples, state, node)
    if node.data is None or node.path is None:
        raise ConfigError(
            f"The run expects that {node.client_id} has data of its own: start its node with "
            'data="npz" path="/srv/data.npz" in the node-config.'
        )
    plain = own_examples(setup, node.data, node.path)
    buried = store.buried(node.client_id, plain.ids)
    if setup.salt is None:
        state.tombstones |= buried
        client = _split(task, Subset(plain, torch.arange(len(plain))), state, node)
        if not task.step.only_looks:
            store.bury(client.id, removal.to_remember(client))
        return client
    keyed = with_keys(plain, setup.salt, node.client_id)
    ids = dict(zip(keyed.ids, plain.ids, strict=True))
    examples = Subset(keyed, torch.arange(len(keyed)))
    if setup.ids:  # else this client has not said yet what it has
        examples = left_of(setup, keyed)
    state.tombstones = {key for key in ids if ids[key] in buried}
    state.tombstones |= set(setup.ids).difference(examples.ids)
    client = _split(task, examples, state, node)
    if not task.step.only_looks:
        asked = [ids[key] for key in removal.to_remember(client) if key in ids]
        store.bury(client.id, map(store.hidden, asked))
    return client


def _split(task: Task[Any], examples: Subset, state: StoredState, node: Node) -> Client:
    fewest = 1 if node.data is None else node.min_audited
    own = on_device(examples, node.device)
    client = Client(node.client_id, own, state=state, fewest=fewest)
    return removal.split(client, task.requests, task.honoured)


def carry_out(task: Task[Any], setup: ClientSetup, client: Client, node: Node) -> Update:
    """Run the step; the global generator is as in any other engine."""
    node.check_model(setup.model.name)
    refuse_other_models(task, setup)
    workspace = LocalWorkspace(setup.model.factory(), node.device)
    purpose = (str(task.context.round), task.client_id)
    with seeded_globally(task.context.seed, *purpose), workspace.active():
        return task.step.run(task, client, workspace)


def refuse_other_models(task: Task[Any], setup: ClientSetup) -> None:
    """Raise where a task brings other models than its setup describes, before one is made.

    A server could ask for one that no memory holds. Of a factory of one's own nobody knows whether
    it can build without memory: the node's owner has allowed it.
    """
    brought = [*task.arrays.values(), *(constant.params for constant in task.constants.values())]
    if ":" in setup.model.name or not any(brought):
        return
    try:
        with torch.device("meta"):
            one = shapes_of(setup.model.factory()().state_dict())
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"The model {setup.model.name!r} cannot be built: {error}") from None
    for params in filter(None, brought):
        members = [f"{MEMBERS}{n}." for n in range(ensemble_size(params))] or [""]
        whole = {f"{member}{name}": shape for member in members for name, shape in one.items()}
        if shapes_of(params) != whole:
            raise ConfigError(
                f"The task brings another model than its setup describes ({setup.model.name})."
            )
