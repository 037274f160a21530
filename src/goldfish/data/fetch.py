"""Download a dataset from its publisher: resumable, checked, and put in place whole."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from goldfish.errors import ConfigError, DataError, unknown

_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A file at the publisher's, and the MD5 checksum that the publisher gives for it."""

    name: str
    md5: str


@dataclass(frozen=True)
class Publisher:
    """Where a dataset comes from, and the folder of the data directory that it goes to."""

    base_url: str
    folder: str
    files: tuple[RemoteFile, ...]
    members: tuple[str, ...] = ()
    """What to take out when the files are tar archives; empty: they are kept as they are."""


PUBLISHERS: dict[str, Publisher] = {
    "mnist": Publisher(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "mnist",
        (
            RemoteFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            RemoteFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            RemoteFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            RemoteFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "fashion-mnist": Publisher(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "fashion-mnist",
        (
            RemoteFile("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            RemoteFile("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            RemoteFile("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            RemoteFile("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    "cifar-10": Publisher(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-10-batches-bin",
        (RemoteFile("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        (
            *(f"data_batch_{number}.bin" for number in range(1, 6)),
            *("test_batch.bin", "batches.meta.txt"),
        ),
    ),
    "cifar-100": Publisher(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-100-binary",
        (RemoteFile("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
        ("train.bin", "test.bin", "fine_label_names.txt"),
    ),
}
"""The datasets that can be fetched."""

Progress = Callable[[int, int], None]


def fetch(
    name: str,
    data_dir: Path,
    *,
    base_url: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download a dataset into its folder under ``data_dir`` and return that folder.

    What is there already, with the right checksum, is not downloaded again, and an interrupted
    download goes on where it stopped. ``base_url`` names a mirror. ``progress`` is called with
    the bytes done and the bytes in all (0 when unknown) of the file under way.
    """
    if name not in PUBLISHERS:
        hint = f"These can be fetched: {', '.join(PUBLISHERS)}."
        raise ConfigError(unknown("download", name, PUBLISHERS, hint))
    publisher = PUBLISHERS[name]
    url = (base_url or publisher.base_url).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"A download needs an http or https address, not {url!r}.")
    folder = data_dir / publisher.folder
    try:
        if publisher.members:
            _fetch_archives(publisher, url, folder, progress)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            for file in publisher.files:
                _fetch_file(file, f"{url}/{file.name}", folder / file.name, progress)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}).") from error
    return folder


def _fetch_archives(
    publisher: Publisher, url: str, folder: Path, progress: Progress | None
) -> None:
    if all((folder / member).is_file() for member in publisher.members):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    for file in publisher.files:
        archive = folder.parent / file.name
        downloaded = _fetch_file(file, f"{url}/{file.name}", archive, progress)
        _unpack(archive, publisher.members, folder)
        if downloaded:
            archive.unlink()


def _fetch_file(file: RemoteFile, url: str, target: Path, progress: Progress | None) -> bool:
    """Bring one file to its place; return whether it had to be downloaded."""
    if target.is_file() and _md5(target) == file.md5:
        return False
    part = target.with_name(f"{target.name}.part")
    try:
        _download(url, part, progress)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(
            f"{url}: the server answered {error.code} {error.reason}. Try again later, or name a "
            "mirror."
        ) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(
            f"{url}: the download failed ({error}). Run it again to go on where it stopped."
        ) from error
    found = _md5(part)
    if found != file.md5:
        part.unlink()
        raise DataError(
            f"{url}: the checksum is {found}, the publisher gives {file.md5}. The download was "
            "deleted; run it again."
        )
    part.replace(target)
    return True


def _download(url: str, part: Path, progress: Progress | None) -> None:
    """Append to ``part`` what is missing of it; the checksum decides whether it is right."""
    start = part.stat().st_size if part.is_file() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (fetch checks the scheme)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            error.close()
            part.touch()  # nothing is left to download
            return
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server ignores Range and sends all of it
        length = int(response.headers.get("Content-Length") or 0)
        total = start + length if length else 0
        done = start
        with part.open("ab" if start else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    if done < total:
        raise http.client.IncompleteRead(b"", total - done)


def _unpack(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    """Take the expected files out of the archive, whatever else or wherever it wants to write."""
    unpacked = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                content = tar.extractfile(member) if member.isreg() and name in members else None
                if content is not None:
                    with (unpacked / name).open("wb") as file:
                        shutil.copyfileobj(content, file)
        missing = [name for name in members if not (unpacked / name).is_file()]
        if missing:
            raise DataError(f"{archive}: {', '.join(missing)} missing in the archive.")
        folder.mkdir(exist_ok=True)
        for name in members:
            (unpacked / name).replace(folder / name)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}). Delete it.") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
