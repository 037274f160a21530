"""Equations (1) to (6) on vectors of three or four numbers, each value derived by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, tensor

from goldfish.errors import ConfigError
from goldfish.training.batches import Batch
from goldfish.unlearning.basic_model import GoldfishObjective, GoldfishSettings, goldfish_losses
from goldfish.unlearning.fused_loss import implements
from goldfish.unlearning.loss_function import (
    HARD_LOSSES,
    HardLoss,
    RemovedTermName,
    confusion_loss,
    confusion_shares,
    distillation_loss,
    goldfish_loss,
    hard_loss,
    removed_loss,
    soften,
)

LN2, LN3 = math.log(2), math.log(3)
EXACT = 1e-6


def logits_of(*rows: list[float], temperature: float = 1) -> Tensor:
    """Return logits whose softmax at ``temperature`` is ``rows``; the constant must not matter."""
    return temperature * tensor(rows, dtype=torch.float64).log() + 3


REMAINING = logits_of([1 / 2, 1 / 4, 1 / 4], [1 / 4, 1 / 4, 1 / 2])
"""Both of class 0: the probability of the label is 1/2 and 1/4."""

REMOVED = logits_of([1 / 2, 1 / 4, 1 / 4], [1 / 9, 4 / 9, 4 / 9])
"""Both of class 0: the probability of the label is 1/2 (below the cap) and 1/9 (above it)."""

CLASS_0 = tensor([0, 0])


# Equation (1): the hard loss.


@pytest.mark.parametrize("kind", ["cross-entropy", "nll"])
def test_loss_of_each_sample(kind: str) -> None:
    """-ln(1/2) = ln 2 and -ln(1/4) = 2 ln 2."""
    losses = hard_loss(kind).of_samples(REMAINING, CLASS_0)
    assert losses.tolist() == pytest.approx([LN2, 2 * LN2], abs=EXACT)


def test_focal_loss_of_each_sample() -> None:
    """(1 - p)^2 (-ln p) with p = 1/2: 1/4 ln 2. With p = 1/4: 9/16 * 2 ln 2 = 9/8 ln 2."""
    losses = hard_loss("focal").of_samples(REMAINING, CLASS_0)
    assert losses.tolist() == pytest.approx([LN2 / 4, 9 / 8 * LN2], abs=EXACT)


def test_loss_of_a_uniform_guess() -> None:
    """Three classes: -ln(1/3) = ln 3; the focal loss is (2/3)^2 ln 3 = 4/9 ln 3."""
    assert hard_loss("cross-entropy").of_a_uniform_guess(3) == pytest.approx(LN3, abs=EXACT)
    assert hard_loss("nll").of_a_uniform_guess(3) == pytest.approx(LN3, abs=EXACT)
    assert hard_loss("focal").of_a_uniform_guess(3) == pytest.approx(4 / 9 * LN3, abs=EXACT)


@pytest.mark.parametrize("kind", HARD_LOSSES)
@pytest.mark.parametrize("classes", [2, 3, 100])
def test_the_cap_of_every_hard_loss_is_its_loss_of_a_uniform_guess(kind: str, classes: int) -> None:
    """Equal logits are a uniform guess, so its loss needs no other derivation."""
    (guess,) = hard_loss(kind).of_samples(torch.zeros(1, classes, dtype=torch.float64), tensor([0]))
    assert hard_loss(kind).of_a_uniform_guess(classes) == pytest.approx(guess.item(), abs=EXACT)


def test_a_hard_loss_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one entry of HARD_LOSSES a hard loss is a setting, with its cap; see CONTRIBUTING.md.

    The loss is (1 - p)^2 of the label's probability p. Remaining, p = 1/2 and 1/4: 1/4 and 9/16,
    so L_r = 13/32. Removed, p = 1/2 and 1/9: 1/4 and 64/81, of which the second is above the loss
    of a uniform guess of three classes, (2/3)^2 = 4/9: L_f = (1/4 + 4/9) / 2 = 25/72.
    """
    squared = HardLoss(
        lambda logits, labels: (1 - logits.softmax(1).gather(1, labels[:, None])[:, 0]) ** 2,
        lambda classes: (1 - 1 / classes) ** 2,
    )
    monkeypatch.setitem(HARD_LOSSES, "squared", squared)
    settings = GoldfishSettings.parse({"hard_loss": "squared", "mu_c": 0, "mu_d": 0})
    batch = Batch(REMAINING, CLASS_0, removed=(REMOVED, CLASS_0))
    loss = goldfish_losses(batch, REMAINING, REMOVED, settings)
    assert loss.risk.item() == pytest.approx(13 / 32, abs=EXACT)
    assert loss.total.item() == pytest.approx(13 / 32 - 25 / 72, abs=EXACT)
    assert not implements(settings), "a GPU takes the functions of the loss module"


