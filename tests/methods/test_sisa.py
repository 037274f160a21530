"""SISA removes exactly: the bits of training without the data, for the work that it promises."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import goldfish
from goldfish.data import Subset, TensorExamples
from goldfish.methods.sisa import SISA, SisaSettings, place_of, separate, sisa_step
from goldfish.params import digest, num_bytes
from goldfish.training.fit import predict
from goldfish.training.workspace import ensemble_size
from goldfish.types import Client, DeletionRequest, Params, RoundReplies
from goldfish.workflow import training_plan, unlearning_plan

MakeClients = Callable[..., list[Client]]
Net = type[nn.Module]
LAYOUT = SisaSettings(shards=2, slices=3, epochs_per_slice=2)
TRAINING: dict[str, Any] = {"learning_rate": 0.1, "batch_size": 8}
SIZES = (40, 24, 18)


def train(clients: Sequence[Client], net: Net, **more: Any) -> goldfish.Trained:
    settings = {**TRAINING, **LAYOUT.model_dump(), **more}
    workers = settings.pop("workers", 1)
    federation = goldfish.InProcess(clients, net, workers=workers, remember=False)
    return goldfish.train(federation, method=SISA, **settings)


def unlearn(
    trained: goldfish.Trained, requests: Sequence[DeletionRequest], **more: Any
) -> goldfish.Unlearned:
    return goldfish.unlearn(trained, requests, method=SISA, **more)


def without(clients: Sequence[Client], requests: Sequence[DeletionRequest]) -> list[Client]:
    """Return clients that never held the removed samples; one that leaves is not there."""
    left = []
    for client in clients:
        data = client.retained
        assert isinstance(data, TensorExamples)
        own = [r for r in requests if r.client_id == client.id]
        if any(r.sample_ids is None and r.class_label is None for r in own):
            continue
        stays = [
            place
            for place, (sample_id, label) in enumerate(zip(data.ids, data.labels, strict=True))
            if not any(sample_id in (r.sample_ids or ()) or r.class_label == label for r in own)
        ]
        ids = [data.ids[place] for place in stays]
        left.append(Client(client.id, TensorExamples(data.images[stays], data.labels[stays], ids)))
    return left


def in_place(
    client: Client,
    shards: Collection[int],
    slices: Collection[int],
    layout: SisaSettings = LAYOUT,
) -> list[str]:
    """Return the ids of a client's samples that lie in these shards and slices."""
    found = []
    for sample_id in client.retained.ids:
        shard, place = place_of(sample_id, client.id, 0, layout)
        if shard in shards and place in slices:
            found.append(sample_id)
    return found


def samples(n: int, chosen: Callable[[Client], list[str]]) -> Callable[[list[Client]], Any]:
    """Return what makes the request of client n."""
    return lambda clients: [DeletionRequest(f"client-{n}", sample_ids=chosen(clients[n - 1]))]


DELETIONS: dict[str, Callable[[list[Client]], list[DeletionRequest]]] = {
    "first slice": samples(1, lambda c: in_place(c, [0], [0])[:1]),
    "middle slice": samples(1, lambda c: in_place(c, [1], [1])[:2]),
    "last slice": samples(1, lambda c: in_place(c, [0], [2])[:1]),
    "several slices": samples(1, lambda c: in_place(c, [0], [1])[:1] + in_place(c, [0], [2])[:1]),
    "several shards": samples(1, lambda c: in_place(c, [0], [2])[:1] + in_place(c, [1], [0])[:1]),
    "the whole first slice": samples(1, lambda c: in_place(c, [0], [0])),
    "the whole middle slice": samples(1, lambda c: in_place(c, [0], [1])),
    "the whole last slice": samples(1, lambda c: in_place(c, [1], [2])),
    "all slices but the last": samples(1, lambda c: in_place(c, [1], [0, 1])),
    "the whole shard": samples(1, lambda c: in_place(c, [0], [0, 1, 2])),
    "all samples of a client": samples(2, lambda c: list(c.retained.ids)),
    "class": lambda clients: [DeletionRequest(c.id, class_label=1) for c in clients],
    "client": lambda _clients: [DeletionRequest("client-2")],
    "client and samples": lambda clients: [
        DeletionRequest("client-1"),
        DeletionRequest("client-3", sample_ids=in_place(clients[2], [0], [1])),
    ],
}


