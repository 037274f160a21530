"""Whether the removed data is gone from each method's model, in words.

A run has up to three tests: the backdoor, the accuracy on a removed class, and the losses of the
removed samples beside those of unseen ones. The worst finding leads; a request that was not
carried out comes before all of them, and a model that lost its accuracy passes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from goldfish.audits import AuditWord
from goldfish.report.formatting import (
    count,
    decimal,
    gap,
    listing,
    percent,
)
from goldfish.results import (
    ORIGIN,
    YARDSTICK,
    Final,
    Interval,
    Memory,
    Result,
)

Status: TypeAlias = Literal["gone", "partly", "kept", "unclear"]
RANKS: Mapping[Status, int] = {"unclear": 0, "gone": 1, "partly": 2, "kept": 3}
"""The worse a finding, the higher; what can be told comes before what cannot."""
AUDIT_STATUS: Mapping[AuditWord, Status] = {
    "remembers": "kept",
    "over-forgets": "partly",
    "damaged": "partly",
    "different": "partly",
    "indistinguishable": "gone",
    "not enough evidence": "unclear",
}
"""How bad the verdicts of an audit are."""
KINDS = {"samples": "samples", "class": "a class", "client": "all of its data"}
_Read: TypeAlias = Callable[[Final], float | None]


@dataclass(frozen=True)
class Verdict:
    """What the numbers say of one method."""

    status: Status
    title: str
    short: str
    """The same in a word or two, for a table."""
    sentences: Sequence[str]
    by: str = ""
    """The one test that says so; the title of what is gone names all of them."""


@dataclass(frozen=True)
class _Case:
    """A method's model beside the one that it began from, and beside retrain's."""

    result: Result
    name: str
    after: Final
    before_name: str
    before: Final | None
    retrain: Final | None
    """None where there is none, and for retrain itself."""

    def rates(self, read: _Read) -> str:
        """List how often the models say what is looked for anyway; empty where all hardly do."""
        models = {self.before_name: self.before, self.name: self.after, YARDSTICK: self.retrain}
        known = {
            name: rate
            for name, model in models.items()
            if model is not None and (rate := read(model)) is not None
        }
        if max(known.values(), default=0.0) < self.result.margins.noted:
            return ""
        return listing([f"{percent(rate)} ({name})" for name, rate in known.items()])


def verdicts(result: Result) -> dict[str, Verdict]:
    """Return the verdict on each method's model."""
    return {name: _judge(name, result) for name in result.methods if name != ORIGIN}


def unhonoured(name: str, result: Result) -> list[str]:
    """Say which requests a method did not carry out."""
    return [
        f"Not honoured by {name}: the request of {lost.client_id} to remove {KINDS[lost.kind]} "
        f"({lost.reason})."
        for lost in result.methods[name].not_honoured
    ]


def exceeding(name: str, result: Result) -> list[str]:
    """Point out a method that knows the removed samples better than the model it began from."""
    before_name, before = _before(name, result)
    ours, theirs = result.methods[name].get("memory_gap"), getattr(before, "memory_gap", None)
    if name in (ORIGIN, YARDSTICK) or ours is None or theirs is None:
        return []
    if ours - theirs <= result.margins.memory:
        return []
    return [
        f"The memory gap of {name} ({gap(ours)}) exceeds that of {before_name} ({gap(theirs)}), "
        "which was trained on the removed samples."
    ]


def _before(name: str, result: Result) -> tuple[str, Final | None]:
    """Return what the method began from: its own training, or origin."""
    training = result.methods[name].training
    if training is not None:
        return f"{name}'s own training", training.final
    return ORIGIN, result.origin.final


