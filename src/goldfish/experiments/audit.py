"""An audit of a run, in tiers.

*quick* looks at the run's own models: a membership attack, how fast they relearn the removed
samples, and what unlearning did to the samples that remain. *standard* and *full* train the
federation again under other seeds, let each method unlearn again, and train oracles without the
removed samples; all are compared by their margins. Who holds what and what is removed (by all
requests together) stay those of the run. Each model's margins are kept in ``audit/``, so that an
audit that was interrupted, or one with more models, goes on with what is there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from goldfish.audits import (
    AUDIT,
    Attack,
    Audit,
    AuditedMethod,
    Distances,
    Epsilon,
    Harm,
    QuickAudit,
    Tier,
    read_audit,
)
from goldfish.data import Subset, TensorExamples, removal
from goldfish.errors import ConfigError, StoreError, unknown
from goldfish.evaluation.attacks import (
    KLOM_MODELS,
    counted,
    epsilon,
    gaussian_distance,
    klom,
    likelihood_ratios,
    margins,
    membership,
    roc_points,
    true_positives,
)
from goldfish.evaluation.audit import LEAST_ORACLES, Measured, audit_verdict, band, comparable
from goldfish.evaluation.harm import harm, with_places
from goldfish.evaluation.memory import sample_losses
from goldfish.evaluation.relearning import ORDERS, STEPS, relearn
from goldfish.experiments.audit_models import FOLDER, ORACLE, AuditModels, kept_path, measured
from goldfish.experiments.client_audit import audit_by_clients
from goldfish.experiments.config import Config, load_config
from goldfish.experiments.engine import EngineFactory
from goldfish.experiments.evaluator import chosen
from goldfish.experiments.scenario import Machine, Scenario, build_scenario, select
from goldfish.files import claim, write_whole
from goldfish.methods import METHODS
from goldfish.models import fresh_params
from goldfish.results import MARGINS, ORIGIN, Cost, Progress, Result, read_run
from goldfish.store import CONFIG
from goldfish.training.workspace import LocalWorkspace
from goldfish.types import Params

QUICK = "quick"

MODELS: Mapping[Tier, int] = {"quick": 0, "standard": 8, "full": 32}
"""How many models of each kind a tier has unless told."""

RELEARNED = 300
"""At most so many removed samples are learned again, spread over all of them."""

LEAST_RELEARNED = 2
"""One sample is not learned again: it says little, and BatchNorm has no statistics of it."""

LOOKED_AT = 10_000
"""At most so many remaining samples are looked at for harm, spread over all of them."""

FORWARD = 1 / 3
"""What a prediction costs beside a training step, about."""

TIMED = 3
"""So many steps of relearning are measured for a forecast."""


def audit_run(
    run: Path,
    machine: Machine,
    *,
    tier: Tier = "standard",
    models: int | None = None,
    methods: Sequence[str] = (),
    engine: EngineFactory | None = None,
    scenario: Callable[[], Scenario] | None = None,
) -> Iterator[Progress]:
    """Yield the progress of an audit; ``audit.json`` in the run directory holds it at the end.

    ``models`` is how many federations are trained and unlearn again, and how many oracles there
    are; ``methods`` are by default all of the run's. The untouched model, origin, is always
    audited too: an audit that does not find its memory would find no other. What earlier audits
    found of other methods, and verdicts that a quick audit does not give, stay in ``audit.json``.
    ``engine`` makes the federation that trains; by default its clients live in this process.
    ``scenario`` gives that of the run, where the caller has it already.
    """
    amount, config, result, names = _checked(run, tier, models, methods)
    with claim(run / FOLDER / "lock"):
        held = build_scenario(config, machine, run) if scenario is None else scenario()
        made = AuditModels(config, held, run, machine, engine, names)
        if held.removed is None:
            found = yield from audit_by_clients(made, tier, amount, result)
        else:
            found = yield from _Work(made, held.removed).audit(tier, amount, result)
        made.close()
        found = _beside_earlier(run, found, config.unlearning.methods)
        write_whole(run / AUDIT, found.model_dump_json(indent=1) + "\n")


def _beside_earlier(run: Path, found: Audit, order: Sequence[str]) -> Audit:
    """Return the audit together with what earlier ones found of other methods."""
    try:
        before = read_audit(run)
    except StoreError:  # damaged, or of another version: it is written anew
        before = None
    if before is None:
        return found
    every = (ORIGIN, *order)
    quick, methods = {**before.quick, **found.quick}, {**before.methods, **found.methods}
    replaced = quick.keys() <= found.quick.keys() and methods.keys() <= found.methods.keys()
    notes = found.notes if replaced else dict.fromkeys((*before.notes, *found.notes))
    return (before if found.tier == "quick" else found).model_copy(
        update={
            "quick": {name: quick[name] for name in every if name in quick},
            "methods": {name: methods[name] for name in every if name in methods},
            "notes": list(notes),
        }
    )


def tier_named(name: str) -> Tier:
    """Return the tier of this name, or say which ones there are."""
    for tier in MODELS:
        if tier == name:
            return tier
    raise ConfigError(unknown("tier", name, MODELS, f"The tiers are {', '.join(MODELS)}."))


def forecast(
    run: Path,
    scenario: Callable[[], Scenario] | None = None,
    *,
    tier: Tier = "standard",
    models: int | None = None,
    methods: Sequence[str] = (),
) -> float:
    """Return about how many seconds an audit takes, by what the rounds of the run took.

    With its ``scenario``, on the machine of the audit, some steps of relearning are measured: it
    takes its steps one by one, which on a GPU are far slower than those of a training.
    """
    amount, config, result, names = _checked(run, tier, models, methods)
    spent = {name: result.methods[name].cost or Cost() for name in (ORIGIN, *names)}
    seconds = {name: cost.seconds for name, cost in spent.items()}
    if config.data.members is not None:  # oracles alone are made
        paths = (kept_path(run, ORACLE, number) for number in range(1, amount + 1))
        return seconds[ORIGIN] * sum(not path.exists() for path in paths)
    for name in names:
        own = result.methods[name].training
        seconds[name] += 0.0 if own is None else own.cost.seconds
    seconds[ORACLE] = seconds[ORIGIN]
    missing = [
        {name for name in seconds if not kept_path(run, name, number).exists()}
        for number in range(1, amount + 1)
    ]
    longer = sum(
        sum(seconds[name] for name in (those | {ORIGIN} if those - {ORACLE} else those))
        for those in missing
    )
    origin = spent[ORIGIN]
    sample = origin.seconds / origin.samples if origin.samples else 0.0
    removed = result.deletion.removed_samples or 0
    looks = result.test_images.accuracy + removed
    looks += min(result.deletion.training_samples or 0, LOOKED_AT)
    if scenario is None:
        followed = min(removed, RELEARNED)
        steps = min(config.training.batch_size, followed) + FORWARD * followed
        step = sample * steps
    else:
        step = _relearning_step(scenario(), config)
    return longer + len(spent) * (ORDERS * STEPS * step + sample * FORWARD * looks)


def _relearning_step(scenario: Scenario, config: Config) -> float:
    """Return how many seconds a step of relearning takes, whatever the model's weights are."""
    if scenario.removed is None or len(scenario.removed) < LEAST_RELEARNED:
        return 0.0
    removed = _spread(scenario.removed, RELEARNED)
    workspace = LocalWorkspace(scenario.model, removed.labels.device, graphs=False)
    params = fresh_params(scenario.model, config.seed, "initial")
    for steps in (1, TIMED):  # the first one takes longer
        begin = time.perf_counter()
        relearn(
            workspace, params, removed, config.training, 0.0, config.seed, orders=1, steps=steps
        )
    return (time.perf_counter() - begin) / TIMED


