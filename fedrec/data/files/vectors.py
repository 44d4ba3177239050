# SPDX-License-Identifier: Apache-2.0
"""Files of dense vectors of items, such as embeddings of their texts or images.

* Parquet: a column of item ids, the first one, and either one column of lists of numbers or several
  columns of numbers.
* `NAME.npy`, an array `[items, width]`, and beside it `NAME.txt` with the id of each of its rows,
  one per line.
"""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING

import numpy as np

from fedrec.data.features import Vectors
from fedrec.data.files.tables import is_parquet, read_parquet
from fedrec.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 3


def read_vectors(path: Path, ids: np.ndarray, *, complete: bool) -> Vectors:
    """The vectors of some items; those of other items in the file are left out.

    Args:
        path: the file; its name without the ending is that of the vectors.
        ids: of the items, `[items]`; compared as texts.
        complete: whether an item without a vector is refused.

    Raises:
        DataError: a file is missing or damaged, vectors differ in length or have a value that is no
            finite number, an id stands twice, no item has a vector, or (`complete`) one has none.
    """
    import pandas as pd

    names, values = _npy(path) if path.suffix == ".npy" else _parquet(path)
    if names.duplicated().any():
        twice = names[names.duplicated()][0]
        raise _wrong(path, "one vector per item", f"two of {twice!r}", "leave one of them out")
    with np.errstate(over="ignore"):  # what is too large becomes infinity
        values = values.astype(np.float32)
    if values.ndim != 2 or not np.isfinite(values).all():
        got = "NaN or infinity" if values.ndim == 2 else f"an array of shape {list(values.shape)}"
        raise _wrong(path, "finite numbers of 32 bits, [items, width]", got, "correct the vectors")
    place = names.get_indexer(pd.Index(ids.astype(str)))
    known = place >= 0
    missing = ids[~known]
    if not known.any() or (complete and len(missing)):
        shown = ", ".join(map(repr, missing[:_SHOWN].tolist()))
        raise _wrong(
            path,
            f"a vector for each of {len(ids):,} items",
            f"none for {len(missing):,} of them, such as {shown}",
            "add them, or set dataset.items-without-vector = 'mean'"
            if known.any()
            else "name items as the data do",
        )
    found = np.zeros((len(ids), values.shape[1]), dtype=np.float32)
    found[known] = values[place[known]]
    return Vectors(path.stem, found, known)


def vector_files(path: Path) -> list[Path]:
    """The files that vectors are read from, those that exist."""
    wanted = [path, _ids_of(path)] if path.suffix == ".npy" else [path]
    return [file for file in wanted if file.is_file()]


def _ids_of(path: Path) -> Path:
    return path.with_suffix(".txt")


def _npy(path: Path) -> tuple[pd.Index, np.ndarray]:
    import pandas as pd

    try:
        values = np.load(path, allow_pickle=False)
        lines = _ids_of(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the latter two: of its header
        expected = f"an array of numbers, and {_ids_of(path).name} with the id of each row"
        raise _wrong(path, expected, str(error), "write both files again") from None
    if len(lines) != len(np.atleast_1d(values)) or values.dtype.kind not in "iuf":
        got = f"{len(lines):,} ids and an array {list(values.shape)} of {values.dtype}"
        raise _wrong(path, "numbers, and an id for each row", got, "write both files again")
    return pd.Index(lines), values


def _parquet(path: Path) -> tuple[pd.Index, np.ndarray]:
    import pandas as pd

    if not is_parquet(path):
        raise _wrong(path, "a file .npy or .parquet", f"{path.suffix!r}", "save it as one of these")
    frame = read_parquet(path)
    ids, *columns = (frame[name] for name in frame)
    try:
        lists = [np.stack([*columns[0]])] if len(columns) == 1 else []
        wide = columns and not (lists and lists[0].ndim == 2)
        values = np.column_stack(columns) if wide else lists[0]
        return pd.Index(ids.astype(str)), values.astype(np.float64)
    except (ValueError, TypeError, IndexError) as error:
        expected = "ids in the first column, and one of lists of equal length or several of numbers"
        raise _wrong(path, expected, str(error) or "other columns", "correct the table") from None


def _wrong(path: Path, expected: str, got: str, fix: str) -> DataError:
    return DataError(f"{path}: these vectors cannot be used", expected=expected, got=got, fix=fix)
