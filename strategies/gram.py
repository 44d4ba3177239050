# SPDX-License-Identifier: Apache-2.0
"""A linear item-to-item model from the sum of the clients' products: EASE or PureSVD in one round.

    B_ij = -P_ij / P_jj,    P = (G + lambda I)^-1,    G = sum over clients of (D x)(D x)^T

(Steck 2019, equation 8). The server needs only the sum, so secure aggregation can hide every
client's products, and a single Gaussian release makes the model private. With every client in the
round and no noise the weights are those of the centralised EASE. Cohorts of several rounds are
added up and scaled to the whole population.

    [strategy]
    name = "popularity-start"
    main = { name = "gram" }

counts the items first. The most popular items then have weights and the others follow in the order
of their popularity, which is necessary for catalogues of more than the model's `items`.

Where this differs from the papers: they solve it centrally. Under noise the eigenvalues below the
noise edge are cut first, and lambda grows with it (`fedrec.baselines.factorisation._gram`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from pydantic import Field

from fedrec.baselines.factorisation._gram import Solution, noise_edge, solved_weights
from fedrec.components import registry
from fedrec.config import Config
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_settings
from fedrec.models.item_weights import (
    BIAS,
    WEIGHTS,
    ItemScaleConfig,
    chosen_items,
    item_scale,
)
from strategies.base import Aggregate, Cohorts, CohortStrategy


class GramConfig(Config):
    """Settings of the linear model."""

    solution: Solution = "ease"
    """`ease`, or `puresvd`, which keeps the leading eigenvectors and is more robust to noise."""
    regularisation: float = Field(default=300.0, gt=0)
    """Regularisation lambda of `ease`, > 0; about 100 to 1000."""
    factors: int = Field(default=12, ge=1)
    """Largest number of eigenvectors of `puresvd`; those below the noise edge are dropped in any
    case."""
    ridge: float = Field(default=1.0, ge=0)
    """Amount added to lambda under noise, in units of the noise edge."""


class Gram(CohortStrategy):
    """Sums the products and solves for the weights."""

    Config = GramConfig
    paper = "EASE (Steck 2019), equation 8"
    config: GramConfig

    def __init__(self, config: GramConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._total = np.zeros((0, 0))
        self._clients, self._variance = 0.0, 0.0

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client.

        Raises:
            ExperimentError: the model has no weights between items.
        """
        if WEIGHTS not in theta or BIAS not in theta:
            raise ExperimentError(
                "the model has no weights between items",
                expected="model.name = 'item-weights' and step.name = 'gram'",
                got=", ".join(theta),
                fix="set both, or another strategy",
            )
        own = aggregate.total(theta)[WEIGHTS]
        self._total = own + self._total if self._total.size else own
        self._clients += aggregate.clients
        if self.privacy is not None:
            self._variance += (self.privacy.plan.mean_noise_std * aggregate.clients) ** 2
        return {**theta, WEIGHTS: self._solved(theta[BIAS])}

    def state(self) -> dict[str, np.ndarray]:
        """The sum so far, the number of clients in it, and the variance of its noise."""
        numbers = np.array([self._clients, self._variance])
        return {"total": self._total, "numbers": numbers}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._total = np.asarray(state["total"], dtype=np.float64)
        self._clients, self._variance = (float(number) for number in state["numbers"])

    def _solved(self, bias: np.ndarray) -> np.ndarray:
        """The weights, in the items' own scale."""
        factor = len(self.cohorts.clients) / max(self._clients, 1.0)
        gram = torch.from_numpy((self._total + self._total.T) * (factor / 2))
        edge = noise_edge(factor * math.sqrt(self._variance), len(gram))
        config = self.config
        weights = solved_weights(
            gram,
            edge,
            solution=config.solution,
            factors=config.factors,
            regularisation=config.regularisation,
            ridge=config.ridge,
        )
        biases = torch.from_numpy(np.array(bias[:, 0]))
        chosen = biases[chosen_items(biases, len(gram))]
        scale = item_scale(chosen, self._exponent())
        return (scale[:, None] * weights / scale).float().numpy()

    def _exponent(self) -> float:
        """By which the step scaled the items; a step without that setting counts all alike."""
        settings = component_settings(registry.STEP, Section(**self.step))
        return settings.exponent if isinstance(settings, ItemScaleConfig) else 0.0
