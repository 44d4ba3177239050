# SPDX-License-Identifier: Apache-2.0
"""The interface of splits: training, validation and test rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.components.registry import SPLIT, resolve
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.errors import DataError
from fedrec.experiment.sections import Section, component_settings
from fedrec.privacy.adjacency import Adjacency
from fedrec.runtime.grouping import are_distinct


@dataclass(frozen=True, eq=False)
class Partition:
    """The result of a split. All row numbers refer to the interactions that were split.

    Attributes:
        training_clients: `int64 [clients]`, ascending; users that may be sampled for training
            rounds.
        train_rows: `int64 [rows]`, ascending; rows that a client may train on. For a user outside
            `training_clients` these serve on-device fine-tuning only.
        validation_rows: `int64 [rows]`, ascending; held out, to choose settings.
        test_rows: `int64 [rows]`, ascending; held out, to report.
        leaky_negatives: whether held-out items are kept out of the negatives that clients draw, as
            published code for federated recommenders does. This reveals the held-out items; see
            `fedrec.data.negatives`.
        repeated_use: whether repeated use of an item is predicted: held-out rows may be of items
            that the user has in training.

    Raises:
        DataError: a row is in two parts.
    """

    training_clients: np.ndarray
    train_rows: np.ndarray
    validation_rows: np.ndarray
    test_rows: np.ndarray
    leaky_negatives: bool = False
    repeated_use: bool = False

    def __post_init__(self) -> None:
        for field in ("training_clients", "train_rows", "validation_rows", "test_rows"):
            values = np.asarray(getattr(self, field), dtype=np.int64)
            if np.any(values[1:] < values[:-1]):
                values = np.sort(values)
            values.setflags(write=False)
            object.__setattr__(self, field, values)
        parts = (self.train_rows, self.validation_rows, self.test_rows)
        taken = np.zeros(max(rows.max(initial=-1) for rows in parts) + 1, dtype=bool)
        for rows in parts:
            taken[rows] = True
        if np.count_nonzero(taken) != sum(map(len, parts)):
            raise DataError(
                "a split put one row into two parts",
                expected="disjoint parts",
                got="a shared row",
                fix="correct the split: a row trains, validates or tests",
            )

    def parts(self, interactions: Interactions) -> np.ndarray:
        """`[rows]`: the part of each row: `"training"`, `"known"` (a training row of a user who
        does not train the shared model), `"validation"`, `"test"`, or empty where it is in none."""
        trains = np.isin(interactions.users, self.training_clients)
        found = np.full(len(interactions), "", dtype=object)
        found[self.train_rows] = np.where(trains[self.train_rows], "training", "known")
        found[self.validation_rows] = "validation"
        found[self.test_rows] = "test"
        return found


class Split(ABC):
    """Divides interactions into training rows and held-out rows.

    A built-in has a `name` and lives in `fedrec/data/splits/`, its configuration class above
    it. It is a function of the interactions, its configuration and the experiment's seed (stream
    `"split"`).
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.seed = seed

    def depends_on(self, adjacency: Adjacency) -> str:
        """What of other clients decides the part of a client's row, or whether a client trains, in
        words; empty: nothing does, so that neighbouring data have equal parts but for the rows of
        the client in which they differ. Private runs refuse a split that is not so, and so they do
        one that does not say it (the default)."""
        return "more than the client's own rows, as far as the split says"

    @abstractmethod
    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions.

        Raises:
            DataError: the interactions lack what this split needs (times, enough rows per user,
                fold files).
        """


def partition_by(section: Section, seed: int, interactions: Interactions) -> Partition:
    """The parts of interactions by the split that a section names.

    No item of a user is in two parts, unless the split predicts repeated use. Where rows repeat a
    user and an item, the split divides the first row of each pair, and others train if their pair
    does and they are not later than what the user trains on; those that remain are in no part.

    Raises:
        DataError: the interactions lack what the split needs.
        ComponentError: the split failed, or returned something else.
    """
    split = split_of(section, seed)
    partition = _divided(split, interactions)
    pairs = interactions.users * interactions.num_items + interactions.items
    if partition.repeated_use or are_distinct(pairs) or not _shared_pairs(pairs, partition):
        return partition
    first = _first_rows(interactions, pairs)
    of_first = _divided(split, interactions.with_rows(first))
    return replace(
        of_first,
        train_rows=_with_repeats(interactions, pairs, first[of_first.train_rows], partition),
        validation_rows=first[of_first.validation_rows],
        test_rows=first[of_first.test_rows],
    )


def _divided(split: Split, interactions: Interactions) -> Partition:
    with component_errors(SPLIT.name, type(split), "with these interactions"):
        partition = split.split(interactions)
    if not isinstance(partition, Partition):
        expected = "a fedrec.data.split.Partition"
        got = type(partition).__name__
        refuse_wrong(SPLIT.name, type(split), "from split()", expected=expected, got=got)
    return partition


def _shared_pairs(pairs: np.ndarray, partition: Partition) -> bool:
    """Whether a pair `[rows]` has rows in two parts."""
    parts = [partition.train_rows, partition.validation_rows, partition.test_rows]
    part = np.repeat(np.arange(len(parts)), [len(rows) for rows in parts])
    divided = pairs[np.concatenate(parts)]
    order = np.argsort(divided, kind="stable")
    same = divided[order][1:] == divided[order][:-1]
    return bool((same & (part[order][1:] != part[order][:-1])).any())


def _first_rows(interactions: Interactions, pairs: np.ndarray) -> np.ndarray:
    """`int64 [distinct pairs]`, ascending: each pair's earliest row; without times its
    first."""
    rows = np.arange(len(pairs))
    if interactions.times is not None:
        rows = np.argsort(interactions.times, kind="stable")
    return np.sort(rows[np.unique(pairs[rows], return_index=True)[1]])


def _with_repeats(
    interactions: Interactions, pairs: np.ndarray, train_rows: np.ndarray, of_rows: Partition
) -> np.ndarray:
    """Row numbers of the first rows of pairs that train, and of those that repeat them.

    Args:
        interactions: the rows.
        pairs: `int64 [rows]`, a number of each row's user and item.
        train_rows: first rows that train.
        of_rows: the parts if the split divides all rows: what it holds out does not train.
    """
    repeats = of_rows.train_rows[np.isin(pairs[of_rows.train_rows], pairs[train_rows])]
    if interactions.times is not None:
        latest = np.full(interactions.num_users, np.iinfo(np.int64).min)
        np.maximum.at(latest, interactions.users[train_rows], interactions.times[train_rows])
        repeats = repeats[interactions.times[repeats] <= latest[interactions.users[repeats]]]
    return np.union1d(train_rows, repeats)


def split_of(section: Section, seed: int) -> Split:
    """The split that a section names.

    Raises:
        ComponentError: it cannot be made.
    """
    split_class = resolve(SPLIT, section.name)
    settings = component_settings(SPLIT, section)
    with component_errors(SPLIT.name, split_class, "when it was made"):
        return split_class(settings, seed)