def test_an_unknown_hard_loss_is_an_error() -> None:
    """It neither becomes another loss nor gets the cap of another one."""
    with pytest.raises(ConfigError, match=r"Unknown hard loss 'focl'\. Did you mean 'focal'"):
        hard_loss("focl").of_samples(REMAINING, CLASS_0)
    with pytest.raises(ConfigError, match="Choose one of cross-entropy, focal, nll"):
        hard_loss("hinge").of_a_uniform_guess(3)
    with pytest.raises(ConfigError, match=r"goldfish\.hard_loss: Unknown hard loss 'focl'"):
        GoldfishSettings.parse({"hard_loss": "focl"}, "unlearning.goldfish")


def test_an_unknown_removed_term_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"Unknown removed term 'cap'\. Did you mean 'capped'"):
        removed_loss(REMOVED, CLASS_0, "focal", "cap")  # type: ignore[arg-type]


def test_literal_removed_term() -> None:
    """Cross-entropy: (ln 2 + ln 9) / 2 = (ln 2 + 2 ln 3) / 2 = 1.4452.

    Focal: 1/4 ln 2 and (8/9)^2 * 2 ln 3 = 128/81 ln 3; their mean is ln 2 / 8 + 64/81 ln 3.
    """
    for kind in ("cross-entropy", "nll"):
        loss = removed_loss(REMOVED, CLASS_0, kind, "literal")
        assert loss.item() == pytest.approx((LN2 + 2 * LN3) / 2, abs=EXACT)
    focal = removed_loss(REMOVED, CLASS_0, "focal", "literal")
    assert focal.item() == pytest.approx(LN2 / 8 + 64 / 81 * LN3, abs=EXACT)


def test_capped_removed_term() -> None:
    """The first sample is below the cap and counts in full, the second counts as a uniform guess.

    Cross-entropy: ln 2 < ln 3 < 2 ln 3, so (ln 2 + ln 3) / 2 = ln 6 / 2.
    Focal: ln 2 / 4 = 0.173 < 4/9 ln 3 = 0.488 < 128/81 ln 3, so ln 2 / 8 + 2/9 ln 3.
    """
    for kind in ("cross-entropy", "nll"):
        loss = removed_loss(REMOVED, CLASS_0, kind, "capped")
        assert loss.item() == pytest.approx(math.log(6) / 2, abs=EXACT)
    focal = removed_loss(REMOVED, CLASS_0, "focal", "capped")
    assert focal.item() == pytest.approx(LN2 / 8 + 2 / 9 * LN3, abs=EXACT)
    assert removed_loss(REMOVED, CLASS_0).item() == pytest.approx(math.log(6) / 2, abs=EXACT)


def test_a_removed_sample_with_a_target_counts_up_to_it() -> None:
    """Losses ln 2 and 2 ln 3, targets ln 2 / 2 and 9: the second counts up to ln 3, a guess.

    So (ln 2 / 2 + ln 3) / 2, and neither sample has a gradient. They are confused by the shares
    of ln 3 that their targets are: the first by ln 2 / (2 ln 3), the second in full.
    """
    targets = torch.tensor([LN2 / 2, 9.0], dtype=torch.float64)
    logits = REMOVED.clone().requires_grad_()
    loss = removed_loss(logits, CLASS_0, "cross-entropy", "capped", targets)
    assert loss.item() == pytest.approx(LN2 / 4 + LN3 / 2, abs=EXACT)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0, 0, 0], [0, 0, 0]]
    shares = confusion_shares(targets, 3)
    assert shares is not None
    assert shares.tolist() == pytest.approx([LN2 / (2 * LN3), 1], abs=EXACT)
    one, other = (confusion_loss(REMOVED[place : place + 1]).item() for place in (0, 1))
    expected = (one * LN2 / (2 * LN3) + other) / 2
    assert confusion_loss(REMOVED, shares).item() == pytest.approx(expected, abs=EXACT)


