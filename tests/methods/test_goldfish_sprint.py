"""The fast method: who trains when, at which step size, and when the sprint ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import goldfish
from goldfish.data import Subset, TensorExamples
from goldfish.data.removal import split
from goldfish.methods import goldfish_sprint
from goldfish.methods.goldfish import train_student
from goldfish.methods.goldfish_sprint import cosine, neighbour_losses, remembers
from goldfish.params import digest
from goldfish.settings import TrainingSettings
from goldfish.training.fit import predict
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Client, DeletionRequest, Examples, Params, RoundReplies, Task

MakeClients = Callable[..., list[Client]]
Net = type[nn.Module]
IDS = [f"c1-{i}" for i in range(6)]
REQUEST = DeletionRequest("client-1", sample_ids=IDS)
SAME = pytest.approx


class Watched(goldfish.InProcess):
    """A federation that notes the tasks of the method."""

    def __init__(self, clients: list[Client], net: Net) -> None:
        super().__init__(clients, net)
        self.rounds: dict[int, list[Task[Any]]] = {}

    def run(self, tasks: Sequence[Task[Any]]) -> RoundReplies:
        if tasks[0].context.phase == "goldfish-sprint":
            self.rounds[tasks[0].context.round] = list(tasks)
        return super().run(tasks)


def train(make_clients: MakeClients, net: Net, **settings: Any) -> goldfish.Trained:
    more = {"rounds": 4, "learning_rate": 0.1, "batch_size": 8, **settings}
    return goldfish.train(Watched(make_clients(), net), **more)


def sprint(
    trained: goldfish.Trained, requests: Sequence[DeletionRequest] = (REQUEST,), **more: Any
) -> goldfish.Unlearned:
    return goldfish.unlearn(trained, list(requests), method="goldfish-sprint", **more)


def test_the_cosine_begins_at_one_and_would_be_zero_after_the_last_round() -> None:
    """(1 + cos 0) / 2 = 1, (1 + cos pi/4) / 2 = 0.5 + sqrt(2)/4, (1 + cos pi/2) / 2 = 1/2."""
    slope = math.sqrt(2) / 4
    assert [cosine(i, 4) for i in (1, 2, 3, 4)] == SAME([1, 0.5 + slope, 0.5, 0.5 - slope])
    assert cosine(5, 4) == SAME(0)


def test_what_counts_as_remembered() -> None:
    """Two classes, equal logits: each loss is ln 2 = 0.693, three of them are 2.079.

    The removed samples are of class 0, 0 and 1. Unseen samples with losses of 1.5 and 1.2 make
    1.5 + 1.5 + 1.2 = 4.2, half of which is 2.1: remembered. With 1.5 and 1.1 it is 2.05: not.
    The class without unseen samples (None) is left out: 2 ln 2 = 1.386 against 1.5, remembered.
    """
    logits, labels = torch.zeros(3, 2), torch.tensor([0, 0, 1])
    assert remembers(logits, labels, [1.5, 1.2])
    assert not remembers(logits, labels, [1.5, 1.1])
    assert remembers(logits, labels, [1.5, None])
    assert not remembers(logits, labels, [None, None])


def test_the_askers_sprint_and_then_all_take_rounds(
    make_clients: MakeClients, small_net: Net
) -> None:
    """The mean step size of a cosine over 2 rounds from 0.1 is (0.1 + 0.05) / 2 = 0.075.

    The sprint takes half of it; the rounds start at it and end at 0.0375. Client-1 keeps 24 of its
    30 samples. The six steps of its sprint see 8 of them and, for two passes, 2 removed ones each:
    60 samples. Each of the two rounds is an epoch, a twentieth of the training's 20: 30 + 24 + 18
    samples. Rounds and step size of the other methods do not count.
    """
    trained = train(make_clients, small_net, rounds=2, local_epochs=10, schedule="cosine")
    own: dict[str, Any] = {"sprint_steps": 6, "sprint_passes": 2, "sprint_step": 0.5}
    own |= {"anneal_rounds": 2, "anneal_share": 0.1, "anneal_step": 1.0}
    result = sprint(trained, rounds=9, learning_rate=5.0, schedule="constant", **own)
    federation = trained.federation
    assert isinstance(federation, Watched)
    asked = [(tasks[0].step.name, len(tasks)) for tasks in federation.rounds.values()]
    assert asked == [("sprint", 1), ("sprint", 3), ("sprint", 3)]
    assert federation.rounds[1][0].client_id == "client-1"
    told = [tasks[0] for tasks in federation.rounds.values()]
    assert [t.context.learning_rate for t in told] == SAME([0.0375, 0.075, 0.0375])
    assert [t.settings.mu_d for t in told] == [1.0, 0.0, 0.0]
    assert [list(t.constants) for t in told] == [["teacher"], [], []]
    assert [r.cost.steps for r in result.rounds] == [6, 9, 9]
    assert [r.cost.samples for r in result.rounds] == [60, 72, 72]
    assert [r.cost.teacher_samples for r in result.rounds] == [24, 0, 0]


def test_a_part_of_an_epoch(make_clients: MakeClients, small_net: Net) -> None:
    """A twentieth of 10 rounds of 2 epochs in two rounds: half an epoch each, 2 of 3 steps.

    Client-1 sees half of its 6 removed samples in them, ceil(3 / 2) = 2 a step: 2 * (8 + 2), the
    others 2 * 8 each. A sprint of 2 steps asks the teacher of the 16 samples in them and no more;
    5 passes over 6 removed samples would be 15 a step, and there are 6: 2 * (8 + 6).
    """
    trained = train(make_clients, small_net, rounds=10, local_epochs=2)
    result = sprint(trained, sprint_steps=2, anneal_share=0.05, anneal_rounds=2)
    assert [r.cost.steps for r in result.rounds] == [2, 6, 6]
    assert [r.cost.samples for r in result.rounds] == [28, 52, 52]
    assert [r.cost.teacher_samples for r in result.rounds] == [16, 0, 0]


@pytest.mark.parametrize(("unseen", "turns"), [("worse", 3), ("alike", 2)])
def test_further_turns_only_while_removed_samples_are_remembered(
    make_clients: MakeClients, small_net: Net, unseen: str, turns: int
) -> None:
    """With wrong labels the unseen samples' loss is high, and all three turns are taken.

    Where the "unseen" samples are the removed ones the losses are the same: in the second turn the
    client answers without a step, and the sprint is over. What a client is told can be hashed, also
    when it came over a network: a GPU finds its recorded steps by it.
    """
    trained = train(make_clients, small_net, rounds=12)
    data = make_clients()[0].retained
    test = Subset(data, torch.arange(6))
    if unseen == "worse":
        test = Subset(
            TensorExamples(data.batch(torch.arange(30))[0], (data.labels + 1) % 3, data.ids),
            torch.arange(30),
        )
    small: dict[str, Any] = {"sprint_steps": 3, "sprint_step": 0.01, "anneal_rounds": 2}
    result = sprint(trained, most_turns=3, test=test, **small)
    assert len(result.rounds) == turns + 2
    assert (result.rounds[turns - 1].cost.steps > 0) == (unseen == "worse")
    removed = len(REQUEST.sample_ids or ())
    measured = [this.cost.measured_samples for this in result.rounds]
    assert measured == [0, *(turns - 1) * [len(test) + removed], 0, 0]
    assert isinstance(trained.federation, Watched)
    told = trained.federation.rounds[2][0].settings
    assert len(told.unseen_losses) == 3
    assert hash(told) == hash(type(told).parse(told.model_dump(mode="json")))
    assert "how long the sprint lasted" in result.notes[-1]
    blind = sprint(trained, most_turns=3, **small)
    assert len(blind.rounds) == 1 + 2
    assert len(blind.notes) == 1


def test_the_model_of_a_lone_asker_has_full_weight(
    make_clients: MakeClients, small_net: Net
) -> None:
    """With other clients' data changed, the sprint's result has the same bits."""
    trained = train(make_clients, small_net)
    first = _after_the_sprint(trained)
    others = goldfish.InProcess(make_clients((30, 9, 40)), small_net)
    changed = goldfish.Trained(others, trained.params, trained.settings, trained.seed)
    assert digest(_after_the_sprint(changed)) == digest(first)


def test_who_has_nothing_of_a_removed_class_has_no_part_in_the_sprint(
    make_clients: MakeClients, small_net: Net
) -> None:
    """All clients are asked for class 2, and client-1 alone has it: the sprint's bits are its own.

    Nor do the others take further turns, in which it has nothing left to forget.
    """
    first, *others = make_clients()
    clients = [first]
    for client in others:
        inputs, labels = client.retained.batch(torch.arange(len(client.retained)))
        examples = TensorExamples(inputs, labels % 2, client.retained.ids)
        clients.append(replace(client, retained=examples))
    trained = goldfish.train(Watched(clients, small_net), rounds=4, learning_rate=0.1)
    test, small = first.retained, {"sprint_step": 0.01, "anneal_rounds": 1}
    asked = [DeletionRequest(client.id, class_label=2) for client in clients]
    by_all, by_one = (sprint(trained, some, test=test, **small) for some in (asked, asked[:1]))
    assert [r.cost.steps for r in by_all.rounds] == [r.cost.steps for r in by_one.rounds]
    assert digest(by_all.params) == digest(by_one.params)


def test_a_sprint_is_at_most_a_tenth_of_the_training(
    make_clients: MakeClients, small_net: Net
) -> None:
    """Ten epochs of client-1's 30 samples are 40 steps of 8: its sprint takes 4 steps, not 30.

    A client that took part in half of the rounds took half of these: its sprint takes 2.
    """
    trained = train(make_clients, small_net, rounds=5, local_epochs=2)
    assert sprint(trained, anneal_rounds=1).rounds[0].cost.steps == 4
    assert sprint(trained, anneal_rounds=1, sprint_steps=3).rounds[0].cost.steps == 3
    half = train(make_clients, small_net, rounds=5, local_epochs=2, participation=0.5)
    assert sprint(half, anneal_rounds=1).rounds[0].cost.steps == 2


def test_a_note_names_the_settings_without_effect(
    make_clients: MakeClients, small_net: Net
) -> None:
    trained = train(make_clients, small_net)

    assert not any("had no effect" in note for note in sprint(trained).notes)
    weighed, note = sprint(
        trained, learning_rate=0.3, step_every=3, local_epochs=2, aggregation="adaptive"
    ).notes[-2:]
    assert weighed == "Clients were weighed by their number of samples, not by aggregation."
    assert "had no effect: learning_rate, step_every, local_epochs." in note


def test_the_gain_stretches_the_change_of_the_sprint(
    make_clients: MakeClients, small_net: Net
) -> None:
    """With a gain of 1.5 a weight that the sprint moves by d moves by 1.5 d.

    BatchNorm's statistics are no sums of updates, and stay those of the mean.
    """
    trained = train(make_clients, small_net)
    plain, far = (_after_the_sprint(trained, sprint_gain=gain) for gain in (1.0, 1.5))
    weights = dict(small_net().named_parameters())
    assert weights.keys() < far.keys()
    for name, start in trained.params.items():
        moved = 1.5 if name in weights else 1.0
        expected = start + moved * (plain[name] - start)
        torch.testing.assert_close(far[name], expected.to(start.dtype))


def test_a_removed_sample_weighs_as_much_as_a_remaining_one_in_the_sprint(
    make_clients: MakeClients, small_net: Net
) -> None:
    """Six removed samples, passed twice in three steps, are 4 in each, beside 8 remaining ones.

    So their part of the loss has half of its weights: 0.35 instead of 0.7, 0.125 instead of 0.25.
    """
    trained = train(make_clients, small_net, local_epochs=3)
    after = _after_the_sprint(trained, sprint_steps=3, sprint_passes=2.0)
    assert isinstance(trained.federation, Watched)
    (task,) = trained.federation.rounds[1]
    half = task.settings.model_copy(update={"removed_weight": 0.35, "mu_c": 0.125})
    client = split(make_clients()[0], [REQUEST])
    params, _ = train_student(
        replace(task, settings=half),
        client,
        LocalWorkspace(small_net),
        task.arrays["model"],
        steps=3,
        removed_size=4,
        removed_targets=neighbour_losses(removed_of(client), client.retained, 5),
    )
    assert digest(params) == digest(after)


def removed_of(client: Client) -> Examples:
    assert client.removed is not None
    return client.removed


def test_neighbours_say_how_far_a_removed_sample_is_unlearned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remaining samples lie at 0, 1, 2 (label 0) and at 10, 11 (label 1).

    Removed are 0.1 with label 0, 0.2 with label 1 and 10.4 with label 1. Of the three nearest 3, 0
    and 2 have the label, so the probabilities are 3.5/4, 0.5/4 and 2.5/4. With more neighbours
    than there are samples all five count: 3, 2 and 2 of them, over 6. Read two at a time it is the
    same. If at most two are compared they are those at 0 and 2, the places 0 and 5 // 2: both have
    label 0, so that of two neighbours 2, 0 and 0 have the label, over 3. Tokens have no neighbours.
    """

    def at(places: list[float], labels: list[int]) -> TensorExamples:
        ids = [f"{place}" for place in places]
        return TensorExamples(torch.tensor(places)[:, None], torch.tensor(labels), ids)

    retained = at([0.0, 1.0, 2.0, 10.0, 11.0], [0, 0, 0, 1, 1])
    removed = at([0.1, 0.2, 10.4], [0, 1, 1])
    for at_once in (1000, 2):
        monkeypatch.setattr(goldfish_sprint, "READ_AT_ONCE", at_once)
        losses = neighbour_losses(removed, retained, 3)
        assert losses.tolist() == SAME([math.log(4 / 3.5), math.log(8), math.log(4 / 2.5)])
        losses = neighbour_losses(removed, retained, 9)
        assert losses.tolist() == SAME([math.log(6 / 3.5), math.log(6 / 2.5), math.log(6 / 2.5)])
    monkeypatch.setattr(goldfish_sprint, "COMPARED", 2)
    losses = neighbour_losses(removed, retained, 2)
    assert losses.tolist() == SAME([math.log(3 / 2.5), math.log(6), math.log(6)])
    tokens = TensorExamples(torch.tensor([[1, 2]]), torch.tensor([0]), ["a"])
    assert not len(neighbour_losses(tokens, tokens, 3))


