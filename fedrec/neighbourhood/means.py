# SPDX-License-Identifier: Apache-2.0
"""Item means from sums over users, possibly clipped and noisy.

For each of its ratings, a user contributes the rating mapped to [-1, 1] and a 1. For any two
ratings the inner product r r' + 1 of these pairs is at least 0, so replacing a user moves the
clipped sum by sqrt(2) S and not 2 S (`fedrec.privacy.adjacency`). This would not hold for
deviations in units of the rating scale, where r r' may be -4.
"""

from typing import Annotated, TypeAlias

import numpy as np
from pydantic import AfterValidator

from fedrec.neighbourhood.profiles import Profiles


def _rising(scale: tuple[float, float]) -> tuple[float, float]:
    if not scale[0] < scale[1]:
        raise ValueError("a scale from a lower to a higher rating")
    return scale


Scale: TypeAlias = Annotated[tuple[float, float], AfterValidator(_rising)]
"""Lowest and highest rating, in settings."""


def scaled(values: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Ratings mapped from the scale to [-1, 1], `float64` in their shape `[...]`; values outside
    the scale are clipped."""
    middle = (scale[0] + scale[1]) / 2
    half = (scale[1] - scale[0]) / 2
    return np.clip((values.astype(np.float64) - middle) / half, -1.0, 1.0)


def rating_sums(profiles: Profiles, scale: tuple[float, float], shares: np.ndarray) -> np.ndarray:
    """`float64 [items, 2]`: sums over users of their ratings, mapped to [-1, 1], and numbers of
    ratings.

    Args:
        profiles: the ratings.
        scale: lowest and highest rating; public.
        shares: `float64 [users]`, factor on each user's contribution.
    """
    own = shares[profiles.users]
    sums = np.bincount(profiles.items, own * scaled(profiles.values, scale), profiles.num_items)
    return np.stack([sums, np.bincount(profiles.items, own, profiles.num_items)], axis=1)


def means_of(sums: np.ndarray, damping: float, scale: tuple[float, float]) -> np.ndarray:
    """Item means, `float64 [items]`, within the scale.

    An item's mean is shrunk towards the overall mean, as with `damping` additional ratings equal to
    it. Counts below 0 are treated as 0.

    Args:
        sums: `[items, 2]`, see `rating_sums`.
        damping: number of ratings, >= 0.
        scale: lowest and highest rating.
    """
    counts = np.maximum(sums[:, 1], 0.0)
    overall = float(np.clip(sums[:, 0].sum() / max(counts.sum(), 1.0), -1.0, 1.0))
    weights = counts + damping
    found = np.divide(
        sums[:, 0] + damping * overall, weights, out=np.full(len(sums), overall), where=weights > 0
    )
    middle = (scale[0] + scale[1]) / 2
    half = (scale[1] - scale[0]) / 2
    return middle + half * np.clip(found, -1.0, 1.0)
