# SPDX-License-Identifier: Apache-2.0
"""Downloads from a local server that can close connections, send wrong data, and ignore ranges."""

import errno
import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedrec.data.fetching import download
from fedrec.data.fetching.download import fetch
from fedrec.data.files.published import Archive, DatasetSource
from fedrec.errors import DataError

CONTENT = "1\t2\t3\n" * 50_000


def zipped(**files):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"top/{name}.txt", text)
    return target.getvalue()


BODY = zipped(data=CONTENT, notes="free of charge")


class Server(ThreadingHTTPServer):
    """Serves `body`; `cut` closes the connection after this many bytes, `ranges` is whether ranges
    are honoured."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.cut, self.ranges, self.status, self.announce = BODY, None, True, 200, True
        self.asked: list[str | None] = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/files/data.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if start and start >= len(self.server.body):
            self.send_response(416)
            self.end_headers()
            return
        self.send_response(206 if start else self.server.status)
        if start:
            self.send_header(
                "Content-Range",
                f"bytes {start}-{len(self.server.body) - 1}/{len(self.server.body)}",
            )
        if self.server.announce:
            self.send_header("Content-Length", str(len(self.server.body) - start))
        self.end_headers()
        self.wfile.write(self.server.body[start : self.server.cut])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data" / "mine"


def source_of(server, body=BODY, **changes):
    archive = Archive(url=server.url, size=len(body), sha256=hashlib.sha256(body).hexdigest())
    settings = {"files": ("data.txt",), "extras": ("note*.txt",), "archives": (archive,)} | changes
    return DatasetSource(page="http://example.org", licence="any", **settings)


def left(folder):
    """Names of all files in the folder that contains the dataset's folder."""
    return sorted(
        str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*") if path.is_file()
    )


def test_installs_the_files(server, folder):
    seen = []
    assert (
        fetch("mine", source_of(server), folder, lambda done, size: seen.append((done, size)))
        == folder
    )
    assert (folder / "data.txt").read_text() == CONTENT
    assert left(folder) == ["mine/data.txt", "mine/notes.txt"]
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    assert seen[-1] == (len(BODY), len(BODY))
    assert seen == sorted(seen)


def test_interrupted_download_is_resumed(server, folder):
    server.cut = 500
    with pytest.raises(DataError, match="broke off") as caught:
        fetch("mine", source_of(server), folder)
    assert "500 bytes" in caught.value.got and f"{len(BODY):,} bytes" in caught.value.expected
    assert left(folder) == [".mine.download/data.zip.partial"]
    server.cut = None
    fetch("mine", source_of(server), folder)
    assert server.asked == [None, "bytes=500-"]
    assert (folder / "data.txt").read_text() == CONTENT


def test_server_that_ignores_ranges_starts_again(server, folder):
    server.cut, server.ranges = 500, False
    with pytest.raises(DataError, match="broke off"):
        fetch("mine", source_of(server), folder)
    server.cut = None
    fetch("mine", source_of(server), folder)
    assert (folder / "data.txt").read_text() == CONTENT


def test_body_without_announced_length_that_is_cut(server, folder):
    server.cut, server.announce = 500, False
    with pytest.raises(DataError, match="broke off"):
        fetch("mine", source_of(server), folder)


@pytest.mark.parametrize("announce", [True, False])
def test_longer_body_is_refused(server, folder, announce):
    server.body, server.announce = BODY + b"more", announce
    with pytest.raises(DataError, match="published size") as caught:
        fetch("mine", source_of(server), folder)
    assert caught.value.expected == f"{len(BODY):,} bytes"
    assert left(folder) == []


def test_shorter_file_on_the_server_is_refused(server, folder):
    server.body = BODY[:-4]
    with pytest.raises(DataError, match="published size") as caught:
        fetch("mine", source_of(server), folder)
    assert caught.value.got == f"{len(BODY) - 4:,} bytes"
    assert left(folder) == []


