# SPDX-License-Identifier: Apache-2.0
"""Columns of Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from fedrec.errors import DataError

PARQUET = (".parquet", ".pq")


def parquet_columns(path: Path) -> list[tuple[str, str]]:
    """Name of each column, and its type if its rows have lists, structs or maps; otherwise an empty
    text.

    Raises:
        DataError: the file is damaged, or pyarrow is missing.
    """
    with _opened(path) as file:
        return [
            (one.name, str(one.type) if one.type.num_fields else "") for one in file.schema_arrow
        ]


def read_parquet(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Columns with one value per row.

    Raises:
        DataError: a column has nested values, the file is damaged, or pyarrow is missing.
    """
    for name, nested in parquet_columns(path):
        if nested and name in columns:
            raise DataError(
                f"{path}, column {name!r}: its rows have lists, structs or maps",
                expected="one value per row, such as a number or a text",
                got=nested,
                fix="write one row per value, or name another column",
            )
    with _opened(path) as file:
        # the notes that pandas leaves in a file say nothing about the values, and may be damaged
        return file.read(columns=list(columns)).to_pandas(ignore_metadata=True)


@contextmanager
def _opened(path: Path):
    """An open file; faults that appear while it is read are errors that name it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path.name} is a Parquet file, and reading Parquet needs pyarrow",
            expected="the optional package pyarrow",
            got="it is not installed",
            fix="pip install 'fedrec[parquet]', or save the table as CSV",
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as a table",
            expected="an undamaged Parquet file",
            got=str(error).strip(),
            fix="write or copy the file again, or save the table as CSV",
        ) from None
