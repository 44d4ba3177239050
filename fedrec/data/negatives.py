# SPDX-License-Identifier: Apache-2.0
"""Negative items for training, drawn outside a client's training positives only.

Widely used federated code draws them outside the training *and held-out* positives. Then a held-out
item is the one item that never becomes a negative, and a score that merely counts how often an item
was drawn finds it: a leak that reaches Hits@10 = 1 without any learning. So held-out items must
remain possible negatives, and must not be passed to this function.
"""

from __future__ import annotations

import numpy as np

from fedrec.errors import DataError

_TABLE = 16  # largest number of items per drawn one of which there may be a table


def draw_negatives(
    positives: np.ndarray, num_items: int, count: int, generator: np.random.Generator
) -> np.ndarray:
    """Draw items uniformly, with replacement, from those outside `positives`.

    Exact and without rejection: a rank among the non-positives is drawn, and shifted past the
    positives that precede it, or looked up in a list of them if it is short for what is drawn. Time
    and memory depend on `count` and on the number of positives, not on the catalogue.

    Args:
        positives: `int64 [p]`, ascending and distinct, each in `[0, num_items)`: the client's
            *training* positives.
        num_items: size of the catalogue.
        count: how many to draw, >= 0.
        generator: source of randomness.

    Returns:
        `int64 [count]`, each in `[0, num_items)` and not in `positives`.

    Raises:
        DataError: every item is positive.
    """
    free = num_items - len(positives)
    if free <= 0:
        raise DataError(
            "a client has no negative item to draw",
            expected=f"fewer than {num_items} distinct positive items",
            got=f"{len(positives)}, the whole catalogue",
            fix="draw no negatives for this client, or enlarge the catalogue",
        )
    ranks = generator.integers(0, free, size=count)
    if num_items > _TABLE * count:
        return nth_outside(positives, ranks)
    outside = np.ones(num_items, dtype=bool)
    outside[positives] = False
    return np.flatnonzero(outside)[ranks]


def nth_outside(positives: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """`int64 [items]`: the items outside `positives` (ascending, distinct) that have these ranks,
    from 0, among all such."""
    # positives[i] - i non-positives lie before the i-th positive.
    free_before = positives - np.arange(len(positives))
    return rank + np.searchsorted(free_before, rank, side="right")
