# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of files."""

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
def open_atomically(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` if the block ends without an error; see
    `write_atomically`."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _beside(path)
        with os.fdopen(handle, "wb") as file:
            # an existing file keeps its mode; a new one has that of the umask
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


def _beside(path: Path) -> tuple[int, Path]:
    """A new file in the same folder; `tempfile` would make it with a mode of its own."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with suppress(FileExistsError):
            return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
