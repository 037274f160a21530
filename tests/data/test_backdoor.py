from __future__ import annotations

from typing import Any

import pytest
import torch

from goldfish.data import Backdoor, TensorExamples, poison, triggered_test
from goldfish.errors import ConfigError, DataError


def made() -> TensorExamples:
    """Six black images of 5x4 pixels, classes 0, 1, 2, 0, 1, 2."""
    return TensorExamples(
        torch.zeros(6, 2, 5, 4, dtype=torch.uint8),
        torch.tensor([0, 1, 2, 0, 1, 2]),
        list("abcdef"),
        mean=[0.5, 0.5],
        std=[0.5, 0.5],
    )


def test_the_trigger_is_a_square_in_its_corner() -> None:
    images = made().images
    stamped = Backdoor(target=1, size=2).stamp(images)
    assert images.max() == 0
    assert (stamped == 255).sum() == 6 * 2 * 2 * 2
    assert (stamped[:, :, 3:5, 2:4] == 255).all()


def test_poison_changes_the_chosen_samples_alone() -> None:
    clean = made()
    poisoned = poison(clean, torch.tensor([1, 3]), Backdoor(target=2))
    assert poisoned.labels.tolist() == [0, 2, 2, 2, 1, 2]
    assert [int(image.max()) for image in poisoned.images] == [0, 255, 0, 255, 0, 0]
    assert clean.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert clean.images.max() == 0
    assert (poisoned.ids, poisoned.mean, poisoned.std) == (clean.ids, clean.mean, clean.std)


def test_triggered_test_has_all_but_the_target_and_true_labels() -> None:
    clean = made()
    triggered = triggered_test(clean, Backdoor(target=2))
    assert list(triggered.ids) == ["a", "b", "d", "e"]
    assert triggered.labels.tolist() == [0, 1, 0, 1]
    assert (triggered.images[:, :, -1, -1] == 255).all()
    assert clean.images.max() == 0


def test_one_source_class() -> None:
    """The paper's variant: one class to one other."""
    backdoor = Backdoor(target=2, source=1)
    assert list(triggered_test(made(), backdoor).ids) == ["b", "e"]
    assert backdoor.eligible(made().labels).tolist() == [False, True, False, False, True, False]
    assert poison(made(), torch.tensor([4]), backdoor).labels.tolist() == [0, 1, 2, 0, 2, 2]
    with pytest.raises(DataError, match="attacks class 1, but some"):
        poison(made(), torch.tensor([0, 1]), backdoor)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": 1, "source": 1}, "would change nothing"),
        ({"target": -1}, "from 0; not -1"),
        ({"target": 1, "size": 0}, "at least 1 pixel"),
    ],
)
def test_a_wrong_backdoor_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Backdoor(**options)


def test_a_poisoning_that_changes_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no position was given"):
        poison(made(), torch.tensor([], dtype=torch.int64), Backdoor(target=1))
    with pytest.raises(DataError, match="are of class 1 already"):
        poison(made(), torch.tensor([1, 4]), Backdoor(target=1))
    white = made()
    white.images.fill_(255)
    with pytest.raises(DataError, match="changes no pixel"):
        poison(white, torch.tensor([0]), Backdoor(target=1))
    with pytest.raises(DataError, match="changes no pixel"):
        triggered_test(white, Backdoor(target=1))


def test_a_backdoor_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target 3 is not a class of the data.*\[0, 1, 2\]"):
        poison(made(), torch.tensor([0]), Backdoor(target=3))
    with pytest.raises(ConfigError, match="5 pixels does not fit into images of 5x4"):
        poison(made(), torch.tensor([0]), Backdoor(target=1, size=5))
    with pytest.raises(DataError, match="no test image of class 7"):
        triggered_test(made(), Backdoor(target=1, source=7))
    floats = TensorExamples(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="needs uint8 images"):
        poison(floats, torch.tensor([0]), Backdoor(target=1))
