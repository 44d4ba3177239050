# SPDX-License-Identifier: Apache-2.0
"""Settings of the targeted perturbation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedrec.config import Config


class TargetedConfig(Config):
    """Perturbation of each client's training rows on its device, drawn once and the same in every
    round.

    Drawing anew in each round would publish a client's profile as often as it is sampled, so that
    is not offered.
    """

    attribute: str
    """Name of a user feature with at most one category per user, such as `gender`: what is to be
    hidden."""
    epsilon: float = Field(gt=0)
    """Nominal epsilon of one protected interaction; what it truly gives is in `fedrec perturb`."""
    budget: float = Field(default=0.0, ge=0, le=1)
    """Data budget beta: the share of a profile that is left untouched."""
    select: Literal["stereotypical", "random"] = "stereotypical"
    """Which interactions are protected: the most stereotypical ones of the profile (equation 1), or
    random ones."""
    mechanism: Literal["coin-flip", "randomised-response"] = "coin-flip"
    """`coin-flip`: equation 2; `randomised-response`: over the whole catalogue, whose epsilon is
    what it says."""
    distinct_fakes: bool = False
    """Draw a profile's replacements without repetition (coin-flip only); equation 2 draws each by
    itself."""
    public_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the training users whose raw data are public and alone give the stereotypes;
    default: all give them."""

    @model_validator(mode="after")
    def _distinct_where_it_means_something(self) -> Self:
        if self.distinct_fakes and self.mechanism != "coin-flip":
            raise ValueError("distinct-fakes with mechanism = 'coin-flip' only")
        return self
