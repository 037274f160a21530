"""A small project with data whose samples have names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from goldfish.experiments.scenario import Machine
from goldfish.project.project import Project

MACHINE = Machine(workers=1)
COUNT = 60
SETTINGS = """
[data]
name = "npz"
path = "data.npz"
clients = 3

[model]
name = "mlp"
options = {{ hidden = 8 }}

[training]
rounds = 2
batch_size = 5
learning_rate = 0.05
{more}
"""


def write_data(path: Path, keep: Callable[[str], bool] = lambda _id: True) -> None:
    """Write images with a bright row for their class, and ids like no other text."""
    draw = np.random.default_rng(0)
    labels = np.arange(COUNT) % 3
    images = draw.integers(0, 60, (COUNT, 6, 6), dtype=np.uint8)
    images[np.arange(COUNT), labels] += 150
    ids = np.array([f"patient-{place:03}-zq" for place in range(COUNT)])
    kept = np.array([keep(str(sample_id)) for sample_id in ids])
    np.savez(
        path,
        x_train=images[kept],
        y_train=labels[kept],
        ids_train=ids[kept],
        x_test=images[::2] // 2,
        y_test=labels[::2],
    )


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project that is not trained yet; its data lies outside of it."""
    with make_project(tmp_path / "project") as made:
        yield made


def make_project(folder: Path, more: str = "") -> Project:
    write_data(folder.parent / "data.npz")
    Project.init(folder)
    settings = SETTINGS.replace("data.npz", "../data.npz").format(more=more)
    (folder / "goldfish.toml").write_text(settings)
    return Project.open(folder)


@pytest.fixture
def trained(project: Project) -> Project:
    list(project.train(MACHINE))
    return project
