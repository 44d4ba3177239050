# SPDX-License-Identifier: Apache-2.0
"""Mean similarity of items and their substitutes: by hand, by gamma, and of perturbations without
embeddings."""

import dataclasses

import numpy as np
import pytest
import torch

from fedrec.data.perturbation import Perturbed
from fedrec.perturb.mean_similarity import mean_similarity, measured_similarity
from fedrec.perturb.members.random_replacement import RandomReplacement, RandomReplacementConfig
from fedrec.perturb.members.randomised_response import RandomisedResponse, RandomisedResponseConfig
from fedrec.perturb.synthesis.similarity import Similarity

ITEMS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-1.0, 0.5]])


def test_each_gamma_has_the_mean_of_its_own_rows():
    originals, substitutes = np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0])
    gamma = np.array([0.5, 0.1, 0.5, 0.1])
    found = mean_similarity(originals, substitutes, Similarity(ITEMS, "paper"), gamma)
    assert list(found) == ["0.1", "0.5"] and [one["rows"] for one in found.values()] == [2, 2]
    for definition in ("paper", "released", "cosine"):
        alike = Similarity(ITEMS, definition).rows(torch.from_numpy(originals)).numpy()
        wanted = alike[np.arange(4), substitutes]
        assert found["0.1"][definition] == pytest.approx(wanted[[1, 3]].mean())
        assert found["0.5"][definition] == pytest.approx(wanted[[0, 2]].mean())


def test_many_gammas_are_rounded():
    some = np.zeros(50, dtype=np.int64)
    found = mean_similarity(some, some + 1, Similarity(ITEMS, "cosine"), np.linspace(0, 1, 50))
    assert list(found) == [f"{step / 10:g}" for step in range(11)]
    assert sum(one["rows"] for one in found.values()) == 50


def test_nothing_replaced_has_no_similarity(two_tastes):
    nothing = np.empty(0, dtype=np.int64)
    same = Perturbed(two_tastes.rows, np.arange(len(two_tastes.rows)))
    foreign = Perturbed(two_tastes.rows, np.full(len(two_tastes.rows), -1))
    assert mean_similarity(nothing, nothing, Similarity(ITEMS, "paper")) == {}
    assert all(measured_similarity(two_tastes.rows, one, 0) == {} for one in (same, foreign))


@pytest.mark.parametrize(
    "perturbation",
    [
        RandomReplacement(RandomReplacementConfig(replacement_ratio=0.5), 0),
        RandomisedResponse(RandomisedResponseConfig(epsilon=1.0), 0),
    ],
    ids=["random-replacement", "randomised-response"],
)
def test_random_items_are_less_alike_than_items_of_the_same_taste(two_tastes, perturbation):
    """Items 0 to 19 are similar to each other, and so are the others."""
    rows = two_tastes.rows
    found = perturbation.perturb(two_tastes)
    moved = int((found.rows.items != rows.items).sum())
    random = measured_similarity(rows, found, 0)
    near = (rows.items // 20) * 20 + (rows.items % 20 + 1) % 20
    tasteful = Perturbed(dataclasses.replace(rows, items=near), np.arange(len(rows)))
    assert list(random) == ["all"] and random["all"]["rows"] == moved
    assert measured_similarity(rows, tasteful, 0)["all"]["cosine"] > random["all"]["cosine"] + 0.2
