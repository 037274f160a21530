"""Reads a run directory: ``result.json``, and ``samples.json`` where there is one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from goldfish.errors import StoreError

SCHEMA = 1
"""The version of ``result.json`` that this module reads."""

Result: TypeAlias = Mapping[str, Any]
"""The content of ``result.json``."""


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    result: Result
    samples: Mapping[str, Any] | None
    """The content of ``samples.json``; None where the run kept no pictures."""


def read_run(run_dir: Path) -> Run:
    """Read the JSON files of ``run_dir`` and check that they are of the kind we know."""
    path = run_dir / "result.json"
    if not run_dir.is_dir():
        raise StoreError(
            f"No run directory at {run_dir}. Check the path; 'goldfish run --out DIR' makes one."
        )
    if not path.exists():
        raise StoreError(
            f"No result.json in {run_dir}: the run has not finished. "
            f"Finish it with 'goldfish run {run_dir} --resume', then ask for the report again."
        )
    result = _read_object(path, "methods")
    if result.get("schema") != SCHEMA:
        raise StoreError(
            f"{path} has schema {result.get('schema')!r}; this version of Goldfish reads "
            f"schema {SCHEMA}. Use the version that wrote the run, or run it again with this one."
        )
    methods = result.get("methods")
    if not isinstance(methods, dict) or not all(isinstance(m, dict) for m in methods.values()):
        raise StoreError(
            f"{path} has no table of methods. Write it anew with 'goldfish run {run_dir} --resume'."
        )
    samples_path = run_dir / "samples.json"
    samples = _read_object(samples_path, "samples") if samples_path.exists() else None
    return Run(result, samples)


def section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under ``key``; an empty one where it is missing or null."""
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in ``path``, which holds the run's ``what``."""
    again = f"Write it anew with 'goldfish run {path.parent} --resume'."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that are not UTF-8
        raise StoreError(f"{path} is not valid JSON ({error}). {again}") from error
    except OSError as error:
        raise StoreError(f"Cannot read {path} ({error}). Check its permissions.") from error
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds no JSON object with the run's {what}. {again}")
    return content
