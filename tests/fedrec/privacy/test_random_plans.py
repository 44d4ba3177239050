# SPDX-License-Identifier: Apache-2.0
"""200 random plans, of every mechanism, sampler, adjacency, number of phases and placement that fit
together, against dp-accounting or a closed form."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.special import binom

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.plan import Plan

DELTA = 1e-5
MECHANISMS = ("gaussian", "laplace", "banded")


def drawn(random):
    """The settings of a random run: its table and its phases' samplers."""
    mechanism = str(random.choice(MECHANISMS))
    table = {"name": mechanism} | {
        "banded": {"bands": int(random.integers(1, 6)), "momentum": float(random.choice([0, 0.9]))},
    }.get(mechanism, {})
    placement = str(random.choice(["central", "distributed", "local"]))
    return {
        "mechanism": table,
        "adjacency": str(random.choice(["replace-one", "add-remove"])),
        "placement": placement,
        "phases": [
            (
                str(random.choice(["full", "fixed-size", "poisson", "scheduled", "in-turn"])),
                int(random.integers(1, 15)),
                int(random.integers(1, 6)),
                float(random.choice([1.0, 2.0])),
            )
            for _ in range(random.integers(1, 3))
        ],
        "z": float(random.uniform(0.7, 6.0)),
    }


def plans_of(run):
    """The plan of each phase, or an error that says why there is none."""
    rounds = sum(count for _, count, _, _ in run["phases"])
    for number, (sampler, count, separation, factor) in enumerate(run["phases"]):
        own = {key: run[key] for key in ("mechanism", "adjacency", "placement")}
        config = PrivacyConfig.parse(
            {"clip-norm": 2.0, "noise-multiplier": run["z"], "delta": DELTA, **own}
        )
        schedule = {
            "scheduled": Scheduled(20, separation),
            "in-turn": Scheduled(20, separation, rate=20 * separation / 400),
        }.get(sampler)
        plan = Plan.of(
            config,
            sampler,
            {"cohort": 20},
            400,
            rounds,
            schedule=schedule,
            phase_rounds=count,
            factor=factor,
        )
        yield f"phase-{number}", plan, count, (sampler, separation, factor * run["z"])


def dense(run, rounds):
    """C, with square-root bands by binomials."""
    settings = run["mechanism"]
    places = np.arange(settings["bands"])
    root = np.abs(binom(-0.5, places))
    column = np.convolve(root, root * settings["momentum"] ** places)[: len(places)]
    column = np.pad(column, (0, rounds))[:rounds]
    return toeplitz(column, np.zeros(rounds))


def expected(run, phases):
    """Epsilon by dp-accounting's loss distributions, whose Gaussian event is for a sensitivity of 1
    under add-remove; pure epsilon adds up for Laplace without delta."""
    event = pytest.importorskip("dp_accounting.dp_event")
    pld = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")
    accountant = pld.PLDAccountant()
    squares = 0.0
    for _, plan, count, (sampler, separation, z) in phases:
        local = run["placement"] == "local"
        if run["mechanism"]["name"] == "banded":
            apart = separation if sampler in ("scheduled", "in-turn") else 1
            columns = dense(run, count)[:, ::apart]
            if sampler != "in-turn" or plan.sampling.rate == 1:
                squares += float(np.abs(columns.T @ columns).sum()) / z**2
                continue
            for norm in np.linalg.norm(columns, axis=0):
                one = event.GaussianDpEvent(z / norm)
                accountant.compose(event.PoissonSampledDpEvent(plan.sampling.rate, one))
        else:
            gaussian = run["mechanism"]["name"] == "gaussian"
            one = event.GaussianDpEvent(z) if gaussian else event.LaplaceDpEvent(z)
            if sampler == "poisson" and not local:
                one = event.PoissonSampledDpEvent(20 / 400, one)
            accountant.compose(one, count)
    if squares:  # Gaussian releases of squared norms / noise add up
        accountant.compose(event.GaussianDpEvent(squares**-0.5))
    return accountant.get_epsilon(DELTA)


@pytest.mark.slow
def test_200_random_plans():
    random = np.random.default_rng(20)
    checked: Counter[tuple[str, str, str]] = Counter()
    refused = 0
    total = 0
    while total < 200:
        run = drawn(random)
        try:
            phases = list(plans_of(run))
        except ExperimentError as error:
            assert error.expected and error.got
            refused += 1
            continue
        if any(where[0] == "fixed-size" and run["placement"] != "local" for *_, where in phases):
            continue  # dp-accounting has no loss distribution without replacement
        accountant = Accountant("pld")
        for phase, plan, count, _ in phases:
            accountant.step_rounds(plan.event(phase), count)
        found = accountant.epsilon(DELTA).epsilon
        assert math.isfinite(found)
        assert found == pytest.approx(expected(run, phases), rel=1e-2, abs=2e-3), run
        total += 1
        checked[run["mechanism"]["name"], run["adjacency"], run["placement"]] += 1
    assert refused > 100  # what does not fit together is refused in words
    assert {name for name, _, _ in checked} == set(MECHANISMS)
    assert {adjacency for _, adjacency, _ in checked} == {"replace-one", "add-remove"}
    assert {placement for *_, placement in checked} == {"central", "distributed", "local"}
