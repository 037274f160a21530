"""Attacks, one sample at a time, on many models that unlearned and many that never saw it.

A side is a matrix of margins: a row for each model, a column for each sample. The *unlearned*
models were trained with the samples and unlearned them; the *oracles* were retrained without them.
What tells the two sides apart is what unlearning left behind.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from goldfish.audits import Rate
from goldfish.errors import ConfigError, DataError, DivergenceError
from goldfish.evaluation.memory import by_class
from goldfish.evaluation.scores import checked_labels, checked_logits

LEAST_SPREAD = 1e-3
"""A fitted standard deviation is at least this: models of saturated outputs hardly differ."""

KLOM_BINS = 20
KLOM_MODELS = 100
"""With fewer models a side the binned divergence of :func:`klom` is mostly noise."""

CHANCE = 1 / 12
"""The variance of the share of unseen samples that lie below one more of them: it is uniform."""

ROC_POINTS = 40
AT_ONCE = 500
"""Samples whose epsilon is computed at a time: it compares every model with every other."""


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's margin: the log-odds ``ln(p / (1 - p))`` of its label's probability.

    It is the label's logit minus the log-sum-exp of the others, without a quotient that overflows.
    """
    logits = checked_logits(logits)
    if logits.shape[1] < 2:
        raise DataError("A margin needs at least 2 classes.")
    column = checked_labels(labels, *logits.shape).unsqueeze(1)
    others = logits.scatter(1, column, -torch.inf)
    return (logits.gather(1, column).squeeze(1) - others.logsumexp(dim=1)).double()


def gaussian_distance(unlearned: Tensor, oracles: Tensor) -> Tensor:
    """Return for each sample how far its margins on the two sides are apart, at least 0.

    A normal distribution is fitted to each side; the distance is Jeffreys' divergence, the sum of
    the two Kullback-Leibler divergences. With equal spreads it is the squared shift in standard
    deviations.
    """
    unlearned, oracles = checked_sides(unlearned, oracles, least=2)
    mean_u, spread_u = _fitted(unlearned)
    mean_o, spread_o = _fitted(oracles)
    squared = (mean_u - mean_o).square()
    ours = (spread_u.square() + squared) / spread_o.square()
    theirs = (spread_o.square() + squared) / spread_u.square()
    return (ours + theirs) / 2 - 1


def klom(unlearned: Tensor, oracles: Tensor, bins: int = KLOM_BINS) -> Tensor:
    """Return for each sample the divergence of its binned margins (KLoM), at least 0.

    KL of the unlearned models' histogram from the oracles', over ``bins`` equal bins from the
    smallest to the largest margin. Half a model is added to every bin, so that an empty one does
    not make it infinite.
    """
    if bins < 2:
        raise ConfigError(f"klom needs at least 2 bins, not {bins}.")
    unlearned, oracles = checked_sides(unlearned, oracles, least=1)
    both = torch.cat([unlearned, oracles])
    low, high = both.amin(dim=0), both.amax(dim=0)
    width = ((high - low) / bins).clamp_min(torch.finfo(torch.float64).tiny)

    def shares(side: Tensor) -> Tensor:
        position = ((side - low) / width).long().clamp(0, bins - 1)
        counts = torch.zeros(bins, side.shape[1], dtype=torch.float64)
        counts.scatter_add_(0, position, torch.ones_like(side))
        return (counts + 0.5) / (len(side) + 0.5 * bins)

    ours, theirs = shares(unlearned), shares(oracles)
    divergence: Tensor = (ours * (ours / theirs).log()).sum(dim=0)
    return divergence


