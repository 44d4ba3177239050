# SPDX-License-Identifier: Apache-2.0
"""Item means from sums over users, which may have been clipped and may hold noise."""

from __future__ import annotations

import numpy as np

from fedrec.neighbourhood.profiles import Profiles


def rating_sums(profiles: Profiles, middle: float, shares: np.ndarray) -> np.ndarray:
    """`float64 [items, 2]`: sums over users of their deviations from `middle`, and numbers of ratings.

    Args:
        profiles: the ratings.
        middle: of the scale of ratings; public.
        shares: `float64 [users]`, what each user's part is multiplied by.
    """
    own = shares[profiles.users]
    sums = np.bincount(profiles.items, own * (profiles.values - middle), profiles.num_items)
    return np.stack([sums, np.bincount(profiles.items, own, profiles.num_items)], axis=1)


def means_of(sums: np.ndarray, middle: float, damping: float, scale: tuple[float, float]) -> np.ndarray:
    """Item means, `float64 [items]`, within the scale.

    An item's mean is drawn towards the mean of all, as if it had `damping` ratings more that are equal to it. A count
    below 0 is one of 0.

    Args:
        sums: `[items, 2]`, see `rating_sums`.
        middle: what deviations are from.
        damping: number of ratings, >= 0.
        scale: lowest and highest rating.
    """
    counts = np.maximum(sums[:, 1], 0.0)
    overall = float(np.clip(sums[:, 0].sum() / max(counts.sum(), 1.0), scale[0] - middle, scale[1] - middle))
    weights = counts + damping
    found = np.divide(sums[:, 0] + damping * overall, weights, out=np.full(len(sums), overall), where=weights > 0)
    return np.clip(middle + found, *scale)
