# SPDX-License-Identifier: Apache-2.0
"""Clipping and noise, also of single users."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from scipy.integrate import quad
from scipy.stats import norm

from fedrec.errors import ExperimentError
from fedrec.privacy import mechanisms
from fedrec.privacy.accounting.rdp import gdp_delta, gdp_epsilon, gdp_parameter
from fedrec.privacy.clipping import Clip
from fedrec.privacy.optimal_clip import _clip_error, optimal_clip
from fedrec.privacy.personal import PersonalNoise, PriorsConfig
from fedrec.rng import Reproducible, Secure, secure_fixed_size, secure_poisson

# Clipping: the table of edge cases, and exact sensitivity against adversarial updates.


def update(*values, dtype=np.float32):
    """An update of two parameters that hold the values in turn."""
    values = np.array(values, dtype=dtype)
    return {"table": values[: len(values) // 2].reshape(-1, 1), "bias": values[len(values) // 2 :]}


def flat(found):
    return np.concatenate([value.ravel() for value in found.values()])


# clip norm 5 in L2 and 7 in L1, so that (3, 4) is just not clipped in either
CASES = [
    ((3.0, 4.0), (3.0, 4.0)),
    ((0.0, 0.0), (0.0, 0.0)),
    ((30.0, 40.0), (3.0, 4.0)),
    ((3e30, 4e30), (3.0, 4.0)),
    ((3e-42, 4e-42), (3e-42, 4e-42)),
    ((math.nan, 1.0), (0.0, 0.0)),
    ((math.inf, 1.0), (0.0, 0.0)),
    ((-math.inf, math.nan), (0.0, 0.0)),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=str)
@pytest.mark.parametrize(("norm", "order"), [(5.0, 2), (7.0, 1)], ids=["l2", "l1"])
def test_edge_cases(given, expected, norm, order):
    clip, before = Clip(norm, order), update(*given)
    found = clip(before)
    assert found["table"].shape == (1, 1)
    assert all(value.dtype == np.float32 for value in found.values())
    assert flat(found) == pytest.approx(np.array(expected, dtype=np.float32), rel=2e-6, abs=0)
    assert np.linalg.norm(flat(found).astype(np.float64), ord=order) <= norm
    assert flat(before) == pytest.approx(np.array(given, dtype=np.float32), nan_ok=True), (
        "the given update changed"
    )


def test_rounded_to_float32_the_norm_stays_within_the_bound():
    random = np.random.default_rng(0)
    for size in (3, 1000, 237_184):
        for order in (1, 2):
            clipped = Clip(0.1, order)({"x": random.standard_normal(size).astype(np.float32)})["x"]
            exact = np.linalg.norm(clipped.astype(np.float64), ord=order)
            assert 0.1 * (1 - 3e-6) <= exact <= 0.1


@pytest.mark.parametrize("order", [1, 2])
def test_no_replacement_moves_the_sum_beyond_the_sensitivity(order):
    clip, random = Clip(2.0, order), np.random.default_rng(1)
    others = sum(
        flat(clip(update(*random.standard_normal(6) * 10))).astype(np.float64) for _ in range(4)
    )
    axis = np.eye(6)[0]
    extremes = [
        axis * 1e20,
        -axis * 1e20,
        np.full(6, math.nan),
        np.full(6, math.inf),
        np.zeros(6),
        *random.standard_normal((9, 6)),
    ]
    sums = [others + flat(clip(update(*x))) for x in extremes]
    moved = max(np.linalg.norm(one - other, ord=order) for one in sums for other in sums)
    assert moved <= clip.sensitivity("replace-one") == 4.0
    assert moved == pytest.approx(4.0, rel=1e-5)
    assert (
        max(np.linalg.norm(one - others, ord=order) for one in sums)
        <= clip.sensitivity("add-remove")
        == 2.0
    )


@pytest.mark.parametrize(
    ("norm", "order"), [(0.0, 2), (-1.0, 2), (math.inf, 2), (math.nan, 2), (1.0, 3)]
)
def test_clips_without_a_bound_are_refused(norm, order):
    with pytest.raises(ExperimentError, match="invalid clip"):
        Clip(norm, order)


# Equation 20 and algorithm 2 of DP-VAE against loops, Monte Carlo, and a search of all norms.


def gradients(count, width, seed=0):
    random = np.random.default_rng(seed)
    return torch.from_numpy(
        random.standard_normal((count, width)) * random.exponential(2, (count, 1))
    )


def by_hand(bound, rows, multiplier):
    random = np.random.default_rng(1)
    noise = (
        np.abs(random.normal(0, multiplier * bound, (200_000, rows.shape[1]))).sum(1).mean()
        if bound
        else 0.0
    )
    clipped = [row * min(1, bound / np.linalg.norm(row)) for row in rows]
    mean = sum(clipped) / len(clipped)
    terms = [np.abs(mean - own).sum() for own in clipped]
    terms = [
        t + np.abs(row).sum() * max(0, 1 - bound / np.linalg.norm(row))
        for t, row in zip(terms, rows, strict=True)
    ]
    return noise + sum(terms) / len(rows)


@pytest.mark.parametrize("bound", [0.0, 0.5, 2.0, 50.0])
def test_the_error_is_that_of_equation_20(bound):
    rows = gradients(5, 3)
    assert _clip_error(bound, rows, 0.4) == pytest.approx(
        by_hand(bound, rows.numpy(), 0.4), rel=5e-3
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("multiplier", [0.0, 0.1, 0.5, 5.0])
def test_the_search_finds_a_norm_that_its_neighbours_do_not_beat(count, multiplier):
    rows = gradients(count, 4, seed=count)
    norms = sorted(rows.norm(dim=1).tolist())
    found = norms.index(pytest.approx(optimal_clip(rows, multiplier)))
    errors = [_clip_error(norm, rows, multiplier) for norm in norms]
    assert errors[found] <= min(errors[max(0, found - 1) : found + 2]) + 1e-12


# The noise: its scale to well below one per cent, its shape, that it is on every coordinate, and
# that it never repeats.

SIZE = 400_000
SOURCES = [Reproducible(7), Secure()]
KINDS = {"gaussian": (stats.norm, 1.0, 2.0), "laplace": (stats.laplace, math.sqrt(2), 5.0)}


def add_noise(arrays, scale, source, *address, mechanism="gaussian"):
    return mechanisms.add_noise(mechanisms.mechanism_of(mechanism), arrays, scale, source, *address)


def draw(source, mechanism="gaussian", scale=3.0, size=SIZE, address=(1,)):
    noisy = add_noise({"x": np.zeros(size)}, scale, source, *address, mechanism=mechanism)
    return noisy["x"].astype(np.float64)


def accepts(sample, mechanism, scale):
    """Check the sample's variance against the scale, within five standard errors, far below 1% of
    the scale."""
    _, std, fourth = KINDS[mechanism]
    error = math.sqrt((fourth if mechanism == "laplace" else 2.0) / len(sample))
    return abs(np.mean((sample / (scale * std)) ** 2) - 1) < 5 * error


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=["reproducible", "secure"])
@pytest.mark.parametrize("mechanism", KINDS)
def test_scale_and_shape(source, mechanism):
    noise = draw(source, mechanism)
    assert accepts(noise, mechanism, 3.0)
    if mechanism == "gaussian":  # the test would detect one per cent
        assert not accepts(noise * 1.012, mechanism, 3.0)
        assert not accepts(noise * 0.988, mechanism, 3.0)
    else:
        assert not accepts(noise * 1.02, mechanism, 3.0)
        assert not accepts(noise * 0.98, mechanism, 3.0)
    distribution = KINDS[mechanism][0]
    # the secure source has no seed: each of these fails by chance in one run of a million
    assert stats.kstest(noise / 3.0, distribution.cdf).pvalue > 1e-6
    assert stats.kstest(noise / 3.0 * 1.04, distribution.cdf).pvalue < 1e-6
    assert abs(noise.mean()) < 5 * 3.0 * KINDS[mechanism][1] / math.sqrt(SIZE)


@pytest.mark.parametrize("source", SOURCES, ids=["reproducible", "secure"])
@pytest.mark.parametrize("mechanism", KINDS)
def test_rounds_parameters_and_clients_have_noise_of_their_own(source, mechanism):
    size = 20_000
    arrays = {"a": np.zeros(size), "b": np.zeros(size)}
    first, second = (
        add_noise(arrays, 1.0, source, number, mechanism=mechanism) for number in (1, 2)
    )
    client = add_noise(arrays, 1.0, source, 1, 5, mechanism=mechanism)
    all_noise = [first["a"], first["b"], second["a"], second["b"], client["a"], client["b"]]
    correlation = np.corrcoef(all_noise) - np.eye(6)
    assert np.abs(correlation).max() < 6 / math.sqrt(size)
    halves = np.corrcoef(first["a"][::2], first["a"][1::2])[0, 1]
    assert abs(halves) < 6 / math.sqrt(size / 2)


@pytest.mark.parametrize("source", SOURCES, ids=["reproducible", "secure"])
def test_every_coordinate_gets_noise_on_top_of_its_value(source):
    arrays = {
        "table": np.zeros((50, 3)),
        "bias": np.full(4, 1000.0),
        "scalar": np.array(-5.0),
        "none": np.zeros((0, 2)),
    }
    found = add_noise(arrays, 0.01, source, 1)
    assert {name: value.shape for name, value in found.items()} == {
        name: v.shape for name, v in arrays.items()
    }
    assert all(value.dtype == np.float32 for value in found.values())
    assert (found["table"] != 0).all()
    assert np.abs(found["bias"] - 1000).max() < 0.1
    assert found["scalar"] != -5
    assert (arrays["table"] == 0).all()


@pytest.mark.parametrize("mechanism", KINDS)
def test_secure_noise_has_all_the_bits_of_float64(mechanism):
    """On a grid, or of float32, its low bits would be known, and with them those of the sum."""
    drawn = getattr(Secure(), mechanism)(50_000, "x", 1)
    assert drawn.dtype == np.float64 and len(np.unique(drawn)) == len(drawn)
    assert np.mean(drawn == drawn.astype(np.float32)) < 1e-3
    low = np.frexp(drawn)[0] * 2.0**40  # the first 40 bits; those after are not all zero
    assert np.mean(low == np.round(low)) < 0.01


class Given(Secure):
    """Draws these numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def gaussian(self, size, name, *address):
        return self.numbers

    laplace = gaussian


