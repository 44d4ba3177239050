# SPDX-License-Identifier: Apache-2.0
"""Selection of the rows to replace (UPC-SDG, equation 7), for all users at once."""

import numpy as np

from fedrec.data.interactions import Interactions


def replaced_counts(rows: Interactions, ratio: np.ndarray) -> np.ndarray:
    """`int64 [users]`: how many rows of each user are replaced, k n rounded half up.

    Args:
        rows: the training rows.
        ratio: `float64 [users]`, each k in [0, 1].
    """
    counts = np.diff(rows.user_offsets)
    return np.floor(ratio * counts + 0.5 + 1e-9).astype(np.int64)  # .35 x 10 is 3.4999999999999996


def lowest(rows: Interactions, score: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The rows of each user with the smallest scores.

    Args:
        rows: the training rows.
        score: `float [rows]`; equal scores keep the order of the rows.
        counts: `int64 [users]`, how many of each user.

    Returns:
        `int64 [rows]`: row numbers, users ascending, each user's by rising score.
    """
    order = np.lexsort((score, rows.users))
    place = np.arange(len(order)) - rows.user_offsets[rows.users[order]]
    return order[place < counts[rows.users[order]]]
