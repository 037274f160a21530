"""SISA: sharded, isolated, sliced, aggregated training, from which data can be removed exactly.

Bourtoule, Chandrasekaran, Choquette-Choo, Jia, Travers, Zhang, Lie and Papernot, "Machine
Unlearning", IEEE Symposium on Security and Privacy, 2021. The data is divided into shards and each
shard into slices. One model a shard is trained in isolation, slice by slice, with a checkpoint
after each; a deletion goes back to the checkpoint before the first slice that lost a sample.

Ours is the step to a federation: every client divides its own data and trains its own members, in
one round, and the server averages nothing; the global model is the ensemble of all members. A hash
of seed, client and sample decides where a sample belongs, whatever else there is, so the result of
a deletion has the very bits of training without the removed samples. (A model that draws random
numbers in training, as dropout does, is as free of them, but draws others.) The members' mean
probability decides, which the paper weighs beside the majority's vote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pydantic import ValidationError
from torch import Tensor

from goldfish.data import Subset
from goldfish.errors import ConfigError
from goldfish.methods.method import Method, Plan, ask, nothing_left
from goldfish.methods.steps import answer, nothing_to_learn, shard_key, train_on
from goldfish.models import fresh_params
from goldfish.randomness import derive_seed
from goldfish.settings import Count, Settings, TrainingSettings, learning_rate_at
from goldfish.training.fit import Fitted
from goldfish.training.workspace import MEMBERS, ensemble_size, join
from goldfish.types import Client, Params, Round, Step, Task, Update, Workspace

FEWEST = 2
"""Samples that training begins with: BatchNorm cannot train on one."""


class SisaSettings(Settings):
    """How SISA divides the data. What its training used, unlearning uses too."""

    shards: Count = 1
    """Shards of each client's data (the paper's S is this times the clients)."""
    slices: Count = 4
    """Slices of each shard, with a checkpoint after each (the paper's R)."""
    epochs_per_slice: Count | None = None
    """Passes over all slices so far after each slice joins; left out: as much work as training."""


class SisaLayout(SisaSettings):
    """How SISA's training divided the data, which no deletion changes."""

    epochs_per_slice: Count
    placing_seed: int
    """The seed by which samples were given their places."""
    phases: tuple[str, ...] = ()
    """The phases under which clients keep checkpoints, the newest first."""


def epochs_of(settings: SisaSettings, training: TrainingSettings) -> int:
    """Return the epochs a slice: as set, or for the work of FedAvg.

    With R equal slices, e epochs a slice pass over e (1 + 2 + ... + R) / R = e (R + 1) / 2 times
    the data. Ordinary training passes over it e' = rounds * local_epochs times, so e is
    2 e' / (R + 1), the paper's choice, rounded and at least 1.
    """
    if settings.epochs_per_slice is not None:
        return settings.epochs_per_slice
    return max(1, round(2 * training.rounds * training.local_epochs / (settings.slices + 1)))


def place_of(sample_id: str, client_id: str, seed: int, settings: SisaSettings) -> tuple[int, int]:
    """Return the shard and the slice of a sample, which depend on no other sample."""
    number = derive_seed(seed, "sisa", client_id, sample_id)
    return number % settings.shards, number // settings.shards % settings.slices


def slice_key(phase: str, shard: int, place: int, sample_ids: Sequence[str]) -> str:
    """Return the key of the checkpoint after a slice; shards and slices count from 0.

    A hash of the samples that it was trained on ends it, so a checkpoint is found again exactly
    if none of them was removed.
    """
    return f"{shard_key(phase, shard)}/slice-{place}/{derive_seed(0, *sample_ids):016x}"


def separate(ensemble: Params) -> list[Params]:
    """Return the members of an ensemble: what :func:`goldfish.training.workspace.join` joined."""
    models: list[dict[str, Tensor]] = [{} for _ in range(ensemble_size(ensemble))]
    for full, tensor in ensemble.items():
        place, _, name = full.removeprefix(MEMBERS).partition(".")
        models[int(place)][name] = tensor
    return list(models)


def check(plan: Plan, _settings: SisaSettings) -> None:
    """Raise where settings of the mean are asked for: there is no mean."""
    if plan.training.robust or plan.training.max_update_norm is not None:
        raise ConfigError(
            "SISA averages nothing: every client's members are members of the model, whatever they "
            "are. Leave aggregation = 'median' or 'trimmed-mean' and max_update_norm out, or use "
            "another method."
        )


def prepare(plan: Plan, settings: SisaSettings) -> Iterator[Round]:
    """Yield SISA's training: one round, all shards of all clients (whatever ``participation``)."""
    check(plan, settings)
    own = {**settings.model_dump(), "epochs_per_slice": epochs_of(settings, plan.training)}
    layout = SisaLayout(**own, placing_seed=int(plan.seed))
    return _one_round(plan, layout, plan.staying, {})


def unlearn(plan: Plan, settings: SisaSettings) -> Iterator[Round]:
    """Yield the one round of a deletion: clients that lost data retrain what it touched.

    The members of all others stay; those of a client that leaves go, and so do those of one that
    was asked and failed, since they have seen what must be forgotten.
    """
    layout, before = _trained(plan, settings)
    losing = {request.client_id for request in plan.new}
    clients = [client_id for client_id in plan.staying if client_id in losing]
    untouched = {c: models for c, models in before.items() if c not in losing}
    return _one_round(plan, layout, clients, untouched)


def sisa_step(task: Task[SisaLayout], client: Client, workspace: Workspace) -> Update:
    """Train each shard on from its last checkpoint that saw no removed sample, slice by slice.

    In training there is none, and each starts from the newly initialised weights that the task
    brings. A slice that is empty is passed over; a shard that is has no member.
    """
    layout, phase = task.settings, task.context.phase
    ids = client.retained.ids
    places = [place_of(sample_id, client.id, layout.placing_seed, layout) for sample_id in ids]
    state = client.state.arrays
    kept: dict[str, Params] = {}
    members: list[Params] = []
    fits: list[Fitted] = []
    num_examples = 0
    for shard, fresh in enumerate(separate(task.arrays["model"])):
        held = [p for p, (own, _) in enumerate(places) if own == shard]
        model: Params | None = None
        for place in range(layout.slices):
            learned = [p for p in held if places[p][1] <= place]
            if all(places[p][1] < place for p in learned) or len(learned) < FEWEST:
                continue
            samples = [ids[p] for p in learned]
            old = [slice_key(before, shard, place, samples) for before in layout.phases]
            known = next((state[key] for key in old if key in state), None)
            if known is None:
                examples = Subset(client.retained, learned)
                known, fitted = train_on(
                    _of_slice(task, place), examples, workspace, model or fresh, shard, place
                )
                fits.append(fitted)
            model = kept[slice_key(phase, shard, place, samples)] = known
        if model is not None:
            members.append(model)
            num_examples += len(held)
    for key in [key for key in state if key.startswith(f"{phase}/")]:
        del state[key]
    state.update(kept)
    if not members:
        return nothing_to_learn(task)
    return answer(task, join(members), num_examples, fits)


SISA_STEP = Step("sisa", sisa_step, SisaLayout)


def _of_slice(task: Task[SisaLayout], place: int) -> Task[SisaLayout]:
    """Return the task of training on a slice: the step size is that of this share of the rounds."""
    training, layout = task.training, task.settings
    index = 1 + place * training.rounds // layout.slices
    rate = learning_rate_at(training, index, training.rounds)
    return replace(
        task,
        training=training.model_copy(update={"local_epochs": layout.epochs_per_slice}),
        context=task.context.model_copy(update={"learning_rate": rate}),
    )


def _one_round(
    plan: Plan,
    layout: SisaLayout,
    clients: Sequence[str],
    untouched: Mapping[str, Sequence[Params]],
) -> Iterator[Round]:
    """Yield the round in which ``clients`` train, unless it is done already."""
    if plan.last is not None:
        return
    fresh = partial(fresh_params, plan.federation.model, plan.seed, "sisa")
    starts = {c: join([fresh(c, shard) for shard in range(layout.shards)]) for c in clients}
    asked = ask(
        plan, SISA_STEP, 1, plan.fresh, layout, clients=clients, starts=starts, may_be_empty=True
    )
    trained = {update.client_id: separate(update.params) for update in asked.learned}
    members = {**untouched, **trained}
    ordered = {c: members[c] for c in plan.federation.client_ids if c in members}
    if not ordered:
        raise nothing_left(plan, 1)
    ensemble = join([model for models in ordered.values() for model in models])
    layout = layout.model_copy(update={"phases": (plan.phase, *layout.phases)})
    owners = {client_id: len(models) for client_id, models in ordered.items()}
    memo = {"layout": layout.model_dump(mode="json"), "owners": owners}
    yield replace(asked, params=ensemble, final=True, memo=memo)


def _trained(plan: Plan, settings: SisaSettings) -> tuple[SisaLayout, dict[str, list[Params]]]:
    """Return how SISA's training divided the data, and each client's members."""
    memo = plan.origin.memo
    try:
        layout, owners = SisaLayout.model_validate(memo["layout"]), memo["owners"]
    except (KeyError, ValidationError):
        raise ConfigError(
            "sisa goes on from its own training, and what that remembered is missing: train with "
            "goldfish.train(..., method='sisa')."
        ) from None
    for name in sorted(settings.model_fields_set):
        value, used = getattr(settings, name), getattr(layout, name)
        if value not in (None, used):
            raise ConfigError(
                f"{name} is {value}, but the training used {used}, and its checkpoints "
                f"fit no other: leave {name} out, or train anew."
            )
    models = iter(separate(plan.origin.params))
    return layout, {c: [next(models) for _ in range(count)] for c, count in owners.items()}


SISA = Method(
    name="sisa",
    summary="Isolated shards and slices with checkpoints: exact, and retrains only what was hit.",
    settings=SisaSettings,
    steps=[SISA_STEP],
    unlearn=unlearn,
    guarantee="exact",
    source=(
        "Bourtoule, Chandrasekaran, Choquette-Choo, Jia, Travers, Zhang, Lie and Papernot, "
        '"Machine Unlearning", IEEE S&P 2021'
    ),
    keeps="on each client, one model for every slice of every shard",
    kept_models=lambda settings, clients, _rounds: clients * settings.shards * settings.slices,
    lasts=lambda _plan, _settings: 1,
    check=check,
    # Members that learned removed data are gone: where none is, it was too little for a member.
    never_learned=lambda plan, _settings: plan.new,
    prepare=prepare,
    measures=lambda _plan, _settings: (),
    notes=lambda _plan, _settings: (
        "SISA's model is an ensemble of members that were each trained on one shard alone: "
        "compare it with what SISA's own training gave, not with the model of FedAvg.",
    ),
)
