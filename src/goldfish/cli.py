"""The command line: parse, call, print. PyTorch is imported only where it is used."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from goldfish.errors import ConfigError, GoldfishError
from goldfish.project import FILE, find_project
from goldfish.project.commands import PANEL, audit_newest
from goldfish.project.commands import app as project_app
from goldfish.terminal import (
    INTERRUPTED,
    DataDir,
    Device,
    DeviceOption,
    Workers,
    console,
    end_once,
    print_table,
    resolve,
    say,
    search_here,
    show_progress,
)
from goldfish.version import __version__

if TYPE_CHECKING:
    from goldfish.experiments.config import Config
    from goldfish.experiments.scenario import Machine
    from goldfish.results import Progress as Step

app = typer.Typer(
    help="Remove data from a federated model, fast, and show that it is gone.\n\n"
    "See it with 'goldfish demo'; 'goldfish init' makes a project for a federation of your own.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
EXPERIMENTS, THERE = "Experiments", "What there is, and where it runs"
"""Headings in the help."""
app.add_typer(project_app)  # first, and so at the top of the help
other_app = typer.Typer()
app.add_typer(other_app)
data_app = typer.Typer(help="Datasets: what is there, and how to get what is missing.")
app.add_typer(data_app, name="data", no_args_is_help=True, rich_help_panel=THERE)
flower_app = typer.Typer(help="One federation on many machines: deploy Goldfish on Flower.")
app.add_typer(flower_app, name="flower", no_args_is_help=True, rich_help_panel=THERE)

_tell = partial(console.print, highlight=False)


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


Tier = StrEnum("Tier", {"quick": "quick", "standard": "standard", "full": "full"})
"""How much an audit does."""
Precision = StrEnum("Precision", {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16"})
"""Arithmetic of the training."""

Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads of one client; may change the last bits.")
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the models: faster, but the last bits of the results may change."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. training.rounds=5."),
]


@other_app.command(rich_help_panel=EXPERIMENTS)
def demo(
    out: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/demo"),
    device: DeviceOption = Device.cpu,
    workers: Workers = None,
    seed: Annotated[int | None, typer.Option(min=0, help="A seed instead of the demo's.")] = None,
) -> None:
    """Train a federation on digits, remove samples of two clients, and show that they are gone.

    Half of these samples are poisoned. Three methods are compared.
    """
    from goldfish.experiments.config import DEMO, load_config
    from goldfish.experiments.scenario import Machine

    config = load_config(DEMO, seed=seed)
    machine = Machine(device=resolve(device), workers=workers, elsewhere=True)
    _run(config, out, machine, resume=True)


@other_app.command(rich_help_panel=EXPERIMENTS)
def run(
    config: Annotated[
        Path, typer.Argument(help="A TOML file (docs/configuration.md), or a run directory.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The run directory; by default runs/NAME for NAME.toml.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run.")
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="With --resume: go on although device, PyTorch or CPU are not those of before.",
        ),
    ] = False,
    set_: SetOption = None,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
    workers: Workers = None,
    threads: Threads = None,
    compile_: Compile = False,
    seed: Annotated[int | None, typer.Option(min=0, help="A seed instead of the file's.")] = None,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="Repeat the run with this many seeds; report means and spread."),
    ] = 1,
) -> None:
    """Run an experiment: train, delete, let each method unlearn, write results and a report."""
    from goldfish.experiments.config import load_config
    from goldfish.experiments.scenario import Machine

    place = out or Path("runs") / config.stem
    if config.is_dir():
        place, config = out or config, config / "config.toml"
    loaded = load_config(config, set_ or (), seed=seed)
    machine = Machine(data_dir, resolve(device), workers, threads, compile_, elsewhere)
    _run(loaded, place, machine, resume=resume, seeds=seeds)


@other_app.command(rich_help_panel=EXPERIMENTS)
def presets() -> None:
    """List the tables and figures of the paper that 'goldfish reproduce' runs."""
    from goldfish.experiments.preset import load_preset, preset_names

    known = [load_preset(name) for name in preset_names()]
    rows = ((preset.name, preset.title, str(preset.seeds)) for preset in known)
    print_table(("preset", "what it shows", "seeds"), rows)


@other_app.command(rich_help_panel=EXPERIMENTS)
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="What to run; 'goldfish presets' lists all."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Where all runs and a folder of results for each NAME go.")
    ] = Path("runs/reproduce"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds, instead of the preset's number.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute's version: little data, one seed, few rows.")
    ] = False,
    at: Annotated[
        list[float] | None,
        typer.Option(
            metavar="ROW", help="Run this row of the table alone, e.g. 6; may be repeated."
        ),
    ] = None,
    set_: SetOption = None,
    summary: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the pages of results in DIR anew.")
    ] = None,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
    workers: Workers = None,
    threads: Threads = None,
    compile_: Compile = False,
) -> None:
    """Run tables and figures of the paper, and judge its claims by what comes out.

    What is finished is not run again; what was interrupted goes on.

    Seeds and rows that OUT/NAME has from another day or machine stay.
    """
    from goldfish.experiments.reproduce import Reproduction
    from goldfish.experiments.scenario import Machine
    from goldfish.report.reproduction import PAGE, write_results, write_summary

    if bool(names) == (summary is not None):
        raise ConfigError(
            "Give the NAME of a preset ('goldfish presets' lists them), or --summary."
        )
    if summary is not None:
        say(f"Summary: {write_summary(summary)}")
    all_work = [
        Reproduction.of(name, out, seeds=seeds, quick=quick, overrides=set_ or (), at=at or ())
        for name in names or ()
    ]
    machine = Machine(data_dir, resolve(device), workers, threads, compile_, elsewhere=True)
    for work in all_work:
        cells = work.cells()
        for place, cell in enumerate(cells, start=1):
            search_here(cell.config.model.name)
            say(f"{work.preset.name}, run {place} of {len(cells)}: {cell.place}")
            if not cell.finished:
                again = f"goldfish reproduce {' '.join(names or ())} with the same options"
                show_progress(cell.run(machine), again, transient=True)
        folder = work.finish()
        print_table(("claim", "here", ""), write_results(folder, work.preset))
        say(f"Results: {folder / PAGE}")


@other_app.command(rich_help_panel=EXPERIMENTS)
def bench(
    model: Annotated[str, typer.Option(help="The model to train: lenet5 or a ResNet.")] = "lenet5",
    clients: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of clients; may be repeated. By default 5 and 100."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1000, help="Images in a round, over all clients.")
    ] = 60_000,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs in a round.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="How often each of them is measured.")] = 3,
    precision: Annotated[
        Precision, typer.Option(help="Arithmetic of the training on a GPU.")
    ] = Precision.fp32,
    compile_: Compile = False,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Measure the engine on this machine, against a plain PyTorch loop and Flower's simulation."""
    from goldfish.bench.rounds import Workload
    from goldfish.bench.tables import bench as measure
    from goldfish.bench.tables import machine_in_words

    place, sizes = resolve(device), tuple(clients or (5, 100))
    work = Workload(
        model, sizes, samples, place, precision.value, epochs, turns, compile_, data_dir
    )
    console.print(f"{machine_in_words(place)}. {model}, batches of 100.", highlight=False)
    with console.status("loading") as status:
        rows = measure(work, status.update)
    print_table(("what", "measured", "ratio"), rows)


