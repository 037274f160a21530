from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from goldfish.data import load
from goldfish.errors import DataError


def save(path: Path, value: int | tuple[int, int, int], size: tuple[int, int] = (4, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "L" if isinstance(value, int) else "RGB"
    Image.new(mode, size, value).save(path)


def write_images(root: Path) -> Path:
    """Two classes of gray images, 4 wide and 3 high."""
    save(root / "train" / "cat" / "b.png", 20)
    save(root / "train" / "cat" / "a.png", 10)
    save(root / "train" / "ant" / "x.BMP", 30)
    save(root / "test" / "cat" / "t.png", 40)
    return root


def test_an_image_folder_has_sorted_classes_and_relative_ids(tmp_path: Path) -> None:
    data = load("image-folder", path=write_images(tmp_path))
    assert data.class_names == ("ant", "cat")
    assert list(data.train.ids) == ["ant/x.BMP", "cat/a.png", "cat/b.png"]
    assert data.train.labels.tolist() == [0, 1, 1]
    assert data.train.images.shape[1:] == (1, 3, 4)
    assert data.train.images[:, 0, 0, 0].tolist() == [30, 10, 20]
    assert list(data.test.ids) == ["cat/t.png"]
    assert data.test.labels.tolist() == [1]
    assert (data.train.mean, data.train.std) == ((0.5,), (0.5,))


def test_given_classes_keep_their_numbers_whatever_is_there(tmp_path: Path) -> None:
    shutil.rmtree(write_images(tmp_path) / "train" / "ant")
    (tmp_path / "test" / "bee").mkdir()
    data = load("image-folder", path=tmp_path, class_names=("ant", "bee", "cat"))
    assert data.class_names == ("ant", "bee", "cat")
    assert data.train.labels.tolist() == [2, 2]
    for image in (tmp_path / "train" / "cat").iterdir():
        image.unlink()
    with pytest.raises(DataError, match=r"train: has no images"):
        load("image-folder", path=tmp_path, class_names=("ant", "bee", "cat"))


def test_one_colour_image_makes_all_of_them_rgb(tmp_path: Path) -> None:
    save(write_images(tmp_path) / "train" / "ant" / "y.png", (1, 2, 3))
    data = load("image-folder", path=tmp_path)
    assert data.train.images.shape[1:] == (3, 3, 4)
    pixel = {id_: data.train.images[i, :, 0, 0].tolist() for i, id_ in enumerate(data.train.ids)}
    assert pixel["ant/y.png"] == [1, 2, 3]
    assert pixel["cat/a.png"] == [10, 10, 10]


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    cats = write_images(tmp_path) / "train" / "cat"
    (cats / "notes.txt").write_text("hello")
    (cats / "._a.png").write_bytes(b"of a Mac")
    save(tmp_path / "train" / ".thumbnails" / "a.png", 1, size=(5, 5))
    data = load("image-folder", path=tmp_path)
    assert len(data.train) == 3
    assert data.class_names == ("ant", "cat")


def test_the_image_of_another_size_is_named(tmp_path: Path) -> None:
    save(write_images(tmp_path) / "test" / "ant" / "odd.png", 1, size=(5, 5))
    with pytest.raises(DataError, match=r"odd\.png: 5x5 pixels, but .* has 4x3"):
        load("image-folder", path=tmp_path)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train is missing"):
        load("image-folder", path=tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="has no folders"):
        load("image-folder", path=tmp_path)
    write_images(tmp_path)
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(DataError, match="empty: has no images"):
        load("image-folder", path=tmp_path)


def test_a_test_class_without_training_images_is_refused(tmp_path: Path) -> None:
    save(write_images(tmp_path) / "test" / "dog" / "d.png", 1)
    with pytest.raises(DataError, match="dog: this class has no folder"):
        load("image-folder", path=tmp_path)


def test_broken_images_are_named(tmp_path: Path) -> None:
    path = write_images(tmp_path) / "train" / "cat" / "a.png"
    whole = path.read_bytes()
    for content in (b"no image", whole[:45]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.png: cannot be read as an image"):
            load("image-folder", path=tmp_path)
    Image.new("I;16", (4, 3), 1000).save(path)
    with pytest.raises(DataError, match="more than 8 bits"):
        load("image-folder", path=tmp_path)


def arrays(shape: tuple[int, ...], dtype: str = "uint8") -> dict[str, np.ndarray]:
    count = int(np.prod(shape))
    x = (np.arange(3 * count) % 256).reshape(3, *shape).astype(dtype)
    return {"x_train": x, "y_train": np.array([0, 2, 1]), "x_test": x[:1], "y_test": np.array([1])}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 4), (1, 5, 4)),
        ((5, 4, 3), (3, 5, 4)),
        ((3, 5, 4), (3, 5, 4)),
        ((5, 4, 1), (1, 5, 4)),
    ],
)
def test_npz_images_of_each_layout(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    content = arrays(shape)
    np.savez(tmp_path / "d.npz", **content)  # type: ignore[arg-type]
    data = load("npz", path=tmp_path / "d.npz")
    assert data.train.images.shape[1:] == expected
    assert data.num_classes == 3
    assert data.train.labels.tolist() == [0, 2, 1]
    x = content["x_train"]
    channels_last = x.ndim == 4 and x.shape[1] != 3
    assert np.array_equal(
        data.train.images.numpy().squeeze(),
        (x.transpose(0, 3, 1, 2) if channels_last else x).squeeze(),
    )


def test_npz_floats_become_float32_and_are_not_normalised(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays((7,), "float64"))  # type: ignore[arg-type]
    data = load("npz", path=tmp_path / "d.npz")
    assert data.train.images.shape[1:] == (7,)
    assert data.train.images.dtype == torch.float32
    assert data.train.mean is None
    inputs, _ = data.train.batch(torch.tensor([1]))
    assert inputs.tolist() == [[7, 8, 9, 10, 11, 12, 13]]


def test_npz_ids(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays((2, 2)), ids_train=np.array(["a", "b", "c"]))  # type: ignore[arg-type]
    data = load("npz", path=tmp_path / "d.npz")
    assert list(data.train.ids) == ["a", "b", "c"]
    assert list(data.test.ids) == ["0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": np.zeros((3, 2, 2, 7), np.uint8)}, r"x_train has the shape \(3, 2, 2, 7\)"),
        ({"x_train": np.zeros((3, 2, 2), np.int64)}, "x_train is int64"),
        ({"x_train": np.full((3, 2, 2), np.nan)}, "not finite"),
        ({"y_train": np.array([0.0, 1.0, 2.0])}, "one integer label"),
        ({"y_train": np.array([0, 1])}, "3 samples, y_train has 2"),
        ({"y_train": np.array([0, 1, -2])}, "label -2"),
        ({"x_test": np.zeros((1, 3, 3), np.uint8)}, "differ in the shape"),
        ({"id_train": np.array(["a"])}, "nothing reads: id_train. Known are x_train, y_train, ids"),
        ({"y_test": np.array([None])}, "cannot be read as npz of plain arrays"),
    ],
)
def test_wrong_npz_arrays_are_named(
    tmp_path: Path, change: dict[str, np.ndarray], words: str
) -> None:
    np.savez(tmp_path / "d.npz", **{**arrays((2, 2)), **change})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=words) as caught:
        load("npz", path=tmp_path / "d.npz")
    assert "d.npz" in str(caught.value)


def test_broken_npz_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    with pytest.raises(DataError, match=r"d\.npz: cannot be read"):
        load("npz", path=path)
    np.savez(path, x_train=np.zeros(3))
    with pytest.raises(DataError, match="y_train, x_test, y_test missing; it has x_train"):
        load("npz", path=path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        load("npz", path=path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="single array"):
        load("npz", path=path)
