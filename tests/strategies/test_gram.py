# SPDX-License-Identifier: Apache-2.0
"""Products of items summed over clients, and first rounds that start from such sums."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

import fedrec
from fedrec.baselines.base import Histories
from fedrec.baselines.closed_form import CentralIalsConfig, Ease, EaseConfig, _solved
from fedrec.data.interactions import FeatureTable, Schema
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.models.mf import Ials
from fedrec.models.mf import IalsConfig as ModelConfig
from fedrec.runs.folder import RunFolder
from fedrec.sums.products import item_scale, item_weights
from server.checkpoint import Checkpoints
from server.privacy.guard import PhasePlans
from simulations import runner
from simulations.poisoning import UpdatePoisoning
from tests.runs import assert_same_run, charged, parameters_in, resumed


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
    shares = np.maximum((own == 1).mean(0), 0.001)
    np.testing.assert_allclose(result.parameters["item.bias"][:, 0], np.log(shares), rtol=1e-5)
    known = (rows > 0).any(1)
    scores = result.scores().to_numpy()
    np.testing.assert_allclose(scores[known], (rows @ weights)[known], atol=2e-6)
    baseline = Ease(EaseConfig(regularisation=5.0, low_rated=0.4))
    items = population.interactions.num_items
    histories = replace(
        Histories(items, *population.rows(everybody, positive=True).lists),
        low_rated=Histories(items, *population.rows(everybody, positive=False).lists),
    )
    baseline.fit(histories.take(population.training_clients))
    np.testing.assert_allclose(scores[known], baseline.scores(histories).numpy()[known], atol=2e-6)


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


def test_cohorts_of_several_rounds_are_added_and_scaled_to_all_clients(table, tmp_path):
    experiment = table(
        rounds=3,
        sampler={"name": "fixed-size", "cohort": 9},
        strategy={"name": "gram", "regularisation": 5.0, "main": None},
    )
    del experiment["strategy"]["main"]
    result = fedrec.run(experiment, output=tmp_path / "run")
    state = Checkpoints.of(RunFolder(result.folder)).latest()
    assert state is not None
    total, (clients, variance) = state.strategy["total"], state.strategy["numbers"]
    assert (clients, variance) == (27, 0)
    expected = item_weights(torch.from_numpy(total * 18 / 27), 5.0).numpy()
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-5)


@pytest.mark.parametrize("solution", ["ease", "puresvd"])
def test_what_no_history_gives_is_projected_and_said(table, tmp_path, caplog, solution):
    """Malicious clients send minus the product of two items, many times as large as any client's;
    the weights are those of the nearest positive semi-definite sum."""
    main = {"name": "gram", "regularisation": 5.0, "solution": solution}
    experiment = table(
        strategy={"main": main},
        adversary={"attack": {"name": f"{__name__}:Negative"}, "share": 0.12},
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


# Item factors from the sum of the clients' products, and alternating least squares from there.

SYSTEM = (
    "model={name='ials', factors=5, moments=true, products=true}",
    "step={name='als', weight=4.0, regularisation=2.0}",
    "strategy={name='gram-start', main={name='fed-als', weight=4.0, regularisation=2.0}}",
    "sampler={name='full'}",
    "evaluation.fine-tune={epochs=1}",
)
PRIVATE = (
    "privacy={epsilon=4.0, delta=1e-5, clip-norm=1.0,"
    " parameters=['user.gram', 'item.right', 'item.moments'],"
    " phases={products={clip-norm=6.0, parameters=['item.products'], noise-factor=0.5}}}"
)


def likes(result):
    population = Population.of(result.experiment)
    return population.histories(population.training_clients).astype(np.float64)


def test_factors_are_the_best_approximation_of_the_clients_histories(run_tiny):
    """Y Y^T = V s V^T of the five largest singular values of the interactions."""
    result = run_tiny(*SYSTEM, "rounds=1")
    _, values, right = np.linalg.svd(likes(result), full_matrices=False)
    found = result.parameters["item.factors"].astype(np.float64)
    np.testing.assert_allclose(found @ found.T, (right[:5].T * values[:5]) @ right[:5], atol=1e-5)
    np.testing.assert_allclose(result.parameters["item.gram"], found.T @ found, atol=1e-5)
    assert not result.parameters["item.products"].any()


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_the_next_round_is_a_sweep_from_there(run_tiny, path):
    start = run_tiny(*SYSTEM, "rounds=1", output="start")
    result = run_tiny(*SYSTEM, "rounds=2", f"engine.path={path}", output="run")
    rows = csr_array(likes(result))
    config = CentralIalsConfig(factors=5, weight=4.0, regularisation=2.0)
    items = torch.from_numpy(start.parameters["item.factors"].astype(np.float64))
    users = _solved(rows, items, config)
    expected = _solved(rows.T.tocsr(), users, config)
    np.testing.assert_allclose(result.parameters["item.factors"], expected.numpy(), atol=1e-5)


def test_under_noise_factors_below_the_edge_start_from_random_numbers(run_tiny):
    """With 18 users nothing is above it; both releases are charged to one ledger."""
    drawn = run_tiny(*SYSTEM, PRIVATE, "rounds=1", output="one").parameters["item.factors"]
    start = Ials(ModelConfig(factors=5), Schema(30, FeatureTable(30), (), "ranking")).initial(
        torch.Generator()
    )
    assert drawn.std() == pytest.approx(float(start["item.factors"].std()), rel=0.3)
    result = run_tiny(*SYSTEM, PRIVATE, "rounds=2", output="two")
    assert [line.event.phase for line in charged(result.folder)] == ["products", "main"]
    assert 3.9 < result.rounds["epsilon"].iloc[-1] <= 4.0


# Item means as a first round, and the federated neighbourhood model under one budget, on every
# engine.

START = (
    "strategy={name='means-start', damping=2.0, main={name='reptile', server-lr=1.0}}",
    "sampler={name='full'}",
    "evaluation.fine-tune.epochs=0",
)
MEANS_START_PRIVATE = (
    "privacy={epsilon=3.0, delta=1e-5, clip-norm=0.1, backend='pld', parameters=['similarity*']}",
    "privacy.phases={means={parameters=['item.*'], clip-norm=2.0, noise-factor=0.5}}",
)


@pytest.fixture
def means_start(tiny_experiment):
    made = {
        **tiny_experiment(),
        "task": "rating",
        "model": {"name": "pnbm", "items": 12, "rank": 2},
    }
    made["step"] = {"name": "pnbm"}
    del made["positive-above"]
    return made


@pytest.fixture
def run(means_start, tmp_path):
    def go(*overrides, output="run", callbacks=()):
        return runner.run(
            means_start, [*START, *overrides], output=tmp_path / output, callbacks=callbacks
        )

    return go


def test_means_are_damped_means_of_the_training_ratings(run, means_start):
    found = parameters_in(run("rounds=1").folder)
    population = Population.of(load(means_start, START))
    rows = population.rows(population.training_clients)
    items, ratings = rows.items, rows.labels
    counts, sums = np.bincount(items, minlength=30), np.bincount(items, ratings, 30)
    np.testing.assert_allclose(
        found["item.mean"][:, 0], (sums + 2 * ratings.mean()) / (counts + 2), atol=1e-4
    )
    assert np.array_equal(found["item.count"][:, 0], counts)


def test_two_scales_are_refused(run):
    with pytest.raises(ExperimentError, match="rating scales differ"):
        run("rounds=1", "model.scale=[0.5, 5.0]")


# The popularity start: the biases after the first round, and the charges of each phase.

POPULARITY_START_START = (
    "strategy={name='popularity-start'}",
    "model.item-bias=true",
    "evaluation.fine-tune.epochs=0",
)
NESTED = (
    "strategy={name='popularity-start', main={name='two-stage', stage-one={rounds=2,"
    " step={name='sgd', epochs=1}}}}"
)
POPULARITY_START_PRIVATE = (
    "privacy={epsilon=3.0, delta=1e-5, clip-norm=0.1, backend='pld', parameters=['item.id']}"
)
PHASES = "privacy.phases={popularity={parameters=['item.bias'], clip-norm=2.0, noise-factor=3.0}}"
CHEAP = ("model.item-bias=true", "evaluation.fine-tune.epochs=0", "evaluation.every=0")


def test_biases_become_the_log_of_the_share_that_likes_an_item(run_tiny, tiny_experiment):
    result = run_tiny(*POPULARITY_START_START, "rounds=1", "sampler={name='full'}")
    population = Population.of(load(tiny_experiment()))
    _, items = population.rows(population.partition.training_clients, positive=True).lists
    shares = np.bincount(items, minlength=30) / 18
    bias = parameters_in(result.folder)["item.bias"][:, 0]
    assert bias == pytest.approx(np.log(np.maximum(shares, 0.001)), abs=1e-5)


def test_under_noise_the_floor_is_some_standard_deviations(run_tiny):
    """One release at z = 1: the noise of a share is sqrt(2) S / N, N = 18; 7 % of pure noise is
    above 1.5 of it."""
    result = run_tiny(
        *POPULARITY_START_START,
        "rounds=1",
        "sampler={name='full'}",
        "privacy={clip-norm=0.02, noise-multiplier=1.0}",
        "privacy.parameters=['item.bias']",
    )
    bias = parameters_in(result.folder)["item.bias"][:, 0]
    assert bias.min() == pytest.approx(math.log(1.5 * math.sqrt(2) * 0.02 / 18), abs=1e-4)
    assert 0.5 < (bias == bias.min()).mean() < 1


def test_counts_cost_sqrt_2_and_updates_2_clip_norms(tiny_experiment):
    """The counts' standard deviation is smaller by sqrt(2) at the same noise multiplier; Laplace
    noise is not."""
    given = "privacy={clip-norm=1.0, noise-multiplier=1.0, mechanism='%s'}"
    for mechanism, wanted in (("gaussian", math.sqrt(2)), ("laplace", 2.0)):
        experiment = load(
            tiny_experiment(), [*POPULARITY_START_START, given % mechanism, "sampler={name='full'}"]
        )
        plans = PhasePlans.before_a_run(experiment, np.arange(18)).plans
        assert plans["popularity"].noise_scale == pytest.approx(wanted)
        assert plans["main"].noise_scale == pytest.approx(2.0)


def test_rounds_keep_their_numbers_so_that_no_noise_is_drawn_twice(run_tiny):
    result = run_tiny(
        NESTED, *CHEAP, POPULARITY_START_PRIVATE, PHASES, "rounds=3", "sampler={name='full'}"
    )
    lines = [(line.round_number, line.event.phase) for line in charged(result.folder)]
    assert lines == [(1, "popularity"), (2, "stage-one"), (3, "main")]


def test_each_phase_releases_its_own_parameters(run_tiny):
    """Clip norms of 2 and .1 determine the noise: the embeddings do not change in the first
    round."""
    settings = (*POPULARITY_START_START, POPULARITY_START_PRIVATE, PHASES, "sampler={name='full'}")
    one = parameters_in(run_tiny(*settings, "rounds=1", output="one").folder)
    two = parameters_in(run_tiny(*settings, "rounds=2", output="two").folder)
    plain = parameters_in(
        run_tiny(
            *POPULARITY_START_START, "rounds=1", "sampler={name='full'}", output="plain"
        ).folder
    )
    assert np.array_equal(one["item.id"], plain["item.id"])
    assert not np.array_equal(one["item.bias"], plain["item.bias"])
    moved = [name for name in two if not np.array_equal(two[name], one[name])]
    # the noise of round 1 depends on the number of rounds
    assert sorted(moved) == ["item.bias", "item.id"]
    assert np.array_equal(two["layer0.weight"], plain["layer0.weight"])


def test_only_one_strategy_has_a_first_round(run_tiny):
    with pytest.raises(ExperimentError, match="would never run its own first round"):
        run_tiny("strategy={name='means-start', main={name='popularity-start'}}", *CHEAP)


def test_a_run_is_resumed_with_what_the_other_strategy_remembers(run_tiny):
    adam = "strategy={name='popularity-start', main={name='fed-adam'}}"
    settings = (adam, *CHEAP, "rounds=4")
    whole = run_tiny(*settings, output="whole")
    assert_same_run(resumed(run_tiny, *settings, after=2), whole)
