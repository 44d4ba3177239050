# SPDX-License-Identifier: Apache-2.0
"""Denoising with public features: exact without noise, and closer to the true matrix with noise."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.private.dp_gram import DpGram, DpGramConfig
from fedrec.data.features import Feature, FeatureTable
from fedrec.errors import ExperimentError
from fedrec.factors.subspace import (
    basis_of,
    denoised_within,
    public_directions,
)

ITEMS = 120


@pytest.fixture(scope="module")
def features():
    kinds = ["a", "b", "c", "d"]
    return FeatureTable(
        ITEMS,
        (
            Feature.single("kind", [kinds[n % 4] for n in range(ITEMS)]),
            Feature.multiple(
                "tags", [["x"] * (n % 3 > 0) + ["y"] * (n % 5 > 2) for n in range(ITEMS)]
            ),
        ),
    )


def symmetric_noise(random, std):
    drawn = random.normal(size=(ITEMS, ITEMS)) * std / np.sqrt(2)
    upper = np.triu(drawn, 1)
    return torch.from_numpy(upper + upper.T + np.diag(random.normal(size=ITEMS) * std))


@pytest.fixture(scope="module")
def truth(features):
    """A Gram matrix of popularity times features, plus a small unrelated part."""
    random = np.random.default_rng(0)
    popularity = np.sort(random.gamma(1.0, 3.0, ITEMS))[::-1] + 0.2
    directions = public_directions(features)
    mixed = popularity[:, None] * (directions @ random.normal(size=(directions.shape[1], 5)))
    other = popularity[:, None] * random.normal(size=(ITEMS, 2))
    gram = mixed @ mixed.T + 0.3 * other @ other.T
    return torch.from_numpy(gram), basis_of(directions, popularity)


def test_directions_are_a_constant_and_unit_vectors(features):
    found = public_directions(features)
    assert found.shape == (ITEMS, 1 + 4 + 2) and (found[:, 0] == 1).all()
    np.testing.assert_allclose(np.linalg.norm(found[:, 1:5], axis=1), 1)
    assert set(np.round(np.linalg.norm(found[:, 5:], axis=1), 9)) <= {0.0, 1.0}


def test_the_basis_spans_the_directions_and_no_more(features, truth):
    basis = truth[1]
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]).double())
    assert basis.shape[1] == 6  # kinds add up to the constant


def test_without_noise_the_matrix_comes_back(truth):
    gram, basis = truth
    torch.testing.assert_close(denoised_within(gram, 0.0, basis), gram)
    torch.testing.assert_close(denoised_within(gram, 1e-6, basis), gram, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("std", [3.0, 10.0, 40.0])
def test_with_noise_it_is_nearer_to_the_truth_than_cutting_at_the_edge(truth, std):
    gram, basis = truth
    errors = {"within": [], "cut": [], "noisy": []}
    for seed in range(4):
        noisy = gram + symmetric_noise(np.random.default_rng(seed), std)
        values, vectors = torch.linalg.eigh(noisy)
        kept = values > std * (2 * ITEMS) ** 0.5
        cut = (vectors[:, kept] * values[kept]) @ vectors[:, kept].T
        found = denoised_within(noisy, std, basis)
        assert torch.linalg.eigvalsh(found).min() > -1e-6 * values.max()
        for name, matrix in (("within", found), ("cut", cut), ("noisy", noisy)):
            errors[name].append(float((matrix - gram).norm()))
    means = {name: np.mean(values) for name, values in errors.items()}
    assert means["within"] < means["cut"] < means["noisy"]


def test_noise_alone_leaves_next_to_nothing(truth):
    basis = truth[1]
    noise = symmetric_noise(np.random.default_rng(3), 1.0)
    assert denoised_within(noise, 1.0, basis).norm() < 0.25 * noise.norm()


def test_the_baseline_takes_features_and_refuses_to_do_without(features):
    random = np.random.default_rng(1)
    liked = [np.sort(random.choice(ITEMS, 12, replace=False)) for _ in range(80)]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in liked])])
    users = np.arange(80)

    def histories(items):
        return Histories(ITEMS, offsets, np.concatenate(liked), users, None, items)

    settings = {"items": 60, "model": "ease", "public_features": True, "ridge": 0.3, "seed": 0}
    with pytest.raises(ExperimentError, match="no public features"):
        DpGram(DpGramConfig(**settings)).fit(histories(None))
    with_features = DpGram(DpGramConfig(**settings))
    plain = DpGram(DpGramConfig(**{**settings, "public_features": False}))
    for baseline in (with_features, plain):
        baseline.fit(histories(features))
        assert baseline.scores(histories(features)).isfinite().all()
    assert with_features.spent(80).epsilon == plain.spent(80).epsilon <= 5.0
    quiet = {"noise": False, "regularisation": 50.0, "clip_norm": 1e9}
    exact = [
        DpGram(DpGramConfig(**{**settings, **quiet, "public_features": on})) for on in (True, False)
    ]
    for baseline in exact:
        baseline.fit(histories(features))
    scores = [baseline.scores(histories(features)) for baseline in exact]
    torch.testing.assert_close(*scores)
