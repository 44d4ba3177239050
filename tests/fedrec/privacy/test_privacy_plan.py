# SPDX-License-Identifier: Apache-2.0
"""The plan: sensitivity, noise and event are consistent, computed by hand; inconsistent settings
are refused with the reason."""

import math

import numpy as np
import pytest

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.events import NoisyRound, NonPrivate, Release
from fedrec.privacy.accounting.sampling import FixedSize, Full, Poisson
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan
from server.privacy.phase_plans import PhasePlans


def plan(
    sampler="fixed-size",
    cohort=30,
    clients=4800,
    rounds=1000,
    server_lr=1.0,
    contributions="signed",
    **settings,
):
    settings = {
        "clip-norm": 40.0,
        **{key.replace("_", "-"): value for key, value in settings.items()},
    }
    if "epsilon" not in settings:
        settings = {"noise-multiplier": 1.0, **settings}
    config = PrivacyConfig.parse(settings, at="privacy")
    return Plan.of(
        config,
        sampler,
        {"cohort": cohort},
        clients,
        rounds,
        server_lr=server_lr,
        contributions=contributions,
    )


def test_privrecs_own_example():
    """S = 40, M = 30, z = 1: sigma = 2 S z / M = 2.667 (section 2.3.2), whose norm over 237,184
    coordinates is 1299."""
    found = plan()
    assert (found.sensitivity, found.noise_std, found.denominator) == (80.0, 80.0, 30.0)
    assert found.mean_noise_std == pytest.approx(8 / 3)
    assert found.mean_noise_std * (3706 * 64) ** 0.5 == pytest.approx(1298.7, abs=0.1)
    assert found.event() == NoisyRound("gaussian", FixedSize(30, 4800), "replace-one", 1.0)


def test_the_two_conventions_differ_by_two():
    by_clip = plan(noise_relative_to="clip-norm")
    assert (by_clip.noise_std, by_clip.noise_multiplier) == (40.0, 0.5)
    poisson = plan("poisson", adjacency="add-remove")
    assert (poisson.sensitivity, poisson.noise_std, poisson.event().noise_multiplier) == (
        40.0,
        40.0,
        1.0,
    )
    assert poisson.sampling == Poisson(30 / 4800) and poisson.denominator == 30.0
    assert plan("poisson", adjacency="add-remove", noise_relative_to="clip-norm").noise_std == 40.0


def test_phases_have_their_own_settings():
    phases = {"counts": {"clip-norm": 3.0, "noise-factor": 2.0}, "rest": {"parameters": ["item.*"]}}
    config = PrivacyConfig.parse(
        {"clip-norm": 40.0, "noise-multiplier": 1.5, "phases": phases}, at="privacy"
    )
    assert (config.in_phase("counts").clip_norm, config.in_phase("counts").parameters) == (
        3.0,
        ("*",),
    )
    assert (config.in_phase("rest").clip_norm, config.in_phase("rest").parameters) == (
        40.0,
        ("item.*",),
    )
    assert [config.noise_factor(phase) for phase in ("counts", "rest", "main")] == [2.0, 1.0, 1.0]
    assert config.in_phase("main") == config
    found = Plan.of(config.in_phase("counts"), "full", {}, 50, 4, factor=2.0)
    assert (found.noise_multiplier, found.noise_std, found.denominator) == (
        3.0,
        2 * 3.0 * 3.0,
        50.0,
    )


def test_full_participation_needs_no_cohort_and_goes_with_both_adjacencies():
    for adjacency, sensitivity in (("replace-one", 80.0), ("add-remove", 40.0)):
        config = PrivacyConfig(clip_norm=40.0, noise_multiplier=1.0, adjacency=adjacency)
        found = Plan.of(config, "full", {}, 50, 4)
        assert (found.sampling, found.denominator, found.sensitivity) == (Full(), 50.0, sensitivity)


def test_delta_by_default_is_small_enough():
    assert plan().delta == 1e-5
    assert plan(clients=10**6).delta == pytest.approx(10 ** (-6.6))
    assert plan(delta=1e-7).delta == 1e-7


@pytest.mark.parametrize(
    ("server_lr", "expected"), [(0.1, 0.0732), (0.5, 0.503), (1.0, 1.525), (2.0, 11.77)]
)
def test_noise_in_the_papers_order_costs_what_it_really_costs(server_lr, expected):
    """M = 30 of 4800, T = 1000, delta 1e-6, multiplier z / alpha2. The values come from an
    independent implementation; for alpha2 = 0.1, dp-accounting's Poisson bound, 0.0707 on a fine
    grid, is a lower bound."""
    found = plan(paper_noise_order=True, server_lr=server_lr, backend="pld")
    # Multiplied by alpha2, the sum's noise is the paper's 2 S z for any alpha2.
    assert found.noise_std * server_lr == pytest.approx(80.0)
    accountant = Accountant("pld")
    accountant.step(found.event(), 1000)
    assert accountant.epsilon(1e-6).epsilon == pytest.approx(expected, rel=6e-3)
    assert plan(server_lr=server_lr).noise_std == 80.0


