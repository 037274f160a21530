"""The audit's verdict on made models whose answer is known, and the attacks under chance."""

from __future__ import annotations

import pytest
import torch

from goldfish.audits import AuditVerdict
from goldfish.errors import ConfigError, DataError, DivergenceError
from goldfish.evaluation.attacks import (
    epsilon,
    gaussian_distance,
    klom,
    likelihood_ratios,
    roc,
    true_positives,
)
from goldfish.evaluation.audit import (
    Measured,
    Shifted,
    Shifts,
    audit_verdict,
    difference,
    shifts,
    verdict_on,
)

REMOVED, UNSEEN = 60, 300
LABELS = torch.arange(UNSEEN) % 10


def made(
    count: int,
    seed: int,
    *,
    removed: float = 0.0,
    everything: float = 0.0,
    accuracy: float = 98.0,
) -> list[Measured]:
    """Return models: each sample has a difficulty, each model a level of its own, and noise."""
    difficulty = 6 + 2 * torch.randn(REMOVED + UNSEEN, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    models = []
    for _ in range(count):
        level = 0.3 * torch.randn(1, generator=generator) + everything
        margins = difficulty + level + torch.randn(REMOVED + UNSEEN, generator=generator)
        own = accuracy + 0.3 * torch.randn(1, generator=generator).item()
        models.append(Measured(margins[:REMOVED] + removed, margins[REMOVED:], own))
    return models


def judged(unlearned: list[Measured], oracles: list[Measured]) -> AuditVerdict:
    """Return the verdict; the removed samples have the classes of the first unseen ones."""
    origins = made(len(oracles), 9, removed=1.0)
    return audit_verdict(unlearned, oracles, LABELS[:REMOVED], LABELS, origins)


@pytest.mark.parametrize("models", [1, 4, 8])
def test_known_answers(models: int) -> None:
    """Each kind of model gets its word, whether one or several unlearned."""
    oracles = made(8, 1)
    answers = {
        "remembers": made(models, 2, removed=1.0),
        "over-forgets": made(models, 3, removed=-1.0),
        "damaged": made(models, 4, everything=-2.0, accuracy=90.0),
        "different": made(models, 5, everything=-2.0),
    }
    for word, unlearned in answers.items():
        assert judged(unlearned, oracles).word == word
    gone = judged(made(models, 7), oracles)
    assert gone.word == "indistinguishable"
    assert "8 oracles" in gone.sentence


@pytest.mark.parametrize(
    ("models", "oracles", "indistinguishable"), [(1, 8, 40), (1, 24, 85), (8, 8, 95)]
)
def test_retrained_models_are_hardly_ever_accused(
    models: int, oracles: int, indistinguishable: int
) -> None:
    """Fresh oracles against oracles, a hundred times: three questions with 99 % intervals.

    About 2 of 100 are accused of anything (``docs/audit.md``, of a thousand); by chance it may be
    twice as many. For one model beside few oracles there is often not enough evidence.
    """
    words = [judged(made(models, 10**6 + n), made(oracles, 2 * 10**6 + n)).word for n in range(100)]
    assert words.count("indistinguishable") >= indistinguishable
    assert words.count("indistinguishable") + words.count("not enough evidence") >= 96


@pytest.mark.parametrize(
    ("shift", "origin", "word", "said"),
    [
        (-1.0, 0.2, "different", "0.10 standard deviations would not be seen"),
        (-1.0, 0.2, "different", "About 21 unlearned models"),
        (-1.0, 0.12, "different", "Even origin"),
        (-1.0, 0.12, "different", "About 57 unlearned models"),
        (-1.0, 0.04, "different", "more removed samples may show it"),
        (-1.0, -0.12, "different", "more models would not change that"),
        (+1.0, 0.4, "different", "Removed samples do not stand out."),
        (-0.2, 0.4, "indistinguishable", "within the noise of 8 oracles"),
        (-0.2, 0.12, "not enough evidence", "About 57 unlearned models"),
    ],
)
def test_what_all_samples_show_is_told_where_a_memory_cannot_be_seen(
    shift: float, origin: float, word: str, said: str
) -> None:
    """A general shift is *different*, also where memory is not judged, and says what would do it.

    Eight numbers a side, +-0.1 around their mean: the pooled variance is 16 * 0.01 / 14, the
    standard error sqrt(0.011429 * (1/8 + 1/8)) = 0.05345, and with Student's t(14, 0.995) = 2.9768
    half of an interval is 0.1591. So the shift of all samples, -1, has the interval -1.16 to -0.84;
    that of -0.2 is beyond its interval, and too small to count. Of an origin of 0.2 half is 0.1,
    which 8 * (0.1591 / 0.1)^2 = 20.3 models would show; of 0.12 half is 0.06, and
    8 * (0.1591 / 0.06)^2 = 56.3 would. 0.04 is no memory; the truth may be up to
    0.04 + 0.16, so that more models may show one. For an origin of -0.12 it is at most 0.04, which
    is none.
    """
    spread = torch.tensor([-0.1, 0.1] * 4, dtype=torch.float64)

    def of(means: torch.Tensor) -> Shifts:
        return Shifts(means, means.square())

    def shifted(memory: float) -> Shifted:
        removed = of(shift + memory + 2 * spread), of(2 * spread)
        return Shifted(removed, (of(shift + spread), of(spread)), (60, 300))

    accuracy = difference([97.2, 97.4] * 4, [97.9, 98.1] * 4)
    found = verdict_on(shifted(0.0), accuracy, shifted(origin))
    assert found.word == word
    assert said in found.sentence
    if word == "different":
        assert "1.00 standard deviations" in found.sentence
        assert f"{shift - 0.16:+.2f} to {shift + 0.16:+.2f}" in found.sentence
        assert "0.70 points below" in found.sentence
        assert ("cannot be told whether it remembers" in found.sentence) == (origin < 0.4)


@pytest.mark.parametrize(
    ("memory", "origin", "word"),
    [
        (0.0, 0.08, "indistinguishable"),
        (0.03, 0.08, "indistinguishable"),
        (0.045, 0.08, "remembers"),
        (-0.045, 0.08, "over-forgets"),
        (0.045, 0.04, "not enough evidence"),
        (0.08, 0.08, "remembers"),
    ],
)
def test_half_of_a_small_memory_of_origin_counts(memory: float, origin: float, word: str) -> None:
    """Where origin remembers by 0.08, 0.04 is a memory; a model that shows none is let go.

    Eight numbers a side, +-0.01 around their mean: half of an interval is 0.0159, a tenth of that
    above. Origin's 0.08 is beyond it and above 0.05: origin remembers, and half of that is 0.04. An
    origin of 0.04 has no memory that counts, and nothing can be said of what came from it.
    """
    spread = torch.tensor([-0.01, 0.01] * 4, dtype=torch.float64)

    def shifted(memory: float) -> Shifted:
        sides = [Shifts(means, means.square()) for means in (memory + 2 * spread, 2 * spread)]
        unseen = Shifts(spread, spread.square())
        return Shifted((sides[0], sides[1]), (unseen, unseen), (60, 300))

    alike = difference([98.0, 98.2] * 4, [97.9, 98.1] * 4)
    assert verdict_on(shifted(memory), alike, shifted(origin)).word == word


def test_removed_samples_of_a_class_without_unseen_ones_are_left_out() -> None:
    """Half of the removed samples are of a class that is in no test, and models know it better.

    Whether that is a memory nobody can tell: the verdict is that on the other half.
    """
    labels = LABELS[:REMOVED].clone()
    labels[::2] = 10
    oracles, origins = made(8, 1), made(8, 9, removed=1.0)
    surer = [Measured(m.removed + 3 * (labels == 10), m.unseen, m.accuracy) for m in made(8, 7)]
    assert audit_verdict(surer, oracles, labels, LABELS, origins).word == "indistinguishable"


def of_a_class(
    count: int, seed: int, *, knows: float = 0.0, sure: float = 0.0, accuracy: float = 98.0
) -> list[Measured]:
    """Return models after class 3 was removed: 14 below the others, or ``knows`` of that less.

    A model that is less ``sure`` is so of what it learned, and of what a 3 is not.
    """
    lift, threes = 14 * (knows - 1) - sure, (LABELS == 3).double()
    return [
        Measured(m.removed + lift, m.unseen + lift * threes + sure * (1 - threes), m.accuracy)
        for m in made(count, seed, accuracy=accuracy)
    ]


@pytest.mark.parametrize(
    ("model", "word", "part"),
    [
        ({"knows": 1.0}, "remembers", "of what origin remembers"),
        ({"knows": 0.3}, "remembers", "Margins on samples of the removed classes"),
        ({}, "indistinguishable", "within the noise of 8 oracles"),
        ({"knows": -0.3}, "different", "Longer training does that as well."),
        ({"sure": -2.0}, "different", "It cannot be told whether it remembers them."),
        ({"sure": 2.0}, "different", "surer than retrained ones that samples of the"),
        ({"sure": -2.0, "accuracy": 60.0}, "damaged", "It cannot be told whether"),
        ({"knows": 1.0, "sure": -0.1}, "remembers", "of what origin remembers"),
    ],
)
def test_a_class_that_is_gone_is_compared_with_oracles_alone(
    model: dict[str, float], word: str, part: str
) -> None:
    """An untouched model knows unseen samples of the class as well as removed ones.

    Beside unseen samples of the class nothing would stand out: the model that did nothing was
    called indistinguishable.
    """
    removed = torch.full((REMOVED,), 3)
    oracles, origins = of_a_class(8, 1), of_a_class(8, 9, knows=1.0)
    found = audit_verdict(of_a_class(8, 7, **model), oracles, removed, LABELS, origins, [3])
    assert (found.word, part in found.sentence) == (word, True), found.sentence


def test_half_of_the_removed_samples_are_of_a_class_that_is_gone() -> None:
    """They remember if either half does; unseen samples count as often as the other half does."""
    removed = LABELS[:REMOVED].clone()
    removed[::2] = 3
    gone = (removed == 3).double()

    def models(count: int, seed: int, threes: float = 0.0, others: float = 0.0) -> list[Measured]:
        return [
            Measured(m.removed + gone * threes + (1 - gone) * others, m.unseen, m.accuracy)
            for m in made(count, seed)
        ]

    oracles, origins = models(8, 1), models(8, 9, threes=3.0, others=2.0)
    for own, word in (((0, 0), "indistinguishable"), ((3, 0), "remembers"), ((0, 2), "remembers")):
        found = audit_verdict(models(8, 7, *own), oracles, removed, LABELS, origins, [3])
        assert found.word == word, found.sentence


def test_what_models_of_another_kind_show_by_chance_is_no_verdict_on_removed_samples() -> None:
    """Models that are less sure of everything, of each sample by an amount of its own.

    The removed samples happen to be among those that they are least sure of. Without the error of
    the samples every third of them would be accused.
    """
    words = []
    for seed in range(100):
        own = 2 * torch.randn(REMOVED + UNSEEN, generator=torch.Generator().manual_seed(seed))
        other = [
            Measured(m.removed + own[:REMOVED], m.unseen + own[REMOVED:], m.accuracy)
            for m in made(4, 10**6 + seed, everything=-2.0)
        ]
        words.append(judged(other, made(8, 2 * 10**6 + seed)).word)
    assert words.count("different") >= 95


def test_too_few_oracles_are_not_evidence() -> None:
    """One oracle shows no noise; four that differ widely say how many would be needed.

    Beside one model that unlearned, no number of oracles would be enough.
    """
    assert judged(made(4, 2), made(1, 1)).word == "not enough evidence"
    wide = [Measured(m.removed + 4 * (n % 2), m.unseen, 98.0) for n, m in enumerate(made(4, 1))]
    for models, words in ((2, "as many oracles would show it"), (1, "more removed samples more")):
        found = audit_verdict(made(models, 2), wide, LABELS[:REMOVED], LABELS)
        assert found.word == "not enough evidence"
        assert words in found.sentence


def test_without_a_memory_to_forget_its_absence_is_no_evidence() -> None:
    """An origin that cannot be told from oracles: nor could a method that did nothing."""
    found = audit_verdict(made(8, 2), made(8, 1), LABELS[:REMOVED], LABELS, made(8, 3))
    assert found.word == "not enough evidence"
    assert "Even origin" in found.sentence


def test_a_shift_of_all_samples_alike_is_no_memory() -> None:
    """Less sure of everything: the removed samples do not stand out from the unseen ones."""
    found = judged(made(8, 5, everything=-2.0), made(8, 1))
    assert found.memory is not None
    assert found.general is not None
    assert abs(found.memory.value) < 0.25
    assert found.general.high < -0.5


def test_the_likelihood_ratio_attack_finds_what_is_there_and_nothing_else() -> None:
    """A shift of 3 standard deviations is found at 1 % false positives; no shift is not."""
    generator = torch.Generator().manual_seed(0)
    oracles = torch.randn(32, 200, generator=generator)
    same, shifted = torch.randn(32, 200, generator=generator), 3 + torch.randn(32, 200)
    found = true_positives(*likelihood_ratios(shifted, oracles), 0.01)
    assert found.low > 0.5
    chance = true_positives(*likelihood_ratios(same, oracles), 0.01)
    assert chance.rate < 0.03
    false, true = roc(*likelihood_ratios(shifted, oracles))
    ends = [float(rates[end]) for rates in (false, true) for end in (0, -1)]
    assert ends == [0, 1, 0, 1]
    assert bool((true.diff() >= 0).all())


def test_distances_are_small_under_chance_and_grow_with_the_shift() -> None:
    """With 32 models a side: a shift of 1 standard deviation gives about 1, none about 0.1."""
    generator = torch.Generator().manual_seed(0)
    oracles = torch.randn(32, 400, generator=generator)
    means = [
        gaussian_distance(shift + torch.randn(32, 400, generator=generator), oracles).mean().item()
        for shift in (0.0, 1.0, 2.0)
    ]
    assert means[0] < 0.2 < 0.9 < means[1] < 1.6 < 3.5 < means[2]


def test_the_binned_distance_is_blind_with_few_models() -> None:
    """Between equal sides it should be 0: with 20 models it is far from it, with 1,000 near."""
    generator = torch.Generator().manual_seed(0)
    few, many = (
        klom(*torch.randn(2, models, 50, generator=generator)).mean().item()
        for models in (20, 1000)
    )
    assert many < 0.05 < 5 * many < few


def test_what_is_refused() -> None:
    """Too few models, other samples on the other side, numbers that are not finite."""
    with pytest.raises(DataError, match="at least 3 oracle models, got 2"):
        likelihood_ratios(torch.zeros(3, 4), torch.zeros(2, 4))
    with pytest.raises(ConfigError, match="same samples, got 4 and 5"):
        gaussian_distance(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(ConfigError, match=r"\(models, samples\), not \(4,\)"):
        epsilon(torch.zeros(4), torch.zeros(3, 4))
    with pytest.raises(DivergenceError, match="oracle models are not finite"):
        shifts(torch.zeros(3, 4), torch.full((3, 4), torch.nan))


def test_that_removed_samples_are_harder_than_unseen_ones_is_no_memory() -> None:
    """A model of another kind has 0.7 times the oracles' margins: easy samples lose more.

    Removed samples are harder than unseen ones: 0.5 lower, for oracles too. So they lose 0.3 * 0.5
    less, which looks like a memory beside all unseen samples of their classes. Beside those that
    are as hard they do not stand out.
    """
    count, unseen = 2000, 10000
    ease = 6 + 2 * torch.randn(count + unseen, generator=torch.Generator().manual_seed(0))
    ease[:count] -= 0.5

    def models(number: int, seed: int, slope: float) -> list[Measured]:
        generator = torch.Generator().manual_seed(seed)
        found: list[Measured] = []
        for _ in range(number):
            own = ease - slope * ease + torch.randn(count + unseen, generator=generator)
            found.append(Measured(own[:count], own[count:], 98.0 + 0.3 * len(found)))
        return found

    labels = torch.arange(unseen) % 10
    oracles = models(16, 1, 0.0)
    found = audit_verdict(models(16, 2, 0.3), oracles, labels[:count], labels, models(16, 3, 0.0))
    assert found.word == "different"
    assert found.memory is not None
    assert abs(found.memory.value) < 0.05
    many = torch.arange(unseen) % 500  # so many classes that each is one stratum
    misled = audit_verdict(models(16, 2, 0.3), oracles, many[:count], many, models(16, 3, 0.0))
    assert misled.word == "remembers"


@pytest.mark.parametrize("away", [-4.0, 4.0])
def test_retrained_models_do_not_stand_out_where_removed_samples_are_much_harder(
    away: float,
) -> None:
    """Removed samples are harder, or easier, by two standard deviations of how hard samples are.

    Beside unseen samples that are as hard for the oracles, whose mean is subtracted, retrained
    models would lie above or below them by chance.
    """
    count, unseen = 1000, 5000
    ease = 6 + 2 * torch.randn(count + unseen, generator=torch.Generator().manual_seed(0))
    ease[:count] += away

    def models(number: int, seed: int, knows: float = 0.0) -> list[Measured]:
        generator = torch.Generator().manual_seed(seed)
        found: list[Measured] = []
        for _ in range(number):
            own = ease + torch.randn(count + unseen, generator=generator)
            found.append(Measured(own[:count] + knows, own[count:], 98.0 + 0.1 * len(found)))
        return found

    labels = torch.arange(unseen) % 10
    origins = models(8, 99, 0.3)
    for seed in range(1, 11, 2):
        oracles = models(8, seed)
        found = audit_verdict(models(8, seed + 1), oracles, labels[:count], labels, origins)
        assert found.word == "indistinguishable"
        kept = audit_verdict(origins, oracles, labels[:count], labels, origins)
        assert kept.word == "remembers"