@other_app.command(rich_help_panel=EXPERIMENTS)
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
) -> None:
    """Write the report page of a finished run again."""
    from goldfish.report import write_report

    console.print(f"Report: {write_report(run_dir)}")


@project_app.command(rich_help_panel=PANEL)
def audit(
    run_dir: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="A finished run, or a project; by default the project in this folder.",
        ),
    ] = None,
    tier: Annotated[
        Tier,
        typer.Option(
            help="quick: only the run's own models, no verdict. standard: 8 new models of each "
            "method and 8 retrained ones. full: 32 of each, and more attacks."
        ),
    ] = Tier.standard,
    models: Annotated[
        int | None,
        typer.Option(
            help="How many new models of each method, and as many retrained ones (oracles), "
            "instead of the tier's 8 or 32. In a project: how many oracles, by default 16."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Audit only this method; may be repeated. By default all."),
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option("--project", metavar="DIR", help="A project to audit, instead of DIR."),
    ] = None,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
    workers: Workers = None,
    compile_: Compile = False,
) -> None:
    """Look for traces: many models beside many retrained ones, sample by sample.

    The methods of a run, or the newest version of a project, which has not been purged yet.

    An interrupted audit goes on where it was; so does one with more models.
    """
    from goldfish.audits import AUDIT, Audit
    from goldfish.experiments.audit import audit_run, forecast
    from goldfish.experiments.config import load_config
    from goldfish.experiments.scenario import Machine, build_scenario
    from goldfish.report import audit_counts, audit_table, quick_table, write_report
    from goldfish.report.formatting import seconds
    from goldfish.results import read_run

    if project is not None and run_dir is not None:
        raise ConfigError("Give only one of DIR and --project DIR.")
    machine = Machine(data_dir, resolve(device), workers, compiled=compile_)
    if run_dir is None or (run_dir / FILE).exists():
        if run_dir is None and project is None and find_project(Path()) is None:
            raise ConfigError(
                "Say what to audit: a finished run, or a project (goldfish audit DIR)."
            )
        if tier is not Tier.standard or method:
            raise ConfigError(
                "A project's newest version is audited in one way: leave --tier and --method out."
            )
        audit_newest(run_dir or project or Path(), machine, models)
        return
    result, config = read_run(run_dir).result, load_config(run_dir / "config.toml")
    again = ["goldfish audit", str(run_dir), "--tier", tier.value]
    again += [] if models is None else ["--models", str(models)]
    again += [word for name in method or () for word in ("--method", name)]
    again += ["--compile"] if compile_ else []
    search_here(config.model.name)
    scenario = cache(partial(build_scenario, config, machine, run_dir))  # for both, built once
    here = None if config.engine == "flower" else scenario
    time = forecast(run_dir, here, tier=tier.value, models=models, methods=method or ())
    say(f"Forecast: {seconds(time)}, by what the run's rounds took.")
    auditing: Callable[..., Iterator[Step]] = partial(audit_run, scenario=scenario)
    if config.engine == "flower":
        from goldfish.flower.submit import audit_on_flower

        end_once()
        auditing = partial(audit_on_flower, config, tell=_tell)
    steps = auditing(run_dir, machine, tier=tier.value, models=models, methods=method or ())
    show_progress(steps, " ".join(again), close=config.engine == "flower")
    found = Audit.read(run_dir / AUDIT)
    tables = [quick_table(found, result)]
    if tier is not Tier.quick:
        tables.append(audit_table(found))
    for headings, rows in tables:
        print_table(headings, [[cell.replace(" ± ", "±") for cell in row] for row in rows])
    if tier is not Tier.quick:
        for name, own in found.methods.items():
            _tell(f"{name}: {own.word}.", style="bold")
            _tell(Padding(own.sentence, (0, 0, 0, 2)))
    for line in (audit_counts(found), *found.notes):
        _tell(line, style="dim")
    say(f"Details: {run_dir / AUDIT}. Report: {write_report(run_dir)}")


