"""Your own images: a folder a class, or one npz file of arrays."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from goldfish.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
NPZ_ARRAYS = tuple(f"{kind}_{split}" for split in ("train", "test") for kind in ("x", "y", "ids"))
_GRAY, _RGB = 1, 3


class RawSplit(NamedTuple):
    """Images ``[N, ...]`` (uint8 ``[N, C, H, W]`` or float32), labels, and ids where known."""

    images: Tensor
    labels: Tensor
    ids: tuple[str, ...] | None


def read_image_folder(
    path: Path, splits: Sequence[str], class_names: Sequence[str] | None = None
) -> tuple[list[RawSplit], tuple[str, ...]]:
    """Read ``path/SPLIT/CLASS/*`` of each split; return them and the class names.

    ``class_names`` are those of all machines, in order; by default those of the first split. Of
    named classes there may be no images here.
    """
    folders = {split: _class_folders(path / split) for split in splits}
    names = folders[splits[0]] if class_names is None else tuple(class_names)
    for split in splits:
        strange = set(folders[split]) - set(names)
        if strange:
            place = path / split / min(strange)
            if class_names is None:
                raise DataError(f"{place}: this class has no folder in {path / splits[0]}.")
            known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise DataError(f"{place}: the federation has no such class, but {known}.")
    files = [
        _image_files(path / split, folders[split], may_be_empty=class_names is not None)
        for split in splits
    ]
    images = torch.from_numpy(_stack([file for part in files for file in part]))
    parts = [
        RawSplit(
            pixels,
            torch.tensor([names.index(file.parent.name) for file in part]),
            tuple(f"{file.parent.name}/{file.name}" for file in part),
        )
        for pixels, part in zip(images.split([len(part) for part in files]), files, strict=True)
    ]
    return parts, names


def _stack(files: Sequence[Path]) -> npt.NDArray[np.uint8]:
    """Read images of one size into one array, ``[N, C, H, W]``."""
    arrays = {file: _read_image(file) for file in files}
    height, width, _ = arrays[files[0]].shape
    for file, array in arrays.items():
        if array.shape[:2] != (height, width):
            raise DataError(
                f"{file}: {array.shape[1]}x{array.shape[0]} pixels, but {files[0]} has "
                f"{width}x{height}. All images need one size; resize them first."
            )
    shape = height, width, max(array.shape[2] for array in arrays.values())
    stacked = np.stack([np.broadcast_to(array, shape) for array in arrays.values()])
    return np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def read_npz(
    path: Path, splits: Sequence[str], class_names: Sequence[str] | None = None
) -> tuple[list[RawSplit], tuple[str, ...]]:
    """Read ``x_SPLIT``, ``y_SPLIT`` (and ``ids_SPLIT``) of an npz file, which may have the others.

    Return the splits and the names of the classes: ``class_names``, those of all machines, in
    order; by default their numbers.
    """
    arrays = _npz_arrays(path, [f"{kind}_{split}" for split in splits for kind in "xy"])
    parts = [_npz_split(path, arrays, split) for split in splits]
    if len({(part.images.shape[1:], part.images.dtype) for part in parts}) > 1:
        raise DataError(f"{path}: x_train and x_test differ in the shape or type of a sample.")
    most = max(int(part.labels.max()) for part in parts)
    names = tuple(class_names or map(str, range(most + 1)))
    if most >= len(names):
        raise DataError(f"{path}: has the label {most}, but the federation {len(names)} classes.")
    return parts, names


def _npz_arrays(path: Path, needed: Sequence[str]) -> dict[str, npt.NDArray[np.generic]]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: is a single array. Write it with numpy.savez.")
            strange = [name for name in loaded.files if name not in NPZ_ARRAYS]
            if strange:
                raise DataError(
                    f"{path}: it has arrays that nothing reads: {', '.join(strange[:10])}"
                    f"{', ...' * (len(strange) > 10)}. Known are {', '.join(NPZ_ARRAYS)}. Rename "
                    "them, or leave them out."
                )
            arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as npz of plain arrays ({error}).") from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise DataError(
            f"{path}: {', '.join(missing)} missing; it has {', '.join(arrays) or 'nothing'}."
        )
    return arrays


def _class_folders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(
            f"{folder} is missing. An image folder holds train/CLASS/*.png and test/CLASS/*.png."
        )
    names = tuple(sorted(e.name for e in folder.iterdir() if e.is_dir() and not _hidden(e)))
    if not names:
        raise DataError(f"{folder}: has no folders; one folder of images a class is needed.")
    return names


def _hidden(path: Path) -> bool:
    """Tell whether a program put it there for itself: .DS_Store, ._cat.png, .ipynb_checkpoints."""
    return path.name.startswith(".")


def _image_files(folder: Path, names: Sequence[str], *, may_be_empty: bool) -> list[Path]:
    files = []
    for name in names:
        found = sorted(
            f for f in (folder / name).iterdir() if f.suffix.lower() in SUFFIXES and not _hidden(f)
        )
        if not found and not may_be_empty:
            raise DataError(f"{folder / name}: has no images ({', '.join(SUFFIXES)}).")
        files += found
    if not files:
        raise DataError(f"{folder}: has no images ({', '.join(SUFFIXES)}).")
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
