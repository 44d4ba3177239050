# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files, and appended lines that survive a power failure."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedrec.errors import RunError


def write_atomically(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file so that after a crash it has either the old or the new content.

    Args:
        path: the file.
        content: all of it.
        durable: whether it must also survive a power failure; not necessary for files derived from
            others.

    Raises:
        RunError: the file cannot be written (no space, no permission); an earlier file of that name
            is intact.
    """
    with open_atomically(path, durable=durable) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path, *, durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` if the block ends without an error; see
    `write_atomically`. A new file has the mode, without the bits of the umask."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _beside(path, mode)
        with os.fdopen(handle, "wb") as file:
            # an existing file keeps its mode
            with suppress(FileNotFoundError):
                os.fchmod(handle, path.stat().st_mode & 0o777)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        raise RunError(
            f"cannot write {path}",
            expected="a writable folder with free space",
            got=error.strerror or str(error),
            fix="free some space or choose another folder; what was written before is intact",
        ) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def append_durably(path: Path, line: bytes, *, end: int, expected: str) -> None:
    """Append a line to a file, which is made if there is none; synced to the disk on return.

    Args:
        path: the file.
        line: with its end.
        end: number of bytes to keep; what a crash left beyond is cut off.
        expected: why the line is needed, for the error.

    Raises:
        RunError: it could not be written.
    """
    try:
        if not path.exists():
            write_atomically(path, b"")  # also syncs the folder, so that the file's name survives
        with path.open("r+b") as file:
            file.truncate(end)
            file.seek(end)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(
            f"cannot write {path}",
            expected=expected,
            got=error.strerror or str(error),
            fix="free some space and resume the run",
        ) from error


def _beside(path: Path, mode: int) -> tuple[int, Path]:
    """A new file in the same folder; `tempfile` would make it with a mode of its own."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with suppress(FileExistsError):
            return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
