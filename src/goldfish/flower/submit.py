"""``goldfish run`` and ``audit`` on Flower: hand a run to the SuperLink, follow it to its end.

The server app writes into the run directory on this machine, which is therefore the machine of the
SuperLink; the lines that it leaves there are followed. Flower's own command line does the rest, as
a child process: ``flwr run``, ``flwr stop``.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path

import tomli_w

from goldfish import errors
from goldfish.audits import Tier
from goldfish.data.sources import ENVIRONMENT_VARIABLE
from goldfish.errors import ConfigError, DeploymentError, GoldfishError, StoreError
from goldfish.experiments.config import Config, load_config
from goldfish.experiments.runner import check_experiment
from goldfish.experiments.scenario import Machine
from goldfish.federation.settings import FlowerSettings
from goldfish.files import claim, make_folder, write_whole
from goldfish.flower.app_folder import SERVER_APP, write_app_folder
from goldfish.flower.ops.processes import end_as_usual
from goldfish.flower.progress import LOG, is_at_work, last_process, read_lines
from goldfish.results import Progress
from goldfish.store import CONFIG, RunDirectory
from goldfish.types import Scalar

PROJECT_APP = "goldfish.project.server_app:app"
"""The server's side of a project's commands."""
CONNECTION = "goldfish"
"""The name under which Flower's own configuration knows the SuperLink."""
FLWR = (sys.executable, "-P", "-m", "flwr.cli.app")
"""Flower's command line, of the installation that runs here and not of the current folder."""
FLOWER_LOG = "flower.log"
SUBMIT_LOCK = "submit.lock"
"""Held by the one command that follows a run."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Flower sends nothing home, and installs nothing."""
POLL = 0.2
ENDED_FOR = 10.0
"""Seconds after the end of a Flower run in which its last lines may still appear."""
ENDING_FOR = 30.0
"""Seconds that a server app which was stopped may take to end before another one starts."""
NUMBERED_AFTER = 10.0
"""Seconds in which Flower says the number of a run that is to be stopped at once."""
STOPPED_AFTER = 60.0
"""Seconds in which a SuperLink says whether it stopped a run."""
STARTED_AFTER = 60.0
"""Seconds after which a run whose server app has not started is worth a word."""

Tell = Callable[[str], None]
"""What takes a sentence for the user."""


def _keep_quiet(_sentence: str) -> None:
    pass


def run_on_flower(
    config: Config,
    out: Path,
    machine: Machine,
    *,
    resume: bool = False,
    tell: Tell = _keep_quiet,
) -> Iterator[Progress]:
    """Yield the progress of a run on Flower, as ``run_experiment`` does of one in this process.

    Closing the iterator, or an interruption, stops the Flower run. ``tell`` gets what the user
    should know meanwhile.
    """
    refuse_to_submit(config.flower, machine)
    check_experiment(config, machine, out if resume else None)
    if resume:
        _wait_until_left(out)
        written = out / CONFIG
        # An interrupted run may go on with another [flower] table, on which no result depends.
        adopted = {"flower": config.flower}
        if written.exists() and load_config(written).model_copy(update=adopted) == config:
            write_whole(written, config.to_toml())
    with RunDirectory.open(out, config.to_toml(), resume=resume):
        lock = claim(out / SUBMIT_LOCK)
    with lock:
        yield from _follow(config.flower, out, machine, tell, f"goldfish run {out} --resume")


def audit_on_flower(
    config: Config,
    run: Path,
    machine: Machine,
    *,
    tier: Tier,
    models: int | None = None,
    methods: Sequence[str] = (),
    tell: Tell = _keep_quiet,
) -> Iterator[Progress]:
    """Yield the progress of an audit on Flower, as ``audit_run`` does of one in this process."""
    refuse_to_submit(config.flower, machine)
    _wait_until_left(run)
    what: dict[str, Scalar] = {"audit": tier, "models": models or 0, "methods": " ".join(methods)}
    with claim(run / SUBMIT_LOCK, "audit another run"):
        yield from _follow(config.flower, run, machine, tell, f"goldfish audit {run}", command=what)