@other_app.command(rich_help_panel=THERE)
def methods() -> None:
    """Say of each unlearning method what it is, keeps, handles and promises."""
    from goldfish.methods import METHODS, count_kept_models
    from goldfish.models import build_model
    from goldfish.params import num_bytes, params_of
    from goldfish.report.formatting import size

    model = num_bytes(params_of(build_model("lenet5", num_classes=10, image_shape=(1, 28, 28))))
    for method in METHODS.values():
        kept = model * count_kept_models(method, method.settings(), 5, 20)
        amount = f" ({size(kept)} for LeNet-5, 5 clients, 20 rounds)" if kept else ""
        console.print(method.name, style="bold", highlight=False)
        for text in (
            method.summary,
            f"{method.kind}, {method.guarantee}; removes {', '.join(sorted(method.deletions))}",
            f"keeps {method.keeps}{amount}",
            f"source: {method.source}",
        ):
            _tell(Padding(text, (0, 0, 0, 2)))


@other_app.command(rich_help_panel=THERE)
def models() -> None:
    """List the models; your own is named package.module:factory."""
    from goldfish.models import MODELS

    print_table(("model", "what it is"), ((name, m.summary) for name, m in MODELS.items()))


@data_app.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """Say which datasets are there, and what is missing where."""
    from goldfish.data import available

    rows = []
    for found in available(data_dir):
        state = Text("there", "green") if found.present else Text("missing", "yellow")
        missing = f" (missing: {', '.join(found.missing)})" if found.missing else ""
        rows.append((found.name, state, found.location + missing))
    print_table(("dataset", "state", "where"), rows)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="A dataset from 'goldfish data list'.")],
    data_dir: DataDir = None,
) -> None:
    """Download a dataset from its publisher; an interrupted download goes on where it was."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from goldfish.data import fetch
    from goldfish.data.sources import resolve_data_dir

    columns = (TextColumn(name, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=None)
        fetch.fetch(
            name,
            resolve_data_dir(data_dir, name),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(f"{name} is complete in {resolve_data_dir(data_dir, name)}.")


Nodes = Annotated[int, typer.Option(min=1, help="How many nodes (clients).")]
Secure = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The folder of 'flower keys new': use TLS and node keys."),
]
StateDir = Annotated[Path, typer.Option(help="Where server and nodes keep their state and logs.")]
FLOWER_STATE = Path("runs/flower")
FLOWER_PORT = 9093


@flower_app.command("init")
def flower_init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make.")],
) -> None:
    """Write a small app folder: what Flower loads, and a configuration to begin with."""
    _need_flower()
    from goldfish.flower.app_folder import write_app

    for path in write_app(folder):
        console.print(path, highlight=False, soft_wrap=True)


keys_app = typer.Typer(help="Certificates and keys of a federation: new, renewed, for more nodes.")
flower_app.add_typer(keys_app, name="keys", no_args_is_help=True)
KeyFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the keys.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(help="Name or address by which nodes reach the SuperLink; may be repeated."),
]


@keys_app.command("new")
def keys_new(folder: KeyFolder, nodes: Nodes = 3, host: Hosts = None) -> None:
    """Make a certificate authority, the SuperLink's certificate and a key pair for each node."""
    _need_flower()
    from goldfish.flower.ops.keys import make_keys

    keys = make_keys(folder, nodes, host or ())
    say(
        f"Keys for {nodes} nodes are in {folder}. Each host gets only its own files "
        f"(docs/flower.md); {keys.authority_key.name} stays on none of them."
    )


