"""FedRecovery: what is subtracted, how much noise there is, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import TensorExamples
from goldfish.methods import Plan, fedavg
from goldfish.methods.fed_recovery import (
    FED_RECOVERY,
    FedRecoverySettings,
    distance_bound,
    noise_sigma,
    recover,
    residual,
    round_weights,
)
from goldfish.params import all_finite, digest, distance, scale, subtract, weighted_mean
from goldfish.types import Client, DeletionRequest, Federation, Params, Round
from goldfish.workflow import training_plan, unlearning_plan

MakeClients = Callable[..., list[Client]]
REQUESTS = {
    "samples": [DeletionRequest("client-1", sample_ids=["c1-0", "c1-9"])],
    "client": [DeletionRequest("client-1")],
    "two clients": [DeletionRequest("client-1", ["c1-0"]), DeletionRequest("client-3")],
}
WEIGHTS = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "out.weight", "out.bias")


def train(federation: Federation, **settings: Any) -> goldfish.Trained:
    """Train and keep every round."""
    values = {"rounds": 4, "learning_rate": 0.1, "batch_size": 8, **settings}
    return goldfish.train(federation, keep_for={"fed-eraser": {"keep_every": 1}}, **values)


def plan_for(trained: goldfish.Trained, requests: Sequence[DeletionRequest], seed: int = 0) -> Plan:
    return unlearning_plan(
        trained,
        requests,
        FED_RECOVERY,
        FedRecoverySettings(),
        training=trained.settings,
        rounds=3,
        seed=seed,
    )


def weights_of(params: Params) -> Params:
    return {name: params[name] for name in WEIGHTS}


@pytest.fixture
def trained(make_clients: MakeClients, small_net: type[nn.Module]) -> goldfish.Trained:
    return train(goldfish.InProcess(make_clients(), small_net))


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_kind_of_deletion_asks_nobody(
    trained: goldfish.Trained, test_set: TensorExamples, kind: str
) -> None:
    run = trained.federation.run

    def refuse(tasks: Any) -> Any:
        steps = {task.step.name for task in tasks}
        assert steps <= {"check", "file"}, "a client was asked for more"
        return run(tasks)

    trained.federation.run = refuse  # type: ignore[method-assign]
    result = goldfish.unlearn(trained, REQUESTS[kind], method=FED_RECOVERY, test=test_set)
    assert [record.index for record in result.rounds] == [1]
    assert (result.cost.steps, result.cost.bytes_sent) == (0, 0)
    assert all_finite(result.params)
    assert result.params.keys() == trained.params.keys()
    assert bool((result.params["norm.running_var"] > 0).all())
    lost = any("lost all that they ever contributed" in note for note in result.notes)
    assert lost == (kind != "client")


def test_a_class_is_refused(trained: goldfish.Trained) -> None:
    request = DeletionRequest("client-1", class_label=2)
    with pytest.raises(goldfish.ConfigError, match="handles: client, samples"):
        goldfish.unlearn(trained, [request], method=FED_RECOVERY)


def test_what_is_subtracted(trained: goldfish.Trained) -> None:
    """Written out a second time, round by round, from the definition."""
    plan = plan_for(trained, REQUESTS["client"])
    recovered = recover(plan, FedRecoverySettings(noise_ratio=0, strength=2))
    expected = weights_of(trained.params)
    steps, parts = [], []
    for entry in trained.history.values():
        sizes = [u.num_examples for u in entry.updates]
        everyone = weighted_mean((u.params for u in entry.updates), sizes)
        others = weighted_mean((u.params for u in entry.updates[1:]), sizes[1:])
        steps.append(distance(weights_of(everyone), weights_of(entry.start)))
        parts.append(subtract(everyone, others))
    for step, part in zip(steps, parts, strict=True):
        share = 2 * step**2 / sum(s**2 for s in steps)
        expected = subtract(expected, scale(weights_of(part), share))
    assert distance(weights_of(recovered.params), expected) < 1e-5
    assert distance(expected, weights_of(trained.params)) > 0.01


def test_additive_training_is_undone_exactly(trained: goldfish.Trained) -> None:
    """One round, strength 1: what is left is the average of the others, the retrained model."""
    entry = trained.history[1]
    sizes = [u.num_examples for u in entry.updates]
    params = weighted_mean((u.params for u in entry.updates), sizes)
    short = replace(
        trained,
        params=params,
        history={1: entry},
        settings=trained.settings.model_copy(update={"rounds": 1}),
    )
    plan = plan_for(short, REQUESTS["client"])
    recovered = recover(plan, FedRecoverySettings(noise_ratio=0, strength=1))
    others = weighted_mean((u.params for u in entry.updates[1:]), sizes[1:])
    assert distance(recovered.params, others) < 1e-6


def test_buffers_are_those_of_the_others_in_the_last_round(trained: goldfish.Trained) -> None:
    recovered = recover(plan_for(trained, REQUESTS["client"]), FedRecoverySettings())
    others = trained.history[4].updates[1:]
    mean = weighted_mean((u.params for u in others), [u.num_examples for u in others])
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(recovered.params[name], mean[name]), name


class Frozen(nn.Module):
    """A model with a weight that is not trained, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)
        self.fixed.requires_grad_(requires_grad=False)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(self.fixed(inputs)).relu())
        logits: Tensor = self.out(hidden.relu())
        return logits


