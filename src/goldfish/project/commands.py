"""The commands of a project directory and of its evidence: parse, call ``Project``, print.

PyTorch is imported only where it is used.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from goldfish.errors import ConfigError, plain
from goldfish.project import FILE, LEDGER, find_project
from goldfish.terminal import (
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

if TYPE_CHECKING:
    from goldfish.experiments.scenario import Machine
    from goldfish.planning import Advice
    from goldfish.project.entries import Request, Version
    from goldfish.project.project import Project
    from goldfish.project.verification import Check

SIGNING_KEY = "signing.key"
"""The key's name in a project, unless another one is given."""

PANEL = "A project: a federation of your own, requests to delete, and the evidence"
"""The heading of these commands in the help."""

app = typer.Typer()
keys_app = typer.Typer(help="The keys that sign evidence packs.")
app.add_typer(keys_app, name="keys", no_args_is_help=True, rich_help_panel=PANEL)

Folder = Annotated[
    Path, typer.Option("--project", metavar="DIR", help="The project; by default this folder.")
]
HERE = Path()


@contextmanager
def _open(folder: Path, *, to_read: bool = False, ends_once: bool = False) -> Iterator[Project]:
    """Open a project: to read it alone, or for what ends once where it runs on Flower."""
    from goldfish.project.project import Project

    with Project.open(folder, to_read=to_read) as project:
        project.tell = say
        if ends_once and project.settings.on_flower:
            end_once()
        yield project


def _again(command: str, project: Path) -> str:
    """Return how a command that was interrupted goes on."""
    return f"goldfish {command}{'' if project == HERE else f' --project {quote(str(project))}'}"


def _machine(data_dir: Path | None, device: Device, workers: int | None) -> Machine:
    from goldfish.experiments.scenario import Machine

    return Machine(data_dir, resolve(device), workers)


@app.command(rich_help_panel=PANEL)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make.")] = HERE,
) -> None:
    """Make a project: a folder with a commented goldfish.toml that works as it stands."""
    from goldfish.project.project import Project

    say(f"{Project.init(folder)} is written: change it as you like, then run 'goldfish train'.")


@app.command(rich_help_panel=PANEL)
def train(
    project: Folder = HERE,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
    workers: Workers = None,
) -> None:
    """Train the project's first model version, or go on with it after an interruption."""
    with _open(project, ends_once=True) as opened:
        if opened.ledger.versions():
            opened.files.refuse_changes()
            say(
                f"Nothing to do: v{opened.current().number} is there ('goldfish status'). Clients "
                "and samples that came later need a new project ('goldfish init DIR')."
            )
            return
        steps = opened.train(_machine(data_dir, device, workers))
        show_progress(steps, _again("train", project), close=opened.settings.on_flower)
        _say_version(opened, opened.current())