def _checked(
    run: Path, tier: Tier, models: int | None, methods: Sequence[str]
) -> tuple[int, Config, Result, list[str]]:
    """Return the number of models, the configuration, the result, and the methods to audit."""
    if tier == "quick" and models is not None:
        raise ConfigError("A quick audit makes no models: leave --models out, or choose a tier.")
    amount = MODELS[tier] if models is None else models
    if tier != "quick" and amount < LEAST_ORACLES:
        raise ConfigError(
            f"An audit compares at least {LEAST_ORACLES} models of each kind, not {amount}."
        )
    result = read_run(run).result
    config = load_config(run / CONFIG)
    if result.seeds:
        first = run / f"seed-{result.seeds[0]}"
        raise ConfigError(f"{run} holds a run for each of its seeds: audit one, such as {first}.")
    there = [name for name in config.unlearning.methods if result.methods[name].final is not None]
    for name in methods:
        if name not in there:
            hint = f"The run has {', '.join(there)}."
            raise ConfigError(unknown("method", name, there, hint))
    return amount, config, result, list(dict.fromkeys(methods)) or there


class _Work:
    """Measures the models of an audit on samples that are here."""

    def __init__(self, made: AuditModels, removed: TensorExamples) -> None:
        scenario, clean = made.scenario, made.evaluator.clean_removed
        if clean is not None:
            self._removed, self._unseen = clean, scenario.test
        elif scenario.triggered is not None:  # all carry the trigger: so do unseen ones like them
            self._removed, self._unseen = removed, scenario.triggered
        else:
            raise ConfigError("The run has no unseen samples to compare removed ones with.")
        self._made = made
        self._logits = made.evaluator.logits
        self._workspace = LocalWorkspace(scenario.model, made.machine.device, graphs=False)
        self._canaries = chosen(removed, scenario.canaries)
        self._relearned = _spread(removed, RELEARNED)
        self._remaining = _remaining(scenario)
        origin = made.final(ORIGIN)
        losses = sample_losses(self._logits(origin, self._relearned), self._relearned.labels)
        self._target = losses.mean().item() + MARGINS.memory
        self._before = self._on_remaining(origin)

    def audit(self, tier: Tier, amount: int, result: Result) -> Generator[Progress, None, Audit]:
        """Look at the run's models, make and measure ``amount`` others of each, and judge."""
        made, quick = self._made, {}
        rounds = len(made.names) + 1
        for place, name in enumerate((ORIGIN, *made.names)):
            yield Progress(phase=QUICK, round=place, rounds=rounds)
            quick[name] = self.quick(name)
        yield Progress(phase=QUICK, round=rounds, rounds=rounds)
        makers: dict[str, Callable[[int], Params]] = {ORACLE: made.oracle, ORIGIN: made.origin}
        makers |= {name: partial(made.unlearned, METHODS[name]) for name in made.names}
        found: dict[str, list[Measured]] = {name: [] for name in makers}
        compared = (made.evaluator, self._removed, self._unseen)
        for number in range(1, amount + 1):
            for name, make in makers.items():
                yield Progress(phase=name, round=number - 1, rounds=amount)
                path = kept_path(made.run, name, number)
                found[name].append(measured(path, partial(make, number), *compared))
                yield Progress(phase=name, round=number, rounds=amount)
        return self._judged(tier, quick, found, result)

    def quick(self, name: str) -> QuickAudit:
        """Look at the run's own model of a method."""
        params, config = self._made.final(name), self._made.config
        removed, unseen = (
            margins(self._logits(params, own), own.labels) for own in (self._removed, self._unseen)
        )
        canaries = None
        if self._canaries is not None:
            given = self._logits(params, self._canaries).argmax(dim=1)
            hits = int((given == self._canaries.labels.cpu()).sum())
            canaries = counted(hits, len(self._canaries))
        return QuickAudit(
            membership=membership(
                removed, self._removed.labels.cpu(), unseen, self._unseen.labels.cpu()
            ),
            canaries=canaries,
            relearning=None
            if len(self._relearned) < LEAST_RELEARNED
            else relearn(
                self._workspace, params, self._relearned, config.training, self._target, config.seed
            ),
            harm=None if name == ORIGIN else self._harm(params),
        )

    def _on_remaining(self, params: Params) -> Tensor:
        parts = [self._logits(params, part) for _, part in self._remaining]
        return torch.cat(parts) if parts else torch.empty(0)

    def _harm(self, params: Params) -> Harm | None:
        if not self._remaining:
            return None
        return harm(
            self._before,
            self._on_remaining(params),
            torch.cat([part.labels.cpu() for _, part in self._remaining]),
            [sample_id for _, part in self._remaining for sample_id in part.ids],
            [client_id for client_id, part in self._remaining for _ in range(len(part))],
        )

    def _judged(
        self,
        tier: Tier,
        quick: dict[str, QuickAudit],
        models: Mapping[str, Sequence[Measured]],
        result: Result,
    ) -> Audit:
        """Return the audit of all models."""
        oracles = models[ORACLE]
        first, second = oracles[::2], oracles[1::2]
        labels = (self._removed.labels.cpu(), self._unseen.labels.cpu())
        gone = self._made.evaluator.removed_classes
        alone = len(self._removed) - int(comparable(*labels, gone).sum())
        left_out = f"No unseen sample has the class of {alone} of the removed ones: left out."
        binned = tier == "full" and len(second) >= KLOM_MODELS
        methods = {}
        for name, own in models.items():
            if name == ORACLE or not oracles:
                continue
            verdict = audit_verdict(own, oracles, *labels, models[ORIGIN], gone)
            verdict = with_places(verdict, name, result, quick[name].harm)
            methods[name] = AuditedMethod(
                **verdict.model_dump(),
                distances=_distances(own[::2], second),
                klom=_distances(own[::2], second, klom) if binned else None,
                attack=_attack(own, oracles, full=tier == "full"),
            )
        spread = methods[ORIGIN].oracles if methods else []
        return Audit(
            tier=tier,
            removed=len(self._removed) - alone,
            unseen=len(self._unseen),
            relearned=len(self._relearned),
            quick=quick,
            models=len(oracles),
            noise=_distances(first, second) if oracles else None,
            noise_klom=_distances(first, second, klom) if binned else None,
            band=band(spread) if spread else 0.0,
            methods=methods,
            notes=[left_out] if alone else [],
        )


