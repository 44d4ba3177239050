# SPDX-License-Identifier: Apache-2.0
"""The federated linear item-to-item model against the centralised EASE and PureSVD."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedrec
from clients.steps.gram import GramStep, GramStepConfig
from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.ease import Ease, EaseConfig
from fedrec.data.cache import POPULATIONS
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.factors.chosen_items import chosen_items, item_scale
from fedrec.factors.gram import item_weights
from simulations.poisoning.base import UpdatePoisoning


@pytest.fixture
def table(tiny_experiment):
    def make(**changes):
        found = copy.deepcopy(tiny_experiment())
        found |= {
            "rounds": 2,
            "model": {"name": "item-weights"},
            "step": {"name": "gram"},
            "strategy": {
                "name": "popularity-start",
                "main": {"name": "gram", "regularisation": 5.0},
            },
            "sampler": {"name": "full"},
        }
        found["evaluation"] = {"every": 0, "ks": [5], "baselines": []}
        for key, value in changes.items():
            found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
        return found

    return make


def histories(experiment):
    population = POPULATIONS.population(load(experiment))
    return population.histories(population.training_clients).astype(np.float64)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_weights_are_those_of_centralised_ease(table, tmp_path, path):
    experiment = table(engine={"path": path})
    result = fedrec.run(experiment, output=tmp_path / "run")
    likes = histories(experiment)
    gram = torch.from_numpy(likes.T @ likes)
    expected = item_weights(gram, 5.0).numpy()
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-5)
    shares = np.maximum(likes.mean(0), 0.001)
    np.testing.assert_allclose(result.parameters["item.bias"][:, 0], np.log(shares), rtol=1e-5)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_rows_rated_low_count_as_in_the_centralised_system(table, tmp_path, path):
    """Weights and scores, of users who trained and who did not; against plain numpy, too."""
    low = {"low-rated": 0.4}
    experiment = table(model=low, step=low, engine={"path": path})
    result = fedrec.run(experiment, output=tmp_path / "run")
    population = POPULATIONS.population(load(experiment))
    everybody = np.arange(population.interactions.num_users)
    rows = population.histories(everybody, low_rated=0.4).astype(np.float64)
    assert set(np.unique(rows.astype(np.float32))) == {0, np.float32(0.4), 1}
    own = rows[population.training_clients]
    weights = item_weights(torch.from_numpy(own.T @ own), 5.0).numpy()
    np.testing.assert_allclose(result.parameters["item.weights"], weights, atol=1e-6)
    known = (rows > 0).any(1)
    scores = result.scores().to_numpy()
    np.testing.assert_allclose(scores[known], (rows @ weights)[known], atol=2e-6)
    baseline = Ease(EaseConfig(regularisation=5.0, low_rated=0.4))
    items = population.interactions.num_items
    histories = replace(
        Histories(items, *population.liked(everybody)),
        low_rated=Histories(items, *population.low_rated(everybody)),
    )
    baseline.fit(histories.take(population.training_clients))
    np.testing.assert_allclose(scores[known], baseline.scores(histories).numpy()[known], atol=2e-6)


def test_weights_are_those_of_centralised_puresvd(table, tmp_path):
    experiment = table()
    experiment["strategy"]["main"] = {"name": "gram", "solution": "puresvd", "factors": 4}
    result = fedrec.run(experiment, output=tmp_path / "run")
    right = np.linalg.svd(histories(experiment), full_matrices=False)[2][:4]
    np.testing.assert_allclose(result.parameters["item.weights"], right.T @ right, atol=1e-5)


def test_only_the_most_popular_items_have_weights_and_others_follow_by_popularity(table, tmp_path):
    experiment = table(model={"items": 7})
    result = fedrec.run(experiment, output=tmp_path / "run")
    likes = histories(experiment)
    top = np.sort(np.argsort(-likes.mean(0), kind="stable")[:7])
    own = likes[:, top]
    expected = item_weights(torch.from_numpy(own.T @ own), 5.0).numpy()
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-5)
    scores = result.scores()
    rest = np.setdiff1d(np.arange(30), top)
    bias = result.parameters["item.bias"][:, 0]
    for row in scores.to_numpy():
        assert row[rest].max() <= row[top].min()
        assert (np.diff(row[rest][np.argsort(bias[rest], kind="stable")]) >= -1e-6).all()


def test_scaled_products_are_solved_in_their_scale_and_returned_to_the_items_own(table, tmp_path):
    experiment = table(step={"exponent": 0.5})
    result = fedrec.run(experiment, output=tmp_path / "run")
    likes = histories(experiment)
    bias = torch.from_numpy(result.parameters["item.bias"][:, 0].copy())
    scale = item_scale(bias, 0.5).numpy()
    weighted = likes * scale
    solved = item_weights(torch.from_numpy(weighted.T @ weighted), 5.0).numpy()
    expected = scale[:, None] * solved / scale
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-4)


class ScaledConfig(GramStepConfig):
    exponent: float = 0.5


class Scaled(GramStep):
    """A step whose own default scales the items."""

    Config = ScaledConfig


def test_the_scale_is_the_steps_also_where_the_experiment_does_not_name_it(table, tmp_path):
    named = fedrec.run(table(step={"exponent": 0.5}), output=tmp_path / "named")
    own = fedrec.run(table(step={"name": "test_gram:Scaled"}), output=tmp_path / "own")
    weights = own.parameters["item.weights"]
    np.testing.assert_allclose(weights, named.parameters["item.weights"], atol=1e-6)


def test_cohorts_of_several_rounds_are_added_and_scaled_to_all_clients(table, tmp_path):
    experiment = table(
        rounds=3,
        sampler={"name": "fixed-size", "cohort": 9},
        strategy={"name": "gram", "regularisation": 5.0, "main": None},
    )
    del experiment["strategy"]["main"]
    result = fedrec.run(experiment, output=tmp_path / "run")
    from fedrec.runs.folder import RunFolder
    from server.checkpoint import Checkpoints

    run = RunFolder(result.folder)
    state = Checkpoints(run.checkpoints, run.experiment.digest(), keep=3).latest()
    assert state is not None
    total, (clients, variance) = state.strategy["total"], state.strategy["numbers"]
    assert (clients, variance) == (27, 0)
    expected = item_weights(torch.from_numpy(total * 18 / 27), 5.0).numpy()
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-5)


def test_private_rounds_have_noise_on_every_weight_and_an_epsilon_below_the_target(table, tmp_path):
    privacy = {
        "epsilon": 2.0,
        "clip-norm": 4.0,
        "parameters": ["item.weights"],
        "phases": {"popularity": {"parameters": ["item.bias"], "clip-norm": 2.0}},
    }
    experiment = table(privacy=privacy)
    experiment["strategy"]["main"] = {"name": "gram", "solution": "puresvd", "factors": 3}
    result = fedrec.run(experiment, output=tmp_path / "run")
    assert 1.9 < result.rounds["epsilon"].iloc[-1] <= 2.0
    weights = result.parameters["item.weights"]
    assert np.linalg.matrix_rank(weights, tol=1e-4) <= 3
    assert (weights != 0).all()
    assert any(line.startswith("Noise of phase main") for line in result.privacy)
    assert "This is a simulation, not a release." in result.privacy[0]


def test_other_models_are_refused(table):
    with pytest.raises(ExperimentError, match="no products of items"):
        fedrec.run(table(model={"name": "mf"}))


def test_equal_biases_choose_the_first_items():
    assert chosen_items(torch.zeros(5), 2).tolist() == [0, 1]
    assert chosen_items(torch.tensor([0.0, 2.0, 1.0]), 2).tolist() == [1, 2]


@pytest.mark.parametrize("solution", ["ease", "puresvd"])
def test_what_no_history_gives_is_projected_and_said(table, tmp_path, caplog, solution):
    """Malicious clients send minus the product of two items, many times as large as any client's;
    the weights are those of the nearest positive semi-definite sum."""
    main = {"name": "gram", "regularisation": 5.0, "solution": solution}
    experiment = table(
        strategy={"main": main},
        adversary={"attack": {"name": f"{__name__}:Negative"}, "clients": 2},
    )
    result = fedrec.run(experiment, output=tmp_path / "run")
    assert "not positive semi-definite" in caplog.text
    assert np.isfinite(result.parameters["item.weights"]).all()
    if solution == "ease":
        population = POPULATIONS.population(load(experiment))
        honest = population.training_clients[:-2]
        likes = population.histories(honest).astype(np.float64)
        order = np.argsort(-result.parameters["item.bias"][:, 0], kind="stable")
        gram = likes.T @ likes
        gram[:2, :2] -= 2 * LARGE
        values, vectors = np.linalg.eigh(gram)
        nearest = (vectors * values.clip(min=0)) @ vectors.T
        expected = item_weights(torch.from_numpy(nearest), 5.0).numpy()
        assert len(order) == len(gram)
        np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-3)


LARGE = 500.0


class Negative(UpdatePoisoning):
    """Sends minus the product of the first two items."""

    def crafted(self, block):
        products = block.parameters["item.weights"]
        change = torch.zeros(len(block.clients), *products.shape)
        if getattr(block.step, "outer", False):
            change[:, :2, :2] = -LARGE
        return {"item.weights": change}
