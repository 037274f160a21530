"""The verdict of an audit: do models that unlearned treat removed samples as oracles do?

An *oracle* is a federation that was trained without the removed samples, under another seed, some
of them also at another step size. Two oracles differ too: that is the noise that a difference
between unlearned models and oracles is measured by. Every model is reduced to a few numbers, one
for each question, and the models are what is counted: ten thousand samples of one model are still
one model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from goldfish.audits import AuditVerdict, AuditWord, Difference
from goldfish.errors import ConfigError
from goldfish.evaluation.attacks import LEAST_SPREAD, checked_sides

INTERVAL = 99
"""Percent, of every interval. An audit asks three questions: 95 each would accuse one in seven."""

LEAST_ORACLES = 4
"""With fewer oracles there is no noise to compare with."""

MEMORY_SHIFT = 0.05
"""A smaller mean shift on removed samples, in standard deviations between oracles, is none. Where
origin has a memory, and the share of it that must be visible is less, that is the limit."""

GENERAL_SHIFT = 0.25
"""The same on all samples."""

VISIBLE_SHIFT = 0.25
"""Where no origin says how large a memory is: one of this size must be visible."""

NOTHING_UNSEEN = (
    "No unseen sample has a class of the removed ones: there is nothing to compare them with. A "
    "test set that has these classes would do."
)

VISIBLE_SHARE, VISIBLE_OF_CLASS = 0.5, 0.2
"""The share of origin's memory that must be visible, and that where whole classes are gone: a model
that only guesses is half way between one that never saw a class and one that knows it."""

AS_SURE = 6.0
"""A model that is less sure of what it learned is less sure, too, that a sample is not of a class
that it never saw: by up to so many times as much. Retrained models that were trained shorter than
oracles were measured to show up to 3.2 times as much (docs/audit.md)."""

STRATA, IN_STRATUM = 5, 20
"""Unseen samples of a class are divided by how hard they are, into at most so many strata of at
least so many samples."""

ACCURACY_MARGIN = 1.0
"""Points of accuracy that may be lost before a model counts as damaged."""


@dataclass(frozen=True)
class Measured:
    """What an audit needs to know of one model."""

    removed: Tensor
    """Its margin on each removed sample."""
    unseen: Tensor
    """Its margin on each unseen sample."""
    accuracy: float
    """In percent, on the test set."""


def difference(
    unlearned: Sequence[float], oracles: Sequence[float], error: float = 0.0
) -> Difference:
    """Return the difference of the means with Student's 99 % interval.

    The spread is pooled over both sides; a single unlearned model adds none of its own, and the
    interval is then that in which a further oracle would be expected. ``error`` is a further
    standard error, which does not come from the models: that of the samples.
    """
    from scipy.special import stdtrit  # here, since importing scipy takes its time

    if len(unlearned) < 1 or len(oracles) < 2:
        raise ConfigError(
            f"A comparison needs at least 1 unlearned model and 2 oracles, got {len(unlearned)} "
            f"and {len(oracles)}."
        )
    ours = torch.tensor(unlearned, dtype=torch.float64)
    theirs = torch.tensor(oracles, dtype=torch.float64)
    freedom = len(ours) + len(theirs) - 2
    squares = sum(((side - side.mean()).square().sum().item() for side in (ours, theirs)), 0.0)
    of_models = math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
    quantile = float(stdtrit(freedom, 0.5 + INTERVAL / 200))
    half = quantile * math.hypot(of_models, error)
    value = (ours.mean() - theirs.mean()).item()
    return Difference(
        value=value,
        low=value - half,
        high=value + half,
        unlearned=len(ours),
        oracles=len(theirs),
        of_samples=quantile * error,
    )


def band(oracles: Sequence[float]) -> float:
    """Return within which distance of their mean a further oracle's number is expected (99 %)."""
    return difference([0.0], oracles).half


def mean_variance(oracles: Tensor) -> float:
    """Return the variance of a sample's margin between oracles, the mean over the samples."""
    return oracles.var(dim=0, correction=1).mean().item()


class Shifts(NamedTuple):
    """The shifts of a side's models from the oracles: two numbers for each model."""

    mean: Tensor
    """Over the samples."""
    square: Tensor
    """The mean of their squares."""

    @property
    def variance(self) -> float:
        """How much shifts vary from sample to sample, the mean over the models."""
        return (self.square - self.mean.square()).mean().item()