def _attack(own: Sequence[Measured], oracles: Sequence[Measured], *, full: bool) -> Attack:
    """Attack all models of both sides, on all removed samples."""
    sides = (_on("removed", own), _on("removed", oracles))
    ratios = likelihood_ratios(*sides)
    found = None
    if full:
        each = epsilon(*sides)
        median = each.median().item()
        found = Epsilon(
            median=median if math.isfinite(median) else None,
            separated=int(each.isinf().sum()),
            samples=len(each),
        )
    return Attack(
        at_1_percent=true_positives(*ratios, 0.01),
        at_01_percent=true_positives(*ratios, 0.001),
        roc=roc_points(*ratios),
        epsilon=found,
    )


def _on(kind: str, models: Sequence[Measured]) -> Tensor:
    return torch.stack([getattr(model, kind) for model in models])


def _distances(
    ours: Sequence[Measured],
    theirs: Sequence[Measured],
    distance: Callable[[Tensor, Tensor], Tensor] = gaussian_distance,
) -> Distances:
    medians = {
        kind: distance(_on(kind, ours), _on(kind, theirs)).median().item()
        for kind in ("removed", "unseen")
    }
    return Distances(**medians)


def _remaining(scenario: Scenario) -> list[tuple[str, Subset]]:
    """Return some of each client's remaining samples."""
    clients = [removal.split(client, scenario.requests) for client in scenario.clients]
    share = min(1.0, LOOKED_AT / max(sum(len(client.retained) for client in clients), 1))
    counts = [(client, round(share * len(client.retained))) for client in clients]
    return [
        (client.id, Subset(client.retained, _places(len(client.retained), count)))
        for client, count in counts
        if count
    ]


def _spread(examples: TensorExamples, count: int) -> TensorExamples:
    """Return so many of the examples, spread over all of them."""
    if len(examples) <= count:
        return examples
    return select(examples, _places(len(examples), count))


def _places(length: int, count: int) -> Tensor:
    return torch.linspace(0, length - 1, count).round().long()
