# SPDX-License-Identifier: Apache-2.0
"""The federated fold-in against the centralised one, on every engine, with noise, under secure
aggregation, and when it is resumed."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

import fedrec
from fedrec.baselines.base import Histories
from fedrec.baselines.private.dp_fold_in import DpFoldIn, DpFoldInConfig
from fedrec.data.features import FeatureTable
from fedrec.data.population import Population
from fedrec.data.schema import Schema
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.models.fold_in import FoldIn, FoldInConfig
from fedrec.privacy.accounting.accountant import Accountant
from server.privacy.phase_plans import PhasePlans
from tests.runs import assert_same_run, resumed

SYSTEM = (
    "rounds=2",
    "model={name='fold-in', items=12, factors=5, low-rated=0.25}",
    "step={name='gram', exponent=0.2, low-rated=0.25}",
    "strategy={name='popularity-start', step={name='counts', low-rated=0.25},"
    " estimate='posterior-mean', main={name='fold-in', damping=0.4, learned-variance=0.9,"
    " popularity-variance=0.2}}",
    "sampler={name='full'}",
    "evaluation.fine-tune={epochs=0}",
    "evaluation.every=0",
)
CLIPS = "parameters=['item.products'], clip-norm=3.0, phases={popularity={"
PHASE = "parameters=['item.bias'], clip-norm=2.0, noise-factor=2.0}}"
CLIPPED = f"privacy={{noise-multiplier=0.0, {CLIPS}{PHASE}}}"
PRIVATE = f"privacy={{epsilon=3.0, delta=1e-5, {CLIPS}{PHASE}}}"
DISTRIBUTED = PRIVATE.replace("epsilon=3.0", "epsilon=3.0, placement='distributed'")
SECURE = "secure-aggregation=true"


@pytest.fixture
def run_fold_in(run_tiny):
    return lambda *more, **others: run_tiny(*SYSTEM, *more, **others)


def centralised(experiment, **options) -> np.ndarray:
    """Scores of every user by the baseline without noise, fitted to the training users."""
    population = Population.of(experiment)
    features = population.interactions.item_features

    def histories(users):
        count = population.interactions.num_items
        others = Histories(count, *population.low_rated(users))
        return Histories(count, *population.liked(users), users, None, features, others)

    model = DpFoldIn(
        DpFoldInConfig(
            noise=False,
            items=12,
            factors=5,
            low_rated=0.25,
            damping=0.4,
            learned_variance=0.9,
            popularity_variance=0.2,
        ).model_copy(update=options)
    )
    model.fit(histories(population.training_clients))
    return model.scores(histories(np.arange(population.interactions.num_users))).numpy()


def differences(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of scores that have a constant of their own for each user."""
    apart = found - expected
    return apart - apart.mean(1, keepdims=True)


@pytest.mark.parametrize(
    ("privacy", "clips"),
    [((), (1e9, 1e9)), ((CLIPPED,), (3.0, 2.0))],
    ids=["whole contributions", "clipped contributions"],
)
@pytest.mark.parametrize("path", ["auto", "reference"])
def test_without_noise_scores_are_those_of_the_centralised_system(
    run_fold_in, path, privacy, clips
):
    result = run_fold_in(*privacy, f"engine.path={path}")
    expected = centralised(result.experiment, clip_norm=clips[0], count_clip=clips[1])
    found = result.scores().to_numpy()
    np.testing.assert_allclose(differences(found, expected), 0, atol=2e-3)
    assert np.abs(differences(expected, expected[:1])).max() > 0.3, "users differ"
    learned = result.parameters["item.learned"]
    assert learned.any() and (learned[:, -1] != 0).sum() == 12, "of the chosen items alone"
    assert not result.parameters["item.products"].any(), "products are no state"


def test_both_releases_cost_epsilon_and_sqrt_2_clip_norms(run_fold_in):
    """Gaussian releases compose to one with mu^2 = sum of 1 / z^2, by one ledger."""
    result = run_fold_in(PRIVATE)
    plans = PhasePlans.before_a_run(result.experiment, np.arange(18)).plans
    for plan, clip in ((plans["popularity"], 2.0), (plans["main"], 3.0)):
        assert plan.sensitivity == pytest.approx(math.sqrt(2) * clip)
        assert plan.noise_scale == pytest.approx(plan.noise_multiplier * plan.sensitivity)
    lines = (result.folder / "privacy.jsonl").read_text().splitlines()
    charged = [json.loads(line)["event"] for line in lines]
    assert [event["phase"] for event in charged] == ["popularity", "main"]
    assert charged[0]["noise_multiplier"] == pytest.approx(2 * charged[1]["noise_multiplier"])
    mu = math.sqrt(sum(event["noise_multiplier"] ** -2 for event in charged))
    delta = norm.cdf(mu / 2 - 3 / mu) - math.exp(3) * norm.cdf(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=0.02)
    assert 2.99 < result.rounds["epsilon"].iloc[-1] <= 3.0


