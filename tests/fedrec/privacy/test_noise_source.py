# SPDX-License-Identifier: Apache-2.0
"""The noise: its scale to well below one per cent, its shape, that it is on every coordinate, and
that it never repeats."""

import math

import numpy as np
import pytest
from scipy import stats

from fedrec.errors import ExperimentError
from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.privacy.noise_source import (
    Reproducible,
    Secure,
    noisy_count,
    secure_fixed_size,
    secure_poisson,
    source_of,
)

SIZE = 400_000
SOURCES = [Reproducible(7), Secure()]
KINDS = {"gaussian": (stats.norm, 1.0, 2.0), "laplace": (stats.laplace, math.sqrt(2), 5.0)}


def add_noise(arrays, scale, source, *address, mechanism="gaussian"):
    return mechanism_of(mechanism).add_noise(arrays, scale, source, *address)


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


def test_reproducible_noise_repeats_and_secure_noise_does_not():
    assert (draw(Reproducible(3), size=100) == draw(Reproducible(3), size=100)).all()
    assert (draw(Reproducible(3), size=100) != draw(Reproducible(4), size=100)).all()
    assert (draw(Secure(), size=100) != draw(Secure(), size=100)).all()
    assert isinstance(source_of("secure", 1), Secure)
    assert isinstance(source_of("reproducible", 1), Reproducible)


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


def test_no_noise_is_no_noise():
    exact = {"x": np.array([1.0, 2.5])}
    assert (add_noise(exact, 0.0, Secure(), 1)["x"] == exact["x"]).all()


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


def test_a_count_gets_noise_of_its_standard_deviation():
    source = Reproducible(11)
    counts = np.array([noisy_count(40.0, 2.0, source, number) for number in range(4000)])
    assert counts.mean() == pytest.approx(40.0, abs=5 * 2 / math.sqrt(4000))
    assert counts.std() == pytest.approx(2.0, rel=5 / math.sqrt(2 * 4000))
    beside = [source.gaussian(1, "x", number)[0] for number in range(4000)]
    assert abs(np.corrcoef(counts, beside)[0, 1]) < 5 / math.sqrt(4000)


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