@pytest.fixture
def trained(make_clients: MakeClients, small_net: Net) -> goldfish.Trained:
    return train(make_clients(SIZES), small_net)


def kept(trained: goldfish.Trained, client: str, phase: str) -> dict[str, str]:
    """Return the digests of what a client keeps under a phase, by the rest of the key."""
    state = trained.federation.states().get(client, {})
    return {
        key.removeprefix(f"{phase}/"): digest(params)
        for key, params in state.items()
        if key.startswith(f"{phase}/")
    }


# Exactness.


@pytest.mark.parametrize("kind", DELETIONS)
def test_the_result_is_training_without_the_removed_samples(
    trained: goldfish.Trained, make_clients: MakeClients, small_net: Net, kind: str
) -> None:
    requests = DELETIONS[kind](make_clients(SIZES))
    assert all(r.sample_ids is None or r.sample_ids for r in requests)
    result = unlearn(trained, requests)
    never = train(without(make_clients(SIZES), requests), small_net)
    assert digest(result.params) == digest(never.params) != digest(trained.params)
    assert [record.failures for record in result.rounds] == [[]]
    for client in {request.client_id for request in requests}:
        # The checkpoints are those as well: a later deletion can go on from them.
        if client in never.federation.client_ids:
            assert kept(trained, client, "sisa") == kept(never, client, "sisa-training")
        else:
            assert not kept(trained, client, "sisa")


def test_the_members_that_remain(trained: goldfish.Trained, make_clients: MakeClients) -> None:
    """A shard left empty leaves the ensemble, and so does a client; the others stay in order."""
    clients = make_clients(SIZES)
    assert ensemble_size(trained.params) == 6
    before = [digest(m) for m in separate(trained.params)]
    for kind, stays in [
        ("the whole shard", [1, 2, 3, 4, 5]),
        ("client", [0, 1, 4, 5]),
        ("all samples of a client", [0, 1, 4, 5]),
    ]:
        result = unlearn(trained, DELETIONS[kind](clients))
        assert [digest(m) for m in separate(result.params)] == [before[i] for i in stays], kind
    assert len(predict(result.model, clients[0].retained)) == SIZES[0]


def test_a_later_deletion_goes_on_from_the_one_before(
    trained: goldfish.Trained, make_clients: MakeClients, small_net: Net
) -> None:
    """Three deletions in a row, one client twice: exact each time, and only what is new is redone.

    The second hits a client that the first did not, the third the last slice of the first's shard.
    """
    clients = make_clients(SIZES)
    stages = [
        [DeletionRequest("client-1", sample_ids=in_place(clients[0], [0], [0])[:1])],
        [DeletionRequest("client-2", sample_ids=in_place(clients[1], [1], [2])[:1])],
        [DeletionRequest("client-1", sample_ids=in_place(clients[0], [0], [2])[:1])],
    ]
    honoured: list[DeletionRequest] = []
    fits = []
    for stage in stages:
        plan = unlearning_plan(
            trained, stage, SISA, SisaSettings(), training=trained.settings, rounds=1, seed=0
        )
        (this,) = SISA.unlearn(plan, SisaSettings())
        honoured += stage
        trained = replace(
            trained, params=this.params, phase=plan.phase, memo=this.memo, honoured=[*honoured]
        )
        never = train(without(clients, honoured), small_net)
        assert digest(this.params) == digest(never.params)
        assert [u.client_id for u in this.updates] == [stage[0].client_id]
        fits.append(sum(int(u.metrics["samples"]) for u in this.updates))
    sizes = [len(in_place(clients[0], [0], range(n + 1))) for n in range(3)]
    last_of_second = len(in_place(clients[1], [1], [0, 1, 2]))
    assert fits == [2 * (sum(sizes) - 3), 2 * (last_of_second - 1), 2 * (sizes[2] - 2)]


@pytest.mark.parametrize("order", ["cosine", "step"])
def test_exact_with_a_schedule(make_clients: MakeClients, small_net: Net, order: str) -> None:
    clients = make_clients(SIZES)
    more = {"schedule": order, "step_every": 2, "rounds": 6}
    requests = DELETIONS["middle slice"](clients)
    result = unlearn(train(clients, small_net, **more), requests)
    never = train(without(clients, requests), small_net, **more)
    constant = train(without(clients, requests), small_net, rounds=6)
    assert digest(result.params) == digest(never.params) != digest(constant.params)


