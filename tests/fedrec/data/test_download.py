# SPDX-License-Identifier: Apache-2.0
"""Download, import and archives of datasets."""

import errno
import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
import threading
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from fedrec.data import download
from fedrec.data.download import fetch, import_data, unpack
from fedrec.data.reader import Archive, DatasetSource, Reader
from fedrec.data.tables import TableLayout
from fedrec.errors import DataError

# Downloads from a local server that can close connections, send wrong data, and ignore ranges.

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
            size = len(self.server.body)
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
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
    settings = {"files": ("data.txt",), "extras": ("note*.txt",), "archive": archive} | changes
    return DatasetSource(page="http://example.org", licence="any", **settings)


def left(folder):
    """Names of all files in the folder that contains the dataset's folder."""
    return sorted(
        str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*") if path.is_file()
    )


def test_installs_the_files(server, folder):
    seen = []
    source = source_of(server)
    assert fetch("mine", source, folder, lambda done, size: seen.append((done, size))) == folder
    assert (folder / "data.txt").read_text() == CONTENT
    assert left(folder) == ["mine/data.txt", "mine/notes.txt"]
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    assert seen[-1] == (len(BODY), len(BODY))
    assert seen == sorted(seen)


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_is_resumed(server, folder, ranges):
    """Or begun again, if the server ignores ranges."""
    server.cut, server.ranges = 500, ranges
    with pytest.raises(DataError, match="was interrupted") as caught:
        fetch("mine", source_of(server), folder)
    assert "500 bytes" in caught.value.got and f"{len(BODY):,} bytes" in caught.value.expected
    assert left(folder) == [".mine.download/data.zip.partial"]
    server.cut = None
    fetch("mine", source_of(server), folder)
    assert server.asked == [None, "bytes=500-"]
    assert (folder / "data.txt").read_text() == CONTENT


@pytest.mark.parametrize("body", [BODY[:100] + b"?" + BODY[101:], BODY + b"more", b"?" * 9**6])
def test_another_file_is_refused_and_deleted(server, folder, body):
    server.body, server.announce = body, False
    with pytest.raises(DataError, match="not the published file") as caught:
        fetch("mine", source_of(server), folder)
    assert hashlib.sha256(BODY).hexdigest() in caught.value.expected
    assert left(folder) == []
    server.body = BODY
    fetch("mine", source_of(server), folder)
    assert (folder / "data.txt").read_text() == CONTENT


def partial_file(folder, content):
    """What an earlier download left."""
    holder = folder.parent / ".mine.download"
    holder.mkdir(parents=True, exist_ok=True)
    (holder / "data.zip.partial").write_bytes(content)


def test_partial_file_of_something_else_is_refused_by_checksum(server, folder):
    partial_file(folder, b"x" * 100)
    with pytest.raises(DataError, match="not the published file"):
        fetch("mine", source_of(server), folder)
    partial_file(folder, BODY + b"x")  # too long: replaced
    fetch("mine", source_of(server), folder)
    assert folder.is_dir()


def test_range_beyond_the_file_on_the_server_starts_again(server, folder):
    partial_file(folder, BODY[:600])
    server.body = BODY[:300]
    with pytest.raises(DataError, match="HTTP status 416"):
        fetch("mine", source_of(server), folder)
    assert left(folder) == []


def test_no_network(server, folder):
    source = source_of(server)
    server.server_close()
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        fetch("mine", source, folder)
    assert "check the network" in caught.value.fix


