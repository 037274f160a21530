"""Download a dataset from its publisher: resumable, checked, and put in place whole."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from goldfish.data.datasets import DATASETS, Published
from goldfish.errors import ConfigError, DataError, unknown

_TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18

OnBytes = Callable[[int, int], None]


def fetch(
    name: str, data_dir: Path, *, base_url: str | None = None, progress: OnBytes | None = None
) -> Path:
    """Download a dataset into its folder under ``data_dir`` and return that folder.

    What is there already, with the right checksum, is not downloaded again, and an interrupted
    download goes on where it stopped. ``base_url`` names a mirror. ``progress`` is called with
    the bytes done and the bytes in all (0 when unknown) of the file under way.
    """
    published = {n: d.source for n, d in DATASETS.items() if isinstance(d.source, Published)}
    if name not in published:
        hint = f"These can be fetched: {', '.join(published)}."
        raise ConfigError(unknown("download", name, published, hint))
    source, layout = published[name], published[name].layouts[0]
    url = (base_url or source.url).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"A download needs an http or https address, not {url!r}.")
    folder = data_dir / layout.folder
    try:
        for file, md5 in source.md5.items():
            if not file.endswith(".tar.gz"):
                _fetch_file(f"{url}/{file}", md5, folder / file, progress)
            elif layout.missing(data_dir):
                downloaded = _fetch_file(f"{url}/{file}", md5, data_dir / file, progress)
                _unpack(data_dir / file, layout.files, folder)
                if downloaded:
                    (data_dir / file).unlink()
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}).") from error
    return folder


def _fetch_file(url: str, md5: str, target: Path, progress: OnBytes | None) -> bool:
    """Bring one file to its place; return whether it had to be downloaded."""
    if target.is_file() and _md5(target) == md5:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
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
    if found != md5:
        part.unlink()
        raise DataError(
            f"{url}: the checksum is {found}, the publisher gives {md5}. The download was "
            "deleted; run it again."
        )
    part.replace(target)
    return True


def _download(url: str, part: Path, progress: OnBytes | None) -> None:
    """Append to ``part`` what is missing of it; the checksum decides whether it is right."""
    start = part.stat().st_size if part.is_file() else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 (fetch checks the scheme)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            error.close()
            return  # nothing is left to download
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