@app.command("import", rich_help_panel=PANEL)
def import_(
    checkpoint: Annotated[
        Path, typer.Argument(help="A state dict: .safetensors, or what torch.save wrote.")
    ],
    project: Folder = HERE,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Take a model that was trained elsewhere, with this project's data, as version 1."""
    with _open(project, ends_once=True) as opened:
        _say_version(opened, opened.adopt(checkpoint, _machine(data_dir, device, None)))


@app.command(rich_help_panel=PANEL)
def clients(
    client: Annotated[
        str | None, typer.Argument(metavar="ID", help="List the sample ids of this one.")
    ] = None,
    project: Folder = HERE,
    data_dir: DataDir = None,
) -> None:
    """List the clients with their number of samples, or the sample ids of one of them."""
    from goldfish.errors import unknown

    with _open(project, to_read=True) as opened:
        held = opened.samples(_machine(data_dir, Device.cpu, None))
        classes = opened.class_names
    if client is None:
        print_table(("client", "samples"), ((name, str(len(ids))) for name, ids in held.items()))
        if classes:
            say(f"Classes: {', '.join(_named(label, classes) for label in range(len(classes)))}.")
    elif client not in held:
        raise ConfigError(unknown("client", client, held, "'goldfish clients' lists all."))
    elif opened.settings.members is not None:
        raise ConfigError(f"The ids of its samples are known to {client} alone.")
    else:
        typer.echo("\n".join(held[client]))


@app.command(rich_help_panel=PANEL)
def forget(
    client: Annotated[
        str, typer.Option("--client", metavar="ID", help="The client whose data it is.")
    ],
    samples: Annotated[
        Path | None,
        typer.Option("--samples", metavar="FILE", help="A file of sample ids, one in each line."),
    ] = None,
    class_: Annotated[
        str | None,
        typer.Option(
            "--class", metavar="LABEL", help="All samples of a class: its number or its name."
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="All data of the client, which leaves for good.")
    ] = False,
    reason: Annotated[
        str,
        typer.Option("--reason", help="Why; kept in the ledger for good, so name no sample in it."),
    ] = "",
    requested_at: Annotated[
        datetime | None,
        typer.Option(
            "--requested-at",
            metavar="YYYY-MM-DD",
            help="When the request came in (UTC); by default now.",
        ),
    ] = None,
    project: Folder = HERE,
    data_dir: DataDir = None,
) -> None:
    """File a deletion request, and say its number and until when it must be answered."""
    from goldfish.project.asking import label_of

    given = (samples is not None) + (class_ is not None) + all_
    if given != 1:
        said = "Give only one of" if given else "Say what is to be forgotten:"
        raise ConfigError(f"{said} --samples FILE, --class LABEL or --all.")
    at = None if requested_at is None else requested_at.replace(tzinfo=UTC)
    with _open(project) as opened:
        before = {request.id for request in opened.ledger.requests()}
        label = None if class_ is None else label_of(class_, opened.class_names)
        filed = opened.forget(
            client,
            samples=None if samples is None else _read_ids(samples),
            label=label,
            machine=_machine(data_dir, Device.cpu, None),
            reason=reason,
            requested_at=at,
        )
        already = " (it was filed before)" if filed.id in before else ""
        known = "a class" if label is None else f"class {_named(label, opened.class_names)}"
        what = _what(filed, known)
        say(f"{filed.id}{already}: {filed.client}, {what}. Due on {filed.due_at:%Y-%m-%d}.")


@app.command(rich_help_panel=PANEL)
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="A configuration or run directory to plan for, instead of the project.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="Look only at this method; may be repeated. By default all."),
    ] = None,
    project: Folder = HERE,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
    workers: Workers = None,
) -> None:
    """Say what each method would cost for the pending requests, and which one to take."""
    machine = _machine(data_dir, device, workers)
    if config is not None:
        from goldfish.experiments.config import load_config
        from goldfish.experiments.forecast import plan_run
        from goldfish.store import CONFIG

        run = config if config.is_dir() else None
        checked = load_config(run / CONFIG if run else config)
        search_here(checked.model.name)
        advice = plan_run(checked, machine, method or (), run)
        _print_estimates(advice)
        say(f"Advice: {advice.method} ({advice.reason}).")
        return
    with _open(project) as opened:
        found = opened.plan(machine, method or ())
        settings = opened.settings
    _print_estimates(found.advice)
    divided = settings.own_training is not None or settings.tables.training.shards > 1
    for client, shards in found.shards.items() if divided else ():
        word = "shard" if len(shards) == 1 else "shards"
        say(f"Touched of {client}: {word} {', '.join(map(str, shards))}.")
    say(f"To be superseded: {', '.join(found.artefacts)}.")
    say(f"Advice: goldfish unlearn --method {found.advice.method} ({found.advice.reason}).")