def test_slices_and_shards_that_begin_empty(make_clients: MakeClients, small_net: Net) -> None:
    """Few samples in many places: one alone waits for a second, and a client may have no member."""
    clients = make_clients((9, 5, 1))
    trained = train(clients, small_net, shards=3, slices=4, quorum=1.0)
    assert not trained.rounds[0].failures
    owners: Mapping[str, int] = trained.memo["owners"]
    assert set(owners) == {"client-1", "client-2"}
    assert ensemble_size(trained.params) == sum(owners.values())
    for n, size in enumerate((9, 5), start=1):
        for place in range(size):
            requests = [DeletionRequest(f"client-{n}", sample_ids=[f"c{n}-{place}"])]
            never = train(without(clients, requests), small_net, shards=3, slices=4)
            result = unlearn(trained, requests)
            assert digest(result.params) == digest(never.params)
            assert not result.not_honoured, "a lone sample of a shard was never in the model"
    assert not unlearn(trained, [DeletionRequest("client-3")]).not_honoured


# The work.


@pytest.mark.parametrize(("shard", "place"), [(0, 0), (0, 1), (1, 2)])
def test_only_the_hit_shard_is_retrained_from_the_hit_slice_on(
    trained: goldfish.Trained, make_clients: MakeClients, shard: int, place: int
) -> None:
    """2 epochs over the slices up to j, one sample fewer, for each j from the hit one on."""
    client = make_clients(SIZES)[0]
    request = DeletionRequest("client-1", sample_ids=in_place(client, [shard], [place])[:1])
    result = unlearn(trained, [request])
    sizes = [len(in_place(client, [shard], range(j + 1))) - 1 for j in range(place, 3)]
    assert result.cost.samples == 2 * sum(sizes)
    before, after = kept(trained, "client-1", "sisa-training"), kept(trained, "client-1", "sisa")
    lost = tuple(f"shard-{shard}/slice-{j}/" for j in range(place, 3))
    stays = {key for key in before if not key.startswith(lost)}
    assert {key for key in before if key in after} == stays
    assert all(before[key] == after[key] for key in stays)
    assert not kept(trained, "client-2", "sisa")


def test_what_training_and_unlearning_cost(make_clients: MakeClients, small_net: Net) -> None:
    """2 + 2 models a client in training, down and up; 3 clients, 2 shards, 3 checkpoints kept.

    The deletion asks one client.
    """
    trained = train(make_clients((40, 40, 40)), small_net)
    model = num_bytes(separate(trained.params)[0])
    assert trained.cost.bytes_sent == 3 * 4 * model
    assert trained.cost.bytes_kept == 3 * 2 * 3 * model
    result = unlearn(trained, [DeletionRequest("client-1", sample_ids=["c1-0"])])
    assert result.cost.bytes_sent == 4 * model
    assert result.cost.bytes_kept == 2 * 3 * model
    gone = unlearn(trained, [DeletionRequest("client-1")])
    assert (gone.cost.bytes_sent, gone.cost.steps) == (0, 0)


def test_a_request_that_matches_nothing_is_an_error(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match="'client-1' holds no sample of class 7"):
        unlearn(trained, [DeletionRequest("client-1", class_label=7)])


def test_a_client_that_holds_nothing_of_the_class_takes_no_step(
    make_clients: MakeClients, small_net: Net
) -> None:
    first, *others = make_clients(SIZES)
    without = Subset(first.retained, (first.retained.labels != 2).nonzero().flatten())
    trained = train([Client(first.id, without), *others], small_net)
    asked = [DeletionRequest(name, class_label=2) for name in ("client-1", "client-2")]
    both, alone = unlearn(trained, asked), unlearn(trained, asked[1:])
    assert digest(both.params) == digest(alone.params) != digest(trained.params)
    assert both.cost.steps == alone.cost.steps > 0


class Guarded(TensorExamples):
    """Examples that raise when a forbidden sample is read, once they are armed."""

    forbidden: frozenset[str] = frozenset()

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        read = {self.ids[p] for p in positions.tolist()} & self.forbidden
        if read:
            raise AssertionError(f"removed samples were read: {read}")
        return super().batch(positions)


