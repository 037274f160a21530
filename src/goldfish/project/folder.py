"""The files of a project directory. They appear whole, and are their owner's alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from goldfish.data import Partition
from goldfish.errors import ConfigError, DataError, StoreError
from goldfish.experiments.engine import EngineFactory
from goldfish.experiments.scenario import Machine
from goldfish.files import claim, claimed, make_folder, sha256_of, sync_folder, write_whole
from goldfish.methods.trained import MODEL, Trained
from goldfish.project import FILE
from goldfish.project.holdings import Holdings, first_census, load_holdings
from goldfish.project.settings import ProjectSettings
from goldfish.results import Part
from goldfish.store import RunDirectory
from goldfish.store.runs import CHECKPOINTS, first_difference

BEGUN = "begun.sha256"
PINNED, MANIFEST, GONE, LOCK = "project.json", "manifest.json", "gone.json", "lock"


class Pinned(Part):
    """The whole of ``project.json``: what a project is bound to once it has a model."""

    version: int = 1
    salt: str
    settings: dict[str, Any]
    data: str | None
    """A digest of the data, where ids are positions in it."""
    class_names: tuple[str, ...] = ()
    """The classes of the model, in order; none in a project of an earlier Goldfish."""

    remedy: ClassVar[str] = "Put it back from a backup."

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_goldfish(cls, found: dict[str, Any]) -> dict[str, Any]:
        """Leave out what one kept in place of the names: how many there are."""
        return {name: value for name, value in found.items() if name != "classes"}


@dataclass(frozen=True)
class ProjectFolder:
    """Where a project keeps what.

    ``goldfish.toml`` says what is trained; ``project.json`` and ``manifest.json`` what that was
    when it was trained, and who held what; ``versions/vN`` holds the models, each with the keys of
    the samples that it is free of; ``work/vN`` what is being made; ``requests`` the keys of the
    samples that requests for a class name.
    """

    path: Path
    settings: ProjectSettings

    def version(self, number: int) -> Path:
        """Return where a model version lies."""
        return self.path / "versions" / f"v{number}"

    def model(self, number: int) -> Path:
        """Return the model file of a version."""
        return self.version(number) / MODEL

    def work(self, number: int) -> Path:
        """Return where a version is made."""
        return self.path / "work" / f"v{number}"

    def rounds(self, number: int) -> RunDirectory:
        """Return the folder in which a version is made, for its rounds."""
        make_folder(self.work(number))
        return RunDirectory(self.work(number))

    def first_rounds(self, begun: str) -> tuple[RunDirectory, bool]:
        """Return the folder of the first training, and whether an interrupted one was discarded.

        ``begun`` is a digest of what the training depends on. One that began with something else
        is discarded.
        """
        path = self.work(1) / BEGUN
        if path.exists() and path.read_bytes() == begun.encode():
            return self.rounds(1), False
        discarded = self.in_training
        remove(self.work(1))
        write_whole(path, begun)
        return self.rounds(1), discarded

    def refuse_other_ledger(self, versions: int, ledger: str) -> None:
        """Raise where the ledger, which tells of so many versions, is not that of this folder.

        A version lies here before the ledger tells of it. As long as the ledger does not, the
        folder in which it was made is there as well.
        """
        there = (int(p.name[1:]) for p in self.path.glob("versions/v*") if p.name[1:].isdecimal())
        newest = max((n for n in there if not self.work(n).exists()), default=0)
        if newest > versions:
            raise StoreError(
                f"{self.version(newest)} is there, and the ledger {ledger} does not know of it: "
                "it is empty, of another project, or older. Put it back from a backup, or correct "
                f"'ledger' in {self.path / FILE}. Nothing was done."
            )

    def name(self, path: Path) -> str:
        """Return a path as the ledger names it."""
        return path.relative_to(self.path).as_posix()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Let this process alone change the project; what it writes is its owner's alone."""
        with private(), claim(self.path / LOCK, "choose another project"):
            for place in ("", "versions/**/", "work/**/"):  # evidence is written without the lock
                for left_over in self.path.glob(f"{place}.*.part"):
                    remove(left_over)  # it was being written when a command was killed
            yield

    @property
    def at_work(self) -> bool:
        """Whether a process changes the project now, or may: on Flower one of another machine."""
        return self.settings.on_flower or claimed(self.path / LOCK)

    def pinned(self) -> Pinned:
        """Return what the project is bound to."""
        return Pinned.read(self.path / PINNED)

    def manifest(self) -> Partition:
        """Return who held what when the project was first trained."""
        try:
            return Partition.from_json((self.path / MANIFEST).read_text())
        except (OSError, DataError) as error:
            raise StoreError(
                f"{self.path / MANIFEST}, which says who holds what, cannot be read ({error}). "
                "Put it back from a backup."
            ) from error

    def gone(self, number: int) -> dict[str, set[str]]:
        """Return the keys of the samples that a version is free of, of every client."""
        path = self.version(number) / GONE
        try:
            found = json.loads(path.read_bytes())
            return {client: set(found.get(client, ())) for client in self.manifest().clients}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise StoreError(
                f"{path}, which says what v{number} is free of, cannot be read ({error}). Put it "
                "back from a backup."
            ) from error

    def of_class(self, request: str) -> set[str] | None:
        """Return the keys that a request for a class was seen to name, if it was seen."""
        path = self._named(request)
        if not path.exists():
            return None
        try:
            return set(map(str, json.loads(path.read_bytes())))
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(
                f"{path}, which says what {request} names, cannot be read ({error}). Put it back "
                "from a backup."
            ) from error

    def keep_class(self, request: str, keys: set[str]) -> None:
        """Note what a request for a class names: it stays so, whatever becomes of the data."""
        with private():
            write_whole(self._named(request), json.dumps(sorted(keys)))

    def forget_class(self, request: str) -> None:
        """Delete what a request for a class names."""
        remove(self._named(request))

    def _named(self, request: str) -> Path:
        return self.path / "requests" / f"{request}.json"

    @property
    def in_training(self) -> bool:
        """Whether there are rounds of the first training."""
        return (self.work(1) / CHECKPOINTS).exists()

    @property
    def changed(self) -> str | None:
        """The first setting that is not as it was when the project was bound to its data."""
        return first_difference(self.pinned().settings, self.settings.pinned)

    def refuse_changes(self) -> None:
        """Raise where the settings are not those that the model was trained with."""
        if (changed := self.changed) is not None:
            raise ConfigError(
                f"{self.path / FILE} was changed since the model was trained ({changed}). Set it "
                "back. For other clients, data or settings train a new model in a new project "
                "('goldfish init DIR'). It does not know what was removed here: delete that from "
                "the data first."
            )

    def holdings(self, machine: Machine, engine: EngineFactory | None = None) -> Holdings:
        """Read the data; with ``engine``, as long as there is no model, bind the project to it.

        Clients with data of their own are then asked what they hold. Of those that are not there,
        a training that goes on takes what they said before.
        """
        if engine is not None:
            bound = (self.path / PINNED).exists()
            # By the salt clients name what they keep: that of an earlier attempt is replaced.
            salt = self.pinned().salt if bound else secrets.token_hex(32)
            holdings = load_holdings(self.settings, self.path, machine, salt, None)
            if holdings.elsewhere:
                goes_on = bound and self.in_training and self.changed is None
                before = self.manifest().clients if goes_on else {}
                holdings = first_census(holdings, engine, machine, before)
            write_whole(self.path / MANIFEST, holdings.manifest.to_json())
            pinned = Pinned(
                salt=salt,
                settings=self.settings.pinned,
                data=holdings.digest,
                class_names=holdings.told.class_names,
            )
            write_whole(self.path / PINNED, pinned.model_dump_json(indent=1) + "\n")
            return holdings
        self.refuse_changes()
        pinned = self.pinned()
        holdings = load_holdings(
            self.settings,
            self.path,
            machine,
            pinned.salt,
            self.manifest(),
            pinned.class_names or None,
        )
        if pinned.data is not None and holdings.digest != pinned.data:
            raise DataError(
                "The data is not the one that the model was trained with, and its samples have no "
                "ids but their positions, which now mean other samples. Put it back as it was; "
                "give samples ids of their own before you delete any (docs/own-model.md)."
            )
        return holdings

    def write_version(self, number: int, trained: Trained, gone: Mapping[str, set[str]]) -> str:
        """Write a model version, whole, and return the SHA-256 of its model file."""
        folder = self.version(number)
        part = folder.with_name(f".v{number}.part")
        remove(folder)  # the ledger does not know it: its making was killed at the end
        write_whole(part / GONE, json.dumps({c: sorted(keys) for c, keys in gone.items()}))
        trained.save(part)
        part.rename(folder)
        sync_folder(folder.parent)
        return sha256_of(folder / MODEL)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Let files and folders that are made be their owner's alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