def _print_estimates(advice: Advice) -> None:
    """Print what each method would cost, and which ones cannot do it."""
    from goldfish.report.formatting import listing, seconds, size

    able = [own for own in advice.estimates if own.refused is None]
    print_table(
        ("method", "time", "samples", "rounds", "sent", "guarantee"),
        (
            (
                own.method,
                seconds(own.cost.seconds),
                f"{own.cost.samples:.0f}",
                str(own.rounds),
                size(own.cost.bytes_sent),
                own.guarantee,
            )
            for own in able
        ),
    )
    refused: dict[tuple[str, bool], list[str]] = {}
    for own in advice.estimates:
        if own.refused is not None:
            said = own.refused.partition(": train with")[0].rstrip(".")
            why = said.removeprefix(f"{own.method} ")
            refused.setdefault((why, why != said), []).append(own.method)
    for (why, of_method), names in refused.items():
        if of_method:
            say(f"{names[0]} {why}." if len(names) == 1 else f"{listing(names)}: each {why}.")
        else:
            say(f"{listing(names)}: {why}.")


@app.command(rich_help_panel=PANEL)
def unlearn(
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="One of 'goldfish methods'; by default unlearning.method of goldfish.toml.",
        ),
    ] = None,
    project: Folder = HERE,
    data_dir: DataDir = None,
    device: DeviceOption = Device.auto,
    workers: Workers = None,
) -> None:
    """Handle all pending requests in one pass: a new model version without what they name."""
    with _open(project, ends_once=True) as opened:
        before = opened.current().number
        steps = opened.unlearn(_machine(data_dir, device, workers), method)
        again = _again("unlearn" if method is None else f"unlearn --method {method}", project)
        show_progress(steps, again, close=opened.settings.on_flower)
        version = opened.current()
        if version.number > before:
            _say_version(opened, version)
        elif not opened.pending():
            say(
                f"Nothing had to be done: v{before} was made without all that is asked for. "
                "'goldfish purge' closes the requests."
            )
        for request in opened.pending():
            say(f"{request.id} is still open: {request.failure or 'it came in meanwhile'}.")


@app.command(rich_help_panel=PANEL)
def status(project: Folder = HERE) -> None:
    """Show requests, model versions, due dates and what is overdue."""
    from goldfish.project.lineage import fates
    from goldfish.report.formatting import listing, plural

    with _open(project, to_read=True) as opened:
        versions, requests = opened.ledger.versions(), opened.ledger.requests()
        if versions:
            became = fates(opened.ledger)
            print_table(
                ("version", "state", "made by", "on", "accuracy %", "for"),
                (_version_row(version, became[version.number]) for version in versions),
            )
        if requests:
            running = any(request.state == "running" for request in requests)
            at_work = running and opened.files.at_work
            print_table(
                ("request", "client", "what", "state", "due", ""),
                (_request_row(request, at_work=at_work) for request in requests),
            )
        if not versions:
            say("There is no model yet: run 'goldfish train'.")
            return
        newest = opened.current()
        if gap := _memory_gap(newest.facts["measures"], newest.facts.get("guarantee")):
            say(f"v{newest.number}: {gap}.")
        if known := opened.still_known():
            say(f"{known}: 'goldfish reject', then 'goldfish unlearn --method retrain'.")
        if found := opened.ledger.audits().get(newest.number):
            others = f"compared with {found['oracles']} oracles"
            say(f"Audit of v{newest.number}, {others}: {found['word']}.")
        pending = opened.pending()
        late = [request.id for request in requests if request.overdue()]
        if late:
            say(f"Overdue: {', '.join(late)}.")
        if pending:
            waiting = plural(len(pending), "request")
            say(f"Still to be handled: {waiting}. 'goldfish plan', then 'goldfish unlearn'.")
        if away := opened.outstanding():
            say(
                f"Still kept by {listing(away)}: what was made from removed samples. Run 'goldfish "
                "purge' when they are there."
            )
        old = any(a.kind == "model" for a in opened.ledger.artefacts("quarantined"))
        done = [request.id for request in requests if request.state == "measured"]
        if known and old:
            say("Old models that know removed samples are still there.")
        elif old or (done and not away):
            deletes = "deletes the old models that know removed samples"
            closes = f"closes {', '.join(done)}" if done else ""
            does = " and ".join(filter(None, (deletes if old else "", closes)))
            say(f"Next: 'goldfish purge', which {does}.")
        if not (pending or away or old or done):
            say("No request waits.")


