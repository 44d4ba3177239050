# SPDX-License-Identifier: Apache-2.0
"""The protection that a node requires, against the server's plan and the analytic Gaussian
mechanism, also for nested strategies."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from clients.device.agreed_protection import refuse_less_protection
from fedrec.errors import RefusalError
from fedrec.experiment.loading import load
from fedrec.experiment.phases import phases_of
from fedrec.privacy.protection import Protection
from fedrec.protocol.orders import TrainOrder
from server.privacy.phase_plans import PhasePlans

NAMES = ("item.id", "item.bias")
SGD = "step={name='sgd', epochs=1}"
LARGE = "sampler={name='fixed-size', cohort=12}"
POPULARITY = ("strategy={name='popularity-start'}", "model.item-bias=true")
TWO_STAGES = (f"strategy={{name='two-stage', stage-one={{rounds=2, {SGD}, {LARGE}}}}}",)
NESTED = (
    "strategy={name='popularity-start', main={name='two-stage', stage-one={rounds=2,"
    f" {SGD}, {LARGE}}}}}}}",
    "model.item-bias=true",
)
PHASES = "privacy.phases={popularity={clip-norm=2.0, noise-factor=3.0}}"
SECOND_PHASE = "privacy.phases={stage-one={clip-norm=2.0, noise-factor=0.5}}"


def refused(experiment, phase, protection):
    """Whether a node that takes part in the experiment refuses an order of a phase."""
    order = TrainOrder(1, np.arange(3), step=dict(phase.step), protection=protection)
    try:
        refuse_less_protection(experiment, phases_of(experiment), phase, order, NAMES)
    except RefusalError:
        return True
    return False


@pytest.mark.parametrize(
    "privacy",
    [
        "{clip-norm=0.1, noise-multiplier=1.5, placement='local'}",
        "{clip-norm=0.1, noise-multiplier=1.5, placement='distributed', max-dropouts=2}",
        "{clip-norm=0.1, noise-multiplier=1.5, noise-relative-to='clip-norm', placement='local'}",
        "{clip-norm=0.1, noise-multiplier=1.5, mechanism='laplace', placement='local'}",
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [(), POPULARITY, (*POPULARITY, PHASES), TWO_STAGES, (*TWO_STAGES, SECOND_PHASE), NESTED],
    ids=("one phase", "popularity", "popularity apart", "stages", "stages apart", "nested"),
)
def test_what_the_server_orders_in_each_phase_is_the_least_that_is_accepted(
    tiny_experiment, privacy, strategy
):
    changes = (f"privacy={privacy}", "rounds=4", "privacy.parameters=['item.*']")
    experiment = load(tiny_experiment(), [*changes, *strategy])
    plans = PhasePlans.before_a_run(experiment, np.arange(18)).plans
    phases = phases_of(experiment)
    assert {phase.name for phase in phases} == set(plans)
    for phase in phases:
        ordered = plans[phase.name].protection(NAMES)
        less = dataclasses.replace(ordered, noise_scale=0.999 * ordered.noise_scale)
        wider = dataclasses.replace(ordered, clip_norm=1.001 * ordered.clip_norm)
        assert ordered.noise_scale > 0 and not refused(experiment, phase, ordered)
        assert refused(experiment, phase, less) and refused(experiment, phase, wider)


def test_the_least_noise_of_all_phases_together_costs_the_target_epsilon(tiny_experiment):
    """One round of counts (sqrt(2) S, three times the multiplier) and three of updates (2 S)."""
    privacy = "privacy={clip-norm=0.1, epsilon=3.0, delta=1e-5, placement='local'}"
    experiment = load(tiny_experiment(), [privacy, "rounds=4", *NESTED, PHASES])
    moved = {"popularity": math.sqrt(2) * 2.0, "stage-one": 2 * 0.1, "main": 2 * 0.1}
    multiplier = {}
    for phase in phases_of(experiment):
        clip = 2.0 if phase.name == "popularity" else 0.1

        def accepted(scale, phase=phase, clip=clip):
            return -1 if refused(experiment, phase, Protection(clip, 2, NAMES, scale)) else 1

        least: Any = brentq(accepted, 1e-3, 1e3, xtol=1e-9)
        multiplier[phase.name] = float(least) / moved[phase.name]
    assert multiplier["popularity"] == pytest.approx(3 * multiplier["main"], rel=1e-5)
    assert multiplier["stage-one"] == pytest.approx(multiplier["main"], rel=1e-5)
    mu = math.sqrt(multiplier["popularity"] ** -2 + 3 * multiplier["main"] ** -2)
    delta = norm.cdf(mu / 2 - 3.0 / mu) - math.exp(3.0) * norm.cdf(-mu / 2 - 3.0 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("strategy", [(), POPULARITY, NESTED], ids=("one", "popularity", "nested"))
def test_noise_that_is_calibrated_for_all_clients_is_accepted(tiny_experiment, strategy):
    privacy = "privacy={clip-norm=0.1, epsilon=3.0, placement='local'}"
    experiment = load(tiny_experiment(), [*strategy, privacy, "rounds=4"])
    plans = PhasePlans.before_a_run(experiment, np.arange(18)).plans
    for phase in phases_of(experiment):
        assert not refused(experiment, phase, plans[phase.name].protection(NAMES))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_noise_scale_that_is_no_number_is_refused(tiny_experiment, scale):
    privacy = "privacy={clip-norm=0.1, noise-multiplier=1.5, placement='local'}"
    experiment = load(tiny_experiment(), [privacy])
    (phase,) = phases_of(experiment)
    assert refused(experiment, phase, Protection(0.1, 2, NAMES, scale))