def test_full_participation_is_not_amplified():
    found = plan(cohort=4800)
    assert found.sampling == Full() and found.denominator == 4800


def test_calibrated_noise_keeps_the_target_for_all_rounds_and_no_more():
    found = plan(epsilon=3.0, rounds=200, backend="autodp")
    accountant = Accountant("autodp")
    accountant.step(found.event(), 199)
    assert not accountant.would_exceed(found.event(), found.budget, found.delta)
    accountant.step(found.event())
    assert accountant.epsilon(found.delta).epsilon == pytest.approx(3.0, rel=1e-3)
    assert accountant.would_exceed(found.event(), found.budget, found.delta)
    assert plan().budget is None and plan(budget=2.5).budget == 2.5


def test_laplace_is_clipped_in_l1_and_has_its_own_event():
    found = plan(mechanism="laplace")
    assert found.clip.order == 1 and plan().clip.order == 2
    assert found.noise_scale == 80.0 and found.noise_std == pytest.approx(80 * math.sqrt(2))
    assert found.event() == NoisyRound("laplace", FixedSize(30, 4800), "replace-one", 1.0)


def test_distributed_shares_add_up_with_the_tolerated_dropouts_and_the_rest_is_known():
    found = plan(placement="distributed", max_dropouts=5)
    share = found.client_noise_scale
    assert math.sqrt(25) * share == pytest.approx(found.noise_scale)
    assert found.server_noise_scale == 0
    assert found.missing_noise_std(30) == found.missing_noise_std(25) == 0
    assert math.hypot(found.missing_noise_std(20), math.sqrt(20) * share) == pytest.approx(
        found.noise_scale
    )
    assert found.event() == plan().event()
    assert plan().client_noise_scale == 0
    assert plan().server_noise_scale == 80.0
    assert plan().missing_noise_std(3) == 0


def test_local_noise_is_not_amplified_and_adds_up():
    found = plan(placement="local")
    assert found.event() == NoisyRound("gaussian", Full(), "replace-one", 1.0)
    assert found.client_noise_scale == 80.0 and found.noise_std == pytest.approx(80 * math.sqrt(30))
    assert plan("poisson", placement="local").event() == found.event()


@pytest.mark.parametrize(
    ("sampler", "adjacency"), [("fixed-size", "replace-one"), ("poisson", "add-remove")]
)
def test_adaptive_clipping_costs_what_a_fixed_clip_does(sampler, adjacency):
    """Andrew et al. 2021, theorem 1, by hand: z_sum = (z^-2 - (2 sigma_b)^-2)^-1/2 with both
    relative to S."""
    settings = {"adjacency": adjacency, "cohort": 100, "adaptive_clip": {"quantile": 0.4}}
    found = plan(sampler, **settings)
    joint = 2.0 if adjacency == "replace-one" else 1.0
    assert found.count_noise_std == 5.0
    assert found.per_clip_norm == pytest.approx((joint**-2 - 10.0**-2) ** -0.5)
    assert found.event().release.noise_multiplier == pytest.approx(1.0)
    smaller = found.at_clip_norm(10.0)
    assert smaller.noise_std == pytest.approx(found.noise_std / 4)
    assert smaller.event() == found.event()
    own = plan(sampler, **{**settings, "adaptive_clip": {"count-noise": 30.0}})
    assert own.event().count_multiplier == (30.0 if adjacency == "replace-one" else 60.0)


@pytest.mark.parametrize("contributions", ["signed", "non-negative"])
@pytest.mark.parametrize("given", [{"noise_multiplier": 0.7}, {"epsilon": 5.0}])
def test_sum_and_count_together_cost_what_was_asked_for(contributions, given):
    """Of contributions without signs the sum moves by sqrt(2) S, but the count by 1 as ever."""
    settings = {"cohort": 4800, "rounds": 1, "contributions": contributions, **given}
    fixed = plan("full", **settings).event().release
    adaptive = plan("full", **settings, adaptive_clip={"count-noise": 1.5})
    assert adaptive.event().count_multiplier == 1.5
    assert adaptive.event().release.noise_multiplier == pytest.approx(fixed.noise_multiplier)
    assert adaptive.noise_multiplier == pytest.approx(
        (fixed.noise_multiplier**-2 - 1.5**-2) ** -0.5
    )
    assert adaptive.noise_scale == pytest.approx(
        adaptive.noise_multiplier * (2.0 if contributions == "signed" else math.sqrt(2)) * 40.0
    )