@app.command(rich_help_panel=PANEL)
def reject(project: Folder = HERE) -> None:
    """Take the newest version back, before a purge: its requests are open again."""
    with _open(project) as opened:
        rejected = opened.current().number
        before = opened.reject().number
        say(
            f"v{rejected} is deleted, and v{before} the newest again. The requests of v{rejected} "
            "are open again ('goldfish unlearn')."
        )


@app.command(rich_help_panel=PANEL)
def withdraw(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="Its number, such as R-0001; 'goldfish status' lists them."
        ),
    ],
    reason: Annotated[
        str,
        typer.Option("--reason", help="Why; kept in the ledger for good, so name no sample in it."),
    ],
    project: Folder = HERE,
) -> None:
    """Take back a request that is not handled yet."""
    with _open(project) as opened:
        taken = opened.withdraw(request, reason)
        say(f"{taken.id} is withdrawn ({taken.failure}): nothing is removed for it.")


@app.command(rich_help_panel=PANEL)
def purge(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Accept a version even if a test found traces of removed samples in it.",
        ),
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="ID",
            help="Close the requests although this client can never be reached again; evidence "
            "still says so. May be repeated.",
        ),
    ] = None,
    data_dir: DataDir = None,
    project: Folder = HERE,
) -> None:
    """Delete what was made of removed samples, and close the requests: there is no way back."""
    with _open(project, ends_once=True) as opened:
        before = {r.id for r in opened.ledger.requests("closed")}
        machine = _machine(data_dir, Device.auto, None)
        gone = opened.purge(machine, dry_run=dry_run, anyway=anyway, without=without or ())
        for artefact in gone:
            say(f"{'would be' if dry_run else 'is'} deleted: {artefact.path} ({artefact.kind})")
        away = opened.outstanding()
        if away and not dry_run:
            say(f"Not there, and still to be purged: {', '.join(away)}.")
        elif not gone:
            say("Nothing to delete: no model here knows removed samples.")
        if closed := [r.id for r in opened.ledger.requests("closed") if r.id not in before]:
            say(f"Closed: {', '.join(closed)}.")
        if waiting := [r.id for r in opened.pending()]:
            say(f"Not handled yet: {', '.join(waiting)} ('goldfish unlearn').")


@app.command(rich_help_panel=PANEL)
def lineage(
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE", help="Draw it into this file: .png, .svg or .pdf."
        ),
    ] = None,
    project: Folder = HERE,
) -> None:
    """Show which model was made from which, for which requests, and what became of it."""
    from goldfish.project.lineage import draw, lines

    with _open(project, to_read=True) as opened:
        for line in lines(opened.ledger):
            say(line)
        if picture is not None:
            draw(opened.ledger, picture)
            say(f"Drawn: {picture}")


@keys_app.command("new")
def keys_new(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="The private key to make; FILE.pub is public.")
    ] = Path(SIGNING_KEY),
) -> None:
    """Make a key pair that signs evidence; a key that is there is never replaced."""
    from goldfish.project.signing import fingerprint, new_key, read_public

    public = new_key(path)
    name = fingerprint(read_public(public.read_bytes(), str(public)))
    say(f"{path} signs evidence: keep it, and keep it to yourself.")
    say(f"{public} is for all who check evidence. Its fingerprint is {name}.")


