"""The datasets by name: load one, or see which are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from goldfish.data import cifar, folder, idx
from goldfish.data.examples import TensorExamples
from goldfish.errors import ConfigError, DataError, unknown
from goldfish.randomness import generator

ENVIRONMENT_VARIABLE = "GOLDFISH_DATA"

# Mean and standard deviation a channel, computed on each training split scaled to [0, 1].
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.3057,), (0.3248,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar-100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_MIDDLE = 0.5  # mean and std of images that nobody has measured: [0, 1] becomes [-1, 1]

_DIGIT_NAMES = tuple(str(digit) for digit in range(10))
_CLASS_NAMES = {
    "mnist": _DIGIT_NAMES,
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar-10": (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
}

_DIGITS_SIDE = 28
_DIGITS_MAX = 16  # scikit-learn's pixels run from 0 to 16
_DIGITS_TEST_SHARE = 0.2
_DIGITS_SEED = 0


@dataclass(frozen=True)
class LabelledData:
    """A dataset as it comes: a training split for the clients and a test split for the server."""

    name: str
    train: TensorExamples
    test: TensorExamples
    num_classes: int
    class_names: tuple[str, ...]

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of one input: ``(C, H, W)`` for images."""
        return tuple(self.train.images.shape[1:])


@dataclass(frozen=True)
class Availability:
    """Whether a dataset can be loaded, where it was looked for, and which files it lacks."""

    name: str
    present: bool
    location: str
    missing: tuple[str, ...] = ()


def load(name: str, data_dir: Path | None = None, *, path: Path | None = None) -> LabelledData:
    """Load a dataset into memory.

    ``digits`` comes with scikit-learn. ``mnist``, ``fashion-mnist``, ``cifar-10`` and
    ``cifar-100`` are read from ``data_dir``, by default ``$GOLDFISH_DATA``. ``image-folder`` and
    ``npz`` are your own data at ``path``.
    """
    if name not in SOURCES:
        raise ConfigError(unknown("dataset", name, SOURCES, "'goldfish data list' lists all."))
    if name in _FROM_PATH:
        if path is None:
            raise ConfigError(f"The dataset {name!r} needs a path: where your data is.")
        return _FROM_PATH[name](name, path)
    if path is not None:
        raise ConfigError(f"The dataset {name!r} takes no path; 'image-folder' and 'npz' do.")
    if name == "digits":
        return _load_digits()
    return _PUBLISHED[name](name, resolve_data_dir(data_dir, name))


def load_half(
    name: str, path: Path, split: Literal["train", "test"], class_names: Sequence[str] | None = None
) -> tuple[TensorExamples, tuple[str, ...]]:
    """Load one half of your own data, where the other half is on another machine.

    Return it with the names of the classes: those given, which all machines share, or its own.
    """
    if name not in _FROM_PATH:
        hint = f"Data of one's own is one of {', '.join(_FROM_PATH)}."
        raise ConfigError(unknown("kind of data", name, _FROM_PATH, hint))
    if name == "image-folder":
        raw, names = folder.read_image_folder_half(path, split, class_names)
        return _own(raw), names
    raw = folder.read_npz_half(path, split)
    most = int(raw.labels.max())
    names = tuple(class_names or (str(label) for label in range(most + 1)))
    if most >= len(names):
        raise DataError(f"{path}: has the label {most}, but the federation {len(names)} classes.")
    return _own(raw), names


def available(data_dir: Path | None = None) -> list[Availability]:
    """Return, for every dataset, whether it is there; ``data_dir`` as in :func:`load`."""
    try:
        root = resolve_data_dir(data_dir)
    except DataError:
        root = None
    found = [Availability("digits", present=True, location="part of scikit-learn")]
    for name in _PUBLISHED:
        if root is None:
            location = f"no data folder: ${ENVIRONMENT_VARIABLE} is not set"
            found.append(Availability(name, present=False, location=location))
            continue
        place, missing = _look_for(name, root)
        found.append(Availability(name, not missing, str(place), missing))
    found += [Availability(name, present=True, location="your own path") for name in _FROM_PATH]
    return found


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


