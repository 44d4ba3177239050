# SPDX-License-Identifier: Apache-2.0
"""Files and folders: atomic writes, parsing of TOML and JSON, new folders, and SQLite files."""

import json
import math
import os
import secrets
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from fedrec.errors import FedrecError, RunError


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
    """Open a temporary file that is renamed to `path` if the block ends without an error; see
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
            fix="free some space or choose another folder; earlier files are intact",
        ) from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write a value to a JSON file, see `write_atomically` and `json_text`."""
    write_atomically(path, json_text(value) + "\n", durable=durable)


def append_durably(path: Path, line: bytes, *, end: int, expected: str) -> None:
    """Append a line to a file, created if missing; synced to disk on return.

    Args:
        path: the file.
        line: the line, with its line end.
        end: number of bytes before the line; bytes that a crash left after it are cut off.
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
    """Create a new file in the same folder; `tempfile` would set its own mode."""
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


# Parsing of users' TOML and JSON files, and of JSON in messages. Input that is too large, not text,
# malformed or nested too deeply raises one kind of error.

MOST_TOML = 2**24
"""Largest number of bytes of a TOML file."""
MOST_JSON = 2**28
"""Largest number of bytes of a JSON file."""
MOST_TEXT = 2**20
"""Largest number of characters of JSON in a message."""


def read_toml(file: Path, error: type[FedrecError]) -> dict[str, Any]:
    """Read the table of a TOML file.

    Args:
        file: the file.
        error: class of the errors.

    Raises:
        FedrecError: of class `error`: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(_text_of(file, MOST_TOML))
    except OSError as e:
        raise error(
            f"{file} cannot be read",
            expected="a TOML file",
            got=e.strerror or str(e),
            fix="check its name and permissions",
        ) from None
    except (ValueError, RecursionError) as e:  # those of TOML and text are ValueErrors
        raise error(
            f"{file} is not valid TOML", expected="TOML text", got=str(e), fix="correct it"
        ) from None


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, nested too deeply, or larger than `MOST_JSON`.
    """
    return _parsed(_text_of(file, MOST_JSON))


def parse_json(text: str | bytes, most: float = MOST_TEXT) -> Any:
    """Parse JSON of at most `most` characters or bytes of UTF-8; default: the limit of a message.

    Raises:
        ValueError: it is not JSON, nested too deeply, or longer.
    """
    if len(text) > most:
        raise ValueError(f"JSON of {len(text)} characters is longer than {most}")
    return _parsed(text if isinstance(text, str) else text.decode("utf-8"))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def _text_of(file: Path, most: int) -> str:
    """Read the text of a file, at most `most` bytes: some files have no end."""
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"the file is larger than {most} bytes")
    return content.decode("utf-8")


def json_text(value: Any) -> str:
    """Format a value as JSON, its numbers by `finite`."""
    return json.dumps(finite(value), indent=2, allow_nan=False, default=float)


def finite(value: Any) -> Any:
    """Convert a value to JSON: infinite numbers become text, such as "inf", which `float` reads in
    most languages, and NaN (no user has a value) None."""
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    if not isinstance(value, Real) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(float(value))


def is_number(value: Any) -> bool:
    """True if a JSON value is a number as `finite` writes it."""
    return type(value) in (int, float, type(None)) or value in ("inf", "-inf")


def number(value: float | str | None) -> float:
    """Read a number that `finite` wrote: NaN for None, and infinity for its text.

    Raises:
        ValueError: it is a text that is not a number.
        TypeError: it is not a number, text or None.
    """
    return math.nan if value is None else float(value)


# Folders that a command fills must be new or empty.


def require_new_folder(
    path: Path,
    *,
    expected: str = "a new or empty folder",
    fix: str = "choose another --output",
    usable: Callable[[Path], bool] = lambda path: not any(path.iterdir()),
) -> None:
    """Check that nothing is at the path of a new folder.

    Args:
        path: of the folder.
        expected: what may be there, for the error.
        fix: what to do when it is not a run folder.
        usable: whether an existing folder counts as new; default: it is empty.

    Raises:
        RunError: the folder is not empty, or the path is not a folder.
    """
    if not path.exists() or (path.is_dir() and usable(path)):
        return
    got = "a run folder" if (path / "run.json").is_file() else "other files"
    raise RunError(
        f"{path} is not empty", expected=expected, got=got if path.is_dir() else "a file", fix=fix
    )


# A SQLite file that is readable by its owner only; in memory without a file.

_PATIENCE = 60.0  # seconds that a connection waits for a lock


class DatabaseFile:
    """A SQLite database, in a file or in memory.

    Args:
        file: the file, created with mode 0600 when first opened, and its folder with mode 0700;
            None: a database in memory.

    Attributes:
        opening: SQL statements that every connection begins with, such as those that create the
            tables.
        fix: what to do about a damaged file.
    """

    opening: ClassVar[tuple[str, ...]]
    fix: ClassVar[str] = "restore it from a backup; its records exist nowhere else"

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._memory: sqlite3.Connection | None = None
        if file is None:
            self._memory = sqlite3.connect(":memory:", check_same_thread=False)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Open a connection whose changes are committed together at the end, or not at all.

        Raises:
            RunError: the file is damaged, or cannot be read or written.
        """
        try:
            with self._opened() as connection, connection:
                for statement in self.opening:
                    connection.execute(statement)
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise RunError(f"{self.file} cannot be used", got=str(error), fix=self.fix) from None

    def _opened(self) -> AbstractContextManager[sqlite3.Connection]:
        if self._memory is not None:
            return nullcontext(self._memory)
        if self.file is None:
            raise ValueError("Expected a file.")
        if not self.file.exists():
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
        return closing(sqlite3.connect(self.file, timeout=_PATIENCE))