def test_the_cap_stops_the_gradient() -> None:
    """The gradient of -ln p_y is p - onehot, over 2 samples half of it.

    First sample: (1/2 - 1, 1/4, 1/4) / 2 = (-1/4, 1/8, 1/8). The second is past the cap: 0.
    """
    logits = REMOVED.clone().requires_grad_()
    removed_loss(logits, CLASS_0, "cross-entropy", "capped").backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-1 / 4, 1 / 8, 1 / 8], abs=EXACT)
    assert logits.grad[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ["cross-entropy", "focal", "nll"])
def test_smooth_removed_term(kind: str) -> None:
    """ln(1 - 1/4) = ln(3/4) and ln(1 - 1/18) = ln(17/18).

    Their mean is ln(3/4 * 17/18) / 2 = ln(17/24) / 2 = -0.1724, whatever the hard loss is.
    """
    loss = removed_loss(REMOVED, CLASS_0, kind, "smooth")
    assert loss.item() == pytest.approx(math.log(17 / 24) / 2, abs=EXACT)


R_CE, R_FOCAL = 3 / 2 * LN2, 11 / 16 * LN2


@pytest.mark.parametrize(
    ("kind", "term", "remaining", "removed"),
    [
        ("cross-entropy", "capped", R_CE, math.log(6) / 2),
        ("cross-entropy", "smooth", R_CE, math.log(17 / 24) / 2),
        ("cross-entropy", "literal", R_CE, (LN2 + 2 * LN3) / 2),
        ("nll", "capped", R_CE, math.log(6) / 2),
        ("nll", "smooth", R_CE, math.log(17 / 24) / 2),
        ("nll", "literal", R_CE, (LN2 + 2 * LN3) / 2),
        ("focal", "capped", R_FOCAL, LN2 / 8 + 2 / 9 * LN3),
        ("focal", "smooth", R_FOCAL, math.log(17 / 24) / 2),
        ("focal", "literal", R_FOCAL, LN2 / 8 + 64 / 81 * LN3),
    ],
)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_hard_loss(
    kind: str, term: RemovedTermName, remaining: float, removed: float, weight: float
) -> None:
    """L_r - L_f, equation (1), with the other two terms switched off.

    L_r is (ln 2 + 2 ln 2) / 2 = 3/2 ln 2 for cross-entropy and (1/4 + 9/8) / 2 ln 2 = 11/16 ln 2
    for the focal loss; L_f is derived in the tests above; its weight multiplies it.
    The risk of equation (7) is L_r alone.
    """
    settings = GoldfishSettings(
        hard_loss=kind, removed_term=term, removed_weight=weight, mu_c=0, mu_d=0
    )
    batch = Batch(REMAINING, CLASS_0, removed=(REMOVED, CLASS_0))
    loss = goldfish_losses(batch, REMAINING, REMOVED, settings)
    assert loss.total.item() == pytest.approx(remaining - weight * removed, abs=EXACT)
    assert loss.risk.item() == pytest.approx(remaining, abs=EXACT)


# Equation (2): the confusion loss.


def test_confusion_loss() -> None:
    """Four classes, so the mean probability is 1/4 in every row; population variance.

    (1/2, 1/4, 1/8, 1/8): deviations (1/4, 0, -1/8, -1/8), squares 1/16 + 1/64 + 1/64 = 3/32,
    variance 3/128. (7/10, 1/10, 1/10, 1/10): deviations (9/20, -3/20, -3/20, -3/20), squares
    (81 + 27) / 400 = 27/100, variance 27/400. The mean of the roots, not the root of the mean:
    (sqrt(3/128) + sqrt(27/400)) / 2 = 0.20645.
    """
    logits = logits_of([1 / 2, 1 / 4, 1 / 8, 1 / 8], [0.7, 0.1, 0.1, 0.1])
    expected = (math.sqrt(3 / 128) + math.sqrt(27 / 400)) / 2
    assert confusion_loss(logits).item() == pytest.approx(expected, abs=EXACT)


def test_confusion_loss_of_a_certain_prediction() -> None:
    """(1, 0, 0): deviations (2/3, -1/3, -1/3), squares 6/9, variance 2/9, root sqrt(2)/3."""
    logits = tensor([[200.0, -200.0, -200.0]])
    assert confusion_loss(logits).item() == pytest.approx(math.sqrt(2) / 3, abs=EXACT)


