from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from goldfish.bench.child import ENGINE, _tree_bytes, argument, parse, run_whole
from goldfish.bench.plain import in_its_process, plain_model
from goldfish.bench.rounds import Workload, load_images
from goldfish.bench.tables import step_flops
from goldfish.errors import ConfigError
from goldfish.training.batches import Batch
from goldfish.training.fit import cross_entropy_objective


def test_flops_of_a_step_by_hand() -> None:
    """A layer of 4 x 3 on 5 samples: 2 * 5 * 4 * 3 = 120 forward, and 120 for its gradient.

    The inputs need no gradient, and the loss is no matrix product.
    """
    batch = Batch(torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    assert step_flops(nn.Linear(4, 3), cross_entropy_objective, batch) == 240


def test_the_plain_loop_gets_the_same_model_in_pytorchs_own_layers() -> None:
    work = Workload()
    ours, theirs = work.factory()(), plain_model(work)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(3, 1, 28, 28)
    assert torch.equal(ours(images), theirs(images))
    pools = [module for module in theirs.modules() if isinstance(module, nn.MaxPool2d)]
    assert [type(pool) for pool in pools] == [nn.MaxPool2d, nn.MaxPool2d]


def test_a_workload_reaches_its_child() -> None:
    given = Workload("resnet20", (7,), 1234, device="cuda", compiled=True, data_dir=Path("x"))
    assert parse(argument(given, 7)) == given


def test_without_the_dataset_noise_of_its_shape_is_measured() -> None:
    data, what = load_images(Workload(model="resnet32", samples=50))
    assert what == "50 images of noise in the shape of cifar-10"
    assert data.images.shape == (50, 3, 32, 32)


def test_a_plain_loop_that_fails_says_why() -> None:
    with (
        pytest.raises(ConfigError, match=r"The plain loop failed: .*no-such"),
        in_its_process(Workload(model="no-such", samples=1000)),
    ):
        pass


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(ConfigError, match=r"goldfish\.bench\.child failed: .*no-such"):
        run_whole(ENGINE, Workload(model="no-such", samples=1000), 2)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")
def test_memory_is_that_of_a_process_and_its_children() -> None:
    grow = "x = bytearray(60_000_000); print(1, flush=True); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 60_000_000 < _tree_bytes(process.pid) < 200_000_000
        process.communicate(b"\n")
