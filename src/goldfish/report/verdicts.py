"""Whether the removed data is gone from each method's model, judged by every test the run has.

The tests are the backdoor, the accuracy on a removed class, and the losses of the removed samples
beside those of unseen ones. The worst finding leads; a request that was not carried out comes
before all of them, and a model that lost its accuracy passes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from goldfish.report.formatting import count, decimal, gap, listing, number, percent, share
from goldfish.report.reading import Result, section
from goldfish.report.summary import ORIGIN, YARDSTICK, Memory, Range, SummaryRow, summary_rows

Status: TypeAlias = Literal["gone", "partly", "kept", "unclear"]
Rows: TypeAlias = Mapping[str, SummaryRow]

RANKS: Mapping[Status, int] = {"unclear": 0, "gone": 1, "partly": 2, "kept": 3}
"""The worse a finding, the higher; what can be told comes before what cannot."""

GONE = 0.05
"""What a test finds counts as gone when at most this share of it is left, where what it found
before the deletion is the whole and what it finds in retrain (0 without a retrain) is none."""

KEPT = 0.5
"""From this share on, the data counts as not gone."""

SIGNAL = 10.0
"""Before the deletion a test must find so many points more than in retrain, or it proves
nothing."""

NOTED = 5.0
"""From so many percent on it is told how often a model says what is looked for anyway."""

WEAK = 50.0
"""Below so many points of difference the backdoor took only in part: weak evidence."""

COLLAPSE = 5.0
"""A method that loses so many points of accuracy against retrain (or origin) lost too much."""


@dataclass(frozen=True)
class Verdict:
    """What the numbers say of one method."""

    status: Status
    title: str
    short: str
    """The same in a word or two, for a table."""
    sentences: Sequence[str]


@dataclass(frozen=True)
class _Finding:
    """What one test says."""

    status: Status
    by: str
    """The test, as in "gone, as far as ... can show"."""
    title: str
    """The verdict where this finding leads; for ``gone`` it is made of ``by``."""
    short: str
    sentences: Sequence[str]


def verdicts(result: Result) -> dict[str, Verdict]:
    """Return the verdict on each method's model."""
    rows = {row.method: row for row in summary_rows(result)}
    return {name: _judge(name, rows, result) for name in rows if name != ORIGIN}


def judged_rows(result: Result) -> list[SummaryRow]:
    """Return the rows of the table of methods, each with its verdict in short."""
    found = verdicts(result)
    rows = summary_rows(result)
    return [
        replace(row, verdict=found[row.method].short) if row.method in found else row
        for row in rows
    ]


def not_honoured(name: str, row: SummaryRow) -> list[str]:
    """Say which requests a method did not carry out."""
    return [
        f"Not honoured by {name}: the request of {request.get('client_id')} to remove "
        f"{_KINDS.get(str(request.get('kind')), 'data')} ({request.get('reason')})."
        for request in row.not_honoured
    ]


_KINDS = {"samples": "samples", "class": "a class", "client": "all of its data"}


def exceeding(name: str, rows: Rows, result: Result) -> list[str]:
    """Point out a method that knows the removed samples better than the model it began from."""
    before, row = _before(name, rows), rows[name]
    if name == YARDSTICK or row.memory_gap is None or before.memory_gap is None:
        return []
    if row.memory_gap - before.memory_gap <= _margin(result):
        return []
    return [
        f"The memory gap of {name} ({gap(row.memory_gap)}) exceeds that of {before.method} "
        f"({gap(before.memory_gap)}), which was trained on the removed samples."
    ]


def _judge(name: str, rows: Rows, result: Result) -> Verdict:
    row = rows[name]
    if row.diverged:
        text = row.diverged.strip().removesuffix(".")
        sentence = f"{name} diverged and gives no model: {text}."
        return Verdict("unclear", f"No verdict: {name} diverged", "diverged", [sentence])
    found = [
        finding
        for finding in (_backdoor(name, rows), _removed_class(name, rows, result))
        if finding is not None
    ]
    if row.memory is not None and name != YARDSTICK:
        found.append(_memory(name, rows, row.memory, result))
    if name == YARDSTICK:
        verdict = replace(_leading(found) or _itself(row), short="yardstick")
    else:
        verdict = _leading(found) or _nothing_measured(name, rows, result)
    verdict = _with_collapse(name, rows, verdict)
    failed = not_honoured(name, row)
    if not failed:
        return verdict
    clients = dict.fromkeys(str(request.get("client_id")) for request in row.not_honoured)
    title = f"Not honoured: the request of {listing(list(clients))}"
    return Verdict("kept", title, "not honoured", [*failed, *verdict.sentences])