@keys_app.command("renew")
def keys_renew(folder: KeyFolder, host: Hosts = None) -> None:
    """Make the certificates anew under the same authority; nodes keep their keys."""
    _need_flower()
    from goldfish.flower.ops.keys import renew_keys

    names = ", ".join(path.name for path in renew_keys(folder, host or ()))
    say(f"New in {folder}: {names}. Copy each to its host, and restart what runs there.")


@keys_app.command("add")
def keys_add(folder: KeyFolder, nodes: Nodes = 1) -> None:
    """Make the files of further nodes; register their public keys on the server."""
    _need_flower()
    from goldfish.flower.ops.keys import add_nodes

    for number in add_nodes(folder, nodes):
        say(f"node-{number}: flwr supernode register {folder / f'node-{number}.pub'}")


@keys_app.command("remove")
def keys_remove(
    folder: KeyFolder,
    number: Annotated[int, typer.Argument(metavar="N", help="The node's number: N of node-N.")],
) -> None:
    """Delete the files of a node; unregister it on the server too."""
    _need_flower()
    from goldfish.flower.ops.keys import remove_node

    remove_node(folder, number)
    say(
        f"The files of node-{number} are deleted. Whoever has a copy of its key stays a member "
        "until the server's 'flwr supernode unregister' names it ('flwr supernode list')."
    )


@flower_app.command("up")
def flower_up(
    nodes: Nodes = 3,
    secure: Secure = None,
    data_dir: DataDir = None,
    path: Annotated[
        Path | None,
        typer.Option(help="Your own data (an npz file or an image folder) that nodes may read."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model of your own, package.module:factory, for nodes to build; may be repeated."
        ),
    ] = None,
    state_dir: StateDir = FLOWER_STATE,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The SuperLink's port.")
    ] = FLOWER_PORT,
) -> None:
    """Start a SuperLink and nodes on this machine, until Ctrl-C."""
    _need_flower()
    from goldfish.flower.ops.up import Deployment

    _end_as_by_ctrl_c()
    try:
        console.print(f"Starting a SuperLink and {nodes} nodes ...")
        with Deployment(
            state_dir,
            nodes,
            keys=secure,
            data_dir=data_dir,
            path=path,
            models=model or (),
            port=port,
        ) as deployment:
            options = "".join(
                f" --set flower.{k}={str(v).lower() if isinstance(v, bool) else v}"
                for k, v in deployment.settings.items()
            )
            for line in (
                f"The SuperLink listens on {deployment.superlink.address}; {nodes} nodes are "
                f"online. Logs: {deployment.logs}",
                "In another terminal, run an experiment on it:",
                f"  goldfish run CONFIG.toml --set engine=flower{options}",
                "Every account of this machine can reach it, and so run code as you: for a "
                "machine of your own (docs/flower.md).",
                "Ctrl-C ends it all; what server and nodes keep stays.",
            ):
                say(line)
            deployment.watch()
    except KeyboardInterrupt:
        console.print("Ended.")


