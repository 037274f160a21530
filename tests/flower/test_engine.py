"""The Flower engine against the engine in one process: same methods, same seeds, same bits."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sqlite3
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message

from goldfish.data import load_half
from goldfish.errors import ConfigError, DivergenceError, QuorumError
from goldfish.experiments.config import Config, parse_config
from goldfish.experiments.runner import run_experiment
from goldfish.experiments.scenario import Machine, build_scenario
from goldfish.federation.spool import Spool
from goldfish.flower import wire
from goldfish.flower.engine import FlowerFederation
from goldfish.flower.server_app import engine_on
from goldfish.methods import METHODS, records
from goldfish.params import digest, num_bytes, shapes_of
from goldfish.settings import Settings
from goldfish.store import load_checkpoint
from goldfish.types import Context, Params, Task

MakeConfig = Callable[..., Config]
MACHINE = Machine(threads=1)


def models_of(run: Path) -> dict[str, str]:
    """Return the digest of every phase's model."""
    files = sorted((run / "checkpoints").iterdir())
    return {path.stem: digest(load_checkpoint(path).params) for path in files}


def run_on(grid: Any, config: Config, out: Path, *, resume: bool = False) -> None:
    for _ in run_experiment(
        config, out, MACHINE, resume=resume, engine=engine_on(grid, config.flower)
    ):
        pass


def in_process(config: Config, out: Path) -> None:
    for _ in run_experiment(config.model_copy(update={"engine": "in-process"}), out, MACHINE):
        pass


def models_on_both(grid: Any, config: Config, folder: Path) -> dict[str, str]:
    """Run on the grid and in process, and return the digests, which are the same for both."""
    run_on(grid, config, folder / "flower")
    in_process(config, folder / "here")
    here = models_of(folder / "here")
    assert models_of(folder / "flower") == here
    return here


DELETIONS: dict[str, dict[str, Any]] = {
    "samples": {"rate": 0.1, "backdoor_target": 1, "trigger_size": 2},
    "class": {"class_label": 2},
    "client": {"clients": ["client-3"]},
}


@pytest.mark.parametrize(
    ("what", "shards"),
    [
        *(("samples", "one"), ("samples", "shared"), ("samples", "isolated")),
        *(("class", "shared"), ("client", "isolated")),
    ],
)
def test_every_method_gives_the_same_bits_on_both_engines(
    grid: Any, make_config: MakeConfig, tmp_path: Path, what: Any, shards: str
) -> None:
    """Every method with each deletion and each kind of shards: an engine sees no more of them."""
    methods = [name for name, method in METHODS.items() if what in method.deletions]
    if shards == "isolated":
        methods.remove("retrain-tuned")  # which refuses them
    assert len(methods) >= 5
    training = {} if shards == "one" else {"shards": 3, "shard_mode": shards}
    config = make_config(
        deletion=DELETIONS[what],
        unlearning={"methods": methods, "goldfish-sprint": {"anneal_rounds": 2}},
        training=training,
    )
    assert set(methods) <= set(models_on_both(grid, config, tmp_path))


