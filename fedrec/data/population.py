# SPDX-License-Identifier: Apache-2.0
"""The clients of an experiment: the training and test data of each device, from interactions and a
partition."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np

from fedrec.components import registry
from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.data.client_data import ClientData, HeldOut
from fedrec.data.grouped_rows import GroupedRows
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbed, apply_perturbation
from fedrec.data.reader import Reader
from fedrec.data.schema import Schema
from fedrec.data.split import Partition
from fedrec.data.time_weighting import time_weighted
from fedrec.errors import DataError
from fedrec.experiment.data_settings import DataSettings
from fedrec.rng import stream
from fedrec.runtime.distinct import distinct


class Population:
    """All clients of an experiment.

    Args:
        interactions: the dataset.
        partition: training rows and held-out rows.
        task: `"ranking"` or `"rating"`.
        positive_above: a row is positive when its rating is above this; None: every row is
            positive.
        perturbed: replaces the training rows, if these are perturbed. Held-out rows, and known and
            seen items, are always the real ones.

    Raises:
        DataError: ratings are needed and the dataset has none.
    """

    def __init__(
        self,
        interactions: Interactions,
        partition: Partition,
        *,
        task: Literal["ranking", "rating"],
        positive_above: float | None,
        perturbed: Perturbed | None = None,
    ) -> None:
        if interactions.ratings is None and (task == "rating" or positive_above is not None):
            raise DataError(
                f"{interactions.name} has no ratings",
                expected="ratings, for task = 'rating' or positive-above",
                got="interactions without ratings",
                fix="use task = 'ranking' without positive-above",
            )
        self.interactions = interactions
        self.partition = partition
        self.task: Literal["ranking", "rating"] = task
        self.perturbed = perturbed
        self._labels = self._make_labels(interactions, positive_above)
        self._train = GroupedRows(interactions, partition.train_rows)
        if perturbed is None:
            self._learned = interactions
            self._learned_labels = self._labels
            self._learned_train = self._train
        else:
            self._learned = perturbed.rows
            self._learned_train = GroupedRows(perturbed.rows, None)
            self._learned_labels = self._make_labels(perturbed.rows, positive_above)
        self._user_codes = [feature.padded() for feature in interactions.user_features.features]

    @classmethod
    def of(cls, settings: DataSettings, interactions: Interactions | None = None) -> Population:
        """Read and split a dataset, and perturb its training rows if configured.

        Args:
            settings: of the data; an experiment has them.
            interactions: the dataset, if it has been read.

        Raises:
            DataError: the dataset is missing or damaged, or lacks what the split needs.
            ComponentError: a reader, split or perturbation failed.
        """
        if interactions is None:
            interactions = read_interactions(settings)
        split_class = registry.resolve(registry.SPLIT, settings.split.name)
        with component_errors(registry.SPLIT.name, split_class, "with these interactions"):
            partition = split_class(settings.settings(registry.SPLIT), settings.seed).split(
                interactions
            )
        if not isinstance(partition, Partition):
            expected = "a fedrec.data.split.Partition"
            got = type(partition).__name__
            refuse_wrong(
                registry.SPLIT.name, split_class, "from split()", expected=expected, got=got
            )
        return cls(
            interactions,
            partition,
            task=settings.task,
            positive_above=settings.positive_above,
            perturbed=apply_perturbation(settings, interactions, partition),
        )

    @property
    def training_clients(self) -> np.ndarray:
        """`int64 [clients]`, ascending: clients that may be sampled for training rounds."""
        return self.partition.training_clients

    def schema(self) -> Schema:
        """The public schema of the data, for models."""
        data = self.interactions
        users = tuple(
            (feature.name, len(feature.categories)) for feature in data.user_features.features
        )
        words = tuple(feature.categories for feature in data.user_features.features)
        return Schema(data.num_items, data.item_features, users, self.task, data.num_users, words)

    def client(self, client: int) -> ClientData:
        """The training data of one client."""
        return self.clients(np.array([client]))[0]

    def clients(self, clients: np.ndarray) -> list[ClientData]:
        """The training data of some clients `int64 [clients]`; faster than one client at a time."""
        place, rows = self._learned_train.entries(clients)
        items = self._learned.items[rows]
        labels = self._learned_labels[rows]
        own = self._pairs(place, items)
        liked = distinct(own[labels > 0] if self.task == "ranking" else own)
        everyone = np.arange(len(clients) + 1)
        row_ends = np.searchsorted(place, everyone).tolist()
        liked_ends = np.searchsorted(liked, everyone * self.interactions.num_items).tolist()
        liked %= self.interactions.num_items
        codes = [feature[clients] for feature in self._user_codes]
        times = None if self._learned.times is None else self._learned.times[rows]
        ratings = None if self._learned.ratings is None else self._learned.ratings[rows]
        found = []
        for one, client in enumerate(clients.tolist()):
            span = slice(*row_ends[one : one + 2])
            positives = liked[slice(*liked_ends[one : one + 2])]
            features = tuple(feature[one] for feature in codes)
            own_times, own_ratings = (
                None if part is None else part[span] for part in (times, ratings)
            )
            avoided = self._avoided(client, positives) if self.partition.leaky_negatives else None
            given = (
                client,
                features,
                items[span],
                labels[span],
                positives,
                own_times,
                own_ratings,
                avoided,
            )
            found.append(ClientData(*given))
        return found

    def _avoided(self, client: int, positives: np.ndarray) -> np.ndarray:
        """The client's positives and its items in any part of the data."""
        return np.union1d(positives, self.interactions.items[self._all.rows_of(client)])

    def feature_codes(self, clients: np.ndarray) -> tuple[np.ndarray, ...]:
        """Per user feature the category codes of some clients, `int64 [clients, width]`, -1 for
        none."""
        return tuple(codes[clients] for codes in self._user_codes)

    def known_counts(self, clients: np.ndarray) -> np.ndarray:
        """`int64 [clients]`: number of training rows of some clients."""
        return self._train.counts(clients)

    def learned_counts(self, clients: np.ndarray) -> np.ndarray:
        """`int64 [clients]`: number of rows that some clients train on."""
        return self._learned_train.counts(clients)

    def liked(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positive items of the (perturbed) training rows of some clients, ragged.

        Returns:
            `int64 [clients + 1]` offsets and `int64 [total]` items: those of position c are
            `items[offsets[c]:offsets[c + 1]]`.
        """
        return self._labelled(clients, positive=True)

    @cached_property
    def popularity(self) -> np.ndarray:
        """`float64 [items]`: share of the training clients who like each item."""
        offsets, items = self.liked(self.training_clients)
        users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        liked = distinct(self._pairs(users, items)) % self.interactions.num_items
        counts = np.bincount(liked, minlength=self.interactions.num_items)
        return counts / max(1, len(self.training_clients))

    def low_rated(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The items of the rows that are not positive, in the form of `liked`: offsets `int64
        [clients + 1]` and items `int64 [n]`."""
        return self._labelled(clients, positive=False)

    def weighted_items(
        self, clients: np.ndarray, low_rated: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct items of the (perturbed) training rows of some clients, ragged: positive ones
        with weight 1, and others with weight `low_rated`, in [0, 1]; 0 leaves these out.

        Returns:
            `int64 [clients + 1]` offsets, `int64 [total]` items, ascending for each client, and
            their weights, `float32 [total]`.
        """
        place, rows = self._learned_train.entries(clients)
        own = self._pairs(place, self._learned.items[rows])
        positive = self._learned_labels[rows] > 0
        pairs = liked = distinct(own[positive] if self.task == "ranking" else own)
        weights = np.ones(len(liked), dtype=np.float32)
        if low_rated and self.task == "ranking":
            others = np.setdiff1d(own[~positive], liked)
            weights = np.concatenate([weights, np.full(len(others), low_rated, np.float32)])
            pairs = np.concatenate([liked, others])
            order = np.argsort(pairs)
            pairs = pairs[order]
            weights = weights[order]
        catalogue = self.interactions.num_items
        offsets = np.searchsorted(pairs, np.arange(len(clients) + 1) * catalogue)
        return offsets, pairs % catalogue, weights

    def histories(
        self, clients: np.ndarray, rated: bool = False, low_rated: float = 0.0
    ) -> np.ndarray:
        """`float32 [clients, items]`: preference of some clients for the items of their training
        rows: 1 for positive ones, or if `rated` their ratings weighted by time
        (`fedrec.data.time_weighting`); `low_rated`, >= 0, for other rated ones; 0 elsewhere."""
        place, rows = self._learned_train.entries(clients)
        positive = self._learned_labels[rows] > 0
        place = place[positive]
        rows = rows[positive]
        data = self._learned
        ratings, times = (
            None if part is None else part[rows] for part in (data.ratings, data.times)
        )
        users, items, amounts = time_weighted(place, data.items[rows], ratings, times)
        table = np.zeros((len(clients), self.interactions.num_items), dtype=np.float32)
        table[users, items] = amounts if rated else 1.0
        if low_rated:
            ends, others = self._labelled(clients, positive=False)
            places = np.repeat(np.arange(len(clients)), np.diff(ends)), others
            table[places] = np.maximum(table[places], np.float32(low_rated))
        return table

    def evaluated_clients(self, held_out: Literal["test", "validation"]) -> np.ndarray:
        """`int64 [clients]`, ascending: clients with held-out rows to test on (ranking: a held-out
        positive)."""
        rows = self._held_out_rows(held_out)
        if self.task == "ranking":
            rows = rows[self._labels[rows] > 0]
        return np.unique(self.interactions.users[rows])

    def held_out(self, clients: np.ndarray, held_out: Literal["test", "validation"]) -> HeldOut:
        """Masks over the catalogue for a block of clients `int64 [clients]`; their memory grows
        with clients times items."""
        shape = (len(clients), self.interactions.num_items)
        seen = np.zeros(shape, dtype=bool)
        seen[self._all.positions(clients)] = True
        known = np.zeros(shape, dtype=bool)
        known[self._train.positions(clients)] = True
        learned = known
        if self.perturbed is not None:
            learned = np.zeros(shape, dtype=bool)
            learned[self._learned_train.positions(clients)] = True
        weight = np.zeros(shape, dtype=np.int64)
        users, rows = self._grouped_held_out(held_out).entries(clients)
        positive = self._labels[rows] > 0
        np.add.at(weight, (users[positive], self.interactions.items[rows[positive]]), 1)
        relevant = weight > 0
        return HeldOut(
            seen, known, learned, relevant, weight if weight.max(initial=0) > 1 else None
        )

    def whole_history(self, clients: np.ndarray, *, low_rated: bool = False) -> np.ndarray:
        """`bool [clients, items]`: positive items (all if `low_rated`) in any part of the data."""
        place, rows = self._all.entries(clients)
        kept = low_rated | (self._labels[rows] > 0)
        table = np.zeros((len(clients), self.interactions.num_items), dtype=bool)
        table[place[kept], self.interactions.items[rows[kept]]] = True
        return table

    def rated(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Users, items and ratings of the training rows of some clients (perturbed, if they are),
        `[rows]` each."""
        _, rows = self._learned_train.entries(clients)
        return self._learned.users[rows], self._learned.items[rows], self._learned_labels[rows]

    def held_out_rated(
        self, clients: np.ndarray, held_out: Literal["test", "validation"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Users, items and ratings of the held-out rows of some clients, `[rows]` each."""
        _, rows = self._grouped_held_out(held_out).entries(clients)
        return self.interactions.users[rows], self.interactions.items[rows], self._labels[rows]

    def held_out_ratings(
        self, client: int, held_out: Literal["test", "validation"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Items and ratings of one client's held-out rows, `int64 [n]` and `float32 [n]`."""
        rows = self._grouped_held_out(held_out).rows_of(client)
        return self.interactions.items[rows], self._labels[rows]

    def _pairs(self, place: np.ndarray, items: np.ndarray) -> np.ndarray:
        """A number for each pair of a client, by its place, and an item."""
        return place * self.interactions.num_items + items

    def _labelled(self, clients: np.ndarray, positive: bool) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and items of the training rows that are positive, or that are not."""
        place, rows = self._learned_train.entries(clients)
        wanted = (self._learned_labels[rows] > 0) == positive
        counts = np.bincount(place[wanted], minlength=len(clients))
        return np.concatenate([[0], np.cumsum(counts)]), self._learned.items[rows[wanted]]

    def _make_labels(self, interactions: Interactions, positive_above: float | None) -> np.ndarray:
        ratings = interactions.ratings
        if self.task == "rating" and ratings is not None:
            return ratings
        if positive_above is None or ratings is None:
            return np.ones(len(interactions), dtype=np.float32)
        return (ratings > positive_above).astype(np.float32)

    def _held_out_rows(self, held_out: Literal["test", "validation"]) -> np.ndarray:
        return self.partition.test_rows if held_out == "test" else self.partition.validation_rows

    def _grouped_held_out(self, held_out: Literal["test", "validation"]) -> GroupedRows:
        return self._grouped_test if held_out == "test" else self._grouped_validation

    @cached_property
    def _all(self) -> GroupedRows:
        return GroupedRows(self.interactions, None)

    @cached_property
    def _grouped_test(self) -> GroupedRows:
        return GroupedRows(self.interactions, self.partition.test_rows)

    @cached_property
    def _grouped_validation(self) -> GroupedRows:
        return GroupedRows(self.interactions, self.partition.validation_rows)


def sample_clients(clients: np.ndarray, count: int | None, seed: int) -> np.ndarray:
    """A fixed sample of some clients, `int64 [count]`, ascending, which depends on clients, count
    and seed only; with `count` None, all."""
    if count is None or count >= len(clients):
        return clients
    return np.sort(stream(seed, "evaluated").choice(clients, size=count, replace=False))


def reader_of(settings: DataSettings) -> Reader:
    """The reader of a dataset."""
    reader = registry.resolve(registry.DATASET, settings.dataset.name)
    return reader(settings.dataset.name, settings.settings(registry.DATASET))


def read_interactions(settings: DataSettings) -> Interactions:
    """Read a dataset.

    Raises:
        DataError: it is missing or damaged.
        ComponentError: its reader failed, or gave something else.
    """
    reader = registry.resolve(registry.DATASET, settings.dataset.name)
    with component_errors(registry.DATASET.name, reader, "when it was read"):
        interactions = reader_of(settings).read()
    if not isinstance(interactions, Interactions):
        expected = "fedrec.data.interactions.Interactions"
        got = type(interactions).__name__
        refuse_wrong(registry.DATASET.name, reader, "from read()", expected=expected, got=got)
    return interactions
