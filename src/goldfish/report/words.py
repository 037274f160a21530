"""What was asked and whether it is gone, in words, from the numbers of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from goldfish.report.formatting import (
    NOTHING,
    count,
    decimal,
    listing,
    number,
    percent,
    plural,
    seconds,
)
from goldfish.report.reading import Result, section
from goldfish.report.sentences import gap_left, gap_sentence, seeds_sentence, speed_sentence
from goldfish.report.summary import ORIGIN, YARDSTICK, SummaryRow, summary_rows

Status = Literal["gone", "partly", "kept", "unclear"]

GONE = 0.05
"""The removed data counts as gone when at most this share of the backdoor is left, where
origin's success is the whole and retrain's (0 without a retrain) is none."""

KEPT = 0.5
"""From this share of the backdoor on, the data counts as not gone."""

SIGNAL = 10.0
"""Origin's backdoor must exceed retrain's by so many points, or it proves nothing."""

WEAK = 50.0
"""Below so many points of difference the backdoor took only in part: weak evidence."""

COLLAPSE = 5.0
"""A method that loses so many points of accuracy against retrain (or origin) lost too much."""


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
    name = _subject(list(rows))
    asked = asked_sentence(result)
    if name is None:
        sentence = "No unlearning method ran: these are the numbers of the original model alone."
        return Headline("unclear", "Nothing has been removed yet", asked, [sentence])
    row = rows[name]
    if row.diverged:
        status: Status = "unclear"
        verdict = f"No verdict: {name} diverged"
        sentences = [f"{name} diverged and gives no model: {_stop(row.diverged)}"]
    else:
        status, verdict, sentences = _with_memory(name, rows, *_verdict(name, rows, result))
        sentences += [
            *gap_sentence(name, rows),
            *_removed_class(name, result),
            *_accuracy(name, rows),
            *_cost(name, rows, result),
            *speed_sentence(name, rows, result),
            *seeds_sentence(result),
        ]
    notes = section(section(result, "methods"), name).get("notes") or []
    sentences += [_stop(str(note)) for note in notes]
    return Headline(status, verdict, asked, sentences + _others(name, rows))


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


def _subject(names: Sequence[str]) -> str | None:
    """Return the method that the headline is about."""
    if "goldfish" in names:
        return "goldfish"
    others = [name for name in names if name not in (ORIGIN, YARDSTICK)]
    return others[0] if others else YARDSTICK if YARDSTICK in names else None


def _verdict(
    name: str, rows: Mapping[str, SummaryRow], result: Result
) -> tuple[Status, str, list[str]]:
    none = SummaryRow("")
    origin, row = rows.get(ORIGIN, none), rows[name]
    retrain = rows.get(YARDSTICK, none) if name != YARDSTICK else none
    before, after, floor = origin.backdoor_success, row.backdoor_success, retrain.backdoor_success
    if after is None:
        return _without_backdoor(name, rows, result)
    if before is None:
        sentence = f"Backdoor success is {percent(after)} ({name}); origin has no number to compare"
        return "unclear", "No verdict: origin's backdoor success is unknown", [f"{sentence}."]

    signal = before - (floor or 0.0)
    left = (after - (floor or 0.0)) / signal if signal > 0 else 1.0
    pair = f"{percent(before)} (origin) to {percent(after)} ({name})"
    if percent(after) == percent(before):
        moved = f"Backdoor success did not fall: it is {percent(before)} in origin and in {name}"
    elif after > before:
        moved = f"Backdoor success did not fall: it went from {pair}"
    elif left >= KEPT:
        moved = f"Backdoor success fell only from {pair}"
    else:
        moved = f"Backdoor success fell from {pair}"
    sentences = [f"{moved}{_yardstick(name, rows)}"]

    if signal < SIGNAL:
        sentences.append(
            "The original model reacts to the trigger hardly more than a model without the data, "
            "so this test cannot tell whether the data is gone."
        )
        return "unclear", "No verdict: the backdoor never took", sentences
    if signal < WEAK:
        beyond = "0" if floor is None else "retrain's"
        sentences.append(
            f"Weak evidence: origin's backdoor success is only {signal:.1f} points above {beyond}."
        )
    if left >= KEPT:
        return "kept", "Not gone: the backdoor still works", sentences
    if left > GONE:
        sentences.append("Part of what the removed data taught is still there.")
        return "partly", "Partly gone: some of the backdoor is left", sentences
    whole = retrain.accuracy if retrain.accuracy is not None else origin.accuracy
    if row.accuracy is not None and whole is not None and whole - row.accuracy > COLLAPSE:
        sentences.append(
            f"But {name} is {whole - row.accuracy:.1f} points less accurate than "
            f"{'retrain' if retrain.accuracy is not None else 'origin'}: "
            "it lost more than the removed data."
        )
        return "partly", "The backdoor is gone, and much of the accuracy with it", sentences
    if signal < WEAK:
        return "gone", "Gone, as far as a weak backdoor can show", sentences
    return "gone", "Gone, as far as the backdoor test can show", sentences


def _with_memory(
    name: str, rows: Mapping[str, SummaryRow], status: Status, verdict: str, sentences: list[str]
) -> tuple[Status, str, list[str]]:
    """Take back a good or an open verdict where the model still knows samples without a trigger."""
    left = gap_left(name, rows)
    if left is None or left < KEPT:
        return status, verdict, sentences
    if status == "gone":
        verdict = "The backdoor is gone, but removed samples without a trigger are still known"
        return "partly", verdict, sentences
    if status == "unclear":
        return "kept", "Not gone: the removed samples are still known", sentences
    return status, verdict, sentences


def _yardstick(name: str, rows: Mapping[str, SummaryRow]) -> str:
    """End the sentence on the backdoor with what retraining gives."""
    if name == YARDSTICK:
        return ". Retraining never sees the removed data: it is the yardstick itself."
    if YARDSTICK not in rows:
        return ". The run has no retrain, so what a model without the data would give is not known."
    value = rows[YARDSTICK].backdoor_success
    if value is None:
        return ". retrain gave no model to compare with."
    return f"; retraining from scratch gives {percent(value)}."


def _without_backdoor(
    name: str, rows: Mapping[str, SummaryRow], result: Result
) -> tuple[Status, str, list[str]]:
    """Without a planted trace only the closeness to retrain is left, which is no proof."""
    planted = section(result, "deletion").get("backdoor")
    verdict = f"No verdict: {'its success was not measured' if planted else 'no backdoor to test'}"
    sentences = [
        "The backdoor's success was not measured."
        if planted
        else "The removed data carried no backdoor, so there is no planted trace to look for."
    ]
    ours = rows[name].jsd
    before = rows[ORIGIN].jsd if ORIGIN in rows else None
    if YARDSTICK not in rows:
        sentences.append("The run has no retrain to compare with either.")
    elif rows[YARDSTICK].diverged:
        sentences.append("retrain gave no model to compare with either.")
    elif name == YARDSTICK:
        sentences.append("Retraining never sees the removed data: it is the yardstick itself.")
    elif ours is None:
        sentences.append("Its closeness to retrain was not measured.")
    elif before is None:
        sentences.append(
            f"{name}'s predictions differ from retrain's by a JSD of {decimal(ours, 4)} "
            "(0: the same, 0.693: nothing in common)."
        )
    else:
        word = "closer to" if ours < before else "no closer to"
        sentences.append(
            f"{name}'s predictions are {word} retrain's than origin's are "
            f"(JSD {decimal(ours, 4)} against {decimal(before, 4)})."
        )
    return "unclear", verdict, sentences


def _accuracy(name: str, rows: Mapping[str, SummaryRow]) -> list[str]:
    parts = [
        f"{percent(rows[key].accuracy)} ({key})"
        for key in dict.fromkeys((ORIGIN, name, YARDSTICK))
        if key in rows and rows[key].accuracy is not None
    ]
    return [f"Accuracy on clean test images: {', '.join(parts)}."] if parts else []


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


def _removed_class(name: str, result: Result) -> list[str]:
    """Compare the accuracy on the class that was removed, where a class was."""
    label = _class_label(result)
    if label is None:
        return []
    parts = []
    for key in dict.fromkeys((ORIGIN, name, YARDSTICK)):
        final = section(section(section(result, "methods"), key), "final")
        per_class = final.get("per_class") or []
        value = number(per_class[label]) if 0 <= label < len(per_class) else None
        if value is not None:
            parts.append(f"{percent(value)} ({key})")
    return [f"Accuracy on class {label}: {', '.join(parts)}."] if parts else []


def _others(name: str, rows: Mapping[str, SummaryRow]) -> list[str]:
    others = [row for key, row in rows.items() if key not in (ORIGIN, YARDSTICK, name)]
    known = [
        f"{row.method} {percent(row.backdoor_success)}"
        for row in others
        if row.backdoor_success is not None
    ]
    sentences = [f"Backdoor success of the other methods: {listing(known)}."] if known else []
    rest = [row for key, row in rows.items() if key != name and row.diverged]
    return sentences + [f"{row.method} diverged: {_stop(row.diverged or '')}" for row in rest]


def _stop(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
