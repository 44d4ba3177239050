# SPDX-License-Identifier: Apache-2.0
"""Sums of products and transitions, and what is solved from them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import norm

from fedrec.baselines.base import Histories
from fedrec.baselines.closed_form import TransitionsBaseline
from fedrec.data.interactions import Feature, FeatureTable, RecencyConfig, Vectors
from fedrec.errors import ExperimentError
from fedrec.sums.fold_in import (
    LogLinear,
    PublicPriorConfig,
    _expected_profile,
    _learned_embeddings,
    expected_counts,
    feature_embeddings,
    public_directions,
)
from fedrec.sums.products import (
    basis_of,
    denoised_within,
    solved_weights,
    transition_weights,
    transitions,
)
from tests.fedrec.baselines.histories import drawn_histories, fitted, spent

# Weights from Gram matrices: only directions that the matrix has are kept.


def test_directions_that_are_zero_but_for_rounding_are_left_out():
    """One direction, and five factors asked for: the other four would be arbitrary."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(12, 1, generator=generator, dtype=torch.float64)
    rounding = 1e-14 * torch.randn(12, 12, generator=generator, dtype=torch.float64)
    gram = direction @ direction.T + rounding + rounding.T
    settings = {"factors": 5, "regularisation": 1.0, "ridge": 0.0}
    weights = solved_weights(gram, 0.0, solution="puresvd", **settings)
    unit = direction / direction.norm()
    torch.testing.assert_close(weights, unit @ unit.T, atol=1e-10, rtol=0)


# User vectors maximise their objective.

ITEMS, WIDTH = 40, 5


@pytest.fixture(scope="module")
def given():
    """Embeddings, log popularities, and users with 1 to 30 items, one with weights and one with
    none."""
    random = np.random.default_rng(2)
    embeddings = random.normal(size=(ITEMS, WIDTH)) * [2.0, 1.0, 0.5, 0.1, 1.0]
    log_shares = random.normal(size=ITEMS) * 1.5
    liked = np.zeros((6, ITEMS))
    for user, number in enumerate((1, 3, 12, 30)):
        liked[user, random.choice(ITEMS, number, replace=False)] = 1
    liked[4, :10] = random.random(10)
    return embeddings, log_shares, liked


def optimum(embeddings, log_shares, liked):
    def loss(taste):
        utilities = embeddings @ taste + log_shares
        return liked.sum() * logsumexp(utilities) - liked @ embeddings @ taste + taste @ taste / 2

    return minimize(loss, np.zeros(embeddings.shape[1]), method="BFGS", options={"gtol": 1e-9}).x


def test_they_are_those_that_a_general_optimiser_finds(given):
    """Those of a user without items are the popularities."""
    embeddings, log_shares, liked = given
    tables = torch.from_numpy(embeddings), torch.from_numpy(log_shares)
    found = LogLinear(*tables, tolerance=1e-5).scores(torch.from_numpy(liked)).numpy()
    for user, own in enumerate(liked):
        expected = embeddings @ optimum(embeddings, log_shares, own) + log_shares
        difference = found[user] - expected
        np.testing.assert_allclose(difference - difference.mean(), 0, atol=2e-3)
    np.testing.assert_allclose(found[5], log_shares - logsumexp(log_shares), atol=1e-9)


# Public embeddings are factors of their documented kernel.

TAGS = [["x"], ["x", "y"], ["y", "z"], [], ["z"]]
ERAS = [["1"], ["1", "2"], ["3"], ["4"], ["2", "3"]]


@pytest.fixture(scope="module")
def features():
    return FeatureTable(5, (Feature.multiple("tags", TAGS), Feature.multiple("eras", ERAS)))


def by_hand(length_scale):
    def covariance(one, other):
        apart = np.subtract.outer(np.array(one, int), np.array(other, int))
        return np.exp(-(apart**2) / 2 / length_scale**2).mean()

    return np.array([[covariance(one, other) for other in ERAS] for one in ERAS])