def shifts(
    unlearned: Tensor, oracles: Tensor, weights: Tensor | None = None, usual: float | None = None
) -> tuple[Shifts, Shifts]:
    """Return the shifts of both sides from the oracles.

    The shift of a sample is its margin minus the oracles' mean, in standard deviations between
    oracles; an oracle is compared with the mean of the others. A few oracles give a poor variance
    for one sample, so it is taken half from that sample and half from the mean over all samples;
    for an oracle's squares, which it would make smaller itself, from the others alone.
    ``weights`` weigh the samples, such as strata of unseen samples in the proportions of the
    removed ones. ``usual`` is that mean where there are more samples than these, elsewhere.
    """
    unlearned, oracles = checked_sides(unlearned, oracles, least=1)
    if weights is None:
        weights = torch.ones(unlearned.shape[1])
    share = weights.double() / weights.double().sum()
    usual = mean_variance(oracles) if usual is None else usual
    count, mean = len(oracles), oracles.mean(dim=0)
    squares = (oracles - mean).square().sum(dim=0)
    others = (count * mean - oracles) / (count - 1)
    of_others = squares - (oracles - mean) * (oracles - others)

    def spread(squares: Tensor, freedom: int) -> Tensor:
        return ((squares / max(1, freedom) + usual) / 2).sqrt().clamp_min(LEAST_SPREAD)

    usually = spread(squares, count - 1)
    ours, theirs = (unlearned - mean) / usually, (oracles - others) / usually
    alone = (oracles - others) / spread(of_others, count - 2)
    mine = Shifts((ours * share).sum(dim=1), (ours.square() * share).sum(dim=1))
    noise = Shifts((theirs * share).sum(dim=1), (alone.square() * share).sum(dim=1))
    return mine, noise