@pytest.mark.parametrize("mechanism", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.3, 700.0])
def test_noise_is_added_before_anything_is_rounded(mechanism, scale):
    """Sums that cancel their noise to float32 leave what float32 would lose, and only the result is
    rounded."""
    numbers = np.random.default_rng(4).standard_normal(1000)
    exact = -(scale * numbers).astype(np.float32).astype(np.float64)
    found = add_noise({"x": exact}, scale, Given(numbers), 1, mechanism=mechanism)["x"]
    left = exact + scale * numbers
    np.testing.assert_array_equal(found, left.astype(np.float32))
    assert np.mean(found != 0) > 0.99 and np.abs(left).max() < scale * 2.0**-20


@pytest.mark.parametrize(
    ("values", "scale", "address"),
    [
        ([math.nan], 1.0, (1,)),
        ([math.inf], 1.0, (1,)),
        ([0.0], -1.0, (1,)),
        ([0.0], math.nan, (1,)),
        ([0.0], 1.0, ()),
    ],
    ids=str,
)
def test_what_noise_cannot_hide_is_refused(values, scale, address):
    with pytest.raises(ExperimentError):
        add_noise({"x": np.array(values)}, scale, Reproducible(0), *address)


def test_secure_cohorts_have_their_size_and_are_uniform():
    clients = np.arange(100, 120)
    fixed = [secure_fixed_size(clients, 5) for _ in range(4000)]
    assert all(len(set(cohort)) == 5 and (np.diff(cohort) > 0).all() for cohort in fixed)
    drawn = np.bincount(np.concatenate(fixed) - 100, minlength=20)
    assert stats.chisquare(drawn).pvalue > 1e-5
    sizes = np.array([len(secure_poisson(clients, 0.25)) for _ in range(4000)])
    assert sizes.mean() == pytest.approx(5.0, abs=5 * math.sqrt(20 * 0.25 * 0.75 / 4000))
    assert sizes.var() == pytest.approx(20 * 0.25 * 0.75, rel=0.15)
    assert (secure_poisson(clients, 1.0) == clients).all()