def guard(clients: list[Client]) -> Guarded:
    data = clients[0].retained
    assert isinstance(data, TensorExamples)
    guarded = Guarded(data.images, data.labels, data.ids)
    clients[0] = replace(clients[0], retained=guarded)
    return guarded


@pytest.mark.parametrize("kind", ["first slice", "last slice", "several shards", "the whole shard"])
def test_no_removed_sample_is_ever_read(
    make_clients: MakeClients, small_net: Net, kind: str
) -> None:
    clients = make_clients(SIZES)
    guarded = guard(clients)
    trained = train(clients, small_net)
    requests = DELETIONS[kind](clients)
    guarded.forbidden = frozenset(requests[0].sample_ids or ())
    assert guarded.forbidden
    assert unlearn(trained, requests, quorum=1.0).rounds[0].failures == []


def test_the_guard_would_notice(make_clients: MakeClients, small_net: Net) -> None:
    clients = make_clients(SIZES)
    guard(clients).forbidden = frozenset({"c1-0"})
    (failure,) = train(clients, small_net).rounds[0].failures
    assert "removed samples were read" in failure.cause


# The engine.


def test_the_bits_do_not_depend_on_the_workers(make_clients: MakeClients, small_net: Net) -> None:
    requests = DELETIONS["class"](make_clients(SIZES))
    results = []
    for workers in (1, 2):
        trained = train(make_clients(SIZES), small_net, workers=workers)
        results.append((digest(trained.params), digest(unlearn(trained, requests).params)))
    assert results[0] == results[1]


def test_another_seed_trains_anew_and_finds_the_same_places(
    trained: goldfish.Trained, make_clients: MakeClients
) -> None:
    """Where a sample lies is for the training's seed to say; what is redone has other bits."""
    client = make_clients(SIZES)[0]
    request = DeletionRequest("client-1", sample_ids=in_place(client, [0], [1])[:1])
    first, again, other = (unlearn(trained, [request], seed=seed) for seed in (1, 1, 2))
    assert digest(first.params) == digest(again.params) != digest(other.params)
    assert first.cost.samples == other.cost.samples == unlearn(trained, [request]).cost.samples
    members = [[digest(m) for m in separate(r.params)] for r in (first, other)]
    assert [a == b for a, b in zip(*members, strict=True)] == [False] + 5 * [True]


@pytest.mark.parametrize("which", ["prepare", "unlearn"])
def test_going_on_after_the_only_round_does_nothing(
    trained: goldfish.Trained, make_clients: MakeClients, which: str
) -> None:
    """An interruption before it starts again, with the same bits; after it, nothing is left."""
    settings = trained.settings
    plan = training_plan(trained.federation, settings, phase="sisa-training")
    work = SISA.prepare
    if which == "unlearn":
        work = SISA.unlearn
        plan = unlearning_plan(
            trained,
            DELETIONS["class"](make_clients(SIZES)),
            SISA,
            SisaSettings(),
            training=settings,
            rounds=5,
            seed=0,
        )
    assert work is not None
    (this,) = work(plan, LAYOUT)
    (again,) = work(plan, LAYOUT)
    assert (this.index, this.final) == (1, True)
    assert digest(this.params) == digest(again.params)
    assert this.memo == again.memo
    assert list(work(replace(plan, last=this), LAYOUT)) == []


