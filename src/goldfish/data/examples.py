"""Labelled data by position: tensors in memory, views of them, and any map-style dataset."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from goldfish.errors import DataError
from goldfish.hardware.gpu import open_queues
from goldfish.types import Examples

_PIXEL_MAX = 255.0

PREPARED_BYTES = 4 * 2**30
"""Up to this size a GPU keeps inputs as float32, normalised once, beside the images."""


class TensorExamples:
    """Labelled data held in memory as tensors; a batch is one indexing operation.

    ``images`` is uint8 ``[N, C, H, W]``, float32 ``[N, ...]``, or another integer type ``[N, ...]``
    (token ids), and is kept without a copy. uint8 is scaled to [0, 1] when a batch is read; other
    integers stay what they are. ``mean`` and ``std``, one number a channel, are then subtracted and
    divided by. ``ids`` defaults to the position of each sample, as text.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        ids: Sequence[str] | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        _check(images, labels)
        self.images = images
        self.labels = labels.to(images.device, torch.int64)
        self.ids = _checked_ids(ids, len(images))
        self.mean = None if mean is None else tuple(mean)
        self.std = None if std is None else tuple(std)
        self._scale = _checked_scale(images, self.mean, self.std)
        self._prepared: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs, normalised, and the labels (int64) at ``positions``."""
        positions = positions.to(self.images.device)
        if self._prepared is not None:
            inputs = self._prepared.index_select(0, positions)
        else:
            inputs = self._normalise(self.images.index_select(0, positions))
        return inputs, self.labels.index_select(0, positions)

    def to(self, device: torch.device | str) -> TensorExamples:
        """Return these examples with images and labels on ``device``, where batches then arise."""
        if torch.device(device).type == "cuda":
            open_queues()
        moved = copy.copy(self)
        moved.images = self.images.to(device)
        moved.labels = self.labels.to(device)
        moved._scale = None if self._scale is None else self._scale.to(device)
        moved._prepared = None
        as_it_is = self._scale is None and self.images.dtype != torch.uint8
        if moved.images.is_cuda and not as_it_is and 4 * moved.images.numel() <= PREPARED_BYTES:
            moved._prepared = moved._normalise(moved.images.clone())
        return moved

    def _normalise(self, inputs: Tensor) -> Tensor:
        """Return images of one's own as inputs, changed in place where that is possible."""
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().div_(_PIXEL_MAX)
        if self._scale is not None:
            mean, std = self._scale
            inputs = inputs.sub_(mean).div_(std)
        return inputs


class Subset:
    """The samples of ``examples`` at ``positions``, in that order, without a copy.

    A subset of a subset looks straight into the data below both.
    """

    def __init__(self, examples: Examples, positions: Tensor | Sequence[int]) -> None:
        positions = _checked_positions(positions, len(examples))
        if isinstance(examples, Subset):
            positions = examples.positions[positions.to(examples.positions.device)]
            examples = examples.examples
        if isinstance(examples, TensorExamples):  # so that no batch waits for a copy
            positions = positions.to(examples.images.device)
        self.examples: Examples = examples
        self.positions: Tensor = positions

    @cached_property
    def ids(self) -> Sequence[str]:
        """One id a sample."""
        ids = self.examples.ids
        return tuple(ids[position] for position in self.positions.tolist())

    @property
    def labels(self) -> Tensor:
        """All labels, int64, in order."""
        labels = self.examples.labels
        return labels[self.positions.to(labels.device)]

    def __len__(self) -> int:
        return len(self.positions)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the labels (int64) at ``positions`` of this view."""
        return self.examples.batch(self.positions[positions.to(self.positions.device)])


class DatasetExamples:
    """Any map-style dataset of ``(input, label)`` pairs, read sample by sample from where it is.

    For data that does not fit in memory; :class:`TensorExamples` is much faster for data that
    does. Inputs are whatever ``dataset[i]`` gives, stacked: uint8 is scaled to [0, 1], other
    integers (token ids) stay what they are, and the rest becomes float32.
    """

    def __init__(self, dataset: Any, ids: Sequence[str] | None = None) -> None:
        self.dataset = dataset
        self.ids = _checked_ids(ids, len(dataset))

    @cached_property
    def labels(self) -> Tensor:
        """All labels, int64, in order. The first use reads the whole dataset once."""
        return torch.tensor([self._item(i)[1] for i in range(len(self))], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs and the labels (int64) at ``positions``."""
        items = [self._item(position) for position in positions.tolist()]
        try:
            inputs = torch.stack([item[0] for item in items])
        except RuntimeError as error:
            raise DataError(
                f"The inputs of the dataset cannot be stacked to a batch ({error}). "
                "All inputs need one shape; resize or pad them in the dataset."
            ) from error
        labels = torch.tensor([item[1] for item in items], dtype=torch.int64)
        if inputs.dtype == torch.uint8:
            inputs = inputs.float().div_(_PIXEL_MAX)
        return inputs if _are_token_ids(inputs) else inputs.float(), labels

    def _item(self, position: int) -> tuple[Tensor, int]:
        item = self.dataset[position]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"dataset[{position}] gave a {type(item).__name__}; a pair (input, label) is "
                "needed."
            )
        try:
            inputs, label = torch.as_tensor(item[0]), operator.index(item[1])
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"dataset[{position}] gave ({type(item[0]).__name__}, {type(item[1]).__name__}); "
                "a tensor or array and an integer label are needed. A transform to tensors may "
                f"be missing ({error})."
            ) from error
        if label < 0:  # PyTorch passes over samples with the label -100
            raise DataError(f"dataset[{position}] has the label {label}; labels count from 0.")
        if inputs.is_complex():
            raise DataError(
                f"dataset[{position}] gave complex numbers; give real and imaginary parts apart."
            )
        return inputs, label


