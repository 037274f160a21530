"""The clients that ask: where a method forgets through them, they must have been there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods import Plan, not_honoured
from goldfish.methods.method import ASKED_AGAIN, participants
from goldfish.params import digest, largest_change
from goldfish.types import Client, DeletionRequest, Failure, RoundReplies, Task
from goldfish.unlearning.optimization import partition_shards
from goldfish.workflow import unlearning_plan

MakeClients = Callable[..., list[Client]]
Net = type[nn.Module]
REQUEST = DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])
NEED_ASKERS = ["goldfish-sprint", "goldfish-warm", "incompetent-teacher", "gradient-ascent"]


class Flaky(goldfish.InProcess):
    """A federation that loses the first answers to some tasks, and notes who was asked."""

    def __init__(self, clients: list[Client], net: Net, lost: Callable[[Task[Any]], int]) -> None:
        super().__init__(clients, net)
        self._lost = lost
        self.asked: list[tuple[str, int, str]] = []

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        def about(task: Task[Any]) -> tuple[str, int, str]:
            return task.step.name, task.context.round, task.client_id

        lost = [task for task in tasks if self.asked.count(about(task)) < self._lost(task)]
        self.asked += [about(task) for task in tasks]
        replies = super().run([task for task in tasks if task not in lost])
        offline = [Failure(task.client_id, "Timeout", "it is offline") for task in lost]
        return RoundReplies(replies.updates, [*replies.failures, *offline])


def trained_on(
    clients: list[Client], net: Net, lost: Callable[[Task[Any]], int] = lambda _: 0, **settings: Any
) -> goldfish.Trained:
    more = {"rounds": 3, "learning_rate": 0.1, "batch_size": 8, **settings}
    return goldfish.train(Flaky(clients, net, lost), **more)


def plan_for(
    trained: goldfish.Trained, name: str, requests: Sequence[DeletionRequest], **more: Any
) -> Plan:
    method = goldfish.METHODS[name]
    given = {"training": trained.settings, "rounds": 3, "seed": 0, **more}
    return unlearning_plan(trained, requests, method, method.settings(), **given)


def test_the_methods_that_forget_through_their_askers(
    make_clients: MakeClients, small_net: Net
) -> None:
    """All others never use a model that knows the removed data, or drop what the asker taught."""
    trained = trained_on(make_clients(), small_net)
    sisa = goldfish.train(trained.federation, method="sisa", rounds=1)
    kept = goldfish.train(trained.federation, keep_for=["fed-recovery"], rounds=3)
    found = []
    for name, method in goldfish.METHODS.items():
        before = sisa if method.prepare else kept
        found += [name] * bool(plan_for(before, name, [REQUEST]).askers)
    assert sorted(found) == sorted(NEED_ASKERS)


@pytest.mark.parametrize("name", ["goldfish-warm", "incompetent-teacher"])
def test_an_asker_that_never_answers_leaves_its_request_not_honoured(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples, name: str
) -> None:
    def lost(task: Task[Any]) -> int:
        answers = task.client_id != "client-1" or task.step.name in ("train", "check", "file")
        return 0 if answers else 99

    trained = trained_on(make_clients(), small_net, lost)
    other = DeletionRequest("client-2", sample_ids=["c2-5"])
    with pytest.warns(RuntimeWarning, match="request of client-1 is not honoured: took part in 0"):
        result = goldfish.unlearn(trained, [REQUEST, other], method=name, rounds=3, test=test_set)
    assert result.not_honoured == [goldfish.NotHonoured(REQUEST, "took part in 0 of 3 rounds")]
    assert all(record.absent == ["client-1"] for record in result.rounds)


def test_what_was_not_honoured_is_taken_up_again(
    make_clients: MakeClients, small_net: Net, tmp_path: Path
) -> None:
    """A federation that knows nothing but the saved folder trains on 72 samples less 2 and 1."""
    away = trained_on(
        make_clients(),
        small_net,
        lambda t: 99 * (t.client_id == "client-1" and t.step.name == "goldfish"),
    )
    with pytest.warns(RuntimeWarning, match="request of client-1 is not honoured"):
        first = goldfish.unlearn(away, [REQUEST], method="goldfish-warm", rounds=1)
    assert not first.trained.honoured
    first.trained.save(tmp_path / "first")
    back = goldfish.load(tmp_path / "first", goldfish.InProcess(make_clients(), small_net))
    other = DeletionRequest("client-2", sample_ids=["c2-5"])
    second = goldfish.unlearn(back, [other], method="retrain", rounds=1)
    assert second.cost.samples == 72 - 3
    assert second.trained.honoured == [REQUEST, other]
    assert not second.trained.lost


def test_half_of_the_rounds_are_enough(make_clients: MakeClients, small_net: Net) -> None:
    trained = trained_on(make_clients(), small_net)
    plan = plan_for(trained, "goldfish-warm", [REQUEST])
    changed = {name: t + 1 for name, t in trained.params.items()}
    assert not not_honoured(plan, [["client-1"], [], []], changed)
    assert not not_honoured(plan, [["client-1"], []], changed)
    (left,) = not_honoured(plan, [["client-1"], [], ["client-1"]], changed)
    assert left.reason == "took part in 1 of 3 rounds"


@pytest.mark.parametrize("name", NEED_ASKERS)
def test_an_asker_that_fails_is_asked_again(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples, name: str
) -> None:
    """It answers at the last try, the others at the first: the bits are as without the failure."""

    def lost(task: Task[Any]) -> int:
        needed = task.step.name in ("sprint", "goldfish", "bad-teaching", "ascend")
        return ASKED_AGAIN if needed and task.client_id == "client-1" else 0

    trained = trained_on(make_clients(), small_net, lost)
    result = goldfish.unlearn(trained, [REQUEST], method=name, rounds=2, test=test_set)
    assert not result.not_honoured
    assert not any(record.failures for record in result.rounds)
    smooth = trained_on(make_clients(), small_net)
    whole = goldfish.unlearn(smooth, [REQUEST], method=name, rounds=2, test=test_set)
    assert digest(result.params) == digest(whole.params)
    assert result.cost.bytes_sent > whole.cost.bytes_sent


@pytest.mark.parametrize("name", ["goldfish-warm", "incompetent-teacher"])
def test_askers_are_drawn_in_every_round(
    make_clients: MakeClients, small_net: Net, name: str
) -> None:
    """Of the five others a third takes part beside the asker: two, others from round to round."""
    trained = trained_on(make_clients((20,) * 6), small_net, participation=0.34)
    asker = DeletionRequest("client-5", sample_ids=["c5-1"])
    plan = plan_for(trained, name, [asker], rounds=8)
    drawn = [participants(plan, index) for index in range(1, 9)]
    assert all("client-5" in clients and len(clients) == 3 for clients in drawn)
    assert len({clients[0] for clients in drawn}) > 1
    every = [DeletionRequest(f"client-{n}", class_label=1) for n in range(1, 7)]
    assert len(participants(plan_for(trained, name, every), 1)) == 6


def test_askers_do_not_crowd_out_the_others(make_clients: MakeClients, small_net: Net) -> None:
    """Three of eight clients ask, as many as the share would draw: two of the other five come."""
    trained = trained_on(make_clients((20,) * 8), small_net, participation=0.375)
    requests = [DeletionRequest(f"client-{n}", sample_ids=[f"c{n}-1"]) for n in (1, 2, 3)]
    plan = plan_for(trained, "goldfish-warm", requests, rounds=20)
    drawn = [participants(plan, index) for index in range(1, 21)]
    assert all(clients[:3] == ["client-1", "client-2", "client-3"] for clients in drawn)
    assert all(len(clients) == 5 for clients in drawn)
    assert {client for clients in drawn for client in clients} == set(plan.staying)


def test_askers_count_among_the_votes_of_a_robust_mean(
    make_clients: MakeClients, small_net: Net
) -> None:
    """A fifth of the others is one client: three in all with two askers, two with one."""
    trained = trained_on(make_clients((20,) * 6), small_net)
    asking = [DeletionRequest(f"client-{n}", sample_ids=[f"c{n}-1"]) for n in (1, 2)]
    few = trained.settings.model_copy(update={"aggregation": "median", "participation": 0.2})
    assert len(participants(plan_for(trained, "goldfish-warm", asking, training=few), 1)) == 3
    with pytest.raises(goldfish.ConfigError, match="and goldfish-warm has 2"):
        plan_for(trained, "goldfish-warm", asking[:1], training=few)


def test_every_stage_draws_other_clients(make_clients: MakeClients, small_net: Net) -> None:
    trained = trained_on(make_clients((20,) * 6), small_net, participation=0.5)
    first = DeletionRequest("client-1", sample_ids=["c1-1"])
    second = DeletionRequest("client-1", sample_ids=["c1-2"])
    stages = [
        plan_for(trained, "retrain", [first]),
        plan_for(replace(trained, honoured=[first]), "retrain", [second]),
    ]
    drawn = [[tuple(participants(plan, index)) for index in (1, 2, 3)] for plan in stages]
    assert drawn[0] != drawn[1]


EVERYTHING = {
    "by ids": DeletionRequest("client-3", sample_ids=[f"c3-{n}" for n in range(18)]),
    "by class": DeletionRequest("client-3", class_label=1),
}


@pytest.mark.parametrize("how", EVERYTHING)
@pytest.mark.parametrize(
    ("name", "shards"), [("goldfish-warm", 1), ("incompetent-teacher", 1), ("goldfish", 3)]
)
def test_a_request_for_all_that_a_client_has_is_its_leaving(
    make_clients: MakeClients,
    small_net: Net,
    test_set: TensorExamples,
    how: str,
    name: str,
    shards: int,
) -> None:
    clients = make_clients()
    if how == "by class":
        data = clients[2].retained
        assert isinstance(data, TensorExamples)
        one = TensorExamples(data.images, torch.ones(len(data), dtype=torch.int64), data.ids)
        clients[2] = replace(clients[2], retained=one)
    trained = trained_on(clients, small_net, shards=shards)
    with pytest.raises(goldfish.ConfigError, match="takes all that client-3 has, as if it left"):
        goldfish.unlearn(trained, [EVERYTHING[how]], method=name, rounds=1, test=test_set)


@pytest.mark.parametrize("name", NEED_ASKERS)
def test_a_client_with_nothing_left_does_not_block_a_later_class(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples, name: str
) -> None:
    """A class is asked of every client, also of one whose last class went before."""
    clients = make_clients()
    data = clients[2].retained
    assert isinstance(data, TensorExamples)
    one = TensorExamples(data.images, torch.ones(len(data), dtype=torch.int64), data.ids)
    clients[2] = replace(clients[2], retained=one)
    ones, twos = (
        [DeletionRequest(client.id, class_label=label) for client in clients] for label in (1, 2)
    )
    trained = trained_on(clients, small_net)
    without = goldfish.unlearn(trained, ones, method="retrain", rounds=1, test=test_set)
    result = goldfish.unlearn(without, twos, method=name, rounds=1, test=test_set)
    assert not result.not_honoured
    assert largest_change(without.params, result.params) > 0


def test_shared_shards_start_fresh_when_a_client_leaves(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples
) -> None:
    """What training left with the clients makes no difference: nothing starts from it."""

    def result(noise: float) -> str:
        trained = trained_on(make_clients(), small_net, shards=3)
        states = {
            client_id: {
                key: {n: t + noise if t.is_floating_point() else t for n, t in params.items()}
                for key, params in kept.items()
            }
            for client_id, kept in trained.federation.states().items()
        }
        trained.federation.restore(states)
        leave = DeletionRequest("client-3")
        unlearned = goldfish.unlearn(trained, [leave], rounds=2, test=test_set)
        assert any("all shards started from the fresh student" in n for n in unlearned.notes)
        return digest(unlearned.params)

    assert result(0.0) == result(0.5)


def test_a_model_that_has_not_changed_honours_nothing(make_clients: MakeClients) -> None:
    federation = goldfish.InProcess(make_clients(), lambda: nn.Linear(6, 3))
    trained = goldfish.train(federation, rounds=2, keep_for=["fed-recovery"])
    with pytest.warns(RuntimeWarning, match="the model has not changed"):
        result = goldfish.unlearn(
            trained, [REQUEST], method="fed-recovery", strength=1e-9, noise_ratio=0
        )
    assert [left.reason for left in result.not_honoured] == ["the model has not changed"]


def test_largest_change() -> None:
    """Of (2, -4) to (2.5, -4) the first moved by 0.5, over the largest value 4: 0.125."""
    before = {"w": torch.tensor([2.0, -4.0]), "n": torch.tensor(3)}
    after = {"w": torch.tensor([2.5, -4.0]), "n": torch.tensor(9)}
    assert largest_change(before, after) == 0.125
    assert largest_change(before, before) == 0
    assert largest_change(before, {"w": torch.zeros(3), "n": torch.tensor(3)}) == float("inf")
    zero = {"w": torch.zeros(2)}
    assert (largest_change(zero, zero), largest_change(zero, {"w": torch.ones(2)})) == (
        0,
        torch.inf,
    )


def test_only_new_requests_hit_shards(make_clients: MakeClients, small_net: Net) -> None:
    """Six deletions of a sample, each in another shard: each costs one shard of the asker."""
    clients = make_clients((24, 24, 24))
    trained = trained_on(clients, small_net, shards=6, shard_mode="isolated")
    method = goldfish.METHODS["goldfish"]
    settings = method.settings.parse({"adaptive_weights": False})
    shards = partition_shards(clients[0], 6, trained.seed)
    honoured: list[DeletionRequest] = []
    steps = []
    for number, shard in enumerate(shards):
        request = DeletionRequest("client-1", sample_ids=[shard.retained.ids[0]])
        plan = plan_for(replace(trained, honoured=tuple(honoured)), "goldfish", [request], rounds=1)
        plan = replace(plan, phase=f"goldfish.{number}")
        (this,) = method.unlearn(plan, settings)
        steps.append([int(update.metrics["samples"]) for update in this.updates])
        honoured.append(request)
        trained = replace(trained, params=this.params, phase=plan.phase)
    assert steps == [[3 + 1, 0, 0]] * 6  # three remain in the shard, and one removed goes with them


def test_a_client_that_has_left_is_not_asked_again(
    make_clients: MakeClients, small_net: Net
) -> None:
    trained = trained_on(make_clients(), small_net)
    left = DeletionRequest("client-3")
    more = DeletionRequest("client-1", sample_ids=["c1-3"])
    trained = replace(trained, honoured=[left])
    plan = plan_for(trained, "gradient-ascent", [more])
    method = goldfish.METHODS["gradient-ascent"]
    list(method.unlearn(plan, method.settings()))
    federation = trained.federation
    assert isinstance(federation, Flaky)
    asked = {client for step, _, client in federation.asked if step == "ascend"}
    assert asked == {"client-1"}
    late = DeletionRequest("client-3", class_label=1)
    with pytest.raises(goldfish.ConfigError, match="client-3 has left"):
        plan_for(trained, "gradient-ascent", [late])
