"""What the sections of the page show, as plain data; ``page.html`` lays it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goldfish.report.figures import Line
from goldfish.report.formatting import count, number, percent, plural, seconds, share, size
from goldfish.report.reading import Result, section
from goldfish.report.summary import ORIGIN, YARDSTICK, SummaryRow
from goldfish.report.words import asked_sentence

MAX_CLASSES = 20
"""The heat table shows at most so many classes: those with the lowest accuracy."""

MAX_NAMED_CLIENTS = 12

UNBROKEN = "\N{NO-BREAK SPACE}"

TOLD = {
    "training": (
        *("rounds", "local_epochs", "batch_size", "learning_rate", "schedule"),
        *("momentum", "aggregation", "shards"),
    ),
    "unlearning": ("learning_rate", "local_epochs", "schedule"),
    "goldfish": ("temperature", "mu_c", "mu_d", "hard_loss", "removed_term", "round_stop"),
}
"""The settings that are told at the top of the page; the configuration has them all."""

HEAT_SPAN = 20.0
"""The heat table's shades span at least so many points of accuracy: noise looks like noise."""


def facts(result: Result) -> list[tuple[str, str]]:
    """Return what was done, as terms and descriptions."""
    config, deletion = section(result, "config"), section(result, "deletion")
    data, training = section(config, "data"), section(config, "training")
    unlearning = section(config, "unlearning")
    total = number(deletion.get("training_samples"))
    found = [
        ("Data", _joined(data.get("name"), total and f"{count(total)} training samples")),
        ("Federation", _federation(data, section(section(result, "partition"), "sizes"))),
        ("Model", str(section(config, "model").get("name") or "")),
        ("Training", _settings("training", training)),
        ("Deletion", _deletion(result)),
        ("Backdoor", _backdoor(deletion)),
        ("Methods", _methods(result, unlearning)),
        ("Goldfish", _settings("goldfish", section(unlearning, "goldfish"))),
        ("Seed", str(config.get("seed", ""))),
    ]
    return [(term, text) for term, text in found if text]


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _settings(table: str, values: Mapping[str, Any]) -> str:
    known = {key: values[key] for key in TOLD[table] if values.get(key) is not None}
    return ", ".join(f"{key} = {_scalar(v)}".replace(" ", UNBROKEN) for key, v in known.items())


def _methods(result: Result, unlearning: Mapping[str, Any]) -> str:
    names = ", ".join(name for name in section(result, "methods") if name != ORIGIN)
    rounds = unlearning.get("rounds")
    limit = isinstance(rounds, int) and f"at most {plural(rounds, 'round')} each"
    how = _joined(limit, _settings("unlearning", unlearning))
    return f"{names}; {how}" if names and how else names


