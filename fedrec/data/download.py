# SPDX-License-Identifier: Apache-2.0
"""Download, import, unpacking and atomic installation of datasets."""

import errno
import hashlib
import http.client
import lzma
import os
import shutil
import stat
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from fedrec.components.registry import DATASET, resolve
from fedrec.data.reader import Archive, DatasetSource, Reader
from fedrec.errors import DataError

# Unpacking of untrusted archives, which must not write outside the given folder or fill the disk.

_UNREADABLE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError),
    RuntimeError,  # the zip is encrypted, or packed with an unknown method
    ValueError,  # a name
    OSError,
)
_OF_ARCHIVE = (None, errno.EINVAL, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Error numbers of an `OSError` from a damaged archive; others are disk errors."""
_LARGER = 200
_AT_LEAST = 1 << 30
"""Limits of the unpacked size: this multiple of the archive's size (text compresses to about a
tenth), or this number of bytes if larger."""
_LEAST_FILE = 1 << 12  # bytes counted for a file at least


def unpack(path: Path, folder: Path) -> None:
    """Unpack a zip or tar into a folder; any other file is copied there.

    Raises:
        DataError: the archive is damaged, holds a link, a device, or a path that leads out of the
            folder, or unpacks to too many bytes for its size.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _check_members(path, map(_of_zip, archive.infolist()))
                archive.extractall(folder)
        elif not tarfile.is_tarfile(path):
            shutil.copyfile(path, folder / path.name)
        else:
            with tarfile.open(path) as archive:
                _check_members(path, ((m.name, m.isfile() or m.isdir(), m.size) for m in archive))
                # Python before 3.11.4 has no filter; the members are checked above
                if hasattr(tarfile, "data_filter"):
                    archive.extraction_filter = tarfile.data_filter
                archive.extractall(folder)
    except _UNREADABLE as error:
        if isinstance(error, OSError) and error.errno not in _OF_ARCHIVE:
            raise
        raise DataError(
            f"{path} is damaged",
            expected="a complete zip or tar archive of a supported kind",
            got=f"{type(error).__name__}: {error}",
            fix="get it again",
        ) from None


def _of_zip(info: zipfile.ZipInfo) -> tuple[str, bool, int]:
    """Name of a zip member, whether it is a plain file or a folder, and its size in bytes."""
    kind = stat.S_IFMT(info.external_attr >> 16)
    return info.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR), info.file_size


def _check_members(path: Path, members: Iterable[tuple[str, bool, int]]) -> None:
    """Check an archive's members before writing; members never exceed their declared size."""
    left = max(_AT_LEAST, _LARGER * path.stat().st_size)
    for name, plain, size in members:
        parts = PurePosixPath(name).parts
        inside = name == "." or (
            parts and not {"..", "/", "//"} & {*parts} and not {*name} & {*"\\:"}
        )
        left -= max(size, _LEAST_FILE)
        if not plain or not inside or left < 0:
            raise DataError(
                f"{path} is not safe to unpack",
                expected="plain files and folders below the archive's root, at most"
                f" {_LARGER} times the archive's size",
                got=repr(name[:100]) + (" (too large)" if left < 0 else ""),
                fix="get the data from the publisher instead",
            )


# Atomic installation of a dataset into its folder.


