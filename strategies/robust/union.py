# SPDX-License-Identifier: Apache-2.0
"""UNION (Yu et al. 2023), the defence against ClusterAttack: the mean of the updates that leave the
items' embeddings as uniform as most others do.

For each client the server applies its update alone to the table of item embeddings and takes the
mean distance between the embeddings of a sample of items, scaled to unit length. The gap statistic
(Tibshirani, Walther and Hastie 2001) tells whether these numbers form more than one cluster. If
they do, or if no more clients are apart than are expected to be malicious, the smaller one of two
clusters is left out.

Where this differs from the paper: there honest clients are also trained to spread the embeddings of
items evenly, by a contrastive task beside their own, so that their numbers differ less. Here the
clients' step is what the experiment says. The server of the paper applies an update by a step of
its Adam. The two clusters of numbers on a line are found exactly and not by k-means from random
starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from fedrec.errors import ExperimentError
from fedrec.rng import stream
from strategies.robust._choice import ChoiceConfig
from strategies.robust._rule import ClientChanges, RobustRule, mean_of

_REFERENCES = 200  # sets of uniform numbers that clusters are compared with


class UnionConfig(ChoiceConfig):
    """Settings of UNION."""

    sample: int = Field(default=100, ge=2)
    """Number of items whose embeddings are compared, drawn for each round; fewer in a small
    catalogue."""
    embeddings: str = ""
    """Name of the table of item embeddings; default: the one of more than one column with the most
    rows."""


class Union(RobustRule):
    """Moves the shared parameters by the mean of the updates of clients that keep items apart.

    Raises:
        ExperimentError: the model has no table of item embeddings, or none of that name.
    """

    name = "union"
    Config = UnionConfig
    paper = "Yu et al. 2023, UNION"
    config: UnionConfig

    def combined(
        self, changes: Mapping[str, ClientChanges], round_number: int
    ) -> dict[str, np.ndarray]:
        """The mean of the updates that are kept, `float64 [R, ...]` by parameter."""
        table = changes[self._table({name: own.before for name, own in changes.items()})]
        items = len(table.before)
        random = stream(0, "union", round_number)
        drawn = np.sort(random.choice(items, min(self.config.sample, items), replace=False))
        uniformities = mean_distances(table, drawn)
        expected = self.config.expected(len(uniformities))
        return mean_of(changes, np.flatnonzero(~outlying(uniformities, expected)))

    def refuse_misfits(self, theta: Mapping[str, np.ndarray]) -> None:
        """Refuse a model without the table of item embeddings."""
        self._table(theta)

    def _table(self, theta: Mapping[str, np.ndarray]) -> str:
        """Name of the table of item embeddings."""
        tables = {
            name: len(value)
            for name, value in theta.items()
            if value.ndim == 2 and value.shape[1] > 1
        }
        wanted = self.config.embeddings
        if not tables or (wanted and wanted not in tables):
            raise ExperimentError(
                "UNION compares embeddings of items",
                expected=f"a table {wanted!r} of embeddings" if wanted else "a table of embeddings",
                got=", ".join(tables or theta),
                fix="correct strategy.embeddings, or choose another strategy, such as median",
            )
        return wanted or max(tables, key=lambda name: tables[name])


def mean_distances(table: ClientChanges, items: np.ndarray) -> np.ndarray:
    """`float64 [clients]`: mean distance between the rows of some items `int64 [n]`, scaled to unit
    length, after each client's update."""
    changed = np.zeros((len(table.values), len(items), table.before.shape[1]))
    if table.rows is None:
        changed += table.values[:, items]
    elif len(table.rows):
        places = np.minimum(np.searchsorted(table.rows, items), len(table.rows) - 1)
        known = table.rows[places] == items
        changed[:, known] = table.values[:, places[known]]
    rows = table.before[items].astype(np.float64) + changed
    rows /= np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), 1e-300)
    products = np.einsum("cik,cjk->cij", rows, rows)
    squares = np.einsum("cii->ci", products)
    apart = squares[:, :, None] + squares[:, None] - 2 * products
    count = len(items)
    return np.sqrt(np.maximum(apart, 0.0)).sum(axis=(1, 2)) / (count * (count - 1))


def outlying(numbers: np.ndarray, expected: int) -> np.ndarray:
    """`bool [n]`: the smaller one of two clusters of numbers, if there are two by the gap statistic
    or if it has at most `expected` members; none where all numbers are equal.

    Args:
        numbers: `float64 [n]`.
        expected: largest number of members that are always left out.
    """
    low = numbers.min()
    high = numbers.max()
    if not high > low:
        return np.zeros(len(numbers), dtype=bool)
    scaled = (numbers - low) / (high - low)
    order = np.argsort(scaled, kind="stable")
    one, two, first = (found[0] for found in _spreads(scaled[order][None]))
    members = order[:first] if 2 * first <= len(numbers) else order[first:]
    found = np.zeros(len(numbers), dtype=bool)
    found[members] = len(members) <= expected or _are_two(one, two, len(numbers))
    return found


def _are_two(one: float, two: float, count: int) -> bool:
    """Whether numbers in [0, 1], with these sums of squares around one and two centres, form two
    clusters rather than one: Gap(1) < Gap(2) - s(2)."""
    uniform = np.sort(stream(0, "gap", count).random((_REFERENCES, count)), axis=1)
    references = _spreads(uniform)
    gaps = []
    for own, reference in zip((one, two), references[:2], strict=True):
        logarithms = np.log(np.maximum(reference, 1e-300))
        gap = logarithms.mean() - np.log(max(own, 1e-300))
        gaps.append((gap, logarithms.std() * np.sqrt(1 + 1 / _REFERENCES)))
    return bool(gaps[0][0] < gaps[1][0] - gaps[1][1])


def _spreads(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums of squares around one centre and around the best two, `float64 [sets]`, and the size of
    the lower one of two clusters, `int64 [sets]`, of ascending `values [sets, n]`."""
    count = values.shape[1]
    sizes = np.arange(1, count + 1)

    def around_first(ordered: np.ndarray) -> np.ndarray:
        """Sums of squares of the first 1, 2, ..., n values around their means."""
        sums = ordered.cumsum(axis=1)
        return np.maximum(np.square(ordered).cumsum(axis=1) - np.square(sums) / sizes, 0.0)

    lower = around_first(values)
    upper = around_first(values[:, ::-1])[:, ::-1]
    split = lower[:, :-1] + upper[:, 1:]
    best = split.argmin(axis=1)
    return lower[:, -1], split[np.arange(len(values)), best], best + 1