def likelihood_ratios(unlearned: Tensor, oracles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log likelihood ratios of U-LiRA for every model of both sides and every sample.

    Each model is attacked by the others: of the side that it belongs to, the normal distribution
    is fitted without it. Above 0: the attack takes the model for one that unlearned the sample.
    """
    unlearned, oracles = checked_sides(unlearned, oracles, least=3)
    own_u, other_u = _left_out(unlearned), _fitted(oracles)
    own_o, other_o = _left_out(oracles), _fitted(unlearned)
    ours = _log_density(unlearned, *own_u) - _log_density(unlearned, *other_u)
    theirs = _log_density(oracles, *other_o) - _log_density(oracles, *own_o)
    return ours, theirs


def roc(positives: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return the false and true positive rates of an attack at all of its thresholds, ascending."""
    from sklearn.metrics import roc_curve  # here, since importing it takes its time

    positives, negatives = _flat(positives), _flat(negatives)
    truth = torch.cat([torch.ones(len(positives)), torch.zeros(len(negatives))])
    false, true, _ = roc_curve(truth.numpy(), torch.cat([positives, negatives]).numpy())
    return torch.from_numpy(false), torch.from_numpy(true)


def roc_points(positives: Tensor, negatives: Tensor) -> list[tuple[float, float]]:
    """Return the curve at false positive rates that are evenly spaced on a logarithmic axis.

    They go from one false positive to all; each with the true positive rate at no more than it.
    """
    false, true = roc(positives, negatives)
    rates = torch.logspace(-math.log10(negatives.numel()), 0, ROC_POINTS, dtype=torch.float64)
    rates[-1] = 1.0
    last = torch.searchsorted(false.contiguous(), rates, right=True) - 1
    return list(zip(rates.tolist(), true[last].tolist(), strict=True))


def membership(
    removed: Tensor, removed_labels: Tensor, unseen: Tensor, unseen_labels: Tensor
) -> Rate | None:
    """Return how often a removed sample has a larger margin than an unseen one of its class.

    This is the area under the ROC curve of the simplest membership attack: 0.5 is chance. Each
    class weighs as it does among the removed samples. The 95 % interval is DeLong's with Student's
    quantile. A few removed samples may all lie above the unseen ones, with no spread at all: their
    variance is taken with one more sample, which has that of chance. None where no class has two
    unseen samples.
    """
    from scipy.special import stdtrit  # here, since importing scipy takes its time

    shares, error = [], 0.0
    pairs = by_class(removed.double(), removed_labels, unseen.double(), unseen_labels)
    count = sum(len(ours) for ours, _ in pairs)
    for ours, theirs in pairs:
        difference = ours.unsqueeze(1) - theirs.unsqueeze(0)
        wins = (difference.sign() + 1) / 2  # 1 where the removed sample's is larger, 1/2 if equal
        shares.append(wins.mean(dim=1))
        spread = wins.mean(dim=0).var(correction=1).item()
        error += (len(ours) / count) ** 2 * spread / len(theirs)
    if not pairs:
        return None
    each = torch.cat(shares)
    rate = each.mean().item()
    if count < 2:
        return Rate(rate=rate, low=0.0, high=1.0, count=count)
    spread = ((each - rate).square().sum().item() + CHANCE) / count
    half = float(stdtrit(count - 1, 0.975)) * math.sqrt(spread / count + error)
    return Rate(rate=rate, low=max(rate - half, 0.0), high=min(rate + half, 1.0), count=count)


def true_positives(positives: Tensor, negatives: Tensor, false_rate: float) -> Rate:
    """Return the true positive rate of an attack at a false positive rate of at most this."""
    if not 0 < false_rate < 1:
        raise ConfigError(f"A false positive rate lies between 0 and 1, not at {false_rate}.")
    positives, negatives = _flat(positives), _flat(negatives)
    allowed = math.floor(false_rate * len(negatives))
    threshold = negatives.sort(descending=True).values[allowed]
    return counted(int((positives > threshold).sum()), len(positives))


def counted(hits: int, count: int) -> Rate:
    """Return a rate with Wilson's 95 % interval."""
    from scipy.stats import binomtest

    if count < 1:
        raise DataError("A rate needs at least one case.")
    interval = binomtest(hits, count).proportion_ci(method="wilson")
    return Rate(rate=hits / count, low=interval.low, high=interval.high, count=count)


def epsilon(unlearned: Tensor, oracles: Tensor, delta: float = 1e-5) -> Tensor:
    """Return for each sample the epsilon of the NeurIPS 2023 unlearning challenge, at least 0.

    Every threshold on the margin, from either side, is an attack with a false positive rate f and
    a false negative rate g. It bounds epsilon from below by the larger of
    ``ln((1 - delta - f) / g)`` and ``ln((1 - delta - g) / f)``; the largest bound counts. An
    attack with only one of f and g at 0 is left out, since few models cannot show a rate of 0; one
    with both at 0 gives infinity.
    """
    unlearned, oracles = checked_sides(unlearned, oracles, least=1)
    sides = zip(unlearned.split(AT_ONCE, dim=1), oracles.split(AT_ONCE, dim=1), strict=True)
    return torch.cat([_epsilon(ours, theirs, delta) for ours, theirs in sides])


def _epsilon(unlearned: Tensor, oracles: Tensor, delta: float) -> Tensor:
    thresholds = torch.cat([unlearned, oracles]).sort(dim=0).values  # attacks x samples
    above_u = (unlearned.unsqueeze(0) >= thresholds.unsqueeze(1)).double().mean(dim=1)
    above_o = (oracles.unsqueeze(0) >= thresholds.unsqueeze(1)).double().mean(dim=1)
    false = torch.cat([above_o, 1 - above_o])
    missed = torch.cat([1 - above_u, above_u])
    bound = torch.maximum(
        ((1 - delta - false) / missed).log(), ((1 - delta - missed) / false).log()
    )
    bound = bound.where((false > 0) & (missed > 0), torch.zeros(()))
    bound = bound.where((false > 0) | (missed > 0), torch.tensor(torch.inf))
    return bound.nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=0).clamp_min(0)


def checked_sides(unlearned: Tensor, oracles: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Return both sides in double precision on the CPU, or say what is wrong with them."""
    for name, side in (("unlearned", unlearned), ("oracle", oracles)):
        if side.ndim != 2 or side.shape[1] == 0:
            raise ConfigError(
                f"Margins of the {name} models must have the shape (models, samples), not "
                f"{tuple(side.shape)}."
            )
        if len(side) < least:
            raise DataError(f"Needs at least {least} {name} models, got {len(side)}.")
        if not bool(side.isfinite().all()):
            raise DivergenceError(f"Margins of the {name} models are not finite: one diverged.")
    if unlearned.shape[1] != oracles.shape[1]:
        raise ConfigError(
            f"Both sides are compared on the same samples, got {unlearned.shape[1]} and "
            f"{oracles.shape[1]}."
        )
    return unlearned.detach().cpu().double(), oracles.detach().cpu().double()


def _flat(scores: Tensor) -> Tensor:
    if scores.numel() == 0:
        raise DataError("An attack needs scores of both sides.")
    return scores.detach().cpu().double().flatten()


def _fitted(side: Tensor) -> tuple[Tensor, Tensor]:
    return side.mean(dim=0), side.std(dim=0, correction=1).clamp_min(LEAST_SPREAD)


def _left_out(side: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each model mean and standard deviation of the others of its side."""
    rest = len(side) - 1
    mean = (side.sum(dim=0) - side) / rest
    centred = side - side.mean(dim=0)
    squares = centred.square().sum(dim=0) - centred.square() * len(side) / rest
    return mean, (squares.clamp_min(0) / (rest - 1)).sqrt().clamp_min(LEAST_SPREAD)


def _log_density(values: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    return -((values - mean) / spread).square() / 2 - spread.log()
