"""An audit as tables of text, for the page and the command line, and as the page's figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from goldfish.audits import Attack, Audit, Difference, Distances, QuickAudit, Rate, Relearning
from goldfish.report.charts import Chart, Line, Scale, Strips
from goldfish.report.formatting import BRIEF, NOTHING, brief_gap, count, percent, plural, signed
from goldfish.report.summary import Table, table_of
from goldfish.results import MARGINS, ORIGIN, Result

ORACLES = "oracles"
MAX_CLIENTS = 12
LOWEST_RATE, LOWEST_LOSS = 1e-3, 1e-3
"""Where the logarithmic axes begin."""


@dataclass(frozen=True)
class Evidence:
    """A figure, how to read it, and its numbers."""

    chart: Chart | Strips
    reading: str
    table: Table


def evidence(audit: Audit) -> Iterator[Evidence]:
    """Return the figures that carry the verdicts, each with its table."""
    if any(own.memory for own in audit.methods.values()):
        yield _shifts(audit)
    if any(own.attack for own in audit.methods.values()):
        yield _rates(audit)
    if any(own.relearning for own in audit.quick.values()):
        yield _relearning(audit)
    elif any(own.membership for own in audit.quick.values()):
        yield _membership(audit)
    if any(own.harm for own in audit.quick.values()):
        yield _harm(audit)


def _shifts(audit: Audit) -> Evidence:
    rows = {name: own.models for name, own in audit.methods.items()}
    rows[ORACLES] = next(iter(audit.methods.values())).oracles
    means = {
        name: (own.memory.value, own.memory.low, own.memory.high)
        for name, own in audit.methods.items()
        if own.memory is not None
    }
    ends = [value for values in (*rows.values(), *means.values()) for value in values]
    reach = 1.05 * max(audit.band, *map(abs, ends))
    axis = Scale(-reach, reach, "memory, in standard deviations")
    chart = Strips("Margins on removed samples against the oracles", rows, axis, audit.band, means)
    return Evidence(
        chart,
        "Each dot is a model: how far its margins on removed samples lie above those of retrained "
        "models, beyond what unseen samples show: right of 0 a memory, left of it too much "
        "forgetting. Shaded: where 99 % of single retrained models would lie. The verdict is about "
        "the mean (upright stroke): the line, its 99 % interval, must leave out 0.",
        audit_table(audit, with_attacks=False),
    )


def _rates(audit: Audit) -> Evidence:
    attacks = _attacks(audit)
    lines = [
        Line(
            name,
            [false for false, _ in attack.roc if false >= LOWEST_RATE],
            [max(true, LOWEST_RATE) for false, true in attack.roc if false >= LOWEST_RATE],
            said=f"{100 * attack.at_1_percent.rate:.1f}",
        )
        for name, attack in attacks.items()
    ]
    y = Scale(LOWEST_RATE, 1.0, "", lambda v: f"{100 * v:g} %", log=True)
    x = replace(
        y, label="false positive rate in percent", mark=lambda v: f"{100 * v:g}" if v < 1 else ""
    )
    chart = Chart("Attack (U-LiRA): true positive rate", lines, x, y, chance=True)
    return Evidence(
        chart,
        "How many unlearned models the attack finds, for how many retrained ones it takes for "
        "unlearned; both axes are logarithmic. On the dashed line it guesses; a curve above it at "
        "the left finds some samples for sure. Beside each name: the rate at 1 % false positives, "
        "in percent.",
        table_of(
            attacks,
            [
                ("at 1 %", [rate(attack.at_1_percent) for attack in attacks.values()]),
                ("at 0.1 %", [rate(attack.at_01_percent) for attack in attacks.values()]),
                ("epsilon", [epsilon_cell(attack) for attack in attacks.values()]),
            ],
        ),
    )


def _attacks(audit: Audit) -> dict[str, Attack]:
    return {name: own.attack for name, own in audit.methods.items() if own.attack is not None}


def _membership(audit: Audit) -> Evidence:
    found = {name: own.membership for name, own in audit.quick.items() if own.membership}
    axis = Scale(0.0, 1.0, "share of pairs of a removed and an unseen sample")
    rows = {name: [own.rate] for name, own in found.items()}
    means = {name: (own.rate, own.low, own.high) for name, own in found.items()}
    return Evidence(
        Strips("Membership attack", rows, axis, means=means),
        "How often a removed sample has a larger margin than an unseen one of its class, in the "
        "run's one model of each method; 0.5 is chance. The line is the 95 % interval.",
        table_of(
            audit.quick,
            [("membership attack", [share(own.membership) for own in audit.quick.values()])],
        ),
    )


def _relearning(audit: Audit) -> Evidence:
    found = {name: own.relearning for name, own in audit.quick.items() if own.relearning}
    curves = {name: own.curve for name, own in found.items()}
    lines = [
        Line(
            name,
            list(range(len(curve))),
            [max(loss, LOWEST_LOSS) for loss in curve],
            said=_steps(found[name], statistics.median_high),
        )
        for name, curve in curves.items()
        if name != ORIGIN
    ]
    losses = [loss for line in lines for loss in line.values]
    target = curves[ORIGIN][0] + MARGINS.memory if ORIGIN in curves else None
    losses += [] if target is None else [target]
    y = Scale(min(losses) / 1.3, max(losses) * 1.3, "", value="{:.3f}".format, log=True)
    steps = len(next(iter(curves.values()))) - 1
    x = Scale(0, steps, "steps on the removed samples", whole=True)
    title = f"Relearning: mean loss on {plural(audit.relearned, 'removed sample')}"
    return Evidence(
        Chart(title, lines, x, y, target, reference_name="fits again:"),
        "The removed samples are learned again, in several orders; each line is the mean over "
        "them, and the axis of losses is logarithmic. They fit again at the dashed line, the loss "
        f"of origin plus {MARGINS.memory}: a model that still knows them is there sooner than "
        "retrain. In the table: after how many steps; beside each name: the median of the orders. "
        "Membership attack: how often a removed sample has a larger margin than an unseen one of "
        "its class; 0.5 is chance.",
        table_of(
            audit.quick,
            [
                ("steps to relearn", [relearned(own.relearning) for own in audit.quick.values()]),
                ("membership attack", [share(own.membership) for own in audit.quick.values()]),
                ("canaries known", [canaries(own) for own in audit.quick.values()]),
            ],
        ),
    )


def _harm(audit: Audit) -> Evidence:
    harmed = {name: own.harm.clients for name, own in audit.quick.items() if own.harm is not None}
    rows = {
        name: [client.after - client.before for client in clients.values()]
        for name, clients in harmed.items()
    }
    reach = 1.1 * max(1.0, *(abs(value) for values in rows.values() for value in values))
    axis = Scale(-reach, reach, "points of accuracy, after minus before")
    first = next(iter(harmed.values()))
    lost = {
        client: min(clients[client].after - was.before for clients in harmed.values())
        for client, was in first.items()
    }
    worst = sorted(lost, key=lost.__getitem__)[:MAX_CLIENTS]
    cells = [
        [
            client,
            count(was.samples),
            percent(was.before),
            *(
                f"{percent(now)}\n{signed(now - was.before, 1)}"
                for now in (clients[client].after for clients in harmed.values())
            ),
        ]
        for client, was in first.items()
        if client in worst
    ]
    return Evidence(
        Strips("Harm: accuracy on the remaining samples of each client", rows, axis),
        "Each dot is a client that remains: left of 0 its own samples are recognised less often "
        "than by origin. The table has the percentages and, below, the change in points; of many "
        f"clients the {MAX_CLIENTS} that lost most. Accuracy by class is further down.",
        (["client", "samples", ORIGIN, *harmed], cells),
    )


def quick_table(audit: Audit, result: Result) -> Table:
    """Return what the one model of each method in the run shows, for a terminal."""
    columns: list[tuple[str, list[str]]] = [
        (heading, [form(result.methods[name].get(key), None) for name in audit.quick])
        for heading, key, form in (
            ("accuracy\n%", "accuracy", BRIEF["percent"]),
            ("backdoor\n%", "backdoor_success", BRIEF["percent"]),
            ("JSD to\nretrain", "jsd", brief_gap),
            ("L2 to\nretrain", "l2", brief_gap),
        )
    ]
    columns += [
        ("member-\nship", [share(own.membership) for own in audit.quick.values()]),
        ("canaries\nknown", [canaries(own) for own in audit.quick.values()]),
        ("steps to\nrelearn", [relearned(own.relearning) for own in audit.quick.values()]),
    ]
    return table_of(audit.quick, columns)


def audit_table(audit: Audit, *, with_attacks: bool = True) -> Table:
    """Return what the many models of each method show beside the oracles."""
    own = audit.methods.values()
    attacks = _attacks(audit).values() if with_attacks else ()
    apart = [*(method.distances for method in own), audit.noise]
    binned = [*(method.klom for method in own), audit.noise_klom]
    columns = [
        ("memory", [difference_cell(method.memory) for method in own]),
        ("accuracy,\npoints", [difference_cell(method.accuracy) for method in own]),
        ("distance:\nremoved / unseen", [distances(found) for found in apart]),
        ("KLoM", [distances(found) for found in binned]),
        ("attack at\n1 %", [percent(100 * attack.at_1_percent.rate) for attack in attacks]),
    ]
    if any(attack.epsilon for attack in attacks):
        rates = [percent(100 * attack.at_01_percent.rate) for attack in attacks]
        columns += [("at\n0.1 %", rates), ("epsilon", [epsilon_cell(attack) for attack in attacks])]
    # The row of the oracles, which have distances alone.
    names = [*audit.methods, *([ORACLES] if audit.noise else [])]
    return table_of(names, [(heading, [*cells, ""]) for heading, cells in columns])


def affected_table(audit: Audit) -> Table:
    """Return how many remaining samples each method lost, and which ones fell most."""
    rows = [
        [
            name,
            count(own.harm.samples),
            count(own.harm.lost),
            count(own.harm.gained),
            "\n".join(
                f"{one.id} of {one.client_id}: {signed(one.before, 1)} to {signed(one.after, 1)}"
                for one in own.harm.most_affected
            ),
        ]
        for name, own in audit.quick.items()
        if own.harm is not None
    ]
    headings = ["method", "samples", "right before, wrong now", "wrong before, right now"]
    return [*headings, "samples whose margin fell most"], rows


def audit_counts(audit: Audit) -> str:
    """Say how many models and samples stand behind an audit."""
    samples = f"{count(audit.removed)} removed and {count(audit.unseen)} unseen samples"
    if not audit.models:
        return f"One model of each method, {samples}."
    found = [own.memory for own in audit.methods.values() if own.memory]
    oracles = {audit.models, *(own.oracles for own in found)}  # of audits one after the other
    models = " or ".join(map(str, sorted(oracles)))
    if any(own.unlearned == 1 for own in found):
        return f"One model of each method and {models} oracles, {samples}."
    return f"{models} models of each method and as many oracles, {samples}."


def share(rate: Rate | None) -> str:
    """Format a share with half of its interval."""
    if rate is None:
        return NOTHING
    return f"{rate.rate:.2f} ± {(rate.high - rate.low) / 2:.2f}"


def rate(found: Rate) -> str:
    """Format a rate with its interval on a second line."""
    return f"{percent(100 * found.rate)}\n{100 * found.low:.1f} to {100 * found.high:.1f}"


def canaries(own: QuickAudit) -> str:
    """Format how many of the canaries a model still gives their wrong label."""
    found = own.canaries
    return NOTHING if found is None else f"{round(found.rate * found.count)} of {found.count}"


def relearned(found: Relearning | None) -> str:
    """Format in how many steps removed samples fit again, over the orders.

    >>> relearned(Relearning(curve=[1.0] * 101, steps=[3, 5, None]))
    '3 to >100'
    """
    if found is None:
        return NOTHING
    return " to ".join(dict.fromkeys(_steps(found, end) for end in (min, max)))


def _steps(found: Relearning, pick: Callable[[list[int]], int]) -> str:
    """Format the steps of one of the orders; more than were taken where those were not enough."""
    last = len(found.curve)
    picked = pick([last if step is None else step for step in found.steps])
    return f">{last - 1}" if picked == last else str(picked)


def difference_cell(found: Difference | None) -> str:
    """Format a difference with half of its interval."""
    return NOTHING if found is None else f"{signed(found.value, 2)} ± {found.half:.2f}"


def distances(found: Distances | None) -> str:
    """Format the two distances."""
    return NOTHING if found is None else f"{found.removed:.2f} / {found.unseen:.2f}"


def epsilon_cell(attack: Attack) -> str:
    """Format the median epsilon, which may be infinite."""
    if attack.epsilon is None:
        return NOTHING
    return "∞" if attack.epsilon.median is None else f"{attack.epsilon.median:.2f}"
