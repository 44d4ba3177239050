# SPDX-License-Identifier: Apache-2.0
"""Splits by leave-one-out, by folds of rows, by the publisher's files, and by items.

Cross-validation over rows: one fold is tested, the others train (PNBM, section 5: five folds of
MovieLens).

The fold of each row is drawn independently (`fedrec.data.client_data`), so that no user's rows
change the folds of others; folds have about the same size. Alternatively, the five published folds
`u1` to `u5` of MovieLens-100K allow comparison with published figures row by row.
"""

from pathlib import Path
from typing import Literal, Self

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.data.client_data import hashed_shares, pair_numbers, row_numbers, times_of
from fedrec.data.interactions import Interactions
from fedrec.data.reader import check_complete_lines
from fedrec.data.splits.rules import (
    ROWS,
    VALIDATION,
    Order,
    Partition,
    Split,
    ordered,
    places,
    rounded,
    users_of,
)
from fedrec.data.tables import TableLayout, read_table
from fedrec.errors import DataError, missing_file
from fedrec.privacy.accounting.sampling import Adjacency

# Leave one out: each user's last row is tested (He et al., Neural Collaborative Filtering, WWW
# 2017, section 4.1).
#
# The protocol of NCF and of most federated recommenders (FedMF, PFedRec). Users with fewer than
# three rows are not tested, so that a tested user always has training rows, and so that the test
# rows do not depend on `validation`.
#
# Each user is split at a different time, so training rows of others may be later than a tested row:
# a system learns later popularity and transitions. The split `global-time` has no such leak.

_FEWEST_ROWS = 3


class LeaveOneOutConfig(Config):
    """Settings of leave-one-out."""

    validation: bool = True
    """Whether to hold out the row before the last one for validation; false: it is a training
    row."""
    leaky_negatives: bool = False
    """Whether to exclude held-out items from the sampled negatives, as the public code of PFedRec,
    GPFedRec and FedRAP does. This leaks the test item and exists only to explain their results;
    every result table reports it."""
    order: Order = "temporal"
    """Definition of the last row: "temporal" (by time; the seed orders rows of equal times) or
    "random"."""


class LeaveOneOut(Split):
    """Tests the last row of each user, validates on the row before, and trains on the others, even
    if they are later than tested rows of other users (unlike `global-time`)."""

    name = "leave-one-out"
    Config = LeaveOneOutConfig
    config: LeaveOneOutConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Return no dependence: a random order is drawn for each client separately."""
        return ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; every user with a training row is a training client.

        Raises:
            DataError: the order is temporal and the interactions have no times.
        """
        position, count = ordered(interactions, self.config.order, self.seed)
        enough = count >= _FEWEST_ROWS
        test = enough & (position == count - 1)
        validation = enough & (position == count - 2) & self.config.validation
        leaky = self.config.leaky_negatives
        return Partition.of_masks(interactions, test, validation, leaky_negatives=leaky)


