# SPDX-License-Identifier: Apache-2.0
"""Clients of an experiment with their data, malicious users among them, the cache of populations in
a process, and checks that clients' data do not affect each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from fedrec.components import registry
from fedrec.components.sections import component_errors, component_of, refuse_wrong
from fedrec.data.client_data import ClientData, GroupedRows, HeldOut, LabelledRows, UserRows
from fedrec.data.interactions import FeatureNames, Interactions, Schema, more_ids, time_weighted
from fedrec.data.perturbation import Perturbed, apply_perturbation, perturbation_of
from fedrec.data.reader import Reader, data_directory
from fedrec.data.splits.rules import Partition, partition_by, places
from fedrec.errors import DataError, ExperimentError
from fedrec.experiment.schema import AdversaryConfig, DataSettings, Experiment
from fedrec.privacy.accounting.sampling import Adjacency
from fedrec.rng import stream
from fedrec.runtime.ragged import distinct

_HeldOutPart = Literal["test", "validation"]
Part = Literal["training", "known", "test", "validation", "all"]
_AT_ONCE = 2**17  # clients


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
        seed: decides the order of a user's rows of equal times, see `fedrec.data.client_data`.
        numbers: `int64 [users]`, ascending: each user's client id; None: its index.
        adversary: knowledge of an adversary, for data with malicious users.

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
                f"{interactions.name} has no ratings, which task 'rating' and positive-above need",
                fix="use task = 'ranking' without positive-above",
            )
        self.interactions = interactions
        self.partition = partition
        self.task: Literal["ranking", "rating"] = task
        self.positive_above = positive_above
        self.perturbed = perturbed
        self.numbers = numbers
        self.adversary = adversary
        self._source = LabelledRows(interactions, self._labels(interactions), seed)
        known = GroupedRows(self._source, partition.train_rows)
        self._parts = {"known": known, "training": known}
        if perturbed is not None:
            rows = LabelledRows(perturbed.rows, self._labels(perturbed.rows), seed)
            self._parts["training"] = GroupedRows(rows)

    @classmethod
    def of(cls, settings: DataSettings, interactions: Interactions | None = None) -> Population:
        """Read and split a dataset, add malicious users and perturb its training rows if
        configured.

        Args:
            settings: data settings, such as an experiment.
            interactions: the dataset, if it has been read.

        Raises:
            DataError: the dataset is missing or damaged, or lacks data that the split needs.
            ComponentError: a reader, split or perturbation failed.
        """
        if interactions is None:
            interactions = read_interactions(settings)
        partition = partition_by(settings.split, settings.seed_of_split, interactions)
        interactions, partition, known = _with_malicious(settings, interactions, partition)
        perturbed = apply_perturbation(settings, interactions, partition)
        return cls.of_parts(settings, interactions, partition, perturbed=perturbed, adversary=known)

    @classmethod
    def of_parts(
        cls, settings: DataSettings, interactions: Interactions, partition: Partition, **more: Any
    ) -> Population:
        """Clients of interactions that have been divided; `more` are further arguments of the
        class."""
        return cls(
            interactions,
            partition,
            task=settings.task,
            positive_above=settings.positive_above,
            seed=settings.seed_of_split,
            **more,
        )

    @property
    def training_clients(self) -> np.ndarray:
        """Clients that may be sampled for training rounds, `int64 [clients]`, ascending."""
        return self._ids(self.partition.training_clients)

    def schema(self) -> Schema:
        """The public schema of the data, for models."""
        data = self.interactions
        users = tuple(
            (feature.name, len(feature.categories)) for feature in data.user_features.features
        )
        words = tuple(feature.categories for feature in data.user_features.features)
        return Schema(data.num_items, data.item_features, users, self.task, data.num_users, words)

    def rows(
        self, clients: np.ndarray, part: Part = "training", *, positive: bool | None = None
    ) -> UserRows:
        """Rows of some clients `int64 [clients]`.

        Args:
            clients: ids, in any order.
            part: "training" (perturbed if configured), "known" (the real training rows),
                "validation", "test" or "all".
            positive: only positive rows, or only others; None: both.
        """
        rows = self._part(part).of(self._users(clients), clients)
        return rows if positive is None else rows.where((rows.labels > 0) == positive)

    def counts(self, clients: np.ndarray, part: Part = "training") -> np.ndarray:
        """Number of rows of some clients, `int64 [clients]`, see `rows`."""
        return self._part(part).counts(self._users(clients))

    def client(self, client: int) -> ClientData:
        """The training data of one client."""
        return self.clients(np.array([client]))[0]

    def clients(self, clients: np.ndarray) -> list[ClientData]:
        """The training data of some clients `int64 [clients]`; faster than one client at a time."""
        rows = self.rows(clients)
        items = rows.items
        labels = rows.labels
        times = rows.times
        ratings = rows.ratings
        liked = (labels > 0) | (self.task == "rating")
        ends = rows.offsets.tolist()
        codes = self.feature_codes(clients)
        data = []
        for number, client in enumerate(clients.tolist()):
            span = slice(*ends[number : number + 2])
            positives = distinct(items[span][liked[span]])
            avoided = None
            if self.partition.leaky_negatives:
                avoided = np.union1d(positives, self.rows(clients[[number]], "all").items)
            data.append(
                ClientData(
                    client,
                    tuple(feature[number] for feature in codes),
                    items[span],
                    labels[span],
                    positives,
                    None if times is None else times[span],
                    None if ratings is None else ratings[span],
                    avoided,
                )
            )
        return data

    def feature_codes(self, clients: np.ndarray) -> tuple[np.ndarray, ...]:
        """Category codes of some clients for each user feature, `int64 [clients, width]`, padded
        with -1."""
        users = self._users(clients)
        return tuple(feature.padded(users) for feature in self.interactions.user_features.features)

    @property
    def time_positions(self) -> np.ndarray | None:
        """Position of each row in its user's sequence, `int64 [rows of the dataset]`; None without
        times."""
        return self._source.positions

    @cached_property
    def popularity(self) -> np.ndarray:
        """Share of the training clients who like each item, `float64 [items]`."""
        num_items = self.interactions.num_items
        counts = np.zeros(num_items, dtype=np.int64)
        for clients in _in_blocks(self.training_clients):
            liked = distinct(self.rows(clients, positive=True).pairs) % num_items
            counts += np.bincount(liked, minlength=num_items)
        return counts / max(1, len(self.training_clients))

    @cached_property
    def untrained_items(self) -> np.ndarray:
        """Mask `bool [items]` of items without a training row of a training client; none on a
        device, which does not know the others' rows."""
        untrained = np.ones(self.interactions.num_items, dtype=bool)
        if self.numbers is not None:
            return ~untrained
        for clients in _in_blocks(self.training_clients):
            untrained[self.rows(clients, "known").items] = False
        return untrained

    def new_items(self, held_out: _HeldOutPart) -> np.ndarray | None:
        """`bool [items]`: the items of a held-out part that the split ranks apart from the others;
        None if it makes none."""
        items = self.partition.new_items.get(held_out, ())
        if not len(items):
            return None
        new = np.zeros(self.interactions.num_items, dtype=bool)
        new[items] = True
        return new

    def weighted_items(
        self, clients: np.ndarray, low_rated: float = 0.0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct items of the (perturbed) training rows of some clients, ragged: positive ones
        with weight 1, and others with weight `low_rated`, in [0, 1]; 0 leaves these out.

        Returns:
            `int64 [clients + 1]` offsets, `int64 [total]` items, ascending for each client, and
            their weights, `float32 [total]`.
        """
        rows = self.rows(clients)
        every = rows.pairs
        positive = rows.labels > 0
        pairs = liked = distinct(every[positive] if self.task == "ranking" else every)
        if low_rated and self.task == "ranking":
            pairs = distinct(every)
        weights = np.where(np.isin(pairs, liked), np.float32(1), np.float32(low_rated))
        catalogue = self.interactions.num_items
        offsets = np.searchsorted(pairs, np.arange(len(clients) + 1) * catalogue)
        return offsets, pairs % catalogue, weights

    def histories(
        self, clients: np.ndarray, rated: bool = False, low_rated: float = 0.0
    ) -> np.ndarray:
        """Preferences of some clients, `float32 [clients, items]`: for positive items of training
        rows 1, or if `rated` the time-weighted rating (`fedrec.data.interactions`); for other rated
        items `low_rated`, >= 0; 0 elsewhere."""
        rows = self.rows(clients, positive=True)
        owner, items, amounts = time_weighted(rows.owner, rows.items, rows.ratings, rows.times)
        table = np.zeros((len(clients), self.interactions.num_items), dtype=np.float32)
        table[owner, items] = amounts if rated else 1.0
        if low_rated:
            others = self.rows(clients, positive=False).mask()
            table[others] = np.maximum(table[others], np.float32(low_rated))
        return table

    def evaluated_clients(self, held_out: _HeldOutPart) -> np.ndarray:
        """Clients with held-out rows (ranking: a held-out positive), `int64 [clients]`,
        ascending."""
        everyone = self._ids(np.arange(self.interactions.num_users))
        positive = True if self.task == "ranking" else None
        blocks = _in_blocks(everyone)
        return np.concatenate(
            [distinct(self.rows(clients, held_out, positive=positive).ids) for clients in blocks]
        )

    def held_out(self, clients: np.ndarray, held_out: _HeldOutPart) -> HeldOut:
        """Masks over the catalogue for a block of clients `int64 [clients]`, in memory of clients
        times items."""
        seen = self.rows(clients, "all").mask()
        known = self.rows(clients, "known").mask()
        learned = known if self.perturbed is None else self.rows(clients).mask()
        rows = self.rows(clients, held_out, positive=True)
        weight = None
        if len(np.unique(rows.pairs)) < len(rows.pairs):
            weight = np.zeros(seen.shape, dtype=np.int64)
            np.add.at(weight, (rows.owner, rows.items), 1)
        return HeldOut(seen, known, learned, rows.mask(), weight)

    def unrated_targets(self, clients: np.ndarray) -> np.ndarray | None:
        """Mask `bool [clients, targets]` of an adversary's targets that a client has not rated in
        any part of the data; None without an adversary."""
        if self.adversary is None:
            return None
        return ~self.rows(clients, "all").mask()[:, self.adversary.targets]

    def _users(self, clients: np.ndarray) -> np.ndarray:
        """User indices of some clients, `int64 [clients]`."""
        return clients if self.numbers is None else np.searchsorted(self.numbers, clients)

    def _ids(self, users: np.ndarray) -> np.ndarray:
        """Client ids of some users, `int64 [users]`."""
        return users if self.numbers is None else self.numbers[users]

    def _labels(self, interactions: Interactions) -> np.ndarray:
        """Labels `float32 [rows]`, or `bool [rows]` in a quarter of the memory."""
        ratings = interactions.ratings
        if self.task == "rating" and ratings is not None:
            return ratings
        if self.positive_above is None or ratings is None:
            return np.ones(len(interactions), dtype=bool)
        return ratings > self.positive_above

    def _part(self, part: Part) -> GroupedRows:
        if part not in self._parts:
            rows = {"test": self.partition.test_rows, "validation": self.partition.validation_rows}
            self._parts[part] = GroupedRows(self._source, rows.get(part))
        return self._parts[part]


def sample_clients(clients: np.ndarray, count: int | None, seed: int) -> np.ndarray:
    """Fixed sample of some clients, `int64 [count]`, ascending, a function of clients, count and
    seed; all clients if `count` is None."""
    if count is None or count >= len(clients):
        return clients
    return np.sort(stream(seed, "evaluated").choice(clients, size=count, replace=False))


def _in_blocks(clients: np.ndarray) -> list[np.ndarray]:
    """Split clients `[n]` into blocks, to limit the memory for their rows."""
    return np.split(clients, range(_AT_ONCE, len(clients), _AT_ONCE))


def reader_of(settings: DataSettings) -> Reader:
    """The reader of a dataset."""
    reader = registry.resolve(registry.DATASET, settings.dataset.name)
    with component_errors(registry.DATASET.name, reader, "when it was made"):
        return reader(settings.dataset.name, settings.settings(registry.DATASET))


def read_interactions(settings: DataSettings) -> Interactions:
    """Read a dataset.

    Raises:
        DataError: it is missing or damaged.
        ComponentError: its reader failed, or returned something else.
    """
    reader = reader_of(settings)
    kind = registry.DATASET.name
    with component_errors(kind, reader, "when it was read"):
        interactions = reader.read()
        if not isinstance(interactions, Interactions):
            got = type(interactions).__name__
            refuse_wrong(kind, reader, "from read()", expected="Interactions", got=got)
        return reader.described(interactions)


# The populations of this process: read once, or received from another process of the run.
#
# The population is constant during a run; a new run calls `renew` first, so that data changed in
# the meantime are read again.

_MOST = 2  # populations in the cache
FileStamp = tuple[str, int, int, int]
"""Path, size in bytes, time of the last change in nanoseconds, and inode of a file."""


class PopulationCache:
    """A cache of a few populations; the least recently used one is dropped first."""

    def __init__(self) -> None:
        # by key, with the stamps of the files read; None: received from another process
        self._cached: dict[str, tuple[Population, tuple[FileStamp, ...] | None]] = {}

    def population(self, settings: DataSettings) -> Population:
        """Return the population of these settings, read if it is not cached.

        Raises:
            DataError: the dataset is missing or damaged.
        """
        population = self.cached(settings)
        if population is None:
            stamps = _stamps(settings)
            population = Population.of(settings)
            self._cached[_key(settings)] = population, stamps
        self.hold(settings, population)
        return population

    def cached(self, settings: DataSettings) -> Population | None:
        """Return the cached population of these settings, or None."""
        return self._cached.get(_key(settings), (None, None))[0]

    def hold(self, settings: DataSettings, population: Population) -> None:
        """Cache a population, possibly from another process, as the most recently used."""
        _, stamps = self._cached.pop(_key(settings), (None, None))
        self._cached[_key(settings)] = population, stamps
        for oldest in list(self._cached)[:-_MOST]:
            del self._cached[oldest]

    def renew(self, settings: DataSettings) -> None:
        """Remove the population of these settings if this process read it from files that have
        changed since."""
        _, stamps = self._cached.get(_key(settings), (None, None))
        if stamps is not None and stamps != _stamps(settings):
            self.drop(settings)

    def drop(self, settings: DataSettings) -> None:
        """Remove the population of these settings from the cache."""
        self._cached.pop(_key(settings), None)


POPULATIONS = PopulationCache()


def _key(settings: DataSettings) -> str:
    """Cache key: all settings that a population depends on, and the location of its data."""
    parts = settings.model_dump(mode="json", include=set(DataSettings.model_fields))
    return json.dumps([parts, str(data_directory())], sort_keys=True)


def _stamps(settings: DataSettings) -> tuple[FileStamp, ...]:
    """Stamps of the files that a dataset is read from; empty for generated data."""
    reader = reader_of(settings)
    with component_errors(registry.DATASET.name, reader, "while listing its files"):
        stats = [(str(file), file.stat()) for file in reader.files()]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


# Checks before training that no client's rows affect those of others, as privacy guarantees need.
#
# A clip bounds how far one client's own update moves a sum. If that client's rows also decide which
# rows of others are for training, as one shuffle of all rows does, or how others' rows are
# perturbed, every client's update moves and no bound on one client's update holds.
#
# The names of users and items and the numbers of users and rows are taken as public. So are the
# categories of users' features (a model has a row for each) if the dataset publishes or declares
# them; categories that are collected from the rows reveal that some user is in each.


def check_independent_clients(settings: DataSettings, adjacency: Adjacency, what: str) -> None:
    """Check that under the split and perturbation no client's rows affect those of others.

    Args:
        settings: data settings, such as an experiment.
        adjacency: how neighbouring data differ.
        what: the table with the guarantee, such as "[privacy]".

    Raises:
        ExperimentError: the guarantee would not hold.
    """
    reason = component_of(registry.SPLIT, settings.split, settings.seed_of_split).depends_on(
        adjacency
    )
    if reason:
        raise ExperimentError(
            f"the guarantee of {what} does not hold with split {settings.split.name!r}: rows of one"
            " client affect which rows of others are for training",
            expected=f"a split that handles each client separately (under {adjacency})",
            got=f"parts that depend on {reason}",
            fix="set split.stream = 'client', or choose another split; a custom split declares its"
            " independence in depends_on()",
        )
    perturbation = perturbation_of(settings)
    rated = settings.task == "rating" or settings.positive_above is not None
    reason = "" if perturbation is None else perturbation.depends_on(rated)
    if settings.perturb is not None and reason:
        raise ExperimentError(
            f"the guarantee of {what} does not hold with perturbation {settings.perturb.name!r}:"
            " rows of one client affect how rows of others are perturbed",
            expected="a perturbation that handles each client separately",
            got=f"rows that depend on {reason}",
            fix=f"leave out [perturb] or {what}, or choose random-replacement, randomised-response"
            " or targeted with select = 'random', without ratings",
        )


def check_declared_categories(experiment: Experiment, what: str) -> None:
    """Check that no model uses users' features whose categories are collected from the rows.

    Args:
        experiment: with a federated system.
        what: the table with the guarantee, such as "[privacy]".

    Raises:
        ExperimentError: the categories would be published unprotected.
    """
    reader = reader_of(experiment)
    model = registry.resolve(registry.MODEL, experiment.model.name)
    known = reader.stated_features() or FeatureNames()
    used = model.features_used(experiment.settings(registry.MODEL), known).users
    collected = reader.undeclared_categories() if used else ()
    if collected:
        raise ExperimentError(
            f"{what} does not protect the categories of users' features: the model has a row for"
            " each, which reveals even a category of a single user",
            expected=f"dataset.user-categories for {', '.join(collected)}",
            got="categories that are collected from the users' rows",
            fix=f"set dataset.user-categories.{collected[0]} = [...], the public categories"
            " (others become 'other'), or model.features = false",
        )


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
        ExperimentError: there are more targets than items.
    """
    honest = partition.training_clients
    malicious = adversary.number_among(len(honest))
    rows = partition.train_rows[np.isin(interactions.users[partition.train_rows], honest)]
    rows = rows[np.argsort(interactions.users[rows], kind="stable")]
    owners = np.searchsorted(honest, interactions.users[rows])
    counts = np.bincount(owners, minlength=len(honest))
    # the public share of each user's rows, rounded up
    position, of_user = places(owners, stream(seed, "public-rows").random(len(rows)))
    drawn = position < np.ceil(adversary.public_share * of_user)
    popularity = np.bincount(interactions.items[rows], minlength=interactions.num_items)
    first = interactions.num_users
    return Known(
        items=interactions.num_items,
        targets=_targets(adversary.targets, popularity),
        malicious=np.arange(first, first + malicious),
        honest=len(honest),
        usual=max(1, int(np.median(counts))) if len(counts) else 1,
        offsets=np.searchsorted(owners[drawn], np.arange(len(honest) + 1)),
        public=interactions.items[rows[drawn]],
        seed=seed,
    )


def _targets(count: int, popularity: np.ndarray) -> np.ndarray:
    """The least popular items, `int64 [count]`, ascending."""
    if count > len(popularity):
        raise ExperimentError(
            "wrong value for 'adversary.targets'",
            expected=f"at most the number of items of the dataset, {len(popularity):,}",
            got=f"{count:,}",
            fix=f"set adversary.targets = {len(popularity)} or less",
        )
    return np.sort(np.argsort(popularity, kind="stable")[:count])


# Malicious users, added to a dataset after it was split, so that honest users keep their parts.
#
# A malicious user has the side features of a randomly drawn honest user, and the training rows of
# a fake profile from its attack; it has no held-out rows. Targets are rated highest.
# Other items are rated highest for ranking, and at the mean for rating; times follow the last time
# of the dataset, in the order of the profile.


def _with_malicious(
    settings: DataSettings, interactions: Interactions, partition: Partition
) -> tuple[Interactions, Partition, Known | None]:
    """Add the experiment's malicious users to a split dataset, as training clients with the last
    user numbers, and return the adversary's knowledge too. Without `[adversary]`, return the
    dataset unchanged, and None.

    Raises:
        ExperimentError: the attack is unknown, or there are more targets than items.
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


def adversary_words(attack: str, known: Known, interactions: Interactions) -> str:
    """Describe the number of malicious clients, the name of the attack and its targets."""
    names = ", ".join(interactions.item_ids[known.targets].astype(str).tolist())
    count = len(known.malicious)
    clients = (
        f"{count} of {known.honest + count} training clients are malicious (attack {attack});"
        " all metrics are of honest users."
        if count
        else "no client is malicious, so exposure is measured without an attack."
    )
    return f"Adversary: {clients} Targets: {names}."
