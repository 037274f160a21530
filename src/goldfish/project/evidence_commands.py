"""The commands for evidence: ``keys new``, ``evidence`` and ``verify``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from goldfish.errors import ConfigError, plain
from goldfish.project import FILE, LEDGER, find_project
from goldfish.project.commands import HERE, Folder
from goldfish.terminal import console, say

SIGNING_KEY = "signing.key"
"""The key's name in a project, unless another one is given."""

app = typer.Typer()
keys_app = typer.Typer(help="Keys that sign evidence.")
app.add_typer(keys_app, name="keys", no_args_is_help=True)


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


@app.command()
def evidence(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="From 'goldfish status'.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the pack goes; by default evidence/.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help=f"Signs; by default {SIGNING_KEY} of the project.")
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


@app.command()
def verify(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="The folder or the zip.")],
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="PUB", help="The public key that must have signed it."),
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="The new model's file.")] = None,
    project: Annotated[
        Path | None,
        typer.Option("--project", metavar="DIR", help="By default the one that PACK lies in."),
    ] = None,
) -> None:
    """Check an evidence pack offline, and say what is right, wrong, or could not be checked."""
    from goldfish.project.verification import verify_evidence

    home = find_project(project or pack.parent)
    if project is not None and home is None:
        raise ConfigError(f"{project} is no project: there is no {FILE}, here or above.")
    ledger = None if home is None else _ledger_of(home)
    found = verify_evidence(pack, key=key, model=model, project=home, ledger=ledger)
    styles = {"right": "green", "wrong": "bold red", "not checked": "yellow"}
    for check in found:
        console.print(f"{check.state:<12}", style=styles[check.state], end="")
        say(plain(f"{check.what}: {check.detail}"))  # a pack may come from a stranger
    if any(check.state == "wrong" for check in found):
        say("Do not rely on this pack.")
        raise typer.Exit(1)
    unchecked = any(check.state == "not checked" for check in found)
    say(f"Nothing is wrong with this pack{', as far as it could be checked' * unchecked}.")


def _ledger_of(project: Path) -> str | Path:
    """Return where the ledger of a project is, without the settings that need PyTorch."""
    try:
        url = str(tomllib.loads((project / FILE).read_text("utf-8")).get("ledger", LEDGER))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{project / FILE} cannot be read: {error}.") from error
    return url if "://" in url else project / url
