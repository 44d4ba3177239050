# SPDX-License-Identifier: Apache-2.0
"""Splits by the publisher's own files, such as the test files of Neural Collaborative Filtering.

The publisher's own training and test files, such as those of Amazon Office (70:30) and Gowalla
(80:20).

Validation rows, if any, are drawn from the training file: choose settings with them, and report
with `validation = 0`, so that all published training rows are used for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import Field

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.splits.rules import Partition, Split, places, sort_key, users_of
from fedrec.errors import DataError
from fedrec.privacy.accounting.sampling import Adjacency


class PublishedConfig(Config):
    """Settings of the published split."""

    validation: float = Field(0.0, ge=0, lt=1)
    """Share of each user's training rows for validation, in [0, 1), rounded half up; at least one
    row remains for training."""


class Published(Split):
    """Rows of the publisher's training file train, those of the test file are tested."""

    name = "published"
    Config = PublishedConfig
    paper = "UPC-SDG's author files; NGCF and LightGCN (Gowalla)"
    config: PublishedConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Nothing: the publisher's files are given, and validation rows are drawn client by
        client. Users without a row in the training file take part, with no row."""
        return ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the publisher.

        Raises:
            DataError: the dataset was not published in two files, or only one of them was read.
        """
        test = interactions.published_test
        if test is None or not (0 < test.sum() < len(test)):
            raise DataError(
                f"{interactions.name} has no published split",
                expected=(
                    "a dataset with a training and a test file, and rows of both (dataset.part ="
                    " 'all')"
                ),
                got="no such files" if test is None else "rows of one file only",
                fix="choose another split, such as 'ratio'",
            )
        rows = np.flatnonzero(~test)
        place, count = places(
            interactions.users[rows], sort_key(interactions, "random", self.seed)[rows]
        )
        taken = np.minimum((self.config.validation * count + 0.5).astype(np.int64), count - 1)
        validation = place >= count - taken
        return Partition(
            training_clients=users_of(interactions),
            train_rows=rows[~validation],
            validation_rows=rows[validation],
            test_rows=np.flatnonzero(test),
        )


# Row numbers of the pairs of users and items that a published file names.


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