def _judge(name: str, result: Result) -> Verdict:
    method = result.methods[name]
    if method.final is None:
        sentence = f"{name} diverged and gives no model: {stopped(method.diverged)}"
        return Verdict("unclear", f"No verdict: {name} diverged", "diverged", [sentence])
    retrain = None if name == YARDSTICK else result.retrain.final
    case = _Case(result, name, method.final, *_before(name, result), retrain)
    found = [f for f in (_backdoor(case), _removed_class(case)) if f is not None]
    if name == YARDSTICK:
        verdict = _itself(method.final, found)
    else:
        if method.final.memory is not None:
            found.append(_memory(case, method.final.memory))
        verdict = _leading(found) or _nothing_measured(name, result)
    verdict = _with_collapse(case, verdict)
    if not method.not_honoured:
        return verdict
    clients = dict.fromkeys(lost.client_id for lost in method.not_honoured)
    title = f"Not honoured: the request of {listing(list(clients))}"
    sentences = [*unhonoured(name, result), *verdict.sentences]
    return Verdict("kept", title, "not honoured", sentences)


def _leading(found: Sequence[Verdict]) -> Verdict | None:
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
    sentences = [sentence for finding in ordered for sentence in finding.sentences]
    return Verdict(first.status, title, short, sentences)


def _with_collapse(case: _Case, verdict: Verdict) -> Verdict:
    """Take back a verdict where the model lost much of its accuracy."""
    origin = case.result.origin.final
    base, name = (case.retrain, YARDSTICK) if case.retrain else (origin, ORIGIN)
    lost = 0.0 if base is None else base.accuracy - case.after.accuracy
    if lost <= case.result.margins.collapse:
        return verdict
    sentence = f"{case.name} is {lost:.1f} points less accurate than {name}: "
    if case.name == YARDSTICK:
        sentence += "it was trained too short, or the removed data taught that much."
        status = verdict.status
    else:
        sentence += "it lost more than the removed data."
        status = "kept" if verdict.status == "kept" else "partly"
    return Verdict(
        status,
        f"{verdict.title}; much of the accuracy is lost",
        f"{verdict.short}, accuracy lost",
        [sentence, *verdict.sentences],
    )


def _fall(case: _Case, what: str, score: _Read, counted: _Read) -> tuple[Status, str, float] | None:
    """Grade a score that should have fallen, by the share that is left of what counts of it.

    Return a sentence too, and by how many points the test tells the model before from retrain, or
    from 0; None where a model has no such score.
    """
    before, margins = case.before, case.result.margins
    was, now = None if before is None else score(before), score(case.after)
    if before is None or was is None or now is None:
        return None
    floor = 0.0 if case.retrain is None else counted(case.retrain) or 0.0
    signal = (counted(before) or 0.0) - floor
    left = ((counted(case.after) or 0.0) - floor) / signal if signal > 0 else 1.0
    both = f"{percent(was)} ({case.before_name}) to {percent(now)} ({case.name})"
    if percent(was) == percent(now):
        same = f"it is {percent(was)} in {case.before_name} and in {case.name}"
        sentence = f"{what} did not fall: {same}"
    elif now > was:
        sentence = f"{what} did not fall: it went from {both}"
    else:
        sentence = f"{what} fell {'only ' if left >= margins.kept else ''}from {both}"
    theirs = None if case.retrain is None else score(case.retrain)
    if case.name == YARDSTICK:
        sentence += ". Retraining never sees the removed data: it is the yardstick itself."
    elif YARDSTICK not in case.result.methods:
        sentence += ". The run has no retrain, so what a model without the data would give is "
        sentence += "not known."
    elif theirs is None:
        sentence += ". retrain gave no model to compare with."
    else:
        sentence += f"; retraining from scratch gives {percent(theirs)}."
    status: Status = "kept" if left >= margins.kept else "partly" if left > margins.gone else "gone"
    return ("unclear" if signal < margins.signal else status), sentence, signal


