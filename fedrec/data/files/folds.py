# SPDX-License-Identifier: Apache-2.0
"""The five test folds that MovieLens-100K ships (`u1.test` to `u5.test`): disjoint, 20,000 ratings
each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.files.tables import Columns, Layout, read_table
from fedrec.data.files.verification import require_complete_lines
from fedrec.data.interactions import Interactions
from fedrec.errors import DataError

SHIPPED_FOLDS = range(1, 6)

_LINES = Layout({"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64})


def read_test_fold(folder: Path, fold: int, interactions: Interactions) -> np.ndarray:
    """Row numbers in `interactions` of the test pairs of one fold, `int64 [pairs]`, in the order of
    the file.

    Args:
        folder: the dataset's folder.
        fold: 1 to 5.
        interactions: what was read from that folder, each (user, item) pair in one row.

    Raises:
        DataError: there is no such fold, its file is missing or damaged, or a pair is not among the
            interactions.
    """
    if fold not in SHIPPED_FOLDS:
        raise DataError(
            f"there is no fold {fold}",
            expected="a fold from 1 to 5",
            got=str(fold),
            fix="set split.fold to a number from 1 to 5",
        )
    path = folder / f"u{fold}.test"
    if not path.is_file():
        fix = "take the dataset's folder with all its files, or let the split draw its folds itself"
        raise DataError(
            f"the file of fold {fold} is missing", expected=f"a file {path}", got="nothing", fix=fix
        )
    require_complete_lines(path)
    return _rows_of_pairs(interactions, read_table(path, _LINES), path)


def _rows_of_pairs(interactions: Interactions, pairs: Columns, path: Path) -> np.ndarray:
    users = pd.Index(interactions.user_ids).get_indexer(pd.Index(pairs["user"]))
    items = pd.Index(interactions.item_ids).get_indexer(pd.Index(pairs["item"]))
    known = pd.Index(interactions.users * interactions.num_items + interactions.items)
    if not known.is_unique:
        raise DataError(
            f"{interactions.name}: shipped folds need each (user, item) pair once",
            expected="distinct pairs",
            got=f"{int(known.duplicated().sum()):,} repeated rows",
            fix="let the split draw its folds itself (split.shipped = false)",
        )
    codes = np.where((users >= 0) & (items >= 0), users * interactions.num_items + items, -1)
    rows = known.get_indexer(pd.Index(codes))
    if (rows < 0).any():
        line = int((rows < 0).argmax())
        user = pairs["user"][line]
        item = pairs["item"][line]
        raise DataError(
            f"{path}, line {line + 1:,}: a pair that is not among the interactions",
            expected=f"pairs of {interactions.name}",
            got=f"user {user}, item {item}",
            fix="take fold files and ratings from one copy of the dataset, and keep all ratings",
        )
    return rows.astype(np.int64)
