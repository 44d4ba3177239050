# SPDX-License-Identifier: Apache-2.0
"""The tables of a run folder: read as they were written, or refused."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedrec.evaluation.column_table import ColumnTable
from fedrec.runtime.text_files import read_json

if TYPE_CHECKING:
    import pandas as pd

USER = "user"
"""Column of users.csv with the data's ids."""
UNREADABLE = (ValueError, IndexError, OverflowError, csv.Error)  # those of pandas: ValueErrors
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


class LaterTables(Mapping[str, "pd.DataFrame"]):
    """Tables of numbers whose files have been read, and which become those of pandas when one is
    asked for.

    Args:
        contents: of the files, by name; the first column has the names of the rows.
        damaged: makes the error that is raised for a file without such a table, of its name and
            what is wrong.
    """

    def __init__(
        self, contents: Mapping[str, bytes], damaged: Callable[[str, Exception], Exception]
    ) -> None:
        self._contents = contents
        self._damaged = damaged
        self._found: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._found:
            try:
                self._found[name] = table_of(self._contents[name], 0)
            except UNREADABLE as error:
                raise self._damaged(name, error) from None
        return self._found[name]

    def columns(self, name: str, chosen: Sequence[str]) -> ColumnTable:
        """Columns of one of them, whose rows have numbers as names, without pandas; those that it
        lacks are left out."""
        try:
            return ColumnTable.read_csv(self._contents[name], chosen)
        except UNREADABLE as error:
            raise self._damaged(name, error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


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
    import pandas as pd
    from pandas.api.types import is_numeric_dtype

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
