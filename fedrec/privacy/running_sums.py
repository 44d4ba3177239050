# SPDX-License-Identifier: Apache-2.0
"""Noise on running sums, which is what a server's rule makes of the noise of single rounds, beside
independent Gaussian noise of the same epsilon."""

from __future__ import annotations

from dataclasses import dataclass

from fedrec.privacy.accounting.accountant import Accountant
from fedrec.privacy.accounting.calibration import calibrate
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.sampling import FixedSize, Poisson, Sampling
from fedrec.privacy.mechanisms.base import Mechanism, mechanism_of
from fedrec.privacy.plan import Plan


@dataclass(frozen=True)
class RunningSums:
    """Root mean squares over the rounds, per coordinate, in units of the sensitivity of a round.

    Attributes:
        noise: of the plan's mechanism.
        independent: of independent noise with the plan's cohorts.
        secret: of independent noise with as large cohorts from all clients, which have to be
            secret.
    """

    noise: float
    independent: float
    secret: float


def running_sums(plan: Plan) -> RunningSums | None:
    """The noise of a plan's rounds; None where it is independent and costs the same.

    Raises:
        ExperimentError: no independent noise has the same epsilon.
    """
    mechanism = plan.mechanism
    if not mechanism.correlated or not plan.noise_multiplier:
        return None
    accountant = Accountant(plan.config.backend)
    accountant.step(plan.event())
    epsilon = accountant.epsilon(plan.delta).epsilon
    independent = mechanism_of({"name": "banded", "bands": 1, "momentum": mechanism.momentum})
    cohort = plan.denominator
    by_coins = plan.config.adjacency == "add-remove"
    secret = Poisson(cohort / plan.clients) if by_coins else FixedSize(round(cohort), plan.clients)
    rounds = plan.phase_rounds

    def noise(other: Mechanism, sampling: Sampling) -> float:
        def releases(multiplier: float) -> dict[Release, int]:
            one = other.release(sampling, plan.config.adjacency, multiplier)
            return other.releases(one, rounds, sampling)

        found = calibrate(epsilon, plan.delta, releases, backend=plan.config.backend)
        return found * independent.running_sums(rounds)

    return RunningSums(
        plan.noise_multiplier * mechanism.running_sums(rounds),
        noise(independent, plan.sampling),
        noise(mechanism_of("gaussian"), secret),
    )
