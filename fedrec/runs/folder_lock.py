# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fedrec.errors import RunError


@contextmanager
def locked(folder: Path, *, expected: str, got: str, fix: str) -> Iterator[None]:
    """Lock a folder against a second writing process.

    Args:
        folder: an existing folder.
        expected: text of the error, like `got` and `fix`.

    Raises:
        RunError: another process holds it, or its file cannot be opened.
    """
    with _opened(folder / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{folder} is in use", expected=expected, got=got, fix=fix) from None
        yield


def _opened(path: Path) -> TextIO:
    try:
        return open(path, "w")
    except OSError as error:
        raise RunError(
            f"{path.parent} cannot be locked",
            expected=f"a file {path.name} that can be written, or none",
            got=error.strerror or str(error),
            fix=f"make the folder writable; if {path} is a folder, remove it",
        ) from None