@contextmanager
def _staged(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Context with two temporary folders, for the dataset's files and for unpacked archives; on
    success the first is renamed to `folder`, and in any case both are deleted.

    Raises:
        DataError: `folder` exists already, or the disk is full.
    """
    _check_absent(folder)
    with _disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            parts = Path(temporary, "staging"), Path(temporary, "unpacked")
            for part in parts:
                part.mkdir()  # with the permissions of the umask
            yield parts
            os.replace(parts[0], folder)


def _check_absent(folder: Path) -> None:
    """Check that a folder is absent or empty.

    Raises:
        DataError: the folder exists and is not empty.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(f"{folder} already exists", fix="use it as it is, or delete it first")


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Convert "disk full" inside the block into a `DataError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"the disk of {folder} is full",
            got=f"{shutil.disk_usage(folder).free:,} bytes free" if folder.exists() else None,
            fix="free disk space, or set FEDREC_DATA to a folder on another disk",
        ) from None


def collect(source: DatasetSource, name: str, root: Path, target: Path) -> None:
    """Copy a dataset's files, at any depth below a folder, to `target`.

    Args:
        source: names the files.
        name: the dataset's name.
        root: the folder that is searched.
        target: an existing folder.

    Raises:
        DataError: a needed file is missing, or a file has two candidates.
    """
    chosen: dict[Path, Path] = {}
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: (len(path.parts), path)):
        for pattern in (*source.files, *source.extras):
            if not path.match(pattern):
                continue
            inner = Path(*path.parts[-len(Path(pattern).parts) :])
            nearest = chosen.setdefault(inner, path)
            # the file nearest to the root wins
            if nearest != path and len(nearest.parts) == len(path.parts):
                raise DataError(
                    f"two candidates for one file: {nearest} and {path}",
                    fix="give the folder that contains the right one",
                )
    missing = [file for file in source.files if Path(file) not in chosen]
    if missing or not chosen:
        raise DataError(
            f"files of {name!r} are missing",
            expected=", ".join(source.files or source.extras),
            got="no " + ", ".join(missing) if missing else "none of these files",
            fix=f"see {source.page}",
        )
    for inner, path in chosen.items():
        (target / inner).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target / inner)


# Download of a public dataset: resumed after interruptions, verified before use, and installed
# atomically.

Progress = Callable[[int, int], object]
"""Called with the number of downloaded bytes and the size of the whole file."""

_BLOCK = 1 << 18
_PATIENCE = 60.0
_ELSEWHERE = "try again later, or get the file elsewhere and use: fedrec data import NAME PATH"


def fetch(name: str, source: DatasetSource, folder: Path, progress: Progress | None = None) -> Path:
    """Download a dataset's archive and put its files into `folder`.

    An interrupted download is saved beside the folder (`*.partial`) and resumed next time.

    Args:
        name: of the dataset.
        source: its archive and files.
        folder: destination; must not exist yet, or be empty.
        progress: called with the progress of the download.

    Returns:
        The folder.

    Raises:
        DataError: no archive to download, no network, a wrong size or checksum, a full disk, or
            `folder` exists.
    """
    if source.archive is None:
        raise DataError(
            f"{name!r} cannot be downloaded: its publisher offers no direct download",
            fix=f"get it from {source.page}, then: fedrec data import {name} PATH",
        )
    _check_absent(folder)
    holder = folder.parent / f".{folder.name}.download"  # the file is saved under its own name
    file = _downloaded(source.archive, holder, progress)
    with _staged(folder) as (staging, unpacked):
        unpack(file, unpacked)
        collect(source, name, unpacked, staging)
    shutil.rmtree(holder, ignore_errors=True)
    return folder


def _downloaded(archive: Archive, holder: Path, progress: Progress | None) -> Path:
    """Download and verify an archive, and return its path."""
    complete = holder / PurePosixPath(urlsplit(archive.url).path).name
    partial = complete.with_name(complete.name + ".partial")
    with _disk_errors(holder.parent):
        holder.mkdir(parents=True, exist_ok=True)
        if complete.is_file():  # left by a run that failed to unpack; verified again
            os.replace(complete, partial)
        _receive(archive, partial, progress)
        _check_published(archive, partial)
        os.replace(partial, complete)
    return complete


def _receive(archive: Archive, partial: Path, progress: Progress | None) -> None:
    """Download the missing part of a partial file."""
    done = partial.stat().st_size if partial.exists() else 0
    if done == archive.size:
        return
    headers = {"Range": f"bytes={done}-"} if 0 < done < archive.size else {}
    request = urllib.request.Request(archive.url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as response:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                done = 0
            with partial.open("ab" if done else "wb") as file:
                while done <= archive.size and (block := response.read(_BLOCK)):
                    file.write(block)
                    done += len(block)
                    if progress is not None:
                        progress(done, archive.size)
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as e:
        got = str(getattr(e, "reason", e))
        if isinstance(e, urllib.error.HTTPError):
            got = f"HTTP status {e.code} {e.reason}"
            if e.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                partial.unlink()  # part of an older version of the file
        fix = f"check the network; {_ELSEWHERE}"
        raise DataError(f"{archive.url} cannot be downloaded", got=got, fix=fix) from None


def _check_published(archive: Archive, partial: Path) -> None:
    """Check size and digest of a download; delete it if it is not the published file."""
    size = partial.stat().st_size
    if size < archive.size:
        raise DataError(
            f"the download of {archive.url} was interrupted",
            expected=f"{archive.size:,} bytes",
            got=f"{size:,} bytes, which are saved",
            fix="run the command again to resume",
        )
    with partial.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if size > archive.size or digest != archive.sha256:
        partial.unlink()
        raise DataError(
            f"{archive.url} is not the published file",
            expected=f"{archive.size:,} bytes, sha256 {archive.sha256}",
            got=f"sha256 {digest}" if size == archive.size else "more bytes",
            fix=_ELSEWHERE,
        )


def import_data(name: str, path: Path) -> Path:
    """Verify a dataset with its reader and copy it into the data directory.

    Args:
        name: of the dataset, such as `"ml-1m"`.
        path: a zip, a tar (compressed or not), a folder, or a single data file. Files are found at
            any depth.

    Returns:
        The dataset's folder.

    Raises:
        DataError: the files are missing, damaged or not the published ones, or the dataset's folder
            already exists.
        ExperimentError: the dataset is unknown.
    """
    reader_class: type[Reader] = resolve(DATASET, name)
    source = reader_class.source
    if source is None:
        raise DataError(
            f"{name!r} is not a published dataset",
            fix="set dataset.path to your own file; generated data need no import",
        )
    folder = reader_class(name, reader_class.Config()).default_folder()
    if not (path.is_dir() or path.is_file()):
        raise DataError(
            f"{path} cannot be imported",
            expected="a file or a folder",
            got="a pipe, a socket or a device" if path.exists() else "nothing",
            fix="correct the path, or save the data in a file",
        )
    with _staged(folder) as (staging, unpacked):
        if path.is_file():
            unpack(path, unpacked)
        collect(source, name, path if path.is_dir() else unpacked, staging)
        reader_class(name, reader_class.Config(path=staging)).read()
    return folder
