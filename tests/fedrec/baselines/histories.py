# SPDX-License-Identifier: Apache-2.0
"""Histories from lists of items, systems by name, and the users of a published fold."""

from typing import Any

import numpy as np

from fedrec.baselines.base import Histories
from fedrec.baselines.private.ranking import PrivateBaseline
from fedrec.components.registry import BASELINE, resolve
from fedrec.data.population import Population
from fedrec.data.reader import data_directory
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Accountant, Report
from fedrec.privacy.accounting.events import NonPrivate


def histories_of(lists, num_items):
    """Histories of users 0, 1, ... with these items each."""
    offsets = np.cumsum([0, *map(len, lists)])
    items = np.array([item for items in lists for item in items], dtype=np.int64)
    return Histories(num_items, offsets, items)


def drawn_histories(num_users: int, num_items: int, most: int, seed: int = 0) -> Histories:
    """Random histories of 1 to `most` distinct items, skewed to the first ones; users are numbered
    from 100 down."""
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(3, num_items + 3)
    chances /= chances.sum()
    sizes = (random.integers(1, most + 1) for _ in range(num_users))
    lists = [random.choice(num_items, size, replace=False, p=chances) for size in sizes]
    offsets = np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)
    users = 100 + np.arange(num_users)[::-1]
    return Histories(num_items, offsets, np.concatenate(lists).astype(np.int64), users)


def made(name: str, **options: Any) -> Any:
    """A system by name, from its settings."""
    cls = resolve(BASELINE, name)
    return cls(cls.Config.parse({key.replace("_", "-"): value for key, value in options.items()}))


def fitted(name: str, histories: Histories, **options: Any) -> Any:
    """A system by name, fitted."""
    system = made(name, **options)
    system.fit(histories)
    return system


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
    split = {"name": "kfold", "fold": fold, "folder": folder}
    table = {"name": "x", "rounds": 1, "task": "rating", "dataset": {"name": "ml-100k"}}
    return Population.of(load({**table, "split": split}))
