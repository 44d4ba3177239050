# SPDX-License-Identifier: Apache-2.0
"""Histories for the baselines' tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedrec.baselines.base import Histories


def _drawn(num_users: int, num_items: int, most: int, seed: int = 0) -> Histories:
    """Random histories of 1 to `most` distinct items, skewed to the first ones; users are numbered from 100 down."""
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(3, num_items + 3)
    lists = [
        random.choice(num_items, random.integers(1, most + 1), replace=False, p=chances / chances.sum())
        for _ in range(num_users)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)
    users = 100 + np.arange(num_users)[::-1]
    return Histories(num_items, offsets, np.concatenate(lists).astype(np.int64), users)


@pytest.fixture(scope="session")
def drawn() -> Callable[..., Histories]:
    """See `_drawn`."""
    return _drawn


@pytest.fixture(scope="session")
def liked() -> Histories:
    """Eighty users and fifty items."""
    return _drawn(80, 50, 12)


@pytest.fixture(scope="session")
def others() -> Histories:
    """Nine users whom nobody knows, of the same fifty items."""
    found = _drawn(9, 50, 12, seed=1)
    return Histories(found.num_items, found.offsets, found.items)


@pytest.fixture(scope="session")
def taste() -> Histories:
    """Forty users with six of ten items each, of the lower half of twenty items or of the upper, in turns."""
    random = np.random.default_rng(0)
    items = [random.choice(10, 6, replace=False) + 10 * (user % 2) for user in range(40)]
    return Histories(20, np.arange(0, 246, 6)[:41], np.concatenate(items), np.arange(40))