def test_frozen_weights_get_no_noise_and_tied_ones_stay_tied(make_clients: MakeClients) -> None:
    trained = train(goldfish.InProcess(make_clients(), Frozen))
    params = recover(plan_for(trained, REQUESTS["samples"]), FedRecoverySettings()).params
    for name in ("fixed.weight", "fixed.bias"):
        assert torch.equal(params[name], trained.params[name])
    assert torch.equal(params["first.weight"], params["second.weight"])
    assert not torch.equal(params["first.weight"], trained.params["first.weight"])


def test_noise_is_as_large_as_asked(trained: goldfish.Trained) -> None:
    plan = plan_for(trained, REQUESTS["client"])
    bare = recover(plan, FedRecoverySettings(noise_ratio=0))
    noisy = recover(plan, FedRecoverySettings(noise_ratio=2))
    removed = distance(weights_of(trained.params), weights_of(bare.params))
    drawn = distance(weights_of(noisy.params), weights_of(bare.params))
    count = sum(trained.params[name].numel() for name in WEIGHTS)
    assert bare.sigma == 0
    assert noisy.sigma == pytest.approx(2 * removed / math.sqrt(count), rel=1e-5)
    assert drawn == pytest.approx(2 * removed, rel=0.2)  # 99 draws


def test_epsilon_sets_the_noise(trained: goldfish.Trained) -> None:
    """Of the bound that follows from the residuals, or of the one that is given."""
    plan = plan_for(trained, REQUESTS["client"])
    names = sorted(WEIGHTS)
    steps, norms = [], []
    for entry in trained.history.values():
        updates = {u.client_id: u for u in entry.updates}
        everyone = residual(updates, entry.start, updates.keys())
        steps.append(distance(weights_of(everyone), scale(weights_of(everyone), 0)))
        own = weights_of(residual(updates, entry.start, {"client-1"}))
        norms.append(math.sqrt(sum(own[n].double().square().sum().item() for n in names)))
    bound = distance_bound(norms, round_weights(steps, 3.0), 1.5)
    derived = recover(plan, FedRecoverySettings(epsilon=2, round_growth=1.5))
    given = recover(plan, FedRecoverySettings(epsilon=2, distance_bound=0.25))
    assert derived.bound == pytest.approx(bound, rel=1e-5)
    assert derived.sigma == pytest.approx(noise_sigma(bound, 2, 1e-5), rel=1e-5)
    assert (given.bound, given.sigma) == (0.25, noise_sigma(0.25, 2, 1e-5))


def test_noise_without_end_is_an_error(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match="Give distance_bound instead"):
        goldfish.unlearn(
            trained, REQUESTS["client"], method=FED_RECOVERY, epsilon=1.0, round_growth=1e200
        )


