# SPDX-License-Identifier: Apache-2.0
"""Factorisations against jax-privacy 2.0.0 (figures of `write_jax_privacy.py`) and dense
matrices."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import sqrtm, toeplitz

from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.mechanisms.banded import (
    errors,
    inverse,
    is_decreasing,
    norms,
    optimal_bands,
    prefix_sums,
    sensitivity,
    square_root,
)
from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.rng import Reproducible

JAX = json.loads(Path(__file__).with_name("jax_privacy.json").read_text(encoding="utf-8"))
STRATEGIES = [
    *(case[kind] for case in JAX["banded"] for kind in ("square root", "optimised")),
    *JAX["buffered"],
]


def lower(column, rounds):
    return toeplitz(np.pad(column, (0, rounds))[:rounds], np.zeros(rounds))


@pytest.mark.parametrize("case", JAX["banded"], ids=lambda c: f"{c['bands']}")
def test_coefficients_are_those_of_jax_privacy(case):
    root = case["square root"]
    assert square_root(case["bands"]) == pytest.approx(root["coefficients"], rel=1e-12)
    best = case["optimised"]
    found = optimal_bands(case["bands"], best["rounds"])
    assert found == pytest.approx(best["coefficients"], abs=1e-6)


@pytest.mark.parametrize("case", STRATEGIES, ids=lambda c: f"{len(c['coefficients'])}")
def test_sensitivities_and_errors_are_those_of_jax_privacy(case):
    column = np.array(case["coefficients"])
    rounds = case["rounds"]
    for schedule, expected in case["sensitivities"].items():
        separation, most = schedule.removeprefix("banded ").split()
        known = Scheduled(1, int(separation), None if most == "None" else int(most))
        assert sensitivity(column, rounds, known) == pytest.approx(expected, rel=1e-6)
    assert errors(column, prefix_sums(rounds)) == pytest.approx(case["errors"], rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_square_root_squared_is_the_workload(momentum):
    workload = lower(prefix_sums(40, momentum), 40)
    root = square_root(40, momentum)
    assert np.allclose(lower(root, 40) @ lower(root, 40), workload, rtol=1e-12)
    assert np.allclose(lower(root, 40)[:5, :5], sqrtm(workload[:5, :5]).real, rtol=1e-5)
    assert is_decreasing(root)
    server = np.zeros(40)
    speed = 0.0
    for round_number in range(40):  # a server with momentum that gets 1 in the first round alone
        speed = momentum * speed + (round_number == 0)
        server[round_number] = speed + (server[round_number - 1] if round_number else 0.0)
    assert np.allclose(prefix_sums(40, momentum), server, rtol=1e-12)


@pytest.mark.parametrize(("bands", "momentum"), [(1, 0.0), (5, 0.0), (5, 0.8), (30, 0.5)])
def test_inverse_norms_and_errors_are_those_of_dense_matrices(bands, momentum):
    column = square_root(bands, momentum)
    c = lower(column, 30)
    assert np.allclose(lower(inverse(column, 30), 30), np.linalg.inv(c), atol=1e-12)
    noise = prefix_sums(30, momentum)
    variances = np.square(lower(noise, 30) @ np.linalg.inv(c)).sum(axis=1)
    assert errors(column, noise) == pytest.approx(variances, rel=1e-10)
    columns = np.linalg.norm(c, axis=0)[::bands]
    assert norms(column, 30, Scheduled(1, bands)) == pytest.approx(columns, rel=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_other_coefficients_have_less_noise(momentum):
    """Of a thousand in their neighbourhood, at the same cost."""
    random = np.random.default_rng(0)
    workload = prefix_sums(50, momentum)

    def loss(column):
        return float(errors(column, workload).mean() * column @ column)

    best = np.array(optimal_bands(6, 50, momentum))
    others = [best + random.normal(0, 10.0**-k, 6) for k in (1, 2, 3, 4) for _ in range(250)]
    assert loss(best) < min(map(loss, others)) and loss(best) < loss(square_root(6, momentum))


def test_noise_and_running_sums_are_those_of_the_dense_matrix():
    mechanism = mechanism_of({"name": "banded", "bands": 4, "optimised-for": 30, "momentum": 0.9})
    source = Reproducible(3)
    white = np.array([source.gaussian(50, "x", number) for number in range(1, 31)])
    memory: dict[str, np.ndarray] = {}
    drawn = [mechanism.draw("x", 50, memory, source, number) for number in range(1, 31)]
    inverted = np.linalg.inv(lower(mechanism.column(30), 30))
    assert np.allclose(drawn, inverted @ white, rtol=0, atol=1e-11)
    assert sum(value.shape == (50,) for value in memory.values()) == mechanism.kept
    assert np.allclose(lower(mechanism.mixing(30), 30), inverted, atol=1e-12)
    workload = lower(prefix_sums(30, mechanism.momentum), 30) @ inverted
    rms = np.sqrt(np.square(workload).sum(axis=1).mean())
    assert mechanism.running_sums(30) == pytest.approx(rms, rel=1e-10)