def test_the_kernel_is_that_of_categories_ordered_ones_and_their_products(features):
    """Common categories count, neighbouring ordered ones are alike, at half the length in
    products."""
    common = np.array([[len(set(one) & set(other)) for other in TAGS] for one in TAGS])
    unit = np.array([max(len(one), 1) ** 0.5 for one in TAGS])
    products = 0.3 * common / np.outer(unit, unit) * by_hand(0.75)
    expected = 0.7 * common + 0.5 * by_hand(1.5) + products
    config = PublicPriorConfig(ordered={"eras": 1.5}, feature_variance=0.7)
    found = feature_embeddings(features, config)
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-5)


def test_words_that_some_items_share_count(monkeypatch):
    titles = ["The Toy Story", "Toy Story II", "Toy Box", "the box", "the end"]
    table = FeatureTable(5, texts=(Feature.words("title", titles),))
    found = feature_embeddings(table, PublicPriorConfig())
    counted = [{"the", "toy", "story"}, {"toy", "story"}, {"toy", "box"}, {"the", "box"}, {"the"}]
    common = [[len(one & other) for other in counted] for one in counted]
    np.testing.assert_allclose(found @ found.T, 0.3 * np.array(common), atol=1e-12)
    monkeypatch.setattr("fedrec.sums.fold_in._WORD_ITEMS", (2, 2))
    fewer = feature_embeddings(table, PublicPriorConfig())
    assert fewer.shape == (5, 2), "of story and box; ii and end are of one item"


def test_vectors_have_a_linear_kernel():
    """Less their mean, of mean squared length 1; an item without one is where the mean is."""
    values = np.array([[1.0, 2], [3, -4], [0, 0], [5, 5], [2, 0]], dtype=np.float32)
    known = np.array([True, True, False, True, True])
    table = FeatureTable(5, vectors=(Vectors("cover", values, known),))
    found = feature_embeddings(table, PublicPriorConfig(vector_variance=0.4))
    own = values[known] - values[known].mean(0)
    expected = np.zeros((5, 5))
    expected[np.ix_(known, known)] = 0.4 * own @ own.T / np.mean([row @ row for row in own])
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-6)


def test_an_unknown_feature_is_named(features):
    with pytest.raises(ExperimentError, match=r"(?s)unknown item feature years.*eras, tags"):
        feature_embeddings(features, PublicPriorConfig(ordered={"years": 1.0}))


RESIDUAL_ITEMS = 150


@pytest.fixture(scope="module")
def planted():
    """Profile, public embeddings, hidden ones, and the Gram matrix without noise."""
    random = np.random.default_rng(1)
    profile = torch.from_numpy(np.sort(random.gamma(2.0, 8.0, RESIDUAL_ITEMS))[::-1] + 3)
    public, hidden = (torch.from_numpy(random.normal(size=(RESIDUAL_ITEMS, 2))) for _ in range(2))
    # Popularity and public features are independent of the hidden ones.
    known = torch.linalg.qr(torch.cat([profile[:, None], profile[:, None] * public], 1))[0]
    weighted = profile[:, None] * hidden
    hidden = (weighted - known @ (known.T @ weighted)) / profile[:, None]
    kernel = 1 + public @ public.T + hidden @ hidden.T
    return profile, public, hidden, torch.outer(profile, profile) * kernel


def noise(std, items=RESIDUAL_ITEMS, seed=3):
    """Symmetric, of one standard deviation on the diagonal and a root of two less beside it."""
    random = np.random.default_rng(seed)
    upper = np.triu(random.normal(size=(items, items)) * std / np.sqrt(2), 1)
    return torch.from_numpy(upper + upper.T + np.diag(random.normal(size=items) * std))


def learned(planted, gram, edge, damping=0.0, factors=2):
    profile, public = planted[:2]
    return _learned_embeddings(gram, profile, public, edge=edge, factors=factors, damping=damping)


@pytest.mark.parametrize(("std", "factors", "least"), [(0.0, 2, 0.98), (100.0, 50, 0.9)])
def test_planted_embeddings_are_found_if_noise_is_below_them(planted, std, factors, least):
    profile, _, hidden, gram = planted
    edge = std * (2 * RESIDUAL_ITEMS) ** 0.5
    found = profile[:, None] * learned(planted, gram + noise(std), edge, factors=factors)
    expected = profile[:, None] * hidden
    assert found.shape[1] == 2
    above = np.triu_indices(RESIDUAL_ITEMS, 1)
    pair = ((one @ one.T).numpy()[above] for one in (found, expected))
    assert np.corrcoef(*pair)[0, 1] > least


