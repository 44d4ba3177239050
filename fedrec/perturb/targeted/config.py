# SPDX-License-Identifier: Apache-2.0
"""Settings of the targeted perturbation."""

from typing import Literal

from pydantic import Field

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