def _scalar(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _federation(data: Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    skewed = data.get("partition") == "dirichlet"
    how = _joined(data.get("partition"), skewed and f"alpha {data.get('alpha')}")
    head = _joined(sizes and plural(len(sizes), "client"), how and f"partition {how}")
    if not sizes:
        return head
    if len(sizes) > MAX_NAMED_CLIENTS:
        return f"{head}; {min(sizes.values())} to {max(sizes.values())} samples each"
    return f"{head}; " + ", ".join(f"{client}: {n}" for client, n in sizes.items())


def _deletion(result: Result) -> str:
    asked = asked_sentence(result).removeprefix("Asked: ").removesuffix(".")
    requests = section(result, "deletion").get("requests") or []
    if not 1 < len(requests) <= MAX_NAMED_CLIENTS:
        return asked
    return f"{asked}; " + ", ".join(f"{r.get('client_id')}: {r.get('samples')}" for r in requests)


def _backdoor(deletion: Mapping[str, Any]) -> str:
    backdoor = section(deletion, "backdoor")
    if not backdoor:
        return "none"
    side, source = backdoor.get("size"), backdoor.get("source")
    patch = f"{side} × {side} pixel trigger" if side else "trigger"
    origin = "any class" if source is None else f"class {source}"
    return f"{patch} on the removed samples, {origin} labelled as {backdoor.get('target')}"


def course(result: Result, key: str) -> list[Line]:
    """Return each unlearning method's ``key`` over its rounds, where it has one."""
    lines = []
    for name, method in section(result, "methods").items():
        known = [
            (int(entry["round"]), value)
            for entry in method.get("rounds") or []
            if (value := number(entry.get(key))) is not None and "round" in entry
        ]
        if name != ORIGIN and known:
            rounds, values = zip(*known, strict=True)
            lines.append(Line(name, rounds, values, bool(method.get("diverged"))))
    return lines


@dataclass(frozen=True)
class Bar:
    """One method's bar: its length in percent of the longest, and what it says."""

    method: str
    width: float
    text: str
    ratio: str


@dataclass(frozen=True)
class Cost:
    """One measure of cost over the methods; origin's own training is only named."""

    title: str
    bars: Sequence[Bar]
    origin: str


def costs(rows: Sequence[SummaryRow]) -> list[Cost]:
    """Return the bars of each measure that the run has."""
    measures: list[tuple[str, Callable[[SummaryRow], float | None], Callable[[float], str]]] = [
        ("Time", lambda row: row.seconds, seconds),
        ("Gradient steps", lambda row: row.steps, count),
        ("Samples processed", lambda row: row.samples, count),
        ("Bytes sent", lambda row: row.bytes_sent, size),
        ("Bytes kept", lambda row: row.bytes_kept, size),
    ]
    found = []
    for title, get, form in measures:
        values = {row.method: value for row in rows if (value := get(row)) is not None}
        trained = values.pop(ORIGIN, None)
        longest = max(values.values(), default=0.0)
        base = values.get(YARDSTICK)
        if longest > 0:
            bars = [
                Bar(
                    method=name,
                    width=round(100 * value / longest, 2),
                    text=form(value),
                    ratio=f"{value / base:.2f}×" if base and name != YARDSTICK else "",
                )
                for name, value in values.items()
            ]
            found.append(Cost(title, bars, "" if trained is None else form(trained)))
    return found


@dataclass(frozen=True)
class Heat:
    """Accuracy by class: the classes, and for each method its cells as (text, shade)."""

    classes: Sequence[str]
    rows: Mapping[str, Sequence[tuple[str, float]]]
    all_classes: int


def heat(result: Result, class_names: Sequence[str]) -> Heat | None:
    """Return the table of accuracy by class; the lower, the stronger the shade (0 to 1)."""
    table = {
        name: [number(value) for value in per_class]
        for name, method in section(result, "methods").items()
        if (per_class := section(method, "final").get("per_class"))
    }
    known = [value for row in table.values() for value in row if value is not None]
    if not known:
        return None
    width = max(len(row) for row in table.values())
    for row in table.values():
        row.extend([None] * (width - len(row)))

    def lowest(index: int) -> float:
        return min((v for row in table.values() if (v := row[index]) is not None), default=math.inf)

    shown = sorted(sorted(range(width), key=lowest)[:MAX_CLASSES])
    top = max(known)
    span = max(top - min(known), HEAT_SPAN)
    rows = {
        name: [
            (percent(v).removesuffix(" %"), 0.0 if v is None else round((top - v) / span, 3))
            for v in (row[i] for i in shown)
        ]
        for name, row in table.items()
    }
    return Heat([label_name(i, class_names) for i in shown], rows, width)


@dataclass(frozen=True)
class Picture:
    """A removed sample: its image, its labels, and what each model says it is."""

    id: str
    client_id: str
    png: str
    trained: str
    true: str
    predictions: Sequence[tuple[str, str, str, str]]
    """Method, label, confidence, and whether that is the ``trained`` or the ``true`` label."""


def pictures(samples: Mapping[str, Any] | None) -> list[Picture]:
    """Return the removed samples of ``samples.json``."""
    names = class_names(samples)
    found = []
    for sample in (samples or {}).get("samples") or []:
        trained, true = sample.get("label"), sample.get("true_label")
        predictions = [
            (
                method,
                label_name(guess.get("label"), names),
                share(number(guess.get("confidence"))),
                _kind(guess.get("label"), trained, true),
            )
            for method, guess in section(sample, "predictions").items()
        ]
        found.append(
            Picture(
                id=str(sample.get("id")),
                client_id=str(sample.get("client_id")),
                png=str(sample.get("png") or ""),
                trained=label_name(trained, names),
                true=label_name(true, names),
                predictions=predictions,
            )
        )
    return found


def _kind(guess: object, trained: object, true: object) -> str:
    if trained == true:
        return ""
    return "trained" if guess == trained else "true" if guess == true else "other"


def class_names(samples: Mapping[str, Any] | None) -> list[str]:
    """Return the names of the classes, as far as the run knows them."""
    return [str(name) for name in (samples or {}).get("class_names") or []]


def label_name(label: object, names: Sequence[str]) -> str:
    """Return what a label is called; its number where it has no name."""
    known = isinstance(label, int) and 0 <= label < len(names)
    return names[label] if known and isinstance(label, int) else str(label)


@dataclass(frozen=True)
class FailureGroup:
    """The rounds of one method in which one client failed for one cause."""

    method: str
    client_id: str
    error: str
    """The name of the exception."""
    cause: str
    rounds: str


def failures(result: Result) -> list[FailureGroup]:
    """Return the clients that did not answer, with equal causes taken together."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for name, method in section(result, "methods").items():
        for entry in method.get("rounds") or []:
            for failure in entry.get("failures") or []:
                client, error, cause = (
                    str(failure.get(key) or "") for key in ("client_id", "error", "cause")
                )
                groups.setdefault((name, client, error, cause), []).append(entry.get("round", 0))
    return [FailureGroup(*key, ", ".join(map(str, rounds))) for key, rounds in groups.items()]


def notes(result: Result) -> list[tuple[str, str]]:
    """Return what the methods have to say of themselves, and why one diverged."""
    found = []
    for name, method in section(result, "methods").items():
        if method.get("diverged"):
            found.append((name, f"diverged: {method['diverged']}"))
        found += [(name, str(note)) for note in method.get("notes") or []]
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as dotted names and texts.

    >>> flat({"data": {"name": "digits"}, "seed": 0})
    [('data.name', 'digits'), ('seed', '0')]
    """
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            found.append((f"{prefix}{key}", ", ".join(map(str, value))))
        else:
            found.append((f"{prefix}{key}", "not set" if value is None else _scalar(value)))
    return found
