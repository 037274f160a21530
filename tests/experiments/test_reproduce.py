"""The presets: all of them run, share what they can, go on, and judge the paper's claims."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from goldfish.errors import ConfigError, DataError
from goldfish.experiments.reproduce import (
    ABOUT,
    PRESETS,
    VALUES,
    Cell,
    Claim,
    Preset,
    Reproduction,
    Value,
    from_csv,
    load_preset,
    paper_values,
    preset_names,
)
from goldfish.experiments.scenario import Machine
from goldfish.report.reproduction import (
    PAGE,
    PLOT,
    Numbers,
    judge,
    judge_claim,
    planned_shards,
    write_results,
    write_summary,
)
from goldfish.results import Result

TRAIN, TEST = 200, 40
SMALLER = (
    'model.name="mlp"',
    "model.options={hidden=8}",
    f"data.train_samples={TRAIN}",
    f"data.test_samples={TEST}",
    "training.local_epochs=1",
    "unlearning.rounds=1",
)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return small random datasets in the publishers' layouts."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for name in ("mnist", "fashion-mnist"):
        (root / name).mkdir()
        for split, count in (("train", TRAIN), ("t10k", TEST)):
            images = rng.integers(0, 256, count * 28 * 28, dtype=np.uint8).tobytes()
            labels = bytes(i % 10 for i in range(count))
            for content, shape, raw in (
                ("images-idx3", (count, 28, 28), images),
                ("labels-idx1", (count,), labels),
            ):
                header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
                file = root / name / f"{split}-{content}-ubyte.gz"
                file.write_bytes(gzip.compress(header + raw, 1))
    parts = [(f"data_batch_{n}.bin", TRAIN // 5) for n in range(1, 6)] + [("test_batch.bin", TEST)]
    for folder, classes, label_bytes, files in (
        ("cifar-10-batches-bin", 10, 1, parts),
        ("cifar-100-binary", 100, 2, [("train.bin", TRAIN), ("test.bin", TEST)]),
    ):
        (root / folder).mkdir()
        for name, count in files:
            labels = np.arange(count, dtype=np.uint8)[:, None].repeat(label_bytes, 1) % classes
            pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
            (root / folder / name).write_bytes(np.hstack([labels, pixels]).tobytes())
    return root


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all presets of this file find each other's runs."""
    return tmp_path_factory.mktemp("reproduce")


def run_all(work: Reproduction, data_dir: Path) -> None:
    for cell in work.cells():
        if not cell.finished:
            for _ in cell.run(Machine(data_dir, workers=1)):
                pass


def small(name: str, out: Path) -> Reproduction:
    """Return a preset as ``--quick`` runs it and smaller still: one row, two series, tiny data."""
    work = Reproduction.of(name, out, quick=True, overrides=SMALLER)
    preset = work.preset
    series = [preset.series[0], *preset.series[-1:][: len(preset.series) - 1]]
    kept = {one.name for one in series}
    claims = [claim for claim in preset.claims if {claim.subject, *claim.than} <= kept]
    rows = preset.x.model_copy(update={"values": preset.x.values[:1]})
    changed = {"series": series, "claims": claims, "x": rows}
    return replace(work, preset=preset.model_copy(update=changed))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs(name: str, data_dir: Path, shared: Path) -> None:
    """In ``--quick`` mode, smaller still: files of results, with every series and every claim."""
    work = small(name, shared)
    run_all(work, data_dir)
    folder = work.finish()
    judged = write_results(folder, work.preset)
    values = from_csv(folder / VALUES)
    known = {(value.series, value.metric) for value in values}
    wanted = {(s.name, metric) for s in work.preset.series for metric in work.preset.metrics}
    assert known == wanted
    page = (folder / PAGE).read_text()
    assert "no result" in page
    for words in (*(s.name for s in work.preset.series), *(one.claim for one in judged)):
        assert words in page
    assert "<svg" in (folder / PLOT).read_text()
    assert json.loads((folder / ABOUT).read_text())["complete"] is False
