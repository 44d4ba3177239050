# SPDX-License-Identifier: Apache-2.0
"""Held-out items without training rows have a line of their own, for federated and centralised
systems."""

import numpy as np
import pytest
import torch

from fedrec.baselines.base import Baseline
from fedrec.data.features import FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.data.split import Partition
from fedrec.evaluation.central import CentralEvaluation
from fedrec.evaluation.groups import UNTRAINED_ITEMS, group_gaps
from fedrec.evaluation.table import Evaluated
from fedrec.experiment.tables import EvaluationConfig

USERS = 12
ITEMS = 20
COLD = (15, 16, 17, 18, 19)


@pytest.fixture(scope="module")
def population():
    """Two thirds of the users train; items from 15 on are only held out; user 0 holds out none of
    them, and item 14 is known to test users alone."""
    random = np.random.default_rng(2)
    rows = []
    for user in range(USERS):
        known = random.choice(14, 4, replace=False)
        if user >= 8:
            known = np.append(known, 14)
        wanted = [item for item in random.permutation(ITEMS) if item not in known and item != 14]
        held_out = [item for item in wanted if user or item not in COLD][:6]
        rows += [(user, item, part) for own, part in ((known, 0), (held_out, 1)) for item in own]
    users, items, part = np.array(rows).T
    data = Interactions(
        "hand", users, items, np.arange(USERS), np.arange(ITEMS), FeatureTable(USERS),
        FeatureTable(ITEMS),
    )  # fmt: skip
    none = np.empty(0, dtype=np.int64)
    parts = Partition(np.arange(8), np.flatnonzero(part == 0), none, np.flatnonzero(part == 1))
    return Population(data, parts, task="ranking", positive_above=None)


class FixedScores(Baseline):
    """Scores that were drawn before."""

    values = np.random.default_rng(4).permutation(USERS * ITEMS).reshape(USERS, ITEMS)

    def fit(self, histories):
        pass

    def scores(self, histories):
        return torch.from_numpy(self.values[histories.users].astype(np.float32))


def hits_by_hand(population, k):
    """Mean over users of the share of their held-out untrained items that fewer than k items
    beat, of those that the user has in no part."""
    data = population.interactions
    held_out = np.isin(np.arange(len(data)), population.partition.test_rows)
    shares = []
    for user in range(USERS):
        own = data.items[data.users == user]
        tested = data.items[(data.users == user) & held_out]
        never = np.setdiff1d(np.arange(ITEMS), own)
        score = FixedScores.values[user]
        cold = [item for item in tested if item in (*COLD, 14)]
        if cold:
            shares.append(np.mean([(score[never] > score[item]).sum() < k for item in cold]))
    return len(shares), np.mean(shares)


def test_they_are_those_that_no_training_user_has(population):
    assert np.flatnonzero(population.untrained_items).tolist() == [14, *COLD]


def test_their_line_is_the_mean_over_them_alone(population):
    found = CentralEvaluation(population, EvaluationConfig(ks=(3, 5))).measure(
        FixedScores(Baseline.Config())
    )
    groups = found.groups()
    for k in (3, 5):
        count, share = hits_by_hand(population, k)
        assert groups.loc[UNTRAINED_ITEMS, "count"] == count
        assert groups.loc[UNTRAINED_ITEMS, f"hits@{k}"] == pytest.approx(share)
    assert count == USERS - 1 and 0 < share < 1
    assert UNTRAINED_ITEMS not in " ".join(map(str, found.users.columns))
    assert group_gaps(groups).index.tolist() == ["activity"], "they are no group of users"


def test_parts_without_such_items_are_joined(population):
    evaluation = CentralEvaluation(population, EvaluationConfig(ks=(3,)), block=1)
    parts = evaluation.measure(FixedScores(Baseline.Config()))
    whole = CentralEvaluation(population, EvaluationConfig(ks=(3,))).measure(
        FixedScores(Baseline.Config())
    )
    assert parts.groups().equals(whole.groups())
    assert UNTRAINED_ITEMS not in Evaluated(whole.clients, whole.metrics).groups().index
