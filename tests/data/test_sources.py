from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from goldfish.data import DATASETS, FORMATS, available, load, readers
from goldfish.errors import ConfigError, DataError


def idx_bytes(values: list[int], *shape: int) -> bytes:
    header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return header + bytes(values)


def write_mnist(root: Path, name: str = "mnist") -> Path:
    """Three training and two test images of 2x2 pixels; half of the files gzipped."""
    folder = root / name
    folder.mkdir()
    train = gzip.compress(idx_bytes(list(range(12)), 3, 2, 2))
    (folder / "train-images-idx3-ubyte.gz").write_bytes(train)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes([5, 0, 9], 3)))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(list(range(8)), 2, 2, 2))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes([1, 2], 2))
    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_gzipped_or_not(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path, name)
    data = load(name, tmp_path)
    assert data.train.images.shape[1:] == (1, 2, 2)
    assert data.train.images[1].flatten().tolist() == [4, 5, 6, 7]
    assert data.train.labels.tolist() == [5, 0, 9]
    assert data.test.labels.tolist() == [1, 2]
    assert data.num_classes == len(data.class_names) == 10
    assert (data.train.mean, data.train.std) == (DATASETS[name].mean, DATASETS[name].std)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("t10k-images-idx3-ubyte", idx_bytes([0] * 7, 2, 2, 2), "7 bytes of data, 8 were"),
        ("t10k-images-idx3-ubyte", idx_bytes([0] * 9, 2, 2, 2), "9 bytes of data, 8 were"),
        ("t10k-images-idx3-ubyte", idx_bytes([1, 2], 2), "magic number 00000801"),
        ("t10k-images-idx3-ubyte", b"<html>", "magic number 3c68746d"),
        ("t10k-images-idx3-ubyte", b"", "magic number"),
        ("t10k-images-idx3-ubyte", b"\0\0\x08\x03\0\0", "truncated within its header"),
        ("t10k-labels-idx1-ubyte", idx_bytes([1, 10], 2), "labels 1 to 10 are out of range"),
        ("t10k-labels-idx1-ubyte", idx_bytes([1], 1), "2 images but"),
        ("train-images-idx3-ubyte.gz", b"not gzip", "cannot be read"),
        ("train-images-idx3-ubyte.gz", gzip.compress(b"x" * 999, mtime=0)[:-12], "cannot be read"),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(b"x", mtime=0)[:10] + b"\xff" * 9,
            "cannot be read",
        ),
    ],
)
def test_a_broken_idx_file_is_named_with_the_remedy(
    tmp_path: Path, file: str, content: bytes, words: str
) -> None:
    path = write_mnist(tmp_path) / file
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)
    assert "goldfish data fetch mnist" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write_mnist(tmp_path) / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz missing.*data fetch mnist"):
        load("mnist", tmp_path)


def test_no_data_folder_names_all_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOLDFISH_DATA", raising=False)
    with pytest.raises(DataError) as caught:
        load("cifar-10")
    for remedy in ("--data-dir", "$GOLDFISH_DATA", "goldfish data fetch cifar-10"):
        assert remedy in str(caught.value)


def test_the_data_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    monkeypatch.setenv("GOLDFISH_DATA", str(tmp_path))
    assert len(load("mnist").train) == 3


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fashion-mnist'"):
        load("fashion_mnist")


def test_path_belongs_to_own_data_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no path"):
        load("digits", path=tmp_path)
    with pytest.raises(ConfigError, match="needs a path"):
        load("npz")


def test_digits_are_a_fixed_stratified_split() -> None:
    data = load("digits")
    assert data.train.images.shape[1:] == (1, 28, 28)
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.max() == 255
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert sorted(map(int, (*data.train.ids, *data.test.ids))) == list(range(1797))
    assert data.test.labels.bincount().min() >= 35
    again = load("digits")
    assert again.test.ids == data.test.ids
    assert torch.equal(again.train.images, data.train.images)


def test_a_digit_keeps_the_label_of_scikit_learn() -> None:
    """scikit-learn's first ten digits are 0 to 9."""
    data = load("digits")
    labels = {
        id_: int(label)
        for split in (data.train, data.test)
        for id_, label in zip(split.ids, split.labels, strict=True)
    }
    assert [labels[str(index)] for index in range(10)] == list(range(10))


def test_digits_are_those_of_scikit_learn() -> None:
    """Its own reader is the slow, obvious one: half of a short task went into importing it."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    table = readers._digits_table().numpy()
    assert (table[:, :-1] == pixels).all()
    assert (table[:, -1] == labels).all()


def test_normalised_digits_have_mean_0_and_std_1() -> None:
    data = load("digits")
    inputs, _ = data.train.batch(torch.arange(len(data.train)))
    assert inputs.mean().item() == pytest.approx(0.0, abs=1e-3)
    assert inputs.std().item() == pytest.approx(1.0, abs=1e-3)


def test_available_says_what_is_there_and_what_is_missing(tmp_path: Path) -> None:
    (write_mnist(tmp_path) / "t10k-images-idx3-ubyte").unlink()
    write_mnist(tmp_path, "fashion-mnist")
    found = {entry.name: entry for entry in available(tmp_path)}
    assert list(found) == [*DATASETS, *FORMATS]
    assert found["digits"].present
    assert found["fashion-mnist"].present
    assert not found["mnist"].present
    assert found["mnist"].missing == ("t10k-images-idx3-ubyte.gz",)
    assert found["mnist"].location == str(tmp_path / "mnist")
    assert "test_batch.bin" in found["cifar-10"].missing


def test_available_without_a_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOLDFISH_DATA", raising=False)
    found = {entry.name: entry for entry in available()}
    assert found["digits"].present
    assert not found["mnist"].present
    assert "GOLDFISH_DATA" in found["mnist"].location
