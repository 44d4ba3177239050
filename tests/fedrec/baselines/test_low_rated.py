# SPDX-License-Identifier: Apache-2.0
"""Systems that count rated items that are not positive, against plain numpy on weighted rows; and
held-out rows are never among what they know."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.ials import CentralIalsConfig, solved
from fedrec.components.registry import BASELINE, resolve
from fedrec.data.features import FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.data.split import Partition
from fedrec.evaluation.central import CentralEvaluation
from fedrec.experiment.tables import EvaluationConfig

WEIGHT = 0.4
SYSTEMS = {
    "ease": {"regularisation": 5.0},
    "ials": {"factors": 4, "sweeps": 2},
    "puresvd": {"factors": 4},
    "item-knn": {"neighbours": 6},
    "user-knn": {"neighbours": 6},
    "dp-gram": {"noise": False, "items": 50, "clip-norm": 1e6, "count-clip": 1e6, "factors": 4},
    "dp-fold-in": {"noise": False, "items": 50, "clip-norm": 1e6, "count-clip": 1e6},
}


@pytest.fixture(scope="module")
def rated(liked, drawn) -> Histories:
    """The eighty users with other rated items, some of which they like, too."""
    return replace(liked, low_rated=drawn(80, 50, 9, seed=3))


@pytest.fixture(scope="module")
def rows(rated) -> np.ndarray:
    """Their rows, `[80, 50]`."""
    assert rated.low_rated is not None
    return np.maximum(rated.matrix().numpy(), WEIGHT * rated.low_rated.matrix().numpy())


def fitted(name, histories, low_rated=WEIGHT):
    baseline = resolve(BASELINE, name)
    model = baseline(baseline.Config.parse({**SYSTEMS[name], "low-rated": low_rated}))
    model.fit(histories)
    return model


def test_rows_hold_1_for_liked_items_and_the_weight_for_other_rated_ones(rated, rows):
    assert set(np.unique(rows)) == {0, np.float32(WEIGHT), 1}
    found = rated.csr(low_rated=WEIGHT)
    np.testing.assert_allclose(found.toarray(), rows)
    assert found.has_sorted_indices
    np.testing.assert_array_equal(rated.csr().toarray(), rated.matrix().numpy())
    table = torch.randn(50, 3, dtype=torch.float64)
    np.testing.assert_allclose(rated.sums(table, WEIGHT).numpy(), rows @ table.numpy(), rtol=1e-6)


def test_ease_is_the_closed_form_of_weighted_rows(rated, rows):
    inverse = np.linalg.inv(rows.T.astype(float) @ rows + 5 * np.eye(50))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    found = fitted("ease", rated).scores(rated).numpy()
    np.testing.assert_allclose(found, rows @ weights, atol=1e-5)


def test_puresvd_projects_weighted_rows(rated, rows):
    right = np.linalg.svd(rows.astype(float))[2][:4]
    np.testing.assert_allclose(
        fitted("puresvd", rated).scores(rated).numpy(), rows @ right.T @ right, atol=1e-5
    )


@pytest.mark.parametrize("metric", ["cosine", "pearson", "euclidean"])
def test_neighbours_are_those_of_weighted_rows(rated, rows, metric):
    """With all items, or users, as neighbours."""
    baselines = {name: resolve(BASELINE, name) for name in ("item-knn", "user-knn")}

    def scores(name):
        options = {"neighbours": 100, "metric": metric, "low-rated": WEIGHT}
        model = baselines[name](baselines[name].Config.parse(options))
        model.fit(rated)
        return model.scores(rated).numpy()

    np.testing.assert_allclose(scores("item-knn"), rows @ similar(rows.T, metric), atol=1e-4)
    np.testing.assert_allclose(scores("user-knn"), similar(rows, metric) @ rows, atol=1e-4)


def similar(rows: np.ndarray, metric: str) -> np.ndarray:
    """Positive similarities of different rows, by numpy."""
    rows = rows.astype(float)
    if metric == "euclidean":
        found = 1 / (1 + np.linalg.norm(rows[:, None] - rows[None], axis=2))
    elif metric == "pearson":
        found = np.nan_to_num(np.corrcoef(rows))
    else:
        norms = np.linalg.norm(rows, axis=1)
        found = rows @ rows.T / np.maximum(norms[:, None] * norms, 1e-12)
    np.fill_diagonal(found, 0)
    return np.maximum(found, 0)


@pytest.mark.parametrize("steps", [0, 5], ids=["exact", "cg"])
def test_factors_minimise_a_loss_in_which_a_pair_is_liked_in_part(rated, rows, steps):
    """A pair of weight r has r of the loss of a liked one and 1 - r of that of another."""
    config = CentralIalsConfig(
        factors=5, weight=3.0, regularisation=0.5, frequency_exponent=0.5, cg_steps=steps or 1
    )
    generator = torch.Generator().manual_seed(1)
    fixed = torch.randn(50, 5, dtype=torch.float64, generator=generator)
    start = torch.zeros(80, 5, dtype=torch.float64) if steps else None
    own = solved(rated.csr(np.float64, WEIGHT), fixed, config, start).requires_grad_()
    shares = torch.from_numpy(np.where(rows == 1, 1.0, np.where(rows > 0, WEIGHT, 0.0)))
    found = own @ fixed.T
    loss = (shares * 3.0 * (1 - found).square() + (1 - shares) * found.square()).sum()
    totals = (3.0 * shares + 1 - shares).sum(1)
    loss = loss + 0.5 * (totals**0.5 * own.square().sum(1)).sum()
    assert torch.autograd.grad(loss, own)[0].abs().max() < 1e-8


@pytest.mark.parametrize("name", SYSTEMS)
def test_weight_0_leaves_them_out_and_another_does_not(name, rated, liked):
    without = fitted(name, liked, 0).scores(liked)
    assert torch.equal(without, fitted(name, rated, 0).scores(rated))
    assert not torch.allclose(without, fitted(name, rated).scores(rated), atol=1e-3)


@pytest.mark.parametrize("name", SYSTEMS)
def test_held_out_rows_that_are_not_positive_change_nothing(name):
    """Two datasets that differ in held-out items rated low alone: the same lists."""

    def measured(low: int):
        random = np.random.default_rng(0)
        users = np.repeat(np.arange(60), 8)
        items = np.concatenate([random.choice(40, 8, replace=False) for _ in range(60)])
        ratings = np.tile([5, 5, 5, 1, 2, 5, 5, 1], 60)
        held_out = np.tile(np.arange(8) >= 6, 60) & (users >= 40)
        # the last row of a test user: a low rating of an item that the user has nowhere else
        last = held_out & (ratings == 1)
        items[last] = [
            np.setdiff1d(np.arange(40), items[users == user])[low] for user in users[last]
        ]
        table = Interactions(
            "hand", users, items, np.arange(60), np.arange(40), FeatureTable(60), FeatureTable(40),
            ratings,
        )  # fmt: skip
        places = np.arange(len(users))
        none = np.array([], dtype=np.int64)
        partition = Partition(np.arange(40), places[~held_out], none, places[held_out])
        population = Population(table, partition, task="ranking", positive_above=3)
        evaluation = CentralEvaluation(population, EvaluationConfig(ks=(5,)))
        model = fitted(name, evaluation.training)
        known = Histories(40, *population.liked(evaluation.clients))
        others = Histories(40, *population.low_rated(evaluation.clients))
        assert len(others.items) == 2 * 20, "the known ones alone"
        return model.scores(replace(known, low_rated=others))

    assert torch.equal(measured(0), measured(7))