def test_gradient_of_the_confusion_loss() -> None:
    """Two classes: p and 1 - p deviate by d = p - 1/2, so the loss is |2p - 1| / 2.

    With p = 3/4 = sigmoid(z_1 - z_2): the slope in p is 1, that of p in z_1 is p (1 - p) = 3/16.
    """
    logits = logits_of([3 / 4, 1 / 4]).requires_grad_()
    loss = confusion_loss(logits)
    loss.backward()
    assert loss.item() == pytest.approx(1 / 4, abs=EXACT)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([3 / 16, -3 / 16], abs=EXACT)


# Equations (3), (4) and (5): softened probabilities and the distillation loss.


def test_softened_probabilities() -> None:
    """Logits 2 ln(1, 2, 5): at T = 2 they are ln(1, 2, 5), so (1, 2, 5) / 8.

    At T = 1 they are ln(1, 4, 25), so (1, 4, 25) / 30.
    """
    logits = 2 * tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    assert soften(logits, 2)[0].tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=EXACT)
    assert soften(logits, 1)[0].tolist() == pytest.approx([1 / 30, 4 / 30, 25 / 30], abs=EXACT)


TEACHER_AT_2 = logits_of([1 / 2, 1 / 4, 1 / 4], [1 / 3, 1 / 3, 1 / 3], temperature=2)
STUDENT_AT_2 = logits_of([1 / 4, 1 / 2, 1 / 4], [1 / 2, 1 / 4, 1 / 4], temperature=2)


def test_distillation_loss() -> None:
    """At T = 2, in units of ln 2: -log2 of 1/2 is 1 and of 1/4 is 2.

    First sample: 1/2 * 2 + 1/4 * 1 + 1/4 * 2 = 7/4. Second: (1 + 2 + 2) / 3 = 5/3.
    Mean: (21/12 + 20/12) / 2 = 41/24. With the factor T^2 = 4: 41/6.
    """
    loss = distillation_loss(STUDENT_AT_2, TEACHER_AT_2, 2)
    assert loss.item() == pytest.approx(41 / 24 * LN2, abs=EXACT)
    scaled = distillation_loss(STUDENT_AT_2, TEACHER_AT_2, 2, square_scaling=True)
    assert scaled.item() == pytest.approx(41 / 6 * LN2, abs=EXACT)


def test_distillation_loss_has_student_and_teacher_in_their_places() -> None:
    """Swapped, the first sample is 1/4 * 1 + 1/2 * 2 + 1/4 * 2 = 7/4 again, but the second is

    1/2 log2(3) + 1/4 log2(3) + 1/4 log2(3) = log2(3), so the mean is (7/4 ln 2 + ln 3) / 2.
    """
    swapped = distillation_loss(TEACHER_AT_2, STUDENT_AT_2, 2)
    assert swapped.item() == pytest.approx((7 / 4 * LN2 + LN3) / 2, abs=EXACT)


# Equation (6): the total.


def test_total() -> None:
    """1/2 + 1/4 * 1/5 + 3 * 1/10 = 0.5 + 0.05 + 0.3 = 0.85."""
    total = goldfish_loss(tensor(0.5), tensor(0.2), tensor(0.1), mu_c=0.25, mu_d=3)
    assert total.item() == pytest.approx(0.85, abs=EXACT)
    assert goldfish_loss(tensor(0.5), 0.2, 0.1, 0.25, 3).item() == pytest.approx(0.85, abs=EXACT)


