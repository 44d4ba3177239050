# SPDX-License-Identifier: Apache-2.0
"""Similarities between items from users' ratings: cosine and Pearson correlation (PNBM, section
5.1, PCC and COS).

    cos_ij = sum_u r_ui r_uj / sqrt(sum_u r_ui^2 sum_u r_uj^2)
    pcc_ij = the same with the item's mean subtracted from each rating

The papers do not specify the users in the sums of the denominator and the means: those who rated
both items (`co-raters`), or all who rated the item (`all`). Without co-raters, or without variance
among them, it is 0.
"""

from typing import Literal

import numpy as np
from scipy.sparse import csr_array

from fedrec.neighbourhood.profiles import Profiles

Among = Literal["co-raters", "all"]


def cosine(profiles: Profiles, among: Among = "co-raters") -> np.ndarray:
    """Cosine of every pair of items, `float64 [items, items]`, zero on the diagonal."""
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
    return similarity * (both / (both + shrinkage)) if shrinkage else similarity


def nearest(similarity: np.ndarray, neighbours: int) -> np.ndarray:
    """Similarities `[items, items]` with all but the largest magnitudes of each row set to 0; of
    equal values the first are kept."""
    if neighbours >= similarity.shape[1]:
        return similarity
    order = np.argsort(-np.abs(similarity), axis=1, kind="stable")
    kept = similarity.copy()
    np.put_along_axis(kept, order[:, neighbours:], 0.0, axis=1)
    return kept


def _rated(profiles: Profiles) -> csr_array:
    return profiles.matrix(np.ones(len(profiles.values)))


def _dense(product: csr_array) -> np.ndarray:
    return np.asarray(product.todense(), dtype=np.float64)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    found = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    np.fill_diagonal(found, 0.0)
    return found
