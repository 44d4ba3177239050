# SPDX-License-Identifier: Apache-2.0
"""Histories for the baselines' tests."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from tests.fedrec.baselines.histories import drawn_histories


@pytest.fixture(scope="session")
def liked() -> Histories:
    """Eighty users and fifty items."""
    return drawn_histories(80, 50, 12)


@pytest.fixture(scope="session")
def others() -> Histories:
    """Nine users without ids, of the same fifty items."""
    found = drawn_histories(9, 50, 12, seed=1)
    return Histories(found.num_items, found.offsets, found.items)


@pytest.fixture(scope="session")
def taste() -> Histories:
    """Forty users with six of ten items each, of the lower half of twenty items or of the upper, in
    turns."""
    random = np.random.default_rng(0)
    items = [random.choice(10, 6, replace=False) + 10 * (user % 2) for user in range(40)]
    return Histories(20, np.arange(0, 246, 6)[:41], np.concatenate(items), np.arange(40))


@dataclass(frozen=True)
class Planted:
    """Users with preferences of rank four: their known items, and one held-out item per user.

    Attributes:
        known: the histories.
        held_out: `int64 [users]`.
    """

    known: Histories
    held_out: np.ndarray

    def recall(self, scores: torch.Tensor, k: int = 10) -> float:
        """Share of the users whose held-out item is among the first k, without known items."""
        found = scores.masked_fill(self.known.matrix() > 0, -torch.inf).topk(k).indices
        return float((found == torch.from_numpy(self.held_out)[:, None]).any(1).double().mean())

    def agrees(self, ours: list[float], theirs: list[float]) -> bool:
        """Whether two means over seeds differ by at most two standard deviations, and both are far
        above chance."""
        apart = abs(np.mean(ours) - np.mean(theirs))
        chance = 10 / self.known.num_items
        return min(*ours, *theirs) > 2 * chance and apart <= 2 * max(
            np.std(ours, ddof=1), np.std(theirs, ddof=1)
        )


@pytest.fixture(scope="session")
def planted() -> Planted:
    """Six hundred users and two hundred items; each user has 20, drawn by preference and
    popularity, one held out."""
    random = np.random.default_rng(5)
    affinity = random.normal(size=(600, 4)) @ random.normal(size=(4, 200)) + random.normal(size=200)
    drawn = np.argsort(-(affinity + random.gumbel(size=affinity.shape)), axis=1)[:, :20]
    order = random.permuted(drawn, axis=1)
    known = Histories(200, np.arange(0, 600 * 19 + 1, 19), order[:, :19].ravel(), np.arange(600))
    return Planted(known, order[:, 19])
