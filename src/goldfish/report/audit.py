"""An audit as tables of text; the page and the command line show them."""

from __future__ import annotations

from collections.abc import Sequence

from goldfish.audits import Attack, Audit, Difference, Distances, Rate, Relearning
from goldfish.report.formatting import NOTHING, count, decimal, percent, signed
from goldfish.report.summary import Table
from goldfish.results import ORIGIN, Result

ORACLES = "oracles"


def quick_table(audit: Audit, result: Result) -> Table:
    """Return what the one model of each method in the run shows."""
    columns: list[tuple[str, list[str]]] = [
        (heading, [form(result.methods[name].get(key)) for name in audit.quick])
        for heading, key, form in (
            ("accuracy", "accuracy", percent),
            ("backdoor", "backdoor_success", percent),
            ("JSD to\nretrain", "jsd", decimal),
            ("L2 to\nretrain", "l2", decimal),
        )
    ]
    columns += [
        ("membership\nattack", [share(own.membership) for own in audit.quick.values()]),
        ("steps to\nrelearn", [relearned(own.relearning) for own in audit.quick.values()]),
    ]
    return _table(list(audit.quick), columns)


def audit_table(audit: Audit) -> Table:
    """Return what the many models of each method show beside the oracles."""
    own = list(audit.methods.values())
    none = [""] if audit.noise else []
    columns = [
        ("memory", [difference(method.memory) for method in own] + none),
        ("accuracy,\npoints", [difference(method.accuracy) for method in own] + none),
        (
            "distance:\nremoved / unseen",
            [distances(d) for d in (*(m.distances for m in own), audit.noise)],
        ),
        ("KLoM", [distances(d) for d in (*(m.klom for m in own), audit.noise_klom)]),
        ("attack at\n1 %", [percent(100 * m.attack.at_1_percent.rate) for m in own] + none),
    ]
    if any(method.attack.epsilon for method in own):
        rates = [percent(100 * m.attack.at_01_percent.rate) for m in own]
        columns.append(("attack at\n0.1 %", rates + none))
        columns.append(("epsilon", [epsilon(method.attack) for method in own] + none))
    return _table([*audit.methods, ORACLES], columns)


def harm_table(audit: Audit) -> Table:
    """Return each remaining client's accuracy before, and after each method."""
    harmed = {name: own.harm for name, own in audit.quick.items() if own.harm is not None}
    first = next(iter(harmed.values()), None)
    if first is None:
        return [], []
    rows = [
        [
            client,
            count(was.samples),
            percent(was.before),
            *(
                f"{percent(now)} ({signed(now - was.before, 1)})"
                for now in (own.clients[client].after for own in harmed.values())
            ),
        ]
        for client, was in first.clients.items()
    ]
    return ["client", "samples", ORIGIN, *harmed], rows


def affected(audit: Audit) -> list[tuple[str, str]]:
    """Say of each method how many remaining samples it lost, and which ones fell most."""
    said = []
    for name, own in audit.quick.items():
        if (harm := own.harm) is None:
            continue
        fallen = ", ".join(
            f"{one.id} of {one.client_id} ({signed(one.before, 1)} to {signed(one.after, 1)})"
            for one in harm.most_affected
        )
        most = f" Largest falls of the margin: {fallen}." if fallen else ""
        said.append(
            (
                name,
                f"of {count(harm.samples)} remaining samples {count(harm.lost)} were right before "
                f"and are wrong now, {count(harm.gained)} the other way round.{most}",
            )
        )
    return said


def audit_counts(audit: Audit) -> str:
    """Say how many models and samples stand behind an audit."""
    samples = f"{count(audit.removed)} removed and {count(audit.unseen)} unseen samples"
    if not audit.models:
        return f"One model of each method, {samples}."
    return f"{audit.models} models of each method and as many oracles, {samples}."


def share(rate: Rate | None) -> str:
    """Format a share with half of its interval."""
    if rate is None:
        return NOTHING
    return f"{rate.rate:.2f} ± {(rate.high - rate.low) / 2:.2f}"


def relearned(found: Relearning) -> str:
    """Format in how many steps removed samples fit again, over the orders.

    >>> relearned(Relearning(curve=[1.0] * 101, steps=[3, 5, None]))
    '3 to >100'
    """
    last = len(found.curve)
    steps = sorted(last if step is None else step for step in found.steps)
    ends = [f">{last - 1}" if step == last else str(step) for step in (steps[0], steps[-1])]
    return " to ".join(dict.fromkeys(ends))


def difference(found: Difference | None) -> str:
    """Format a difference with half of its interval."""
    return NOTHING if found is None else f"{signed(found.value, 2)} ± {found.half:.2f}"


def distances(found: Distances | None) -> str:
    """Format the two distances."""
    return NOTHING if found is None else f"{found.removed:.2f} / {found.unseen:.2f}"


def epsilon(attack: Attack) -> str:
    """Format the median epsilon, which may be infinite."""
    if attack.epsilon is None:
        return NOTHING
    return "∞" if attack.epsilon.median is None else f"{attack.epsilon.median:.2f}"


def _table(names: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]]) -> Table:
    """Return the columns that have something to show."""
    filled = [(heading, cells) for heading, cells in columns if set(cells) - {NOTHING, ""}]
    rows = [[name, *(cells[i] for _, cells in filled)] for i, name in enumerate(names)]
    return ["method", *(heading for heading, _ in filled)], rows
