# SPDX-License-Identifier: Apache-2.0
"""Theorem 1 of DP-VAE as a split: the paper's number, the training users, and unchanged held-out
rows."""

import math

import numpy as np
import pytest

from fedrec.data.features import FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.splits.bounded import Bounded, BoundedConfig
from fedrec.data.splits.ratio import Ratio, RatioConfig
from fedrec.experiment.loading import load

COUNTS = (3, 10, 40, 100)


@pytest.fixture
def interactions():
    users = np.repeat(np.arange(4), COUNTS)
    items = np.concatenate([np.arange(count) for count in COUNTS])
    return Interactions(
        "made", users, items, np.arange(4), np.arange(100), FeatureTable(4), FeatureTable(100)
    )


def bounded(**settings):
    return Bounded(BoundedConfig(**settings), 3)


def test_the_default_is_the_papers_largest_bound():
    assert round(BoundedConfig().bound(1.0)) == 1772
    assert BoundedConfig(dimension=10, omega=0.5, delta=0.2).bound(0.3) == pytest.approx(
        0.6 * (10 + math.log(5))
    )


def test_what_is_held_out_stays_and_training_is_thinned(interactions):
    whole = Ratio(RatioConfig(), 3).split(interactions)
    # at most 21 rows, at least 6.4
    config = {"omega": 0.5, "delta": 0.5, "dimension": 10.0, "p_min": 0.3}
    part = bounded(**config).split(interactions)
    np.testing.assert_array_equal(part.test_rows, whole.test_rows)
    np.testing.assert_array_equal(part.validation_rows, whole.validation_rows)
    assert set(part.train_rows) <= set(whole.train_rows)
    before, after = (
        np.bincount(interactions.users[p.train_rows], minlength=4) for p in (whole, part)
    )
    np.testing.assert_array_equal(after, np.minimum(before, 21))
    assert part.training_clients.tolist() == [1, 2, 3] and before[0] < 6.4 <= before[1]


def test_the_papers_settings_leave_small_data_alone(interactions):
    part, whole = bounded().split(interactions), Ratio(RatioConfig(), 3).split(interactions)
    for field in ("training_clients", "train_rows", "test_rows"):
        np.testing.assert_array_equal(getattr(part, field), getattr(whole, field))


def test_an_experiment_names_the_split_inside(tiny_experiment):
    loaded = load(
        tiny_experiment(),
        ["split={name='bounded', p-min=0.1, inner={name='ratio', order='temporal'}}"],
    )
    assert loaded.split.options["inner"]["order"] == "temporal"
    assert loaded.split.options["inner"]["train"] == 0.8
