"""Removed against unseen samples: against a slow count, under chance, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from goldfish.errors import ConfigError, DivergenceError
from goldfish.evaluation.memory import class_matched


def test_matching_agrees_with_drawing_a_partner_for_each_removed_sample() -> None:
    """Each removed sample against the mean of the unseen ones of its class, one by one."""
    torch.manual_seed(0)
    labels, unseen_labels = torch.randint(4, (37,)), torch.randint(4, (90,))
    removed, unseen = torch.rand(37), torch.rand(90)
    found = class_matched(removed, labels, unseen, unseen_labels)
    assert found is not None
    partners = [unseen[unseen_labels == label].double().mean().item() for label in labels.tolist()]
    assert found.unseen_mean == pytest.approx(sum(partners) / 37)
    assert found.removed_mean == pytest.approx(removed.double().mean().item())


def test_proportions_do_not_matter() -> None:
    """Class 0 is hard and class 1 easy; most removed samples are hard, most unseen ones easy."""
    hard, easy = 2 + torch.rand(400), torch.rand(400)
    labels = torch.tensor([0] * 90 + [1] * 10)
    unseen_labels = torch.tensor([0] * 30 + [1] * 270)
    found = class_matched(
        torch.where(labels == 0, hard[:100], easy[:100]),
        labels,
        torch.where(unseen_labels == 0, hard[100:], easy[100:]),
        unseen_labels,
    )
    assert found is not None
    assert found.difference.low < 0 < found.difference.high
    assert abs(found.difference.value) < 0.2


@pytest.mark.parametrize("count", [3, 20, 100])
def test_unseen_samples_pass_as_unseen(count: int) -> None:
    """Losses as they are: one sample in thirty is badly wrong. Chance is found in at most 5 %.

    With the removed samples' own spread it would be half of all draws of 20: so many hold no
    sample that is wrong, hence hardly any spread.
    """
    generator = torch.Generator().manual_seed(0)
    told = 0
    for _ in range(200):
        losses = 0.02 * torch.rand(400, generator=generator)
        losses += 3 * (torch.rand(400, generator=generator) < 1 / 30)
        labels = torch.randint(3, (400,), generator=generator)
        found = class_matched(losses[:count], labels[:count], losses[count:], labels[count:])
        assert found is not None
        told += found.difference.low > 0 or found.difference.high < 0
    assert told <= 10


def test_more_samples_narrow_the_interval() -> None:
    torch.manual_seed(0)
    losses, labels = torch.rand(1000), torch.zeros(1000, dtype=torch.long)
    widths = []
    for count in (1, 10, 100):
        found = class_matched(losses[:count], labels[:count], losses[100:], labels[100:])
        assert found is not None
        widths.append(found.difference.high - found.difference.low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_nothing_to_compare_with() -> None:
    """One unseen sample has no spread; none at all has no mean."""
    for unseen in (torch.zeros(0), torch.zeros(1)):
        labels = torch.zeros(len(unseen), dtype=torch.long)
        assert (
            class_matched(torch.zeros(3), torch.zeros(3, dtype=torch.long), unseen, labels) is None
        )


@pytest.mark.parametrize(
    ("removed", "error", "words"),
    [
        (torch.zeros(2), ConfigError, "one number and one label each"),
        (torch.zeros(3, 1), ConfigError, "one number and one label each"),
        (torch.tensor([0.0, 1, torch.nan]), DivergenceError, "not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    removed: Tensor, error: type[Exception], words: str
) -> None:
    labels = torch.zeros(3, dtype=torch.long)
    with pytest.raises(error, match=words):
        class_matched(removed, labels, torch.zeros(3), labels)
