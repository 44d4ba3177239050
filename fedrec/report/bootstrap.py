# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals of means over users (Efron 1979), of many samples at once.

A resample of n users is a row of n counts, how often each user is drawn. All samples of n values
share the rows, so the means of all resamples are one product of two matrices, and drawing, which
dominates the time, is done once. With many users fewer resamples suffice: their number is bounded
by 50 million draws in total, but is at least 1,000.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_DRAWS = 50_000_000  # in all
_FEWEST = 1000  # resamples
_CELLS = 2_000_000  # counts held at once, 16 MB

Interval = tuple[float, float]


def bootstrap_intervals(
    samples: Sequence[np.ndarray],
    *,
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Interval]:
    """Percentile interval of the mean of each sample, in their order.

    Args:
        samples: finite values `[n]`, one array per sample, of any lengths.
        resamples: of each sample, at most; see above.
        confidence: of the intervals, in (0, 1).
        seed: of the draws; samples of equal length share their draws.

    Raises:
        ValueError: a sample has no values.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in samples]
    by_length: dict[int, list[int]] = {}
    for place, values in enumerate(arrays):
        by_length.setdefault(len(values), []).append(place)
    if 0 in by_length:
        raise ValueError("Expected values, got none.")
    tail = (1 - confidence) / 2
    found = {}
    for places in by_length.values():
        table = np.stack([arrays[place] for place in places], axis=1)
        ends = np.quantile(_means(table, resamples, seed), [tail, 1 - tail], axis=0)
        found |= dict(zip(places, ends.T.tolist(), strict=True))
    return [(found[place][0], found[place][1]) for place in range(len(arrays))]


def _means(table: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means `[resamples, samples]` of resamples of the rows of `table [n, samples]`."""
    users = len(table)
    resamples = min(resamples, max(_FEWEST, _DRAWS // users))
    random = np.random.default_rng(seed)
    found = []
    at_once = max(1, _CELLS // users)
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = random.integers(0, users, (count, users), dtype=np.int64)
        drawn += np.arange(count)[:, None] * users
        counts = np.bincount(drawn.ravel(), minlength=count * users).reshape(count, users)
        found.append(counts.astype(np.float64) @ table / users)
    return np.concatenate(found)