def project_on_flower(
    settings: FlowerSettings,
    out: Path,
    machine: Machine,
    command: Mapping[str, Scalar],
    *,
    tell: Tell = _keep_quiet,
) -> Iterator[Progress]:
    """Yield the progress of a project's command, which its own server app carries out.

    ``out`` is where that app tells what it does; ``command`` are its settings, ``command`` and
    ``project`` among them.
    """
    refuse_to_submit(settings, machine)
    make_folder(out)
    _wait_until_left(out)
    with claim(out / SUBMIT_LOCK, "choose another project"):
        again = f"goldfish {command['command']}"
        yield from _follow(settings, out, machine, tell, again, PROJECT_APP, command)


def refuse_to_submit(settings: FlowerSettings, machine: Machine) -> None:
    """Raise where Flower, its SuperLink, or settings that make sense with them are missing."""
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError(
            'engine = "flower" needs Flower, which is not installed: '
            "pip install 'goldfish-fl[flower]'"
        )
    for name, given in (("workers", machine.workers is not None), ("compile", machine.compiled)):
        if given:
            raise ConfigError(
                f'--{name} has no meaning with engine = "flower", where every node trains its own '
                "client as it is set up. Leave it out."
            )
    if settings.superlink is None:
        raise ConfigError(
            'engine = "flower" needs a SuperLink: name its address in the [flower] table '
            '(superlink = "127.0.0.1:8000", and insecure = true or root_certificates).'
        )


def _follow(
    settings: FlowerSettings,
    out: Path,
    machine: Machine,
    tell: Tell,
    again: str,
    server_app: str = SERVER_APP,
    command: Mapping[str, Scalar] | None = None,
) -> Iterator[Progress]:
    """Submit the app, yield its progress, and end it if it is not followed to its end."""
    data_dir = machine.data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    own: dict[str, Scalar] = {
        "run-dir": str(out.resolve()),
        "data-dir": str(Path(data_dir).resolve()) if data_dir else "",
        "device": machine.device,
        "threads": machine.threads or 1,
        "elsewhere": machine.elsewhere,
    }
    with tempfile.TemporaryDirectory(prefix="goldfish-") as temporary:
        submission = Submission(Path(temporary), settings, out, tell, again)
        try:
            submission.start({**own, **(command or {})}, server_app)
            yield from submission.follow()
        finally:
            submission.stop()


def _wait_until_left(out: Path) -> None:
    """Wait until no server app works in ``out``: nobody may tidy up under its hands."""
    end = time.monotonic() + ENDING_FOR
    while is_at_work(out):
        if time.monotonic() > end:
            process = last_process(out)
            how = "" if process is None else f" with: kill {process}"
            raise StoreError(
                f"A server app still works in {out}. Wait until it has ended, or stop it{how}"
            )
        time.sleep(POLL)


