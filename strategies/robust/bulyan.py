# SPDX-License-Identifier: Apache-2.0
"""Bulyan (El Mhamdi, Guerraoui and Rouault 2018): of updates that Krum's score chooses, the mean of
the values of each coordinate that are closest to its median.

Of n clients with f malicious ones, n - 2f are chosen, and n - 4f values of each coordinate are
averaged. The guarantee needs n >= 4f + 3.

Where this differs from the paper: the updates are chosen by their scores at once, as in Flower;
there Krum is repeated on those that are left.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedrec.errors import ExperimentError
from strategies.robust._choice import ChoiceConfig, nearest
from strategies.robust._rule import ClientChanges, RobustRule, squared_distances


class Bulyan(RobustRule):
    """Moves each coordinate by the mean of the values around the median of chosen updates.

    Raises:
        ExperimentError: the cohort is too small for the share of malicious clients.
    """

    name = "bulyan"
    Config = ChoiceConfig
    paper = "El Mhamdi, Guerraoui and Rouault 2018"
    config: ChoiceConfig

    def combined(
        self, changes: Mapping[str, ClientChanges], round_number: int
    ) -> dict[str, np.ndarray]:
        """The mean of the central values, `float64 [R, ...]` by parameter."""
        distances = squared_distances(changes)
        clients = len(distances)
        malicious = self.config.expected(clients)
        if clients < 4 * malicious + 3:
            raise ExperimentError(
                f"Bulyan withstands no {malicious} malicious clients among {clients}",
                expected=f"at least {4 * malicious + 3} clients in every round",
                got=str(clients),
                fix="set a larger sampler.cohort, or a smaller strategy.malicious",
            )
        chosen = nearest(distances, malicious, clients - 2 * malicious)
        count = clients - 4 * malicious
        return {name: _central(own.values[chosen], count) for name, own in changes.items()}


def _central(values: np.ndarray, count: int) -> np.ndarray:
    """Mean of the `count` values `[clients, ...]` of each coordinate that are closest to its
    median."""
    away = np.abs(values - np.median(values, axis=0))
    places = np.argsort(away, axis=0, kind="stable")[:count]
    return np.take_along_axis(values, places, axis=0).mean(axis=0)
