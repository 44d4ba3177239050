# SPDX-License-Identifier: Apache-2.0
"""Histories from lists of items, and the users of a published fold."""

import numpy as np

from fedrec.baselines.base import Histories
from fedrec.baselines.private.base import PrivateBaseline
from fedrec.data.population import Population
from fedrec.data.reader import data_directory
from fedrec.experiment.loading import load
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import NonPrivate


def histories_of(lists, num_items):
    """Histories of users 0, 1, ... with these items each."""
    offsets = np.cumsum([0, *map(len, lists)])
    items = np.array([item for items in lists for item in items], dtype=np.int64)
    return Histories(num_items, offsets, items)


def spent(system: PrivateBaseline, users: int) -> Report:
    """What all releases of a private system cost together, for so many training users."""
    accountant = Accountant("pld")
    plans = system.plans(users)
    for part in system.parts():
        event = plans[part.name].event(part.name)
        accountant.step(NonPrivate(part.unfounded) if part.unfounded else event, part.releases)
    return accountant.epsilon(system.config.delta)


def published_fold(fold):
    """MovieLens-100K, divided as in its file of a fold from 1 to 5."""
    folder = str(data_directory() / "ml-100k")
    split = {"name": "kfold", "shipped": True, "fold": fold, "folder": folder}
    table = {"name": "x", "rounds": 1, "task": "rating", "dataset": {"name": "ml-100k"}}
    return Population.of(load({**table, "split": split}))
