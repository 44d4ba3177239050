# SPDX-License-Identifier: Apache-2.0
"""Training rows to perturb: two groups of users, small enough for exact results."""

import numpy as np
import pytest

from fedrec.data.interactions import FeatureTable, Interactions
from fedrec.data.perturbation import TrainingData


def table(users, items, num_users, num_items):
    """Rows without features, ratings or times; users and items have names."""
    names = np.array([f"u{n}" for n in range(num_users)], dtype=object)
    tables = FeatureTable(num_users), FeatureTable(num_items)
    return Interactions(
        "rows", np.array(users), np.array(items), names, np.arange(num_items), *tables
    )


@pytest.fixture(scope="session")
def make_data():
    """Rows of given users and items as input of a perturbation."""

    def make(users, items, num_users=None, num_items=None, clients=None):
        rows = table(users, items, num_users or max(users) + 1, num_items or max(items) + 1)
        return TrainingData(rows, np.unique(rows.users) if clients is None else clients, False)

    return make


@pytest.fixture(scope="session")
def two_tastes(make_data):
    """Sixty users, forty items: even users like items below 20, odd ones the others; six to ten
    rows each."""
    random, users, items = np.random.default_rng(0), [], []
    for user in range(60):
        own = random.choice(20, size=6 + user % 5, replace=False) + 20 * (user % 2)
        users += [user] * len(own)
        items += own.tolist()
    return make_data(users, items, 60, 40)