def test_of_noise_alone_nothing_is_learned(planted):
    profile, public, _, _ = planted
    explained = torch.outer(profile, profile) * (1 + public @ public.T)
    found = learned(planted, explained + noise(100.0), 1.1 * 100.0 * (2 * RESIDUAL_ITEMS) ** 0.5)
    assert found.shape == (RESIDUAL_ITEMS, 0)


def test_damping_shrinks_rare_items_most(planted):
    profile, gram = planted[0], planted[3]
    free, damped = (learned(planted, gram, 0.0, damping=one) for one in (0.0, 1.0))
    expected = profile**2 / (profile**2 + profile.mean() ** 2)
    np.testing.assert_allclose((damped / free)[:, 0], expected, rtol=1e-9)


def test_the_profile_is_positive_however_large_the_noise():
    random = np.random.default_rng(5)
    popularity = torch.from_numpy(random.gamma(2.0, 1.0, RESIDUAL_ITEMS))
    gram = torch.outer(popularity, popularity)
    assert bool((_expected_profile(-gram, popularity) > 0).all())


@pytest.mark.parametrize("std", [2.0, 40.0])
def test_counts_are_means_of_their_posterior(std):
    noisy = np.array([-90.0, -3.0, 0.0, 5.0, 60.0, 300.0])
    mean = noisy.mean()

    def moment(power, seen):
        top = max(0.0, seen - std**2 / mean)
        ends = max(0.0, top - 12 * std), top + 12 * std

        def log(count):
            return norm.logpdf(seen, count, std) - count / mean

        return quad(lambda n: n**power * np.exp(log(n) - log(top)), *ends, limit=200)[0]

    expected = [moment(1, seen) / moment(0, seen) for seen in noisy]
    np.testing.assert_allclose(expected_counts(noisy, std), expected, rtol=1e-4)


# Denoising with public features: exact without noise, and closer to the true matrix with noise.

SUBSPACE_ITEMS = 120


@pytest.fixture(scope="module")
def features_of_items():
    numbers = range(SUBSPACE_ITEMS)
    kinds = Feature.single("kind", ["abcd"[n % 4] for n in numbers])
    tags = Feature.multiple("tags", [["x"] * (n % 3 > 0) + ["y"] * (n % 5 > 2) for n in numbers])
    return FeatureTable(SUBSPACE_ITEMS, (kinds, tags))


@pytest.fixture(scope="module")
def truth(features_of_items):
    """A Gram matrix of popularity times features, plus a small unrelated part."""
    random = np.random.default_rng(0)
    popularity = np.sort(random.gamma(1.0, 3.0, SUBSPACE_ITEMS))[::-1] + 0.2
    directions = public_directions(features_of_items)
    mixed = popularity[:, None] * (directions @ random.normal(size=(directions.shape[1], 5)))
    other = popularity[:, None] * random.normal(size=(SUBSPACE_ITEMS, 2))
    gram = mixed @ mixed.T + 0.3 * other @ other.T
    return torch.from_numpy(gram), basis_of(directions, popularity)


