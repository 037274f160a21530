"""``goldfish run`` with engine = "flower": what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from goldfish.errors import ConfigError, DivergenceError, GoldfishError, StoreError
from goldfish.experiments.config import load_config, parse_config
from goldfish.experiments.runner import Progress
from goldfish.experiments.scenario import Machine
from goldfish.federation.settings import FlowerSettings
from goldfish.flower_app import submit
from goldfish.flower_app.app_folder import SETTINGS, write_app_folder
from goldfish.flower_app.progress import LOG, ProgressLog, read_lines

CONFIG = """
engine = "flower"
[data]
clients = 2
[model]
name = "mlp"
[training]
rounds = 1
[deletion]
rate = 0.1
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(CONFIG)
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def goldfish(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    start = f"{code}\nimport sys\nfrom goldfish.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", start, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_flower_it_says_what_to_install(config_file: Path, tmp_path: Path) -> None:
    """As where Flower is not installed: any import of it fails, and there is no trace of it."""
    hide = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'flwr' else find(name, *a)\n"
        "sys.modules['flwr'] = None"
    )
    done = goldfish("run", config_file, "--out", tmp_path / "out", code=hide)
    assert done.returncode == 1
    assert "pip install 'goldfish-fl[flower]'" in done.stderr
    assert not (tmp_path / "out").exists()
    here = goldfish(
        *("run", config_file, "--out", tmp_path / "out", "--set", "engine=in-process"),
        *("--set", "unlearning.rounds=1"),
        code=hide,
    )
    assert here.returncode == 0, here.stderr
    assert importlib.util.find_spec("flwr") is not None


def test_without_a_superlink_it_says_what_to_do(config_file: Path, tmp_path: Path) -> None:
    done = goldfish("run", config_file, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "needs a SuperLink: name its address in the [flower] table" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_superlink_that_is_not_there_is_an_error_in_words(
    config_file: Path, tmp_path: Path
) -> None:
    config = load_config(
        config_file, [f'flower.superlink="127.0.0.1:{free_port()}"', "flower.insecure=true"]
    )
    with pytest.raises(ConfigError, match=r"The SuperLink did not take the run. Flower says: .+"):
        list(submit.run_on_flower(config, tmp_path / "out", Machine()))


def test_an_interrupted_run_may_go_on_at_another_superlink(
    config_file: Path, tmp_path: Path
) -> None:
    """How to reach the clients is no part of what a run is; anything else is."""
    out = tmp_path / "out"
    for number in range(2):
        where = f'flower.superlink="127.0.0.1:{free_port()}"'
        config = load_config(config_file, [where, "flower.insecure=true"])
        with pytest.raises(ConfigError, match="did not take the run"):
            list(submit.run_on_flower(config, out, Machine(), resume=number == 1))
        assert load_config(out / "config.toml") == config
    other = load_config(config_file, [where, "flower.insecure=true", "training.rounds=2"])
    with pytest.raises(StoreError, match=r"training\.rounds is 1 there and 2 here"):
        list(submit.run_on_flower(other, out, Machine(), resume=True))


def test_what_cannot_run_leaves_no_directory_behind(config_file: Path, tmp_path: Path) -> None:
    settings = ["flower.superlink=x:1", "deletion.rate=0.00001"]
    config = load_config(config_file, settings)
    with pytest.raises(ConfigError, match="less than one sample"):
        list(submit.run_on_flower(config, tmp_path / "out", Machine()))
    assert not (tmp_path / "out").exists()


def test_the_configuration_survives_being_written(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("")
    config = load_config(config_file, ['flower.superlink="host:1"', "flower.timeout=5"])
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "again.toml") == config
    assert (config.engine, config.flower.timeout) == ("flower", 5.0)
    secure = load_config(config_file, ['flower.root_certificates="ca.crt"'])
    assert secure.flower.root_certificates == str(tmp_path / "ca.crt")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"engine": "flour"}, "engine: Input should be 'in-process' or 'flower'"),
        ({"flower": {"timeout": 0}}, "flower.timeout: Input should be greater than 0"),
        ({"flower": {"retry": 1}}, "Unknown setting 'flower.retry'. Did you mean"),
        (
            {"flower": {"insecure": True, "root_certificates": "ca.crt"}},
            "insecure and root_certificates exclude each other",
        ),
    ],
)
def test_wrong_settings_are_refused_in_words(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"deletion": {"rate": 0.1}, **table})


def test_the_engine_in_one_process_writes_no_word_of_flower() -> None:
    text = parse_config({"deletion": {"rate": 0.1}}).to_toml()
    assert "flower" not in text
    assert "engine" not in text


def test_flowers_own_configuration_names_the_superlink() -> None:
    plain = tomllib.loads(submit.connection(FlowerSettings(superlink="h:1", insecure=True)))
    assert plain["superlink"]["goldfish"] == {"address": "h:1", "insecure": True}
    secure = tomllib.loads(
        submit.connection(FlowerSettings(superlink="h:1", root_certificates="/ca.crt"))
    )
    assert secure["superlink"]["goldfish"] == {"address": "h:1", "root-certificates": "/ca.crt"}


def test_the_app_folder_names_both_apps_and_all_settings(tmp_path: Path) -> None:
    write_app_folder(tmp_path, {"run-dir": '/a "quoted" place', "threads": 2})
    written = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    app = written["tool"]["flwr"]["app"]
    assert app["config"] == {**SETTINGS, "run-dir": '/a "quoted" place', "threads": 2}
    for place in app["components"].values():
        module, _, name = place.partition(":")
        assert hasattr(importlib.import_module(module), name)


def test_progress_is_followed_line_by_line(tmp_path: Path) -> None:
    step = {"phase": "origin", "round": 1, "rounds": 2, "record": {"accuracy": 50.0}}
    with ProgressLog(tmp_path) as log:
        log.write(step)
        with log.path.open("a") as file:
            file.write('{"phase": "or')  # is just being written
        entries, place = read_lines(tmp_path / LOG, 0)
    assert [set(entry) for entry in entries] == [{"started"}, set(step)]
    assert Progress(**entries[1]) == Progress("origin", 1, 2, {"accuracy": 50.0})
    assert read_lines(tmp_path / "nothing", 7) == ([], 7)
    assert place == sum(len(json.dumps(entry)) + 1 for entry in entries)


def test_an_error_of_the_server_app_comes_back_as_itself(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError), ProgressLog(tmp_path):
        raise DivergenceError("too fast")
    last = read_lines(tmp_path / LOG, 0)[0][-1]
    error = submit.error_named(last["error"], last["message"])
    assert (type(error), str(error)) == (DivergenceError, "too fast")
    other = submit.error_named("ZeroDivisionError", "by zero")
    assert type(other) is GoldfishError
    assert str(other) == "The server app failed: ZeroDivisionError: by zero"