# Personal budgets against reference values, scipy's quadrature of the hockey-stick divergence, and
# the RDP bound.


# Computed by another implementation: MovieLens-100K, delta 1 / 80,000, 30 uploads per user, nominal
# epsilon 0.5, 1 and 1.5.
TRUE = {"add-remove": (2.28, 5.05, 8.18), "replace-one": (5.05, 11.66, 19.65)}


@pytest.mark.parametrize("adjacency", TRUE)
def test_thirty_uploads_with_the_papers_noise_cost_far_more_than_stated(adjacency):
    for nominal, true in zip((0.5, 1.0, 1.5), TRUE[adjacency], strict=True):
        noise = PersonalNoise(budgets="equal", epsilon=nominal, delta=1 / 80_000)
        mu = math.sqrt(noise.cost(3, adjacency, 30))
        assert gdp_epsilon(mu, 1 / 80_000) == pytest.approx(true, abs=0.006)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 0.5), (0.7, 0.5), (3.0, 2.0), (8.0, 2.5)])
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(epsilon, mu):
    def excess(x):
        return max(0.0, norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x))

    start = epsilon / mu + mu / 2
    assert gdp_delta(epsilon, mu) == pytest.approx(
        quad(excess, start, start + 30, epsabs=1e-13)[0], rel=1e-6
    )


