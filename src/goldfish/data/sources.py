"""The datasets by name: load one, or see which are there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from goldfish.data.datasets import DATASETS, FORMATS, Installed, Layout, Published
from goldfish.data.examples import TensorExamples
from goldfish.data.folder import RawSplit
from goldfish.errors import ConfigError, DataError, unknown

ENVIRONMENT_VARIABLE = "GOLDFISH_DATA"


@dataclass(frozen=True)
class LabelledData:
    """A dataset as it comes: a training split for the clients and a test split for the server."""

    name: str
    train: TensorExamples
    test: TensorExamples
    num_classes: int
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Availability:
    """Whether a dataset can be loaded, where it was looked for, and which files it lacks."""

    name: str
    present: bool
    location: str
    missing: tuple[str, ...] = ()


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    path: Path | None = None,
    class_names: Sequence[str] | None = None,
) -> LabelledData:
    """Load a dataset into memory.

    ``digits`` comes with scikit-learn. ``mnist``, ``fashion-mnist``, ``cifar-10`` and
    ``cifar-100`` are read from ``data_dir``, by default ``$GOLDFISH_DATA``. ``image-folder`` and
    ``npz`` are your own data at ``path``; their classes are ``class_names``, in order, where they
    are given: a class of which all samples were deleted keeps its place.
    """
    if name in FORMATS:
        if path is None:
            raise ConfigError(f"The dataset {name!r} needs a path: where your data is.")
        (first, second), names = FORMATS[name](path, ("train", "test"), class_names)
        return LabelledData(name, _own(first), _own(second), len(names), names)
    if name not in DATASETS:
        known = (*DATASETS, *FORMATS)
        raise ConfigError(unknown("dataset", name, known, "'goldfish data list' lists all."))
    if path is not None:
        takers = " and ".join(map(repr, FORMATS))
        raise ConfigError(f"The dataset {name!r} takes no path; {takers} do.")
    dataset = DATASETS[name]
    source, classes = dataset.source, dataset.classes
    if isinstance(source, Installed):
        splits = source.read()
    else:
        splits = _read(name, source, classes, resolve_data_dir(data_dir, name))
    train, test = (TensorExamples(*split, mean=dataset.mean, std=dataset.std) for split in splits)
    return LabelledData(name, train, test, len(classes), classes)


def load_half(
    name: str, path: Path, split: Literal["train", "test"], class_names: Sequence[str] | None = None
) -> tuple[TensorExamples, tuple[str, ...]]:
    """Load one half of your own data, where the other half is on another machine.

    Return it with the names of the classes: those given, which all machines share, or its own.
    """
    if name not in FORMATS:
        hint = f"Data of one's own is one of {', '.join(FORMATS)}."
        raise ConfigError(unknown("kind of data", name, FORMATS, hint))
    (raw,), names = FORMATS[name](path, (split,), class_names)
    return _own(raw), names


def available(data_dir: Path | None = None) -> list[Availability]:
    """Return, for every dataset, whether it is there; ``data_dir`` as in :func:`load`."""
    try:
        root = resolve_data_dir(data_dir)
    except DataError:
        root = None
    found = []
    for name, dataset in DATASETS.items():
        if isinstance(dataset.source, Installed):
            found.append(Availability(name, True, f"part of {dataset.source.package}"))
        elif root is None:
            location = f"no data folder: ${ENVIRONMENT_VARIABLE} is not set"
            found.append(Availability(name, False, location))
        else:
            layout, missing = dataset.source.find(root)
            found.append(Availability(name, not missing, str(root / layout.folder), missing))
    return found + [Availability(name, True, "your own path") for name in FORMATS]


def resolve_data_dir(data_dir: Path | None = None, name: str = "NAME") -> Path:
    """Return the folder of the datasets: ``data_dir``, or else ``$GOLDFISH_DATA``."""
    if data_dir is not None:
        return data_dir
    from_environment = os.environ.get(ENVIRONMENT_VARIABLE)
    if not from_environment:
        raise DataError(
            f"No data folder is given. Name one with --data-dir or ${ENVIRONMENT_VARIABLE}; "
            f"'goldfish data fetch {name}' fills it."
        )
    return Path(from_environment)


def _read(
    name: str, source: Published, classes: Sequence[str], data_dir: Path
) -> Sequence[RawSplit]:
    """Read the files of a published dataset; an error says which one to fetch again."""
    layout, missing = source.find(data_dir)
    if missing:
        raise DataError(
            f"{name} is not complete in {data_dir / layout.folder}: {', '.join(missing)} missing. "
            f"Run 'goldfish data fetch {name}', or name another folder with --data-dir or "
            f"${ENVIRONMENT_VARIABLE}."
        )
    try:
        return [_read_parts(layout, p, data_dir, classes) for p in (layout.train, layout.test)]
    except DataError as error:
        raise DataError(f"{error} Delete it and run 'goldfish data fetch {name}'.") from error


def _read_parts(
    layout: Layout, parts: Sequence[Sequence[str]], data_dir: Path, classes: Sequence[str]
) -> RawSplit:
    images, labels = [], []
    for part in parts:
        paths = [layout.path(data_dir, file) for file in part]
        pixels, numbers = layout.read(*paths)
        if not bool(((numbers >= 0) & (numbers < len(classes))).all()):
            raise DataError(
                f"{paths[-1]}: labels {int(numbers.min())} to {int(numbers.max())} are out of "
                f"range; labels are 0 to {len(classes) - 1}."
            )
        images.append(pixels)
        labels.append(numbers)
    return RawSplit(torch.cat(images), torch.cat(labels), None)


def _own(split: RawSplit) -> TensorExamples:
    if split.images.dtype != torch.uint8:
        return TensorExamples(*split)
    middle = (0.5,) * split.images.shape[1]  # nobody has measured them: [0, 1] becomes [-1, 1]
    return TensorExamples(*split, mean=middle, std=middle)