@app.command(rich_help_panel=PANEL)
def evidence(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="Its number, such as R-0001; 'goldfish status' lists them."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the pack goes; by default evidence/.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help=f"The private key that signs; by default {SIGNING_KEY} of the project."
        ),
    ] = None,
    project: Folder = HERE,
) -> None:
    """Write a signed evidence pack of a request: a folder, and the same as a zip."""
    from goldfish.project.evidence import PAGE, write_evidence
    from goldfish.project.project import Project

    with Project.open(project) as opened:
        tables = opened.settings.tables
        settings = tables.model_dump(
            mode="json", exclude={"ledger": True, "flower": True, "data": {"path", "manifest"}}
        )
        pack = write_evidence(
            opened.ledger,
            request,
            out or opened.folder / "evidence",
            key or opened.folder / SIGNING_KEY,
            {**settings, "methods": dict(opened.settings.methods)},
        )
    say(f"{pack.folder / PAGE} tells in plain words what was done. To hand on: {pack.archive}")


@app.command(rich_help_panel=PANEL)
def verify(
    packs: Annotated[
        list[Path], typer.Argument(metavar="PACK...", help="Evidence packs: folders or zip files.")
    ],
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="PUB", help="The public key that must have signed it."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="The file of the new model, to compare with the pack."),
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project",
            metavar="DIR",
            help="The project to compare with; by default the one that PACK lies in.",
        ),
    ] = None,
) -> None:
    """Check evidence packs offline, and say what is right, wrong, or could not be checked."""
    from goldfish.project.verification import verify_evidence

    wrong = False
    for pack in packs:
        home = find_project(project or pack.parent)
        if project is not None and home is None:
            raise ConfigError(f"{project} is no project: there is no {FILE}, here or above.")
        ledger = None if home is None else _ledger_of(home)
        found = verify_evidence(pack, key=key, model=model, project=home, ledger=ledger)
        if len(packs) > 1:
            say(f"{pack}:")
        wrong |= _say_checks(found)
    if wrong:
        raise typer.Exit(1)


def _say_checks(found: Sequence[Check]) -> bool:
    """Print what was checked of a pack, and return whether something is wrong with it."""
    styles = {"right": "green", "wrong": "bold red", "not checked": "yellow"}
    for check in found:
        console.print(f"{check.state:<12}", style=styles[check.state], end="")
        say(plain(f"{check.what}: {check.detail}"))  # a pack may come from a stranger
    states = {check.state for check in found}
    if "wrong" in states:
        say("Do not rely on this pack.")
        return True
    unchecked = ", as far as it could be checked" * ("not checked" in states)
    say(f"Nothing is wrong with this pack{unchecked}.")
    return False


def _ledger_of(project: Path) -> str | Path:
    """Return where the ledger of a project is, without the settings that need PyTorch."""
    try:
        url = str(tomllib.loads((project / FILE).read_text("utf-8-sig")).get("ledger", LEDGER))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{project / FILE} cannot be read: {error}.") from error
    return url if "://" in url else project / url


def audit_newest(folder: Path, machine: Machine, oracles: int | None) -> None:
    """Audit the newest version of a project, and print what is found: ``goldfish audit``."""
    from goldfish.audits import Difference
    from goldfish.project.audit import ORACLES, audit, audit_forecast
    from goldfish.report.audit import difference_cell
    from goldfish.report.formatting import seconds

    with _open(folder, ends_once=True) as opened:
        amount = ORACLES if oracles is None else oracles
        say(f"Forecast: {seconds(audit_forecast(opened, amount))}, by what earlier work took.")
        again = f"{_again('audit', folder)} --models {amount}"
        show_progress(audit(opened, machine, amount), again, close=opened.settings.on_flower)
        version = opened.current()
        found = opened.ledger.audits()[version.number]
    parts = ("before", "memory", "general", "accuracy")
    before, *own = (difference_cell(Difference(**found[part])) for part in parts)
    print_table(
        ("version", "memory", "all samples", "accuracy, points"),
        ((f"v{version.parent} (origin)", before, "", ""), (f"v{version.number}", *own)),
    )
    say(
        f"v{version.number} ({version.made_by}), compared with {amount} oracles, by "
        f"{found['removed']} removed and {found['unseen']} unseen samples: {found['word']}."
    )
    say(found["sentence"])