class Submission:
    """A run that was handed to a SuperLink."""

    def __init__(
        self,
        folder: Path,
        settings: FlowerSettings,
        out: Path,
        tell: Tell = _keep_quiet,
        again: str = "",
    ) -> None:
        self._folder = folder
        self._out = out
        self._log = out / FLOWER_LOG
        self._tell = tell
        self._again = again
        """The command that goes on with it."""
        self._token = secrets.token_hex(8)
        self._over = False
        self._begun = False
        """Whether the child process was started, though perhaps not known yet."""
        self._child: subprocess.Popen[bytes] | None = None
        self._home = folder / "home"
        """Where Flower's command line runs: no folder there can be mistaken for an app."""
        write_whole(self._home / "config.toml", connection(settings))
        self._environment = {**os.environ, **QUIET, "FLWR_HOME": str(self._home)}

    def start(self, settings: Mapping[str, Scalar], server_app: str = SERVER_APP) -> None:
        """Submit the app, and have what it logs written to the run directory."""
        write_app_folder(self._folder / "app", {**settings, "token": self._token}, server_app)
        (self._out / LOG).unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self._begun = True
            self._child = subprocess.Popen(  # noqa: S603 (our own arguments)
                [*FLWR, "run", str(self._folder / "app"), CONNECTION, "--stream"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._home,
                start_new_session=True,  # Ctrl-C is ours to pass on
                preexec_fn=end_as_usual,
            )

    def follow(self) -> Iterator[Progress]:
        """Yield what the server app reports, until it ends; raise what ended it."""
        place, started, finished = 0, False, False
        ended: float | None = None
        late = time.monotonic() + STARTED_AFTER
        while not self._over:
            gone = finished or (started and not is_at_work(self._out))
            entries, place = read_lines(self._out / LOG, place)
            if not started:  # what stands before our own token is another app's
                entries = list(dropwhile(lambda entry: entry.get("token") != self._token, entries))
                started = bool(entries)
            for entry in entries:
                if "phase" in entry:
                    yield Progress.model_validate(entry)
                elif "error" in entry:
                    self._over = True
                    raise error_named(entry["error"], entry["message"])
                else:
                    self._over = "done" in entry
            if entries:
                continue
            if gone:
                raise StoreError(
                    f"The Flower run {self._run} ended before its time: {self._log} has what it "
                    f"said. Go on with: {self._again}"
                )
            # Flower's side may have ended without a word in the run directory.
            if self._child is None or self._child.poll() is None:
                ended = None
            elif self._run is None:
                said = _end_of(self._log.read_text(errors="replace"))
                raise ConfigError(f"The SuperLink did not take the run. Flower says: {said}")
            elif ended is None:
                ended = time.monotonic()
            elif time.monotonic() - ended > ENDED_FOR:
                finished = not self._going()  # what it said meanwhile is read before that counts
                ended = time.monotonic()
            if not started and time.monotonic() > late:
                late = math.inf
                self._tell(self._waiting())
            time.sleep(POLL)

    def stop(self) -> None:
        """End the Flower run if it is still going, and the child process with it.

        A run that goes on is an error: nobody must take it for stopped.
        """
        if not self._begun:
            return
        child = self._child  # None where an interruption came while it was being started
        try:
            if self._over:
                return
            end = time.monotonic() + NUMBERED_AFTER  # a run that Flower takes now would stay
            while (child is None or child.poll() is None) and self._run is None:
                if time.monotonic() > end:
                    return
                time.sleep(POLL)
            if (run := self._run) is None:
                return
            stopped = self._ask("stop", run, CONNECTION)
            if stopped.returncode != 0 and self._going():
                raise DeploymentError(
                    f"The Flower run {run} could not be stopped and may go on. Flower says: "
                    f"{_end_of(stopped.stdout + stopped.stderr)}. Stop it on the server with: "
                    f"flwr stop {run}"
                )
        finally:
            if child is not None and child.poll() is None:
                child.terminate()
                child.wait()

    def _waiting(self) -> str:
        """Say what a run that does not begin may be waiting for."""
        if is_at_work(self._out):
            return f"Still waiting: another server app works in {self._out}."
        return (
            f"The server app has not started after {STARTED_AFTER:g} seconds. Is a "
            "flower-superexec running for this SuperLink, and may it write to "
            f"{self._out.resolve()}? {self._log} has what Flower said. Still waiting."
        )

    def _going(self) -> bool:
        """Ask the SuperLink whether the run is still going (its log ends when it restarts)."""
        listed = self._ask("list", CONNECTION, "--run-id", str(self._run), "--format", "json")
        return listed.returncode != 0 or '"finished:' not in listed.stdout

    @property
    def _run(self) -> str | None:
        """The run's number, once Flower has said it."""
        said = self._log.read_text(errors="replace")
        found = re.search(r"Successfully started run (\d+)", said)
        return found[1] if found else None

    def _ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(  # noqa: S603 (our own arguments)
                [*FLWR, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._environment,
                cwd=self._home,
                timeout=STOPPED_AFTER,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return subprocess.CompletedProcess(late.cmd, 1, "", str(late))


def _end_of(text: str) -> str:
    """Return the last words of what Flower said, without the frames around them."""
    return " ".join(re.sub("[─│╭╮╰╯]", " ", text).split())[-500:] or "nothing"


def connection(settings: FlowerSettings) -> str:
    """Return Flower's own configuration for the SuperLink that the settings name."""
    own: dict[str, str | bool] = {"address": str(settings.superlink)}
    if settings.insecure:
        own["insecure"] = True
    if settings.root_certificates is not None:
        own["root-certificates"] = settings.root_certificates
    return tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: own}})


def error_named(name: str, message: str) -> GoldfishError:
    """Return the error that the server app ended with, as one of ours."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, GoldfishError):
        return kind(message)
    return GoldfishError(f"The server app failed: {name}: {message}")
