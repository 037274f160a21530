"""Your own images: a folder a class, or one npz file of arrays."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from goldfish.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
_GRAY, _RGB = 1, 3


@dataclass(frozen=True)
class RawSplit:
    """Images ``[N, ...]`` (uint8 ``[N, C, H, W]`` or float32), labels, and ids where known."""

    images: Tensor
    labels: Tensor
    ids: tuple[str, ...] | None


def read_image_folder(path: Path) -> tuple[RawSplit, RawSplit, tuple[str, ...]]:
    """Read ``path/train/CLASS/*`` and ``path/test/CLASS/*``; return both and the class names."""
    class_names = _class_names(path / "train")
    unknown_classes = set(_class_names(path / "test")) - set(class_names)
    if unknown_classes:
        raise DataError(
            f"{path / 'test' / min(unknown_classes)}: this class has no folder in {path / 'train'}."
        )
    files = {split: _image_files(path / split) for split in ("train", "test")}
    stacked = _stack([file for split in files.values() for file in split])
    place = len(files["train"])
    train = _folder_split(stacked[:place], files["train"], class_names)
    return train, _folder_split(stacked[place:], files["test"], class_names), class_names


def read_image_folder_half(
    path: Path, split: str, class_names: Sequence[str] | None = None
) -> tuple[RawSplit, tuple[str, ...]]:
    """Read ``path/SPLIT/CLASS/*`` alone; ``class_names`` are those of all machines, in order."""
    own = _class_names(path / split)
    names = own if class_names is None else tuple(class_names)
    strange = sorted(set(own) - set(names))
    if strange:
        raise DataError(
            f"{path / split / strange[0]}: the federation has no such class, but {listed(names)}."
        )
    files = _image_files(path / split)
    return _folder_split(_stack(files), files, names), names


def listed(names: Sequence[str]) -> str:
    """Return some names in a row."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _stack(files: Sequence[Path]) -> npt.NDArray[np.uint8]:
    """Read images of one size into one array, ``[N, H, W, C]``."""
    arrays = {file: _read_image(file) for file in files}
    first = files[0]
    size = arrays[first].shape[:2]
    for file, array in arrays.items():
        if array.shape[:2] != size:
            raise DataError(
                f"{file}: {_size(array)} pixels, but {first} has {_size(arrays[first])}. All "
                "images need one size; resize them first."
            )
    channels = max(array.shape[2] for array in arrays.values())
    return np.stack([np.broadcast_to(arrays[file], (*size, channels)) for file in files])


def _folder_split(
    stacked: npt.NDArray[np.uint8], files: Sequence[Path], class_names: Sequence[str]
) -> RawSplit:
    return RawSplit(
        torch.from_numpy(np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))),
        torch.tensor([class_names.index(file.parent.name) for file in files]),
        tuple(f"{file.parent.name}/{file.name}" for file in files),
    )


def read_npz(path: Path) -> tuple[RawSplit, RawSplit, tuple[str, ...]]:
    """Read ``x_train``, ``y_train``, ``x_test``, ``y_test`` (and ``ids_train``) of an npz file.

    Return both splits and the names of the classes, which are their numbers.
    """
    arrays = _npz_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    train, test = (_npz_split(path, arrays, split) for split in ("train", "test"))
    if train.images.shape[1:] != test.images.shape[1:] or train.images.dtype != test.images.dtype:
        raise DataError(f"{path}: x_train and x_test differ in the shape or type of a sample.")
    return train, test, _numbers(max(int(train.labels.max()), int(test.labels.max())))


def read_npz_half(
    path: Path, split: str, class_names: Sequence[str] | None = None
) -> tuple[RawSplit, tuple[str, ...]]:
    """Read ``x_SPLIT``, ``y_SPLIT`` (and ``ids_SPLIT``) of an npz file that may have no others.

    ``class_names`` are those of all machines, in order.
    """
    half = _npz_split(path, _npz_arrays(path, (f"x_{split}", f"y_{split}")), split)
    most = int(half.labels.max())
    names = tuple(class_names or _numbers(most))
    if most >= len(names):
        raise DataError(f"{path}: has the label {most}, but the federation {len(names)} classes.")
    return half, names


def _numbers(most: int) -> tuple[str, ...]:
    return tuple(str(label) for label in range(most + 1))


def _npz_arrays(path: Path, needed: Sequence[str]) -> dict[str, npt.NDArray[np.generic]]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: is a single array. Write it with numpy.savez.")
            arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as npz of plain arrays ({error}).") from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise DataError(
            f"{path}: {', '.join(missing)} missing; it has {', '.join(arrays) or 'nothing'}."
        )
    return arrays


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(
            f"{folder} is missing. An image folder holds train/CLASS/*.png and test/CLASS/*.png."
        )
    names = tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
    if not names:
        raise DataError(f"{folder}: has no folders; one folder of images a class is needed.")
    return names


def _image_files(folder: Path) -> list[Path]:
    files = []
    for name in _class_names(folder):
        found = sorted(f for f in (folder / name).iterdir() if f.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{folder / name}: has no images ({', '.join(SUFFIXES)}).")
        files += found
    return files


def _read_image(path: Path) -> npt.NDArray[np.uint8]:
    """Return one image as ``[H, W, C]``, of 1 channel when it is gray and else of 3."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{path}: has more than 8 bits a pixel. Convert it to 8 bits.")
            gray = image.mode in ("1", "L")
            pixels = np.asarray(image.convert("L" if gray else "RGB"), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error}).") from error
    return pixels.reshape(*pixels.shape[:2], _GRAY if gray else _RGB)


def _size(array: npt.NDArray[np.uint8]) -> str:
    return f"{array.shape[1]}x{array.shape[0]}"


def _npz_split(path: Path, arrays: dict[str, npt.NDArray[np.generic]], split: str) -> RawSplit:
    x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(
            f"{path}: y_{split} needs one integer label a sample, not {y.dtype} {y.shape}."
        )
    if len(x) != len(y) or len(y) == 0:
        raise DataError(f"{path}: x_{split} has {len(x)} samples, y_{split} has {len(y)} labels.")
    if y.min() < 0:
        raise DataError(f"{path}: y_{split} has the label {y.min()}; labels count from 0.")
    ids = arrays.get(f"ids_{split}")
    return RawSplit(
        torch.from_numpy(_channels_first(path, f"x_{split}", x)),
        torch.from_numpy(y.astype(np.int64)),
        None if ids is None else tuple(str(id_) for id_ in ids),
    )


def _channels_first(path: Path, name: str, x: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return images as ``[N, C, H, W]``; float arrays of other shapes stay as they are."""
    if np.issubdtype(x.dtype, np.floating):
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise DataError(f"{path}: {name} holds values that are not finite.")
    elif x.dtype != np.uint8:
        raise DataError(f"{path}: {name} is {x.dtype}; uint8 or a float type is needed.")
    if x.ndim == 3:
        return np.ascontiguousarray(x[:, None])
    if x.ndim == 4 and x.shape[1] in (_GRAY, _RGB):
        return np.ascontiguousarray(x)
    if x.ndim == 4 and x.shape[3] in (_GRAY, _RGB):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.dtype == np.uint8:
        raise DataError(
            f"{path}: {name} has the shape {x.shape}; images are (N, H, W), (N, H, W, C) or "
            "(N, C, H, W), with 1 or 3 channels."
        )
    return np.ascontiguousarray(x)
