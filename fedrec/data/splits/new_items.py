# SPDX-License-Identifier: Apache-2.0
"""New items: a share of the items has no training row at all, and is what is recommended.

Every user's rows of new items are tested, and beside them a share of the same user's other rows,
so that new and old items can be compared. Lists are of three kinds (`fedrec.evaluation.lists`): the
new items alone, the old items alone, and all items.

New items are drawn one by one, by a number that follows from the seed and the item's id, so that no
interaction decides which items are new (the list of items is public); the share is then met on
average. Or they are those whose first interaction is the latest, as in a shop, which depends on the
rows of all users and is refused under privacy.

A user without a row of an old item knows nothing to start from, and is not tested; it is a training
client without rows, so that their number does not tell who has old items.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.splits.rules import ROWS, VALIDATION, Partition, Split, places, rounded, users_of
from fedrec.data.time_order import item_shares, pair_numbers, times_of
from fedrec.errors import DataError
from fedrec.privacy.accounting.sampling import Adjacency


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
            new_items={
                "test": np.flatnonzero(new),
                "validation": np.flatnonzero(held_out & ~new),
            },
        )

    def _shares(self, interactions: Interactions) -> np.ndarray:
        """A number in [0, 1) of each item, `float64 [items]`; the smallest are of new items."""
        if self.config.order == "random":
            return item_shares(interactions, self.seed, "split", VALIDATION)
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
