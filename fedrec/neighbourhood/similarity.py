# SPDX-License-Identifier: Apache-2.0
"""Users' ratings as profiles, and similarities between items."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.sparse import csr_array

# Users' ratings in the form used by neighbourhood models: grouped by user, each item once.


@dataclass(frozen=True, eq=False)
class Profiles:
    """Ratings grouped by user.

    Attributes:
        num_items: size of the catalogue.
        offsets: `int64 [users + 1]`; user u's ratings are `offsets[u]:offsets[u + 1]`.
        items: `int64 [ratings]`, ascending and distinct within a user.
        values: `float64 [ratings]`.
    """

    num_items: int
    offsets: np.ndarray
    items: np.ndarray
    values: np.ndarray

    @classmethod
    def of(
        cls,
        num_users: int,
        num_items: int,
        users: np.ndarray,
        items: np.ndarray,
        values: np.ndarray,
    ) -> Profiles:
        """Group ratings, `[rows]` each; repeated ratings of an item by a user are averaged."""
        pairs, pair_of_row, counts = np.unique(
            users * num_items + items, return_inverse=True, return_counts=True
        )
        means = np.bincount(pair_of_row, values, len(pairs)) / np.maximum(counts, 1)
        raters, rated = np.divmod(pairs, num_items)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(raters, minlength=num_users))])
        return cls(num_items, offsets.astype(np.int64), rated.astype(np.int64), means)

    @property
    def num_users(self) -> int:
        """Number of users, including those without ratings."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """Number of ratings of each user, `int64 [users]`."""
        return np.diff(self.offsets)

    @property
    def users(self) -> np.ndarray:
        """User of each rating, `int64 [ratings]`."""
        return np.repeat(np.arange(self.num_users), self.counts)

    def centred(self, means: np.ndarray) -> Profiles:
        """Subtract each item's mean, `float64 [items]`, from its ratings."""
        return replace(self, values=self.values - means[self.items])

    def only(self, chosen: np.ndarray) -> Profiles:
        """Select the ratings for which `bool [ratings]` is true, of the same users."""
        counts = np.bincount(self.users[chosen], minlength=self.num_users)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Profiles(self.num_items, offsets, self.items[chosen], self.values[chosen])

    def at_most(self, ratings: int, keys: np.ndarray) -> Profiles:
        """Select at most a given number of ratings of each user: those with the smallest random
        keys, `float64 [ratings]`."""
        users = self.users
        order = np.lexsort((keys, users))
        rank = np.empty(len(users), dtype=np.int64)
        rank[order] = np.arange(len(users)) - self.offsets[:-1][users]
        return self.only(rank < ratings)

    def matrix(self, values: np.ndarray | None = None) -> csr_array:
        """Sparse matrix `[users, items]` of the ratings, or of other values `[ratings]`."""
        data = self.values if values is None else values
        return csr_array((data, self.items, self.offsets), shape=(self.num_users, self.num_items))


def item_means(profiles: Profiles) -> np.ndarray:
    """Mean rating of each item, `float64 [items]`; of all ratings where an item has none."""
    overall = float(profiles.values.mean()) if len(profiles.values) else 0.0
    counts = np.bincount(profiles.items, minlength=profiles.num_items)
    sums = np.bincount(profiles.items, profiles.values, profiles.num_items)
    return np.divide(sums, counts, out=np.full(profiles.num_items, overall), where=counts > 0)


# Similarities between items from users' ratings: cosine and Pearson correlation (PNBM, section 5.1,
# PCC and COS).
#
#     cos_ij = sum_u r_ui r_uj / sqrt(sum_u r_ui^2 sum_u r_uj^2)
#     pcc_ij = the same with the item's mean subtracted from each rating
#
# The papers do not specify the users in the sums of the denominator and the means: those who rated
# both items (`co-raters`), or all who rated the item (`all`). Without co-raters, or without
# variance among them, it is 0.

Among = Literal["co-raters", "all"]


def cosine(profiles: Profiles, among: Among = "co-raters") -> np.ndarray:
    """Cosine similarity of every pair of items, `float64 [items, items]`, zero on the diagonal."""
    ratings = profiles.matrix()
    products = _dense(ratings.T @ ratings)
    if among == "all":
        norms = np.sqrt(products.diagonal())
        return _ratio(products, np.outer(norms, norms))
    squares = _dense(profiles.matrix(np.square(profiles.values)).T @ _rated(profiles))
    return _ratio(products, np.sqrt(squares * squares.T))


def pearson(profiles: Profiles, among: Among = "co-raters") -> np.ndarray:
    """Correlation of every pair of items over their co-raters, `float64 [items, items]`, zero on
    the diagonal.

    Args:
        profiles: the ratings.
        among: the users whose ratings enter the means; sums are over co-raters in both cases.
    """
    if among == "all":
        counts = np.bincount(profiles.items, minlength=profiles.num_items)
        sums = np.bincount(profiles.items, profiles.values, profiles.num_items)
        return cosine(profiles.centred(sums / np.maximum(counts, 1)))
    rated = _rated(profiles)
    both = co_raters(profiles)
    # [i, j]: sum of i's ratings by those who also rated j
    sums = _dense(profiles.matrix().T @ rated)
    squares = _dense(profiles.matrix(np.square(profiles.values)).T @ rated)
    products = _dense(profiles.matrix().T @ profiles.matrix())
    variances = np.maximum(both * squares - np.square(sums), 0.0)
    variances[variances <= 1e-9 * both * squares] = (
        0.0  # with equal ratings only rounding errors remain
    )
    return _ratio(both * products - sums * sums.T, np.sqrt(variances * variances.T))


def co_raters(profiles: Profiles) -> np.ndarray:
    """Number of users who rated both items, `float64 [items, items]`."""
    rated = _rated(profiles)
    return _dense(rated.T @ rated)


def shrunk(similarity: np.ndarray, both: np.ndarray, shrinkage: float) -> np.ndarray:
    """Similarities `[items, items]` times n / (n + shrinkage), where n users rated both items
    (Koren 2008, section 2.2)."""
    return similarity * (both / (both + shrinkage))


def nearest(similarity: np.ndarray, neighbours: int | None) -> np.ndarray:
    """Similarities `[items, items]` with only the `count` largest magnitudes of each row, 0
    elsewhere; ties go to the first. None: unchanged."""
    if neighbours is None or neighbours >= similarity.shape[1]:
        return similarity
    order = np.argsort(-np.abs(similarity), axis=1, kind="stable")
    largest = similarity.copy()
    np.put_along_axis(largest, order[:, neighbours:], 0.0, axis=1)
    return largest


def _rated(profiles: Profiles) -> csr_array:
    return profiles.matrix(np.ones(len(profiles.values)))


def _dense(product: csr_array) -> np.ndarray:
    return np.asarray(product.todense(), dtype=np.float64)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    ratios = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    np.fill_diagonal(ratios, 0.0)
    return ratios
