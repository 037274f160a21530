"""The exception tree and the words for names that do not exist."""

from __future__ import annotations

import inspect
import re

import pytest

from goldfish import errors
from goldfish.errors import GoldfishError, unknown

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def test_the_docstring_shows_the_whole_tree() -> None:
    assert len(CLASSES) > 1
    assert set(re.findall(r"\w+Error\b", errors.__doc__ or "")) == set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES.keys())
def test_one_name_catches_every_error(kind: type[Exception]) -> None:
    assert issubclass(kind, GoldfishError)
    with pytest.raises(GoldfishError, match=r"^what went wrong$"):
        raise kind("what went wrong")


@pytest.mark.parametrize("kind", [kind for kind in CLASSES.values() if kind is not GoldfishError])
def test_no_error_catches_another_one(kind: type[Exception]) -> None:
    others = [other for other in CLASSES.values() if other not in (kind, GoldfishError)]
    assert not any(issubclass(other, kind) for other in others)


def test_an_unknown_name_comes_with_the_nearest_one() -> None:
    message = unknown(
        "model", "lenet", iter(["resnet32", "lenet5"]), "'goldfish models' lists all."
    )
    assert message == "Unknown model 'lenet'. Did you mean 'lenet5'? 'goldfish models' lists all."


@pytest.mark.parametrize("known", [["resnet32", "lenet5"], []])
def test_an_unknown_name_that_is_near_to_none(known: list[str]) -> None:
    message = unknown("model", "transformer", known, "'goldfish models' lists all.")
    assert message == "Unknown model 'transformer'. 'goldfish models' lists all."
