# SPDX-License-Identifier: Apache-2.0
"""Randomising single interactions: the coin flip of the poster "targeted DP" (equation 2), and a
sound alternative.

An interaction is an item and, where ratings are learned from, one of the dataset's rating values.
Both mechanisms are applied to all protected interactions of one client; the caller provides the
random generator.

Where this differs from the paper: "unvisited" is judged by the client's training rows. Fakes that
also avoided the held-out items would reveal them.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from fedrec.data.interactions import Interactions
from fedrec.data.negatives import nth_outside
from fedrec.data.perturbation import TrainingData
from fedrec.errors import DataError

RATING_SCALE = "the rating values of everybody's rows, which replaced ratings are drawn from"
"""What profiles of rated rows depend on beside a client's own rows."""


@dataclass(frozen=True, eq=False)
class Interaction:
    """Some interactions of one client.

    Attributes:
        items: `int64 [k]`.
        values: `int64 [k]`, indices in the list of the dataset's rating values; None if ratings are
            not used.
    """

    items: np.ndarray
    values: np.ndarray | None


class RandomisedRows:
    """Training rows, of which some become other interactions; each keeps its user and time.

    Args:
        data: the rows, and whether ratings are learned from; otherwise a row keeps its rating.

    Attributes:
        items: `int64 [rows]`.
        sizes: sizes of the catalogue and of the rating scale, as the mechanisms take them.
    """

    def __init__(self, data: TrainingData) -> None:
        rows = data.rows
        self._rows = rows
        self.items = rows.items.copy()
        self._ratings = None if rows.ratings is None else rows.ratings.copy()
        self._rated = data.rated and rows.ratings is not None
        rated = rows.ratings if data.rated and rows.ratings is not None else np.zeros(1, np.float32)
        self._scale = np.unique(rated)
        self.sizes = {"num_items": rows.num_items, "num_values": len(self._scale)}

    def real(self, rows: np.ndarray) -> Interaction:
        """The interactions in some rows `int64 [k]`."""
        values = None
        if self._rated and self._ratings is not None:
            values = np.searchsorted(self._scale, self._ratings[rows])
        return Interaction(self.items[rows], values)

    def write(self, rows: np.ndarray, new: Interaction) -> None:
        """Put other interactions into some rows `int64 [k]`."""
        self.items[rows] = new.items
        if new.values is not None and self._ratings is not None:
            self._ratings[rows] = self._scale[new.values]

    def table(self) -> Interactions:
        """All rows as they are now."""
        return dataclasses.replace(self._rows, items=self.items, ratings=self._ratings)


def keep_probability(epsilon: float, outcomes: int = 2) -> float:
    """`e^eps / (e^eps + outcomes - 1)`: probability that an interaction is not changed."""
    return 1 / (1 + (outcomes - 1) * math.exp(-epsilon))


def coin_flip(
    real: Interaction,
    own: np.ndarray,
    *,
    num_items: int,
    num_values: int,
    epsilon: float,
    random: np.random.Generator,
) -> Interaction:
    """Equation 2: each interaction stays with probability `e^eps / (e^eps + 1)`, or becomes one
    with an unvisited item.

    Args:
        real: the protected interactions.
        own: `int64 [items]`, ascending, distinct: all items of the client's training rows.
        num_items: size of the catalogue.
        num_values: number of rating values; a replacement's rating is drawn uniformly among them.
        epsilon: nominal epsilon, > 0.
        random: source of randomness.

    Raises:
        DataError: there is no unvisited item.
    """
    count = len(real.items)
    free = num_items - len(own)
    if count and free < 1:
        raise DataError(
            "a client has no unvisited items",
            expected="at least one item that it has not",
            got=f"{free} of {num_items}",
            fix="--set perturb.mechanism=randomised-response",
        )
    # Fakes are drawn for all interactions, so that later draws do not depend on the number of
    # flips.
    ranks = random.integers(0, free, size=count)
    fake = _with_values(nth_outside(own, ranks), real, num_values, random)
    return _mixed(real, fake, random.random(count) < keep_probability(epsilon))


def randomised_response(
    real: Interaction,
    *,
    num_items: int,
    num_values: int,
    epsilon: float,
    random: np.random.Generator,
) -> Interaction:
    """Randomised response over all `num_items x num_values` interactions (Warner 1965; Kairouz et
    al. 2016).

    Each is kept with probability `e^eps / (e^eps + outcomes - 1)` and otherwise replaced by any
    other one, including the client's own: exactly epsilon-DP for each interaction.

    Args:
        real: the protected interactions.
        num_items: size of the catalogue.
        num_values: number of rating values.
        epsilon: of one interaction, > 0.
        random: source of randomness.
    """
    outcomes = num_items * (1 if real.values is None else num_values)
    if outcomes == 1:
        return real
    code = real.items if real.values is None else real.items * num_values + real.values
    shift = random.integers(1, outcomes, size=len(code))
    other = (code + shift) % outcomes
    fake = (
        Interaction(other, None)
        if real.values is None
        else Interaction(other // num_values, other % num_values)
    )
    return _mixed(real, fake, random.random(len(code)) < keep_probability(epsilon, outcomes))


def _with_values(
    items: np.ndarray, real: Interaction, num_values: int, random: np.random.Generator
) -> Interaction:
    drawn = None if real.values is None else random.integers(0, num_values, size=len(items))
    return Interaction(items, drawn)


def _mixed(real: Interaction, fake: Interaction, kept: np.ndarray) -> Interaction:
    if real.values is None or fake.values is None:
        return Interaction(np.where(kept, real.items, fake.items), None)
    return Interaction(
        np.where(kept, real.items, fake.items), np.where(kept, real.values, fake.values)
    )
