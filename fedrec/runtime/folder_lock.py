# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrec.errors import RunError


@contextmanager
def locked(folder: Path, *, expected: str, got: str, fix: str) -> Iterator[None]:
    """Lock a folder against a second writing process.

    Args:
        folder: an existing folder.
        expected: text of the error, like `got` and `fix`.

    Raises:
        RunError: another process holds it.
    """
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{folder} is in use", expected=expected, got=got, fix=fix) from None
        yield
