# SPDX-License-Identifier: Apache-2.0
"""Private systems about the items with the largest noisy counts, and the clipped sums of their
users' rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from torch import Tensor

from fedrec.baselines.base import Histories, Sparse
from fedrec.baselines.private.system import (
    NoisyReleases,
    PrivateBaseline,
    PrivateConfig,
    ReleaseKind,
)
from fedrec.data.interactions import LowRatedConfig
from fedrec.privacy.clipping import Clip

# Rows of users, and sums of what each user contributes, clipped.


def binary_rows(
    liked: Histories, users_at_once: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of users, and 1 for each of their liked items, `float64 [block, items]` on a device;
    users in their order.

    Args:
        liked: distinct items of each user.
        users_at_once: users per block; the last block may have fewer.
        device: device of the rows.
    """
    for start in range(0, liked.num_users, users_at_once):
        stop = min(start + users_at_once, liked.num_users)
        yield slice(start, stop), liked.block(start, stop).matrix().to(device).double()


def clip_factors(clip: Clip, norms: Tensor) -> Tensor:
    """Clipping factors of contributions with the given norms `[users]`, `float64 [users]` on their
    device."""
    return torch.from_numpy(clip.factors(norms.cpu().numpy())).to(norms.device)


def clipped_row_sum(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum of users' rows, each clipped, `float64 [items]`; rows are `[users, items]`, >= 0."""
    norms = np.sqrt(_squared_norms(rows)) if clip.order == 2 else np.asarray(rows.sum(1)).ravel()
    return rows.T @ clip.factors(norms)


def clipped_gram(rows: Sparse, clip: Clip) -> np.ndarray:
    """Sum over users of x x^T, each clipped in the Frobenius norm |x|^2, `float64 [items, items]`.

    Args:
        rows: x of each user, sparse `float64 [users, items]`.
        clip: the bound.
    """
    shares = np.sqrt(clip.factors(_squared_norms(rows)))
    shrunk = sparse.diags_array(shares) @ rows
    return (shrunk.T @ shrunk).toarray()


def _squared_norms(rows: Sparse) -> np.ndarray:
    """`float64 [users]`."""
    return np.asarray(rows.multiply(rows).sum(1)).ravel()


COUNTS = "counts"
GRAM = "gram"


class ChosenItemsConfig(PrivateConfig):
    """Settings of the choice."""

    items: int = Field(default=500, ge=1)
    """Number m of items (with the largest noisy counts) that are learned from; at most the
    catalogue."""
    exponent: float = Field(default=0.2, ge=0)
    """Items are weighted by their noisy counts to the power of minus this; 0: equal weights."""
    count_share: float = Field(default=0.06, gt=0, lt=1)
    """Share of the budget (of mu^2) that the counts take."""
    count_clip: float = Field(default=6.0, gt=0)
    """Bound on the L2 norm of a user's counts: sqrt(n) for n liked items."""

    def counts(self) -> ReleaseKind:
        """The release of the counts, which have no signs."""
        return ReleaseKind(COUNTS, self.count_clip, self.count_share, contributions="non-negative")


@dataclass(frozen=True, eq=False)
class ChosenItems:
    """The items with the largest noisy counts.

    Attributes:
        counts: noisy counts of all items, `float32 [items]`.
        noise: their standard deviation.
        places: the chosen items, ascending, `int64 [m]`.
        weights: of each of them, with mean 1, `float64 [m]`: counts to the power of minus the
            exponent.
    """

    counts: np.ndarray
    noise: float
    places: np.ndarray
    weights: np.ndarray

    @classmethod
    def released(
        cls, rows: Sparse, releases: NoisyReleases, config: ChosenItemsConfig
    ) -> ChosenItems:
        """Release the counts, and choose.

        Args:
            rows: what each user counts, sparse `float64 [users, items]`, >= 0.
            releases: of this fit.
            config: how many are chosen, and their weights.
        """
        plan = releases.plans[COUNTS]
        counts = releases.release(COUNTS, clipped_row_sum(rows, plan.clip))
        places = np.sort(np.argsort(-counts, kind="stable")[: config.items])
        noise = plan.noise_scale
        # counts below the noise are replaced by it
        known = np.maximum(counts[places], max(noise, 1.0)).astype(np.float64)
        weights = known**-config.exponent
        return cls(counts, noise, places, weights / weights.mean())

    def among(self, histories: Histories) -> Histories:
        """The users' distinct chosen items, numbered by their place among the chosen."""
        return histories.distinct().among(self.places)

    def ranked(self, found: Tensor) -> Tensor:
        """Scores of the catalogue `float32 [users, items]` from those of the chosen items
        `[users, m]`; all others come last, by their counts."""
        # below every chosen item, between 0 and 1 apart
        below = (self.counts - self.counts.max()) / max(float(np.ptp(self.counts)), 1e-9) - 1
        scores = found.amin(1, keepdim=True) + torch.from_numpy(below).to(found)
        scores[:, torch.from_numpy(self.places).to(found.device)] = found
        return scores


class CountsAndGramConfig(ChosenItemsConfig, LowRatedConfig):
    """Settings of two releases: the counts, and the Gram matrix of the chosen items."""

    clip_norm: float = Field(default=8.0, ge=1e-9)
    """c, bound on the Frobenius norm of a user's matrix, about the number of selected items that it
    likes."""


class CountsAndGramBaseline(PrivateBaseline):
    """Released once each: noisy counts, and the Gram matrix of the items with the largest ones.

    Attributes:
        chosen: the items, after fitting.
    """

    config: CountsAndGramConfig
    chosen: ChosenItems

    def parts(self) -> tuple[ReleaseKind, ...]:
        """The counts, and the Gram matrix; neither has signs."""
        config = self.config
        share = 1 - config.count_share
        gram = ReleaseKind(GRAM, config.clip_norm, share, contributions="non-negative")
        return config.counts(), gram

    def rows(self, histories: Histories) -> Sparse:
        """What the releases and the scores know of users, sparse `float64 [users, items]`: 1 for
        liked items and `low-rated` for other rated ones."""
        return histories.csr(np.float64, self.config.low_rated)

    def released(self, histories: Histories) -> tuple[Tensor, float]:
        """Release both; sets `chosen`.

        Args:
            histories: of the users.

        Returns:
            The noisy Gram matrix of the chosen items, each times its weight, `float64 [m, m]`, and
            the standard deviation of the noise on its diagonal.
        """
        rows = self.rows(histories)
        releases = self.releases(rows.shape[0])
        self.chosen = ChosenItems.released(rows, releases, self.config)
        plan = releases.plans[GRAM]
        total = clipped_gram(rows[:, self.chosen.places] * self.chosen.weights, plan.clip)
        gram = releases.symmetric(GRAM, torch.from_numpy(total).to(self.device))
        return gram, plan.noise_scale