def _look_for(name: str, data_dir: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of a published dataset and the files that it lacks."""
    if name in cifar.LAYOUTS:
        layout, missing = cifar.find(name, data_dir)
        return data_dir / layout.folder, missing
    return data_dir / name, idx.missing_files(data_dir / name)


def _demand(name: str, data_dir: Path) -> None:
    place, missing = _look_for(name, data_dir)
    if missing:
        raise DataError(
            f"{name} is not complete in {place}: {', '.join(missing)} missing. "
            f"Run 'goldfish data fetch {name}', or name another folder with --data-dir or "
            f"${ENVIRONMENT_VARIABLE}."
        )


def _remedy(name: str) -> str:
    return f"Delete it and run 'goldfish data fetch {name}'."


def _load_idx(name: str, data_dir: Path) -> LabelledData:
    _demand(name, data_dir)
    classes = _CLASS_NAMES[name]
    train = idx.read_split(data_dir / name, "train", len(classes), _remedy(name))
    test = idx.read_split(data_dir / name, "test", len(classes), _remedy(name))
    return _published(name, train, test, classes)


def _load_cifar(name: str, data_dir: Path) -> LabelledData:
    _demand(name, data_dir)
    layout, _ = cifar.find(name, data_dir)
    remedy = _remedy(name)
    classes = (
        _CLASS_NAMES.get(name)
        or cifar.fine_label_names(data_dir, layout, remedy)
        or tuple(str(label) for label in range(100))
    )
    train = cifar.read_split(data_dir, layout, "train", len(classes), remedy)
    test = cifar.read_split(data_dir, layout, "test", len(classes), remedy)
    return _published(name, train, test, classes)


def _published(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: tuple[str, ...]
) -> LabelledData:
    mean, std = NORMALISATION[name]
    return LabelledData(
        name,
        TensorExamples(*train, mean=mean, std=std),
        TensorExamples(*test, mean=mean, std=std),
        len(classes),
        classes,
    )


def _load_digits() -> LabelledData:
    """Load scikit-learn's 1797 digits, enlarged to MNIST's size; ids are scikit-learn's order."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    small = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / _DIGITS_MAX
    large = nn.functional.interpolate(small, size=(_DIGITS_SIDE, _DIGITS_SIDE), mode="bilinear")
    images = (large * 255).round().to(torch.uint8)
    labels = torch.tensor(targets, dtype=torch.int64)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    draw = generator(_DIGITS_SEED, "digits split")
    for digit in range(len(_DIGIT_NAMES)):
        members = (labels == digit).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=draw)]
        is_test[shuffled[: round(len(members) * _DIGITS_TEST_SHARE)]] = True
    mean, std = NORMALISATION["digits"]
    train, test = (
        TensorExamples(
            images[mask],
            labels[mask],
            [str(index) for index in mask.nonzero().flatten().tolist()],
            mean=mean,
            std=std,
        )
        for mask in (~is_test, is_test)
    )
    return LabelledData("digits", train, test, len(_DIGIT_NAMES), _DIGIT_NAMES)


def _load_image_folder(name: str, path: Path) -> LabelledData:
    train, test, classes = folder.read_image_folder(path)
    return LabelledData(name, _own(train), _own(test), len(classes), classes)


def _load_npz(name: str, path: Path) -> LabelledData:
    train, test = folder.read_npz(path)
    num_classes = 1 + max(int(train.labels.max()), int(test.labels.max()))
    classes = tuple(str(label) for label in range(num_classes))
    return LabelledData(name, _own(train), _own(test), num_classes, classes)


def _own(split: folder.RawSplit) -> TensorExamples:
    if split.images.dtype != torch.uint8:
        return TensorExamples(split.images, split.labels, split.ids)
    middle = (_MIDDLE,) * split.images.shape[1]
    return TensorExamples(split.images, split.labels, split.ids, mean=middle, std=middle)


_PUBLISHED: dict[str, Callable[[str, Path], LabelledData]] = {
    "mnist": _load_idx,
    "fashion-mnist": _load_idx,
    "cifar-10": _load_cifar,
    "cifar-100": _load_cifar,
}
_FROM_PATH: dict[str, Callable[[str, Path], LabelledData]] = {
    "image-folder": _load_image_folder,
    "npz": _load_npz,
}
SOURCES = ("digits", *_PUBLISHED, *_FROM_PATH)
"""The names of all datasets."""