def _leading(found: Sequence[_Finding]) -> Verdict | None:
    """Return the verdict that all findings give together: the worst of them leads."""
    if not found:
        return None
    ordered = sorted(found, key=lambda finding: -RANKS[finding.status])
    first = ordered[0]
    same = [finding for finding in ordered if finding.status == first.status]
    title, short = first.title, ", ".join(finding.short for finding in same)
    if first.status == "gone":
        title = f"Gone, as far as {listing([finding.by for finding in same])} can show"
        short = "gone" if len(same) > 1 else short
    return Verdict(
        first.status,
        title,
        short,
        [sentence for finding in ordered for sentence in finding.sentences],
    )


def _with_collapse(name: str, rows: Rows, verdict: Verdict) -> Verdict:
    """Take back a verdict where the model lost much of its accuracy."""
    none = SummaryRow("")
    retrain = none if name == YARDSTICK else rows.get(YARDSTICK, none)
    base = retrain if retrain.accuracy is not None else rows.get(ORIGIN, none)
    ours = rows[name].accuracy
    if ours is None or base.accuracy is None or base.accuracy - ours <= COLLAPSE:
        return verdict
    sentence = (
        f"{name} is {base.accuracy - ours:.1f} points less accurate than {base.method}: "
        "it lost more than the removed data."
    )
    return Verdict(
        "kept" if verdict.status == "kept" else "partly",
        f"{verdict.title}; much of the accuracy is lost",
        f"{verdict.short}, accuracy lost",
        [sentence, *verdict.sentences],
    )


def _before(name: str, rows: Rows) -> SummaryRow:
    """Return what the method began from: its own training, or origin."""
    return rows[name].training or rows.get(ORIGIN, SummaryRow(ORIGIN))


def _floor(name: str, rows: Rows) -> SummaryRow:
    """Return the yardstick; a row without numbers where there is none, or for itself."""
    return rows.get(YARDSTICK, SummaryRow("")) if name != YARDSTICK else SummaryRow("")


def _fall(what: str, name: str, before: SummaryRow, pair: tuple[float, float], left: float) -> str:
    """Begin the sentence on a percentage that should have fallen."""
    was, now = pair
    both = f"{percent(was)} ({before.method}) to {percent(now)} ({name})"
    if percent(was) == percent(now):
        return f"{what} did not fall: it is {percent(was)} in {before.method} and in {name}"
    if now > was:
        return f"{what} did not fall: it went from {both}"
    return f"{what} fell {'only ' if left >= KEPT else ''}from {both}"


def _left(after: float, before: float, floor: float | None) -> tuple[float, float]:
    """Return by how much a test tells before from retrain, and which share of it is left."""
    signal = before - (floor or 0.0)
    return signal, (after - (floor or 0.0)) / signal if signal > 0 else 1.0


def _backdoor(name: str, rows: Rows) -> _Finding | None:
    before, row, retrain = _before(name, rows), rows[name], _floor(name, rows)
    success = row.backdoor_success
    if row.trigger_adds is None or success is None:
        return None
    by = "the backdoor test"
    if before.trigger_adds is None or before.backdoor_success is None:
        title = f"No verdict: the backdoor success of {before.method} is unknown"
        sentence = (
            f"Backdoor success is {percent(success)} ({name}); {before.method} has no number."
        )
        return _Finding("unclear", by, title, "no verdict", [sentence])
    signal, left = _left(row.trigger_adds, before.trigger_adds, retrain.trigger_adds)
    moved = _fall("Backdoor success", name, before, (before.backdoor_success, success), left)
    sentences = [f"{moved}{_by_retrain(name, rows)}"]
    if rates := _anyway({one.method: one.without_trigger for one in (before, row, retrain)}):
        sentences.append(
            f"Without the trigger {rates} of the same images get the attacker's label: only what "
            "the trigger adds counts."
        )
    if signal < SIGNAL:
        title = "No verdict: the backdoor never took"
        sentences.append(
            "Before the deletion the trigger had hardly more effect than in a model without the "
            "data, so this test cannot tell whether the data is gone."
        )
        return _Finding("unclear", by, title, "no verdict", sentences)
    if signal < WEAK:
        by = "a weak backdoor"
        beyond = "0" if retrain.trigger_adds is None else "what it adds in retrain"
        sentences.append(
            f"Weak evidence: in {before.method} the trigger adds only {signal:.1f} points more "
            f"than {beyond}."
        )
    if left >= KEPT:
        title = "Not gone: the backdoor still works"
        return _Finding("kept", by, title, "backdoor works", sentences)
    if left > GONE:
        title = "Partly gone: some of the backdoor is left"
        sentences.append("Part of what the removed data taught is still there.")
        return _Finding("partly", by, title, "backdoor in part", sentences)
    return _Finding("gone", by, "", "backdoor gone", sentences)