_SHIPPED_FOLDS = 5
_FOLD = TableLayout({"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64})


class KfoldConfig(Config):
    """Settings of cross-validation."""

    folds: int = Field(5, ge=2)
    """Number of folds, at least 2."""
    fold: int = Field(1, ge=1)
    """Which fold is tested, from 1 to `folds`."""
    folder: Path | None = None
    """Folder with the published folds of MovieLens-100K (u1.test to u5.test); default: the folds
    are random."""
    validation: float = Field(0.0, ge=0, lt=1)
    """Share of the other folds' rows that is held out for validation, drawn row by row."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.fold > self.folds:
            raise ValueError(f"fold from 1 to folds = {self.folds}")
        if self.folder is not None and self.folds != _SHIPPED_FOLDS:
            raise ValueError(f"folds = {_SHIPPED_FOLDS} with a folder of published ones")
        return self


class Kfold(Split):
    """Tests one fold of the rows and trains on the others."""

    name = "kfold"
    Config = KfoldConfig
    paper = "PNBM, section 5"
    config: KfoldConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Return no dependence: the fold of a row is drawn independently, or published."""
        return ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; the folds of a seed partition the rows. Every user is a training
        client, even if all of its rows are in the tested fold.

        Raises:
            DataError: a published fold file is missing or does not belong to these interactions.
        """
        test = self._tested(interactions)
        drawn = row_numbers(interactions, self.seed, "split", VALIDATION, self.config.fold)
        validation = ~test & (drawn < self.config.validation * 2**32)
        return Partition.of_masks(interactions, test, validation, users_of(interactions))

    def _tested(self, interactions: Interactions) -> np.ndarray:
        """Mask `bool [rows]` of the rows in the tested fold."""
        if self.config.folder is None:
            # The numbers do not depend on the fold, so that each row is in one of them.
            numbers = row_numbers(interactions, self.seed, "split", ROWS)
            return numbers * self.config.folds >> 32 == self.config.fold - 1
        test = np.zeros(len(interactions), dtype=bool)
        test[_read_test_fold(self.config.folder, self.config.fold, interactions)] = True
        return test


def _read_test_fold(folder: Path, fold: int, interactions: Interactions) -> np.ndarray:
    """Read the row numbers in `interactions` of a fold's test pairs, `int64 [pairs]`, in the order
    of the file.

    Args:
        folder: the dataset's folder.
        fold: 1 to 5.
        interactions: read from that folder, each (user, item) pair in one row.

    Raises:
        DataError: the file is missing or damaged, or a pair is not among the interactions.
    """
    path = folder / f"u{fold}.test"
    if not path.is_file():
        fix = "use the dataset's folder with all its files, or leave out split.folder"
        raise missing_file(f"the file of fold {fold}", path, fix)
    check_complete_lines(path)
    pairs = read_table(path, _FOLD)
    rows = pd.MultiIndex.from_arrays(
        [interactions.user_ids[interactions.users], interactions.item_ids[interactions.items]]
    )
    if not rows.is_unique:
        raise DataError(
            f"{interactions.name}: published pairs need each (user, item) pair once",
            got=f"{int(rows.duplicated().sum()):,} repeated rows",
            fix="use random folds or another split, without published files",
        )
    tested = rows.get_indexer(pd.MultiIndex.from_arrays([pairs["user"], pairs["item"]]))
    if (tested < 0).any():
        line = int((tested < 0).argmax())
        raise DataError(
            f"{path}, line {line + 1:,}: a pair that is not among the interactions",
            expected=f"pairs of {interactions.name}",
            got=f"user {pairs['user'][line]}, item {pairs['item'][line]}",
            fix="use both files from one copy of the dataset, with all ratings",
        )
    return tested.astype(np.int64)


# The publisher's own training and test files, such as those of Amazon Office (70:30) and Gowalla
# (80:20).
#
# Validation rows, if any, are drawn from the training file: choose settings with them, and report
# with `validation = 0`, so that all published training rows are used for training.


class PublishedConfig(Config):
    """Settings of the published split."""

    validation: float = Field(0.0, ge=0, lt=1)
    """Share of each user's training rows for validation, in [0, 1), rounded half up; at least one
    row remains for training."""


class Published(Split):
    """Trains on the publisher's training file and tests on its test file."""

    name = "published"
    Config = PublishedConfig
    paper = "UPC-SDG's author files; NGCF and LightGCN (Gowalla)"
    config: PublishedConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Return no dependence: the publisher's files are given, and validation rows are drawn for
        each client separately. Users without a row in the training file are training clients."""
        return ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the publisher.

        Raises:
            DataError: the dataset was not published in two files, or only one of them was read.
        """
        test = interactions.published_test
        if test is None or not 0 < test.sum() < len(test):
            raise DataError(
                f"{interactions.name} has no published split",
                expected="a dataset with a training and a test file, and rows of both",
                got="no such files" if test is None else "rows of one file only",
                fix="choose another split, such as 'ratio'",
            )
        rows = np.flatnonzero(~test)
        position, count = ordered(interactions, "random", self.seed, rows=rows)
        taken = np.minimum(rounded(self.config.validation * count), count - 1)
        validation = np.zeros(len(test), dtype=bool)
        validation[rows[position >= count - taken]] = True
        return Partition.of_masks(interactions, test, validation, users_of(interactions))


# New items: a share of the items has no training row at all, and is what is recommended.
#
# Every user's rows of new items are tested, and beside them a share of the same user's other rows,
# so that new and old items can be compared. Lists are of three kinds (`fedrec.evaluation.tables`):
# the new items alone, the old items alone, and all items.
#
# New items are drawn one by one, by a number that follows from the seed and the item's id, so that
# no interaction decides which items are new (the list of items is public); the share is then met on
# average. Or they are those whose first interaction is the latest, as in a shop, which depends on
# the rows of all users and is refused under privacy.
#
# A user without a row of an old item knows nothing to start from, and is not tested; it is a
# training client without rows, so that their number does not tell who has old items.


class NewItemsConfig(Config):
    """Settings of the split by items."""

    share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the items that are new, and tested, in (0, 1)."""
    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share of the items whose rows are for validation, in [0, 1); they do not train either."""
    order: Literal["random", "newest"] = "random"
    """Which items are new: "random" ones, by the seed and each item's id, or the "newest", by the
    time of their first interaction."""
    old_rows: float = Field(default=0.1, ge=0, lt=1)
    """Share of each user's rows of old items that is tested beside the new ones, in [0, 1), rounded
    half up; at least one row trains. As much is for validation if `validation` is above 0."""

    @model_validator(mode="after")
    def _leaves_items(self) -> Self:
        if self.share + self.validation >= 1 or 2 * self.old_rows >= 1:
            raise ValueError("share + validation below 1, and old-rows below 0.5")
        return self


class NewItems(Split):
    """Items without a training row are tested, beside rows of other items of the same users."""

    name = "new-items"
    Config = NewItemsConfig
    config: NewItemsConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """With `order = "newest"`: the times of all rows."""
        return "" if self.config.order == "random" else "the first interaction of each item"

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; every user with a row is a training client.

        Raises:
            DataError: no item is new, or none is old; the newest are asked for, and there are no
                times.
        """
        config = self.config
        shares = self._shares(interactions)
        new = shares < config.share
        held_out = shares < config.share + config.validation
        if not new.any() or held_out.all():
            raise DataError(
                f"{interactions.name} cannot be split by items",
                expected="at least one new item and one old item",
                got=f"{int(new.sum()):,} new ones of {len(new):,}",
                fix="change split.share, or use a dataset with more items",
            )
        of_old = ~held_out[interactions.items]
        known = np.zeros(interactions.num_users, dtype=bool)
        known[users_of(interactions, of_old)] = True
        old_test, old_validation = self._old_rows(interactions, np.flatnonzero(of_old))
        counted = known[interactions.users]
        test = counted & new[interactions.items]
        validation = counted & ~of_old & ~test
        test[old_test] = True
        validation[old_validation] = True
        return Partition(
            training_clients=users_of(interactions),
            train_rows=np.flatnonzero(of_old & ~test & ~validation),
            validation_rows=np.flatnonzero(validation),
            test_rows=np.flatnonzero(test),
            new_items={"test": np.flatnonzero(new), "validation": np.flatnonzero(held_out & ~new)},
        )

    def _shares(self, interactions: Interactions) -> np.ndarray:
        """A number in [0, 1) of each item, `float64 [items]`; the smallest are of new items."""
        if self.config.order == "random":
            return hashed_shares(interactions.item_ids, self.seed, "split", VALIDATION)
        first = np.full(interactions.num_items, np.iinfo(np.int64).max)
        np.minimum.at(first, interactions.items, times_of(interactions))
        ranks = np.empty(len(first))
        ranks[np.argsort(-first, kind="stable")] = np.arange(len(first))
        return ranks / len(first)

    def _old_rows(
        self, interactions: Interactions, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Those of the rows `int64 [n]` of old items that are tested, and those for validation."""
        # by user and item, so that no row of a new item moves another one
        numbers = pair_numbers(interactions, self.seed, "split", ROWS)[rows]
        position, count = places(interactions.users[rows], numbers)
        each = np.minimum(rounded(self.config.old_rows * count), (count - 1) // 2)
        both = 2 * each if self.config.validation else each
        return rows[position < each], rows[(position >= each) & (position < both)]