def test_only_what_is_above_the_noise_is_learned(run_fold_in):
    """With 18 users nothing is: embeddings are public but for popularity, which is noisy."""
    plain, noisy = run_fold_in(output="plain"), run_fold_in(PRIVATE, output="noisy")
    assert not noisy.parameters["item.learned"][:, 1:].any()
    np.testing.assert_array_equal(noisy.parameters["item.public"], plain.parameters["item.public"])
    assert (noisy.parameters["item.bias"] != plain.parameters["item.bias"]).all()
    assert np.isfinite(noisy.scores().to_numpy()).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy", [(), (PRIVATE,), (DISTRIBUTED,)], ids=["plain", "private", "distributed"]
)
def test_secure_aggregation_gives_the_same(run_fold_in, privacy):
    three = "engine.nodes=3"
    plain = run_fold_in(*privacy, three, output="plain")
    secure = run_fold_in(*privacy, three, SECURE, output="secure")
    # Steps of the fixed point are magnified where eigenvectors are divided by rare items' profile.
    assert np.abs(differences(secure.scores().to_numpy(), plain.scores().to_numpy())).max() < 1e-2
    np.testing.assert_allclose(
        secure.parameters["item.bias"], plain.parameters["item.bias"], rtol=1e-5, atol=1e-6
    )
    products = secure.rounds["bytes-up"].iloc[1] / 18
    items, embeddings = 12 * 13 // 2, sum(value.size for value in secure.parameters.values())
    assert products == 8 * (items + (0 if privacy else embeddings - 12 * 12) + 6)


@pytest.mark.parametrize(
    "settings",
    [(PRIVATE,), (DISTRIBUTED, SECURE, "engine.nodes=3")],
    ids=["central", "masked with distributed noise"],
)
def test_a_run_that_broke_off_between_both_uploads_goes_on(run_fold_in, settings):
    whole = run_fold_in(*settings, output="whole")
    assert_same_run(resumed(run_fold_in, *settings, after=1), whole)


def test_low_rated_items_of_a_users_history_count_on_the_device(run_fold_in):
    """With the same releases, only users who rated something low are ranked for otherwise."""
    without, some = (
        run_fold_in(f"model.low-rated={weight}", output=f"run-{weight}") for weight in (0.0, 0.25)
    )
    for name, value in without.parameters.items():
        np.testing.assert_array_equal(some.parameters[name], value)
    population = Population.of(some.experiment)
    ends, _ = population.low_rated(np.arange(population.interactions.num_users))
    moved = np.abs(some.scores().to_numpy() - without.scores().to_numpy()).max(1)
    assert ((moved > 1e-3) == (np.diff(ends) > 0)).all()


def test_lists_are_recommended_from_what_is_released_and_the_users_own_rows(run_fold_in):
    result = run_fold_in(PRIVATE)
    found = fedrec.Result.load(result.folder).recommend(k=3)
    assert (found.groupby("user")["rank"].max() == 3).all()
    scores = result.scores()
    first = found[found["rank"] == 1].set_index("user")["score"]
    assert (first <= scores.max(axis=1).loc[first.index] + 1e-6).all()


def test_cohorts_of_several_rounds_are_scaled_to_everybody(run_fold_in):
    """Everybody twice gives what everybody once does."""
    once, twice = run_fold_in(output="once"), run_fold_in("rounds=3", output="twice")
    apart = differences(once.scores().to_numpy(), twice.scores().to_numpy())
    np.testing.assert_allclose(apart, 0, atol=1e-3)


def test_other_models_are_refused(run_tiny):
    with pytest.raises(ExperimentError, match=r"model\.name = 'fold-in'"):
        run_tiny("strategy={name='fold-in'}", "step={name='counts'}", "model.item-bias=true")


def test_ratings_are_not_predicted():
    schema = Schema(3, FeatureTable(3), (), "rating")
    with pytest.raises(ExperimentError, match="ranks items and predicts no ratings"):
        FoldIn(FoldInConfig(), schema)


def test_without_features_and_before_any_round_everybody_gets_the_same():
    model = FoldIn(FoldInConfig(factors=2), Schema(3, FeatureTable(3), (), "ranking"))
    start = {
        name: value[None] for name, value in model.initial(torch.Generator().manual_seed(0)).items()
    }
    found = model.history_scores(start, torch.eye(3)[None])
    assert found.shape == (1, 3, 3) and torch.equal(found, found[:, :1].expand(-1, 3, -1))


def test_embeddings_are_decomposed_once_for_all_histories(monkeypatch):
    model = FoldIn(FoldInConfig(factors=2), Schema(5, FeatureTable(5), (), "ranking"))
    drawn = torch.Generator().manual_seed(1)
    parameters = {
        name: torch.randn(value.shape, generator=drawn)[None]
        for name, value in model.initial(drawn).items()
    }
    histories = torch.eye(5)[None]
    wanted = model.history_scores(parameters, histories)
    scores = model.scorer(parameters)
    monkeypatch.setattr(torch.linalg, "eigh", None)
    for user in range(5):
        alone = scores(histories[:, user : user + 1])
        torch.testing.assert_close(alone[:, 0], wanted[:, user])


@pytest.mark.slow
def test_the_shipped_experiments_spend_epsilon_5():
    for name in ("fed-fold-in-ml1m", "fed-fold-in-add-remove-ml1m", "dp-fed-gram-ml1m"):
        plans = PhasePlans.before_a_run(load(name), np.arange(4832)).plans
        accountant = Accountant("pld")
        for phase, plan in plans.items():
            accountant.step(plan.event(phase))
        assert accountant.epsilon(1e-5).epsilon == pytest.approx(5.0, rel=1e-3)
