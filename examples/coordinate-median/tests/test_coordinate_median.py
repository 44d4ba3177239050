# SPDX-License-Identifier: Apache-2.0
"""The median against numpy's, its contract, and that it stands malicious clients where a mean does
not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from coordinate_median.step import Poisoned
from coordinate_median.strategy import CoordinateMedian, CoordinateMedianConfig

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.protocol.sparse_update import SparseUpdate
from fedrec.testing import StepContract, StrategyContract
from simulations import runner

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
    component = CoordinateMedian


class TestWholeCohortContract(StrategyContract):
    component = CoordinateMedian
    settings = {"over": "cohort", "server-lr": 0.5}


class TestPoisonedContract(StepContract):
    component = Poisoned
    settings = {"share": 0.5, "epochs": 1}


def strategy(**settings):
    return CoordinateMedian(CoordinateMedianConfig(**settings), None, {"name": "sgd"})


def test_dense_medians_are_numpys():
    random = np.random.default_rng(0)
    changes = [random.standard_normal((4, 3)) for _ in range(5)]
    assert np.array_equal(strategy().median(changes, np.zeros((4, 3))), np.median(changes, axis=0))


def test_rows_take_the_median_of_the_clients_that_touched_them():
    shape = (6, 2)
    table = np.zeros((6, 2))
    touched = [([0, 2], 1.0), ([0, 5], 9.0), ([0, 2], 2.0), ([2, 5], 4.0)]
    changes = [
        SparseUpdate(shape, np.array(rows), np.full((2, 2), value)) for rows, value in touched
    ]
    found = strategy(least=3).median(changes, table)
    # 1 9 2, then 1 2 4; two at row 5 are too few
    assert found.dense(table)[:, 0].tolist() == [2, 0, 2, 0, 0, 0]
    found = strategy(least=2).median(changes, table)
    assert found.dense(table)[:, 1].tolist() == [2, 0, 2, 0, 0, 6.5]
    whole = np.median([change.dense(table) for change in changes], axis=0)
    assert np.array_equal(strategy(over="cohort").median(changes, table).dense(table), whole)


def test_a_median_stays_within_the_honest_updates_for_any_minority():
    random = np.random.default_rng(1)
    honest = [random.standard_normal((5, 2)) for _ in range(7)]
    for bad in (1e30, -1e30):
        found = strategy().median([*honest, *[np.full((5, 2), bad)] * 3], np.zeros((5, 2)))
        assert (found <= np.max(honest, axis=0)).all() and (found >= np.min(honest, axis=0)).all()


def test_privacy_is_refused(tmp_path):
    private = {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0}}
    table = {**load(EXPERIMENT, SMALL).table(), **private}
    with pytest.raises(ExperimentError, match="'CoordinateMedian' cannot be made private"):
        runner.run(table, output=tmp_path / "run")


def test_malicious_clients_hurt_the_mean_and_not_the_median(tmp_path):
    """The loss of the honest majority, on their own data, after a few rounds."""
    losses = {}
    for name in ("coordinate_median.strategy:CoordinateMedian", "reptile"):
        for share in (0.0, 0.2):
            overrides = [
                *SMALL,
                f"strategy.name={name}",
                f"step.share={share}",
                "evaluation.fine-tune.epochs=0",
            ]
            result = runner.run(EXPERIMENT, overrides, output=tmp_path / f"{len(losses)}")
            losses[name[:7], share] = float(result.rounds["loss"].tail(3).mean())
    assert losses["reptile", 0.2] > 1.4 * losses["reptile", 0.0]
    assert losses["coordin", 0.2] < 1.2 * losses["coordin", 0.0]
