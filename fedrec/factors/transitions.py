# SPDX-License-Identifier: Apache-2.0
"""Which item follows which: sums of transitions between the items of users' sequences, and weights
from them.

With a user's items in the order of their times, i at place p and j at place p + d add decay^(d - 1)
to the transition from i to j, for distances d up to the window. Over users

    T_ij = sum over users and pairs of places at distance d <= window of decay^(d - 1),
    W_ij = T_ij / ((sum over j of T_ij) + row-prior) / ((sum over i of T_ij) + column-prior)^power,

and a user's score of j is the sum over its last items i, the d-th from the end, of decay^(d - 1)
W_ij. It is a Markov chain of order one, smoothed over distances; the power lowers popular items.
A transition from an item to itself does not count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.data.time_weighting import RecencyConfig


class SmoothingConfig(Config):
    """Settings of the weights."""

    row_prior: float = Field(default=20.0, ge=0)
    """Added to the sum of the transitions from an item, >= 0; more for fewer data."""
    column_prior: float = Field(default=50.0, gt=0)
    """Added to the sum of the transitions to an item, > 0."""
    power: float = Field(default=0.3, ge=0, le=1)
    """Popular items are divided by the power of the sum of the transitions to them, in [0, 1]; 0
    leaves popularity in."""


class Transitions(NamedTuple):
    """Transitions of some users, each pair of items once per user.

    Attributes:
        offsets: `int64 [users + 1]`: those of user u are from `offsets[u]` up to `offsets[u + 1]`.
        first: `int64 [n]`, the earlier item.
        second: `int64 [n]`, the later item.
        weights: `float64 [n]`, > 0.
    """

    offsets: np.ndarray
    first: np.ndarray
    second: np.ndarray
    weights: np.ndarray


def transitions(
    offsets: np.ndarray, items: np.ndarray, num_items: int, recency: RecencyConfig
) -> Transitions:
    """The transitions of users' sequences.

    Args:
        offsets: `int64 [users + 1]`: user u's items are `items[offsets[u]:offsets[u + 1]]`.
        items: `int64 [n]`, each user's from the earliest to the latest.
        num_items: size of the catalogue.
        recency: window and decay.
    """
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    codes = [np.empty(0, np.int64)]
    weights = [np.empty(0)]
    for distance in range(1, recency.window + 1):
        same = users[distance:] == users[:-distance]
        same &= items[distance:] != items[:-distance]
        place = np.flatnonzero(same)
        later = place + distance
        codes.append((users[place] * num_items + items[place]) * num_items + items[later])
        weights.append(np.full(len(place), recency.decay ** (distance - 1)))
    code, place = np.unique(np.concatenate(codes), return_inverse=True)
    summed = np.bincount(place, np.concatenate(weights), len(code))
    user, pair = np.divmod(code, num_items * num_items)
    first, second = np.divmod(pair, num_items)
    ends = np.searchsorted(user, np.arange(len(offsets)))
    return Transitions(ends, first, second, summed)


def multipliers(
    rows: np.ndarray, columns: np.ndarray, smoothing: SmoothingConfig
) -> tuple[np.ndarray, np.ndarray]:
    """What the transitions from and to each item are multiplied by in W, from their sums;
    `float64 [m]` each. Without a prior, an item that nothing follows has 0."""
    rows = rows + smoothing.row_prior
    left = np.divide(1.0, rows, out=np.zeros(len(rows)), where=rows > 0)
    return left, 1 / (columns + smoothing.column_prior) ** smoothing.power


def transition_weights(total: Tensor, smoothing: SmoothingConfig) -> Tensor:
    """W from T, both `float64 [m, m]`; negative entries of T, which noise makes, count as 0."""
    total = total.clamp(min=0)
    left, right = multipliers(total.sum(1).numpy(), total.sum(0).numpy(), smoothing)
    return torch.from_numpy(left)[:, None] * total * torch.from_numpy(right)