def _backdoor(case: _Case) -> Verdict | None:
    score, counted = (lambda model: model.backdoor_success), (lambda model: model.trigger_adds)
    fall = _fall(case, "Backdoor success", score, counted)
    if fall is None:
        return None
    status, sentence, signal = fall
    by, sentences = "the backdoor test", [sentence]
    if rates := case.rates(lambda model: model.without_trigger):
        sentences.append(
            f"Without the trigger {rates} of the same images get the attacker's label: only what "
            "the trigger adds counts."
        )
    if status == "unclear":
        sentences.append(
            "Before the deletion the trigger had hardly more effect than in a model without the "
            "data, so this test cannot tell whether the data is gone."
        )
    elif signal < case.result.margins.weak:
        by = "a weak backdoor"
        known = case.retrain is not None and case.retrain.trigger_adds is not None
        sentences.append(
            f"Weak evidence: in {case.before_name} the trigger adds only {signal:.1f} points "
            f"more than {'what it adds in retrain' if known else '0'}."
        )
    if status == "partly":
        sentences.append("Part of what the removed data taught is still there.")
    title, short = {
        "unclear": ("No verdict: the backdoor never took", "no verdict"),
        "kept": ("Not gone: the backdoor still works", "backdoor works"),
        "partly": ("Partly gone: some of the backdoor is left", "backdoor in part"),
        "gone": ("", "backdoor gone"),
    }[status]
    return Verdict(status, title, short, sentences, by)


def removed_class_name(result: Result) -> str:
    """Return what the removed classes are called; empty where none was removed."""
    found = [str(label) for label in result.deletion.removed_classes]
    noun = "class" if len(found) == 1 else "classes"
    return f"the removed {noun} {listing(found)}" if found else ""


def _removed_class(case: _Case) -> Verdict | None:
    what, images = removed_class_name(case.result), case.result.test_images.removed_class
    score, counted = (lambda model: model.removed_class_accuracy), (lambda model: model.class_known)
    fall = _fall(case, f"Accuracy on {what} ({count(images)} test images)", score, counted)
    if fall is None:
        return None
    status, sentence, _ = fall
    sentences = [sentence]
    if rates := case.rates(lambda model: model.mistaken_for_removed):
        sentences.append(
            f"Of the images of other classes {rates} are taken for it too: that is subtracted."
        )
    title, short = {
        "unclear": (f"No verdict: {case.before_name} hardly knew {what}", "no verdict"),
        "kept": (f"Not gone: {case.name} still knows {what}", "class known"),
        "partly": (f"Partly gone: {case.name} knows {what} in part", "class in part"),
        "gone": ("", "class gone"),
    }[status]
    return Verdict(status, title, short, sentences, f"the accuracy on {what}")


def _memory(case: _Case, memory: Memory) -> Verdict:
    name, before = case.name, None if case.before is None else case.before.memory
    clean = "" if case.after.backdoor_success is None else " without a trigger"
    samples, finding = f"the removed samples{clean}", memory.judged.finding
    sentences = [_memory_sentence(name, memory, clean), _against(case, memory)]
    found: tuple[Status, str, str]
    if finding == "remembers":
        found = ("kept", f"Not gone: {name} remembers {samples}", "remembers")
        if before and memory.judged.value < case.result.margins.kept * before.judged.value:
            title = f"Partly gone: {name} still remembers {samples}"
            found = ("partly", title, "remembers in part")
    elif finding == "over-forgets":
        title = f"{name} over-forgets: it treats {samples} worse than unseen ones"
        found = ("partly", title, "over-forgets")
        sentences.append(
            "Whoever compares them with unseen samples can tell which ones were removed."
        )
    elif doubt := _doubt(case, memory, before):
        title = "No verdict: too little to tell removed samples from unseen ones"
        found = ("unclear", title, "cannot be told")
        sentences.append(
            f"This tells little: {doubt}. It takes more removed samples, or a larger test set."
        )
    else:
        found = ("gone", "", "like unseen")
    status, title, short = found
    by = f"the losses of {count(memory.removed)} removed samples"
    return Verdict(status, title, short, sentences, by)


