"""What ``import goldfish`` alone makes available, in a fresh process."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import goldfish


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_modules_names_are_there_after_one_import() -> None:
    code = "import goldfish; print(goldfish.data.DatasetExamples.__name__)"
    assert fresh(code) == "DatasetExamples"


def test_every_name_and_every_module_is_there() -> None:
    modules = [m.name for m in pkgutil.iter_modules(goldfish.__path__) if m.name[0] != "_"]
    assert "data" in modules
    names = [*goldfish.__all__, *modules]
    fresh(f"import goldfish; [getattr(goldfish, name) for name in {names!r}]")


def test_importing_waits_for_nothing_heavy() -> None:
    assert fresh("import sys, goldfish; print('torch' in sys.modules)") == "False"


def test_other_names_are_no_attributes() -> None:
    for name in ("dat", "__main__", "data_"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(goldfish, name)