@pytest.mark.parametrize("mu", [0.05, 0.5, 3.0, 20.0])
def test_epsilon_inverts_delta_and_is_below_the_rdp_bound(mu):
    epsilon = gdp_epsilon(mu, 1e-5)
    assert gdp_delta(epsilon, mu) == pytest.approx(1e-5, rel=1e-4)
    assert gdp_parameter(epsilon, 1e-5) == pytest.approx(mu, rel=1e-6)
    orders = np.geomspace(1.01, 1e4, 4000)
    rdp = (
        orders * mu**2 / 2
        + np.log1p(-1 / orders)
        - (math.log(1e-5) + np.log(orders)) / (orders - 1)
    )
    assert epsilon <= rdp.min()


def test_budgets_are_drawn_from_zero_to_the_largest():
    noise, other = (PersonalNoise(epsilon=1.5, budget_seed=seed) for seed in (3, 4))
    drawn = [noise.requested(client) for client in range(2000)]
    # 4 standard deviations
    assert min(drawn) > 0 and max(drawn) <= 1.5 and abs(np.mean(drawn) - 0.75) < 0.04
    assert drawn[7] == noise.requested(7) != other.requested(7)


# Cost of an upload under each setting, against the composition of Gaussian releases.

ALL = {
    "plain": {},
    "priors": {"priors": PriorsConfig()},
    "quiet-priors": {"priors": PriorsConfig(noise=False)},
}


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("uploads", [1, 7])
def test_calibrated_noise_spends_the_budget_and_not_more(case, uploads):
    noise = PersonalNoise(epsilon=0.8, participations=uploads, **ALL[case])
    for client in range(4):
        mu = math.sqrt(noise.cost(client, "replace-one", uploads))
        assert gdp_epsilon(mu, noise.delta) == pytest.approx(noise.requested(client), rel=1e-9)


def test_cost_is_the_sum_over_everything_that_leaves_the_device():
    noise = PersonalNoise(budgets="equal", participations=3, **ALL["priors"])
    # Replacing a user moves the gradient by 2S, and the prior by its sensitivity, once.
    by_hand = 3 * (2 / noise.noise_multiplier(0)) ** 2
    assert noise.cost(0, "replace-one", 3) == pytest.approx(
        by_hand + 1 / noise.prior_multiplier(0) ** 2
    )
    assert noise.cost(0, "replace-one", 0) == 0
    assert noise.cost(0, "add-remove", 3) < noise.cost(0, "replace-one", 3)


def test_weights_are_precisions_of_the_noise():
    for participations in (None, 5):
        noise = PersonalNoise(epsilon=1.2, participations=participations)
        generous = PersonalNoise(epsilon=1.2, participations=participations, budgets="equal")
        for client in range(5):
            ratio = generous.noise_multiplier(client) / noise.noise_multiplier(client)
            assert noise.weight(client) == pytest.approx(ratio**2) and noise.weight(client) <= 1


def test_noise_on_priors_is_refused_where_it_would_be_drawn_anew():
    with pytest.raises(ValidationError):
        PersonalNoise.model_validate({"noise": "secure", "priors": {}})
    PersonalNoise.model_validate({"noise": "secure", "priors": {"noise": False}})