def _read_ids(path: Path) -> list[str]:
    from goldfish.data.removal import read_ids

    ids = read_ids(path, "--samples")
    if not ids:
        raise ConfigError(f"--samples: {path} names no sample. Write one sample id a line.")
    return ids


def _named(label: int, names: Sequence[str]) -> str:
    """Return the number of a class, and its name if that says more."""
    more = names and names[label] != str(label)
    return f"{label} ({names[label]})" if more else str(label)


def _what(request: Request, of_class: str = "a class") -> str:
    from goldfish.report.formatting import plural

    named = {"samples": "", "class": f", {of_class}", "all": ", all it has"}
    if request.count is None:
        return of_class  # of which only the client knows how many samples it has
    return f"{plural(request.count, 'sample')}{named[request.kind]}"


def _say_version(project: Project, version: Version) -> None:
    facts = version.facts
    say(
        f"v{version.number} ({version.made_by}): "
        f"{_measured(facts, 'measures', facts.get('guarantee'))}. "
        f"It lies in {project.files.version(version.number)}."
    )
    for tried, measures in facts.get("tried", {}).items():
        bad = measures.get("traces", "it lost too much")
        why = measures.get("failed") or f"its model was not good enough: {bad}."
        say(f"{tried} was tried first, and {why}")
    if "before" in facts:
        say(f"The model before: {_measured(facts, 'before')}.")
        advice = (
            "Look at both: 'goldfish purge' accepts the new one, 'goldfish reject' takes it back"
        )
        if known := project.still_known():
            advice = f"{known}: 'goldfish reject', then 'goldfish unlearn --method retrain'"
        say(f"{advice}.")


def _measured(facts: Mapping[str, Any], which: str, guarantee: str | None = None) -> str:
    measures = facts[which]
    said = [f"accuracy {measures['accuracy']:.1f} %{_rest(facts)}"]
    if (known := measures.get("removed_class_accuracy")) is not None:
        said.append(f"the removed class recognised in {known:.1f} %")
    return ", ".join([*said, *filter(None, [_memory_gap(measures, guarantee)])])


def _memory_gap(measures: Mapping[str, Any], guarantee: str | None = None) -> str:
    """Say what the model remembers of removed samples, and whether that may be chance."""
    from goldfish.project.traces import memory_of
    from goldfish.report.formatting import plural

    if (memory := memory_of(measures)) is None:
        return ""
    gap, whose = memory.gap, plural(int(memory.removed), "removed sample")
    better = "easier" if guarantee == "exact" else "known better"
    means = {
        "remembers": f"{better} than unseen samples",
        "over-forgets": "known worse than unseen samples",
        "alike": "too small to matter",
    }[gap.finding]
    if gap.low <= 0 <= gap.high:
        means = "cannot be told from unseen samples"
    return (
        f"memory gap of {whose} {gap.value:+.3f} (95 % interval {gap.low:+.3f} to "
        f"{gap.high:+.3f}: {means})"
    )


def _rest(facts: Mapping[str, Any]) -> str:
    """Say of which test samples a version's accuracies are, where they are not of all."""
    from goldfish.project.evidence import of_remaining_classes

    return " on the remaining classes" if of_remaining_classes(facts) else ""


def _version_row(version: Version, state: str) -> tuple[str, ...]:
    facts = version.facts
    return (
        f"v{version.number}",
        state,
        version.made_by,
        f"{version.at:%Y-%m-%d}",
        f"{facts['measures']['accuracy']:.1f}{_rest(facts)}",
        ", ".join(version.requests),
    )


def _request_row(request: Request, *, at_work: bool) -> tuple[str, ...]:
    state, note = request.state, request.failure or ("overdue" if request.overdue() else "")
    if state == "failed":
        state = "open again"  # the next unlearning takes it up
    elif state == "running" and not at_work:
        state, note = "interrupted", "run 'goldfish unlearn' again"
    return request.id, request.client, _what(request), state, f"{request.due_at:%Y-%m-%d}", note
