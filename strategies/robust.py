# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation: UNION, Bulyan, Krum, medians, trimmed means, and bounded norms."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from pydantic import Field

from fedrec.errors import ExperimentError
from fedrec.protocol.updates import Change, SparseUpdate, apply_changes, dense_change
from fedrec.rng import stream
from strategies.base import Aggregate, CohortStrategy, ServerRate

# Base of the robust rules: a combination of the clients' updates in place of their mean.
#
#     theta <- theta + server-lr * rule(theta_1 - theta, ..., theta_n - theta)
#
# A rule needs the update of each client and not their sum (`reply = "each"`), so it raises an error
# with secure aggregation, which hides them, and with `[privacy]`: one client may move a median or
# decide a choice of Krum, so noise for a sum does not hide it. Every client counts the same.


@dataclass(frozen=True, eq=False)
class _ClientChanges:
    """Changes of one parameter by all clients of a round.

    Attributes:
        before: the parameter at the start of the round, not to be changed.
        rows: `int64 [R]`, the rows that any client changed; None: clients change the whole
            parameter.
        values: `float64 [clients, R, ...]`, the changes of these rows, or of the whole parameter.
        touched: `bool [clients, R]`, True for rows that a client changed; without `rows`, all True.
    """

    before: np.ndarray
    rows: np.ndarray | None
    values: np.ndarray
    touched: np.ndarray

    @classmethod
    def of(cls, changes: Sequence[Change], table: np.ndarray) -> Self:
        """Collect the changes of a parameter, whose value before is `table [...]`."""
        sparse = [change for change in changes if isinstance(change, SparseUpdate)]
        if len(sparse) < len(changes):
            values = np.stack([dense_change(change) for change in changes])
            return cls(table, None, values, np.ones(values.shape[:2], dtype=bool))
        rows = np.unique(np.concatenate([change.rows for change in sparse]))
        values = np.zeros((len(sparse), len(rows), *table.shape[1:]))
        touched = np.zeros(values.shape[:2], dtype=bool)
        for index, change in enumerate(sparse):
            positions = np.searchsorted(rows, change.rows)
            values[index, positions] = change.values
            touched[index, positions] = True
        return cls(table, rows, values, touched)

    def change(self, combined: np.ndarray) -> Change:
        """Convert a combination of the values, `[R, ...]`, to a change of the parameter."""
        if self.rows is None:
            return combined
        return SparseUpdate(self.before.shape, self.rows, combined)

    @property
    def flat(self) -> np.ndarray:
        """Return the values as vectors, `float64 [clients, n]`."""
        return self.values.reshape(len(self.values), -1)


Changes = Mapping[str, _ClientChanges]
"""Changes of each parameter, by its name."""


class _RobustRule(CohortStrategy):
    """Base of robust rules, which apply a robust combination of the clients' updates."""

    Config = ServerRate
    reply = "each"
    config: ServerRate

    @abstractmethod
    def _combined(self, changes: Changes, round_number: int) -> dict[str, np.ndarray]:
        """Combine the updates of each parameter, `float64 [R, ...]`, in the rows of `changes`;
        rounds are numbered from 1."""

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and the updates of at least one
        client."""
        each = aggregate.each
        if each is None:
            return theta
        changes = {
            name: _ClientChanges.of(each.updates.changes(name, table), table)
            for name, table in theta.items()
        }
        moved = self._combined(changes, aggregate.round)
        moves = {name: change.change(moved[name]) for name, change in changes.items()}
        return apply_changes(theta, moves, self.config.rate(aggregate.round))


def _squared_distances(changes: Changes) -> np.ndarray:
    """Squared L2 distances between the clients' whole updates, `float64 [clients, clients]`."""
    gram = sum(change.flat @ change.flat.T for change in changes.values())
    norms = np.diag(gram)
    return np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)


