"""Wrong inputs, each with the message that a user gets: what is wrong, where, what to do."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from goldfish.cli import main
from goldfish.data import load

SMALL = """
[data]
name = "digits"
[model]
name = "mlp"
[training]
rounds = 1
[deletion]
rate = 0.1
backdoor_target = 7
"""


def nothing(_folder: Path) -> None:
    """The folder stays as it is."""


def broken_toml(folder: Path) -> None:
    (folder / "config.toml").write_text("[data\nname = 1")


def truncated_mnist(folder: Path) -> None:
    mnist = folder / "mnist"
    mnist.mkdir()
    header = struct.pack(">IIII", 2051, 10, 28, 28)
    for split in ("train", "t10k"):
        (mnist / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + b"\0" * 99))
        labels = struct.pack(">II", 2049, 10) + bytes(10)
        (mnist / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def wrong_magic(folder: Path) -> None:
    truncated_mnist(folder)
    for split in ("train", "t10k"):
        content = struct.pack(">IIII", 9999, 10, 28, 28) + b"\0" * 7840
        (folder / "mnist" / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))


def label_out_of_range(folder: Path) -> None:
    truncated_mnist(folder)
    for split in ("train", "t10k"):
        images = struct.pack(">IIII", 2051, 10, 28, 28) + b"\0" * 7840
        (folder / "mnist" / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = struct.pack(">II", 2049, 10) + bytes([11] * 10)
        (folder / "mnist" / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def empty_ids(folder: Path) -> None:
    (folder / "ids.txt").write_text("\n")


def unknown_ids(folder: Path) -> None:
    (folder / "ids.txt").write_text("3\n99999999\n")


def somebody_elses_folder(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").write_text("years of work")


def other_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"schema": 1}')


def manifest_for_other_data(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"a": ["nobody"], "b": ["somebody"]}')


def manifest_without_class_3(folder: Path) -> None:
    train = load("digits").train
    labels = zip(train.ids, train.labels.tolist(), strict=True)
    others = [sample_id for sample_id, label in labels if label != 3]
    (folder / "manifest.json").write_text(json.dumps({"a": others[:50], "b": others[50:100]}))


@dataclass(frozen=True)
class Wrong:
    """What a user types, what lies in the folder, and words that the answer must hold."""

    name: str
    words: tuple[str, ...]
    settings: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = nothing
    config: str = SMALL


RATE = "rate = 0.1\nbackdoor_target = 7\n"
NO_DELETION = SMALL.replace(RATE, "")
MNIST = ('data.name="mnist"',)
CASES = [
    Wrong(
        "misspelt method",
        ("methods", "'goldfsh'", "Did you mean 'goldfish'?"),
        ('unlearning.methods=["goldfsh"]',),
    ),
    Wrong("method twice", ("listed twice",), ('unlearning.methods=["retrain", "retrain"]',)),
    Wrong("too many samples", ("data.limit_train", "lower it"), ("data.limit_train=9999",)),
    Wrong(
        "misspelt model",
        ("Unknown model 'lenet6'", "Did you mean 'lenet5'?"),
        ('model.name="lenet6"',),
    ),
    Wrong("own model, no such module", ("nowhere", "import"), ('model.name="nowhere.net:make"',)),
    Wrong("own model, not a factory", ("math", "pi"), ('model.name="math:pi"',)),
    Wrong(
        "model too large for the images",
        ("lenet5", "ption"),
        ("model.options={hidden=3}", 'model.name="lenet5"'),
    ),
    Wrong(
        "misspelt dataset",
        ("Unknown dataset 'minst'", "Did you mean 'mnist'?"),
        ('data.name="minst"',),
    ),
    Wrong(
        "misspelt setting",
        ("training.learning_rat", "Did you mean 'training.learning_rate'?"),
        ("training.learning_rat=0.1",),
    ),
    Wrong("misspelt table", ("'trainig'", "Did you mean 'training'?"), ("trainig.rounds=3",)),
    Wrong(
        "misspelt setting of a method",
        ("unlearning.goldfish.temprature", "temperature"),
        ("unlearning.goldfish.temprature=4",),
    ),
    Wrong(
        "negative learning rate",
        ("training.learning_rate", "greater than 0", "-1"),
        ("training.learning_rate=-1",),
    ),
    Wrong("momentum of 1", ("training.momentum", "less than 1"), ("training.momentum=1.0",)),
    Wrong(
        "rounds in words",
        ("training.rounds", "valid integer", "'many'"),
        ('training.rounds="many"',),
    ),
    Wrong(
        "temperature of 1",
        ("unlearning.goldfish.temperature", "greater than 1"),
        ("unlearning.goldfish.temperature=1.0",),
    ),
    Wrong(
        "temperature falls to 1",
        ("adaptive temperature", "soft labels", "Raise temperature"),
        ("unlearning.goldfish.temperature=1.2", "deletion.rate=0.14"),
    ),
    Wrong("rate of 6 (percent)", ("deletion.rate", "less than 1", "6"), ("deletion.rate=6",)),
    Wrong("rate too high", ("Lower the rate",), ("deletion.rate=0.9",)),
    Wrong(
        "two kinds of deletion",
        ("exactly one of", "rate and class_label are given"),
        ("deletion.class_label=3",),
    ),
    Wrong(
        "no deletion",
        ("deletion", "Field required"),
        config=SMALL.replace("[deletion]\n" + RATE, ""),
    ),
    Wrong("backdoor to no class", ("target 12 is not a class",), ("deletion.backdoor_target=12",)),
    Wrong(
        "backdoor from a class to itself",
        ("to the same class", "Choose two"),
        ("deletion.backdoor_source=7",),
    ),
    Wrong("trigger larger than the image", ("does not fit",), ("deletion.trigger_size=40",)),
    Wrong(
        "class that is not there",
        ("class_label", "class 23"),
        ("deletion.class_label=23",),
        config=NO_DELETION,
    ),
    Wrong(
        "client that is not there",
        ("Unknown client 'client-9'",),
        ('deletion.clients=["client-9"]',),
        config=NO_DELETION,
    ),
    Wrong(
        "ids file missing",
        ("deletion.samples", "ids.txt", "cannot be read"),
        ('deletion.samples="ids.txt"',),
        config=NO_DELETION,
    ),
    Wrong(
        "ids file empty",
        ("ids.txt is empty", "one sample id a line"),
        ('deletion.samples="ids.txt"',),
        prepare=empty_ids,
        config=NO_DELETION,
    ),
    Wrong(
        "id of no sample",
        ("No client holds sample '99999999'",),
        ('deletion.samples="ids.txt"',),
        prepare=unknown_ids,
        config=NO_DELETION,
    ),
    Wrong("more clients than samples", ("5000 clients",), ("data.clients=5000",)),
    Wrong(
        "dirichlet with alpha 0",
        ("data.alpha", "greater than 0"),
        ('data.partition="dirichlet"', "data.alpha=0"),
    ),
    Wrong("explicit without manifest", ("manifest", "give both"), ('data.partition="explicit"',)),
    Wrong(
        "manifest that is none",
        ("manifest.json",),
        ('data.partition="explicit"', 'data.manifest="manifest.json"'),
        prepare=other_manifest,
    ),
    Wrong(
        "manifest for other data",
        ("that the data does not have, such as 'nobody'",),
        ("deletion.class_label=3", 'data.partition="explicit"', 'data.manifest="manifest.json"'),
        prepare=manifest_for_other_data,
        config=NO_DELETION,
    ),
    Wrong(
        "class that is in no client's part",
        ("class_label", "no client holds a sample of class 3"),
        ("deletion.class_label=3", 'data.partition="explicit"', 'data.manifest="manifest.json"'),
        prepare=manifest_without_class_3,
        config=NO_DELETION,
    ),
    Wrong("more shards than samples", ("too few for 900 shards",), ("training.shards=900",)),
    Wrong("no data folder", ("--data-dir", "$GOLDFISH_DATA", "goldfish data fetch mnist"), MNIST),
    Wrong(
        "dataset not in the folder",
        ("mnist is not complete", "goldfish data fetch mnist"),
        MNIST,
        ("--data-dir", "."),
    ),
    Wrong(
        "truncated file",
        ("train-images-idx3-ubyte.gz", "goldfish data fetch mnist"),
        MNIST,
        ("--data-dir", "."),
        truncated_mnist,
    ),
    Wrong(
        "wrong magic number",
        ("train-images-idx3-ubyte.gz", "wrong magic number"),
        MNIST,
        ("--data-dir", "."),
        wrong_magic,
    ),
    Wrong(
        "label out of range",
        ("train-labels-idx1-ubyte.gz", "11"),
        MNIST,
        ("--data-dir", "."),
        label_out_of_range,
    ),
    Wrong("image folder without path", ("needs a path",), ('data.name="image-folder"',)),
    Wrong("npz that is missing", ("missing.npz",), ('data.name="npz"', 'data.path="missing.npz"')),
    Wrong("broken TOML", ("not valid TOML",), prepare=broken_toml),
    Wrong("--set without value", ("--set takes key=value",), ("training.rounds",)),
    Wrong("--set into a scalar", ("seed is not a table",), ("seed=3", "seed.x=3")),
    Wrong(
        "somebody else's folder",
        ("is not a run directory", "another --out"),
        prepare=somebody_elses_folder,
    ),
    Wrong("no GPU", ("--device cpu",), arguments=("--device", "cuda")),
]


def test_there_are_more_than_twenty() -> None:
    assert len(CASES) > 20
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input(
    case: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if case.name == "no GPU":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("GOLDFISH_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(case.config)
    case.prepare(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    settings = [part for item in case.settings for part in ("--set", item)]
    command = ["goldfish", "run", "config.toml", "--out", "out", *settings, *case.arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("Error:")
    assert "Traceback" not in error
    for words in case.words:
        assert words in error, error
    created = {path for path in tmp_path.rglob("*") if path not in before}
    assert not [path for path in created if path.name in ("result.json", "report.html")]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if path.is_file())


def test_a_missing_configuration_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["goldfish", "run", "nowhere.toml"])
    with pytest.raises(SystemExit):
        main()
    assert "There is no configuration file nowhere.toml" in capsys.readouterr().err


def test_a_run_directory_of_another_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(SMALL)
    arguments = ["goldfish", "run", "config.toml", "--out", "out", "--set", "unlearning.rounds=1"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    result = (tmp_path / "out" / "result.json").read_bytes()
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume", "--seed", "5"])
    with pytest.raises(SystemExit):
        main()
    assert "seed is 0 there and 5 here" in capsys.readouterr().err
    assert (tmp_path / "out" / "result.json").read_bytes() == result
