"""An audit of a run whose clients alone have the removed samples (``data.members``).

Clients never train on removed samples again, so there is one model of each method: that of the run.
Oracles are trained by the federation; then the clients look at all models, one after the other, and
tell means and counts (:mod:`goldfish.methods.auditing`).
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from goldfish.audits import Audit, AuditedMethod, QuickAudit, Tier
from goldfish.evaluation.attacks import margins
from goldfish.evaluation.audit import (
    NOTHING_UNSEEN,
    Shifted,
    Shifts,
    band,
    comparable,
    difference,
    effective,
    group_weights,
    kept_share,
    shifts,
    verdict_on,
)
from goldfish.evaluation.harm import with_places
from goldfish.experiments.audit_models import FOLDER, ORACLE, AuditModels, kept_path
from goldfish.methods.auditing import Witnesses
from goldfish.results import ORIGIN, Progress, Result
from goldfish.store import Checkpoint, load_checkpoint, save_checkpoint

LOOKS = "clients look"

ONE_MODEL = (
    "Only the clients have the removed samples, and they do not train on them again: each method "
    "has the one model of the run. What needs more of them is left out (distance, attack, epsilon, "
    "relearning). Removed samples are compared with unseen ones of their class, as hard or not."
)


def audit_by_clients(
    made: AuditModels, tier: Tier, amount: int, result: Result
) -> Generator[Progress, None, Audit]:
    """Make ``amount`` oracles, let the clients look at all models, and judge by what they tell."""
    scenario, oracles = made.scenario, {}
    for number in range(1, amount + 1):
        yield Progress(phase=ORACLE, round=number - 1, rounds=amount)
        path = oracles[f"{ORACLE}-{number}"] = kept_path(made.run, ORACLE, number)
        if not path.exists():
            save_checkpoint(path, Checkpoint(number, made.oracle(number)))
        yield Progress(phase=ORACLE, round=number, rounds=amount)
    own = (ORIGIN, *made.names)
    witnesses = Witnesses(made.federation(FOLDER), scenario.requests, scenario.num_classes)
    labels = scenario.test.labels.cpu()
    quick: dict[str, QuickAudit] = {}
    unseen, accuracy = {}, {}
    for place, name in enumerate((*own, *oracles)):
        yield Progress(phase=LOOKS, round=place, rounds=len(own) + amount)
        params = load_checkpoint(oracles[name]).params if name in oracles else made.final(name)
        logits = made.evaluator.logits(params, scenario.test)
        unseen[name] = margins(logits, labels)
        accuracy[name] = made.evaluator.scores(logits).accuracy
        if name in oracles:
            witnesses.look_at_oracle(name, params)
        else:
            quick[name] = witnesses.look(name, params, unseen[name], labels)
    yield Progress(phase=LOOKS, round=len(own) + amount, rounds=len(own) + amount)
    told = witnesses.shifts() if oracles else {}
    removed = witnesses.labels
    found = Audit(
        tier=tier,
        removed=len(removed),
        unseen=len(labels),
        relearned=0,
        quick=quick,
        models=amount,
        notes=[ONE_MODEL, *witnesses.notes],
    )
    if not oracles:
        return found
    gone = made.evaluator.removed_classes
    if not bool(comparable(removed, labels, gone).any()):
        untold = f"No client tells of removed samples. {' '.join(witnesses.notes)}".strip()
        nothing = AuditedMethod(
            word="not enough evidence", sentence=NOTHING_UNSEEN if len(removed) else untold
        )
        return found.model_copy(update={"methods": dict.fromkeys(own, nothing)})
    weights = group_weights(removed, labels, gone)
    of_oracles = torch.stack([unseen[name] for name in oracles])

    def told_of(*names: str) -> Shifts:
        return Shifts(*torch.tensor([told[name] for name in names], dtype=torch.float64).T)

    def shifted(name: str) -> Shifted:
        return Shifted(
            (told_of(name), told_of(*oracles)),
            shifts(unseen[name].unsqueeze(0), of_oracles, weights),
            (len(removed), effective(weights)),
            kept_share(removed, gone),
        )

    methods = {}
    for name in own:
        apart = difference([accuracy[name]], [accuracy[oracle] for oracle in oracles])
        verdict = verdict_on(shifted(name), apart, shifted(ORIGIN))
        verdict = with_places(verdict, name, result, quick[name].harm)
        methods[name] = AuditedMethod(**verdict.model_dump())
    noise = band(methods[ORIGIN].oracles)
    return found.model_copy(update={"methods": methods, "band": noise})
