"""The server app: a whole run into a directory, gone on with after a kill, one at a time."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from goldfish.errors import ConfigError, DivergenceError, StoreError
from goldfish.experiments.config import Config
from goldfish.flower.app_folder import SETTINGS
from goldfish.flower.progress import LOG, read_lines
from goldfish.flower.server_app import app

MakeConfig = Callable[..., Config]


def start(grid: Any, **settings: Any) -> None:
    named = {name.replace("_", "-"): str(value) for name, value in settings.items()}
    app(grid, Context(1, 1, {}, RecordDict(), {**SETTINGS, **named}))


@pytest.fixture
def config_file(make_config: MakeConfig, tmp_path: Path) -> Path:
    path = tmp_path / "app" / "experiment.toml"
    path.parent.mkdir()
    path.write_text(make_config(unlearning={"methods": ["goldfish"], "rounds": 1}).to_toml())
    return path


def test_it_runs_into_its_directory_and_tells_its_progress(
    grid: Any, config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    start(grid, run_dir=out, config=config_file)
    result = json.loads((out / "result.json").read_text())
    assert list(result["methods"]) == ["origin", "goldfish"]
    assert result["environment"]["workers"] == 3
    entries, place = read_lines(out / LOG, 0)
    steps = [(e["phase"], e["round"]) for e in entries if "phase" in e]
    assert steps == [("origin", n) for n in range(4)] + [("goldfish", 0), ("goldfish", 1)]
    assert entries[-1] == {"done": True}
    asked = len(grid.tasks())
    start(grid, run_dir=out)  # finished: nothing is left to do, and no client is asked
    assert len(grid.tasks()) == asked
    assert read_lines(out / LOG, place)[0][-1] == {"done": True}


def test_a_run_that_another_server_began_asks_first(
    grid: Any, config_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    start(grid, run_dir=out, config=config_file)
    pinned = json.loads((out / "pinned.json").read_text())
    (out / "pinned.json").write_text(json.dumps({**pinned, "torch": "1.0"}))
    with pytest.raises(StoreError, match=r"torch was 1\.0 and is .* here"):
        start(grid, run_dir=out)
    start(grid, run_dir=out, elsewhere=True)
    environment = json.loads((out / "result.json").read_text())["environment"]
    assert environment["torch"] == pinned["torch"]
    assert [machine["torch"] for machine in environment["machines_before"]] == ["1.0"]


def test_a_finished_run_waits_for_nobody(
    grid: Any, make_config: MakeConfig, config_file: Path, tmp_path: Path
) -> None:
    config = make_config(
        unlearning={"methods": ["goldfish"], "rounds": 1}, flower={"patience": 30.0}
    )
    config_file.write_text(config.to_toml())
    out = tmp_path / "run"
    start(grid, run_dir=out, config=config_file)
    grid.nodes.clear()
    begin = time.monotonic()
    start(grid, run_dir=out)
    assert time.monotonic() - begin < 15
    assert read_lines(out / LOG, 0)[0][-1] == {"done": True}


def test_a_configuration_beside_the_app_is_found(
    grid: Any, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower puts the folder of the app on the module path."""
    monkeypatch.syspath_prepend(str(config_file.parent))
    start(grid, run_dir=tmp_path / "run", config=config_file.name)
    assert (tmp_path / "run" / "result.json").exists()


def test_wrong_settings_are_refused_in_words(grid: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'run-dir' is 'run'; an absolute path on the server"):
        start(grid, run_dir="run")
    with pytest.raises(ConfigError, match="the app's setting 'config' is empty"):
        start(grid, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"There is no configuration file nowhere\.toml"):
        start(grid, run_dir=tmp_path / "run", config="nowhere.toml")
    assert not (tmp_path / "run").exists()


def test_what_ends_it_is_told(
    grid: Any, make_config: MakeConfig, config_file: Path, tmp_path: Path
) -> None:
    config_file.write_text(make_config(training={"learning_rate": 1e9}).to_toml())
    with pytest.raises(DivergenceError):
        start(grid, run_dir=tmp_path / "run", config=config_file)
    last = read_lines(tmp_path / "run" / LOG, 0)[0][-1]
    assert last["error"] == "DivergenceError"
    assert "Non-finite loss on client-" in last["message"]


def test_one_at_a_time_writes_into_a_run_directory(
    grid: Any, config_file: Path, tmp_path: Path
) -> None:
    """One that was stopped may take its time to end; the next one waits for it."""
    out = tmp_path / "run"
    start(grid, run_dir=out, config=config_file)
    (out / LOG).unlink()
    with (out / "flower.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=start, args=[grid], kwargs={"run_dir": out})
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert not (out / LOG).exists()
    second.join(60)
    assert read_lines(out / LOG, 0)[0][-1] == {"done": True}
