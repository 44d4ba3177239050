# SPDX-License-Identifier: Apache-2.0
"""Row numbers of the pairs of users and items that a published file names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.interactions import Interactions
from fedrec.errors import DataError


def rows_of_pairs(
    interactions: Interactions,
    users: np.ndarray,
    items: np.ndarray,
    path: Path,
    named: Sequence[Sequence[object]],
) -> np.ndarray:
    """Row numbers in `interactions`, `int64 [pairs]`, in the order of the file.

    Args:
        interactions: each (user, item) pair in one row.
        users: `int64 [pairs]`, -1 for an unknown one.
        items: `int64 [pairs]`, likewise.
        path: the file, for errors.
        named: users and items as the file has them, `[pairs]` each, for errors.

    Raises:
        DataError: a pair is not among the interactions, or is in several rows.
    """
    known = pd.Index(interactions.users * interactions.num_items + interactions.items)
    if not known.is_unique:
        raise DataError(
            f"{interactions.name}: published pairs need each (user, item) pair once",
            expected="distinct pairs",
            got=f"{int(known.duplicated().sum()):,} repeated rows",
            fix="let the split divide the rows itself, without published files",
        )
    codes = np.where((users >= 0) & (items >= 0), users * interactions.num_items + items, -1)
    rows = known.get_indexer(pd.Index(codes))
    if (rows < 0).any():
        line = int((rows < 0).argmax())
        raise DataError(
            f"{path}, line {line + 1:,}: a pair that is not among the interactions",
            expected=f"pairs of {interactions.name}",
            got=f"user {named[0][line]}, item {named[1][line]}",
            fix="take both files from one copy of the dataset, and keep all ratings",
        )
    return rows.astype(np.int64)
