# SPDX-License-Identifier: Apache-2.0
"""TOML and JSON from elsewhere: the one way in which files of users, and texts in messages, are
parsed. What is too large, no text, malformed or nested too deeply is one kind of error."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrec.errors import FedrecError

MOST_TOML = 2**24
"""Largest number of bytes of a TOML file."""
MOST_JSON = 2**28
"""Largest number of bytes of a JSON file."""
MOST_TEXT = 2**20
"""Largest number of characters of JSON in a message."""


def read_toml(file: Path, error: type[FedrecError]) -> dict[str, Any]:
    """The table in a TOML file.

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
            f"{file} cannot be read, as it is not TOML",
            expected="TOML text",
            got=str(e),
            fix="correct it",
        ) from None


def read_json(file: Path, change: Callable[[str], str] = str) -> Any:
    """The content of a JSON file.

    Args:
        file: the file.
        change: what is done to its text before it is parsed; default: nothing.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, nested too deeply, or larger than `MOST_JSON`.
    """
    return _parsed(change(_text_of(file, MOST_JSON)))


def parse_json(text: str | bytes, most: float = MOST_TEXT) -> Any:
    """The content of JSON, of so many characters or bytes of UTF-8 at most; by default of a
    message.

    Raises:
        ValueError: it is not JSON, nested too deeply, or longer.
    """
    if len(text) > most:
        raise ValueError(f"{len(text)} characters of JSON, of at most {most}")
    return _parsed(text if isinstance(text, str) else text.decode("utf-8"))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def _text_of(file: Path, most: int) -> str:
    """The text of a file, of which no more is read than allowed: some files have no end."""
    with file.open("rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content.decode("utf-8")
