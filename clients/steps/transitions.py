# SPDX-License-Identifier: Apache-2.0
"""A client's part in a model of transitions: which of its items follows which, once.

It sends the transitions of its own sequence (`fedrec.factors.transitions`), i to j, with i and j
multiplied by the items' scale, as the change of the model's weights. The sum over clients is that
of everybody's transitions. Nothing is trained, and the window and decay are the model's.

Clipped in L2 and noised like any other update, the sum is a differentially private release. A
sequence of n items has at most n x window transitions, and its norm is at most that of its sums per
pair; entries are not negative, so that replacing a client moves the clipped sum by sqrt(2) S at
most (`fedrec.privacy.adjacency`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from clients.local.sufficient_statistics import OnceConfig, SufficientStatistics
from fedrec.data.client_data import ClientData
from fedrec.data.population import Population
from fedrec.data.time_weighting import RecencyConfig
from fedrec.errors import ExperimentError
from fedrec.factors.chosen_items import BIAS, ItemScaleConfig, chosen_items, item_scale
from fedrec.factors.transitions import transitions
from fedrec.models.base import HistoryModel, Model
from fedrec.models.item_weights import WEIGHTS


class TransitionsStepConfig(OnceConfig, ItemScaleConfig):
    """Settings of a client's transitions."""


class TransitionsStep(SufficientStatistics):
    """Sends the transitions of one sequence.

    Raises:
        ExperimentError: the model is not one of transitions.
    """

    name = "transitions"
    Config = TransitionsStepConfig
    contributions = "non-negative"
    paper = "a smoothed Markov chain as a sum over users"
    config: TransitionsStepConfig

    def __init__(self, config: TransitionsStepConfig, model: Model, device: torch.device) -> None:
        super().__init__(config, model, device)
        recency = model.recency if isinstance(model, HistoryModel) else None
        if recency is None:
            raise ExperimentError(
                f"model {type(model).__name__!r} has no transitions of items",
                expected="model.name = 'transitions'",
                got=type(model).__name__,
                fix="set model.name = 'transitions', or another step",
            )
        self.recency: RecencyConfig = recency

    def entries(
        self, parameters: Mapping[str, Tensor], items: np.ndarray, weights: np.ndarray
    ) -> tuple[str, np.ndarray, np.ndarray]:
        """The weight of each pair of chosen items times the scale of both, at the pair's place in
        the weights; `items` are numbers of pairs."""
        catalogue = self.model.schema.num_items
        size = len(parameters[WEIGHTS])
        bias = parameters[BIAS][:, 0].cpu()[:catalogue]
        chosen = chosen_items(bias, size)
        scale = item_scale(bias[chosen], self.config.exponent).numpy()
        row_of = np.full(catalogue, -1)
        row_of[chosen.numpy()] = np.arange(size)
        first, second = (row_of[side] for side in np.divmod(items, catalogue))
        places = np.where((first >= 0) & (second >= 0), first * size + second, -1)
        return WEIGHTS, places, weights * scale[first] * scale[second]

    def _history(self, data: ClientData) -> tuple[np.ndarray, np.ndarray]:
        own = data.sequence() if self.config.epochs else data.items[:0]
        return self._pairs(np.array([0, len(own)]), own)[1:]

    def _histories(
        self, population: Population, clients: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._pairs(*population.sequences(clients))

    def _pairs(
        self, offsets: np.ndarray, items: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets, numbers of pairs and weights of sequences."""
        catalogue = self.model.schema.num_items
        found = transitions(offsets, items, catalogue, self.recency)
        return found.offsets, found.first * catalogue + found.second, found.weights