def test_the_notes_state_the_assumption_and_claim_no_more(trained: goldfish.Trained) -> None:
    def notes(**settings: Any) -> Sequence[str]:
        request = REQUESTS["client"]
        return goldfish.unlearn(trained, request, method=FED_RECOVERY, **settings).notes

    assert FED_RECOVERY.guarantee == "approximate"
    assert "(epsilon, delta) = (2, 1e-05)" in notes(epsilon=2.0)[0]
    assert "at most 1, from which" in notes(epsilon=2.0)[0]
    assert "at most 0.5 away" in notes(epsilon=2.0, distance_bound=0.5)[0]
    assert "(inf, 1e-05)" in notes(noise_ratio=0.0)[0]
    assert all("no guarantee" in notes(**s)[0] for s in ({}, {"epsilon": 2.0}))
    assert "3 times the mean residual of 4 rounds" in notes()[1]


def test_the_bound_holds_where_its_assumption_does() -> None:
    """Softmax regression is convex; without momentum and with small steps a round is g = 1.

    Retrained from the same start with the same batches, the model is within the bound.
    """
    generator = torch.Generator().manual_seed(0)

    def client(number: int, flipped: bool) -> Client:
        points = torch.randn(20, 6, generator=generator)
        labels = points[:, :3].argmin(dim=1) if flipped else points[:, :3].argmax(dim=1)
        ids = [f"c{number}-{i}" for i in range(20)]
        return Client(f"client-{number}", TensorExamples(points, labels, ids))

    clients = [client(1, flipped=True), client(2, flipped=False), client(3, flipped=False)]
    federation = goldfish.InProcess(clients, lambda: nn.Linear(6, 3))
    trained = train(federation, rounds=10, momentum=0.0, learning_rate=0.1)
    start = trained.history[1].start
    retraining = replace(
        training_plan(federation, trained.settings), requests=tuple(REQUESTS["client"])
    )
    *_, last = fedavg.train(retraining, start)
    for strength in (1.0, 3.0, 10.0):
        recovered = recover(
            plan_for(trained, REQUESTS["client"]),
            FedRecoverySettings(noise_ratio=0, strength=strength),
        )
        assert distance(recovered.params, last.params) <= recovered.bound


def test_a_second_deletion_removes_what_the_first_has_not(trained: goldfish.Trained) -> None:
    """One after the other, both clients' residuals are those of both at once."""
    settings = FedRecoverySettings(noise_ratio=0)
    first, second = REQUESTS["client"][0], DeletionRequest("client-3")
    once = recover(plan_for(trained, [first, second]), settings)
    half = recover(plan_for(trained, [first]), settings)
    after = replace(trained, params=half.params, honoured=[first])
    twice = recover(plan_for(after, [second]), settings)
    assert distance(once.params, twice.params) < 1e-5
    assert once.bound == twice.bound
    again = DeletionRequest("client-1", ["c1-3"])
    with pytest.raises(goldfish.ConfigError, match="client-1 has left with all of its data"):
        plan_for(after, [again])


def test_the_model_of_another_method_is_refused(trained: goldfish.Trained) -> None:
    """It does not hold the residuals of the training; a model of FedRecovery's own still does."""
    first, second, third = (DeletionRequest(f"client-{n}", [f"c{n}-0"]) for n in (1, 2, 3))
    retrained = goldfish.unlearn(trained, [first], method="retrain", rounds=1)
    with pytest.raises(goldfish.ConfigError, match="this model is retrain's"):
        goldfish.unlearn(retrained, [second], method=FED_RECOVERY)
    once = goldfish.unlearn(trained, [first], method=FED_RECOVERY)
    twice = goldfish.unlearn(once, [second], method=FED_RECOVERY)
    assert twice.trained.phase == "fed-recovery.2"
    with pytest.raises(goldfish.ConfigError, match="every client asks"):
        goldfish.unlearn(twice, [third], method=FED_RECOVERY)


