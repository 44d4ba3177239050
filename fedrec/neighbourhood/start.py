# SPDX-License-Identifier: Apache-2.0
"""Initial similarities. The paper states that the initialisation matters, but does not specify
it."""

from typing import Literal

import numpy as np

from fedrec.neighbourhood.profiles import Profiles
from fedrec.neighbourhood.similarity import cosine, pearson

Start = Literal["constant", "uniform", "cosine", "pearson"]
FROM_DATA = ("cosine", "pearson")
"""Initialisations that are computed from ratings without noise."""


def initial_similarity(start: Start, profiles: Profiles, random: np.random.Generator) -> np.ndarray:
    """`float64 [items, items]`, zero on the diagonal.

    `constant`: 1 everywhere, which predicts an item's mean plus the mean of the user's deviations.
    `uniform`: drawn from (0, 1). `cosine` and `pearson`: of the ratings, over co-raters.
    """
    size = profiles.num_items
    if start in FROM_DATA:
        return cosine(profiles) if start == "cosine" else pearson(profiles)
    found = np.ones((size, size)) if start == "constant" else random.random((size, size))
    np.fill_diagonal(found, 0.0)
    return found


def renormalised(similarity: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Rows scaled to sums of magnitudes `float64 [items]`, which does not change predictions; empty
    rows are not changed."""
    present = np.abs(similarity).sum(axis=1)
    return similarity * np.divide(sums, present, out=np.ones_like(sums), where=present > 0)[:, None]
