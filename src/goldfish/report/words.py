"""The top of the page in words: what was asked, whether it is gone, and at what price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from goldfish.report.formatting import (
    NOTHING,
    count,
    listing,
    number,
    percent,
    plural,
    seconds,
    wilson,
)
from goldfish.report.reading import Result, section
from goldfish.report.sentences import seeds_sentence, speed_sentence
from goldfish.report.summary import (
    FEW_IMAGES,
    ORIGIN,
    YARDSTICK,
    SummaryRow,
    subject,
    summary_rows,
)
from goldfish.report.verdicts import (
    Status,
    Verdict,
    exceeding,
    not_honoured,
    removed_class_name,
    verdicts,
)


@dataclass(frozen=True)
class Headline:
    """The top of the page."""

    status: Status
    verdict: str
    asked: str
    sentences: Sequence[str]


def headline(result: Result) -> Headline:
    """Say what was asked and whether the numbers show it gone; retrain is the yardstick."""
    rows = {row.method: row for row in summary_rows(result)}
    name = subject(result)
    asked = asked_sentence(result)
    if name is None:
        sentence = "No unlearning method ran: these are the numbers of the original model alone."
        return Headline("unclear", "Nothing has been removed yet", asked, [sentence])
    judged = verdicts(result)
    sentences = list(judged[name].sentences)
    if not rows[name].diverged:
        sentences += [
            *exceeding(name, rows, result),
            *_accuracy(name, rows, result),
            *_cost(name, rows, result),
            *speed_sentence(name, rows, result),
            *seeds_sentence(result),
        ]
    notes = section(section(result, "methods"), name).get("notes") or []
    sentences += [_stop(str(note)) for note in notes]
    sentences += _others(name, rows, judged, result)
    return Headline(judged[name].status, judged[name].title, asked, sentences)


def asked_sentence(result: Result) -> str:
    """Return the request in one sentence."""
    deletion = section(result, "deletion")
    requests = deletion.get("requests") or []
    removed = int(number(deletion.get("removed_samples")) or 0)
    total = number(deletion.get("training_samples"))
    rate = number(deletion.get("rate_percent"))
    if rate is None and total:
        rate = 100 * removed / total
    share = "" if rate is None else f" ({rate:.1f} % of the training data)"
    clients = list(dict.fromkeys(str(request.get("client_id")) for request in requests))
    who = listing(clients) if len(clients) <= 4 else f"{len(clients)} clients"
    kinds = {request.get("kind") for request in requests}
    amount = f"{plural(removed, 'sample')}{share}"
    if "removed_samples" in deletion and deletion["removed_samples"] is None:
        asked = [number(request.get("samples")) for request in requests]
        known = None not in asked
        amount = plural(int(sum(a or 0 for a in asked)), "sample") if known else "as they hold it"
    if not requests:
        return "Asked: nothing; no deletion was filed."
    if kinds == {"client"}:
        return f"Asked: remove everything that {who} contributed, {amount}."
    if kinds == {"class"}:
        label = _class_label(result)
        what = "a class" if label is None else f"class {label}"
        return f"Asked: remove {what} from the data of {who}, {amount}."
    return f"Asked: remove {amount} of {who}."


def image_counts(result: Result) -> str:
    """Say of how many test images the percentages are; empty where that is not known."""
    images = section(result, "test_images")
    rest = " of the remaining classes" if removed_class_name(result) else ""
    said = [
        f"{what}: % of {count(known)} test images{more}."
        for what, key, more in (
            ("Accuracy", "accuracy", rest),
            ("Removed class", "removed_class", ""),
            ("Backdoor", "backdoor", " with the trigger"),
        )
        if (known := number(images.get(key)))
    ]
    return " ".join(said)


def _accuracy(name: str, rows: Mapping[str, SummaryRow], result: Result) -> list[str]:
    images = rows[name].test_images
    few = 0 < images < FEW_IMAGES and not rows[name].spread

    def shown(value: float, key: str) -> str:
        if not few:
            return f"{percent(value)} ({key})"
        low, high = wilson(value, images)
        return f"{percent(value)} ({key}; {low:.1f} to {high:.1f})"

    parts = [
        shown(value, key)
        for key in dict.fromkeys((ORIGIN, name, YARDSTICK))
        if key in rows and (value := rows[key].accuracy) is not None
    ]
    where = f"{count(images)} clean test images" if images else "clean test images"
    if removed_class_name(result):
        where += " of the remaining classes"
    if few:
        where += ", with 95 % intervals"
    return [f"Accuracy on {where}: {', '.join(parts)}."] if parts else []


def _cost(name: str, rows: Mapping[str, SummaryRow], result: Result) -> list[str]:
    """Say what it cost; the rounds only where the two had not the same number of them."""
    methods = section(result, "methods")
    rounds = {key: len(section(methods, key).get("rounds") or []) for key in (name, YARDSTICK)}
    differ = YARDSTICK in rows and rounds[name] != rounds[YARDSTICK]

    def spent(row: SummaryRow) -> str:
        amounts = (seconds(row.seconds), f"{count(row.steps)} gradient steps")
        text = " and ".join(text for text in amounts if not text.startswith(NOTHING))
        return f"{text} in {plural(rounds[row.method], 'round')}" if text and differ else text

    ours = spent(rows[name])
    theirs = spent(rows[YARDSTICK]) if name != YARDSTICK and YARDSTICK in rows else ""
    if not ours:
        return []
    return [f"{name} took {ours}" + (f"; retrain took {theirs}." if theirs else ".")]


def _class_label(result: Result) -> int | None:
    label = section(section(result, "config"), "deletion").get("class_label")
    return label if isinstance(label, int) else None


def _others(
    name: str, rows: Mapping[str, SummaryRow], judged: Mapping[str, Verdict], result: Result
) -> list[str]:
    others = [row for key, row in rows.items() if key not in (ORIGIN, name)]
    sentences = [text for row in others for text in not_honoured(row.method, row)]
    told: dict[str, list[str]] = {}
    for row in others:
        if row.method != YARDSTICK:
            told.setdefault(judged[row.method].short, []).append(row.method)
    if told:
        groups = [f"{listing(names)}: {short}" for short, names in told.items()]
        sentences.append(f"Verdicts on the other methods: {'; '.join(groups)}.")
    known = [
        f"{row.method} {percent(row.backdoor_success)}"
        for row in others
        if row.backdoor_success is not None and row.method != YARDSTICK
    ]
    if known:
        sentences.append(f"Backdoor success of the other methods: {listing(known)}.")
    for row in others:
        sentences += exceeding(row.method, rows, result)
        if row.diverged:
            sentences.append(f"{row.method} diverged: {_stop(row.diverged)}")
    return sentences


def _stop(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