def _after_the_sprint(trained: goldfish.Trained, **settings: Any) -> Params:
    method = goldfish.METHODS["goldfish-sprint"]
    own = method.settings(**settings)
    plan = goldfish.workflow.unlearning_plan(
        trained, [REQUEST], method, own, training=trained.settings, rounds=1, seed=0
    )
    return next(iter(method.unlearn(plan, own))).params


def test_a_backdoor_goes_and_the_accuracy_stays(
    make_clients: MakeClients, small_net: Net, test_set: TensorExamples
) -> None:
    """A third of client-1's samples carry a trigger, a large last feature, and the label 0.

    The old model has learned that; after a fifth of its training's samples it is forgotten. The
    training took 112 steps of this client, so the sprint is short.
    """
    clients = make_clients((60, 60, 60))
    points, labels = clients[0].retained.batch(torch.arange(60))
    points[:20, -1], labels[:20] = 4.0, 0
    clients[0] = Client("client-1", TensorExamples(points, labels, list(clients[0].retained.ids)))
    trained = goldfish.train(
        goldfish.InProcess(clients, small_net),
        rounds=16,
        learning_rate=0.1,
        batch_size=8,
        test=test_set,
    )
    request = DeletionRequest("client-1", sample_ids=[f"c1-{i}" for i in range(20)])
    result = sprint(trained, [request], test=test_set, sprint_steps=6)
    triggered, true = test_set.batch((test_set.labels != 0).nonzero().flatten())
    triggered[:, -1] = 4.0
    fooled = [
        (predict(model, TensorExamples(triggered, true)).argmax(dim=1) == 0).double().mean().item()
        for model in (trained.model, result.model)
    ]
    assert fooled[0] > 0.5
    assert fooled[1] < 0.1
    before, after = trained.rounds[-1].scores, result.rounds[-1].scores
    assert before is not None
    assert after is not None
    assert after.accuracy > before.accuracy - 5
    assert result.cost.samples < trained.cost.samples / 5


def test_shards_are_trained_as_a_whole(make_clients: MakeClients, small_net: Net) -> None:
    sharded = train(make_clients, small_net, shards=2)
    whole = goldfish.Trained(
        sharded.federation,
        sharded.params,
        TrainingSettings(**{**sharded.settings.model_dump(), "shards": 1}),
        sharded.seed,
    )
    assert digest(sprint(sharded).params) == digest(sprint(whole).params)