@pytest.mark.parametrize("contributions", ["signed", "non-negative"])
def test_a_count_that_leaves_nothing_is_refused_at_the_noise_that_is_named(contributions):
    settings = {"contributions": contributions, "noise_multiplier": 0.7}
    with pytest.raises(ExperimentError, match=r"standard deviation > 0\.7\b"):
        plan(**settings, adaptive_clip={"count-noise": 0.69})
    assert plan(**settings, adaptive_clip={"count-noise": 0.71}).noise_multiplier > 0.7


def test_adaptive_clipping_of_counts_and_products_keeps_all_rounds():
    adaptive = "privacy.adaptive-clip={count-noise=40.0}"
    plans = PhasePlans.before_a_run(load("linear-private-synthetic", [adaptive]), np.arange(2800))
    assert plans.paid_rounds() == 2
    assert 4.9 < plans.forecast().epsilon <= 5.0


def test_no_noise_or_a_stage_without_noise_is_not_private():
    assert isinstance(plan(noise_multiplier=0.0).event(), NonPrivate)
    only_main = plan(private_phases=["main*"])
    assert only_main.event("main") == NoisyRound(
        "gaussian", FixedSize(30, 4800), "replace-one", 1.0, phase="main"
    )
    assert isinstance(only_main.event("ssl"), NonPrivate) and only_main.event("ssl").phase == "ssl"


def test_only_parameters_that_fit_a_pattern_are_trained():
    names = ["item_id", "user_age", "layer0.weight", "layer0.bias"]
    assert plan().trained(names) == names
    assert plan(parameters=["layer*", "user_?ge"]).trained(names) == [
        "user_age",
        "layer0.weight",
        "layer0.bias",
    ]
    with pytest.raises(ExperimentError, match="item_idd"):
        plan(parameters=["layer*", "item_idd"]).trained(names)


REFUSED = [
    ({"noise_multiplier": None}, "exactly one"),
    ({"epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one"),
    ({"epsilon": 1.0, "budget": 2.0}, "budget"),
    ({"clip_norm": None}, "clip-norm"),
    ({"clip_norm": 0.0}, "greater than or equal to 0.000000001"),
    ({"noise_multiplier": -1.0}, "greater than or equal to 0"),
    ({"delta": 1.0}, "less than or equal to 0.1"),
    ({"delta": 0.0}, "delta > 0"),
    ({"backend": "paper"}, "autodp"),
    ({"max_dropouts": 3}, "distributed"),
    ({"placement": "distributed", "max_dropouts": 30}, "fewer than the 30"),
    ({"placement": "distributed", "mechanism": "laplace"}, "central or local"),
    ({"placement": "distributed", "sampler": "poisson", "adjacency": "add-remove"}, "known size"),
    ({"placement": "local", "adjacency": "add-remove"}, "sees who takes part"),
    ({"placement": "local", "paper_noise_order": True}, "central"),
    ({"placement": "local", "adaptive_clip": {}}, "central"),
    ({"mechanism": "laplace", "adaptive_clip": {}}, "one release"),
    ({"mechanism": "laplaec"}, "did you mean 'laplace'"),
    ({"mechanism": {"bands": 3}}, "privacy.mechanism.name"),
    ({"mechanism": {"name": "laplace", "bands": 3}}, "privacy.mechanism.bands"),
    ({"noise_multiplier": 0.0, "adaptive_clip": {}}, "noise-multiplier > 0"),
    ({"paper_noise_order": True, "adaptive_clip": {}}, "fixed norm"),
    ({"paper_noise_order": True, "epsilon": 1.0}, "undo the order"),
    ({"adaptive_clip": {}, "cohort": 20}, "alone costs more"),
    ({"sampler": "poisson"}, "no proven bound"),
    ({"adjacency": "add-remove"}, "no proven bound"),
    ({"sampler": "pkg.mod:Mine"}, "no privacy amplification"),
    ({"cohort": 4801}, "1 to 4800"),
    ({"cohort": 2.5}, "whole number"),
    ({"rounds": 0}, "at least one"),
    ({"clip_nrom": 1.0}, "clip-norm"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_does_not_fit_is_refused_with_its_reason(settings, reason):
    with pytest.raises(ExperimentError, match=reason):
        plan(**settings)


def test_an_experiment_carries_its_privacy(tiny_experiment):
    overrides = [
        "privacy.clip-norm=2",
        "privacy.noise-multiplier=1.5",
        "privacy.paper-noise-order=true",
    ]
    experiment = load(tiny_experiment(), [*overrides, "strategy.server-lr=0.5"])
    assert load(experiment.table()) == experiment
    found = PhasePlans.before_a_run(experiment, np.arange(18)).plans["main"]
    assert found.event() == NoisyRound("gaussian", FixedSize(6, 18), "replace-one", 3.0)
    with pytest.raises(ExperimentError, match="no differential privacy"):
        PhasePlans.before_a_run(load(tiny_experiment()), np.arange(18))


def test_noise_without_protection_is_not_a_release():
    for multiplier in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ExperimentError, match="invalid noise multiplier"):
            Release("gaussian", Full(), "replace-one", multiplier)