def _mean_of(changes: Changes, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Mean update of some clients `int64 [n]`, `[R, ...]` by parameter."""
    return {name: change.values[chosen].mean(axis=0) for name, change in changes.items()}


class _CoordinateRuleConfig(ServerRate):
    """Settings of coordinate-wise rules."""

    over: Literal["cohort", "touching"] = "cohort"
    """Clients whose values are combined in a row of an item table: the whole cohort, where clients
    that have not changed the row count as zeros, or the clients that changed it. Few clients change
    a row, so over the cohort most rows stay as they are; over those that change it, a few malicious
    clients are the majority for a rare item."""
    least: int = Field(default=3, ge=1)
    """Number of clients that must have changed a row for it to move, with `touching`."""


class _CoordinateRule(_RobustRule):
    """Base of coordinate-wise rules."""

    Config = _CoordinateRuleConfig
    config: _CoordinateRuleConfig

    @abstractmethod
    def _of_sorted(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Combine values `[clients, R, ...]`, ascending, with NaN after the first `counts`, `int64
        [R, ...]`."""

    def _combined(self, changes: Changes, round_number: int) -> dict[str, np.ndarray]:
        """Combine the updates of each parameter, `float64 [R, ...]`."""
        return {name: self._combined_change(change) for name, change in changes.items()}

    def _combined_change(self, change: _ClientChanges) -> np.ndarray:
        clients = len(change.values)
        if change.rows is None or self.config.over == "cohort":
            counts = np.full(change.values.shape[1:], clients)
            return self._of_sorted(np.sort(change.values, axis=0), counts)
        tail = (1,) * (change.values.ndim - 2)
        touched = change.touched.reshape(*change.touched.shape, *tail)
        values = np.sort(np.where(touched, change.values, np.nan), axis=0)
        enough = change.touched.sum(axis=0) >= self.config.least
        counts = np.broadcast_to(touched.sum(axis=0), change.values.shape[1:])
        combined = np.zeros(change.values.shape[1:])
        combined[enough] = self._of_sorted(values[:, enough], counts[enough])
        return combined


# Mean of the clients' updates, each scaled down to a bound on its norm (Sun et al. 2019).
#
# The server bounds them here, so that clients which ignore a clip are bounded, too. Where clients
# clip, as honest and malicious ones of a simulation do, `[privacy]` with `clip-norm` bounds them as
# well, and needs their sum alone.
#
# Where this differs from the paper: the bound is the median norm of the round's updates; there it
# is a fixed number.


class NormBound(_RobustRule):
    """Norm bounding: applies the mean of bounded updates."""

    name = "norm-bound"
    paper = "Sun, Kairouz, Suresh and McMahan 2019"

    def _combined(self, changes: Changes, round_number: int) -> dict[str, np.ndarray]:
        """Compute the mean of the bounded updates, `float64 [R, ...]` by parameter."""
        squares = sum(np.square(change.flat).sum(axis=1) for change in changes.values())
        norms = np.sqrt(squares)
        factors = np.minimum(1.0, np.median(norms) / np.maximum(norms, 1e-300)) / len(norms)
        return {
            name: np.tensordot(factors, change.values, axes=1) for name, change in changes.items()
        }


# Coordinate-wise trimmed mean of the clients' updates (Yin et al. 2018, option II): the mean
# without the largest and the smallest values of each coordinate.
#
# Where this differs from the paper: `over = "touching"` takes the mean of a row of an item table
# over the clients that changed it.


class TrimmedMeanConfig(_CoordinateRuleConfig):
    """Settings of the trimmed mean."""

    cut: float = Field(default=0.1, ge=0, lt=0.5)
    """Share of the values of a coordinate that is left out on each side, rounded down."""


class TrimmedMean(_CoordinateRule):
    """Coordinate-wise trimmed mean of the clients' updates."""

    name = "trimmed-mean"
    Config = TrimmedMeanConfig
    paper = "Yin, Chen, Ramchandran and Bartlett 2018, option II"
    config: TrimmedMeanConfig

    def _of_sorted(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Compute the means of the middle values, `[R, ...]`, of `values [clients, R, ...]`."""
        out = (self.config.cut * counts).astype(np.int64)
        ranks = np.arange(len(values)).reshape(-1, *[1] * counts.ndim)
        middle = (ranks >= out) & (ranks < counts - out)
        return np.where(middle, values, 0.0).sum(axis=0) / middle.sum(axis=0)


# Choice of clients by distances to their neighbours, of Krum, Multi-Krum and Bulyan.


class ChoiceConfig(ServerRate):
    """Settings of rules that choose clients."""

    malicious: float = Field(default=0.1, ge=0, lt=0.5)
    """Share of malicious clients in a cohort that the rule is to withstand."""

    def expected(self, clients: int) -> int:
        """Expected number of malicious clients among `clients`, rounded up."""
        return math.ceil(self.malicious * clients - 1e-9)


def _nearest(distances: np.ndarray, malicious: int, count: int) -> np.ndarray:
    """Choose the clients closest to their neighbours (Blanchard et al. 2017).

    Args:
        distances: squared distances of the updates, `float64 [n, n]`.
        malicious: number f of malicious clients; a client's score is the sum over its n - f - 2
            nearest neighbours, at least one.
        count: number of clients to choose.

    Returns:
        Their indices, `int64 [count]`, by ascending score; equal scores in the order of the
        clients.
    """
    neighbours = max(1, len(distances) - malicious - 2)
    others = np.where(np.eye(len(distances), dtype=bool), np.inf, distances)
    scores = np.sort(others, axis=1)[:, :neighbours].sum(axis=1)
    return np.argsort(scores, kind="stable")[:count]


# UNION (Yu et al. 2023), the defence against ClusterAttack: the mean of the updates that leave the
# items' embeddings as uniform as most others do.
#
# For each client the server applies its update alone to the table of item embeddings and takes the
# mean distance between the embeddings of a sample of items, scaled to unit length. The gap
# statistic (Tibshirani, Walther and Hastie 2001) tells whether these numbers form more than one
# cluster. If they do, or if no more clients are apart than are expected to be malicious, the
# smaller one of two clusters is left out.
#
# Where this differs from the paper: there honest clients are also trained to spread the embeddings
# of items evenly, by a contrastive task beside their own, so that their numbers differ less. Here
# the clients' step is what the experiment says. The server of the paper applies an update by a step
# of its Adam. The two clusters of numbers on a line are found exactly and not by k-means from
# random starts.

_REFERENCES = 200  # sets of uniform numbers for comparison with clusters
_SAMPLE = 100  # items whose embeddings are compared, drawn for each round


class Union(_RobustRule):
    """UNION: applies the mean update of the clients that keep item embeddings uniform.

    Raises:
        ExperimentError: the model has no table of item embeddings.
    """

    name = "union"
    Config = ChoiceConfig
    paper = "Yu et al. 2023, UNION"
    config: ChoiceConfig

    def _combined(self, changes: Changes, round_number: int) -> dict[str, np.ndarray]:
        """Compute the mean of the selected updates, `float64 [R, ...]` by parameter."""
        table = changes[self._table({name: change.before for name, change in changes.items()})]
        items = len(table.before)
        random = stream(0, "union", round_number)
        drawn = np.sort(random.choice(items, min(_SAMPLE, items), replace=False))
        uniformities = _mean_distances(table, drawn)
        expected = self.config.expected(len(uniformities))
        return _mean_of(changes, np.flatnonzero(~_outlying(uniformities, expected)))

    def check_parameters(self, theta: Mapping[str, np.ndarray]) -> None:
        """Check that the model has a table of item embeddings."""
        self._table(theta)

    def _table(self, theta: Mapping[str, np.ndarray]) -> str:
        """Name of the table of item embeddings: the one of more than one column with the most
        rows."""
        tables = {
            name: len(value)
            for name, value in theta.items()
            if value.ndim == 2 and value.shape[1] > 1
        }
        if not tables:
            raise ExperimentError(
                "UNION needs a table of item embeddings",
                got=", ".join(theta),
                fix="choose another strategy, such as median",
            )
        return max(tables, key=lambda name: tables[name])


def _mean_distances(table: _ClientChanges, items: np.ndarray) -> np.ndarray:
    """Mean distance between the rows of some items `int64 [n]`, scaled to unit length, after each
    client's update, `float64 [clients]`."""
    changed = np.zeros((len(table.values), len(items), table.before.shape[1]))
    if table.rows is None:
        changed += table.values[:, items]
    elif len(table.rows):
        positions = np.minimum(np.searchsorted(table.rows, items), len(table.rows) - 1)
        known = table.rows[positions] == items
        changed[:, known] = table.values[:, positions[known]]
    rows = table.before[items].astype(np.float64) + changed
    rows /= np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-300)
    products = np.einsum("cik,cjk->cij", rows, rows)
    squares = np.einsum("cii->ci", products)
    apart = squares[:, :, None] + squares[:, None] - 2 * products
    count = len(items)
    return np.sqrt(np.maximum(apart, 0.0)).sum(axis=(1, 2)) / (count * (count - 1))


def _outlying(numbers: np.ndarray, expected: int) -> np.ndarray:
    """Mask `bool [n]` of the smaller of two clusters, if there are two by the gap statistic or if
    it has at most `expected` members; empty if all numbers are equal.

    Args:
        numbers: `float64 [n]`.
        expected: largest cluster size that is always left out.
    """
    low = numbers.min()
    high = numbers.max()
    if not high > low:
        return np.zeros(len(numbers), dtype=bool)
    scaled = (numbers - low) / (high - low)
    order = np.argsort(scaled, kind="stable")
    spread_of_one, spread_of_two, first = (
        outliers[0] for outliers in _spreads(scaled[order][None])
    )
    members = order[:first] if 2 * first <= len(numbers) else order[first:]
    outliers = np.zeros(len(numbers), dtype=bool)
    outliers[members] = len(members) <= expected or _are_two(
        spread_of_one, spread_of_two, len(numbers)
    )
    return outliers


def _are_two(spread_of_one: float, spread_of_two: float, count: int) -> bool:
    """True if numbers in [0, 1], with these sums of squares around one and two centres, form two
    clusters rather than one: Gap(1) < Gap(2) - s(2)."""
    uniform = np.sort(stream(0, "gap", count).random((_REFERENCES, count)), axis=1)
    references = _spreads(uniform)
    gaps = []
    for spread, reference in zip((spread_of_one, spread_of_two), references[:2], strict=True):
        logarithms = np.log(np.maximum(reference, 1e-300))
        gap = logarithms.mean() - np.log(max(spread, 1e-300))
        gaps.append((gap, logarithms.std() * np.sqrt(1 + 1 / _REFERENCES)))
    return bool(gaps[0][0] < gaps[1][0] - gaps[1][1])


def _spreads(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums of squares around one centre and around the best two, `float64 [sets]`, and the size of
    the lower one of two clusters, `int64 [sets]`, of ascending `values [sets, n]`."""
    lower = _spreads_of_first(values)
    upper = _spreads_of_first(values[:, ::-1])[:, ::-1]
    split = lower[:, :-1] + upper[:, 1:]
    best = split.argmin(axis=1)
    return lower[:, -1], split[np.arange(len(values)), best], best + 1


def _spreads_of_first(ordered: np.ndarray) -> np.ndarray:
    """Sums of squares of the first 1, 2, ..., n values `[sets, n]` around their means."""
    sums = ordered.cumsum(axis=1)
    sizes = np.arange(1, ordered.shape[1] + 1)
    return np.maximum(np.square(ordered).cumsum(axis=1) - np.square(sums) / sizes, 0.0)


# Bulyan (El Mhamdi, Guerraoui and Rouault 2018): of updates that Krum's score chooses, the mean of
# the values of each coordinate that are closest to its median.
#
# Of n clients with f malicious ones, n - 2f are chosen, and n - 4f values of each coordinate are
# averaged. The guarantee needs n >= 4f + 3.
#
# Where this differs from the paper: the updates are chosen by their scores at once, as in Flower;
# there Krum is repeated on those that are left.


class Bulyan(_RobustRule):
    """Bulyan: applies the coordinate-wise mean around the median of chosen updates.

    Raises:
        ExperimentError: the cohort is too small for the share of malicious clients.
    """

    name = "bulyan"
    Config = ChoiceConfig
    paper = "El Mhamdi, Guerraoui and Rouault 2018"
    config: ChoiceConfig

    def _combined(self, changes: Changes, round_number: int) -> dict[str, np.ndarray]:
        """Compute the mean of the central values, `float64 [R, ...]` by parameter."""
        distances = _squared_distances(changes)
        clients = len(distances)
        malicious = self.config.expected(clients)
        if clients < 4 * malicious + 3:
            raise ExperimentError(
                f"Bulyan does not withstand {malicious} malicious clients among {clients}",
                expected=f"at least {4 * malicious + 3} clients in every round",
                fix="set a larger sampler.cohort, or a smaller strategy.malicious",
            )
        chosen = _nearest(distances, malicious, clients - 2 * malicious)
        count = clients - 4 * malicious
        return {name: _central(change.values[chosen], count) for name, change in changes.items()}


def _central(values: np.ndarray, count: int) -> np.ndarray:
    """Mean of the `count` values `[clients, ...]` of each coordinate that are closest to its
    median."""
    away = np.abs(values - np.median(values, axis=0))
    nearest_to_median = np.argsort(away, axis=0, kind="stable")[:count]
    return np.take_along_axis(values, nearest_to_median, axis=0).mean(axis=0)


# Krum and Multi-Krum (Blanchard et al. 2017): the mean of the updates that are closest to their
# neighbours.
#
# With `keep = 1` it is Krum, which takes the update of a single client, with more Multi-Krum.


class KrumConfig(ChoiceConfig):
    """Settings of Krum."""

    keep: int = Field(default=1, ge=1)
    """Number of updates to average (m of Multi-Krum), at most the cohort."""


class Krum(_RobustRule):
    """Krum: applies the mean of the updates that are closest to others.

    Raises:
        ExperimentError: a round has fewer updates than are averaged.
    """

    name = "krum"
    Config = KrumConfig
    paper = "Blanchard, El Mhamdi, Guerraoui and Stainer 2017"
    config: KrumConfig

    def _combined(self, changes: Changes, round_number: int) -> dict[str, np.ndarray]:
        """Compute the mean of the chosen updates, `float64 [R, ...]` by parameter."""
        distances = _squared_distances(changes)
        if self.config.keep > len(distances):
            raise ExperimentError(
                f"Krum cannot choose {self.config.keep} of {len(distances)} updates",
                expected="at least strategy.keep updates in every round",
                fix="set a smaller strategy.keep, or a larger sampler.cohort",
            )
        malicious = self.config.expected(len(distances))
        return _mean_of(changes, _nearest(distances, malicious, self.config.keep))


# Coordinate-wise median of the clients' updates (Yin et al. 2018, option I).
#
# Where this differs from the paper: `over = "touching"` takes the median of a row of an item table
# over the clients that changed it.


class Median(_CoordinateRule):
    """Coordinate-wise median of the clients' updates."""

    name = "median"
    paper = "Yin, Chen, Ramchandran and Bartlett 2018, option I"

    def _of_sorted(self, values: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Compute the median, `[R, ...]`, of `values [clients, R, ...]`."""
        ranks = np.stack([(counts - 1) // 2, counts // 2])
        return np.take_along_axis(values, ranks, axis=0).mean(axis=0)
