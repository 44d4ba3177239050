# SPDX-License-Identifier: Apache-2.0
"""Accuracy that other libraries reach on real data, with settings known to be good there."""

from __future__ import annotations

import pytest

from fedrec.baselines.evaluation import evaluate_baselines
from fedrec.data.population import Population
from fedrec.experiment.loading import load

SETTINGS = {
    "user-knn": {"neighbours": 40},
    "puresvd": {"factors": 20},
    "ials": {"factors": 32},
    "warp": {},
}
FLOORS = {"user-knn": 0.375, "puresvd": 0.40, "ials": 0.39, "warp": 0.38}


@pytest.mark.real_data
def test_movielens_100k_divided_8_1_1():
    """NDCG@100 of held-out rows, without known items."""
    population = Population.of(load("dpvae-vae-ml100k"))
    found = evaluate_baselines(SETTINGS, population, held_out="test", ks=(100,))
    reached = {name: metrics["ndcg-list@100"] for name, metrics in found.items()}
    assert all(reached[name] >= floor for name, floor in FLOORS.items()), reached
