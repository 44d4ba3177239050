# SPDX-License-Identifier: Apache-2.0
"""Privacy cost of an experiment before any run, against runs' ledgers and the analytic Gaussian
mechanism."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.privacy import plan
from fedrec.privacy.accounting.sampling import Full, of_sampler
from server.privacy.guard import PhasePlans
from strategies.phases import TwoStage

STEP = "step={name='contrastive', hidden=4, session-length=4, masks=1, epochs=1}"
STAGES = f"strategy={{name='two-stage', stage-one={{rounds=2, {STEP}}}}}"
POPULARITY = ("model.item-bias=true", "model.hidden=[]", "strategy={name='popularity-start'}")
BIASES = "privacy.phases.popularity={parameters=['item.bias'], noise-factor=1.5}"
CHEAP = "evaluation.fine-tune.epochs=0"


@pytest.fixture
def plans(tiny_experiment):
    """Plans of the tiny experiment with some overrides and its own clients, without a run."""

    def make(*overrides: str) -> PhasePlans:
        experiment = load(tiny_experiment(), overrides)
        return PhasePlans.before_a_run(
            experiment, Population.of(experiment).partition.training_clients
        )

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("privacy={clip-norm=1.0, noise-multiplier=1.0}",),
        (STAGES, "privacy={clip-norm=1.0, noise-multiplier=1.0}"),
        (*POPULARITY, "privacy={clip-norm=1.0, epsilon=3.0}", BIASES),
        (*POPULARITY, "privacy={clip-norm=1.0, epsilon=4.0}", BIASES),
    ],
    ids=("one phase", "two", "noise factor", "too little noise"),
)
def test_the_forecast_is_what_the_run_then_spends(run_tiny, plans, monkeypatch, overrides):
    if "epsilon=4.0" in str(overrides):
        monkeypatch.setattr(plan, "_calibrated", lambda *of: 1.0)
    told = plans(*overrides, "rounds=5", CHEAP)
    result = run_tiny(*overrides, "rounds=5", CHEAP)
    forecast = told.forecast()
    assert len(result.rounds) == told.paid_rounds() == forecast.events
    assert forecast.epsilon == pytest.approx(result.rounds["epsilon"].iloc[-1])
    # which a forecast does not know, or says in another place
    measured = ("Noise of phase", "The budget ended the run")
    spent = {line for line in result.privacy if not line.startswith(measured)}
    assert set(told.lines(forecast)) == spent


def delta_of(mu: float, epsilon: float) -> float:
    """Epsilon of Gaussian releases with total mu (Dong, Roth and Su 2019, corollary 1)."""
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


def test_noise_factors_agree_with_the_analytic_gaussian(plans):
    """All clients in each of 1 + 3 rounds: mu^2 = 1 / (1.5 z)^2 + 3 / z^2."""
    told = plans(
        *POPULARITY,
        "privacy={clip-norm=1.0, noise-multiplier=2.0, delta=1e-5, backend='pld'}",
        BIASES,
        "sampler={name='full'}",
        "rounds=4",
    )
    mu = math.sqrt(1 / 3.0**2 + 3 / 2.0**2)
    report = told.forecast()
    assert delta_of(mu, report.epsilon) == pytest.approx(1e-5, rel=0.01)
    assert delta_of(1 / 3.0, report.phases["popularity"]) == pytest.approx(1e-5, rel=0.01)
    assert delta_of(math.sqrt(3) / 2, report.phases["main"]) == pytest.approx(1e-5, rel=0.01)


@pytest.mark.slow
def test_all_phases_together_meet_a_target_for_any_factors(plans):
    for factor in (0.5, 1.0, 3.0):
        biases = BIASES.replace("1.5", str(factor))
        told = plans(*POPULARITY, "privacy={clip-norm=1.0, epsilon=3.0}", biases, "rounds=6")
        ratio = told.plans["popularity"].noise_multiplier / told.plans["main"].noise_multiplier
        assert told.paid_rounds() == 6
        assert 2.9 < told.forecast().epsilon <= 3.0
        assert ratio == pytest.approx(factor)


def test_a_target_that_ends_the_run_early_is_reported(plans, monkeypatch):
    monkeypatch.setattr(plan, "_calibrated", lambda *of: 1.0)
    told = plans("privacy={clip-norm=1.0, epsilon=6.0}", "rounds=50")
    paid = told.paid_rounds()
    assert 0 < paid < 50
    phase, *_, end = told.phase_lines()
    assert phase.startswith(f"Phase main: {paid} rounds, 6 of 18 clients in each; all parameters")
    assert end == f"The budget of epsilon 6 covers {paid} of 50 rounds."
    assert told.forecast().epsilon <= 6.0
    unlimited = plans("privacy={clip-norm=1.0, noise-multiplier=1.0}", f"rounds={paid + 1}")
    assert unlimited.forecast().epsilon > 6.0


MEANS = "strategy={name='means-start'}"
NOISY = "privacy={clip-norm=1.0, noise-multiplier=1.0}"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "no differential privacy"),
        ((NOISY, "privacy.phases.manes={clip-norm=2.0}"), "unknown phase 'manes'"),
        ((NOISY, "strategy={name='flwr.serverapp.strategy:FedAvg'}"), "cannot be made private"),
        # ratings in [-1, 1] alone: a client moves their sum by 2 S, and the noise is for sqrt(2) S
        (
            (MEANS, NOISY, "privacy.phases.means={parameters=['item.mean']}"),
            "'means' releases only a part of item.mean, item.count, which has signs",
        ),
    ],
)
def test_plans_that_cannot_be_made_are_refused(plans, overrides, reason):
    with pytest.raises(ExperimentError, match=reason):
        plans(*overrides)


class Hiding(TwoStage):
    """A strategy with two inner strategies that it does not declare."""

    def phases(self):
        return {"stage-one": self, "main": self}


ADD_REMOVE = ("privacy.adjacency=add-remove", "split.stream=client")
SAMPLERS = {
    "fixed-size": ("sampler={name='fixed-size', cohort=6}",),
    "poisson": ("sampler={name='poisson', cohort=6}", *ADD_REMOVE),
    "in turn": (
        "sampler={name='min-separation', cohort=3, separation=3}",
        "privacy.mechanism={name='banded', bands=3}",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("budget", ["noise-multiplier=2.0", "epsilon=3.0"])
def test_clients_of_an_adversary_change_nobodys_charge(plans, run_tiny, overrides, budget):
    """Of the honest clients, beside 3 others that know when they are drawn."""
    private = (f"privacy={{clip-norm=1.0, {budget}}}", *overrides, "rounds=6")
    attacked = (*private, "adversary={attack='random', share=0.18}")
    (alone,) = plans(*private).plans.values()
    found = plans(*attacked)
    (beside,) = found.plans.values()
    assert beside.sampling.rate == pytest.approx(alone.sampling.rate)
    assert beside.noise_multiplier == pytest.approx(alone.noise_multiplier)
    assert beside.delta == alone.delta == pytest.approx(1e-5)
    honest = alone.clients
    assert (beside.clients, beside.honest, alone.honest) == (honest + 3, honest, honest)
    assert found.forecast().epsilon == pytest.approx(plans(*private).forecast().epsilon)
    assert any(
        f"controls 3 of the {honest + 3} clients" in line for line in found.forecast().caveats
    )
    if "epsilon" not in budget:
        ran = run_tiny(*attacked, CHEAP, "evaluation.every=0").rounds["epsilon"].iloc[-1]
        assert ran == pytest.approx(found.forecast().epsilon)


def test_the_rate_of_a_cohort_is_the_most_that_its_malicious_members_can_know():
    """By enumeration: of 2 malicious clients (5 and 6) and 5 honest ones, 3 are drawn."""
    cohorts = [set(one) for one in itertools.combinations(range(7), 3)]
    seen = {frozenset(cohort & {5, 6}) for cohort in cohorts}
    chances = []
    for drawn in seen:
        possible = [cohort for cohort in cohorts if cohort & {5, 6} == drawn]
        chances.append(np.mean([0 in cohort for cohort in possible]))
    rate_of = {m: of_sampler("fixed-size", {"cohort": m}, 7, malicious=2)[0].rate for m in (3, 5)}
    assert rate_of[3] == pytest.approx(max(chances)) == pytest.approx(3 / 5)
    assert rate_of[5] == 1.0  # nobody malicious in a cohort: all others
    assert isinstance(of_sampler("fixed-size", {"cohort": 6}, 7, malicious=2)[0], Full)
    assert of_sampler("poisson", {"cohort": 3}, 7, malicious=2)[0].rate >= 3 / 7
    # what sums are divided by stays
    assert of_sampler("fixed-size", {"cohort": 6}, 7, malicious=2)[1] == 6
    assert of_sampler("full", {}, 7, malicious=2) == (Full(), 7)


def test_a_strategy_with_undeclared_inner_strategies_cannot_be_made_private(plans):
    private = "privacy={clip-norm=1.0, noise-multiplier=1.0}"
    stages = f"{{name='{__name__}:Hiding', stage-one={{rounds=1, step={{name='counts'}}}}}}"
    hiding, outer = f"strategy={stages}", f"strategy={{name='means-start', main={stages}}}"
    for strategy in (hiding, outer):
        with pytest.raises(ExperimentError, match="delegates its rounds to other strategies"):
            plans(strategy, "model.item-bias=true", private)
