# SPDX-License-Identifier: Apache-2.0
"""Malicious users, added to a dataset after it was split, so that honest users keep their parts.

A malicious user has the side features of an honest user that the seed draws, and the training rows
of a profile that its attack makes up; it has no held-out rows. Targets are rated highest. Other
items are rated highest for ranking, and at the mean for rating; times follow the last time of the
dataset, in the order of the profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedrec.components import registry
from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.data.adversary.known import Known, known_of
from fedrec.data.interactions import Interactions, more_ids
from fedrec.data.split import Partition
from fedrec.experiment.sections import component_of
from fedrec.experiment.tables import DataSettings
from fedrec.rng import stream


@dataclass(frozen=True, eq=False)
class WithMalicious:
    """A dataset with malicious users.

    Attributes:
        interactions: the dataset; theirs are the last user numbers.
        partition: its parts; they are training clients.
        known: what the adversary knows.
    """

    interactions: Interactions
    partition: Partition
    known: Known


def with_malicious(
    settings: DataSettings, interactions: Interactions, partition: Partition
) -> WithMalicious | None:
    """A split dataset with the experiment's malicious users; None without `[adversary]`.

    Raises:
        ExperimentError: attack or targets are unknown.
        ComponentError: the attack failed, or made up a profile of other items.
    """
    if settings.adversary is None:
        return None
    known = known_of(settings.adversary, settings.seed, interactions, partition)
    attack = component_of(registry.POISONING, settings.adversary.attack)
    profiles = [_profile(attack, known, client) for client in known.malicious.tolist()]
    added = _with_rows(settings, interactions, partition, known, profiles)
    rows = np.arange(len(interactions), len(added))
    parts = replace(
        partition,
        training_clients=np.concatenate([partition.training_clients, known.malicious]),
        train_rows=np.concatenate([partition.train_rows, rows]),
    )
    return WithMalicious(added, parts, known)


def _with_rows(
    settings: DataSettings,
    interactions: Interactions,
    partition: Partition,
    known: Known,
    profiles: list[np.ndarray],
) -> Interactions:
    """The dataset with a user for each profile, `int64 [n]` each, and its rows."""
    users = np.repeat(known.malicious, [len(items) for items in profiles])
    items = np.concatenate([np.empty(0, dtype=np.int64), *profiles])
    imitated = _imitated(settings.seed, partition, len(profiles))
    before = np.arange(interactions.num_users)
    features = interactions.user_features.renumbered(
        np.concatenate([before, imitated]), len(before)
    )
    columns = _columns(settings.task, interactions, known, users, items)
    joined = {
        name: np.concatenate([getattr(interactions, name), new]) for name, new in columns.items()
    }
    ids = more_ids(interactions.user_ids, len(profiles), "malicious")
    return replace(interactions, user_ids=ids, user_features=features, **joined)


def _profile(attack: object, known: Known, client: int) -> np.ndarray:
    """`int64 [n]`: the made-up profile of a malicious client."""
    name = registry.POISONING.name
    with component_errors(name, attack, "in profile"):
        items = attack.profile(known, stream(known.seed, "profile", client))  # type: ignore[attr-defined]
    items = np.asarray(items)
    right = items.ndim == 1 and len(np.unique(items)) == len(items)
    if not right or not ((items >= 0) & (items < known.items)).all():
        expected = f"distinct items in [0, {known.items})"
        refuse_wrong(name, attack, "from profile", expected=expected, got=str(items[:20]))
    return items.astype(np.int64)


def _imitated(seed: int, partition: Partition, count: int) -> np.ndarray:
    """`int64 [count]`: honest users whose side features malicious ones take; -1 without any."""
    honest = partition.training_clients
    if not len(honest):
        return np.full(count, -1)
    return honest[stream(seed, "malicious-features").integers(len(honest), size=count)]


def _columns(
    task: str, interactions: Interactions, known: Known, users: np.ndarray, items: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns of the malicious users' rows, as many as the dataset has."""
    found: dict[str, np.ndarray] = {"users": users, "items": items}
    if interactions.ratings is not None and len(interactions):
        best = interactions.ratings.max()
        usual = interactions.ratings.mean() if task == "rating" else best
        found["ratings"] = np.where(np.isin(items, known.targets), best, usual)
    if interactions.times is not None and len(interactions):
        starts = np.searchsorted(users, users)
        found["times"] = interactions.times.max() + 1 + np.arange(len(users)) - starts
    if interactions.published_test is not None:
        found["published_test"] = np.zeros(len(users), dtype=bool)
    return found
