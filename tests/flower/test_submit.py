"""``goldfish run`` with engine = "flower": what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import goldfish_here

from goldfish.errors import (
    ConfigError,
    DeploymentError,
    DivergenceError,
    GoldfishError,
    StoreError,
)
from goldfish.experiments.config import load_config, parse_config
from goldfish.experiments.scenario import Machine
from goldfish.federation.settings import FlowerSettings
from goldfish.files import claim
from goldfish.flower import submit
from goldfish.flower.app_folder import SETTINGS, write_app_folder
from goldfish.flower.progress import LOG, ProgressLog, alone_in, is_at_work, read_lines
from goldfish.results import Progress
from goldfish.version import __version__

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


def test_without_flower_it_says_what_to_install(config_file: Path, tmp_path: Path) -> None:
    """As where Flower is not installed: any import of it fails, and there is no trace of it."""
    code = """
import contextlib, importlib.util, sys
from goldfish.cli import main
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "flwr" else find(name, *a)
sys.modules["flwr"] = None
with contextlib.suppress(SystemExit):
    main()
sys.argv += ["--set", "engine=in-process", "--set", "unlearning.rounds=1"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(config_file), "--out", str(tmp_path / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("pip install 'goldfish-fl[flower]'") == 1
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "result.json").exists()
    assert importlib.util.find_spec("flwr") is not None


def test_without_a_superlink_it_says_what_to_do(config_file: Path, tmp_path: Path) -> None:
    done = goldfish_here(tmp_path, "run", config_file, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "needs a SuperLink: name its address in the [flower] table" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_superlink_that_is_not_there_is_an_error_and_the_run_may_go_on_at_another(
    config_file: Path, tmp_path: Path
) -> None:
    """How to reach the clients is no part of what a run is; anything else is."""
    out = tmp_path / "out"
    for number in range(2):
        where = f'flower.superlink="127.0.0.1:{free_port()}"'
        config = load_config(config_file, [where, "flower.insecure=true"])
        words = r"The SuperLink did not take the run. Flower says: [^─]+$"
        with pytest.raises(ConfigError, match=words):
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
    odd = '/a "quoted" \\ place 🐟/ca.crt'
    written = submit.connection(FlowerSettings(superlink="h:1", root_certificates=odd))
    assert tomllib.loads(written)["superlink"]["goldfish"]["root-certificates"] == odd


def test_the_app_folder_names_both_apps_and_all_settings(tmp_path: Path) -> None:
    place = '/a "quoted" {token} place 🐟'
    write_app_folder(tmp_path, {"run-dir": place, "threads": 2})
    written = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    app = written["tool"]["flwr"]["app"]
    assert app["config"] == {**SETTINGS, "run-dir": place, "threads": 2}
    assert written["project"]["version"] == __version__
    for place in app["components"].values():
        module, _, name = place.partition(":")
        assert hasattr(importlib.import_module(module), name)


def test_progress_is_followed_line_by_line(tmp_path: Path) -> None:
    step = {"phase": "origin", "round": 1, "rounds": 2, "diverged": "why"}
    with ProgressLog(tmp_path) as log:
        log.write(step)
        with log.path.open("a") as file:
            file.write('{"phase": "or')  # is just being written
        entries, place = read_lines(tmp_path / LOG, 0)
    assert [set(entry) for entry in entries] == [{"started", "token"}, set(step)]
    assert entries[1] == step
    assert read_lines(tmp_path / "nothing", 7) == ([], 7)
    assert entries[0] == {"started": os.getpid(), "token": ""}
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


NUMBER = "Successfully started run 77"
STEP = {"phase": "origin", "round": 1, "rounds": 1}


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that puts a script in the place of Flower's command line.

    Its ``flwr run`` is the given code; any other command is noted in the file that is returned, in
    the time and with the end that ``other`` gives it.
    """

    def pretend(code: str, other: str = "sys.exit()") -> Path:
        asked, script = tmp_path / "asked", tmp_path / "flwr.py"
        note = f"open({str(asked)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
        begin = f"import sys, time\nif sys.argv[1] != 'run':\n    time.sleep(0.5); {note}\n"
        begin += f"    {other}\n"
        script.write_text(begin + code)
        asked.touch()
        monkeypatch.setattr(submit, "FLWR", (sys.executable, str(script)))
        return asked

    return pretend


def submission(folder: Path, tell: Callable[[str], None] = print) -> submit.Submission:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    return submit.Submission(folder / "own", FlowerSettings(superlink="h:1"), out, tell)


def token_of(folder: Path) -> str:
    written = tomllib.loads((folder / "own" / "app" / "pyproject.toml").read_text())
    return str(written["tool"]["flwr"]["app"]["config"]["token"])


def test_the_last_words_of_an_app_that_was_stopped_are_not_ours(
    tmp_path: Path, flower: Callable[..., Path]
) -> None:
    """It may write to the log after the next run was submitted; then the next one's app starts."""
    flower(f"print({NUMBER!r}, flush=True); time.sleep(60)")
    own = submission(tmp_path)
    old = ProgressLog(tmp_path / "out", "another")
    with old:
        own.start({})
        old.write({**STEP, "round": 9})
    old.write({"error": "StoreError", "message": "stopped"})
    with alone_in(tmp_path / "out"), ProgressLog(tmp_path / "out", token_of(tmp_path)) as log:
        log.write(STEP)
    try:
        assert list(own.follow()) == [Progress.model_validate(STEP)]
    finally:
        own.stop()


def test_nobody_tidies_up_under_the_hands_of_a_server_app(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "ENDING_FOR", 0.3)
    where = [f'flower.superlink="127.0.0.1:{free_port()}"', "flower.insecure=true"]
    config, out = load_config(config_file, where), tmp_path / "out"
    out.mkdir()
    (out / "config.toml").write_text(config.to_toml())
    half = out / ".half.part"
    half.touch()
    with alone_in(out):
        with ProgressLog(out), pytest.raises(StoreError, match=rf"kill {os.getpid()}$") as refused:
            list(submit.run_on_flower(config, out, Machine(), resume=True))
        assert f"A server app still works in {out}" in str(refused.value)
        assert half.exists()


def test_an_app_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    assert not is_at_work(tmp_path)
    assert list(tmp_path.iterdir()) == []
    ending = threading.Event()

    def work() -> None:
        with alone_in(tmp_path):
            ending.set()
            time.sleep(0.3)

    app = threading.Thread(target=work)
    app.start()
    ending.wait(10)
    assert is_at_work(tmp_path)
    submit._wait_until_left(tmp_path)
    assert not is_at_work(tmp_path)
    app.join()


@pytest.mark.parametrize("lives_on", [True, False])
def test_a_run_that_flower_is_just_taking_is_stopped_too(
    tmp_path: Path, flower: Callable[..., Path], lives_on: bool
) -> None:
    after = "time.sleep(60)" if lives_on else ""
    asked = flower(f"time.sleep(0.5); print({NUMBER!r}, flush=True); {after}")
    own = submission(tmp_path)
    own.start({})
    own.stop()
    assert asked.read_text() == "stop 77 goldfish\n"


def test_a_run_that_could_not_be_stopped_is_not_called_stopped(
    tmp_path: Path, flower: Callable[..., Path]
) -> None:
    asked = flower(f"print({NUMBER!r}, flush=True); time.sleep(60)", "sys.exit('no such app')")
    own = submission(tmp_path)
    own.start({})
    message = r"run 77 could not be stopped and may go on\. Flower says: no such app.*flwr stop 77"
    with pytest.raises(DeploymentError, match=message):
        own.stop()
    assert asked.read_text().splitlines()[0] == "stop 77 goldfish"
    assert own._child is not None
    assert own._child.poll() is not None


def test_no_folder_is_mistaken_for_an_app_and_no_module_for_flowers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own command line, in a folder with a module and an app of the same names."""
    for folder in ("goldfish", "flwr"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('taken')")
        (tmp_path / folder / "pyproject.toml").write_text("[tool.flwr.federations]\n")
    monkeypatch.chdir(tmp_path)
    settings = FlowerSettings(superlink=f"127.0.0.1:{free_port()}", insecure=True)
    own = submit.Submission(tmp_path / "own", settings, tmp_path)
    said = own._ask("stop", "77", submit.CONNECTION)
    assert said.returncode != 0
    assert "Stopping run ID 77" in said.stdout


def test_a_run_is_followed_by_one_command(config_file: Path, tmp_path: Path) -> None:
    where = [f'flower.superlink="127.0.0.1:{free_port()}"', "flower.insecure=true"]
    config, out = load_config(config_file, where), tmp_path / "out"
    with claim(out / submit.SUBMIT_LOCK):
        (out / "config.toml").write_text(config.to_toml())
        with pytest.raises(StoreError, match=rf"in use by another command \(process {os.getpid()}"):
            list(submit.run_on_flower(config, out, Machine(), resume=True))


def test_a_run_that_flower_never_took_is_not_waited_for_long(
    tmp_path: Path, flower: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "NUMBERED_AFTER", 0.3)
    asked = flower("time.sleep(60)")
    own = submission(tmp_path)
    own.stop()
    own.start({})
    own.stop()
    assert asked.read_text() == ""
    assert own._child is not None
    assert own._child.poll() is not None


def test_a_run_that_does_not_begin_is_worth_one_word(
    tmp_path: Path, flower: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "STARTED_AFTER", 0.3)
    monkeypatch.setattr(submit, "POLL", 0.05)
    flower(f"print({NUMBER!r}, flush=True); time.sleep(2); sys.exit()")
    monkeypatch.setattr(submit, "ENDED_FOR", 0.0)
    monkeypatch.setattr(submit.Submission, "_going", lambda _: False)
    told: list[str] = []
    own = submission(tmp_path, told.append)
    own.start({})
    with pytest.raises(StoreError, match="run 77 ended before its time"):
        list(own.follow())
    (word,) = told
    assert "Is a flower-superexec running for this SuperLink" in word


def test_a_run_that_ends_while_flower_is_asked_is_done(
    tmp_path: Path, flower: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted SuperLink has ended the log, so Flower is asked, which takes its time."""
    flower(f"print({NUMBER!r}, flush=True)")
    own = submission(tmp_path)

    def ends(_: submit.Submission) -> bool:
        with alone_in(tmp_path / "out"), ProgressLog(tmp_path / "out", token_of(tmp_path)) as log:
            log.write(STEP)
        return False

    monkeypatch.setattr(submit, "ENDED_FOR", 0.0)
    monkeypatch.setattr(submit.Submission, "_going", ends)
    own.start({})
    assert list(own.follow()) == [Progress.model_validate(STEP)]


def test_flowers_own_command_ends_by_a_signal_that_this_process_ignores(
    tmp_path: Path, flower: Callable[..., Path], ignoring: None
) -> None:
    flower(f"print({NUMBER!r}, flush=True); time.sleep(60)")
    own = submission(tmp_path)
    own.start({})
    assert own._child is not None
    try:
        os.kill(own._child.pid, signal.SIGTERM)
        assert own._child.wait(10) == -signal.SIGTERM
    finally:
        own._child.kill()
        own._child.wait()


def test_a_run_whose_start_is_interrupted_is_stopped(
    tmp_path: Path, flower: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = flower(f"time.sleep(0.3); print({NUMBER!r}, flush=True)")
    own, popen = submission(tmp_path), subprocess.Popen
    started = []

    def interrupted(*args: Any, **kwargs: Any) -> subprocess.Popen[Any]:
        started.append(popen(*args, **kwargs))
        if len(started) == 1:
            raise KeyboardInterrupt
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.start({})
    own.stop()
    assert asked.read_text() == "stop 77 goldfish\n"
    assert started[0].wait(10) == 0


@pytest.mark.parametrize("machine", [Machine(workers=2), Machine(compiled=True)])
def test_settings_that_nodes_do_not_follow_are_refused(
    config_file: Path, tmp_path: Path, machine: Machine
) -> None:
    config = load_config(config_file, ["flower.superlink=x:1"])
    with pytest.raises(ConfigError, match=r"--(workers|compile) has no meaning with engine"):
        list(submit.run_on_flower(config, tmp_path / "out", machine))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT),
    ],
)
def test_a_signal_stops_the_run_however_often_it_comes(
    numbers: tuple[signal.Signals, ...],
    config_file: Path,
    tmp_path: Path,
    flower: Callable[..., Path],
    start_process: Callable[..., subprocess.Popen[Any]],
) -> None:
    asked = flower(f"print({NUMBER!r}, flush=True); time.sleep(60)")
    out = tmp_path / "out"
    where = ["--set", "flower.superlink=127.0.0.1:1"]
    pretend = f"from goldfish.flower import submit\nsubmit.FLWR = {submit.FLWR!r}"
    start = f"{pretend}\nfrom goldfish.cli import main\nmain()"
    run = start_process(
        [sys.executable, "-c", start, "run", str(config_file), "--out", str(out), *where],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    log = out / submit.FLOWER_LOG
    while not (log.exists() and NUMBER in log.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    for number in numbers:
        run.send_signal(number)
        time.sleep(0.1)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Interrupted" in said
    assert asked.read_text() == "stop 77 goldfish\n"
