from __future__ import annotations

import hashlib
import http.server
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from goldfish.cli import app
from goldfish.data import DATASETS, available, load
from goldfish.data.datasets import Dataset, Layout, Published
from goldfish.data.fetch import fetch
from goldfish.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 4000  # about 1 MB: several chunks


def read_rows(path: Path) -> tuple[Tensor, Tensor]:
    """Read samples of 5 bytes: a label and 2 x 2 pixels."""
    rows = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, 5)
    return rows[:, 1:].reshape(-1, 1, 2, 2), rows[:, 0].long()


def record(url: str, files: dict[str, bytes], layout: Layout) -> Dataset:
    """Return a made dataset of two classes that lies at ``url``."""
    checksums = {name: md5(content) for name, content in files.items()}
    return Dataset(Published(url, checksums, (layout,)), (0.5,), (0.25,), ("cat", "dog"))


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; may ignore Range, or hang up after some bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges: list[str | None] = []
        self.honours_range = True
        self.hang_up_after: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        content = self.server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and self.server.honours_range:
            match = re.fullmatch(r"bytes=(\d+)-", wanted)
            assert match
            start = int(match[1])
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.hang_up_after])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def small(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server with a made dataset ``small`` of two files, of which one is large."""
    server.files = {"one.gz": CONTENT, "two.gz": b"two"}
    layout = Layout("small-folder", (("one.gz",),), (("two.gz",),), read_rows)
    monkeypatch.setitem(DATASETS, "small", record(server.url, server.files, layout))
    return server


def test_a_full_download(small: Server, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = fetch(
        "small", tmp_path / "new", progress=lambda done, total: calls.append((done, total))
    )
    assert folder == tmp_path / "new" / "small-folder"
    assert (folder / "one.gz").read_bytes() == CONTENT
    assert sorted(path.name for path in folder.iterdir()) == ["one.gz", "two.gz"]
    assert calls[-2:] == [(len(CONTENT), len(CONTENT)), (3, 3)]
    assert small.ranges == [None, None]


def test_what_is_there_is_not_downloaded_again(small: Server, tmp_path: Path) -> None:
    folder = fetch("small", tmp_path)
    (folder / "two.gz").write_bytes(b"damaged")
    fetch("small", tmp_path)
    assert (folder / "two.gz").read_bytes() == b"two"
    assert len(small.ranges) == 3


def test_an_interrupted_download_goes_on_where_it_stopped(small: Server, tmp_path: Path) -> None:
    small.hang_up_after = 400_000
    with pytest.raises(DataError, match=r"one\.gz: the download failed .*Run it again"):
        fetch("small", tmp_path)
    part = tmp_path / "small-folder" / "one.gz.part"
    assert part.stat().st_size == 400_000
    assert not (tmp_path / "small-folder" / "one.gz").exists()
    small.hang_up_after = None
    folder = fetch("small", tmp_path)
    assert small.ranges == [None, "bytes=400000-", None]
    assert (folder / "one.gz").read_bytes() == CONTENT
    assert not part.exists()


def test_a_server_that_ignores_range_sends_all_of_it(small: Server, tmp_path: Path) -> None:
    folder = tmp_path / "small-folder"
    folder.mkdir()
    (folder / "one.gz.part").write_bytes(CONTENT[:1000])
    small.honours_range = False
    fetch("small", tmp_path)
    assert small.ranges[0] == "bytes=1000-"
    assert (folder / "one.gz").read_bytes() == CONTENT


def test_a_part_that_is_complete_already_is_used(small: Server, tmp_path: Path) -> None:
    """The server answers 416: there is nothing after the last byte."""
    folder = tmp_path / "small-folder"
    folder.mkdir()
    (folder / "one.gz.part").write_bytes(CONTENT)
    fetch("small", tmp_path)
    assert small.ranges[0] == f"bytes={len(CONTENT)}-"
    assert (folder / "one.gz").read_bytes() == CONTENT


def test_a_wrong_checksum_deletes_the_download(small: Server, tmp_path: Path) -> None:
    small.files["two.gz"] = b"other"
    with pytest.raises(DataError, match=r"two\.gz: the checksum is .*deleted; run it again"):
        fetch("small", tmp_path)
    assert [path.name for path in (tmp_path / "small-folder").iterdir()] == ["one.gz"]


def test_a_file_that_the_server_lacks(small: Server, tmp_path: Path) -> None:
    del small.files["one.gz"]
    with pytest.raises(DataError, match=r"one\.gz: the server answered 404"):
        fetch("small", tmp_path)


def test_a_refused_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    closed = Server()
    closed.server_close()
    with pytest.raises(DataError, match=r"train-images.*the download failed"):
        fetch("mnist", tmp_path, base_url=closed.url)


def test_a_mirror_takes_the_place_of_the_publisher(small: Server, tmp_path: Path) -> None:
    small.files = {f"mirror/{name}": content for name, content in small.files.items()}
    folder = fetch("small", tmp_path, base_url=f"{small.url}mirror")
    assert (folder / "two.gz").read_bytes() == b"two"


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'mnist'"):
        fetch("mnst", tmp_path)
    with pytest.raises(ConfigError, match="http or https"):
        fetch("mnist", tmp_path, base_url="file:///etc/")


def test_a_folder_that_cannot_be_written(small: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        fetch("small", tmp_path / "file")


def archive(*entries: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("folder/link.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return buffer.getvalue()


def publish(server: Server, monkeypatch: pytest.MonkeyPatch, content: bytes, *members: str) -> None:
    server.files["all.tar.gz"] = content
    layout = Layout("unpacked", (members,), (), read_rows)
    monkeypatch.setitem(DATASETS, "tar", record(server.url, server.files, layout))


def test_an_archive_is_unpacked_and_not_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(("folder/a.bin", b"A"), ("folder/b.bin", b"B"), ("folder/readme", b"x"))
    publish(server, monkeypatch, content, "a.bin", "b.bin")
    folder = fetch("tar", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "a.bin": b"A",
        "b.bin": b"B",
    }
    assert list(tmp_path.iterdir()) == [folder]
    fetch("tar", tmp_path)
    assert len(server.ranges) == 1


def test_an_archive_cannot_write_elsewhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(("../../a.bin", b"A"), ("/tmp/evil.bin", b"E"))
    publish(server, monkeypatch, content, "a.bin")
    folder = fetch("tar", tmp_path / "data")
    assert [path.name for path in folder.iterdir()] == ["a.bin"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.bin", "data", "unpacked"]


@pytest.mark.parametrize(
    ("content", "members", "words"),
    [
        (archive(("folder/a.bin", b"A")), ["a.bin", "b.bin"], "b.bin missing in the archive"),
        (archive(), ["link.bin"], "link.bin missing in the archive"),
        (b"no archive", ["a.bin"], "cannot be unpacked"),
        (archive(("a.bin", b"A" * 9999))[:90], ["a.bin"], "cannot be unpacked"),
    ],
    ids=["member missing", "link for a file", "no archive", "cut short"],  # archives hold the time
)
def test_a_wrong_archive_leaves_nothing_behind(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    members: list[str],
    words: str,
) -> None:
    publish(server, monkeypatch, content, *members)
    with pytest.raises(DataError, match=words):
        fetch("tar", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["all.tar.gz"]


def test_an_archive_that_was_put_there_by_hand_is_used_and_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive(("a.bin", b"A"))
    publish(server, monkeypatch, content, "a.bin")
    (tmp_path / "all.tar.gz").write_bytes(content)
    folder = fetch("tar", tmp_path)
    assert (folder / "a.bin").read_bytes() == b"A"
    assert (tmp_path / "all.tar.gz").exists()
    assert server.ranges == []


def test_what_is_published_is_what_is_read() -> None:
    published = {n: d.source for n, d in DATASETS.items() if isinstance(d.source, Published)}
    assert set(published) == {"mnist", "fashion-mnist", "cifar-10", "cifar-100"}
    for source in published.values():
        assert all(re.fullmatch("[0-9a-f]{32}", checksum) for checksum in source.md5.values())
        archives = {name for name in source.md5 if name.endswith(".tar.gz")}
        assert archives or set(source.md5) == set(source.layouts[0].files)


def test_a_dataset_is_one_record(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one entry of DATASETS a dataset is listed, fetched and loaded; see CONTRIBUTING.md."""
    server.files = {
        "train.rows": bytes([0, 1, 2, 3, 4, 1, 5, 6, 7, 8]),
        "test.rows": bytes([1, 9, 9, 9, 9]),
    }
    layout = Layout("pets", (("train.rows",),), (("test.rows",),), read_rows)
    monkeypatch.setitem(DATASETS, "pets", record(server.url, server.files, layout))

    def listed() -> tuple[str, ...]:
        return next(entry for entry in available(tmp_path) if entry.name == "pets").missing

    assert listed() == ("train.rows", "test.rows")
    with pytest.raises(DataError, match=r"train\.rows, test\.rows missing.*data fetch pets"):
        load("pets", tmp_path)
    done = CliRunner().invoke(app, ["data", "fetch", "pets", "--data-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert listed() == ()
    data = load("pets", tmp_path)
    assert data.class_names == ("cat", "dog")
    assert data.train.images.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 1], [1])
    assert (data.train.mean, data.train.std) == ((0.5,), (0.25,))
    (tmp_path / "pets" / "test.rows").write_bytes(bytes([2, 9, 9, 9, 9]))
    with pytest.raises(DataError, match=r"test\.rows: labels 2 to 2 are .* data fetch pets"):
        load("pets", tmp_path)
