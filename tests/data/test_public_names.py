from __future__ import annotations

import subprocess
import sys

import goldfish.data


def test_every_public_name_is_there_once() -> None:
    assert len(set(goldfish.data.__all__)) == len(goldfish.data.__all__) > 0
    for name in goldfish.data.__all__:
        assert hasattr(goldfish.data, name)


def test_importing_loads_nothing_heavy_beside_torch_and_numpy() -> None:
    code = "import sys, goldfish.data; print({'sklearn', 'PIL', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
