# SPDX-License-Identifier: Apache-2.0
"""The popularity start: the biases after the first round, and the charges of each phase."""

import json
import math

import numpy as np
import pytest
from scipy.stats import norm

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from server.privacy.phase_plans import PhasePlans
from tests.runs import assert_same_run, parameters_in, resumed

START = (
    "strategy={name='popularity-start'}",
    "model.item-bias=true",
    "evaluation.fine-tune.epochs=0",
)
NESTED = (
    "strategy={name='popularity-start', main={name='two-stage', stage-one={rounds=2,"
    " step={name='sgd', epochs=1}}}}"
)
PRIVATE = "privacy={epsilon=3.0, delta=1e-5, clip-norm=0.1, backend='pld', parameters=['item.id']}"
PHASES = "privacy.phases={popularity={parameters=['item.bias'], clip-norm=2.0, noise-factor=3.0}}"
CHEAP = ("model.item-bias=true", "evaluation.fine-tune.epochs=0", "evaluation.every=0")


def multipliers(folder):
    """Noise multiplier and phase of each charge in the ledger."""
    lines = [
        json.loads(line)["event"] for line in (folder / "privacy.jsonl").read_text().splitlines()
    ]
    return [(event["phase"], event["noise_multiplier"]) for event in lines]


def gaussian_delta(mu, epsilon):
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def test_biases_become_the_log_of_the_share_that_likes_an_item(run_tiny, tiny_experiment):
    result = run_tiny(*START, "rounds=1", "sampler={name='full'}", "strategy.floor=0.1")
    population = Population.of(load(tiny_experiment()))
    _, items = population.liked(population.partition.training_clients)
    shares = np.bincount(items, minlength=30) / 18
    bias = parameters_in(result.folder)["item.bias"][:, 0]
    assert bias == pytest.approx(np.log(np.maximum(shares, 0.1)), abs=1e-5)
    assert (shares < 0.1).any() and (shares > 0.1).any()


def test_under_noise_the_floor_is_some_standard_deviations(run_tiny):
    """One release at z = 1: the noise of a share is sqrt(2) S / N, N = 18; 2 % of pure noise is
    above 2 of it."""
    result = run_tiny(
        *START,
        "rounds=1",
        "sampler={name='full'}",
        "privacy={clip-norm=0.001, noise-multiplier=1.0}",
        "privacy.parameters=['item.bias']",
        "strategy.floor=1e-9",
        "strategy.noise-floor=2.0",
    )
    bias = parameters_in(result.folder)["item.bias"][:, 0]
    assert bias.min() == pytest.approx(math.log(2 * math.sqrt(2) * 0.001 / 18), abs=1e-4)
    assert 0.5 < (bias == bias.min()).mean() < 1


def test_counts_cost_sqrt_2_and_updates_2_clip_norms(tiny_experiment):
    """The counts' standard deviation is smaller by sqrt(2) at the same noise multiplier; Laplace
    noise is not."""
    given = "privacy={clip-norm=1.0, noise-multiplier=1.0, mechanism='%s'}"
    for mechanism, wanted in (("gaussian", math.sqrt(2)), ("laplace", 2.0)):
        experiment = load(tiny_experiment(), [*START, given % mechanism, "sampler={name='full'}"])
        plans = PhasePlans.before_a_run(experiment, np.arange(18)).plans
        assert plans["popularity"].noise_scale == pytest.approx(wanted)
        assert plans["main"].noise_scale == pytest.approx(2.0)


def test_rounds_keep_their_numbers_so_that_no_noise_is_drawn_twice(run_tiny):
    result = run_tiny(NESTED, *CHEAP, PRIVATE, PHASES, "rounds=3", "sampler={name='full'}")
    assert [phase for phase, _ in multipliers(result.folder)] == ["popularity", "stage-one", "main"]
    lines = (result.folder / "privacy.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


def test_phases_have_noise_of_their_own_and_keep_the_target_together(run_tiny):
    """Gaussian releases compose to one with mu^2 = sum of 1 / z^2 exactly, so the target epsilon
    can be checked."""
    result = run_tiny(*START, PRIVATE, PHASES, "rounds=3", "sampler={name='full'}")
    found = multipliers(result.folder)
    assert [phase for phase, _ in found] == ["popularity", "main", "main"]
    (_, counts), (_, first), (_, second) = found
    assert first == second and counts == pytest.approx(3 * first)
    mu = math.sqrt(sum(z**-2 for _, z in found))
    assert gaussian_delta(mu, 3.0) == pytest.approx(1e-5, rel=0.02)
    assert gaussian_delta(mu, 3.0) <= 1e-5 * 1.0001
    assert result.rounds["epsilon"].iloc[-1] == pytest.approx(3.0, rel=1e-3)


def test_each_phase_releases_its_own_parameters(run_tiny):
    """Clip norms of 2 and .1 determine the noise: the embeddings do not change in the first
    round."""
    settings = (*START, PRIVATE, PHASES, "sampler={name='full'}")
    one = parameters_in(run_tiny(*settings, "rounds=1", output="one").folder)
    two = parameters_in(run_tiny(*settings, "rounds=2", output="two").folder)
    plain = parameters_in(
        run_tiny(*START, "rounds=1", "sampler={name='full'}", output="plain").folder
    )
    assert np.array_equal(one["item.id"], plain["item.id"])
    assert not np.array_equal(one["item.bias"], plain["item.bias"])
    moved = [name for name in two if not np.array_equal(two[name], one[name])]
    # the noise of round 1 depends on the number of rounds
    assert sorted(moved) == ["item.bias", "item.id"]
    assert np.array_equal(two["layer0.weight"], plain["layer0.weight"])


def test_a_phase_that_does_not_exist_is_refused(run_tiny):
    with pytest.raises(ExperimentError, match="no phase 'popular'"):
        run_tiny(*START, PRIVATE, "privacy.phases={popular={clip-norm=2.0}}")


def test_a_flower_strategy_cannot_follow(run_tiny):
    with pytest.raises(ExperimentError, match="cannot follow"):
        run_tiny(
            "strategy={name='popularity-start', main={name='flwr.serverapp.strategy:FedAvg'}}",
            *CHEAP,
        )


def test_only_one_strategy_has_a_first_round(run_tiny):
    with pytest.raises(ExperimentError, match="would never run its first round"):
        run_tiny("strategy={name='means-start', main={name='popularity-start'}}", *CHEAP)


def test_a_run_is_resumed_with_what_the_other_strategy_remembers(
    run_tiny,
):
    adam = "strategy={name='popularity-start', main={name='fed-adam'}}"
    settings = (adam, *CHEAP, "rounds=4")
    whole = run_tiny(*settings, output="whole")
    assert_same_run(resumed(run_tiny, *settings, after=2), whole)