def as_examples(data: object) -> Examples:
    """Return ``data`` as examples: examples themselves, or a map-style ``Dataset`` of pairs.

    A ``TensorDataset`` of two tensors stays in memory and takes the fast way.
    """
    accepted = (
        "Accepted are Goldfish examples and map-style datasets of (input, label) pairs, "
        "with __len__ and __getitem__."
    )
    if hasattr(data, "ids") and hasattr(data, "batch"):
        return data  # type: ignore[return-value]
    if isinstance(data, IterableDataset):
        raise DataError(
            f"{type(data).__name__} is an IterableDataset: its samples have no position, so none "
            f"of them could be removed. {accepted}"
        )
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        images, labels = data.tensors
        if images.dtype == torch.uint8 and images.dim() == 4:
            return TensorExamples(images, labels)
        if images.is_floating_point() and images.dim() > 1:
            return TensorExamples(images.float(), labels)
        if _are_token_ids(images) and images.dim() > 1:
            return TensorExamples(images, labels)
    no_dataset = isinstance(data, str | bytes | tuple | Mapping | Tensor | np.ndarray)
    if no_dataset or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(f"A {type(data).__name__} is not labelled data. {accepted}")
    return DatasetExamples(data)


def _are_token_ids(inputs: Tensor) -> bool:
    """Tell whether the inputs are integers that mean something as such: pixels are uint8."""
    numbers = inputs.is_floating_point() or inputs.is_complex()
    return not numbers and inputs.dtype not in (torch.uint8, torch.bool)


def _check(images: Tensor, labels: Tensor) -> None:
    if images.dtype == torch.uint8 and images.dim() != 4:
        raise DataError(f"uint8 images need the shape [N, C, H, W], not {list(images.shape)}.")
    if images.dtype not in (torch.uint8, torch.float32) and not _are_token_ids(images):
        raise DataError(
            f"Inputs need uint8 (images), float32 or another integer type (token ids), not "
            f"{images.dtype}. Convert them first."
        )
    if images.dim() < 2 and not images.numel():
        raise DataError("There are no samples. The file that they are read from may be empty.")
    if images.dim() < 2:
        raise DataError(f"{images.dtype} inputs need the shape [N, ...], not {list(images.shape)}.")
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"Labels need to be one integer a sample, not {labels.dtype} of shape "
            f"{list(labels.shape)}."
        )
    if len(labels) != len(images):
        raise DataError(f"There are {len(images)} images but {len(labels)} labels.")
    if len(labels) and int(labels.min()) < 0:
        raise DataError(f"Labels count from 0; there is a label {int(labels.min())}.")


def _checked_ids(ids: Sequence[str] | None, count: int) -> Sequence[str]:
    if ids is None:
        return tuple(str(index) for index in range(count))
    if len(ids) != count:
        raise DataError(f"There are {count} samples but {len(ids)} ids.")
    if not all(isinstance(sample_id, str) for sample_id in ids):
        raise DataError("Sample ids are strings; write ids=[str(i) for i in ids].")
    if len(set(ids)) != count:
        repeated = Counter(ids).most_common(1)[0][0]
        raise DataError(f"Sample ids must be unique; {repeated!r} occurs more than once.")
    return tuple(ids)


def _checked_scale(
    images: Tensor, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> Tensor | None:
    """Return mean and std of the channels as a tensor that fits the images of a batch."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise DataError("mean and std belong together: give both or neither.")
    if _are_token_ids(images):
        raise DataError(f"mean and std are for images, not for {images.dtype} inputs.")
    channels = images.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise DataError(
            f"Images of {channels} channels need {channels} values of mean and std, "
            f"not {len(mean)} and {len(std)}."
        )
    if min(std) <= 0:
        raise DataError(f"std must be above 0, not {std}.")
    scale = torch.tensor([mean, std], device=images.device)
    return scale.view(2, channels, *[1] * (images.dim() - 2))


def _checked_positions(positions: Tensor | Sequence[int], count: int) -> Tensor:
    tensor = torch.as_tensor(positions)
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise DataError(f"Positions are a list of integers, not {tensor.dtype} {tensor.shape}.")
    tensor = tensor.to(torch.int64)
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= count:
        raise DataError(f"Positions run from 0 to {count - 1}; {low} to {high} were given.")
    if len(tensor.unique()) != len(tensor):
        raise DataError("A subset holds each sample once; some position is given twice.")
    return tensor
