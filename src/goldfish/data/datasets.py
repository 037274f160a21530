"""Every dataset as one record: a new one is one more entry of ``DATASETS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from goldfish.data.folder import RawSplit, read_image_folder, read_npz
from goldfish.data.readers import read_cifar_binary, read_cifar_pickle, read_digits, read_idx


@dataclass(frozen=True)
class Layout:
    """How the files of a dataset lie in a folder of the data directory, and what reads them."""

    folder: str
    train: tuple[tuple[str, ...], ...]
    """The training split in parts, each the names of files that belong together.

    A file whose name ends in .gz may also lie there unpacked, without that ending.
    """
    test: tuple[tuple[str, ...], ...]
    """The test split, in the same way."""
    read: Callable[..., tuple[Tensor, Tensor]]
    """Called with the paths of a part: images (uint8, ``[N, C, H, W]``) and labels (int64)."""

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all files."""
        return tuple(name for part in (*self.train, *self.test) for name in part)

    def path(self, data_dir: Path, name: str) -> Path:
        """Return where a file lies, or where it should."""
        unpacked = data_dir / self.folder / name.removesuffix(".gz")
        return unpacked if unpacked.is_file() else data_dir / self.folder / name

    def missing(self, data_dir: Path) -> tuple[str, ...]:
        """Return the names of the files that are not there."""
        return tuple(name for name in self.files if not self.path(data_dir, name).is_file())


@dataclass(frozen=True)
class Published:
    """Files that a publisher offers for download."""

    url: str
    """The folder of the files at the publisher's."""
    md5: Mapping[str, str]
    """The files there, and the MD5 checksum that the publisher gives for each.

    A .tar.gz holds the files of the first layout; others are these files.
    """
    layouts: tuple[Layout, ...]
    """The layouts that can be read; ``goldfish data fetch`` writes the first."""

    def find(self, data_dir: Path) -> tuple[Layout, tuple[str, ...]]:
        """Return the first complete layout, or else the first one and what it lacks."""
        found = [(layout, layout.missing(data_dir)) for layout in self.layouts]
        return next((entry for entry in found if not entry[1]), found[0])


@dataclass(frozen=True)
class Installed:
    """Data that comes with a Python package."""

    package: str
    read: Callable[[], Sequence[RawSplit]]
    """Returns the training and the test split."""


@dataclass(frozen=True)
class Dataset:
    """One dataset: where it comes from and what is known about it."""

    source: Published | Installed
    mean: tuple[float, ...]
    """Mean of each channel of the training split, scaled to [0, 1]."""
    std: tuple[float, ...]
    """Standard deviation of each channel, in the same way."""
    classes: tuple[str, ...]
    """The names of the classes, in the order of the labels."""


def _idx(folder: str, url: str, *md5: str) -> Published:
    names = tuple(
        f"{split}-{content}-ubyte.gz"
        for split in ("train", "t10k")
        for content in ("images-idx3", "labels-idx1")
    )
    layout = Layout(folder, (names[:2],), (names[2:],), read_idx)
    return Published(url, dict(zip(names, md5, strict=True)), (layout,))


_DIGITS = tuple("0123456789")

DATASETS: dict[str, Dataset] = {
    "digits": Dataset(
        Installed("scikit-learn", read_digits), mean=(0.3057,), std=(0.3248,), classes=_DIGITS
    ),
    "mnist": Dataset(
        _idx(
            "mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        mean=(0.1307,),
        std=(0.3081,),
        classes=_DIGITS,
    ),
    "fashion-mnist": Dataset(
        _idx(
            "fashion-mnist",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        mean=(0.2860,),
        std=(0.3530,),
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
    ),
    "cifar-10": Dataset(
        Published(
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
            (
                Layout(
                    "cifar-10-batches-bin",
                    tuple((f"data_batch_{number}.bin",) for number in range(1, 6)),
                    (("test_batch.bin",),),
                    partial(read_cifar_binary, label_bytes=1),
                ),
                Layout(
                    "cifar-10-batches-py",
                    tuple((f"data_batch_{number}",) for number in range(1, 6)),
                    (("test_batch",),),
                    partial(read_cifar_pickle, labels_key="labels"),
                ),
            ),
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
    ),
    "cifar-100": Dataset(
        Published(
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
            (
                Layout(
                    "cifar-100-binary",
                    (("train.bin",),),
                    (("test.bin",),),
                    partial(read_cifar_binary, label_bytes=2),
                ),
                Layout(
                    "cifar-100-python",
                    (("train",),),
                    (("test",),),
                    partial(read_cifar_pickle, labels_key="fine_labels"),
                ),
            ),
        ),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        classes=tuple(
            """
            apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
            butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
            couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
            house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
            motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
            pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket
            rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
            sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
            turtle wardrobe whale willow_tree wolf woman worm
            """.split()  # noqa: SIM905
        ),
    ),
}
"""The datasets by name."""

FORMATS: dict[
    str,
    Callable[[Path, Sequence[str], Sequence[str] | None], tuple[list[RawSplit], tuple[str, ...]]],
] = {"image-folder": read_image_folder, "npz": read_npz}
"""The formats of your own data by name: each reads the splits that are named, at a path."""
