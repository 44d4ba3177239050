# SPDX-License-Identifier: Apache-2.0
"""The hidden embeddings of a Gram matrix are recovered, and nothing is found in pure noise."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from fedrec.factors.residual import expected_counts, expected_profile, learned_embeddings

ITEMS = 150


@pytest.fixture(scope="module")
def planted():
    """Profile, public embeddings, hidden ones, and the Gram matrix without noise."""
    random = np.random.default_rng(1)
    profile = torch.from_numpy(np.sort(random.gamma(2.0, 8.0, ITEMS))[::-1] + 3)
    public, hidden = (torch.from_numpy(random.normal(size=(ITEMS, 2))) for _ in range(2))
    # Popularity and public features are independent of the hidden ones.
    known = torch.linalg.qr(torch.cat([profile[:, None], profile[:, None] * public], 1))[0]
    weighted = profile[:, None] * hidden
    hidden = (weighted - known @ (known.T @ weighted)) / profile[:, None]
    kernel = 1 + public @ public.T + hidden @ hidden.T
    return profile, public, hidden, torch.outer(profile, profile) * kernel


def noise(std):
    drawn = np.random.default_rng(3).normal(size=(ITEMS, ITEMS)) * std / np.sqrt(2)
    upper = np.triu(drawn, 1)
    return torch.from_numpy(upper + upper.T)


def learned(planted, gram, edge, damping=0.0, factors=2):
    profile, public = planted[:2]
    return learned_embeddings(gram, profile, public, edge=edge, factors=factors, damping=damping)


def off_diagonal_correlation(one, other):
    above = np.triu_indices(ITEMS, 1)
    return np.corrcoef(one.numpy()[above], other.numpy()[above])[0, 1]


def test_planted_embeddings_are_found(planted):
    profile, _, hidden, gram = planted
    found = profile[:, None] * learned(planted, gram, 0.0)
    expected = profile[:, None] * hidden
    assert off_diagonal_correlation(found @ found.T, expected @ expected.T) > 0.98


def test_they_are_found_under_noise_that_is_below_them(planted):
    profile, _, hidden, gram = planted
    std = 100.0
    found = learned(planted, gram + noise(std), std * (2 * ITEMS) ** 0.5, factors=50)
    found, expected = profile[:, None] * found, profile[:, None] * hidden
    assert found.shape[1] == 2
    assert off_diagonal_correlation(found @ found.T, expected @ expected.T) > 0.9


def test_of_noise_alone_nothing_is_learned(planted):
    profile, public, _, _ = planted
    explained = torch.outer(profile, profile) * (1 + public @ public.T)
    found = learned(planted, explained + noise(100.0), 1.1 * 100.0 * (2 * ITEMS) ** 0.5)
    assert found.shape == (ITEMS, 0)


def test_damping_shrinks_rare_items_most(planted):
    profile, gram = planted[0], planted[3]
    free, damped = (learned(planted, gram, 0.0, damping=one) for one in (0.0, 1.0))
    shrunk = (damped / free)[:, 0]
    expected = profile**2 / (profile**2 + profile.mean() ** 2)
    np.testing.assert_allclose(shrunk, expected, rtol=1e-9)


def test_the_profile_is_a_least_squares_fit_off_the_diagonal():
    random = np.random.default_rng(5)
    popularity = torch.from_numpy(random.gamma(2.0, 1.0, ITEMS))
    drawn = random.normal(size=(ITEMS, ITEMS)) * 0.1
    gram = 9 * torch.outer(popularity, popularity) + torch.from_numpy(drawn + drawn.T)
    gram.diagonal().add_(1e6)
    found = expected_profile(gram, popularity)
    assert float(found[0] / popularity[0]) == pytest.approx(3, rel=0.01)
    assert bool((expected_profile(-gram, popularity) > 0).all()), "however large the noise"


@pytest.mark.parametrize("std", [2.0, 40.0])
def test_counts_are_means_of_their_posterior(std):
    noisy = np.array([-90.0, -3.0, 0.0, 5.0, 60.0, 300.0])
    mean = noisy.mean()

    def moment(power, seen):
        top = max(0.0, seen - std**2 / mean)
        ends = max(0.0, top - 12 * std), top + 12 * std
        at_top = norm.logpdf(seen, top, std) - top / mean
        return quad(
            lambda count: (
                count**power * np.exp(norm.logpdf(seen, count, std) - count / mean - at_top)
            ),
            *ends,
            limit=200,
        )[0]

    expected = [moment(1, seen) / moment(0, seen) for seen in noisy]
    np.testing.assert_allclose(expected_counts(noisy, std), expected, rtol=1e-4)


def test_counts_without_noise_are_themselves():
    np.testing.assert_array_equal(expected_counts(np.array([0.0, 3.0]), 0.0), [0.5, 3.0])
