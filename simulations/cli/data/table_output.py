# SPDX-License-Identifier: Apache-2.0
"""Tables that commands write: CSV or Parquet, by the ending of the file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

_PARQUET = (".parquet", ".pq")


def refuse_unusable(output: Path) -> None:
    """Refuse a file of an unknown or unwritable format, before the work is done.

    Raises:
        ExperimentError: the format is unknown, needs a package that is not installed, or the path
            is that of a folder.
    """
    from importlib.util import find_spec

    from fedrec.errors import ExperimentError

    if output.is_dir():
        raise ExperimentError(
            "cannot write the table",
            expected="a file",
            got=f"{output}, a folder",
            fix=f"--output {output / 'table.csv'}",
        )
    if output.suffix not in (".csv", *_PARQUET):
        raise ExperimentError(
            f"unknown format of {output}",
            expected="a file that ends in .csv or .parquet",
            got=output.suffix or "no ending",
            fix="--output table.csv",
        )
    if output.suffix in _PARQUET and find_spec("pyarrow") is None:
        raise ExperimentError(
            "writing Parquet needs pyarrow",
            expected="the optional package pyarrow",
            got="it is not installed",
            fix="pip install 'fedrec[parquet]', or --output table.csv",
        )


def write_table(table: pd.DataFrame, output: Path, csv: str | None = None) -> None:
    """Write a table atomically.

    Args:
        table: its rows.
        output: the file, see `refuse_unusable`.
        csv: the text of a CSV file; default: that of the table.
    """
    from fedrec.runtime.atomic_files import write_atomically

    if output.suffix == ".csv":
        write_atomically(output, table.to_csv(index=False) if csv is None else csv)
        return
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    write_atomically(output, content.getvalue())