def test_the_basis_spans_the_directions_and_without_noise_the_matrix_comes_back(truth):
    gram, basis = truth
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1]).double())
    assert basis.shape[1] == 6  # kinds add up to the constant
    torch.testing.assert_close(denoised_within(gram, 0.0, basis), gram)
    torch.testing.assert_close(denoised_within(gram, 1e-6, basis), gram, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("std", [3.0, 10.0, 40.0])
def test_with_noise_it_is_nearer_to_the_truth_than_cutting_at_the_edge(truth, std):
    gram, basis = truth
    errors = {"within": [], "cut": [], "noisy": []}
    for seed in range(4):
        noisy = gram + noise(std, SUBSPACE_ITEMS, seed)
        values, vectors = torch.linalg.eigh(noisy)
        kept = values > std * (2 * SUBSPACE_ITEMS) ** 0.5
        cut = (vectors[:, kept] * values[kept]) @ vectors[:, kept].T
        found = denoised_within(noisy, std, basis)
        assert torch.linalg.eigvalsh(found).min() > -1e-6 * values.max()
        for name, matrix in (("within", found), ("cut", cut), ("noisy", noisy)):
            errors[name].append(float((matrix - gram).norm()))
    means = {name: np.mean(values) for name, values in errors.items()}
    assert means["within"] < means["cut"] < means["noisy"]


def test_the_baseline_takes_features_and_refuses_to_do_without(features_of_items):
    liked = drawn_histories(80, SUBSPACE_ITEMS, 12)
    settings = {"items": 60, "model": "ease", "public_features": True, "ridge": 0.3, "seed": 0}
    with pytest.raises(ExperimentError, match="no public features"):
        fitted("dp-gram", liked, **settings)
    liked = replace(liked, item_features=features_of_items)

    def both(**more):
        systems = [
            fitted("dp-gram", liked, **{**settings, **more, "public_features": public})
            for public in (True, False)
        ]
        return systems, [system.scores(liked) for system in systems]

    (with_features, plain), scores = both()
    assert all(table.isfinite().all() for table in scores)
    assert spent(with_features, 80).epsilon == spent(plain, 80).epsilon <= 5.0
    _, exact = both(noise=False, regularisation=50.0, clip_norm=1e9)
    torch.testing.assert_close(*exact)


def counted(offsets, items, size, window, decay):
    """T by two loops."""
    total = np.zeros((size, size))
    for start, stop in itertools.pairwise(offsets):
        own = items[start:stop]
        for i, earlier in enumerate(own):
            for distance, later in enumerate(own[i + 1 : i + 1 + window]):
                if earlier != later:
                    total[earlier, later] += decay**distance
    return total


def sequences(seed, users=30, size=12):
    random = np.random.default_rng(seed)
    counts = random.integers(0, 15, users)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return offsets, random.integers(0, size, offsets[-1]), size


@pytest.mark.parametrize(("window", "decay"), [(1, 1.0), (3, 0.5), (50, 0.9)])
def test_as_by_loops(window, decay):
    offsets, items, size = sequences(0)
    found = transitions(offsets, items, size, RecencyConfig(window=window, decay=decay))
    total = np.zeros((size, size))
    np.add.at(total, (found.first, found.second), found.weights)
    np.testing.assert_allclose(total, counted(offsets, items, size, window, decay), atol=1e-12)
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(found.offsets))
    pairs = set(zip(users, found.first, found.second, strict=True))
    assert len(pairs) == len(found.first)  # each pair once per user


def test_weights_are_smoothed_and_noise_below_zero_is_left_out():
    total = torch.tensor([[0.0, 4.0], [-3.0, 0.0]], dtype=torch.float64)
    expected = pytest.approx(4 / 24 / 54**0.3)
    assert transition_weights(total).tolist() == [[0.0, expected], [0.0, 0.0]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_baseline_scores_what_follows_in_time(shuffled):
    offsets, items, size = sequences(1)
    times = np.arange(len(items))
    histories = Histories(size, offsets, items)
    if shuffled:
        random = np.random.default_rng(5)
        own = (np.arange(a, b) for a, b in itertools.pairwise(offsets))
        order = np.concatenate([random.permutation(rows) for rows in own])
        histories = Histories(size, offsets, items[order], times=times[order])
    baseline = TransitionsBaseline(TransitionsBaseline.Config(window=4, decay=0.7))
    baseline.fit(histories)
    got = baseline.scores(histories)
    total = torch.from_numpy(counted(offsets, items, size, 4, 0.7))
    weights = transition_weights(total)
    expected = np.zeros((len(offsets) - 1, size))
    for user, (start, stop) in enumerate(itertools.pairwise(offsets)):
        last = {}
        for distance, item in enumerate(items[start:stop][::-1][:4]):
            last.setdefault(item, 0.7**distance)
        for item, weight in last.items():
            expected[user] += weight * weights[item].numpy()
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-7)
