"""What the sections of the page show, as plain data; ``page.html`` lays it out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from goldfish.report.charts import moments
from goldfish.report.formatting import count, listing, number, percent, plural, share
from goldfish.report.reading import Result, section
from goldfish.report.seeds import seeds
from goldfish.report.summary import ORIGIN, summary_rows
from goldfish.report.verdicts import exceeding, not_honoured
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
        ("Backdoor", _backdoor(result)),
        ("Methods", _methods(result, unlearning)),
        ("Goldfish", _settings("goldfish", section(unlearning, "goldfish"))),
        ("Seeds", _seeds(result)) if seeds(result) else ("Seed", str(config.get("seed", ""))),
    ]
    return [(term, text) for term, text in found if text]


def _seeds(result: Result) -> str:
    return f"{', '.join(seeds(result))}; every number is the mean over them"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def _settings(table: str, values: Mapping[str, Any]) -> str:
    known = {key: values[key] for key in TOLD[table] if values.get(key) is not None}
    return ", ".join(f"{key} = {_scalar(v)}".replace(" ", UNBROKEN) for key, v in known.items())


def _methods(result: Result, unlearning: Mapping[str, Any]) -> str:
    names = ", ".join(name for name in section(result, "methods") if name != ORIGIN)
    rounds = unlearning.get("rounds")
    last = " after the last deletion" if moments(result) else ""
    limit = isinstance(rounds, int) and f"at most {plural(rounds, 'round')} each{last}"
    how = _joined(limit, _settings("unlearning", unlearning))
    return f"{names}; {how}" if names and how else names


def _scalar(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _federation(data: Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    if data.get("members"):
        return f"{plural(len(data['members']), 'client')} with data of their own"
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
    if 1 < len(requests) <= MAX_NAMED_CLIENTS:
        asked += "; " + ", ".join(f"{r.get('client_id')}: {r.get('samples')}" for r in requests)
    later = [f"the {text} after round {int(at)}" for at, text in moments(result).items() if text]
    return f"{asked}; {listing(later)}" if later else asked


def _backdoor(result: Result) -> str:
    backdoor = section(section(result, "deletion"), "backdoor")
    if not backdoor:
        return "none"
    side, source = backdoor.get("size"), backdoor.get("source")
    patch = f"{side} × {side} pixel trigger" if side else "trigger"
    origin = "any class" if source is None else f"class {source}"
    finals = (section(method, "final") for method in section(result, "methods").values())
    clean = any(number(final.get("memory_gap")) is not None for final in finals)
    carriers = "some of the removed samples" if clean else "the removed samples"
    return f"{patch} on {carriers}, {origin} labelled as {backdoor.get('target')}"


@dataclass(frozen=True)
class Heat:
    """Accuracy by class: the classes, and for each method its cells as (text, shade)."""

    classes: Sequence[str]
    rows: Mapping[str, Sequence[tuple[str, float]]]
    all_classes: int
    images: str = ""
    """How many test images a class has; empty where that is not known."""


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
    known_images = section(result, "test_images").get("per_class") or []
    images = [int(n) for i, n in enumerate(known_images) if i in shown]
    return Heat([label_name(i, class_names) for i in shown], rows, width, _between(images))


def _between(amounts: Sequence[int]) -> str:
    if not amounts:
        return ""
    low, high = min(amounts), max(amounts)
    return count(low) if low == high else f"{count(low)} to {count(high)}"


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
                groups.setdefault((name, client, error, cause), []).append(
                    int(entry.get("round") or 0)
                )
    return [
        FailureGroup(*key, ", ".join(map(str, dict.fromkeys(rounds))))
        for key, rounds in groups.items()
    ]


def notes(result: Result) -> list[tuple[str, str]]:
    """Return what a reader must know of each method, and what it has to say of itself."""
    found = []
    rows = {row.method: row for row in summary_rows(result)}
    for name, method in section(result, "methods").items():
        if method.get("diverged"):
            found.append((name, f"diverged: {method['diverged']}"))
        flagged = not_honoured(name, rows[name])
        flagged += exceeding(name, rows, result) if name != ORIGIN else []
        found += [(name, text) for text in flagged]
        found += [(name, str(note)) for note in method.get("notes") or []]
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as dotted names and texts.

    >>> flat({"data": {"name": "digits"}, "seed": 0})
    [('data.name', 'digits'), ('seed', '0')]
    >>> flat({"then": [{"after": 3}, {"after": 2}]})
    [('then.1.after', '3'), ('then.2.after', '2')]
    """
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            found += flat({str(i): item for i, item in enumerate(value, 1)}, f"{prefix}{key}.")
        elif isinstance(value, list):
            found.append((f"{prefix}{key}", ", ".join(map(str, value))))
        else:
            found.append((f"{prefix}{key}", "not set" if value is None else _scalar(value)))
    return found