def test_full_disk_while_unpacking_leaves_no_folder(server, folder, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with pytest.raises(DataError, match="is full"):
        fetch("mine", source_of(server), folder)
    assert left(folder) == [".mine.download/data.zip"]
    monkeypatch.undo()
    fetch("mine", source_of(server), folder)
    assert server.asked == [None]  # finished downloads are not repeated
    assert left(folder) == ["mine/data.txt", "mine/notes.txt"]


def test_archive_without_the_needed_file_leaves_no_folder(server, folder):
    with pytest.raises(DataError, match="files of 'mine' are missing") as caught:
        fetch("mine", source_of(server, files=("data.txt", "users.txt")), folder)
    assert caught.value.got == "no users.txt"
    assert not folder.exists()


def test_existing_folder_is_kept(server, folder):
    folder.mkdir(parents=True)
    (folder / "own.txt").write_text("precious")
    with pytest.raises(DataError, match="already exists"):
        fetch("mine", source_of(server), folder)
    assert (folder / "own.txt").read_text() == "precious"
    assert server.asked == []


# Import of a local copy: complete and verified, or not at all.

REVIEW = "A2,B1,5.0,1367193600\n"
REVIEWS = f"{__name__}:Reviews"


class Reviews(Reader):
    """A dataset without published counts."""

    source = DatasetSource("http://example.org", "any", ("reviews.csv",), folder="reviews")

    def read(self):
        columns = {"user": str, "item": str, "rating": np.float32, "time": np.int64}
        return self.rows(TableLayout(columns, separator=","))[0]


FILM = "1:\n7,3,2005-09-06\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "copy" / "deep" / "er"
    folder.mkdir(parents=True)
    (folder / "reviews.csv").write_text(REVIEW)
    (folder / "unrelated.txt").write_text("not needed")
    return tmp_path / "copy"


PACKED = {
    "folder": lambda copy: copy,
    "file": lambda copy: next(copy.rglob("*.csv")),
    **{
        kind: partial(lambda kind, copy: shutil.make_archive(copy.parent / "a", kind, copy), kind)
        for kind in ("zip", "tar", "gztar", "bztar")
    },
}


def test_nothing_to_import(home, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")  # reading it would wait for a writer for ever
    for name, path, problem in (
        (REVIEWS, "absent", "cannot be imported"),
        (REVIEWS, "pipe.csv", "cannot be imported"),
        ("table", "", "not a published dataset"),
    ):
        with pytest.raises(DataError, match=problem):
            import_data(name, tmp_path / path)


@pytest.mark.parametrize("packed", PACKED)
def test_takes_the_needed_files_from_any_form(home, copy, packed):
    folder = import_data(REVIEWS, type(home)(PACKED[packed](copy)))
    assert folder == home / "reviews"
    assert [path.name for path in folder.iterdir()] == ["reviews.csv"]
    assert [path.name for path in home.iterdir()] == ["reviews"]
    assert (copy / "deep" / "er" / "reviews.csv").exists()


def test_refused_copy_leaves_nothing(home, copy):
    (copy / "deep" / "er" / "reviews.csv").write_text(REVIEW + REVIEW[:9])
    with pytest.raises(DataError, match="cut off"):
        import_data(REVIEWS, copy)
    assert not any(home.iterdir())


def test_subfolders_of_the_documented_form_are_kept(home, tmp_path):
    # The counts of the Netflix data are known, so a small copy is refused because of its counts.
    (tmp_path / "nf" / "download" / "training_set").mkdir(parents=True)
    (tmp_path / "nf" / "download" / "training_set" / "mv_0000001.txt").write_text(FILM)
    with pytest.raises(DataError, match="number of rows") as caught:
        import_data("netflix", tmp_path / "nf")
    assert (caught.value.expected, caught.value.got) == ("100,480,507 rows", "1 rows")
    assert not any(home.iterdir())


def test_file_nearest_to_the_root_counts(home, copy):
    shutil.copy(PACKED["file"](copy), copy / "reviews.csv")
    (copy / "deep" / "er" / "reviews.csv").write_text("not this one")
    assert (import_data(REVIEWS, copy) / "reviews.csv").read_text() == REVIEW


def test_two_files_of_one_name_at_one_depth_are_refused(home, copy):
    (copy / "deep" / "other").mkdir()
    (copy / "deep" / "other" / "reviews.csv").write_text(REVIEW)
    with pytest.raises(DataError, match="two candidates for one file"):
        import_data(REVIEWS, copy)


# Archives must not write outside the folder into which they are unpacked, or fill the disk.


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "inner" / "target"
    folder.mkdir(parents=True)
    return folder


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def make_tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def tar_of(kind):
    """A tar with a link or a device."""

    def make(path):
        with tarfile.open(path, "w") as archive:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)

    return make


def zip_with_link(path):
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")


def changed_zip(old, new):
    """A zip whose member's name is changed in the directory, and said to be UTF-8."""

    def make(path):
        content = make_zip(path, {"one.txt": "1"}).read_bytes()
        directory = content.rindex(b"PK\x01\x02")
        entry = bytearray(content[directory:])
        entry[9] |= 8
        path.write_bytes(content[:directory] + bytes(entry).replace(old, new, 1))

    return make


def damaged_zip(path):
    data = bytearray(make_zip(path, {"one.txt": "content " * 50}).read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)


def cut_tar(mode, left):
    def make(path):
        path.write_bytes(make_tar(path, {"one.txt": "x" * 5000}, mode).read_bytes()[:left])

    return make


OUTSIDE = ["../out.txt", "/out.txt", "a/../../out.txt", "..\\out.txt", "C:out.txt"]
MANY = {f"{n}": "" for n in range(300)}
ARCHIVES = [
    *(
        (partial(make, members={"good.txt": "1", name: "x"}), "not safe")
        for make in (make_zip, make_tar)
        for name in OUTSIDE
    ),
    *((tar_of(kind), "not safe") for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
    *((tar_of(kind), "not safe") for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE)),
    (zip_with_link, "not safe"),
    (damaged_zip, "is damaged"),
    (cut_tar("w", 2000), "is damaged"),
    (cut_tar("w:gz", 11), "is damaged"),
    (cut_tar("w:gz", 40), "is damaged"),
    (changed_zip(b"one.txt", b"\xa0ne.txt"), "is damaged"),  # marked as UTF-8, which it is not
    (changed_zip(b"\x07\x00", b"\x00\x00"), "is not safe to unpack|is damaged"),  # no name
    (partial(make_zip, members={"a": "1", "a/b": "1"}), "is damaged"),  # a file is a folder
    (partial(make_zip, members={"a/b": "1", "a": "1"}), "is damaged"),
    (partial(make_tar, members={"a" * 256: "1"}), "is damaged"),  # a name that no file can have
    (partial(make_tar, members={"x/" + "é" * 128: "1"}), "is damaged"),
    (partial(make_zip, members={"one": "0" * 2_000_000}), "too large"),
    (partial(make_tar, members={"one": "0" * 2_000_000}), "too large"),
    (partial(make_zip, members=MANY), "too large"),  # many small files
    (partial(make_tar, members=MANY), "too large"),
]


@pytest.mark.parametrize(("make", "problem"), ARCHIVES)
def test_dangerous_and_damaged_archives_are_refused(tmp_path, target, monkeypatch, make, problem):
    if problem == "too large":
        monkeypatch.setattr(download, "_AT_LEAST", 1 << 20)
        monkeypatch.setattr(download, "_LARGER", 1)
    make(tmp_path / "archive")
    with pytest.raises(DataError) as caught:
        unpack(tmp_path / "archive", target)
    assert re.search(problem, str(caught.value))
    assert not list(tmp_path.rglob("*out.txt")) and not (target / "link").exists()
    if problem == "too large":
        assert not list(target.iterdir())
