# SPDX-License-Identifier: Apache-2.0
"""Factorisations against jax-privacy 2.0.0 (figures of `write_jax_privacy.py`) and dense
matrices."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import toeplitz

from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.mechanisms.banded import inverse, norms, sensitivity, square_root

JAX = json.loads(Path(__file__).with_name("jax_privacy.json").read_text(encoding="utf-8"))
STRATEGIES = [
    *(case[kind] for case in JAX["banded"] for kind in ("square root", "optimised")),
    *JAX["buffered"],
]


def lower(column, rounds):
    return toeplitz(np.pad(column, (0, rounds))[:rounds], np.zeros(rounds))


@pytest.mark.parametrize("case", JAX["banded"], ids=lambda c: f"{c['bands']}")
def test_coefficients_are_those_of_jax_privacy(case):
    expected = case["square root"]["coefficients"]
    assert square_root(case["bands"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", STRATEGIES, ids=lambda c: f"{len(c['coefficients'])}")
def test_sensitivities_are_those_of_jax_privacy(case):
    column = np.array(case["coefficients"])
    rounds = case["rounds"]
    for schedule, expected in case["sensitivities"].items():
        separation, most = schedule.removeprefix("banded ").split()
        known = Scheduled(1, int(separation), None if most == "None" else int(most))
        assert sensitivity(column, rounds, known) == pytest.approx(expected, rel=1e-6)


def test_the_square_root_squared_is_the_workload():
    root = lower(square_root(40), 40)
    assert np.allclose(root @ root, np.tril(np.ones((40, 40))), rtol=1e-12)
    assert (np.diff(square_root(1000)) < 0).all()


@pytest.mark.parametrize("bands", [1, 5, 30])
def test_inverse_and_norms_are_those_of_dense_matrices(bands):
    column = square_root(bands)
    c = lower(column, 30)
    assert np.allclose(lower(inverse(column, 30), 30), np.linalg.inv(c), atol=1e-12)
    columns = np.linalg.norm(c, axis=0)[::bands]
    assert norms(column, 30, Scheduled(1, bands)) == pytest.approx(columns, rel=1e-12)
