# SPDX-License-Identifier: Apache-2.0
"""Items that are typical of a group of users: item-group inclination and stereotypicality (poster
"targeted DP", equation 1).

    IGI(i, a) = share of the users of group a that interacted with item i
    S(i, a)   = (IGI(i, a) - IGI(i, not a)) / max(IGI(i, a), IGI(i, not a))

Where this differs from the paper:

- The poster names the inclination by reference (Escobedo et al. 2024) and does not define it. A
  share of users, unlike a number of interactions, does not depend on how large or how active a
  group is.
- The poster's sign `I_a(u)` is for two groups. If S is that of the user's own group, the formula
  applies to any number of groups; for two groups `S(i, a) = -S(i, not a)`, which gives that sign.
- An item without users has value 0, where the formula divides by zero.
"""

import numpy as np


def inclination(
    users: np.ndarray, items: np.ndarray, groups: np.ndarray, *, num_groups: int, num_items: int
) -> tuple[np.ndarray, np.ndarray]:
    """Item-group inclination of every group and of its complement.

    Args:
        users: `int64 [rows]`, indices in `groups`.
        items: `int64 [rows]`; a pair that occurs twice counts once.
        groups: `int64 [users]`, each user's group, -1 for none. A user without a group is in no
            complement either.
        num_groups: number of groups.
        num_items: size of the catalogue.

    Returns:
        `float64 [groups, items]` twice, in [0, 1]; 0 for a group (or a complement) without users.
    """
    pairs = np.unique(users * num_items + items)
    group = groups[pairs // num_items]
    item = pairs % num_items
    known = group >= 0
    having = np.zeros((num_groups, num_items))
    np.add.at(having, (group[known], item[known]), 1.0)
    sizes = np.bincount(groups[groups >= 0], minlength=num_groups).astype(np.float64)[:, None]
    inside = having / np.maximum(sizes, 1)
    outside = (having.sum(axis=0) - having) / np.maximum(sizes.sum() - sizes, 1)
    return inside, outside


def stereotypicality(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Stereotypicality of each item for each group, from -1 (only others have it) to 1 (only the
    group has it).

    Args:
        inside: `float64 [groups, items]`, inclination of each group.
        outside: `float64 [groups, items]`, inclination of its complement.
    """
    larger = np.maximum(inside, outside)
    return np.divide(inside - outside, larger, out=np.zeros_like(larger), where=larger > 0)