def test_tampered_body_is_refused_and_deleted(server, folder):
    server.body = BODY[:100] + bytes([BODY[100] ^ 1]) + BODY[101:]
    with pytest.raises(DataError, match="not the published file") as caught:
        fetch("mine", source_of(server), folder)
    assert hashlib.sha256(BODY).hexdigest() in caught.value.expected
    assert hashlib.sha256(server.body).hexdigest() in caught.value.got
    assert left(folder) == []
    server.body = BODY
    fetch("mine", source_of(server), folder)
    assert (folder / "data.txt").read_text() == CONTENT


def test_partial_file_of_something_else_is_refused_by_checksum(server, folder):
    holder = folder.parent / ".mine.download"
    holder.mkdir(parents=True)
    (holder / "data.zip.partial").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="not the published file"):
        fetch("mine", source_of(server), folder)
    fetch("mine", source_of(server), folder)
    assert folder.is_dir()


def test_partial_file_that_is_too_long_is_replaced(server, folder):
    holder = folder.parent / ".mine.download"
    holder.mkdir(parents=True)
    (holder / "data.zip.partial").write_bytes(BODY + b"x")
    fetch("mine", source_of(server), folder)
    assert server.asked == [None]


def test_range_beyond_the_file_on_the_server_starts_again(server, folder):
    holder = folder.parent / ".mine.download"
    holder.mkdir(parents=True)
    (holder / "data.zip.partial").write_bytes(BODY[:600])
    server.body = BODY[:300]
    with pytest.raises(DataError, match="HTTP status 416"):
        fetch("mine", source_of(server), folder)
    assert left(folder) == []


def test_http_error_is_named(server, folder):
    server.status = 404
    with pytest.raises(DataError, match="HTTP status 404"):
        fetch("mine", source_of(server), folder)
    assert left(folder) == []


def test_no_network(server, folder):
    source = source_of(server)
    server.server_close()
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        fetch("mine", source, folder)
    assert "check the network" in caught.value.fix


def test_full_disk(server, folder, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_append", full)
    with pytest.raises(DataError, match="is full") as caught:
        fetch("mine", source_of(server), folder)
    assert "bytes free" in caught.value.got
    assert left(folder) == []


def test_full_disk_while_unpacking_leaves_no_folder(server, folder, monkeypatch):
    class Full(io.BytesIO):
        def write(self, piece):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(path, mode="r", *rest, **more):
        return Full() if mode == "wb" and path.suffix == ".txt" else open(path, mode, *rest, **more)

    monkeypatch.setattr("pathlib.Path.open", opened)
    with pytest.raises(DataError, match="is full"):
        fetch("mine", source_of(server), folder)
    assert left(folder) == [".mine.download/data.zip"]
    monkeypatch.undo()
    fetch("mine", source_of(server), folder)
    assert server.asked == [None]  # finished downloads are not repeated
    assert left(folder) == ["mine/data.txt", "mine/notes.txt"]


def test_archive_without_the_needed_file_leaves_no_folder(server, folder):
    with pytest.raises(DataError, match="not the files of 'mine'") as caught:
        fetch("mine", source_of(server, files=("data.txt", "users.txt")), folder)
    assert caught.value.got == "without users.txt"
    assert not folder.exists()


def test_plain_file(server, folder):
    server.body = b"a,b\n"
    archive = Archive(
        server.url.replace("data.zip", "data.txt?raw=1"), 4, hashlib.sha256(b"a,b\n").hexdigest()
    )
    fetch("mine", source_of(server, archives=(archive,)), folder)
    assert (folder / "data.txt").read_text() == "a,b\n"


def test_existing_folder_is_kept(server, folder):
    folder.mkdir(parents=True)
    (folder / "own.txt").write_text("precious")
    with pytest.raises(DataError, match="exists already"):
        fetch("mine", source_of(server), folder)
    assert (folder / "own.txt").read_text() == "precious"
    assert server.asked == []


def test_dataset_without_archives(server, folder):
    with pytest.raises(DataError, match="no fixed address") as caught:
        fetch("mine", source_of(server, archives=()), folder)
    assert "fedrec data import mine PATH" in caught.value.fix
