# SPDX-License-Identifier: Apache-2.0
"""Centralised baselines under the protocol of the federated systems: same rows, same lists, same metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from fedrec.baselines.base import Baseline, Histories
from fedrec.data.interactions import Interactions
from fedrec.data.split import Partition
from fedrec.errors import DataError
from fedrec.metrics.ranking import ranking_metrics
from fedrec.registry import BASELINE, resolve

Names = Sequence[str] | Mapping[str, Mapping[str, Any]]


def evaluate_baselines(
    names: Names,
    interactions: Interactions,
    partition: Partition,
    *,
    positive_above: float | None,
    held_out: Literal["test", "validation"],
    ks: tuple[int, ...],
    block: int = 256,
) -> dict[str, dict[str, float]]:
    """Fit each baseline to the training clients and rank each held-out user's items.

    A baseline is fitted to the positive train rows of the partition's training clients; a held-out user is known to it
    by the positives of the user's own train rows. A positive that occurs in several held-out rows counts that often in
    `hits@k` and `ndcg@k`.

    Args:
        names: names of baselines, or a mapping from names to settings; a name alone takes the defaults.
        interactions: the dataset.
        partition: its split.
        positive_above: ratings above are positive; None, or data without ratings, makes every row positive.
        held_out: the part that is ranked.
        ks: lengths of the lists.
        block: users scored at a time; memory grows with block x items.

    Returns:
        For each baseline, the mean of each metric of `fedrec.metrics.ranking` over the users with a held-out positive.

    Raises:
        ExperimentError: a name is unknown, settings are wrong, or a baseline refuses the catalogue.
        DataError: no held-out row is positive.
    """
    settings = names if isinstance(names, Mapping) else {name: {} for name in names}
    baselines = {name: _make(name, options) for name, options in settings.items()}
    positive = positive_rows(interactions, positive_above)
    liked_rows = partition.train_rows[positive[partition.train_rows]]
    training = histories_of(interactions, liked_rows, partition.training_clients)
    lists = _lists(interactions, partition, positive, held_out)
    table = {}
    for name, baseline in baselines.items():
        baseline.fit(training)
        starts = range(0, lists.seen.num_users, block)
        table[name] = _means([lists.metrics(baseline, start, start + block, ks) for start in starts])
    return table


def positive_rows(interactions: Interactions, positive_above: float | None) -> np.ndarray:
    """`bool [rows]`: ratings above `positive_above`; every row when that is None or there are no ratings."""
    if positive_above is None or interactions.ratings is None:
        return np.ones(len(interactions), dtype=bool)
    return interactions.ratings > positive_above


def histories_of(interactions: Interactions, rows: np.ndarray, users: np.ndarray) -> Histories:
    """Items of the `rows` (row numbers), one history per user in the order of `users`; rows of others are left out."""
    place = np.full(interactions.num_users, -1, dtype=np.int64)
    place[users] = np.arange(len(users))
    of_row = place[interactions.users[rows]]
    rows, of_row = rows[of_row >= 0], of_row[of_row >= 0]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of_row, minlength=len(users)))])
    return Histories(interactions.num_items, offsets, interactions.items[rows[np.argsort(of_row, kind="stable")]])


@dataclass(frozen=True, eq=False)
class _Lists:
    """What the lists of the held-out users are made of, one history per user each.

    Attributes:
        seen: items of all rows.
        known: items of the train rows.
        liked: positives of the train rows.
        relevant: positives of the held-out rows.
    """

    seen: Histories
    known: Histories
    liked: Histories
    relevant: Histories

    def metrics(self, baseline: Baseline, start: int, stop: int, ks: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Metrics of the users `start` to `stop - 1`."""
        weights = _counts(self.relevant.block(start, stop))
        return ranking_metrics(
            baseline.scores(self.liked.block(start, stop)),
            seen=self.seen.block(start, stop).matrix().bool(),
            known=self.known.block(start, stop).matrix().bool(),
            relevant=weights > 0,
            ks=ks,
            weights=weights,
        )


def _lists(interactions: Interactions, partition: Partition, positive: np.ndarray, held_out: str) -> _Lists:
    rows = partition.test_rows if held_out == "test" else partition.validation_rows
    rows = rows[positive[rows]]
    if not len(rows):
        raise DataError(
            f"{interactions.name} has nothing to rank",
            expected=f"at least one positive {held_out} row",
            got="none",
            fix="hold out a larger share, or lower the rating above which a row is positive",
        )
    users = np.unique(interactions.users[rows])
    known = partition.train_rows
    parts = np.arange(len(interactions)), known, known[positive[known]], rows
    return _Lists(*(histories_of(interactions, part, users) for part in parts))


def _make(name: str, options: Mapping[str, Any]) -> Baseline:
    baseline = resolve(BASELINE, name)
    return baseline(baseline.Config.parse(options, at=f"baselines.{name}"))


def _counts(histories: Histories) -> torch.Tensor:
    """`float32 [users, items]`: how often each item occurs in each history."""
    place = torch.from_numpy(histories.rows() * histories.num_items + histories.items)
    counts = torch.zeros(histories.num_users * histories.num_items)
    counts.index_add_(0, place, torch.ones(len(place)))
    return counts.view(histories.num_users, histories.num_items)


def _means(blocks: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    return {metric: float(torch.cat([block[metric] for block in blocks]).nanmean()) for metric in blocks[0]}
