# SPDX-License-Identifier: Apache-2.0
"""Download of a public dataset: resumed after interruptions, verified before use, and installed
atomically."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from fedrec.data.fetching.installing import (
    collect,
    disk_errors,
    files_below,
    require_absent,
    scratch,
    staged,
)
from fedrec.data.files.archives import unpack
from fedrec.data.files.published import Archive, DatasetSource
from fedrec.errors import DataError

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
