# SPDX-License-Identifier: Apache-2.0
"""Settings of the targeted perturbation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config


class TargetedConfig(Config):
    """Perturbation of each client's training rows on its device, drawn once for all rounds. A new
    draw per round would publish a client's profile as often as it is sampled, and is not supported.
    """

    attribute: str
    """The attribute to hide: name of a user feature with at most one category per user, such as
    `gender`."""
    epsilon: float = Field(gt=0)
    """Nominal epsilon of one protected interaction; `fedrec perturb` reports the true guarantee."""
    budget: float = Field(default=0.0, ge=0, le=1)
    """Data budget beta: the share of a profile that is not perturbed."""
    select: Literal["stereotypical", "random"] = "stereotypical"
    """Protected interactions: the most stereotypical ones of the profile (equation 1), or random
    ones."""
    mechanism: Literal["coin-flip", "randomised-response"] = "coin-flip"
    """Mechanism: `coin-flip` (equation 2), or `randomised-response` over the whole catalogue, whose
    stated epsilon holds."""
    distinct_fakes: bool = False
    """Whether to draw a profile's replacements without repetition (coin-flip only); equation 2
    draws them independently."""
    public_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of training users with public data, from which alone the stereotypes are computed;
    default: all users."""

    @model_validator(mode="after")
    def _distinct_where_it_means_something(self) -> Self:
        if self.distinct_fakes and self.mechanism != "coin-flip":
            raise ValueError("distinct-fakes with mechanism = 'coin-flip' only")
        return self