def test_a_client_that_fails_to_forget_loses_its_members(
    trained: goldfish.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old members have seen the removed data: they must not stay."""
    before = [digest(m) for m in separate(trained.params)]
    run = trained.federation.run

    def failing(tasks: Any) -> RoundReplies:
        def step(task: Any, client: Client, workspace: Any) -> Any:
            if client.id == "client-2":
                raise OSError("the disk is full")
            return sisa_step(task, client, workspace)

        if tasks[0].step.name == "sisa":
            tasks = [replace(task, step=replace(task.step, run=step)) for task in tasks]
        return run(tasks)

    monkeypatch.setattr(trained.federation, "run", failing)
    requests = [DeletionRequest(f"client-{n}", sample_ids=[f"c{n}-0"]) for n in (1, 2)]
    result = unlearn(trained, requests)
    assert [f.client_id for f in result.rounds[0].failures] == ["client-2"]
    assert [digest(m) for m in separate(result.params)][2:] == before[4:]
    with pytest.raises(goldfish.QuorumError):
        unlearn(trained, requests[1:])


# The settings.


def test_every_client_trains_whatever_the_participation(
    trained: goldfish.Trained, make_clients: MakeClients, small_net: Net
) -> None:
    """Sharing and averaging have no part in it."""
    more = {"participation": 0.4, "rounds": 7, "local_epochs": 5}
    assert digest(train(make_clients(SIZES), small_net, **more).params) == digest(trained.params)


def test_unlearning_uses_the_layout_of_the_training(
    trained: goldfish.Trained, make_clients: MakeClients
) -> None:
    requests = DELETIONS["first slice"](make_clients(SIZES))
    plain = unlearn(trained, requests)
    for more in ({"shards": 2}, {"rounds": 3}, {"slices": 3, "epochs_per_slice": 2}):
        assert digest(unlearn(trained, requests, **more).params) == digest(plain.params)
    with pytest.raises(goldfish.ConfigError, match="slices is 5, but the training used 3"):
        unlearn(trained, requests, slices=5)


def test_it_needs_its_own_training(trained: goldfish.Trained, make_clients: MakeClients) -> None:
    requests = DELETIONS["first slice"](make_clients(SIZES))
    fedavg = goldfish.train(trained.federation, rounds=1)
    with pytest.raises(goldfish.ConfigError, match="has a training of its own"):
        unlearn(fedavg, requests)
    with pytest.raises(goldfish.ConfigError, match="what that remembered is missing"):
        unlearn(replace(trained, memo={}), requests)


def test_a_deletion_that_leaves_nothing_is_an_error(trained: goldfish.Trained) -> None:
    with pytest.raises(goldfish.ConfigError, match="No client has any data left"):
        unlearn(trained, [DeletionRequest(f"client-{n}") for n in (1, 2, 3)])
    by_class = [DeletionRequest(f"client-{n}", class_label=k) for n in (1, 2, 3) for k in range(3)]
    with pytest.raises(goldfish.ConfigError, match="No client has any data left"):
        unlearn(trained, by_class)


def test_a_name_that_the_training_has_too_is_its_own(
    trained: goldfish.Trained, make_clients: MakeClients
) -> None:
    """Two shards a client, and none of those that FedAvg's training would make."""
    assert (len(separate(trained.params)), trained.settings.shards) == (3 * 2, 1)
    with pytest.raises(goldfish.ConfigError, match="shards is 3, but the training used 2"):
        unlearn(trained, DELETIONS["first slice"](make_clients(SIZES)), shards=3)


def test_places_are_spread_evenly_and_depend_on_client_and_seed() -> None:
    """1200 samples in 6 places: 200 expected, standard deviation 13; five of them are 65."""
    ids = [str(n) for n in range(1200)]
    places = [place_of(sample_id, "a", 0, LAYOUT) for sample_id in ids]
    counts = [places.count((shard, place)) for shard in range(2) for place in range(3)]
    assert sum(counts) == 1200
    assert all(135 < count < 265 for count in counts)
    assert places != [place_of(sample_id, "b", 0, LAYOUT) for sample_id in ids]
    assert places != [place_of(sample_id, "a", 1, LAYOUT) for sample_id in ids]


def test_it_learns(make_clients: MakeClients, small_net: Net, test_set: TensorExamples) -> None:
    trained = train(make_clients((60, 60, 60)), small_net, epochs_per_slice=10)
    right = predict(trained.model, test_set).argmax(dim=1) == test_set.labels
    assert right.float().mean() > 0.8
    (note,) = unlearn(trained, [DeletionRequest("client-1", sample_ids=["c1-0"])]).notes
    assert "ensemble" in note


def test_members_start_from_weights_of_their_own(make_clients: MakeClients, small_net: Net) -> None:
    """At a vanishing step size each member is still its newly initialised model: all differ."""
    trained = train(make_clients(SIZES), small_net, learning_rate=1e-9)
    members: list[Params] = separate(trained.params)
    firsts = [m["hidden.weight"] for m in members]
    for a in range(6):
        for b in range(a):
            assert not torch.allclose(firsts[a], firsts[b], atol=1e-3)