def of_classes(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Tell of each sample whether it is of one of these classes."""
    return torch.isin(labels, torch.tensor(classes, dtype=labels.dtype))


def comparable(removed_labels: Tensor, unseen_labels: Tensor, gone: Sequence[int] = ()) -> Tensor:
    """Tell of each removed sample whether it can be judged: there are unseen ones of its class.

    Classes that are ``gone`` as a whole need none.
    """
    return torch.isin(removed_labels, unseen_labels) | of_classes(removed_labels, gone)


def in_strata(labels: Tensor, ease: Tensor, unseen: Tensor) -> Tensor:
    """Return the number of each sample's stratum: :data:`STRATA` for each class, in order.

    Strata end at quantiles of how easy the unseen samples of a class are, which come last.
    """
    found = labels * STRATA
    for label in labels.unique().tolist():
        own = ease[len(labels) - len(unseen) :][unseen == label].double()
        parts = min(STRATA, len(own) // IN_STRATUM)
        if parts < 2:
            continue
        places = torch.arange(1, parts, dtype=torch.float64) / parts
        ends = own.quantile(places, interpolation="lower")
        there = labels == label
        found[there] += torch.bucketize(ease[there].double(), ends[ends < own.max()].unique())
    return found


def group_weights(removed: Tensor, unseen: Tensor, gone: Sequence[int] = ()) -> Tensor:
    """Weigh unseen samples so that each group has the weight that it has among the removed ones.

    A group is a class, or a stratum of one. Those that are ``gone`` weigh nothing. Where all
    removed samples are of such groups, all others weigh the same.
    """
    rest = removed[~of_classes(removed, gone)]
    if not len(rest):
        return (~of_classes(unseen, gone)).double()
    groups = int(max(rest.max(), unseen.max())) + 1
    wanted = torch.bincount(rest, minlength=groups).double()
    present = torch.bincount(unseen, minlength=groups).double()
    weights: Tensor = (wanted / present.clamp_min(1))[unseen]
    return weights


def effective(weights: Tensor) -> float:
    """Return of how many equal samples the mean is as exact as the weighed mean of these."""
    return (weights.sum().square() / weights.square().sum()).item()


def audit_verdict(
    unlearned: Sequence[Measured],
    oracles: Sequence[Measured],
    removed_labels: Tensor,
    unseen_labels: Tensor,
    origins: Sequence[Measured] = (),
    gone: Sequence[int] = (),
) -> AuditVerdict:
    """Say in words how models that unlearned compare with oracles.

    What removed samples show is told apart from what all samples show: only a shift of their
    margins beyond that of unseen samples of the same classes that are as hard is a memory, or the
    trace of too much forgetting. A model that is a little less sure of everything is *different*.
    Such a model loses most on easy samples; removed samples may be harder or easier than those of a
    test set. How hard a sample is says the mean of its margin over all models that are compared:
    over oracles alone it would be low by chance where their own mean, which is subtracted, is low.

    ``gone`` are the classes of which no sample remains. Of these, oracles know unseen samples as
    little as removed ones, and a model that still knows the class knows both: all of the shift on
    its removed samples is a memory.

    ``origins`` are models that were trained with the samples and unlearned nothing. Their memory is
    what there was to forget: where it cannot be seen, its absence elsewhere is no evidence.
    Removed samples of a class without unseen ones are left out, unless the class is gone.
    """
    if not unlearned or len(oracles) < LEAST_ORACLES:
        return AuditVerdict(
            word="not enough evidence",
            sentence=f"{_number(len(oracles), 'oracle')} cannot show how much retrained models "
            f"differ among themselves: {LEAST_ORACLES} are the least.",
        )
    known = comparable(removed_labels, unseen_labels, gone)
    if not bool(known.any()):
        return AuditVerdict(word="not enough evidence", sentence=NOTHING_UNSEEN)
    removed_labels = removed_labels[known]
    kept = kept_share(removed_labels, gone)
    labels = torch.cat([removed_labels, unseen_labels])
    gone_strata = [
        number for label in gone for number in range(label * STRATA, (label + 1) * STRATA)
    ]

    def compared(models: Sequence[Measured]) -> Shifted:
        removed = [
            torch.stack([model.removed[known] for model in side]) for side in (models, oracles)
        ]
        unseen = [torch.stack([model.unseen for model in side]) for side in (models, oracles)]
        ease = torch.cat([torch.cat(side).double().mean(dim=0) for side in (removed, unseen)])
        strata = in_strata(labels, ease, unseen_labels)
        of_removed, of_unseen = strata.split([len(removed_labels), len(unseen_labels)])
        weights = group_weights(of_removed, of_unseen, gone_strata)
        return Shifted(
            shifts(removed[0], removed[1]),
            shifts(unseen[0], unseen[1], weights),
            (len(removed_labels), effective(weights)),
            kept,
        )

    accuracy = difference([m.accuracy for m in unlearned], [m.accuracy for m in oracles])
    return verdict_on(compared(unlearned), accuracy, compared(origins) if origins else None)


def kept_share(removed_labels: Tensor, gone: Sequence[int]) -> float:
    """Return the share of the removed samples whose class is not gone."""
    return 1 - of_classes(removed_labels, gone).double().mean().item()


@dataclass(frozen=True)
class Shifted:
    """The shifts of models that unlearned (or of origins) and of oracles."""

    removed: tuple[Shifts, Shifts]
    """On removed samples: of the models, and of the oracles."""
    unseen: tuple[Shifts, Shifts]
    """On unseen samples, weighed by stratum as the removed ones."""
    samples: tuple[float, float]
    """How many removed and unseen samples these are."""
    kept: float = 1.0
    """The share of the removed samples whose class has remaining samples: the others are compared
    with oracles alone."""

    @property
    def beyond(self) -> tuple[list[float], list[float]]:
        """What removed samples show beyond unseen ones, one number a model, for both sides."""
        sides = zip(self.removed, self.unseen, strict=True)
        ours, theirs = [
            (removed.mean - self.kept * unseen.mean).tolist() for removed, unseen in sides
        ]
        return ours, theirs

    @property
    def error(self) -> float:
        """The standard error that which samples happen to be removed adds to what they show.

        Between oracles it is a part of their noise. Models of another kind treat one sample quite
        otherwise than the next: what their shifts vary beyond those of oracles is counted here.
        """
        squares = 0.0
        kinds = zip((self.removed, self.unseen), self.samples, (1.0, self.kept), strict=True)
        for (ours, theirs), count, share in kinds:
            squares += share**2 * max(0.0, ours.variance - theirs.variance) / count
        return math.sqrt(squares)


def verdict_on(shifted: Shifted, accuracy: Difference, origins: Shifted | None) -> AuditVerdict:
    """Say what shifts show: the part of :func:`audit_verdict` that needs no sample."""
    own, noise = shifted.beyond
    memory = difference(own, noise, shifted.error)
    on_all, of_oracles = (side.mean.tolist() for side in shifted.unseen)
    general = difference(on_all, of_oracles)
    before = None if origins is None else difference(*origins.beyond, origins.error)
    word, sentence = _judged(memory, general, accuracy, before, shifted.kept)
    return AuditVerdict(
        word=word,
        sentence=sentence,
        memory=memory,
        general=general,
        accuracy=accuracy,
        before=before,
        models=own,
        oracles=noise,
    )


def _judged(
    memory: Difference,
    general: Difference,
    accuracy: Difference,
    before: Difference | None,
    kept: float,
) -> tuple[AuditWord, str]:
    told = f"{memory.value:+.2f} ({INTERVAL} % interval {memory.low:+.2f} to {memory.high:+.2f})"
    noise = f"the noise of {_number(memory.oracles, 'oracle')}"
    share = VISIBLE_SHARE if kept == 1 else VISIBLE_OF_CLASS
    least = MEMORY_SHIFT
    if before is not None and not _hardly_known(before):
        least = min(least, share * before.value)
    what = "removed samples" if kept else "samples of the removed classes"
    sure = "less" if general.value < 0 else "more"
    lost = ""
    if accuracy.beyond_chance and accuracy.value <= -ACCURACY_MARGIN:
        lost = (
            f"Accuracy is {-accuracy.value:.2f} points below that of retrained models "
            f"({INTERVAL} % interval {-accuracy.high:.2f} to {-accuracy.low:.2f})."
        )
    if kept < 1 and memory.beyond_chance and _less_sure(memory, general):
        word: AuditWord = "different" if general.beyond_chance else "not enough evidence"
        return "damaged" if lost else word, (
            f"{lost} The model is less sure than retrained ones both of samples that it learned, "
            f"by {-general.value:.2f} standard deviations of the margins, and that {what} are not "
            f"of their classes, by {told}. It cannot be told whether it remembers them."
        ).strip()
    if memory.beyond_chance and memory.value >= least:
        part = ""
        if before is not None and before.low > 0 and before != memory:
            left = 100 * memory.value / before.value
            part = f" This is {left:.0f} % of what origin remembers."
        beyond = " more than margins on unseen samples" if kept == 1 else ""
        return "remembers", (
            f"Margins on {what} are above those of retrained models by {told} standard "
            f"deviations{beyond}: outside of {noise}.{part}"
        )
    worse = ""
    if memory.beyond_chance and memory.value <= -least:
        worse = (
            f"Removed samples are treated worse than unseen ones, by {told} standard deviations of "
            "their margins: that itself tells who was removed."
            if kept == 1
            else f"The model is surer than retrained ones that {what} are not of their classes, by "
            f"{told} standard deviations of the margins. Longer training does that as well."
        )
    if lost:
        return "damaged", f"{lost} {worse}".strip()
    if worse:
        return "over-forgets" if kept == 1 else "different", worse
    unjudged = _unjudged(memory, before, share)
    if general.beyond_chance and abs(general.value) >= GENERAL_SHIFT:
        right = ""
        if accuracy.beyond_chance:
            side = "below" if accuracy.value < 0 else "above"
            right = f" Its accuracy is {abs(accuracy.value):.2f} points {side} theirs."
        beside = (
            f"It cannot be told whether it remembers. {unjudged}"
            if unjudged
            else f"{what.capitalize()} do not stand out."
        )
        those = "all samples" if kept else "samples of the remaining classes"
        return "different", (
            f"The model is {sure} sure of {those} than retrained ones, by "
            f"{abs(general.value):.2f} standard deviations of the margins ({INTERVAL} % interval "
            f"{general.low:+.2f} to {general.high:+.2f}).{right} {beside}"
        )
    if unjudged:
        return "not enough evidence", unjudged
    alike = f"Indistinguishable from retraining within {noise}"
    if memory.beyond_chance:
        return "indistinguishable", (
            f"{alike}, but for {told} on {what}: less than counts ({least:.2f})."
        )
    return "indistinguishable", f"{alike}."


def _less_sure(memory: Difference, general: Difference) -> bool:
    """Tell whether a shift on classes that are gone is one of how sure the model is of everything.

    The two go opposite ways: a model that is less sure has lower margins on what it learned, and
    higher ones on a class that it never saw.
    """
    return general.value <= -GENERAL_SHIFT and 0 < memory.value <= -AS_SURE * general.value


def _hardly_known(before: Difference) -> bool:
    """Tell whether even origin, which was trained on the removed samples, shows no memory."""
    return before.low <= 0 or before.value < MEMORY_SHIFT


def _unjudged(memory: Difference, before: Difference | None, share: float) -> str:
    """Say why a memory could not be seen, and what would show it; nothing where it could."""
    visible = VISIBLE_SHIFT if before is None else share * before.value
    if before is not None and _hardly_known(before):
        told = (
            "Even origin, which was trained on the removed samples, can hardly be told from models "
            f"that never saw them ({before.value:+.2f}, {INTERVAL} % interval {before.low:+.2f} to "
            f"{before.high:+.2f})."
        )
        if before.high < MEMORY_SHIFT:
            return f"{told} There is hardly anything to forget: more models would not change that."
        if before.value < MEMORY_SHIFT and memory.unlearned > 1:
            return f"{told} More models or more removed samples may show it."
    elif memory.half > visible:
        told = (
            f"A memory of {visible:.2f} standard deviations would not be seen: the interval is "
            f"{memory.low:+.2f} to {memory.high:+.2f}."
        )
    else:
        return ""
    if memory.unlearned == 1:
        return (
            f"{told} There is one model that unlearned: more oracles help a little, more removed "
            "samples more."
        )
    both = [memory, *([] if before is None else [before])]
    room = visible**2 - max(own.of_samples for own in both) ** 2
    if room <= 0:
        return f"{told} More removed samples would show it, more models would not."
    widest = max(own.half**2 - own.of_samples**2 for own in both)
    error = 1 / memory.unlearned + 1 / memory.oracles
    wanted = math.ceil(2 / error * widest / room)
    return f"{told} About {wanted} unlearned models and as many oracles would show it."


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