@flower_app.command("doctor")
def flower_doctor(
    secure: Secure = None,
    state_dir: StateDir = FLOWER_STATE,
    superlink: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Check that this SuperLink answers.")
    ] = None,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="Check that this port is free; may be repeated."),
    ] = None,
) -> None:
    """Check an installation, and say of each problem what to do."""
    _need_flower()
    from goldfish.flower.ops.doctor import examine

    healthy = True
    for finding in examine(state_dir, secure, superlink, port or ()):
        healthy &= finding.ok
        mark = Text("ok     ", "green") if finding.ok else Text("problem", "red")
        console.print(mark, f"{finding.check}: {finding.detail}", soft_wrap=True)
    if not healthy:
        raise typer.Exit(1)


@flower_app.command("tombstones")
def flower_tombstones(
    state_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A node's state-dir.")],
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The node's client-id.")],
    lift: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Let the client use this sample again; may be repeated."),
    ] = None,
) -> None:
    """List the samples that a client was asked to remove, and never uses again."""
    _need_flower()
    from goldfish.flower.client_store import DATABASE, ClientStore

    if not (state_dir / DATABASE).is_file():  # to open it would make one
        raise ConfigError(
            f"{state_dir} is no state-dir of a node: there is no {DATABASE}. Give the folder that "
            "state-dir names in the node-config."
        )
    with ClientStore(state_dir) as store:
        known = store.buried(client, lift or ())
        for sample in lift or ():
            if sample not in known:
                raise ConfigError(f"{client} was never asked to remove sample {sample!r}.")
        store.lift(client, lift or ())
        left = store.tombstones(client)
    for sample in left:
        say(sample)
    if not left:
        typer.echo(f"{state_dir} has no tombstone of {client}.", err=True)


def main() -> None:
    """Run the command line; an error that a user can mend is one message, not a traceback."""
    try:
        app()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # what Typer makes of Ctrl-C, without a word
            Console(stderr=True).print("Interrupted.")
        raise
    except (GoldfishError, OSError) as error:  # a full disk shows itself anywhere
        _print_error(str(error))
        sys.exit(1)


def _run(config: Config, out: Path, machine: Machine, *, resume: bool, seeds: int = 1) -> None:
    """Run an experiment under a progress bar, then show its result."""
    search_here(config.model.name)
    from goldfish.experiments.runner import run_experiment
    from goldfish.experiments.seeds import run_seeds

    once: Callable[..., Iterator[Step]] = run_experiment
    if config.engine == "flower":
        from goldfish.flower.submit import run_on_flower

        end_once()
        once = partial(run_on_flower, tell=_tell)
    repeat = once if seeds == 1 else partial(run_seeds, count=seeds, run=once)
    steps = repeat(config, out, machine, resume=resume)
    again = f"goldfish run {out} --resume" + (f" --seeds {seeds}" if seeds > 1 else "")
    show_progress(steps, again, close=config.engine == "flower")
    _print_result(out)


def _end_as_by_ctrl_c() -> None:
    """Let a service manager or a closed terminal end what runs elsewhere too, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise ConfigError("Flower is not installed. Run: pip install 'goldfish-fl[flower]'")


def _print_result(out: Path) -> None:
    from goldfish.report import headline, image_counts, short_table, unhonoured, write_report
    from goldfish.results import read_run

    result = read_run(out).result
    page = write_report(out)
    print_table(*short_table(result))
    told = headline(result)
    console.print(image_counts(result), style="dim")
    console.print(told.verdict, style="bold")
    for sentence in (told.asked, *told.sentences):
        console.print(sentence)
    console.print(f"Report: {page}", soft_wrap=True)
    failed = [method.diverged for method in result.methods.values() if method.diverged]
    failed += [sentence for name in result.methods for sentence in unhonoured(name, result)]
    if failed:
        _print_error("\n".join(failed))
        sys.exit(1)


def _print_error(message: str) -> None:
    errors = Console(stderr=True, markup=False, emoji=False)
    errors.print("Error:", style="bold red", end=" ")
    errors.print(message, highlight=False, soft_wrap=True)
