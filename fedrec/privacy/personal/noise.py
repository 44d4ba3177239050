# SPDX-License-Identifier: Apache-2.0
"""Settings of noise that each user adds on its own device, and the user's cost of an upload.

For a step with such settings the server accounts for each user separately. Everything here depends
on the settings and the user's id, never on data.

Where this differs from DP-VAE (Fang et al. 2022): see `fedrec.privacy.personal.budgets`. A clip
norm can follow the gradients without access to raw values: each upload contains one noisy number,
the share of the user's gradients within the bound, and the shared bound follows a quantile of it
(Andrew et al. 2021, there under central noise).
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config
from fedrec.privacy.accounting.gdp import gdp_parameter
from fedrec.privacy.adjacency import Adjacency
from fedrec.privacy.clipping import Clip
from fedrec.privacy.personal.budgets import PersonalBudget, drawn_budget
from fedrec.privacy.personal.priors import PriorsConfig

PAPER_MODE = "no finite guarantee: the clip norm comes from private data"


class QuantileConfig(Config):
    """A clip norm that follows a quantile of the users' gradient norms, released under noise."""

    quantile: float = Field(default=0.5, ge=0, le=1)
    """Target share of gradients that are not clipped."""
    rate: float = Field(default=0.2, gt=0)
    """Step of S <- S exp(-rate (share unclipped - quantile)); the server's learning rate multiplies
    it."""
    share: float = Field(default=0.1, gt=0, lt=1)
    """Share of an upload's cost (squared sensitivity / noise) for the noisy number."""


class PersonalNoise(Config):
    """Settings of noise that each user adds."""

    mode: Literal["sound", "paper"] = "sound"
    """`sound`: a clip norm that is fixed or found under noise; `paper`: the paper's, from private
    data, without any guarantee."""
    clip_norm: float = Field(default=1.5, ge=1e-9)
    """Clip norm S in mode `sound` (paper: constant bounds of 1.5 and 2); the initial one with
    `quantile`."""
    epsilon: float = Field(default=1.0, gt=0)
    """The users' epsilon, or the largest one if they are drawn (paper: 1)."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The users' delta (paper: 1 / number of training rows)."""
    budgets: Literal["uniform", "equal"] = "uniform"
    """Whether each user's epsilon is drawn from (0, epsilon] (paper), or is the same for all."""
    budget_seed: int | None = Field(default=None, ge=0)
    """Seed of the drawn budgets and of noise on the priors; default: the experiment's seed."""
    participations: int | None = Field(default=None, ge=1)
    """Number of uploads that epsilon_k covers together, which a real node also counts over all runs
    and a simulation in its run; default: the paper's noise, for one upload, and no limit."""
    quantile: QuantileConfig | None = None
    """In mode `sound`: a clip norm that follows a noisy quantile; default: a fixed clip norm."""
    priors: PriorsConfig | None = None
    """Priors of the users' codes from their metadata (equation 11); default: standard normal."""
    noise: Literal["reproducible", "secure", "summed"] = "reproducible"
    """`reproducible`: from the seed, a simulation; `secure`: from the operating system's generator;
    `summed` (step `dpvae`): a simulation of very many users, in which the noise is drawn once for
    the sum of a node's users, of the same distribution, and no single upload exists."""

    @model_validator(mode="after")
    def _noise_fits(self) -> Self:
        if self.mode == "paper" and self.quantile is not None:
            raise ValueError(
                "no quantile with mode = 'paper', whose clip norm is that of algorithm 2"
            )
        if self.noise == "summed" and self.quantile is not None:
            raise ValueError("no quantile with noise = 'summed', which is of gradients alone")
        if self.noise == "secure" and self.noisy_priors is not None:
            raise ValueError(
                "priors.noise = false with noise = 'secure': noise on priors is drawn once, and is"
                " not kept on the device; priors that stay on the device need none"
            )
        return self

    def seeded(self, seed: int) -> Self:
        """The same settings; seeds that are not set are derived from the experiment's seed."""
        return (
            self if self.budget_seed is not None else self.model_copy(update={"budget_seed": seed})
        )

    @property
    def own_seed(self) -> int:
        """The seed of budgets and priors; settings outside an experiment have 0."""
        return self.budget_seed or 0

    @property
    def noisy_priors(self) -> PriorsConfig | None:
        """The priors, if noise is added to them; otherwise they never leave the device."""
        return self.priors if self.priors is not None and self.priors.noise else None

    def budget(self, client: int) -> PersonalBudget:
        """The requested guarantee of a user."""
        if self.budgets == "equal":
            return PersonalBudget(self.epsilon, self.delta)
        return drawn_budget(self.own_seed, client, self.epsilon, self.delta)

    def of_largest_budget(self) -> Self:
        """The same settings, with the largest budget for every user."""
        return self.model_copy(update={"budgets": "equal"})

    def noise_multiplier(self, client: int) -> float:
        """Standard deviation / S of noise that uses the cost of a whole upload."""
        budget = self.budget(client)
        if self.participations is None:
            return budget.paper_multiplier
        left = 1.0 if self.noisy_priors is None else 1 - self.noisy_priors.share
        return budget.multiplier(self.participations) / math.sqrt(left)

    def gradient_multiplier(self, client: int) -> float:
        """Standard deviation / S of the noise on a user's gradient."""
        return self.noise_multiplier(client) / math.sqrt(
            1.0 if self.quantile is None else 1 - self.quantile.share
        )

    def share_std(self, client: int) -> float:
        """Standard deviation of the noise on the share of gradients within the bound, which is in
        [0, 1]."""
        share = 0.0 if self.quantile is None else self.quantile.share
        return self.noise_multiplier(client) / (2 * math.sqrt(share)) if share else 0.0

    def prior_multiplier(self, client: int) -> float:
        """Standard deviation / L2 sensitivity of the noise on a user's prior, mean and variance as
        one release."""
        priors = self.noisy_priors
        budget = self.budget(client)
        if priors is None:
            return 0.0
        if self.participations is None:
            return budget.paper_multiplier
        return 1 / (gdp_parameter(budget.epsilon, budget.delta) * math.sqrt(priors.share))

    def cost(self, client: int, adjacency: Adjacency, uploads: int) -> float:
        """Squared parameter mu of all releases of a user together, see
        `fedrec.privacy.personal.budgets`; infinite for any upload with mode `paper`. Priors are
        released with the first upload."""
        if not uploads:
            return 0.0
        if self.mode == "paper":
            return math.inf
        moved = Clip(1.0).sensitivity(adjacency)
        total = uploads * (moved / self.gradient_multiplier(client)) ** 2
        if self.quantile is not None:
            total += uploads / self.share_std(client) ** 2
        if self.noisy_priors is not None:
            total += self.prior_multiplier(client) ** -2
        return total

    def weight(self, client: int) -> float:
        """Precision of a user's noise relative to that of the largest budget, in (0, 1]; public,
        like budgets."""
        generous = PersonalBudget(self.epsilon, self.delta)
        if self.participations is None:
            return (generous.paper_multiplier / self.budget(client).paper_multiplier) ** 2
        return (generous.multiplier(1) / self.budget(client).multiplier(1)) ** 2
