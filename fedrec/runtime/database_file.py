# SPDX-License-Identifier: Apache-2.0
"""A SQLite file that is readable by its owner only; in memory without a file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar

from fedrec.errors import RunError

_PATIENCE = 60.0  # seconds that a connection waits for another one's changes


class DatabaseFile:
    """A database.

    Args:
        file: the file, made with mode 0600 when it is first opened, in a folder of mode 0700 unless
            there is one; None keeps all in memory.

    Attributes:
        opening: SQL statements that every connection begins with, such as those that create the
            tables.
        fix: what to do about a damaged file.
    """

    opening: ClassVar[tuple[str, ...]]
    fix: ClassVar[str] = "restore it from a backup: what it records is nowhere else"

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._memory: sqlite3.Connection | None = None
        if file is None:
            self._memory = sqlite3.connect(":memory:", check_same_thread=False)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are committed together at the end, or not at all.

        Raises:
            RunError: the file is damaged, or cannot be read or written.
        """
        try:
            with self._opened() as connection, connection:
                for statement in self.opening:
                    connection.execute(statement)
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise RunError(
                f"{self.file} cannot be used",
                expected="an SQLite file as fedrec wrote it",
                got=str(error),
                fix=self.fix,
            ) from None

    def _opened(self) -> AbstractContextManager[sqlite3.Connection]:
        if self._memory is not None:
            return nullcontext(self._memory)
        if self.file is None:
            raise ValueError("Expected a file.")
        if not self.file.exists():
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
        return closing(sqlite3.connect(self.file, timeout=_PATIENCE))
