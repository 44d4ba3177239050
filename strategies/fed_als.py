# SPDX-License-Identifier: Apache-2.0
"""Alternating least squares in rounds: clients solve for users, the server for items (Chien et al.
2021).

Clients run the step `als` on the model `ials` with `moments = true`. With sums over all clients,

    y_i = (user.gram + (c - 1) item.moments_i + lambda I)^-1 c item.right_i

One round with all clients is one sweep of implicit ALS (Hu et al. 2008): the baseline `ials` from
the same initial factors. The sums of a smaller cohort are scaled up to all clients.

Under differential privacy the sums are noisy; matrices are then projected onto the positive
semi-definite ones before they are solved with, which is post-processing. Where this differs from
the paper: a user's whole message has one clip norm, where the paper clips x_u and weights each of a
user's items.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field

from fedrec.config import Config
from fedrec.factors.gram import semi_definite
from fedrec.factors.packed import unpacked
from strategies.base import Aggregate, CohortStrategy
from strategies.fcf import GRAM, MOMENTS, RIGHT, refuse_other_models, summed, with_factors

_NUMBERS_AT_ONCE = 250_000  # numbers in the items' matrices that are solved at once, in the cache


class FedAlsConfig(Config):
    """Settings of solving for items; `weight` must be that of the step."""

    weight: float = Field(default=8.0, ge=1)
    """Weight c of a liked item; that of all others is 1."""
    regularisation: float = Field(default=10.0, gt=0)
    """Regularisation lambda of the items' factors."""


class FedAls(CohortStrategy):
    """Solves for the items' factors, exactly, in every round."""

    name = "fed-als"
    Config = FedAlsConfig
    paper = "DP-ALS (Chien et al. 2021); Hu et al. 2008"
    config: FedAlsConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client.

        Raises:
            ExperimentError: the model has no such parameters, or its clients send no moments.
        """
        refuse_other_models(theta, moments=True)
        sums = {
            name: torch.from_numpy(value)
            for name, value in summed(aggregate, theta, len(self.cohorts.clients)).items()
        }
        noisy = self.privacy is not None
        gram = (sums[GRAM] + sums[GRAM].T) / 2
        if noisy:
            gram = semi_definite(gram)
        width = len(gram)
        at_once = max(1, _NUMBERS_AT_ONCE // width**2)
        found = []
        for start in range(0, len(sums[RIGHT]), at_once):
            part = slice(start, start + at_once)
            moments = unpacked(sums[MOMENTS][part])
            if noisy:
                moments = semi_definite(moments)
            matrix = moments.mul_(self.config.weight - 1).add_(gram)
            matrix.diagonal(dim1=1, dim2=2).add_(self.config.regularisation)
            right = self.config.weight * sums[RIGHT][part].unsqueeze(-1)
            found.append(torch.cholesky_solve(right, torch.linalg.cholesky(matrix)).squeeze(-1))
        return with_factors(theta, torch.cat(found).numpy())