def _anyway(rates: Mapping[str, float | None]) -> str:
    """List how often models say what is looked for without a reason; empty where all hardly do."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if max(known.values(), default=0.0) < NOTED:
        return ""
    return listing([f"{percent(rate)} ({name})" for name, rate in known.items()])


def _by_retrain(name: str, rows: Rows) -> str:
    """End the sentence on a percentage with what retraining gives."""
    if name == YARDSTICK:
        return ". Retraining never sees the removed data: it is the yardstick itself."
    if YARDSTICK not in rows:
        return ". The run has no retrain, so what a model without the data would give is not known."
    value = rows[YARDSTICK].backdoor_success
    if value is None:
        return ". retrain gave no model to compare with."
    return f"; retraining from scratch gives {percent(value)}."


def removed_class_name(result: Result) -> str:
    """Return what the removed classes are called; empty where none was removed."""
    found = section(result, "deletion").get("removed_classes")
    if not isinstance(found, list) or not found:
        return ""
    noun = "class" if len(found) == 1 else "classes"
    return f"the removed {noun} {listing([str(label) for label in found])}"


def _removed_class(name: str, rows: Rows, result: Result) -> _Finding | None:
    before, row, retrain = _before(name, rows), rows[name], _floor(name, rows)
    was, now = before.removed_class_accuracy, row.removed_class_accuracy
    if was is None or now is None:
        return None
    floor = retrain.removed_class_accuracy
    signal, left = _left(row.class_known or 0.0, before.class_known or 0.0, retrain.class_known)
    what = removed_class_name(result) or "the removed class"
    images = number(section(result, "test_images").get("removed_class"))
    of = f" ({count(images)} test images)" if images else ""
    moved = _fall(f"Accuracy on {what}{of}", name, before, (was, now), left)
    ending = "." if floor is None else f"; retraining from scratch gives {percent(floor)}."
    by, sentences = f"the accuracy on {what}", [f"{moved}{ending}"]
    if rates := _anyway({one.method: one.mistaken_for_removed for one in (before, row, retrain)}):
        sentences.append(
            f"Of the images of other classes {rates} are taken for it too: that is subtracted."
        )
    if signal < SIGNAL:
        title = f"No verdict: {before.method} hardly knew {what}"
        return _Finding("unclear", by, title, "no verdict", sentences)
    if left >= KEPT:
        title = f"Not gone: {name} still knows {what}"
        return _Finding("kept", by, title, "class known", sentences)
    if left > GONE:
        title = f"Partly gone: {name} knows {what} in part"
        return _Finding("partly", by, title, "class in part", sentences)
    return _Finding("gone", by, "", "class gone", sentences)


def _memory(name: str, rows: Rows, memory: Memory, result: Result) -> _Finding:
    before = _before(name, rows)
    known = None if before.memory is None else before.memory.judged
    clean = "" if rows[name].backdoor_success is None else " without a trigger"
    samples = f"the removed samples{clean}"
    by = f"the losses of {count(memory.removed)} removed samples"
    sentences = [memory_sentence(name, memory, clean), _against(name, rows, memory, result)]
    if memory.finding == "remembers":
        if known is not None and memory.judged.value < KEPT * known.value:
            title = f"Partly gone: {name} still remembers {samples}"
            return _Finding("partly", by, title, "remembers in part", sentences)
        title = f"Not gone: {name} remembers {samples}"
        return _Finding("kept", by, title, "remembers", sentences)
    if memory.finding == "over-forgets":
        title = f"{name} over-forgets: it treats {samples} worse than unseen ones"
        sentences.append(
            "Whoever compares them with unseen samples can tell which ones were removed."
        )
        return _Finding("partly", by, title, "over-forgets", sentences)
    doubt = _doubt(memory, before, known)
    if not doubt:
        return _Finding("gone", by, "", "like unseen", sentences)
    sentences.append(f"{doubt}. It takes more removed samples, or a larger test set.")
    title = "No verdict: too little to tell removed samples from unseen ones"
    return _Finding("unclear", by, title, "cannot be told", sentences)


def _doubt(memory: Memory, before: SummaryRow, known: Range | None) -> str:
    """Say why it tells little that a model's removed samples look like unseen ones, if it does."""
    trained = f"{before.method}, which was trained on them"
    if known is None or before.memory is None:
        return f"This tells little: {trained}, was not measured"
    if before.memory.finding != "remembers":
        return f"This tells little: {trained}, cannot be told apart either ({_apart(known)})"
    reach = memory.judged.high / known.value
    if reach < KEPT:
        return ""
    return (
        f"This tells little: the interval reaches {share(reach, 0)} of the way to {trained} "
        f"({_apart(known)})"
    )


