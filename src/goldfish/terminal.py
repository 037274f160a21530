"""What all commands share: the console, common options, progress bars, tables."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from goldfish.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

    from rich.progress import TaskID

    from goldfish.results import Progress as Step

INTERRUPTED = 130
"""The usual exit status of a program that was ended by Ctrl-C."""

console = Console(markup=False, emoji=False)
"""Prints text as it is: names, paths and ids may hold square brackets and colons."""

Device = StrEnum("Device", {"auto": "auto", "cpu": "cpu", "cuda": "cuda"})
"""Where the models run."""
DataDir = Annotated[
    Path | None, typer.Option(help="Where the datasets are; by default $GOLDFISH_DATA.")
]
DeviceOption = Annotated[
    Device, typer.Option(help="Where the models run; auto takes a GPU if there is one.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Clients trained at a time; does not change results.")
]


def say(sentence: str) -> None:
    """Print a sentence as it is."""
    console.print(sentence, highlight=False, soft_wrap=True)


def search_here(model: str) -> None:
    """Let a model of one's own lie in the current folder, which is searched last."""
    if ":" in model and "" not in sys.path:
        sys.path.append("")


def show_progress(
    steps: Iterator[Step], again: str, *, close: bool = False, transient: bool = False
) -> None:
    """Go through the steps under progress bars; Ctrl-C tells the command that goes on.

    ``close`` lets steps that were interrupted end what runs elsewhere; ``transient`` bars vanish.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<10}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    bars: dict[str, TaskID] = {}
    try:
        with Progress(*columns, console=console, transient=transient) as progress:
            for step in steps:
                if step.phase not in bars:
                    bars[step.phase] = progress.add_task(step.phase, total=step.rounds, state="")
                progress.update(
                    bars[step.phase], completed=step.round, total=step.rounds, state=state_of(step)
                )
                where = f"{step.phase}, round {step.round}"
                for failure in step.record.failures if step.record else ():
                    said = f"{where}: {failure.client_id} did not answer: {failure.cause}"
                    progress.console.print(said)
                if step.record and (far := step.record.shortened):
                    who = f"{', '.join(far[:3])}{', ...' if far[3:] else ''}"
                    said = f"{where}: {len(far)} updates were too long and are shortened ({who})"
                    progress.console.print(said)
    except KeyboardInterrupt:
        if close:
            steps.close()  # type: ignore[attr-defined]
        say(f"Interrupted. What is finished is kept; go on with: {again}")
        sys.stdout.flush()
        # Worker threads are in the middle of a client's epochs, and nobody needs the rest.
        os._exit(INTERRUPTED)


def end_once() -> None:
    """Let a service manager or a closed terminal end what runs on Flower too, as Ctrl-C does.

    The first of these signals comes to its end: the others wait for it.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        console.print("Stopping the run on Flower ...")
        raise KeyboardInterrupt

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def state_of(step: Step) -> str:
    """Say what a round measured: the accuracy, and the first of the tests that the run has."""
    from goldfish.report.formatting import FORMS
    from goldfish.results import METRICS

    if step.diverged:
        return "diverged"
    known = [
        f"{metric.label} {FORMS[metric.unit](value, None)}"
        for metric in METRICS
        if metric.chart and (value := getattr(step.record, metric.key, None)) is not None
    ]
    return ", ".join(known[:2])


def resolve(device: Device) -> str:
    """Return the name of the device for PyTorch."""
    import torch

    from goldfish.hardware.gpu import open_queues

    if device is Device.cpu:
        return "cpu"
    open_queues()
    if torch.cuda.is_available():
        return "cuda"
    if device is Device.cuda:
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here. Use --device cpu.")
    return "cpu"


def print_table(headings: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
    """Print a table; its texts are printed as they are."""
    printed = Table(*headings)
    for row in rows:
        printed.add_row(*row)
    console.print(printed)
