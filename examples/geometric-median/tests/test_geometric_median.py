# SPDX-License-Identifier: Apache-2.0
"""The geometric median against scipy's minimum, the contracts, and that it stands malicious clients
where a mean does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from geometric_median.attack import SignFlip
from geometric_median.strategy import GeometricMedian, GeometricMedianConfig
from scipy.optimize import minimize

from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from simulations import runner
from simulations.contracts.base import PoisoningContract
from simulations.contracts.training import StrategyContract

EXPERIMENT = Path(__file__).resolve().parent.parent / "experiment.toml"
SMALL = [
    "rounds=6",
    "dataset.users=60",
    "dataset.items=40",
    "sampler.cohort=15",
    "step.epochs=2",
    "model.embedding=8",
    "model.hidden=[16]",
    "evaluation.baselines=[]",
]


class TestMedianContract(StrategyContract):
    component = GeometricMedian


class TestSignFlipContract(PoisoningContract):
    component = SignFlip


def median(updates, **settings):
    made = GeometricMedian(GeometricMedianConfig(**settings), None, {"name": "sgd"})
    return made.median(updates)


def test_it_is_the_point_with_the_smallest_sum_of_distances():
    random = np.random.default_rng(0)
    table = random.standard_normal((9, 3, 2))
    vector = random.standard_normal((9, 2)) * 3
    flat = np.concatenate([table.reshape(9, -1), vector], axis=1)
    start = flat.mean(axis=0)
    found = minimize(lambda v: np.linalg.norm(flat - v, axis=1).sum(), start, tol=1e-12).x
    got = median({"table": table, "vector": vector}, iterations=300)
    np.testing.assert_allclose(got["table"].ravel(), found[:6], atol=1e-4)
    np.testing.assert_allclose(got["vector"], found[6:], atol=1e-4)


def test_of_numbers_it_is_the_median():
    numbers = np.array([[1.0], [2.0], [4.0], [50.0], [3.0]])
    assert median({"own": numbers}, iterations=500)["own"] == pytest.approx([3.0], abs=1e-3)


def test_one_iteration_is_the_mean():
    numbers = np.array([[1.0, 5.0], [2.0, -1.0]])
    assert median({"own": numbers}, iterations=1)["own"].tolist() == [1.5, 2.0]


def test_a_minority_cannot_move_it_far():
    random = np.random.default_rng(1)
    honest = random.standard_normal((7, 10))
    bad = np.full((3, 10), 1e9)
    found = median({"own": np.concatenate([honest, bad])}, iterations=100)["own"]
    assert np.linalg.norm(found) < 10 * np.linalg.norm(honest, axis=1).max()


def test_privacy_is_refused(tmp_path):
    private = {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
    table = {**load(EXPERIMENT, SMALL).table(), **private}
    with pytest.raises(ExperimentError, match="'GeometricMedian' cannot be made private"):
        runner.run(table, output=tmp_path / "run")


def test_malicious_clients_hurt_the_mean_and_not_the_median(tmp_path):
    """The loss of the honest clients, on their own data, after a few rounds."""
    losses = {}
    for name in ("geometric_median.strategy:GeometricMedian", "reptile"):
        for share in (0.0, 0.25):
            overrides = [
                *SMALL,
                f"strategy.name={name}",
                f"adversary.share={share}",
                "evaluation.fine-tune.epochs=0",
            ]
            result = runner.run(EXPERIMENT, overrides, output=tmp_path / f"{len(losses)}")
            losses[name[:7], share] = float(result.rounds["loss"].tail(3).mean())
    assert losses["reptile", 0.25] > 1.4 * losses["reptile", 0.0]
    assert losses["geometr", 0.25] < 1.2 * losses["geometr", 0.0]
