# SPDX-License-Identifier: Apache-2.0
"""Shared item embeddings, private everything else: the mean of the clients' item updates.

    items <- items + server-lr * mean over the cohort of (items_k - items)

What clients keep is zero in what they send. A sum in which it is not zero means that a device sent
what must stay on it, and the round is refused rather than used.

Where this differs from the paper: it averages the item tables of all clients in every round; here a
cohort takes part, and `server-lr` makes up for the fact that few of its members touch any one row.
"""

from __future__ import annotations

import fnmatch

import numpy as np
from pydantic import Field

from fedrec.config import Config
from fedrec.errors import ClientError
from fedrec.protocol.updates import SparseUpdate
from strategies.base import Aggregate, CohortStrategy


class SharedItemsConfig(Config):
    """Settings of the strategy."""

    server_lr: float = Field(default=1.0, gt=0)
    """How far the item embeddings move towards the mean of the clients'."""
    private: tuple[str, ...] = ("score.*",)
    """Patterns of parameters that stay on the devices."""


class SharedItems(CohortStrategy):
    """Averages what is shared, and refuses what is private.

    It uses nothing but the sum of the updates, so it may run under differential privacy; what stays
    on the devices needs none.
    """

    Config = SharedItemsConfig
    paper = "PFedRec (Zhang et al. 2023), algorithm 1"
    config: SharedItemsConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """The next global parameters from the present ones and a round's aggregate with at least
        one client.

        Raises:
            ClientError: private parameters arrived.
        """
        for name in theta:
            change = aggregate.changes[name]
            values = change.values if isinstance(change, SparseUpdate) else change
            if self.is_private(name) and self.privacy is None and np.any(values):
                raise ClientError(
                    f"a client sent {name!r}, which has to stay on its device",
                    expected="zeros in its place",
                    got="other numbers",
                    fix=(
                        "step.name = 'dual-personal', or private-parameters of the step that is"
                        " used"
                    ),
                )
        kept = {name: value.copy() for name, value in theta.items() if self.is_private(name)}
        return aggregate.added_to(theta, self.config.server_lr / aggregate.clients) | kept

    def is_private(self, name: str) -> bool:
        """Whether a parameter stays on the devices."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.config.private)
