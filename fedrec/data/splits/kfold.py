# SPDX-License-Identifier: Apache-2.0
"""Cross-validation over rows: one fold is tested, the others train (PNBM, section 5: five folds of
MovieLens).

The folds are drawn from the seed, or they are the five published folds `u1` to `u5` of
MovieLens-100K, which are the only ones that allow comparison with published figures row by row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.data.files.published import require_complete_lines
from fedrec.data.files.tables import Columns, TableLayout, read_table
from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition, Split
from fedrec.data.splits._order import ROWS, VALIDATION, users_of
from fedrec.data.splits._pairs import rows_of_pairs
from fedrec.errors import DataError
from fedrec.rng import stream

_SHIPPED_FOLDS = 5
_FOLD = TableLayout({"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64})


class KfoldConfig(Config):
    """Settings of cross-validation."""

    folds: int = Field(5, ge=2)
    """Number of folds, at least 2."""
    fold: int = Field(1, ge=1)
    """Which fold is tested, from 1 to `folds`."""
    shipped: bool = False
    """Use the published folds of MovieLens-100K instead of random ones."""
    folder: Path | None = None
    """Folder with the published fold files (u1.test to u5.test); required if `shipped` is true."""
    validation: float = Field(0.0, ge=0, lt=1)
    """Share of the other folds' rows that is held out for validation."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.fold > self.folds:
            raise ValueError(f"fold from 1 to folds = {self.folds}")
        if self.shipped and (self.folder is None or self.folds != _SHIPPED_FOLDS):
            raise ValueError(f"a folder, and folds = {_SHIPPED_FOLDS}, when shipped = true")
        return self


class Kfold(Split):
    """One fold of the rows is tested, the others train."""

    Config = KfoldConfig
    paper = "PNBM, section 5"
    config: KfoldConfig

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; the folds of one seed are disjoint and together complete.

        Raises:
            DataError: a published fold file is missing or does not belong to these interactions.
        """
        test_rows = (
            read_test_fold(self.config.folder or Path(), self.config.fold, interactions)
            if self.config.shipped
            else self._random_rows(interactions)
        )
        train = np.ones(len(interactions), dtype=bool)
        train[test_rows] = False
        validation_rows = self._validation_rows(np.flatnonzero(train))
        train[validation_rows] = False
        return Partition(
            training_clients=users_of(interactions, train),
            train_rows=np.flatnonzero(train),
            validation_rows=validation_rows,
            test_rows=test_rows,
        )

    def _validation_rows(self, others: np.ndarray) -> np.ndarray:
        count = round(self.config.validation * len(others))
        return stream(self.seed, "split", VALIDATION, self.config.fold).choice(
            others, count, replace=False
        )

    def _random_rows(self, interactions: Interactions) -> np.ndarray:
        # The permutation does not depend on the fold, so that all folds divide the same one.
        shuffled = stream(self.seed, "split", ROWS).permutation(len(interactions))
        return shuffled[self.config.fold - 1 :: self.config.folds]


def read_test_fold(folder: Path, fold: int, interactions: Interactions) -> np.ndarray:
    """Row numbers in `interactions` of the test pairs of one fold, `int64 [pairs]`, in the order of
    the file.

    Args:
        folder: the dataset's folder.
        fold: 1 to 5.
        interactions: what was read from that folder, each (user, item) pair in one row.

    Raises:
        DataError: its file is missing or damaged, or a pair is not among the interactions.
    """
    path = folder / f"u{fold}.test"
    if not path.is_file():
        fix = "take the dataset's folder with all its files, or let the split draw its folds itself"
        raise DataError(
            f"the file of fold {fold} is missing", expected=f"a file {path}", got="nothing", fix=fix
        )
    require_complete_lines(path)
    return _rows_of_pairs(interactions, read_table(path, _FOLD), path)


def _rows_of_pairs(interactions: Interactions, pairs: Columns, path: Path) -> np.ndarray:
    users = pd.Index(interactions.user_ids).get_indexer(pd.Index(pairs["user"]))
    items = pd.Index(interactions.item_ids).get_indexer(pd.Index(pairs["item"]))
    named = (pairs["user"].tolist(), pairs["item"].tolist())
    return rows_of_pairs(interactions, users, items, path, named)
