# SPDX-License-Identifier: Apache-2.0
"""The test files of Neural Collaborative Filtering (He et al. 2017): one test row of each user, and
the 99 items that it is ranked among.

`NAME.test.rating` has lines `user item rating time`, `NAME.test.negative` lines
`(user,item) item item ...`, both separated by tabs. Users and items are numbered from 0 in the
order in which they first occur in the ratings. Items were drawn outside the training rows, so that
in 156 lines of MovieLens-1M the test item is among its own 99; the list is shorter there, as in the
authors' code.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.data.files.published import require_complete_lines
from fedrec.data.files.tables import TableLayout, malformed_line, read_table
from fedrec.data.interactions import Interactions
from fedrec.data.splits._pairs import rows_of_pairs
from fedrec.errors import DataError

_TEST = TableLayout({"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64})


def read_ncf_files(folder: Path, interactions: Interactions) -> tuple[np.ndarray, np.ndarray]:
    """The test rows and the sampled items.

    Args:
        folder: with the two files of one dataset.
        interactions: what was read from that dataset, each (user, item) pair in one row.

    Returns:
        Row numbers of the test rows, `int64 [users]`, and users with their sampled items,
        `int64 [n, 2]`.

    Raises:
        DataError: a file is missing or damaged, or does not belong to these interactions.
    """
    test = _only(folder, "*.test.rating")
    columns = read_table(test, _TEST)
    users = _numbered(interactions.users, columns["user"].to_numpy())
    items = _numbered(interactions.items, columns["item"].to_numpy())
    named = (columns["user"].tolist(), columns["item"].tolist())
    rows = rows_of_pairs(interactions, users, items, test, named)
    if not np.array_equal(np.sort(users), np.unique(interactions.users)):
        raise DataError(
            f"{test} does not have one row of each user",
            expected=f"{len(np.unique(interactions.users)):,} users",
            got=f"{len(users):,} rows of {len(np.unique(users)):,} users",
            fix="take the files and the ratings from one copy of the dataset",
        )
    path = _only(folder, "*.test.negative")
    lines = path.read_text(encoding="ascii").splitlines()
    if len(lines) != len(rows):
        raise DataError(
            f"{path} does not belong to {test.name}",
            expected=f"{len(rows):,} lines, one a test row",
            got=f"{len(lines):,}",
            fix="take both files from one copy",
        )
    sampled = [_sampled(path, number, line) for number, line in enumerate(lines, 1)]
    drawn = _numbered(interactions.items, np.concatenate(sampled))
    if (drawn < 0).any():
        raise DataError(
            f"{path} names an item that {interactions.name} does not have",
            expected=f"items 0 to {len(pd.unique(interactions.items)) - 1}",
            got=f"{int(np.concatenate(sampled).max())}",
            fix="take the files and the ratings from one copy of the dataset",
        )
    owners = np.repeat(users, [len(items) for items in sampled])
    return rows, np.stack([owners, drawn], 1)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DataError(
            f"no published test file in {folder}",
            expected=f"one file {pattern}",
            got=f"{len(found)} such files",
            fix="set split.folder to a folder with the test files of one dataset",
        )
    require_complete_lines(found[0])
    return found[0]


def _numbered(codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Codes of users or items `int64 [n]` from their numbers by first occurrence in `codes`
    `int64 [rows]`; -1 for a number that no row has."""
    first = pd.unique(codes)
    known = (numbers >= 0) & (numbers < len(first))
    return np.where(known, first[np.where(known, numbers, 0)], -1)


def _sampled(path: Path, number: int, line: str) -> np.ndarray:
    """The items of a line, `int64 [n]`."""
    try:
        return np.array(line.split("\t")[1:], dtype=np.int64)
    except ValueError:
        expected = "a pair (user,item) and numbers of items, separated by tabs"
        raise malformed_line(path, number, line[:200], expected) from None