def test_what_is_not_in_the_model_is_honoured_though_it_does_not_change(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    """A client's whole contribution went with its first request; another never made any."""
    trained = train(goldfish.InProcess(make_clients(), small_net), participation=0.3, rounds=1)
    (only,) = (update.client_id for update in trained.history[1].updates)
    first, second, never = (
        DeletionRequest(f"client-{n}", [f"c{n}-{place}"])
        for n, place in ((only[-1], 0), (only[-1], 1), (int(only[-1]) % 3 + 1, 0))
    )
    once = goldfish.unlearn(trained, [first], method=FED_RECOVERY)
    for request in (second, never):
        again = goldfish.unlearn(once, [request], method=FED_RECOVERY)
        assert digest(again.params) == digest(once.params)
        assert not again.not_honoured


def test_later_noise_is_drawn_anew(trained: goldfish.Trained) -> None:
    first, second = REQUESTS["client"][0], DeletionRequest("client-3")

    def noise(seed: int = 0, honoured: Sequence[DeletionRequest] = ()) -> Params:
        plan = plan_for(replace(trained, honoured=honoured), [first, second], seed=seed)
        settings: Mapping[str, Any] = {"epsilon": 1.0, "distance_bound": 1.0}
        noisy = recover(plan, FedRecoverySettings(**settings))
        bare = recover(plan, FedRecoverySettings(noise_ratio=0))
        return subtract(noisy.params, bare.params)

    assert distance(noise(), noise()) == 0
    assert distance(noise(), noise(honoured=[first])) > 1
    assert distance(noise(), noise(seed=1)) > 1


def test_a_finished_run_does_nothing_when_resumed(trained: goldfish.Trained) -> None:
    plan = plan_for(trained, REQUESTS["client"])
    (only,) = FED_RECOVERY.unlearn(plan, FedRecoverySettings())
    stored = Round(only.index, only.params, (), (), 0)
    assert only.final
    assert not list(FED_RECOVERY.unlearn(replace(plan, last=stored), FedRecoverySettings()))


def test_same_bits_on_one_and_two_workers_and_in_any_order_of_what_was_kept(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    digests = set()
    for workers in (1, 2):
        trained = train(goldfish.InProcess(make_clients(), small_net, workers=workers))
        if workers == 2:
            turned = {
                index: replace(entry, updates=list(reversed(entry.updates)))
                for index, entry in sorted(trained.history.items(), reverse=True)
            }
            params = {name: trained.params[name] for name in sorted(trained.params)}
            trained = replace(trained, history=turned, params=params)
        plan = plan_for(trained, REQUESTS["two clients"])
        digests.add(digest(recover(plan, FedRecoverySettings()).params))
    assert len(digests) == 1


def test_every_client_cannot_go(trained: goldfish.Trained) -> None:
    everyone = [DeletionRequest(f"client-{n}", [f"c{n}-0"]) for n in (1, 2, 3)]
    with pytest.raises(goldfish.ConfigError, match="No client has any data left"):
        goldfish.unlearn(trained, everyone, method=FED_RECOVERY)


def test_adaptive_weights_are_refused(trained: goldfish.Trained) -> None:
    adaptive = trained.settings.model_copy(update={"aggregation": "adaptive"})
    weighted = replace(trained, settings=adaptive)
    with pytest.raises(goldfish.ConfigError, match="which aggregation = 'adaptive' does not go by"):
        goldfish.unlearn(weighted, REQUESTS["client"], method=FED_RECOVERY, aggregation="size")


def test_rounds_that_were_not_kept_are_an_error(trained: goldfish.Trained) -> None:
    without = replace(trained, history={1: trained.history[1], 3: trained.history[3]})
    with pytest.raises(goldfish.ConfigError, match=r"keep_for=\['fed-recovery'\]"):
        goldfish.unlearn(without, REQUESTS["client"], method=FED_RECOVERY)


def test_rounds_in_which_not_everybody_took_part(
    make_clients: MakeClients, small_net: type[nn.Module]
) -> None:
    federation = goldfish.InProcess(make_clients(), small_net)
    trained = train(federation, rounds=6, participation=0.3)
    assert {len(entry.updates) for entry in trained.history.values()} == {1}
    took_part = {entry.updates[0].client_id for entry in trained.history.values()}
    gone = trained.history[6].updates[0].client_id
    assert len(took_part) > 1
    result = goldfish.unlearn(trained, [DeletionRequest(gone)], method=FED_RECOVERY)
    start = trained.history[6].start
    assert torch.equal(result.params["norm.running_var"], start["norm.running_var"])
