# SPDX-License-Identifier: Apache-2.0
"""Exposure, NDCG and rank of an adversary's targets, by sorting whole lists."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch

from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.metrics.block import RankedBlock
from fedrec.metrics.targets import Exposure, TargetNdcg, TargetRank

SCORES = torch.tensor(
    [[3.0, 1.0, 2.0, 2.0, 0.0], [0.0, 5.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
)
KNOWN = torch.zeros(3, 5, dtype=torch.bool)
KNOWN[0, 0] = True
KNOWN[1, 1] = True
SEEN = KNOWN.clone()
SEEN[1, 2] = True  # held out: this user has rated the first target
TARGETS = torch.tensor([2, 4])


def by_all_orders(gain):
    """Mean gain of each target's place over all orders of the catalogue, in stable sorts."""
    found = np.full(3, np.nan)
    for user in range(3):
        own = [t for t in TARGETS.tolist() if not SEEN[user, t]]
        listed = [i for i in range(5) if not KNOWN[user, i]]
        gains = []
        for order in permutations(listed):
            ranked = sorted(order, key=lambda i: -float(SCORES[user, i]))
            gains.append(np.mean([gain(ranked.index(t) + 1, len(listed)) for t in own]))
        found[user] = np.mean(gains)
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_places_of_targets_by_sorting(k):
    block = RankedBlock(
        SCORES, seen=SEEN, known=KNOWN, relevant=SEEN & ~KNOWN, ks=(5,), targets=TARGETS
    )
    cases = [
        (Exposure, lambda place, _: float(place <= k)),
        (TargetNdcg, lambda place, _: 1 / math.log2(place + 1) if place <= k else 0.0),
        (TargetRank, lambda place, length: place / length),
    ]
    for metric, gain in cases:
        found = metric(Config()).per_user(block, k).numpy()
        np.testing.assert_allclose(found, by_all_orders(gain), rtol=1e-12)


def test_a_user_who_rated_all_targets_has_no_value():
    seen = torch.ones(3, 5, dtype=torch.bool)
    block = RankedBlock(SCORES, seen=seen, known=KNOWN, relevant=~KNOWN, ks=(5,), targets=TARGETS)
    assert Exposure(Config()).per_user(block, 5).isnan().all()


def test_they_need_an_adversary(tiny_experiment):
    table = tiny_experiment()
    table["evaluation"]["metrics"] = ["exposure"]
    with pytest.raises(ExperimentError, match="adversary"):
        load(table)