def _doubt(case: _Case, memory: Memory, before: Memory | None) -> str:
    """Say why it tells little that a model's removed samples look like unseen ones, if it does."""
    trained = f"{case.before_name}, which was trained on them"
    if before is None:
        return f"{trained}, was not measured"
    if before.judged.finding != "remembers":
        return f"{trained}, cannot be told apart either ({_apart(before.judged)})"
    reach = memory.judged.high / before.judged.value
    if reach < case.result.margins.kept:
        return ""
    apart = _apart(before.judged)
    return f"the interval reaches {100 * reach:.0f} % of the way to {trained} ({apart})"


def _apart(found: Interval) -> str:
    return f"{gap(found.value)}, 95 % interval {gap(found.low)} to {gap(found.high)}"


def _memory_sentence(name: str, memory: Memory, clean: str = "") -> str:
    """Say how the losses on removed samples compare with those on unseen ones."""
    left_out = ""
    if memory.left_out:
        left_out = f" ({count(memory.left_out)} more are of classes that the test set lacks)"
    return (
        f"Memory gap of {name}: {_apart(memory.gap)}, from {count(memory.removed)} removed samples"
        f"{clean}{left_out} and {count(memory.unseen)} unseen ones, class by class; it gets "
        f"{percent(memory.removed_right)} of the removed ones right and "
        f"{percent(memory.unseen_right)} of the unseen ones."
    )


def _against(case: _Case, memory: Memory) -> str:
    """Say what the gap is compared with, and what follows."""
    margin = f"with a margin of {case.result.margins.memory:g}"
    meaning = {
        "remembers": f"{case.name} remembers them",
        "over-forgets": f"{case.name} over-forgets them",
        "alike": "the removed samples cannot be told from unseen ones",
    }[memory.judged.finding]
    if memory.to_retrain is None:
        there = YARDSTICK in case.result.methods
        why = "retrain gave no model" if there else "the run has no retrain"
        return (
            f"Against 0, {margin}, {meaning}; {why}, so that removed samples "
            "which are easier or harder than unseen ones would look the same."
        )
    return (
        f"Against retrain, whose gap is {gap(case.result.retrain.get('memory_gap'))}, the "
        f"difference is {_apart(memory.to_retrain)}: {margin}, {meaning}."
    )


def _nothing_measured(name: str, result: Result) -> Verdict:
    """Say why no test could be made, what it would take, and how close it is to retrain."""
    if result.deletion.clean_samples:
        why = (
            "The test set has no two images of any class that was removed, so there is nothing to "
            "compare the removed samples with: it takes a test set with some of each class."
        )
    else:
        why = (
            "The removed samples are with their clients alone, so that their losses cannot be "
            "compared with those of unseen ones here, and no backdoor was planted."
        )
    ours, before = (one.get("jsd") for one in (result.methods[name], result.origin))
    if YARDSTICK not in result.methods:
        close = "The run has no retrain to compare with either: add it to unlearning.methods."
    elif ours is None or before is None:
        close = "retrain gave no model to compare with either."
    else:  # which is no proof
        close = (
            f"{name}'s predictions are {'closer' if ours < before else 'no closer'} to retrain's "
            f"than origin's are (JSD {decimal(ours)} against {decimal(before)})."
        )
    return Verdict("unclear", "No verdict: nothing to test", "no verdict", [why, close])


def _itself(model: Final, found: Sequence[Verdict]) -> Verdict:
    """Return the verdict on the yardstick: what tests find in it, the removed data did not teach.

    ``found`` is what they say of it.
    """
    sentences = [finding.sentences[0] for finding in found]
    if not found:
        sentences = ["Retraining never sees the removed data: it is the yardstick itself."]
    if not found and model.memory is not None:
        sentences += [
            _memory_sentence(YARDSTICK, model.memory),
            "It never saw them, so a gap says that they are easier or harder than unseen ones.",
        ]
    title = "Gone by construction: trained again without the removed data"
    return Verdict("gone", title, "yardstick", sentences)


def stopped(text: str | None) -> str:
    """End a text with a full stop."""
    text = (text or "").strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
