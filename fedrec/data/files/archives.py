# SPDX-License-Identifier: Apache-2.0
"""Unpacking archives from elsewhere without letting them write outside the given folder, or fill
the disk."""

from __future__ import annotations

import errno
import gzip
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from fedrec.errors import DataError

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
