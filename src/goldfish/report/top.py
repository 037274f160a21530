"""The top of the page in words: what was asked, whether it is gone, and at what price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from goldfish.audits import Audit, AuditVerdict
from goldfish.report.formatting import (
    NOTHING,
    count,
    listing,
    percent,
    plural,
    seconds,
    wilson,
)
from goldfish.report.verdict import (
    AUDIT_STATUS,
    RANKS,
    Status,
    Verdict,
    exceeding,
    stopped,
    unhonoured,
    verdicts,
)
from goldfish.results import (
    BY_KEY,
    METRICS,
    ORIGIN,
    YARDSTICK,
    MethodResult,
    Metric,
    Result,
)

MAX_SEEDS = 5
"""The numbers of more seeds than this are told by their lowest and their highest."""
ABOUT = 1.05
"""Times that differ by less than this factor count as the same."""


@dataclass(frozen=True)
class Headline:
    """The top of the page: what was asked, whether it is gone, and at what price."""

    status: Status
    verdict: str
    asked: str
    sentences: Sequence[str]


def headline(result: Result, audit: Audit | None = None) -> Headline:
    """Say what was asked and whether the numbers show it gone; retrain is the yardstick.

    Where an audit has a verdict on the method too, the worse of the two gives the tone. Where the
    numbers of one model tell nothing, the audit alone is the title.
    """
    name, asked = result.subject, asked_sentence(result)
    if name is None:
        sentence = "No unlearning method ran: these are the numbers of the original model alone."
        return Headline("unclear", "Nothing has been removed yet", asked, [sentence])
    judged, method = verdicts(result), result.methods[name]
    sentences = list(judged[name].sentences)
    if method.final is not None:
        sentences += [*exceeding(name, result), _accuracy(name, result), _cost(name, result)]
        sentences += _speed(name, result)
        if result.seeds:
            sentences.append(_seeds(name, result))
    sentences += [stopped(note) for note in method.notes]
    sentences += _others(name, judged, result, {} if audit is None else audit.methods)
    status, title = judged[name].status, judged[name].title + _scatter(name, result)
    if audit is not None and (own := audit.methods.get(name)) is not None:
        told = AUDIT_STATUS[own.word]
        alone = status == "unclear" and told != "unclear"
        title = f"Audit of {name}: {own.word}" if alone else f"{title}; audit: {own.word}"
        status = max(status, told, key=lambda one: RANKS[one])
        sentences.insert(0, f"Audit of {name} with {audit.models} oracles: {own.sentence}")
    return Headline(status, title, asked, sentences)


def asked_sentence(result: Result) -> str:
    """Return the request in one sentence."""
    deletion, requests = result.deletion, result.deletion.requests
    if not requests:
        return "Asked: nothing; no deletion was filed."
    if deletion.removed_samples is None:
        asked = [request.samples for request in requests if request.samples is not None]
        known = len(asked) == len(requests)
        amount = plural(sum(asked), "sample") if known else "as they hold it"
    else:
        amount = plural(deletion.removed_samples, "sample")
        amount += f" ({deletion.rate_percent or 0.0:.1f} % of the training data)"
    clients = list(dict.fromkeys(request.client_id for request in requests))
    who = listing(clients) if len(clients) <= 4 else f"{len(clients)} clients"
    kinds = {request.kind for request in requests}
    if kinds == {"client"}:
        return f"Asked: remove everything that {who} contributed, {amount}."
    if kinds == {"class"}:
        labels = sorted({str(request.class_label) for request in requests})
        what = f"class {labels[0]}" if len(labels) == 1 else f"classes {listing(labels)}"
        return f"Asked: remove {what} from the data of {who}, {amount}."
    return f"Asked: remove {amount} of {who}."


def image_counts(result: Result) -> str:
    """Say of how many test images the percentages are."""
    images = result.test_images
    rest = " of the remaining classes" if images.removed_class else ""
    return " ".join(
        f"{what}: % of {count(known)} test images{more}."
        for what, known, more in (
            ("Accuracy", images.accuracy, rest),
            ("Removed class", images.removed_class, ""),
            ("Backdoor", images.backdoor, " with the trigger"),
        )
        if known
    )


def _accuracy(name: str, result: Result) -> str:
    images = result.test_images.accuracy
    few = images < result.margins.few_images and not result.seeds

    def shown(key: str, value: float) -> str:
        low, high = wilson(value, images) if few else (0.0, 0.0)
        return f"{percent(value)} ({key}{f'; {low:.1f} to {high:.1f}' if few else ''})"

    parts = [
        shown(key, value)
        for key in dict.fromkeys((ORIGIN, name, YARDSTICK))
        if key in result.methods and (value := result.methods[key].get("accuracy")) is not None
    ]
    rest = " of the remaining classes" if result.test_images.removed_class else ""
    where = f"{count(images)} clean test images{rest}{', with 95 % intervals' if few else ''}"
    return f"Accuracy on {where}: {', '.join(parts)}."


def _seeds(name: str, result: Result) -> str:
    """Say that numbers are means, and what each seed gave."""
    found = [
        f"{metric.name.lower()} {by_seed(metric, result.methods[name])}"
        for metric in METRICS
        if metric.unit == "percent" and by_seed(metric, result.methods[name])
    ]
    each = f" {name} by seed: {'; '.join(found)}." if found else ""
    return f"All numbers are means over {len(result.seeds)} seeds.{each}"


def _scatter(name: str, result: Result) -> str:
    """End the title with what the seeds gave where they differ so much that a mean hides it."""
    method = result.methods[name]
    for key, most in (
        ("backdoor_success", result.margins.signal),
        ("accuracy", result.margins.collapse),
    ):
        values = [v for v in method.spread[key].values if v is not None] if method.spread else []
        if values and max(values) - min(values) > most:
            metric = BY_KEY[key]
            return f"; the seeds differ: {metric.name.lower()} {by_seed(metric, method, 0)}"
    return ""


def by_seed(metric: Metric, method: MethodResult, digits: int = 1) -> str:
    """Return what each seed gave, in percent: all of them, or of many the lowest and highest."""
    values = method.spread[metric.key].values if metric.key in method.spread else []
    texts = [NOTHING if value is None else f"{value:.{digits}f}" for value in values]
    known = [value for value in values if value is not None]
    if len(known) > MAX_SEEDS:
        return f"{min(known):.{digits}f} to {max(known):.{digits}f} %"
    return f"{listing(texts)} %" if known else ""


def _cost(name: str, result: Result) -> str:
    """Say what it cost; the rounds only where the two had not the same number of them."""
    base = result.retrain if name != YARDSTICK else MethodResult()
    differ = base.final is not None and len(result.methods[name].rounds) != len(base.rounds)

    def spent(method: MethodResult) -> str:
        text = f"{seconds(method.get('seconds'))} and {count(method.get('steps'))} gradient steps"
        return f"{text} in {plural(len(method.rounds), 'round')}" if differ else text

    theirs = "" if base.final is None else f"; retrain took {spent(base)}"
    return f"{name} took {spent(result.methods[name])}{theirs}."


def reached(method: MethodResult, result: Result) -> str:
    """Say in how many of the seeds a method that missed the quality reached it; often none.

    Of those seeds that can tell: where origin itself would pass there is no time to quality.
    """
    known = _times(method)
    return f"{known} of {_times(result.retrain)}" if known else ""


def tested(result: Result) -> str:
    """Say how many of the seeds can tell a time to quality, unless it is all of them."""
    known = _times(result.retrain)  # it reaches its own quality wherever that can be told
    return f"{known} of {len(result.seeds)}" if 0 < known < len(result.seeds) else ""


def _times(method: MethodResult) -> int:
    """Return in how many seeds a method has a time to quality."""
    values = method.spread["seconds_to_quality"].values if method.spread else ()
    return sum(value is not None for value in values)


def _speed(name: str, result: Result) -> Iterator[str]:
    """Say how soon the method was as good as retrain ended up, and whether that is sooner."""
    method, factor = result.methods[name], result.methods[name].speed_up
    if name == YARDSTICK:
        return
    if method.missed:
        if some := reached(method, result):
            can = " that can tell it" if tested(result) else ""
            yield f"{name} reached retrain's quality in {some} seeds{can} only."
        else:
            rounds = plural(len(method.rounds), "round")
            yield f"{name} did not reach retrain's quality in its {rounds}."
    elif factor:
        word, times = ("sooner", factor) if factor >= 1 else ("later", 1 / factor)
        how = "about as soon as" if times < ABOUT else f"{times:.1f} times {word} than"
        both = (seconds(one.seconds_to_quality) for one in (method, result.retrain))
        means = (
            f"; means over the {some} seeds that can tell it" if (some := tested(result)) else ""
        )
        yield (
            f"{name} reached retrain's quality {how} retrain itself "
            f"({' against '.join(both)}{means})."
        )


def _others(
    name: str, judged: Mapping[str, Verdict], result: Result, audited: Mapping[str, AuditVerdict]
) -> Iterator[str]:
    """Say what is known of the other methods; what an audit found stands below the headline."""
    others = [key for key in result.methods if key not in (ORIGIN, name)]
    told: dict[str, list[str]] = {}
    for key in others:
        yield from unhonoured(key, result)
        if key != YARDSTICK and not (key in audited and judged[key].status == "unclear"):
            told.setdefault(judged[key].short, []).append(key)
    if told:
        groups = [f"{listing(names)}: {short}" for short, names in told.items()]
        yield f"Verdicts on the other methods: {'; '.join(groups)}."
    success = {key: percent(result.methods[key].get("backdoor_success")) for key in others}
    known = [f"{k} {v}" for k, v in success.items() if v != NOTHING and k != YARDSTICK]
    if known:
        yield f"Backdoor success of the other methods: {listing(known)}."
    for key in others:
        yield from exceeding(key, result)
        if result.methods[key].diverged:
            yield f"{key} diverged: {stopped(result.methods[key].diverged)}"
