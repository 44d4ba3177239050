# SPDX-License-Identifier: Apache-2.0
"""Datasets from elsewhere: download, import, unpacking and atomic installation."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.client
import lzma
import os
import secrets
import shutil
import ssl
import stat
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

from fedrec.components.registry import DATASET, resolve
from fedrec.data.reader import Archive, DatasetSource, Reader
from fedrec.errors import DataError

# Unpacking archives from elsewhere without letting them write outside the given folder, or fill the
# disk.

_UNREADABLE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    EOFError,
    RuntimeError,  # the zip is encrypted, or packed with an unknown method
    UnicodeDecodeError,  # a name
    *(FileExistsError, IsADirectoryError, NotADirectoryError),  # a member is a folder of another
)
_LONGEST_NAME = 255  # bytes
_PIECE = 1 << 20
_LARGER = 200
_AT_LEAST = 1 << 30
"""An archive may unpack to this multiple of its own size (text compresses to about a tenth), and to
this number of bytes in any case."""
_MOST_FILES = 1_000_000
_Member = tuple[str, Callable[[], IO[bytes] | None]]


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or a tar (compressed or not), by content."""
    try:
        return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)
    except _UNREADABLE:  # compressed and damaged, which `unpack` says
        return True


def unpack(path: Path, folder: Path) -> None:
    """Unpack a zip or tar into a folder; any other file is copied there.

    Raises:
        DataError: the archive is damaged, holds a link, a device, or a path that leads out of the
            folder, or unpacks to too many bytes for its size.
    """
    if not is_archive(path):
        shutil.copyfile(path, folder / path.name)
        return
    try:
        members = _zip_members(path) if zipfile.is_zipfile(path) else _tar_members(path)
        left = max(_AT_LEAST, _LARGER * path.stat().st_size)
        for number, (name, opened) in enumerate(members):
            if number >= _MOST_FILES:
                raise _refused(path, name, f"more than {_MOST_FILES} files")
            target = folder / _inside(name, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = opened()
            if source is not None:
                with source, target.open("wb") as copy:
                    while piece := source.read(_PIECE):
                        left -= len(piece)
                        if left < 0:
                            raise _refused(
                                path, name, f"over {_LARGER} times what the archive weighs"
                            )
                        copy.write(piece)
    except _UNREADABLE as error:
        raise DataError(
            f"{path} is damaged, or an archive of an unknown kind",
            expected="a whole zip or tar",
            got=f"{type(error).__name__}: {error}",
            fix="get the file again",
        ) from None


def _zip_members(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(path, info.filename, "a link or a special file")
            if not info.filename:
                raise _refused(path, info.filename, "a file without a name")
            if not info.is_dir():
                yield info.filename, lambda info=info: _of_zip(archive, info)


def _of_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    try:
        return archive.open(info)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise zipfile.BadZipFile(f"{info.filename!r} begins before the archive") from None


def _tar_members(path: Path) -> Iterator[_Member]:
    with tarfile.open(path) as archive:
        for info in archive:
            if not (info.isfile() or info.isdir()):
                raise _refused(path, info.name, "a link or a special file")
            if info.isfile():
                yield info.name, lambda info=info: archive.extractfile(info)


def _inside(name: str, path: Path) -> PurePosixPath:
    """The member's path, which must stay below the folder on every system."""
    inner = PurePosixPath(name)
    longest = max((len(part.encode(errors="surrogateescape")) for part in inner.parts), default=0)
    if "\0" in name or longest > _LONGEST_NAME:
        raise _refused(path, name[:100], "a name that no file can have")
    if inner.is_absolute() or ".." in inner.parts or "\\" in name or ":" in name or not inner.parts:
        raise _refused(path, name, "a path that leads out of the folder")
    return inner


def _refused(path: Path, name: str, problem: str) -> DataError:
    return DataError(
        f"{path} is not safe to unpack",
        expected="plain files and folders below the archive's root",
        got=f"{problem}: {name!r}",
        fix="do not use this archive; take the data from their publisher",
    )


# Atomic installation of a dataset into its folder.


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` if the block succeeds, and is deleted otherwise.

    It is beside `folder`, so that the last step is a rename within one file system.

    Raises:
        DataError: `folder` exists already, or the disk is full.
    """
    require_absent(folder)
    with scratch(folder) as temporary:
        yield temporary
        os.replace(temporary, folder)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that is deleted after the block.

    Raises:
        DataError: the disk is full.
    """
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
        temporary.mkdir()  # with the permissions of the umask
        if folder.is_dir():
            temporary.chmod(folder.stat().st_mode & 0o777)  # an empty folder may be replaced
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def require_absent(folder: Path) -> None:
    """Check that nothing would be overwritten.

    Raises:
        DataError: the folder exists and is not empty.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise DataError(
            f"{folder} exists already",
            expected="no such folder",
            got="a folder with files" if folder.is_dir() else "a file",
            fix="use it as it is, or delete it first",
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn "disk full" and "not allowed" inside the block into an error that the user can fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free if folder.exists() else 0
            raise DataError(
                f"the disk of {folder} is full",
                expected="room for the dataset",
                got=f"{free:,} bytes free",
                fix="make room, or set FEDREC_DATA to a folder on another disk",
            ) from None
        if isinstance(error, PermissionError):
            fix = "allow it, or set FEDREC_DATA to a folder of your own"
            raise DataError(
                f"{folder} cannot be written", expected="permission", got=str(error), fix=fix
            ) from None
        raise


def collect(
    source: DatasetSource, name: str, candidates: Iterator[tuple[Path, Path]], target: Path
) -> None:
    """Copy a dataset's files, wherever they lie among the candidates, to `target`.

    Args:
        source: names the files.
        name: the dataset's name.
        candidates: each file's path, and its path relative to the folder that is searched.
        target: an existing folder.

    Raises:
        DataError: a needed file is missing, or two candidates fit one file.
    """
    files = sorted(candidates, key=lambda pair: (len(pair[1].parts), pair[1]))
    found: dict[Path, tuple[Path, Path]] = {}
    for path, relative in files:
        for pattern in (*source.files, *source.extras):
            if relative.match(pattern):
                inner = Path(*relative.parts[-len(Path(pattern).parts) :])
                _require_single(found.get(inner), relative)
                found.setdefault(inner, (path, relative))
    missing = [file for file in source.files if Path(file) not in found]
    if missing or not found:
        raise DataError(
            f"these are not the files of {name!r}",
            expected=", ".join(source.files or source.extras),
            got="without " + ", ".join(missing) if missing else "none of them",
            fix=f"see {source.page}",
        )
    for inner, (path, _) in found.items():
        (target / inner).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / inner)


def _require_single(known: tuple[Path, Path] | None, relative: Path) -> None:
    """Of two candidates the one nearer to the root counts; two at the same depth are ambiguous."""
    if known is not None and len(known[1].parts) == len(relative.parts):
        raise DataError(
            "two files fit one name",
            expected=f"one {relative.name}",
            got=f"{known[1]} and {relative}",
            fix="name the folder that holds the right one",
        )


def files_below(folder: Path) -> Iterator[tuple[Path, Path]]:
    """All plain files at any depth: each path, and its path relative to the folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.relative_to(folder)


# Download of a public dataset: resumed after interruptions, verified before use, and installed
# atomically.

Progress = Callable[[int, int], object]
"""Called with the number of downloaded bytes and the size of the whole file."""

_BLOCK = 1 << 18
_PATIENCE = 60.0
_ELSEWHERE = "try again later, or get the file elsewhere and use: fedrec data import NAME PATH"


def fetch(name: str, source: DatasetSource, folder: Path, progress: Progress | None = None) -> Path:
    """Download a dataset's archives and put its files into `folder`.

    An interrupted download is kept beside the folder (`*.partial`) and resumed next time.

    Args:
        name: of the dataset.
        source: its archives and files.
        folder: destination; must not exist yet, or be empty.
        progress: called with the progress of the download.

    Returns:
        The folder.

    Raises:
        DataError: no archive to download, no network, a wrong size or checksum, a full disk, or
            `folder` exists.
    """
    if not source.archives:
        raise DataError(
            f"{name!r} cannot be downloaded: its publisher offers no fixed address",
            expected="a local copy",
            got="a request to download",
            fix=f"get it by way of {source.page}, then: fedrec data import {name} PATH",
        )
    require_absent(folder)
    progress = progress or _silent
    files = [_downloaded(archive, folder, progress) for archive in source.archives]
    with scratch(folder) as unpacked, staged(folder) as staging:
        for file in files:
            unpack(file, unpacked)
        collect(source, name, files_below(unpacked), staging)
    shutil.rmtree(_holder(folder), ignore_errors=True)
    return folder


def _silent(done: int, size: int) -> None:
    pass


def _holder(folder: Path) -> Path:
    """Folder of a dataset's archives until it is installed, in which they keep their names."""
    return folder.parent / f".{folder.name}.download"


def _downloaded(archive: Archive, folder: Path, progress: Progress) -> Path:
    """The whole, verified archive."""
    whole = _holder(folder) / PurePosixPath(urlsplit(archive.url).path).name
    partial = whole.with_name(whole.name + ".partial")
    with disk_errors(folder.parent):
        whole.parent.mkdir(parents=True, exist_ok=True)
        if whole.is_file():  # an earlier run could not unpack it; it is verified again
            os.replace(whole, partial)
        _receive(archive, partial, progress)
        _require_published(archive, partial)
        os.replace(partial, whole)
    return whole


def _receive(archive: Archive, partial: Path, progress: Progress) -> None:
    """Download the missing rest of the partial file."""
    have = partial.stat().st_size if partial.exists() else 0
    if have == archive.size:
        return
    if have > archive.size:
        have = 0
    request = urllib.request.Request(
        archive.url, headers={"Range": f"bytes={have}-"} if have else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as response:
            resumes = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            _append(response, partial, have if resumes else 0, archive, progress)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            partial.unlink()  # the partial file does not belong to the file that is offered now
        raise _no_download(archive, f"HTTP status {error.code} {error.reason}") from None
    except (
        urllib.error.URLError,
        TimeoutError,
        ConnectionError,
        ssl.SSLError,
        http.client.HTTPException,
    ) as error:
        raise _no_download(archive, str(getattr(error, "reason", error))) from None


def _append(
    response: http.client.HTTPResponse,
    partial: Path,
    start: int,
    archive: Archive,
    progress: Progress,
) -> None:
    announced = response.headers.get("Content-Length")
    if announced is not None and start + int(announced) != archive.size:
        raise _wrong_size(archive, partial, start + int(announced))
    done = start
    with partial.open("ab" if start else "wb") as file:
        while done <= archive.size and (block := response.read(_BLOCK)):
            file.write(block)
            done += len(block)
            progress(done, archive.size)


def _require_published(archive: Archive, partial: Path) -> None:
    size = partial.stat().st_size
    if size < archive.size:
        raise DataError(
            f"the download of {archive.url} broke off",
            expected=f"{archive.size:,} bytes",
            got=f"{size:,} bytes, which are kept",
            fix="run the command again; it resumes there",
        )
    if size > archive.size:
        raise _wrong_size(archive, partial, size)
    with partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != archive.sha256:
        partial.unlink()
        raise DataError(
            f"{archive.url} is not the published file",
            expected=f"sha256 {archive.sha256}",
            got=f"sha256 {digest}",
            fix=_ELSEWHERE,
        )


def _wrong_size(archive: Archive, partial: Path, size: int) -> DataError:
    partial.unlink(missing_ok=True)
    return DataError(
        f"{archive.url} does not have the published size",
        expected=f"{archive.size:,} bytes",
        got=f"{size:,} bytes",
        fix=_ELSEWHERE,
    )


def _no_download(archive: Archive, got: str) -> DataError:
    return DataError(
        f"{archive.url} cannot be downloaded",
        expected="an answer from the server",
        got=got,
        fix=f"check the network; {_ELSEWHERE}",
    )


def import_data(name: str, path: Path) -> Path:
    """Copy a dataset into the data directory, after its reader has verified it; on an error nothing
    is left behind.

    Args:
        name: of the dataset, such as `"ml-1m"`.
        path: a zip, a tar (compressed or not), a folder, or a single data file. Files are found at
            any depth.

    Returns:
        The dataset's folder.

    Raises:
        DataError: the files are missing, damaged or not the published ones, or the dataset's folder
            exists already.
        ExperimentError: there is no such dataset.
    """
    reader_class: type[Reader] = resolve(DATASET, name)
    source = reader_class.source
    if source is None:
        fix = (
            "name your file in the experiment (dataset.path)"
            if name == "table"
            else "this dataset needs no import"
        )
        raise DataError(
            f"{name!r} is not a dataset to import",
            expected="a published dataset",
            got=name,
            fix=fix,
        )
    folder = reader_class(name, reader_class.Config()).default_folder()
    require_absent(folder)
    with _searched(path, folder) as candidates, staged(folder) as staging:
        collect(source, name, candidates, staging)
        reader_class(name, reader_class.Config(path=staging)).read()
    return folder


@contextmanager
def _searched(path: Path, folder: Path) -> Iterator[Iterator[tuple[Path, Path]]]:
    """The candidate files; an archive is unpacked temporarily beside the dataset's folder."""
    if not path.exists():
        raise DataError(
            "there is nothing to import",
            expected=f"a file or folder {path}",
            got="nothing",
            fix="correct the path",
        )
    if path.is_dir():
        yield files_below(path)
    elif not path.is_file():
        raise DataError(
            f"{path} cannot be imported",
            expected="a file or a folder",
            got="a pipe, a socket or a device",
            fix="save the data in a file",
        )
    elif not is_archive(path):
        yield iter([(path, Path(path.name))])
    else:
        with scratch(folder) as unpacked:
            unpack(path, unpacked)
            yield files_below(unpacked)
