"""The audit as a client step: what clients tell gives the verdict that the samples would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from goldfish.audits import AuditVerdict
from goldfish.data import TensorExamples, removal
from goldfish.evaluation.attacks import margins, membership
from goldfish.evaluation.audit import (
    Measured,
    Shifted,
    Shifts,
    audit_verdict,
    difference,
    effective,
    group_weights,
    shifts,
    verdict_on,
)
from goldfish.evaluation.harm import harm
from goldfish.federation import InProcess
from goldfish.methods.auditing import LOOK, LookSettings, Witnesses, drop
from goldfish.params import params_of
from goldfish.training.fit import predict
from goldfish.types import Client, Context, DeletionRequest, Failure, Params, RoundReplies, Task

MakeClients = Callable[..., list[Client]]
ORACLES = [f"oracle-{number}" for number in range(1, 6)]
NAMES = ["origin", "retrain", *ORACLES]


def requests_of(clients: Sequence[Client], counts: Sequence[int]) -> list[DeletionRequest]:
    """Ask for the first samples of each client."""
    return [
        DeletionRequest(client.id, sample_ids=client.retained.ids[:count])
        for client, count in zip(clients, counts, strict=True)
        if count
    ]


@pytest.fixture
def nets(small_net: Any) -> dict[str, Params]:
    """Return different models by name; audits do not care how they came about."""
    found = {}
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        found[name] = params_of(small_net())
    return found


def shown(
    witnesses: Witnesses, nets: dict[str, Params], on_test: Callable[[str], Tensor], labels: Tensor
) -> dict[str, Any]:
    """Show all models; return what the witnesses tell of those of the run."""
    quick = {
        name: witnesses.look(name, nets[name], on_test(name), labels)
        for name in ("origin", "retrain")
    }
    for name in ORACLES:
        witnesses.look_at_oracle(name, nets[name])
    return quick


def test_what_clients_tell_gives_the_verdict_of_the_samples(
    make_clients: MakeClients, small_net: Any, test_set: TensorExamples, nets: dict[str, Params]
) -> None:
    """Two of three clients remove 20 and 8 samples; all figures are those of the 28 together.

    Only the interval of the membership attack is another one: the mean of the clients' own, which
    are wider, since each has fewer samples.
    """
    clients = make_clients()
    requests = requests_of(clients, (20, 8, 0))
    federation = InProcess(clients, small_net, threads=1, remember=False)
    net, labels = small_net(), test_set.labels

    def logits(name: str, examples: Any) -> Tensor:
        net.load_state_dict(dict(nets[name]))
        return predict(net, examples)

    def on_test(name: str) -> Tensor:
        return margins(logits(name, test_set), labels)

    witnesses = Witnesses(federation, requests, 3)
    quick = shown(witnesses, nets, on_test, labels)
    told = witnesses.shifts()
    split = [removal.split(client, requests) for client in clients]
    gone = [client.removed for client in split if client.removed is not None]
    of_removed = torch.cat([own.labels for own in gone])
    measured = {
        name: Measured(
            torch.cat([margins(logits(name, own), own.labels) for own in gone]),
            on_test(name),
            50.0 + place,
        )
        for place, name in enumerate(NAMES)
    }
    oracles, origin = [measured[name] for name in ORACLES], [measured["origin"]]
    weights = group_weights(witnesses.labels, labels)
    assert torch.equal(weights, group_weights(of_removed, labels))
    stacked = torch.stack([oracle.unseen for oracle in oracles])

    def verdict_told(name: str) -> AuditVerdict:
        def told_of(*names: str) -> Shifts:
            return Shifts(*torch.tensor([told[name] for name in names], dtype=torch.float64).T)

        def shifted(name: str) -> Shifted:
            unseen = shifts(measured[name].unseen.unsqueeze(0), stacked, weights)
            counts = (len(of_removed), effective(weights))
            return Shifted((told_of(name), told_of(*ORACLES)), unseen, counts)

        accuracy = difference([measured[name].accuracy], [one.accuracy for one in oracles])
        return verdict_on(shifted(name), accuracy, shifted("origin"))

    for name in ("origin", "retrain"):
        expected = audit_verdict([measured[name]], oracles, of_removed, labels, origin)
        found = verdict_told(name)
        assert (found.word, found.sentence) == (expected.word, expected.sentence)
        assert found.memory is not None
        assert expected.memory is not None
        assert found.memory.value == pytest.approx(expected.memory.value, abs=1e-12)
        assert found.memory.high == pytest.approx(expected.memory.high, abs=1e-12)
        assert found.oracles == pytest.approx(expected.oracles, abs=1e-12)
        share = membership(measured[name].removed, of_removed, measured[name].unseen, labels)
        assert share is not None
        assert quick[name].membership.count == share.count == 28
        assert quick[name].membership.rate == pytest.approx(share.rate)
        assert quick[name].membership.low <= share.low < share.high <= quick[name].membership.high
    left = [client.retained for client in split]
    before, after = (
        torch.cat([logits(name, own) for own in left]) for name in ("origin", "retrain")
    )
    ids = [sample_id for own in left for sample_id in own.ids]
    holders = [client.id for client, own in zip(split, left, strict=True) for _ in own.ids]
    expected_harm = harm(before, after, torch.cat([own.labels for own in left]), ids, holders)
    assert quick["retrain"].harm == expected_harm.model_copy(update={"most_affected": []})
    assert witnesses.notes == []
    assert set(federation.states()) == {client.id for client in clients}
    drop(federation)
    assert federation.states() == {}


def told_of(
    clients: Sequence[Client], small_net: Any, params: Params, count: int
) -> tuple[Params, dict[str, float]]:
    """Return all that the first client tells of a model when ``count`` samples are removed."""
    federation = InProcess(clients, small_net, threads=1, remember=False)
    settings = LookSettings(
        name="m", classes=3, remaining=True, unseen=(0.1, 0.2, 0.3) * 2, unseen_labels=(0, 1, 2) * 2
    )
    requests = requests_of(clients[:1], [count])
    task = Task(clients[0].id, LOOK, {"audited": params}, settings, Context(phase="audit"))
    (update,) = federation.run([replace(task, requests=requests)]).updates
    return update.params, dict(update.metrics)


def test_nothing_about_one_sample_leaves(
    make_clients: MakeClients, small_net: Any, nets: dict[str, Params]
) -> None:
    """A client tells as many numbers of 400 samples as of 40, and none of a group that is small.

    Counts, shares and means only: no number of a client with 40 samples is a margin of one.
    """
    told = {}
    for size in (40, 400):
        clients = [replace(own, fewest=20) for own in make_clients((size,))]
        params, told[size] = told_of(clients, small_net, nets["origin"], size // 2)
        assert params == {}
        assert told[size]["removed"] == told[size]["remaining"] == size // 2
        net, whole = small_net(), clients[0].retained
        net.load_state_dict(dict(nets["origin"]))
        assert not set(margins(predict(net, whole), whole.labels).tolist()) & set(
            told[size].values()
        )
    assert told[40].keys() == told[400].keys()
    for count, silent in ((19, {"removed", "matched"}), (21, {"remaining", "right"})):
        clients = [replace(own, fewest=20) for own in make_clients((40,))]
        _, found = told_of(clients, small_net, nets["origin"], count)
        assert {found[name] for name in silent} == {0.0}
        assert found["too_few"] == (count == 19)
        assert ("rate" in found) == (count == 21)
    assert sum(value for name, value in found.items() if name.startswith("class-")) == 21


def test_who_tells_nothing_is_left_out_in_words(
    make_clients: MakeClients,
    small_net: Any,
    test_set: TensorExamples,
    nets: dict[str, Params],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has too few removed samples, one has deleted some of its own, one fails half way.

    The figures are then those of the client that is left.
    """
    first, second, third = make_clients((60, 60, 60))
    clients = [replace(first, fewest=20), second, third]
    requests = requests_of(clients, (5, 8, 10))
    second.state.tombstones.update(["c2-90", "c2-91"])
    asked = [*second.retained.ids[:8], "c2-90", "c2-91"]
    requests[1] = DeletionRequest(second.id, sample_ids=asked)
    federation = InProcess(clients, small_net, threads=1, remember=False)
    everybody = federation.run

    def fails(tasks: Sequence[Task[Any]]) -> RoundReplies:
        replies = everybody(tasks)
        if tasks[0].step is LOOK and tasks[0].settings.name == "oracle-3":
            there = [update for update in replies.updates if update.client_id != third.id]
            return RoundReplies(there, [Failure(third.id, "Timeout", "no answer within 20 s")])
        return replies

    monkeypatch.setattr(federation, "run", fails)
    witnesses = Witnesses(federation, requests, 3)
    shown(witnesses, nets, lambda _name: torch.zeros(60), test_set.labels)
    assert witnesses.notes == [
        "The removed samples of client-1 are left out: fewer than it tells of (min-audited in its "
        "node-config).",
        "client-2 has 8 of its 10 removed samples left to look at.",
        "client-3 is left out: no answer within 20 s",
    ]
    assert witnesses.removed == {second.id: 8}
    alone = Witnesses(InProcess([second], small_net, threads=1), [requests[1]], 3)
    shown(alone, nets, lambda _name: torch.zeros(60), test_set.labels)
    assert witnesses.shifts() == alone.shifts()


def test_numbers_that_make_no_sense_are_not_added_up(
    make_clients: MakeClients,
    small_net: Any,
    nets: dict[str, Params],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = make_clients()
    federation = InProcess(clients, small_net, threads=1, remember=False)
    everybody = federation.run
    wrong = {"client-1": {"rate": float("nan")}, "client-2": {"removed": 7.0}}

    def lies(tasks: Sequence[Task[Any]]) -> RoundReplies:
        updates = [
            replace(update, metrics={**update.metrics, **wrong.get(update.client_id, {})})
            for update in everybody(tasks).updates
        ]
        return RoundReplies(updates, [])

    monkeypatch.setattr(federation, "run", lies)
    witnesses = Witnesses(federation, requests_of(clients, (6, 6, 6)), 3)
    witnesses.look("origin", nets["origin"], torch.zeros(6), torch.tensor([0, 1, 2] * 2))
    assert list(witnesses.removed) == ["client-3"]
    assert [note.partition(":")[0] for note in witnesses.notes] == [
        "client-1 is left out",
        "client-2 is left out",
    ]