def _margin(result: Result) -> float:
    """Return by how much losses must differ to count; 0 where the run names none."""
    return number(section(result, "margins").get("memory")) or 0.0


def _apart(found: Range) -> str:
    return f"{gap(found.value)}, 95 % interval {gap(found.low)} to {gap(found.high)}"


def memory_sentence(name: str, memory: Memory, clean: str = "") -> str:
    """Say how the losses on removed samples compare with those on unseen ones."""
    right = ""
    if memory.removed_right is not None and memory.unseen_right is not None:
        right = (
            f"; it gets {percent(memory.removed_right)} of the removed ones right and "
            f"{percent(memory.unseen_right)} of the unseen ones"
        )
    left_out = ""
    if memory.left_out:
        left_out = f" ({count(memory.left_out)} more are of classes that the test set lacks)"
    return (
        f"Memory gap of {name}: {_apart(memory.gap)}, from {count(memory.removed)} removed samples"
        f"{clean}{left_out} and {count(memory.unseen)} unseen ones, class by class{right}."
    )


def _against(name: str, rows: Rows, memory: Memory, result: Result) -> str:
    """Say what the gap is compared with, and what follows."""
    margin = f"with a margin of {_margin(result):g}"
    meaning = {
        "remembers": f"{name} remembers them",
        "over-forgets": f"{name} over-forgets them",
    }.get(str(memory.finding), "the removed samples cannot be told from unseen ones")
    if memory.to_retrain is None:
        why = "retrain gave no model" if YARDSTICK in rows else "the run has no retrain"
        return (
            f"Against 0, {margin}, {meaning}; {why}, so that removed samples "
            "which are easier or harder than unseen ones would look the same."
        )
    other = rows[YARDSTICK].memory_gap if YARDSTICK in rows else None
    return (
        f"Against retrain, whose gap is {gap(other)}, the difference is "
        f"{_apart(memory.to_retrain)}: {margin}, {meaning}."
    )


def _nothing_measured(name: str, rows: Rows, result: Result) -> Verdict:
    """Say why no test could be made, and what it would take."""
    deletion = section(result, "deletion")
    clean = number(deletion.get("clean_samples"))
    if deletion.get("backdoor"):
        why = "The backdoor's success was not measured."
    elif clean:
        why = (
            "The test set has no two images of any class that was removed, so there is nothing to "
            "compare the removed samples with: it takes a test set with some of each class."
        )
    elif "removed_samples" in deletion and deletion["removed_samples"] is None:
        why = (
            "The removed samples are with their clients alone, so that their losses cannot be "
            "compared with those of unseen ones here, and no backdoor was planted."
        )
    else:
        why = (
            "The removed data carried no backdoor, and its losses were not compared with those of "
            "unseen samples: it takes a run by this version of Goldfish."
        )
    sentences = [why, *_closeness(name, rows)]
    return Verdict("unclear", "No verdict: nothing to test", "no verdict", sentences)


def _itself(row: SummaryRow) -> Verdict:
    """Return the verdict on the yardstick where no test looks for what it never saw."""
    sentences = ["Retraining never sees the removed data: it is the yardstick itself."]
    if row.memory is not None:
        sentences += [
            memory_sentence(row.method, row.memory),
            "It never saw them, so a gap says that they are easier or harder than unseen ones.",
        ]
    title = "Gone by construction: trained again without the removed data"
    return Verdict("gone", title, "yardstick", sentences)


def _closeness(name: str, rows: Rows) -> list[str]:
    """Say how close the predictions are to retrain's, which is no proof."""
    ours = rows[name].jsd
    before = rows[ORIGIN].jsd if ORIGIN in rows else None
    if YARDSTICK not in rows:
        return ["The run has no retrain to compare with either: add it to unlearning.methods."]
    if rows[YARDSTICK].diverged:
        return ["retrain gave no model to compare with either."]
    if ours is None:
        return ["Its closeness to retrain was not measured."]
    if before is None:
        return [
            f"{name}'s predictions differ from retrain's by a JSD of {decimal(ours, 4)} "
            "(0: the same, 0.693: nothing in common)."
        ]
    word = "closer to" if ours < before else "no closer to"
    return [
        f"{name}'s predictions are {word} retrain's than origin's are "
        f"(JSD {decimal(ours, 4)} against {decimal(before, 4)})."
    ]
