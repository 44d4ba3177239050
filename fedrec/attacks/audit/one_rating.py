# SPDX-License-Identifier: Apache-2.0
"""Datasets that differ in one rating: a lower bound on epsilon from how well releases distinguish
them.

For an epsilon-DP release the chance of any answer differs by a factor of at most exp(epsilon)
between the two. So if an adversary is right with chance p on the one, and wrong with chance q on
the other, epsilon is at least ln(p / q); with exact limits of Clopper and Pearson in place of p and
q this holds with the requested confidence.

The adversary compares the likelihoods of a release under independent Laplace noise on the noiseless
result of each dataset. The data are constructed so that one rating has a large effect: a user has n
ratings at both ends of the scale, and all others rate everything in the middle, so that the item
means hardly change. The row of similarities of the changed item changes with the error of that
rating times n - 1 deviations, and the rows of the user's other items change because the item is
their neighbour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedrec.attacks.intervals import exact_lower, exact_upper
from fedrec.baselines.base import Ratings
from fedrec.baselines.private.dpsgd_pnbm import DpsgdPnbm, DpsgdPnbmConfig, sensitivity


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon from distinguishing two datasets.

    Attributes:
        epsilon: lower bound, at least 0.
        right: how often the first dataset was classified as the first.
        wrong: how often the second dataset was classified as the first.
        trials: number of releases of each dataset.
    """

    epsilon: float
    right: int
    wrong: int
    trials: int


def lower_bound(right: int, wrong: int, trials: int, confidence: float = 0.95) -> LowerBound:
    """The bound from numbers of right and wrong answers in `trials` trials each."""
    tail = (1 - confidence) / 2
    least = exact_lower(right, trials, tail)
    most = exact_upper(wrong, trials, tail)
    return LowerBound(max(0.0, math.log(least / most)) if least else 0.0, right, wrong, trials)


def laplace_score(
    release: np.ndarray, first: np.ndarray, second: np.ndarray, scale: float
) -> float:
    """Log-likelihood ratio of a release under Laplace noise of that scale on `first` and on
    `second`, all `float64 [...]` of the same shape."""
    return float((np.abs(release - second) - np.abs(release - first)).sum() / scale)


def neighbours(ratings: int, others: int = 20) -> tuple[Ratings, Ratings]:
    """Two datasets over `ratings` items that differ in one rating: user 0 rated the first item 5 or
    1.

    Args:
        ratings: number of ratings of user 0.
        others: number of users who rate everything in the middle.
    """
    users = np.repeat(np.arange(others + 1), ratings)
    items = np.tile(np.arange(ratings), others + 1)
    values = np.where(users == 0, np.where(items % 2 == 0, 5.0, 1.0), 3.0)
    other = values.copy()
    other[0] = 1.0
    sizes = (others + 1, ratings)
    return Ratings(*sizes, users, items, values), Ratings(*sizes, users, items, other)


def audit_one_rating(
    config: DpsgdPnbmConfig, ratings: int, trials: int, *, seed: int = 0, confidence: float = 0.95
) -> LowerBound:
    """Run algorithm 1 on both datasets, and bound the epsilon of one rating.

    Args:
        config: settings; one iteration, with `start = "constant"` so that both start alike.
        ratings: number of ratings of the user one of whose ratings differs.
        trials: number of runs on each dataset.
        seed: of the first run.
        confidence: of the bound.

    Raises:
        ValueError: there is no noise, more than one iteration, or a start that differs from run to
            run.
    """
    if config.epsilon is None or config.iterations != 1 or config.start != "constant":
        raise ValueError("Expected an epsilon, one iteration and start = 'constant'.")
    plain = config.model_copy(update={"epsilon": None, "sample": 1.0})
    data = neighbours(ratings)
    first, second = (_released(plain, one) for one in data)
    entry = sensitivity(1, config.spread, config.floor) * config.sample / config.epsilon
    scale = config.learning_rate * config.rescale * entry
    called = [0, 0]
    for trial in range(trials):
        for place, one in enumerate(data):
            release = _released(config.model_copy(update={"seed": seed + 2 * trial + place}), one)
            called[place] += laplace_score(release, first, second, scale) > 0
    return lower_bound(called[0], called[1], trials, confidence)


def _released(config: DpsgdPnbmConfig, data: Ratings) -> np.ndarray:
    """The similarities that are released."""
    system = DpsgdPnbm(config)
    system.fit_ratings(data)
    return system.similarity
