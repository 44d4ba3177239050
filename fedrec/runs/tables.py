# SPDX-License-Identifier: Apache-2.0
"""The tables of a run folder: read as they were written, or refused."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

from fedrec.runtime.text_files import read_json

USER = "user"
"""Column of users.csv with the data's ids."""
UNREADABLE = (ValueError, IndexError, OverflowError)  # those of pandas: ValueErrors
"""What reading a damaged table raises."""
_TABLES = (
    "rounds.csv",
    "users.csv",
    "groups.csv",
    "baselines/*/users.csv",
    "baselines/*/groups.csv",
)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each table of a run folder, by its path within the folder."""
    files = sorted(file for pattern in _TABLES for file in folder.glob(pattern))
    return {str(file.relative_to(folder)): _sha256(file.read_bytes()) for file in files}


def read_content(folder: Path, name: str) -> bytes:
    """The file of a table of a run folder; if the run is finished, compared with the digest in
    result.json.

    Args:
        folder: of the run.
        name: path of the table within the folder.

    Raises:
        OSError, ValueError: it cannot be read, or was changed after it was written.
    """
    content = (folder / name).read_bytes()
    written = _written(folder).get(name)
    if written is not None and written != _sha256(content):
        raise ValueError("the file was changed after the run had written it")
    return content


def table_of(content: bytes, index: int | None = None) -> pd.DataFrame:
    """A table of what its file has.

    Args:
        content: of the file.
        index: column of the names of the rows, in a table whose other columns are numbers, but for
            the data's ids of users, which are left out; None: no such column.

    Raises:
        `UNREADABLE`: it is no table, or has text in a column of numbers.
    """
    table = pd.read_csv(io.BytesIO(content), index_col=index)
    if index is not None:
        table = table.drop(columns=USER, errors="ignore")
    text = [column for column in table.columns if not is_numeric_dtype(table[column])]
    if index is not None and len(table) and text:
        raise ValueError(f"text in column {text[0]!r}, which has numbers")
    return table


def _written(folder: Path) -> dict[str, str]:
    """The digests in result.json; none in that of an earlier version or of an unfinished run."""
    try:
        found = read_json(folder / "result.json")
    except FileNotFoundError:
        return {}
    known = found.get("tables", {}) if isinstance(found, dict) else None
    if not isinstance(known, dict):
        raise ValueError("result.json has no digests by name under 'tables'")
    return known


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
