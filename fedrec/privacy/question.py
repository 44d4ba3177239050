# SPDX-License-Identifier: Apache-2.0
"""Accounting questions of the command line, by numbers of rounds, clients and noise."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.backend import DEFAULT_BACKEND, BackendName
from fedrec.privacy.accounting.sampling import Scheduled
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.caveats import caveats
from fedrec.privacy.config import PrivacyConfig
from fedrec.privacy.noise_multiplier import default_delta
from fedrec.privacy.plan import Plan


class Question(Config):
    """Parameters of a question; exactly one of `noise-multiplier` and `epsilon`."""

    clients: int = Field(ge=1)
    """Clients that may be drawn (N)."""
    cohort: float = Field(gt=0)
    """Clients per round (M), a whole number unless the sampler is poisson; at most the number of
    clients."""
    rounds: int = Field(ge=1)
    """Number of rounds (T)."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Noise scale / sensitivity, > 0: the sensitivity is 2S under replace-one and S under
    add-remove."""
    epsilon: float | None = Field(default=None, gt=0)
    """Target for all rounds, > 0."""
    delta: float | None = Field(default=None, ge=0, le=0.1)
    """A probability, 0 <= delta <= 0.1; default: the smaller of N^-1.1 and 1e-5."""
    sampler: Literal["fixed-size", "poisson", "scheduled"] = "fixed-size"
    """How cohorts are drawn: fixed-size (without replacement) goes with replace-one, poisson with
    add-remove; scheduled: known rounds, for mechanisms that need a separation."""
    separation: int | None = Field(default=None, ge=1)
    """With the sampler scheduled: smallest distance between two rounds of a client; default: 1."""
    secret_cohorts: bool = False
    """With the sampler scheduled and add-remove: whether clients whose turn it is take part by
    secret, independent coin flips."""
    adjacency: Adjacency = "replace-one"
    """replace-one (with fixed-size) or add-remove (with poisson)."""
    backend: BackendName | Literal["paper"] = DEFAULT_BACKEND
    """Accountant: pld is the tightest; paper is the arithmetic of PrivRec's tables, for comparison
    only."""
    mechanism: str | dict[str, Any] = "gaussian"
    """Mechanism, see `fedrec list mechanism`: its name, or a table with its name and settings."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("exactly one of noise-multiplier and epsilon")
        if self.epsilon is not None and self.backend == "paper":
            raise ValueError(
                "backend autodp or pld: noise is not calibrated to the paper's arithmetic"
            )
        scheduled = self.sampler == "scheduled"
        if (self.separation is not None or self.secret_cohorts) and not scheduled:
            raise ValueError("separation and secret-cohorts only with the sampler scheduled")
        if scheduled and self.cohort * (self.separation or 1) > self.clients:
            needed = f"{self.cohort:g} x {self.separation or 1}"
            raise ValueError(f"at least {needed} clients, so many in each of as many groups")
        return self

    @property
    def failing(self) -> float:
        """The given or default delta."""
        return default_delta(self.clients) if self.delta is None else self.delta

    def plan(self) -> Plan:
        """The plan of these rounds, with clip norm 1.

        Raises:
            ExperimentError: there is no bound for such rounds, or no noise reaches the target.
        """
        config = PrivacyConfig(
            clip_norm=1.0,
            noise_multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            # noise that is given has an epsilon at delta 0, too: an infinite one, if need be
            delta=self.failing if self.epsilon else self.failing or None,
            mechanism=self.mechanism,
            adjacency=self.adjacency,
            backend=DEFAULT_BACKEND if self.backend == "paper" else self.backend,
        )
        return Plan.of(
            config,
            self.sampler,
            {"cohort": self.cohort},
            self.clients,
            self.rounds,
            schedule=self.schedule,
        )

    @property
    def schedule(self) -> Scheduled | None:
        """What is known of a client's rounds; None: there is no schedule."""
        if self.sampler != "scheduled":
            return None
        groups = self.separation or 1
        rate = self.cohort * groups / self.clients if self.secret_cohorts else 1.0
        return Scheduled(self.cohort, groups, rate=rate)

    def answer(self, plan: Plan) -> Report:
        """Cost of the rounds of a plan, and the epsilon of the best known attack."""
        return report(plan, backend=self.backend, delta=self.failing)


def report(plan: Plan, *, backend: str | None = None, delta: float | None = None) -> Report:
    """Cost of all rounds of a plan.

    Args:
        plan: what is done.
        backend: accountant; default: the plan's own.
        delta: default: the plan's own.
    """
    accountant = Accountant(backend or plan.config.backend)
    accountant.step_rounds(plan.event(), plan.rounds)
    said = caveats(plan, backend=backend)
    return accountant.epsilon(plan.delta if delta is None else delta, attack=True, caveats=said)
