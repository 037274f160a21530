from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from goldfish.data import DatasetExamples, Subset, TensorExamples, as_examples
from goldfish.errors import DataError


def pixels(*values: int) -> Tensor:
    """One-pixel, one-channel images of these brightnesses."""
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)


class Pairs(Dataset[tuple[Tensor, int]]):
    """A map-style dataset that counts how often it is read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return torch.full((2,), float(index)), index % 3


def test_a_batch_is_scaled_and_normalised() -> None:
    """Brightness 51 is 0.2 of 255, and (0.2 - 0.1) / 0.5 = 0.2; 255 gives (1 - 0.1) / 0.5 = 1.8."""
    examples = TensorExamples(pixels(51, 255), torch.tensor([3, 4]), mean=[0.1], std=[0.5])
    inputs, labels = examples.batch(torch.tensor([1, 0]))
    assert inputs.dtype == torch.float32
    assert inputs.flatten().tolist() == pytest.approx([1.8, 0.2])
    assert labels.tolist() == [4, 3]


def test_each_channel_has_its_own_mean_and_std() -> None:
    images = torch.full((1, 2, 2, 3), 255, dtype=torch.uint8)
    examples = TensorExamples(images, torch.tensor([0]), mean=[0.0, 0.5], std=[1.0, 0.25])
    inputs, _ = examples.batch(torch.tensor([0]))
    assert inputs[0, 0].unique().tolist() == [1.0]
    assert inputs[0, 1].unique().tolist() == [2.0]


def test_images_are_not_copied_and_not_changed_by_a_batch() -> None:
    for images in (pixels(1, 2), torch.tensor([[1.0], [2.0]])):
        before = images.clone()
        examples = TensorExamples(images, torch.tensor([0, 1]), mean=[0.5], std=[0.5])
        examples.batch(torch.tensor([0, 1]))
        assert examples.images.data_ptr() == images.data_ptr()
        assert torch.equal(images, before)


def test_float_inputs_of_any_shape_pass_through() -> None:
    features = torch.randn(3, 7)
    inputs, _ = TensorExamples(features, torch.tensor([0, 1, 2])).batch(torch.tensor([2]))
    assert torch.equal(inputs, features[2:])


def test_ids_default_to_the_position() -> None:
    examples = TensorExamples(pixels(1, 2), torch.tensor([0, 1]))
    assert list(examples.ids) == ["0", "1"]


def test_to_moves_images_and_labels_and_keeps_the_rest() -> None:
    examples = TensorExamples(pixels(1, 2), torch.tensor([0, 1]), ["a", "b"], mean=[0.5], std=[0.5])
    moved = examples.to("meta")
    assert moved.images.device.type == moved.labels.device.type == "meta"
    assert (moved.ids, moved.mean, moved.std) == (examples.ids, (0.5,), (0.5,))
    inputs, labels = Subset(moved, [1]).batch(torch.tensor([0]))
    assert inputs.device.type == labels.device.type == "meta"
    assert examples.images.device.type == "cpu"


@pytest.mark.parametrize(
    ("images", "labels", "options", "words"),
    [
        (torch.zeros(2, 3, 3, dtype=torch.uint8), [0, 1], {}, r"\[N, C, H, W\]"),
        (torch.zeros(2, 3, dtype=torch.float64), [0, 1], {}, "float64"),
        (torch.zeros(2), [0, 1], {}, r"\[N, ...\]"),
        (torch.zeros(2, dtype=torch.int64), [0, 1], {}, r"int64 inputs need the shape \[N, ...\]"),
        (torch.zeros(2, 3, dtype=torch.bool), [0, 1], {}, "not torch.bool"),
        (torch.zeros(2, 3).long(), [0, 1], {"mean": [0.5] * 3, "std": [1.0] * 3}, "for images"),
        (pixels(1, 2), [0.5, 1.5], {}, "integer"),
        (pixels(1, 2), [[0], [1]], {}, "integer"),
        (pixels(1, 2), [0], {}, "2 images but 1 labels"),
        (pixels(1, 2), [0, -1], {}, "label -1"),
        (pixels(1, 2), [0, 1], {"ids": ["a"]}, "1 ids"),
        (pixels(1, 2), [0, 1], {"ids": ["a", "a"]}, "'a' occurs"),
        (pixels(1, 2), [0, 1], {"mean": [0.5]}, "both or neither"),
        (pixels(1, 2), [0, 1], {"mean": [0.5] * 3, "std": [0.5] * 3}, "1 channels"),
        (pixels(1, 2), [0, 1], {"mean": [0.5], "std": [0.0]}, "above 0"),
    ],
)
def test_wrong_tensors_are_refused(
    images: Tensor, labels: list[float], options: dict[str, list[float]], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        TensorExamples(images, torch.tensor(labels), **options)  # type: ignore[arg-type]


def test_a_subset_is_a_view_by_position() -> None:
    examples = TensorExamples(pixels(0, 51, 102, 153), torch.tensor([0, 1, 2, 3]))
    part = Subset(examples, torch.tensor([3, 1]))
    inputs, labels = part.batch(torch.tensor([0]))
    assert len(part) == 2
    assert list(part.ids) == ["3", "1"]
    assert part.labels.tolist() == [3, 1]
    assert inputs.item() == pytest.approx(0.6)
    assert labels.tolist() == [3]


def test_a_subset_of_a_subset_is_flat() -> None:
    examples = TensorExamples(pixels(0, 1, 2, 3), torch.tensor([0, 1, 2, 3]))
    inner = Subset(Subset(examples, [3, 2, 0]), [2, 0])
    assert inner.examples is examples
    assert list(inner.ids) == ["0", "3"]
    assert inner.batch(torch.tensor([1]))[1].tolist() == [3]


def test_a_subset_may_be_empty() -> None:
    empty = Subset(TensorExamples(pixels(0), torch.tensor([0])), [])
    inputs, labels = empty.batch(torch.empty(0, dtype=torch.int64))
    assert (len(empty), list(empty.ids), empty.labels.tolist()) == (0, [], [])
    assert (inputs.shape, labels.shape) == ((0, 1, 1, 1), (0,))


@pytest.mark.parametrize(
    ("positions", "words"),
    [([0, 2], "0 to 1"), ([-1], "-1"), ([0, 0], "twice"), ([0.5], "integers")],
)
def test_wrong_positions_are_refused(positions: list[int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Subset(TensorExamples(pixels(0, 1), torch.tensor([0, 1])), positions)


def test_a_dataset_is_batched_from_where_it_is() -> None:
    dataset = Pairs(5)
    examples = as_examples(dataset)
    inputs, labels = examples.batch(torch.tensor([4, 1]))
    assert dataset.reads == 2
    assert inputs.tolist() == [[4.0, 4.0], [1.0, 1.0]]
    assert labels.tolist() == [1, 1]
    assert labels.dtype == torch.int64


def test_labels_of_a_dataset_are_read_once() -> None:
    dataset = Pairs(5)
    examples = DatasetExamples(dataset, ids=list("abcde"))
    assert examples.labels.tolist() == examples.labels.tolist() == [0, 1, 2, 0, 1]
    assert dataset.reads == 5
    assert list(Subset(examples, [4]).ids) == ["e"]


def test_uint8_inputs_of_a_dataset_are_scaled() -> None:
    data = [(np.full((1, 2, 2), 51, dtype=np.uint8), np.int64(1))]
    inputs, _ = as_examples(data).batch(torch.tensor([0]))
    assert inputs.flatten().tolist() == pytest.approx([0.2] * 4)


def test_a_tensor_dataset_takes_the_fast_way() -> None:
    images, labels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    fast = as_examples(TensorDataset(images, labels))
    assert isinstance(fast, TensorExamples)
    assert fast.images.data_ptr() == images.data_ptr()
    assert isinstance(
        as_examples(TensorDataset(torch.zeros(2, 3).double(), labels)), TensorExamples
    )


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_token_ids_stay_what_they_are(dtype: torch.dtype) -> None:
    tokens, labels = torch.tensor([[1, 2**15 - 1], [3, 4]], dtype=dtype), torch.tensor([0, 1])
    fast = as_examples(TensorDataset(tokens, labels))
    assert isinstance(fast, TensorExamples)
    single = as_examples(TensorDataset(tokens[:, 0], labels))  # one token a sample
    slow = as_examples([(row.numpy(), 1) for row in tokens])
    for examples, wanted in ((fast, tokens), (slow, tokens), (single, tokens[:, 0])):
        inputs, _ = Subset(examples, [1, 0]).batch(torch.tensor([1, 0]))
        assert inputs.dtype == dtype
        assert torch.equal(inputs, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool])
def test_other_inputs_become_float32(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, 0.0]]).to(dtype)
    for data in (TensorDataset(values, torch.tensor([0])), [(values[0], 0)]):
        inputs, _ = as_examples(data).batch(torch.tensor([0]))
        assert inputs.dtype == torch.float32
        assert inputs.tolist() == [[1.0, 0.0]]


def test_examples_pass_through() -> None:
    examples = TensorExamples(pixels(1), torch.tensor([0]))
    assert as_examples(examples) is examples


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Stream(), "Stream is an IterableDataset"),
        (torch.zeros(3), "A Tensor is not labelled data"),
        ({"x": 1}, "A dict is not"),
        (7, "A int is not"),
    ],
)
def test_what_is_not_labelled_data_is_refused_with_words(data: object, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        as_examples(data)
    assert "__len__ and __getitem__" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"x": 1, "y": 2}], "gave a dict"),
        ([(torch.zeros(1), 0.5)], "integer label"),
        ([("text", 1)], "str"),
        ([(torch.zeros(1), 0), (torch.zeros(1), -100)], r"dataset\[1\] has the label -100"),
        ([(torch.zeros(1, dtype=torch.complex64), 0)], "complex numbers"),
        ([(torch.zeros(1), 0), (torch.zeros(2), 0)], "one shape"),
    ],
)
def test_unusable_samples_are_named(data: list[object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        as_examples(data).batch(torch.arange(len(data)))
