from __future__ import annotations

import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from goldfish.data import load
from goldfish.errors import DataError

BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


def rows(count: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def records(labels: list[list[int]], seed: int) -> bytes:
    return np.hstack([np.array(labels, np.uint8), rows(len(labels), seed)]).tobytes()


def write_cifar10_binary(root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        (folder / f"{name}.bin").write_bytes(records([[number], [9]], number))
    (folder / "test_batch.bin").write_bytes(records([[7]], 5))
    return folder


def write_cifar10_python(root: Path, protocol: int = 2) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        batch = {"data": rows(2, number), "labels": [number, 9]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol))
    (folder / "test_batch").write_bytes(pickle.dumps({"data": rows(1, 5), "labels": [7]}, protocol))
    return folder


def test_binary_batches_are_read_in_order(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    data = load("cifar-10", tmp_path)
    assert data.train.images.shape[1:] == (3, 32, 32)
    assert data.train.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert data.test.labels.tolist() == [7]
    assert data.class_names[7] == "horse"
    assert data.train.images[3].flatten().tolist() == rows(2, 1)[1].tolist()


@pytest.mark.parametrize("protocol", [2, 4])
def test_both_layouts_give_the_same_data(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "binary").mkdir()
    (tmp_path / "python").mkdir()
    write_cifar10_binary(tmp_path / "binary")
    write_cifar10_python(tmp_path / "python", protocol)
    binary = load("cifar-10", tmp_path / "binary")
    python = load("cifar-10", tmp_path / "python")
    for a, b in ((binary.train, python.train), (binary.test, python.test)):
        assert a.images.equal(b.images)
        assert a.labels.equal(b.labels)


def test_a_python_2_pickle_is_read(tmp_path: Path) -> None:
    """The publisher's files are Python 2's: text as bytes, and numpy's old module path."""
    folder = write_cifar10_python(tmp_path)
    data = rows(1, 5).tobytes()
    content = (
        b"\x80\x02}(U\x04data"
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb"
        b"U\x06labels]K\x03au."
    )
    (folder / "test_batch").write_bytes(content)
    test = load("cifar-10", tmp_path).test
    assert test.labels.tolist() == [3]
    assert test.images.flatten().tolist() == list(data)


def test_cifar_100_has_fine_labels_and_their_names(tmp_path: Path) -> None:
    """A record starts with the coarse label (here 19, 3), then the fine one (42, 99)."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(records([[19, 42], [3, 99]], 0))
    (folder / "test.bin").write_bytes(records([[1, 0]], 1))
    data = load("cifar-100", tmp_path)
    assert data.train.labels.tolist() == [42, 99]
    assert data.num_classes == 100
    assert [data.class_names[i] for i in (0, 42, 99)] == ["apple", "leopard", "worm"]
    assert data.train.images[0].flatten().tolist() == rows(2, 0)[0].tolist()


def test_cifar_100_python_layout(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, label in (("train", 42), ("test", 7)):
        batch = {"data": rows(1, label), "fine_labels": [label], "coarse_labels": [1]}
        (folder / name).write_bytes(pickle.dumps(batch, 2))
    data = load("cifar-100", tmp_path)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([42], [7])
    assert data.class_names[99] == "worm"


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    path = write_cifar10_python(tmp_path) / "data_batch_2"
    trace = tmp_path / "was-here"
    batch = {"data": Malicious(trace), "labels": [0]}
    path.write_bytes(pickle.dumps(batch, 2))
    pickle.loads(path.read_bytes())
    assert trace.is_dir()  # it does work where all globals are admitted
    trace.rmdir()
    with pytest.raises(DataError, match=r"data_batch_2: refused.*posix\.mkdir|nt\.mkdir"):
        load("cifar-10", tmp_path)
    assert not trace.exists()


def array(dtype: bytes, content: bytes) -> bytes:
    """Return a pickled batch whose images numpy would build over any bytes as any type."""
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b"
        b"\x87R(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02" + dtype + b"K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + content + b"tb"
        b"U\x06labels]K\x03au."
    )


def test_no_pickle_can_crash_the_process_or_fill_its_memory(tmp_path: Path) -> None:
    """Numpy takes bytes for pointers when they are called objects; Python's memo takes any size."""
    path = write_cifar10_python(tmp_path) / "test_batch"
    pointers = b"T" + (8 * 3072).to_bytes(4, "little") + b"\x41" * (8 * 3072)
    memo = b"\x80\x02K\x01r\xff\xff\xff\x7f."  # an entry with the number 2**31 - 1
    ago = path.read_bytes()
    tracemalloc.start()
    for content in (array(b"O8", pointers), array(b"u1", pointers), memo, array(b"u1", b"N")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="test_batch"):
            load("cifar-10", tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    path.write_bytes(ago)
    assert load("cifar-10", tmp_path).test.labels.tolist() == [7]


@pytest.mark.parametrize("module", ["builtins", "os", "numpy", "numpy.core.multiarray"])
def test_globals_beside_the_admitted_ones_are_refused(tmp_path: Path, module: str) -> None:
    path = write_cifar10_python(tmp_path) / "test_batch"
    path.write_bytes(b"c" + module.encode() + b"\neval\n.")
    with pytest.raises(DataError, match=rf"would run {module}\.eval"):
        load("cifar-10", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a whole number of records"),
        (records([[0], [1]], 0)[:-1], "6145 bytes are not a whole number"),
        (records([[0], [10]], 0), "0 to 10 are out of range"),
    ],
)
def test_a_broken_binary_batch_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = write_cifar10_binary(tmp_path) / "data_batch_3.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load("cifar-10", tmp_path)
    assert str(path) in str(caught.value)
    assert "goldfish data fetch cifar-10" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x02}", "cannot be read"),
        (b"garbage", "cannot be read"),
        (pickle.dumps([1]), "holds a list"),
        (pickle.dumps({"labels": [1]}), "'data' or 'labels' is missing"),
        (pickle.dumps({"data": rows(2, 0), "labels": [1]}, 2), "2 images but 1 labels"),
        (
            pickle.dumps({"data": rows(1, 0)[:, 1:], "labels": [1]}, 2),
            r"no array of uint8 \(N, 3072\)",
        ),
        (pickle.dumps({"data": rows(1, 0) / 2, "labels": [1]}, 2), "no array of uint8"),
        (pickle.dumps({"data": rows(1, 0), "labels": [None]}, 2), "something else than labels"),
        (pickle.dumps({"data": rows(1, 0), "labels": [2**70]}, 2), "something else than labels"),
        (pickle.dumps({"data": rows(1, 0), "labels": [-1]}, 2), "out of range"),
    ],
)
def test_a_broken_pickle_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = write_cifar10_python(tmp_path) / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load("cifar-10", tmp_path)
    assert str(path) in str(caught.value)


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_cifar10_binary(tmp_path) / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.bin missing"):
        load("cifar-10", tmp_path)