class CountingLinear(nn.Module):
    """Three classes, two inputs: logits (x_1 ln 2, x_2 ln 2, 0). Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor([[LN2, 0], [0, LN2], [0, 0]]))
        self.batch_sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.batch_sizes.append(len(inputs))
        return inputs @ self.weight.T


WHOLE_BATCH = Batch(
    inputs=tensor([[1.0, 0.0], [0.0, 1.0]]),
    labels=CLASS_0,
    teacher_logits=tensor([[2 * LN2, 0, 0], [0, 0, 0]]),
    removed=(tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]), tensor([0, 0, 2])),
    temperature=2,
)
WHOLE_L_R = 3 / 2 * LN2
WHOLE_L_F = math.log(27 / 2) / 3
WHOLE_L_C = 1 / (3 * math.sqrt(2))
WHOLE_L_D = math.log(2 + math.sqrt(2)) - 5 / 24 * LN2


def test_total_of_a_linear_model() -> None:
    """All three terms, from inputs to equation (6), with T = 2.

    Remaining, both of class 0. Logits (ln 2, 0, 0): softmax (2, 1, 1) / 4, loss ln 2. Logits
    (0, ln 2, 0): (1, 2, 1) / 4, loss ln 4. L_r = 3/2 ln 2.
    Removed. Logits (2 ln 2, 0, 0): (4, 1, 1) / 6, label 0, loss -ln(2/3) = ln(3/2), below ln 3.
    Logits (0, 2 ln 2, 0), twice: (1, 4, 1) / 6, labels 0 and 2, loss ln 6, capped to ln 3.
    L_f = (ln(3/2) + 2 ln 3) / 3 = ln(27/2) / 3.
    All three rows hold 4/6, 1/6, 1/6: deviations 1/3, -1/6, -1/6, variance (4 + 1 + 1) / 36 / 3
    = 1/18. L_c = 1 / sqrt 18 = 1 / (3 sqrt 2).
    Distillation. Student, first sample, at T = 2: (ln 2 / 2, 0, 0), so (sqrt 2, 1, 1) / (2 + sqrt
    2); teacher (2, 1, 1) / 4: loss ln(2 + sqrt 2) - 1/2 ln sqrt 2 = ln(2 + sqrt 2) - 1/4 ln 2.
    Second: (1, sqrt 2, 1) / (2 + sqrt 2) and a uniform teacher: ln(2 + sqrt 2) - 1/3 ln sqrt 2 =
    ln(2 + sqrt 2) - 1/6 ln 2. L_d = ln(2 + sqrt 2) - (1/4 + 1/6) / 2 ln 2, and 5/12 / 2 = 5/24.
    Total L_r - L_f + 1/4 L_c + 3/2 L_d; the risk of equation (7) is L_r + 3/2 L_d.
    """
    model = CountingLinear()
    settings = GoldfishSettings(mu_c=0.25, mu_d=1.5)
    loss = GoldfishObjective(settings)(model, WHOLE_BATCH)
    expected = WHOLE_L_R - WHOLE_L_F + WHOLE_L_C / 4 + 1.5 * WHOLE_L_D
    assert loss.total.item() == pytest.approx(expected, abs=EXACT)
    assert loss.risk.item() == pytest.approx(WHOLE_L_R + 1.5 * WHOLE_L_D, abs=EXACT)
    assert model.batch_sizes == [5], "both mini-batches go through the student in one pass"


def test_total_with_other_weights_and_square_scaling() -> None:
    """The terms of the test above: L_r - 2 L_f + 3 L_c + 1/2 * 4 L_d."""
    settings = GoldfishSettings(removed_weight=2, mu_c=3, mu_d=0.5, square_scaling=True)
    loss = GoldfishObjective(settings)(CountingLinear(), WHOLE_BATCH)
    expected = WHOLE_L_R - 2 * WHOLE_L_F + 3 * WHOLE_L_C + 2 * WHOLE_L_D
    assert loss.total.item() == pytest.approx(expected, abs=EXACT)
    assert loss.risk.item() == pytest.approx(WHOLE_L_R + 2 * WHOLE_L_D, abs=EXACT)


def test_total_of_a_client_that_removes_nothing() -> None:
    """Without removed data the total is L_r + mu_d L_d, which is the risk as well."""
    model = CountingLinear()
    batch = replace(WHOLE_BATCH, removed=None)
    loss = GoldfishObjective(GoldfishSettings(mu_d=1.5))(model, batch)
    assert loss.total.item() == pytest.approx(WHOLE_L_R + 1.5 * WHOLE_L_D, abs=EXACT)
    assert loss.risk.item() == loss.total.item()
    assert model.batch_sizes == [2]


def test_gradient_of_the_total_by_hand() -> None:
    """Hard loss alone, one remaining and one removed sample, both with input (1, 0) and class 0.

    Their softmax is (2, 1, 1) / 4 and their loss ln 2 < ln 3, so the gradients in the logits are
    (-1/2, 1/4, 1/4) and, subtracted with weight 1/2, (1/4, -1/8, -1/8). Only x_1 is 1, so the
    first column of the weight gets the sum (-1/4, 1/8, 1/8) and the second 0.
    """
    model = CountingLinear()
    x, y = tensor([[1.0, 0.0]]), tensor([0])
    settings = GoldfishSettings(removed_weight=0.5, mu_c=0, mu_d=0)
    GoldfishObjective(settings)(model, Batch(x, y, removed=(x, y))).total.backward()
    assert model.weight.grad is not None
    assert model.weight.grad[:, 0].tolist() == pytest.approx([-1 / 4, 1 / 8, 1 / 8], abs=EXACT)
    assert model.weight.grad[:, 1].tolist() == [0, 0, 0]