def test_a_median_of_bounded_updates_gives_the_same_bits(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The lines of both runs name the same clients, whose updates were shortened."""
    config = make_config(
        training={"aggregation": "median", "max_update_norm": 0.3},
        unlearning={"methods": ["retrain", "goldfish-warm"]},
    )
    models_on_both(grid, config, tmp_path)

    def shortened(run: Path) -> list[list[str]]:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["shortened"] for line in lines]

    assert any(shortened(tmp_path / "here"))
    assert shortened(tmp_path / "here") == shortened(tmp_path / "flower")


@pytest.mark.parametrize("mode", ["shared", "isolated"])
def test_later_requests_and_a_share_of_the_clients_give_the_same_bits(
    grid: Any, make_config: MakeConfig, tmp_path: Path, mode: str
) -> None:
    """The second stage starts from what the first left with the clients, those that took part."""
    config = make_config(
        training={"participation": 0.6, "shards": 2, "shard_mode": mode, "local_epochs": 2},
        deletion={"rate": 0.1, "then": [{"clients": ["client-2"], "after": 2}]},
        unlearning={"methods": ["goldfish", "retrain", "sisa"], "rounds": 3},
    )
    both = models_on_both(grid, config, tmp_path)
    assert {"goldfish", "goldfish.2", "sisa.2"} <= set(both)


def carried_out(state_dir: Path) -> list[tuple[str, int, str]]:
    """Return the steps that a client did, from its own list."""
    with contextlib.closing(sqlite3.connect(state_dir / "client.sqlite")) as database:
        return database.execute("SELECT phase, round, step FROM done ORDER BY at").fetchall()


def failures_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [failure for line in lines for failure in json.loads(line)["failures"]]


ONE_METHOD: dict[str, Any] = {"methods": ["goldfish"]}


class KilledError(Exception):
    """Stands for the end of the server's process."""


DEATHS = [
    *(("origin", 1, "client-1"), ("origin", 2, "client-2")),
    *(("goldfish", 1, "client-2"), ("goldfish", 2, "client-2")),
    *(("sisa-training", 1, "client-3"), ("sisa", 1, "client-1"), ("rapid-retrain", 2, "client-2")),
]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_killed_server_goes_on_and_nothing_is_done_twice(
    grid: Any, make_config: MakeConfig, tmp_path: Path, shards: int
) -> None:
    """Killed in every phase, one after the other, each time when it is about to read a reply.

    The client's work is done by then.
    """
    unlearning = {
        "methods": ["goldfish", "sisa", "rapid-retrain"],
        "rapid-retrain": {"warmup_steps": 1},
    }
    config = make_config(training={"shards": shards}, unlearning=unlearning)
    deliver, deaths = grid.deliver, list(DEATHS)

    def dying(message: Any) -> Any:
        reply = deliver(message)
        if message.metadata.message_type.startswith("train."):
            order = wire.decode_order(message.content).order
            if (order.context.phase, order.context.round, order.client_id) in deaths[:1]:
                deaths.pop(0)
                raise KilledError
        return reply

    grid.deliver = dying
    for number in range(len(DEATHS)):
        with pytest.raises(KilledError):
            run_on(grid, config, tmp_path / "flower", resume=number > 0)
    run_on(grid, config, tmp_path / "flower", resume=True)
    in_process(config, tmp_path / "here")
    assert models_of(tmp_path / "flower") == models_of(tmp_path / "here")
    for node in range(3):
        steps = carried_out(tmp_path / "state" / f"node-{node}")
        assert len(steps) == len(set(steps)) >= 6


def test_another_run_never_finds_what_this_one_left(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Isolated shards go on from what the client keeps: a new run must start from nothing."""
    config = make_config(training={"shards": 2, "shard_mode": "isolated"}, unlearning=ONE_METHOD)
    for name in ("first", "second"):
        run_on(grid, config, tmp_path / name)
    assert models_of(tmp_path / "first") == models_of(tmp_path / "second")


def test_a_task_whose_answer_was_lost_is_answered_from_the_store(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The process dies after its work: Flower reports it, and the task is sent once more."""
    config = make_config(unlearning=ONE_METHOD, training={"shards": 2})
    lost: list[str] = []

    def crash_once_a_step(message: Any) -> Any:
        reply = grid.carry_out(message)
        kind = message.metadata.message_type
        if kind in lost or not kind.startswith("train."):
            return reply
        lost.append(kind)
        return Message(Error(8, "the process died"), reply_to=message)

    grid.faults[11] = crash_once_a_step
    run_on(grid, config, tmp_path / "flower")
    in_process(config, tmp_path / "here")
    assert lost == ["train.train", "train.goldfish"]
    assert models_of(tmp_path / "flower") == models_of(tmp_path / "here")
    steps = carried_out(tmp_path / "state" / "node-1")
    assert steps == [("origin", n, "train") for n in (1, 2, 3)] + [
        ("goldfish", n, "goldfish") for n in (1, 2)
    ]
    assert failures_of(tmp_path / "flower") == []


def test_a_node_that_keeps_dying_is_a_failure_with_its_cause(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    def crash(message: Any) -> Any:
        if message.metadata.message_type.startswith("query."):
            return grid.carry_out(message)
        return Message(Error(8, "Traceback ...\nthe process died"), reply_to=message)

    grid.faults[11] = crash
    config = make_config(unlearning=ONE_METHOD, flower={"retries": 1})
    run_on(grid, config, tmp_path / "out")
    causes = {(f["client_id"], f["error"], f["cause"]) for f in failures_of(tmp_path / "out")}
    assert causes == {("client-2", "ClientAppCrashed", "the process died (tried 2 times)")}
    tries = [m for m in grid.tasks() if m.metadata.dst_node_id == 11]
    assert len(tries) == 2 * 5


def test_a_client_that_raises_is_reported_and_survived(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    grid.nodes[11]["path"] = str(tmp_path / "nowhere.npz")
    config = make_config(unlearning=ONE_METHOD)
    run_on(grid, config, tmp_path / "out")
    failures = failures_of(tmp_path / "out")
    assert len(failures) == 5
    assert {(f["client_id"], f["error"]) for f in failures} == {("client-2", "DataError")}
    assert "nowhere.npz: cannot be read" in failures[0]["cause"]


def first_of(params: Params, change: Callable[[Any], Any]) -> Params:
    name, tensor = max(params.items(), key=lambda item: item[1].dim())
    return {**params, name: change(tensor)}


WRONG: dict[str, Callable[[Params], Params]] = {
    "nothing": lambda params: {},
    "without its last": lambda params: dict(list(params.items())[:-1]),
    "with one more": lambda params: {**params, "more": torch.zeros(1)},
    "another type": lambda params: first_of(params, lambda t: t.double()),
    "another shape": lambda params: first_of(params, lambda t: t[:-1]),
    "turned": lambda params: first_of(params, lambda t: t.T.contiguous()),
    "an ensemble too many": lambda params: {
        **params,
        **{name.replace("members.0.", "members.9."): t for name, t in params.items()},
        "members.8.": torch.zeros(1),
    },
}


def with_update(grid: Any, change: Callable[[Params], Params]) -> Callable[[Any], Any]:
    """Return what lets a node answer tasks with other parameters than it should."""

    def lie(message: Any) -> Any:
        reply = grid.carry_out(message)
        if message.metadata.message_type.startswith("train."):
            content = reply.content
            if "params" in content.array_records:
                params = wire.unpack(content.array_records["params"][wire.FORMAT].data)
                own = wire.encode(wire.Missing(digests=[]), {"params": change(params)})
                content["params"] = own["params"]
        return reply

    return lie


@pytest.mark.parametrize("wrong", WRONG)
def test_an_update_that_is_no_such_model_is_a_failure_and_survived(
    grid: Any, make_config: MakeConfig, tmp_path: Path, wrong: str
) -> None:
    grid.faults[11] = with_update(grid, WRONG[wrong])
    config = make_config(
        training={"rounds": 2}, unlearning={"methods": ["goldfish", "sisa"], "rounds": 1}
    )
    run_on(grid, config, tmp_path / "out")
    failures = failures_of(tmp_path / "out")
    assert {(f["client_id"], f["error"]) for f in failures} == {("client-2", "WireError")}
    assert all(f["cause"].startswith("the update") for f in failures)
    assert len(failures) == 2 + 1 + 1, "SISA's deletion asks client-1 alone"


def test_an_ensemble_may_lack_the_members_of_empty_shards(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """With more shards than samples some have no member, and the others are numbered anew."""
    config = make_config(unlearning={"methods": ["sisa"], "sisa": {"shards": 60}})
    models_on_both(grid, config, tmp_path)
    assert failures_of(tmp_path / "flower") == []


def test_a_client_that_returns_a_model_where_none_was_sent_is_a_failure(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    grid.faults[11] = with_update(grid, lambda params: params or {"model": torch.zeros(3)})
    config = make_config(training={"shards": 2}, unlearning={"methods": ["retrain-tuned"]})
    run_on(grid, config, tmp_path / "out")
    assert [(f["client_id"], f["error"], f["cause"]) for f in failures_of(tmp_path / "out")] == [
        (
            "client-2",
            "WireError",
            "the update's 'model' is torch.float32 of shape [3]; nothing was expected",
        )
    ]


def says(grid: Any, **said: Any) -> Callable[[Any], Any]:
    """Return what lets a node answer tasks with other words than it should: None drops a metric."""

    def lie(message: Any) -> Any:
        reply = grid.carry_out(message)
        if wire.Answer.__name__ in reply.content.config_records:
            record = reply.content.config_records[wire.Answer.__name__]
            answer = json.loads(record["json"])
            own = {**answer["metrics"], **said}
            metrics = {n: own[n] for n in answer["metrics"] if own[n] is not None}
            beside = {n: v for n, v in said.items() if n in answer or n.startswith("more")}
            answer |= {**beside, "metrics": metrics}
            record["json"] = json.dumps(answer)
        return reply

    return lie


def calls_its_error(error: str) -> Callable[[Any], Any]:
    def lie(message: Any) -> Any:
        failed = wire.encode(wire.Failed(error=error, cause="so I say"))
        return Message(failed, reply_to=message)

    return lie


LIES: dict[str, tuple[Callable[[Any], Callable[[Any], Any]], str, str]] = {
    "not a number": (
        lambda grid: with_update(grid, lambda p: first_of(p, lambda t: t * torch.nan)),
        "DivergenceError",
        "its update holds numbers that are not finite",
    ),
    "a count without end": (
        lambda grid: says(grid, num_examples=2**62),
        "WireError",
        r"A message makes no sense: Answer\.num_examples",
    ),
    "a count of others' samples": (
        lambda grid: says(grid, num_examples=41),
        "WireError",
        "the update's num_examples is 41; a number from 0 to 40 was expected",
    ),
    "no metric": (
        lambda grid: says(grid, steps=None),
        "WireError",
        "The metric 'steps' is None; a number was expected",
    ),
    "a name that clears the screen": (
        lambda grid: says(grid, **{"more\x1b[2J": 1}),
        "WireError",
        r"A message makes no sense: Answer\.more \[2J is 1",
    ),
    "ConfigError": (lambda grid: calls_its_error("ConfigError"), "ConfigError", "so I say"),
    "DivergenceError": (
        lambda grid: calls_its_error("DivergenceError"),
        "DivergenceError",
        "so I say",
    ),
}


def in_tasks(grid: Any, lie: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a node that says honestly which client it is, and lies after that."""
    return lambda m: grid.carry_out(m) if m.metadata.message_type == wire.IDENTIFY else lie(m)


def test_what_one_client_makes_up_is_its_failure_and_no_others(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The run goes on with the two honest clients, to the model that they make without it."""
    one = {"rounds": 1}
    config = make_config(training=one, unlearning={**ONE_METHOD, **one})
    grid.faults[11] = in_tasks(grid, lambda m: Message(Error(0, "gone"), reply_to=m))
    run_on(grid, config, tmp_path / "without")
    for name, (attack, error, cause) in LIES.items():
        grid.faults[11] = in_tasks(grid, attack(grid))
        run_on(grid, config, tmp_path / name)
        failures = failures_of(tmp_path / name)
        assert [(f["client_id"], f["error"]) for f in failures] == [("client-2", error)] * 2, name
        assert all(re.match(cause, f["cause"]) for f in failures), name
        assert models_of(tmp_path / name) == models_of(tmp_path / "without"), name


@pytest.mark.parametrize("lie", [None, -1.0])
def test_a_count_that_the_step_must_give_is_asked_of_its_client(
    grid: Any, make_config: MakeConfig, tmp_path: Path, lie: float | None
) -> None:
    """The ascent needs all askers, so the run ends; it says who failed, and how."""
    config = make_config(
        deletion={"class_label": 1},
        training={"rounds": 1},
        unlearning={"methods": ["gradient-ascent"], "rounds": 1},
    )
    grid.faults[11] = says(grid, retained=lie)
    match = rf"client-2: WireError: the update's retained is {lie}; a number from 0 to 40"
    with pytest.raises(QuorumError, match=match):
        run_on(grid, config, tmp_path / "out")


def test_errors_that_a_retry_cannot_mend_end_the_run_as_in_process(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(training={"learning_rate": 1e9})
    match = r"Non-finite loss on client-\d in round 1 of origin: .* \(now 1e\+09\) may help\.$"
    with pytest.raises(DivergenceError, match=match):
        run_on(grid, config, tmp_path / "diverged")
    grid.nodes[11] |= {"client-id": "client-2", "wrong": 1}
    del grid.nodes[11]["partition-id"]
    with pytest.raises(QuorumError, match=r"node-config: unknown 'wrong'"):
        run_on(grid, make_config(training={"quorum": 1.0}), tmp_path / "wrong")


def test_a_late_client_is_left_out_and_takes_part_again(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its answer to the first round never comes; the next round finds it, and its work, there."""
    slow: list[Any] = []

    def late_once(message: Any) -> Any:
        reply = grid.carry_out(message)
        if message.metadata.message_type.startswith("query.") or slow:
            return reply
        slow.append(reply)
        return None

    grid.faults[12] = late_once
    config = make_config(unlearning=ONE_METHOD, flower={"timeout": 1.0})
    run_on(grid, config, tmp_path / "out")
    assert failures_of(tmp_path / "out") == [
        {"client_id": "client-3", "error": "Timeout", "cause": "no answer within 1 s"}
    ]


def test_a_late_client_is_reported_with_what_went_wrong_before(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    tries = itertools.count(1)

    def crash_then_stay_silent_once(message: Any) -> Any:
        if message.metadata.message_type.startswith("query."):
            return grid.carry_out(message)
        number = next(tries)
        if number == 1:
            return Message(Error(8, "out of memory"), reply_to=message)
        return None if number == 2 else grid.carry_out(message)

    grid.faults[12] = crash_then_stay_silent_once
    run_on(grid, make_config(unlearning=ONE_METHOD, flower={"timeout": 1.0}), tmp_path / "out")
    (failure,) = failures_of(tmp_path / "out")
    assert failure["error"] == "Timeout"
    assert failure["cause"] == "no answer within 1 s after ClientAppCrashed: out of memory"


def test_a_node_that_dies_late_in_a_round_has_the_whole_patience_to_come_back(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """It is asked again who it is; the round's first seconds, when it was there, do not count."""
    died: list[float] = []

    def dies_once_and_answers_slowly(message: Any) -> Any:
        if not died and message.metadata.message_type.startswith("train."):
            time.sleep(0.8)
            died.append(time.monotonic())
            return Message(Error(5, "Node unavailable"), reply_to=message)
        if died and time.monotonic() - died[0] < 0.2:
            return grid.hold_back(message)
        return grid.carry_out(message)

    grid.faults[11] = dies_once_and_answers_slowly
    run_on(grid, make_config(unlearning=ONE_METHOD, flower={"patience": 0.7}), tmp_path / "out")
    assert died
    assert failures_of(tmp_path / "out") == []


def test_a_client_that_is_not_there_is_a_failure_down_to_the_quorum(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    del grid.nodes[12]
    config = make_config(unlearning=ONE_METHOD)
    run_on(grid, config, tmp_path / "out")
    assert {(f["client_id"], f["error"], f["cause"]) for f in failures_of(tmp_path / "out")} == {
        ("client-3", "NotConnected", "no node said within 0.2 s that it is client-3")
    }
    with pytest.raises(QuorumError, match="Only 2 of 3 clients answered in round 1 of origin"):
        run_on(grid, make_config(training={"quorum": 1.0}), tmp_path / "quorum")


def test_a_client_that_stays_away_is_waited_for_once(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """One that is away for a day must not cost every round of that day its patience."""
    del grid.nodes[12]
    begin = time.monotonic()
    run_on(grid, make_config(unlearning=ONE_METHOD, flower={"patience": 2.0}), tmp_path / "out")
    assert time.monotonic() - begin >= 2.0, "it is waited for before the first round"
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    rounds = [json.loads(line)["seconds"] for line in lines]
    assert len(rounds) == 5
    assert max(rounds) < 2.0


def test_a_client_that_comes_back_as_another_node_is_found(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Its old number stays listed for a while, as that of a killed node does."""
    config = make_config(unlearning=ONE_METHOD, training={"shards": 2})

    def dies(message: Any) -> Any:
        if message.metadata.message_type.startswith("query."):
            return grid.carry_out(message)
        grid.nodes[21] = grid.nodes[11]
        return None

    grid.faults[11] = dies
    models_on_both(grid, config, tmp_path)
    assert failures_of(tmp_path / "flower") == []


def test_two_nodes_that_claim_one_client_are_refused_in_words(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    grid.nodes[12] |= {"partition-id": 1}
    with pytest.raises(ConfigError, match=r"the nodes 11 and 12 both say that they are client-2"):
        run_on(grid, make_config(), tmp_path / "out")


def node_asked(grid: Any, config: Config) -> tuple[list[int], str]:
    """Send client-1 a task; return the nodes that got it, and the cause where it failed."""
    scenario = build_scenario(config, MACHINE)
    federation = engine_on(grid, config.flower, greet=False)(scenario, MACHINE, "run")
    before = len(grid.tasks())
    task = Task("client-1", records.FILE, {}, Settings(), Context(phase="filing"))
    causes = "".join(failure.cause for failure in federation.run([task]).failures)
    return [m.metadata.dst_node_id for m in grid.tasks()[before:]], causes


def test_a_client_that_is_bound_to_a_node_is_no_other(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Node 12 says that it is client-1: beside node 10 it changes nothing, alone it is refused.

    Unbound, the first is two nodes that claim one client, and in the second it gets the tasks.
    """

    def config(**nodes: int) -> Config:
        told = {name.replace("_", "-"): {"node": node} for name, node in nodes.items()}
        return make_config(flower={"clients": told})

    grid.nodes[12] |= {"partition-id": 0}
    assert "the nodes 10 and 12" in node_asked(grid, config())[1]
    assert node_asked(grid, config(client_1=10)) == ([10], "")
    assert node_asked(grid, config(client_3=12)) == ([10], "")
    del grid.nodes[10]
    assert node_asked(grid, config()) == ([12], "")
    for bound in (config(client_1=10), config(client_3=12)):
        nodes, cause = node_asked(grid, bound)
        assert nodes == []
        assert "node 12 says that it is client-1; flower.clients has another" in cause
    with pytest.raises(ConfigError, match=r"Unknown client 'client-9'\. Did you mean 'client-"):
        node_asked(grid, config(client_9=10))
    with pytest.raises(ConfigError, match="two have the same node"):
        config(client_1=10, client_2=10)
    large = config(client_1=2**64 - 1)
    assert parse_config(tomllib.loads(large.to_toml())) == large


def test_a_node_with_a_new_disk_beside_its_old_number_is_no_rival(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The old number stays listed for a while, but nobody answers there any more."""
    rounds = itertools.count(1)

    def watch(message: Any) -> Any:
        if message.metadata.message_type.startswith("train."):
            index = next(rounds)
            if index == 2:
                grid.nodes[21] = {**grid.nodes[11], "state-dir": str(tmp_path / "state" / "new")}
                grid.faults[11] = lambda _: None
            if index == 4:
                del grid.nodes[11]
        return grid.carry_out(message)

    grid.faults[10] = watch
    config = make_config(unlearning=ONE_METHOD, flower={"timeout": 1.5})
    run_on(grid, config, tmp_path / "out")
    failures = failures_of(tmp_path / "out")
    assert [f["error"] for f in failures[:2]] == ["Timeout", "NotConnected"]
    assert "the nodes 11 and 21 have said that they are client-2" in failures[1]["cause"]
    assert carried_out(tmp_path / "state" / "new")


def test_a_node_that_was_mended_takes_part_in_the_next_round(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A node with a key keeps its number when it is started again with other settings."""
    right = dict(grid.nodes[12])
    grid.nodes[12] |= {"colour": "blue"}

    rounds = itertools.count(1)

    def mend(message: Any) -> Any:
        if message.metadata.message_type.startswith("train.") and next(rounds) == 2:
            grid.nodes[12] = right
        return grid.carry_out(message)

    grid.faults[10] = mend
    run_on(grid, make_config(unlearning=ONE_METHOD), tmp_path / "out")
    (failure,) = failures_of(tmp_path / "out")
    assert (failure["client_id"], failure["error"]) == ("client-3", "NotConnected")
    assert "one node is no client: node-config: unknown 'colour'" in failure["cause"]


def test_another_version_is_refused_in_words(
    grid: Any, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goldfish.flower.client_app.__version__", "9.9")
    with pytest.raises(QuorumError, match=r"has Goldfish 9.9, the server .*install the same"):
        run_on(grid, make_config(), tmp_path / "out")


def test_the_teacher_travels_once_and_again_to_a_new_disk(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    rounds: list[int] = []

    def new_disk(message: Any) -> Any:
        if message.metadata.message_type == "train.goldfish":
            rounds.append(1)
            if len(rounds) == 2:
                grid.nodes[11]["state-dir"] = str(tmp_path / "state" / "new")
        return grid.carry_out(message)

    grid.faults[11] = new_disk
    config = make_config(unlearning={**ONE_METHOD, "rounds": 4})
    models_on_both(grid, config, tmp_path)

    def teachers(node: int) -> list[int]:
        asked = [m for m in grid.tasks() if m.metadata.message_type == "train.goldfish"]
        return [
            len(m.content.array_records) - 1  # the student is always there
            for m in asked
            if m.metadata.dst_node_id == node
        ]

    assert teachers(10) == [1, 0, 0, 0]
    assert teachers(11) == [1, 0, 1, 0, 0]
    assert failures_of(tmp_path / "flower") == []


def everything_sent(grid: Any) -> list[Any]:
    return [m.content for m in (*grid.sent, *grid.replies) if m.has_content()]


def as_bytes(images: Path) -> list[bytes]:
    """Return every image as it might leave: as it is kept, as numbers, and as a model sees it."""
    pixels = np.load(images)["x_train"]
    inputs, _ = load_half("npz", images, "train")[0].batch(torch.arange(len(pixels)))
    forms = (pixels, pixels.astype(np.float32), inputs.numpy())
    return [image.tobytes() for form in forms for image in form]


@pytest.mark.parametrize("data", ["shared", "own"])
def test_no_sample_and_no_label_leaves_its_client(
    grid: Any, request: pytest.FixtureRequest, tmp_path: Path, images: Path, data: str
) -> None:
    """Every message of a run, in full: models, ids, settings and counts, and nothing else."""
    tables: dict[str, Any] = {"unlearning": ONE_METHOD, "training": {"shards": 2}}
    if data == "own":
        request.getfixturevalue("wards")
        asked = tmp_path / "ids.txt"
        asked.write_text("".join(f"ward-a ward-a-{n}\n" for n in range(12)))
        tables["deletion"] = {"samples": str(asked)}
    make = request.getfixturevalue("make_own" if data == "own" else "make_config")
    run_on(grid, make(**tables), tmp_path / "out")
    model = load_checkpoint(tmp_path / "out" / "checkpoints" / "origin.safetensors").params
    pixels = as_bytes(images)
    assert len(everything_sent(grid)) > 30
    for content in everything_sent(grid):
        assert not content.metric_records
        for name, record in content.array_records.items():
            assert name == "params" or len(name) == 64
            for array in record.values():
                params = wire.unpack(array.data)  # filing needs no model
                assert shapes_of(params) == (shapes_of(model) if params else {})
                assert len(array.data) < num_bytes(params) + 1000
                assert not any(image in array.data for image in pixels)
        for name, record in content.config_records.items():
            if name == "setup":
                assert set(record) == {"text"}
                continue
            assert set(record) == {"json"}
            said = json.loads(str(record["json"]))
            assert set(said) == TOLD[name]
            if name == "Answer":
                assert said["names"] == []  # those that a project's client is asked for
                metrics = said["metrics"]
                assert {"loss", "steps", "samples"} <= set(metrics) <= MEASURED
                assert all(type(value) in (int, float) for value in metrics.values())
    (removal,) = {
        request
        for m in grid.tasks()
        if m.metadata.message_type == "train.goldfish" and m.metadata.dst_node_id == 10
        for request in wire.decode_order(m.content).order.requests
    }
    assert removal.class_label is None
    assert len(removal.sample_ids or ()) == 12


MEASURED = {"loss", "steps", "samples", "teacher_samples", "fisher_samples"}
TOLD = {
    "Order": {
        *("run", "threads", "client_id", "step", "settings", "context", "training"),
        *("requests", "honoured", "arrays", "constants", "setup"),
    },
    "Answer": {"id", "kept", "client_id", "num_examples", "metrics", "names"},
    "Identity": {"client_id", "store", "version"},
}


def test_a_round_with_much_to_keep_gives_the_same_bits(
    grid: Any, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates wait in a file; the server's memory does not grow with its clients."""
    kept: list[Params] = []
    put = Spool.put

    def watched(spool: Spool, params: Params) -> Params:
        kept.append(put(spool, params))
        return kept[-1]

    config = make_config(
        training={"shards": 2}, unlearning={"methods": ["goldfish", "sisa", "retrain-tuned"]}
    )
    with monkeypatch.context() as patched:
        patched.setattr("goldfish.federation.spool.IN_MEMORY", 0)
        patched.setattr(Spool, "put", watched)
        run_on(grid, config, tmp_path / "flower")
    in_process(config, tmp_path / "here")
    assert models_of(tmp_path / "flower") == models_of(tmp_path / "here")
    assert len(kept) > 3 * 3


def test_the_bytes_on_the_wire_match_the_bytes_that_are_counted(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        model={"options": {"hidden": 2000}}, unlearning={"methods": ["goldfish", "retrain"]}
    )
    made = []

    def remember(*arguments: Any) -> FlowerFederation:
        federation = engine_on(grid, config.flower)(*arguments)
        assert isinstance(federation, FlowerFederation)
        made.append(federation)
        return federation

    for _ in run_experiment(config, tmp_path / "out", MACHINE, engine=remember):
        pass
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    counted = sum(json.loads(line)["bytes_sent"] for line in lines)
    assert counted < made[0].bytes_on_wire < 1.05 * counted


def test_what_clients_keep_is_counted_as_in_process(
    grid: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        training={"shards": 3}, unlearning={"methods": ["goldfish", "sisa", "retrain-tuned"]}
    )
    run_on(grid, config, tmp_path / "flower")
    in_process(config, tmp_path / "here")

    def kept(run: Path) -> list[Any]:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [(r["phase"], r["round"], r["bytes_kept"]) for r in map(json.loads, lines)]

    assert kept(tmp_path / "flower") == kept(tmp_path / "here")
    assert any(size for _, _, size in kept(tmp_path / "here"))
