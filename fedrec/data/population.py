# SPDX-License-Identifier: Apache-2.0
"""The clients of an experiment with the data of each, and the cache of populations in a process."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import cached_property
from typing import Literal

import numpy as np

from fedrec.components import registry
from fedrec.components.errors import component_errors, refuse_wrong
from fedrec.components.registry import DATASET, resolve
from fedrec.data.client_data import ClientData, HeldOut
from fedrec.data.interactions import (
    Interactions,
    RecencyConfig,
    Schema,
    no_times,
    recent_weights,
    time_weighted,
)
from fedrec.data.malicious_users import Known, with_malicious
from fedrec.data.perturbation import Perturbed, apply_perturbation
from fedrec.data.reader import Reader, data_directory
from fedrec.data.splits.rules import Partition, partition_by
from fedrec.data.time_order import GroupedRows, TimeOrder, UserRows
from fedrec.errors import DataError
from fedrec.experiment.tables import DataSettings
from fedrec.rng import stream
from fedrec.runtime.ragged import distinct

_AT_ONCE = 2**17  # clients or rows


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
        seed: decides the order of a user's rows of one time, see `fedrec.data.time_order`.
        numbers: `int64 [users]`, ascending: each user's client id; None: its index.
        adversary: what an adversary knows, of data with malicious users.

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
        seed: int = 0,
        numbers: np.ndarray | None = None,
        adversary: Known | None = None,
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
        self.positive_above = positive_above
        self.perturbed = perturbed
        self.numbers = numbers
        self.adversary = adversary
        self._labels = self._make_labels(interactions, positive_above)
        self._order = TimeOrder(interactions, seed)
        self._known = self._learned = self._grouped(partition.train_rows)
        if perturbed is not None:
            labels = self._make_labels(perturbed.rows, positive_above)
            self._learned = GroupedRows(perturbed.rows, labels, TimeOrder(perturbed.rows, seed))

    @classmethod
    def of(cls, settings: DataSettings, interactions: Interactions | None = None) -> Population:
        """Read and split a dataset, add malicious users and perturb its training rows if
        configured.

        Args:
            settings: of the data; an experiment has them.
            interactions: the dataset, if it has been read.

        Raises:
            DataError: the dataset is missing or damaged, or lacks what the split needs.
            ComponentError: a reader, split or perturbation failed.
        """
        if interactions is None:
            interactions = read_interactions(settings)
        partition = partition_by(settings.split, settings.seed_of_split, interactions)
        malicious = with_malicious(settings, interactions, partition)
        if malicious is not None:
            interactions = malicious.interactions
            partition = malicious.partition
        return cls(
            interactions,
            partition,
            task=settings.task,
            positive_above=settings.positive_above,
            perturbed=apply_perturbation(settings, interactions, partition),
            seed=settings.seed_of_split,
            adversary=None if malicious is None else malicious.known,
        )

    @property
    def training_clients(self) -> np.ndarray:
        """`int64 [clients]`, ascending: clients that may be sampled for training rounds."""
        return self._ids(self.partition.training_clients)

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
        places = self._places(clients)
        rows = self._learned.of(places)
        items = rows.items
        labels = rows.labels
        own = self._pairs(rows)
        liked = distinct(own[labels > 0] if self.task == "ranking" else own)
        everyone = np.arange(len(clients) + 1)
        row_ends = np.searchsorted(rows.place, everyone).tolist()
        liked_ends = np.searchsorted(liked, everyone * self.interactions.num_items).tolist()
        liked %= self.interactions.num_items
        codes = self._feature_codes(places)
        times = rows.times
        ratings = rows.ratings
        found = []
        for one, client in enumerate(clients.tolist()):
            span = slice(*row_ends[one : one + 2])
            positives = liked[slice(*liked_ends[one : one + 2])]
            found.append(
                ClientData(
                    client,
                    tuple(feature[one] for feature in codes),
                    items[span],
                    labels[span],
                    positives,
                    None if times is None else times[span],
                    None if ratings is None else ratings[span],
                    self._avoided(places[one : one + 1], positives),
                )
            )
        return found

    def _avoided(self, place: np.ndarray, positives: np.ndarray) -> np.ndarray | None:
        """A client's positives and its items in any part of the data, where negatives leak."""
        if not self.partition.leaky_negatives:
            return None
        return np.union1d(positives, self._all.of(place).items)

    def feature_codes(self, clients: np.ndarray) -> tuple[np.ndarray, ...]:
        """Per user feature the category codes of some clients, `int64 [clients, width]`, -1 for
        none."""
        return self._feature_codes(self._places(clients))

    def known_counts(self, clients: np.ndarray) -> np.ndarray:
        """`int64 [clients]`: number of training rows of some clients."""
        return self._known.counts(self._places(clients))

    def learned_counts(self, clients: np.ndarray) -> np.ndarray:
        """`int64 [clients]`: number of rows that some clients train on."""
        return self._learned.counts(self._places(clients))

    def liked(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positive items of the (perturbed) training rows of some clients, ragged.

        Returns:
            `int64 [clients + 1]` offsets and `int64 [total]` items: those of position c are
            `items[offsets[c]:offsets[c + 1]]`.
        """
        return self._labelled(clients, positive=True)

    def liked_times(self, clients: np.ndarray) -> np.ndarray | None:
        """`int64 [total]`: positions in time of the rows of `liked`; None for data without
        times."""
        return self._rows(clients).times

    def sequences(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `liked`, offsets `int64 [clients + 1]` and items `int64 [total]`, but in time.

        The items of a client are from the earliest to the latest; the seed decides where times are
        equal.

        Raises:
            DataError: there are no times.
        """
        rows = self._rows(clients)
        if rows.times is None:
            raise no_times(self.interactions.name, "has no order of items")
        return _offsets(rows, len(clients)), rows.items[np.lexsort((rows.times, rows.place))]

    @property
    def time_positions(self) -> np.ndarray | None:
        """`int64 [rows of the dataset]`: the position of each row in its user's sequence; None
        without times."""
        return None if self.interactions.times is None else self._order.positions

    @cached_property
    def popularity(self) -> np.ndarray:
        """`float64 [items]`: share of the training clients who like each item."""
        num_items = self.interactions.num_items
        counts = np.zeros(num_items, dtype=np.int64)
        for clients in _in_parts(self.training_clients):
            offsets, items = self.liked(clients)
            users = np.repeat(np.arange(len(clients)), np.diff(offsets))
            liked = distinct(users * num_items + items) % num_items
            counts += np.bincount(liked, minlength=num_items)
        return counts / max(1, len(self.training_clients))

    @cached_property
    def untrained_items(self) -> np.ndarray:
        """`bool [items]`: items that no training client has a training row of; none on a device,
        which does not know the others' rows."""
        if self.numbers is not None:
            return np.zeros(self.interactions.num_items, dtype=bool)
        training = np.zeros(self.interactions.num_users, dtype=bool)
        training[self.partition.training_clients] = True
        untrained = np.ones(self.interactions.num_items, dtype=bool)
        for rows in _in_parts(self.partition.train_rows):
            of_training = rows[training[self.interactions.users[rows]]]
            untrained[self.interactions.items[of_training]] = False
        return untrained

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
        rows = self._learned.of(self._places(clients))
        own = self._pairs(rows)
        positive = rows.labels > 0
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

    def recent(self, clients: np.ndarray, recency: RecencyConfig) -> np.ndarray:
        """`float32 [clients, items]`: how much each item of some clients counts for what comes next
        (`fedrec.data.interactions.recent_weights`)."""
        return recent_weights(*self.sequences(clients), self.interactions.num_items, recency)

    def histories(
        self, clients: np.ndarray, rated: bool = False, low_rated: float = 0.0
    ) -> np.ndarray:
        """`float32 [clients, items]`: preference of some clients for the items of their training
        rows: 1 for positive ones, or if `rated` their ratings weighted by time
        (`fedrec.data.interactions`); `low_rated`, >= 0, for other rated ones; 0 elsewhere."""
        rows = self._rows(clients)
        users, items, amounts = time_weighted(rows.place, rows.items, rows.ratings, rows.times)
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
        found = []
        for users in _in_parts(np.arange(self.interactions.num_users)):
            rows = self._held_out(held_out).of(users)
            if self.task == "ranking":
                rows = rows.where(rows.labels > 0)
            found.append(distinct(rows.users))
        return self._ids(np.concatenate(found))

    def held_out(self, clients: np.ndarray, held_out: Literal["test", "validation"]) -> HeldOut:
        """Masks over the catalogue for a block of clients `int64 [clients]`; their memory grows
        with clients times items."""
        places = self._places(clients)
        seen = self._mask(self._all.of(places), len(places))
        known = self._mask(self._known.of(places), len(places))
        learned = known
        if self.perturbed is not None:
            learned = self._mask(self._learned.of(places), len(places))
        rows = self._held_out(held_out).of(places)
        rows = rows.where(rows.labels > 0)
        weight = None
        if len(np.unique(self._pairs(rows))) < len(rows.items):
            weight = np.zeros(seen.shape, dtype=np.int64)
            np.add.at(weight, (rows.place, rows.items), 1)
        relevant = self._mask(rows, len(places))
        return HeldOut(seen, known, learned, relevant, weight)

    def whole_history(self, clients: np.ndarray, *, low_rated: bool = False) -> np.ndarray:
        """`bool [clients, items]`: positive items (all if `low_rated`) in any part of the data."""
        rows = self._all.of(self._places(clients))
        return self._mask(rows if low_rated else rows.where(rows.labels > 0), len(clients))

    def unrated_targets(self, clients: np.ndarray) -> np.ndarray | None:
        """`bool [clients, targets]`: which items that an adversary promotes some clients have not
        rated in any part of the data; None without an adversary."""
        if self.adversary is None:
            return None
        return ~self.whole_history(clients, low_rated=True)[:, self.adversary.targets]

    def rated(self, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Users, items and ratings of the training rows of some clients (perturbed, if they are),
        `[rows]` each."""
        rows = self._learned.of(self._places(clients))
        return self._ids(rows.users), rows.items, rows.labels

    def held_out_rated(
        self, clients: np.ndarray, held_out: Literal["test", "validation"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Users, items and ratings of the held-out rows of some clients, `[rows]` each."""
        rows = self._held_out(held_out).of(self._places(clients))
        return self._ids(rows.users), rows.items, rows.labels

    def held_out_ratings(
        self, client: int, held_out: Literal["test", "validation"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Items and ratings of one client's held-out rows, `int64 [n]` and `float32 [n]`."""
        return self.held_out_rated(np.array([client]), held_out)[1:]

    def _places(self, clients: np.ndarray) -> np.ndarray:
        """`int64 [clients]`: user indices of some clients."""
        return clients if self.numbers is None else np.searchsorted(self.numbers, clients)

    def _ids(self, users: np.ndarray) -> np.ndarray:
        """`int64 [users]`: client ids of some users."""
        return users if self.numbers is None else self.numbers[users]

    def _pairs(self, rows: UserRows) -> np.ndarray:
        """A number for each pair of a client, by its place, and an item."""
        return rows.place * self.interactions.num_items + rows.items

    def _feature_codes(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(one.padded(places) for one in self.interactions.user_features.features)

    def _mask(self, rows: UserRows, clients: int) -> np.ndarray:
        """`bool [clients, items]`: the items of some rows."""
        table = np.zeros((clients, self.interactions.num_items), dtype=bool)
        table[rows.place, rows.items] = True
        return table

    def _rows(self, clients: np.ndarray, positive: bool = True) -> UserRows:
        """The training rows of some clients that are positive, or that are not."""
        rows = self._learned.of(self._places(clients))
        return rows.where((rows.labels > 0) == positive)

    def _labelled(self, clients: np.ndarray, positive: bool) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and items of the training rows that are positive, or that are not."""
        rows = self._rows(clients, positive)
        return _offsets(rows, len(clients)), rows.items

    def _make_labels(self, interactions: Interactions, positive_above: float | None) -> np.ndarray:
        """`float32 [rows]`, or `bool [rows]`, which takes a quarter of the memory."""
        ratings = interactions.ratings
        if self.task == "rating" and ratings is not None:
            return ratings
        if positive_above is None or ratings is None:
            return np.ones(len(interactions), dtype=bool)
        return ratings > positive_above

    def _grouped(self, rows: np.ndarray | None = None) -> GroupedRows:
        return GroupedRows(self.interactions, self._labels, self._order, rows)

    def _held_out(self, held_out: Literal["test", "validation"]) -> GroupedRows:
        return self._test if held_out == "test" else self._validation

    @cached_property
    def _all(self) -> GroupedRows:
        return self._grouped()

    @cached_property
    def _test(self) -> GroupedRows:
        return self._grouped(self.partition.test_rows)

    @cached_property
    def _validation(self) -> GroupedRows:
        return self._grouped(self.partition.validation_rows)


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


def _in_parts(numbers: np.ndarray) -> list[np.ndarray]:
    """Parts of some numbers `[n]`: what is made of one does not take the memory of all."""
    return np.split(numbers, range(_AT_ONCE, len(numbers), _AT_ONCE))


def _offsets(rows: UserRows, clients: int) -> np.ndarray:
    """`int64 [clients + 1]`: where the rows of each client begin."""
    return np.concatenate([[0], np.cumsum(np.bincount(rows.place, minlength=clients))])


def read_interactions(settings: DataSettings) -> Interactions:
    """Read a dataset.

    Raises:
        DataError: it is missing or damaged.
        ComponentError: its reader failed, or gave something else.
    """
    reader = registry.resolve(registry.DATASET, settings.dataset.name)
    with component_errors(registry.DATASET.name, reader, "when it was read"):
        made = reader_of(settings)
        interactions = made.read()
    if not isinstance(interactions, Interactions):
        expected = "fedrec.data.interactions.Interactions"
        got = type(interactions).__name__
        refuse_wrong(registry.DATASET.name, reader, "from read()", expected=expected, got=got)
    return made.described(interactions)


# The populations of this process: read once, or received from another process of the run.
#
# While a run goes on its population stays the same; what begins anew calls `renew` first, so that
# data rewritten in between are read again.

_MOST = 2  # populations in the cache
FileStamp = tuple[str, int, int, int]
"""Path, size in bytes, time of the last change in nanoseconds, and inode of a file."""


class PopulationCache:
    """A cache of a few populations; the least recently used one is dropped first."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Population] = OrderedDict()
        self._read: dict[str, tuple[FileStamp, ...]] = {}  # the files that were read, by key

    def population(self, settings: DataSettings) -> Population:
        """The population of these settings; read if it is not cached.

        Raises:
            DataError: the dataset is missing or damaged.
        """
        key = _key(settings)
        if key not in self._held:
            self._read[key] = _stamps(settings)
            self.hold(settings, Population.of(settings))
        self._held.move_to_end(key)
        return self._held[key]

    def cached(self, settings: DataSettings) -> Population | None:
        """The population of these settings, if it is cached; nothing is read."""
        return self._held.get(_key(settings))

    def take(self, settings: DataSettings) -> Population:
        """The population of these settings, no longer cached, for a caller who stores another copy
        of it."""
        return self._held.pop(_key(settings))

    def hold(self, settings: DataSettings, population: Population) -> None:
        """Store a population that was read elsewhere."""
        self._held[_key(settings)] = population
        while len(self._held) > _MOST:
            self._read.pop(self._held.popitem(last=False)[0], None)

    def drop(self, settings: DataSettings) -> None:
        """Remove the population of these settings from the cache."""
        key = _key(settings)
        self._held.pop(key, None)
        self._read.pop(key, None)

    def renew(self, settings: DataSettings) -> None:
        """Remove the population of these settings if this process read it from files that have
        changed since."""
        read = self._read.get(_key(settings))
        if read is not None and read != _stamps(settings):
            self.drop(settings)


POPULATIONS = PopulationCache()


def _key(settings: DataSettings) -> str:
    """The cache key: everything that a population depends on, and the location of its data."""
    parts = settings.model_dump(mode="json", include=set(DataSettings.model_fields))
    return json.dumps([parts, str(data_directory())], sort_keys=True)


def _stamps(settings: DataSettings) -> tuple[FileStamp, ...]:
    """The files that a dataset is read from; empty for generated data."""
    reader = resolve(DATASET, settings.dataset.name)
    with component_errors(DATASET.name, reader, "when its files were looked for"):
        files = reader_of(settings).every_file()
    found = ((str(file), file.stat()) for file in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)
