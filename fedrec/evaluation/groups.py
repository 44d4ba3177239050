# SPDX-License-Identifier: Apache-2.0
"""Means of per-user metrics over groups of users.

PrivRec (section 4.5.1) calls a user inactive who has fewer than 20 visited items in the test half.
We count the training half, which is what the system knows about the user; the halves are equal, so
the two counts differ by at most one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedrec.data.interactions import Interactions

if TYPE_CHECKING:
    import pandas as pd

UNTRAINED_ITEMS = "items without training rows"
"""A line of tables of groups: held-out items that no training client has a row of."""


def user_groups(
    interactions: Interactions,
    users: np.ndarray,
    known_counts: np.ndarray,
    inactive_below: int = 20,
) -> dict[str, np.ndarray]:
    """Groups of the evaluated users, by activity and by each single-valued user feature.

    Args:
        interactions: the dataset, for its user features.
        users: `int64 [n]`, the evaluated users.
        known_counts: `int64 [n]`, number of interactions in the training part of each of them.
        inactive_below: a user with fewer known interactions is inactive.

    Returns:
        `bool [n]` per group: `"inactive"`, `"active"`, and one such as `"gender=F"` per category
        that occurs. A user without a code belongs to no group of that feature.
    """
    inactive = np.asarray(known_counts) < inactive_below
    groups = {"inactive": inactive, "active": ~inactive}
    for feature in interactions.user_features.features:
        if feature.width != 1:
            continue
        codes = feature.padded()[users, 0]
        for code in np.unique(codes[codes >= 0]):
            groups[f"{feature.name}={feature.categories[code]}"] = codes == code
    return groups


def group_means(
    per_user: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Mean of each metric over each group.

    Args:
        per_user: metrics of the evaluated users, `[users]` each; NaN where a user has no value.
        groups: `bool [users]` per group, as from `user_groups`.

    Returns:
        One row per group, in order; first a column `count`, the number of users in the group who
        have any value, and then the metrics. The mean of an empty group is NaN.
    """
    import pandas as pd  # nodes do without

    counts = np.zeros(len(groups), dtype=np.int64)
    means = np.empty((len(groups), len(per_user)))
    for place, member in enumerate(groups.values()):
        own = np.empty((len(per_user), int(member.sum())))
        for row, values in zip(own, per_user.values(), strict=True):
            row[:] = values[member]
        counts[place] = (~np.isnan(own)).any(axis=0).sum()
        means[place] = known_means(own, axis=1)
    columns = dict(zip(per_user, means.T, strict=True))
    return pd.DataFrame({"count": counts, **columns}, index=pd.Index(list(groups), name="group"))


def known_means(values: np.ndarray, axis: int) -> np.ndarray:
    """Means `[metrics]` of the values of users, `[users, metrics]` with axis 0 and transposed with
    axis 1, that are not NaN; NaN where no user has one."""
    with np.errstate(invalid="ignore"):
        return np.nansum(values, axis=axis) / (~np.isnan(values)).sum(axis=axis)


def group_gaps(means: pd.DataFrame) -> pd.DataFrame:
    """Gap between the groups of one kind: the largest group mean minus the smallest.

    Args:
        means: one row per group, as a table of `group_means`.

    Returns:
        One row per kind: `"activity"` for active and inactive users, and each user feature; the
        metrics of `means`. Groups without any value do not count. NaN for a kind with fewer than
        two other groups.
    """
    import pandas as pd

    means = means.drop(index=UNTRAINED_ITEMS, errors="ignore")  # no group of users
    kinds = [
        str(name).partition("=")[0] if "=" in str(name) else "activity" for name in means.index
    ]
    grouped = means.drop(columns="count").groupby(np.array(kinds), sort=False)
    highest, lowest, values = (
        pd.DataFrame(found) for found in (grouped.max(), grouped.min(), grouped.count())
    )
    return (highest - lowest).where(values > 1).rename_axis("kind")
