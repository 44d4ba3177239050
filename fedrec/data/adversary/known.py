# SPDX-License-Identifier: Apache-2.0
"""What an adversary knows of the honest clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition
from fedrec.errors import ExperimentError
from fedrec.experiment.tables import AdversaryConfig
from fedrec.rng import stream
from fedrec.runtime.grouping import within_groups


@dataclass(frozen=True, eq=False)
class Known:
    """Knowledge of an adversary, beside the parameters that its clients are sent.

    Attributes:
        items: size of the catalogue.
        targets: `int64 [targets]`, ascending: the items that it promotes.
        malicious: `int64 [malicious]`, ascending: its clients.
        honest: number of honest training clients.
        usual: median number of training rows of these, at least 1.
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
        """`int64 [items]`: number of public rows of each item."""
        return np.bincount(self.public, minlength=self.items)

    @property
    def users(self) -> np.ndarray:
        """`int64 [rows]`: the honest client of each public row."""
        return np.repeat(np.arange(self.honest), np.diff(self.offsets))

    def popular(self, count: int) -> np.ndarray:
        """`int64 [count]`: the items with the most public rows, most popular first, without
        targets; fewer in a small catalogue."""
        ranked = np.argsort(-self.popularity, kind="stable")
        return ranked[~np.isin(ranked, self.targets)][:count]


def known_of(
    adversary: AdversaryConfig, seed: int, interactions: Interactions, partition: Partition
) -> Known:
    """The knowledge of an adversary.

    Args:
        adversary: its settings.
        seed: of the experiment.
        interactions: the dataset, without malicious users.
        partition: its parts; held-out rows are known to nobody.

    Raises:
        ExperimentError: a target is no item of the dataset, or named twice, or there are more
            targets than items, or more malicious clients than honest ones.
    """
    honest = partition.training_clients
    malicious = adversary.number_among(len(honest))
    _refuse_more("clients", malicious, max(1, len(honest)), "honest training clients")
    rows = partition.train_rows[np.isin(interactions.users[partition.train_rows], honest)]
    rows = rows[np.argsort(interactions.users[rows], kind="stable")]
    users = np.searchsorted(honest, interactions.users[rows])
    counts = np.bincount(users, minlength=len(honest))
    public = rows[_drawn(counts, adversary.public_share, seed)]
    owners = np.searchsorted(honest, interactions.users[public])
    popularity = np.bincount(interactions.items[rows], minlength=interactions.num_items)
    first = interactions.num_users
    return Known(
        items=interactions.num_items,
        targets=_targets(adversary, seed, interactions, popularity),
        malicious=np.arange(first, first + malicious),
        honest=len(honest),
        usual=max(1, int(np.median(counts))) if len(counts) else 1,
        offsets=np.searchsorted(owners, np.arange(len(honest) + 1)),
        public=interactions.items[public],
        seed=seed,
    )


def _drawn(counts: np.ndarray, share: float, seed: int) -> np.ndarray:
    """`bool [rows]`: the given share of each user's rows, rounded up; rows are grouped by user."""
    users = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((stream(seed, "public-rows").random(len(users)), users))
    place = np.empty(len(users), dtype=np.int64)
    place[order] = within_groups(counts)
    return place < np.ceil(share * counts)[users]


def _targets(
    adversary: AdversaryConfig, seed: int, interactions: Interactions, popularity: np.ndarray
) -> np.ndarray:
    if adversary.target_items:
        return _named(adversary.target_items, interactions.item_ids.astype(str))
    count = adversary.targets
    _refuse_more("targets", count, interactions.num_items, "items of the dataset")
    if adversary.target_choice == "random":
        drawn = stream(seed, "targets").choice(interactions.num_items, count, replace=False)
        return np.sort(drawn)
    return np.sort(np.argsort(popularity, kind="stable")[:count])


def _named(names: Sequence[str], item_ids: np.ndarray) -> np.ndarray:
    places = {name: place for place, name in enumerate(item_ids.tolist())}
    wrong = [name for name in names if name not in places or names.count(name) > 1]
    if wrong:
        raise ExperimentError(
            "adversary.target-items names no item of the dataset, or one twice",
            expected="names of items as in the data, each of them once",
            got=repr(wrong[0]),
            fix="correct the name, or leave it out",
        )
    return np.sort([places[name] for name in names])


def _refuse_more(key: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ExperimentError(
            f"wrong value for 'adversary.{key}'",
            expected=f"at most the number of {what}, {most:,}",
            got=f"{count:,}",
            fix=f"set adversary.{key} = {most} or less",
        )
