# SPDX-License-Identifier: Apache-2.0
"""Malicious users of a dataset: their knowledge, their rows, and their report in results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedrec.components import registry
from fedrec.components.errors import component_errors
from fedrec.data.interactions import Interactions, more_ids
from fedrec.data.splits.rules import Partition
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import component_of
from fedrec.experiment.tables import AdversaryConfig, DataSettings
from fedrec.rng import stream
from fedrec.runtime.ragged import within_groups

# The knowledge of an adversary about the honest clients' data.


@dataclass(frozen=True, eq=False)
class Known:
    """Knowledge of an adversary, in addition to the parameters sent to its clients.

    Attributes:
        items: size of the catalogue.
        targets: `int64 [targets]`, ascending: the items that it promotes.
        malicious: `int64 [malicious]`, ascending: its clients.
        honest: number of honest training clients.
        usual: median number of training rows of honest clients, at least 1.
        offsets: `int64 [honest + 1]`; honest client h has the public items
            `public[offsets[h]:offsets[h + 1]]`.
        public: `int64 [rows]`, items of the public rows.
        seed: of the experiment.
    """

    items: int
    targets: np.ndarray
    malicious: np.ndarray
    honest: int
    usual: int
    offsets: np.ndarray
    public: np.ndarray
    seed: int

    @cached_property
    def popularity(self) -> np.ndarray:
        """Number of public rows of each item, `int64 [items]`."""
        return np.bincount(self.public, minlength=self.items)

    @property
    def users(self) -> np.ndarray:
        """Honest client of each public row, `int64 [rows]`."""
        return np.repeat(np.arange(self.honest), np.diff(self.offsets))

    def popular(self, count: int) -> np.ndarray:
        """Items with the most public rows, `int64 [count]`, most popular first, without targets;
        fewer in a small catalogue."""
        ranked = np.argsort(-self.popularity, kind="stable")
        return ranked[~np.isin(ranked, self.targets)][:count]


def _known_of(
    adversary: AdversaryConfig, seed: int, interactions: Interactions, partition: Partition
) -> Known:
    """Determine the knowledge of an adversary.

    Args:
        adversary: its settings.
        seed: of the experiment.
        interactions: the dataset, without malicious users.
        partition: its parts; the adversary does not know held-out rows.

    Raises:
        ExperimentError: a target is unknown or duplicate, or there are more targets than items,
            or more malicious clients than honest ones.
    """
    honest = partition.training_clients
    malicious = adversary.number_among(len(honest))
    _check_at_most("clients", malicious, max(1, len(honest)), "honest training clients")
    rows = partition.train_rows[np.isin(interactions.users[partition.train_rows], honest)]
    rows = rows[np.argsort(interactions.users[rows], kind="stable")]
    owners = np.searchsorted(honest, interactions.users[rows])
    counts = np.bincount(owners, minlength=len(honest))
    # the public share of each user's rows, rounded up
    order = np.lexsort((stream(seed, "public-rows").random(len(rows)), owners))
    rank = np.empty(len(rows), dtype=np.int64)
    rank[order] = within_groups(counts)
    drawn = rank < np.ceil(adversary.public_share * counts)[owners]
    popularity = np.bincount(interactions.items[rows], minlength=interactions.num_items)
    first = interactions.num_users
    return Known(
        items=interactions.num_items,
        targets=_targets(adversary, seed, interactions, popularity),
        malicious=np.arange(first, first + malicious),
        honest=len(honest),
        usual=max(1, int(np.median(counts))) if len(counts) else 1,
        offsets=np.searchsorted(owners[drawn], np.arange(len(honest) + 1)),
        public=interactions.items[rows[drawn]],
        seed=seed,
    )


def _targets(
    adversary: AdversaryConfig, seed: int, interactions: Interactions, popularity: np.ndarray
) -> np.ndarray:
    names = adversary.target_items
    if names:
        index = {name: item for item, name in enumerate(interactions.item_ids.astype(str).tolist())}
        wrong = [name for name in names if name not in index or names.count(name) > 1]
        if wrong:
            raise ExperimentError(
                f"unknown or duplicate item {wrong[0]!r} in adversary.target-items",
                fix="correct or remove the name",
            )
        return np.sort([index[name] for name in names])
    count = adversary.targets
    _check_at_most("targets", count, interactions.num_items, "items of the dataset")
    if adversary.target_choice == "random":
        drawn = stream(seed, "targets").choice(interactions.num_items, count, replace=False)
        return np.sort(drawn)
    return np.sort(np.argsort(popularity, kind="stable")[:count])


def _check_at_most(key: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ExperimentError(
            f"wrong value for 'adversary.{key}'",
            expected=f"at most the number of {what}, {most:,}",
            got=f"{count:,}",
            fix=f"set adversary.{key} = {most} or less",
        )


# Malicious users, added to a dataset after it was split, so that honest users keep their parts.
#
# A malicious user has the side features of a randomly drawn honest user, and the training rows of
# a fake profile from its attack; it has no held-out rows. Targets are rated highest.
# Other items are rated highest for ranking, and at the mean for rating; times follow the last time
# of the dataset, in the order of the profile.


def with_malicious(
    settings: DataSettings, interactions: Interactions, partition: Partition
) -> tuple[Interactions, Partition, Known | None]:
    """Add the experiment's malicious users to a split dataset, as training clients with the last
    user numbers, and return the adversary's knowledge too. Without `[adversary]`, return the
    dataset unchanged, and None.

    Raises:
        ExperimentError: attack or targets are unknown.
        ComponentError: the attack failed.
    """
    if settings.adversary is None:
        return interactions, partition, None
    known = _known_of(settings.adversary, settings.seed, interactions, partition)
    attack = component_of(registry.POISONING, settings.adversary.attack)
    with component_errors(registry.POISONING.name, attack, "in profile"):
        profiles = [
            attack.profile(known, stream(known.seed, "profile", client))
            for client in known.malicious.tolist()
        ]
    added = _with_profiles(settings, interactions, partition, known, profiles)
    rows = np.arange(len(interactions), len(added))
    parts = replace(
        partition,
        training_clients=np.concatenate([partition.training_clients, known.malicious]),
        train_rows=np.concatenate([partition.train_rows, rows]),
    )
    return added, parts, known


def _with_profiles(
    settings: DataSettings,
    interactions: Interactions,
    partition: Partition,
    known: Known,
    profiles: list[np.ndarray],
) -> Interactions:
    """Add a user and its rows for each profile, `int64 [n]` each, with the side features of an
    honest user, or none without honest users."""
    users = np.repeat(known.malicious, [len(items) for items in profiles])
    items = np.concatenate([np.empty(0, dtype=np.int64), *profiles])  # none without profiles
    honest = partition.training_clients
    imitated = np.full(len(profiles), -1)
    if len(honest):
        drawn = stream(settings.seed, "malicious-features").integers(
            len(honest), size=len(profiles)
        )
        imitated = honest[drawn]
    columns = {"users": users, "items": items}
    if interactions.ratings is not None and len(interactions):
        best = interactions.ratings.max()
        usual = interactions.ratings.mean() if settings.task == "rating" else best
        columns["ratings"] = np.where(np.isin(items, known.targets), best, usual)
    if interactions.times is not None and len(interactions):
        starts = np.searchsorted(users, users)
        columns["times"] = interactions.times.max() + 1 + np.arange(len(users)) - starts
    if interactions.published_test is not None:
        columns["published_test"] = np.zeros(len(users), dtype=bool)
    joined = {
        name: np.concatenate([getattr(interactions, name), new]) for name, new in columns.items()
    }
    ids = more_ids(interactions.user_ids, len(profiles), "malicious")
    features = interactions.user_features.extended(imitated)
    return replace(interactions, user_ids=ids, user_features=features, **joined)


# Description of an adversary in the results of a run.

_SHOWN = 5  # targets


def adversary_words(attack: str, known: Known, interactions: Interactions) -> str:
    """Describe the number of malicious clients, the name of the attack and its targets."""
    ids = interactions.item_ids[known.targets[:_SHOWN]].astype(str)
    names = ", ".join(ids.tolist()) + (" and others" if len(known.targets) > _SHOWN else "")
    count = len(known.malicious)
    clients = (
        f"{count} of {known.honest + count} training clients are malicious (attack {attack});"
        " all metrics are of honest users."
        if count
        else "no client is malicious, so exposure is measured without an attack."
    )
    return f"Adversary: {clients} Targets: {names}."
