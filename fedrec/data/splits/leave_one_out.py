# SPDX-License-Identifier: Apache-2.0
"""Leave one out: each user's last row is tested (He et al., Neural Collaborative Filtering, WWW
2017, section 4.1).

The protocol of NCF and of most federated recommenders (FedMF, PFedRec). Users with fewer than three
rows are not tested, so that a tested user always has training rows, and so that the test rows do
not depend on `validation`.

Each user is cut at a time of its own, so training rows of others may be later than a tested row: a
system learns what became popular, and what followed what, after the time at which it is asked. The
split `global-time` has no such leak.
"""

from __future__ import annotations

import numpy as np

from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition, Split
from fedrec.data.splits._order import Order, places, sort_key, users_of
from fedrec.privacy.adjacency import Adjacency

_FEWEST_ROWS = 3


class LeaveOneOutConfig(Config):
    """Settings of leave-one-out."""

    validation: bool = True
    """Whether to hold out the row before the last one for validation; false: it is a training
    row."""
    leaky_negatives: bool = False
    """Whether to exclude held-out items from the sampled negatives, as the public code of PFedRec,
    GPFedRec and FedRAP does. This leaks the test item and exists only to explain their results;
    every result table reports it."""
    order: Order = "temporal"
    """Definition of the last row: "temporal" (by time; the seed orders rows of equal times) or
    "random"."""


class LeaveOneOut(Split):
    """The last row of each user is tested, the one before chooses settings, the others train, those
    of other users that are later than a tested row, too (`global-time` has none of these)."""

    name = "leave-one-out"
    Config = LeaveOneOutConfig
    config: LeaveOneOutConfig

    def depends_on(self, adjacency: Adjacency) -> str:
        """Nothing: a random order is each client's own."""
        return ""

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions; every user with a training row is a training client.

        Raises:
            DataError: the order is temporal and the interactions have no times.
        """
        key = sort_key(interactions, self.config.order, self.seed)
        place, count = places(interactions.users, key)
        from_end = np.where(count >= _FEWEST_ROWS, count - 1 - place, count)
        test = from_end == 0
        validation = (from_end == 1) & (count >= _FEWEST_ROWS) & self.config.validation
        train = ~(test | validation)
        return Partition(
            training_clients=users_of(interactions, train),
            train_rows=np.flatnonzero(train),
            validation_rows=np.flatnonzero(validation),
            test_rows=np.flatnonzero(test),
            leaky_negatives=self.config.leaky_negatives,
        )
