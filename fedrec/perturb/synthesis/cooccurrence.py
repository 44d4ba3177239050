# SPDX-License-Identifier: Apache-2.0
"""Noisy counts of items and of pairs of items, and profiles drawn from them."""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.privacy.noise_source import source_of

_USERS_AT_ONCE = 2048  # users per block of dense rows in memory
_COUNTS = 1
_PAIRS = 2  # addresses of the noise of the two releases


@dataclass(frozen=True, eq=False)
class NoisyCounts:
    """The noisy release, from which everything else is computed.

    Attributes:
        items: `int64 [m]`, ascending: the most popular items by their noisy counts.
        counts: `float64 [m]`, >= 0: their noisy counts.
        pairs: `float64 [m, m]`, >= 0, symmetric, zero on the diagonal: noisy counts of users who
            have both.
        length: mean number of rows of a profile, >= 1.
    """

    items: np.ndarray
    counts: np.ndarray
    pairs: np.ndarray
    length: float


def noisy_release(
    matrix: sparse.csr_array,
    noise: float,
    *,
    most_items: int,
    clip_items: int,
    threshold: float,
    seed: int,
) -> NoisyCounts:
    """Two Gaussian releases, of counts and of pairs among the items with the largest noisy counts.

    A user's contribution to each is scaled down to the norm of a user with `clip_items` items:
    sqrt(m) for counts, sqrt(m (m + 1) / 2) for the upper triangle of pairs with its diagonal.

    Args:
        matrix: binary `[users, items]`.
        noise: standard deviation of the noise for contributions of norm at most 1.
        most_items: number of items in the matrix of pairs.
        clip_items: m above.
        threshold: counts below this number of standard deviations of their noise are set to zero.
        seed: of the noise.
    """
    source = source_of("reproducible", seed)
    add_noise = mechanism_of("gaussian").add_noise
    bound = np.sqrt(clip_items)
    shares = _shares(np.sqrt(_sizes(matrix)), bound)
    counts = add_noise({"counts": matrix.T @ shares}, noise * bound, source, _COUNTS)[
        "counts"
    ].astype(np.float64)
    head = np.sort(np.argsort(-counts, kind="stable")[:most_items])
    some = matrix[:, head]
    size = _sizes(some)
    bound_pairs = np.sqrt(clip_items * (clip_items + 1) / 2)
    scaled = sparse.diags_array(_shares(np.sqrt(size * (size + 1) / 2), bound_pairs)) @ some
    upper = np.triu((some.T @ scaled).toarray())
    noisy = np.triu(
        add_noise({"pairs": upper}, noise * bound_pairs, source, _PAIRS)["pairs"], 1
    ).astype(np.float64)
    noisy[noisy < threshold * noise * bound_pairs] = 0
    known = counts[head]
    known[known < threshold * noise * bound] = 0
    length = max(1.0, float(counts.sum()) / max(1, len(shares)))
    return NoisyCounts(
        head,
        known if known.any() else np.ones(len(head)),
        noisy + noisy.T,
        min(length, len(head) / 2),
    )


def profiles(
    release: NoisyCounts, users: int, smoothing: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Profiles of distinct items: the first by popularity, each further one by its pairs with those
    before.

    Args:
        release: the noisy counts.
        users: number of profiles.
        smoothing: share of the draws by popularity alone.
        random: source of randomness.

    Returns:
        `int64 [rows]` twice: the user, ascending, and the index of the item in `release.items`.
    """
    lengths = np.minimum(1 + random.poisson(release.length - 1, users), len(release.items))
    popular = release.counts / release.counts.sum()
    likely = release.pairs / np.maximum(release.pairs.sum(axis=1, keepdims=True), 1e-12)
    parts = []
    for start in range(0, users, _USERS_AT_ONCE):
        own, items = _block(
            popular, likely, lengths[start : start + _USERS_AT_ONCE], smoothing, random
        )
        parts.append((own + start, items))
    user, item = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(user, kind="stable")
    return user[order], item[order]


def _block(
    popular: np.ndarray,
    likely: np.ndarray,
    lengths: np.ndarray,
    smoothing: float,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    weights = np.zeros((len(lengths), len(popular)))
    taken = np.zeros(weights.shape, dtype=bool)
    users = []
    items = []
    for step in range(int(lengths.max(initial=0))):
        active = np.flatnonzero(lengths > step)
        by_pairs = 1 - smoothing if step else 0.0  # the first item has no predecessors
        chance = (1 - by_pairs) * popular + by_pairs * weights[active] / max(step, 1)
        chance[taken[active]] = 0
        empty = chance.sum(axis=1) <= 0
        chance[empty] = ~taken[active[empty]]
        total = chance.cumsum(axis=1)
        quantiles = random.random(len(active)) * total[:, -1] * (1 - 1e-12)
        drawn = (total <= quantiles[:, None]).sum(axis=1)
        weights[active] += likely[drawn]
        taken[active, drawn] = True
        users.append(active)
        items.append(drawn)
    return np.concatenate(users), np.concatenate(items)


def _sizes(matrix: sparse.csr_array) -> np.ndarray:
    return np.diff(matrix.indptr).astype(np.float64)


def _shares(norms: np.ndarray, bound: float) -> np.ndarray:
    """Factors that scale each contribution to a norm of at most the bound."""
    return np.minimum(1.0, bound / np.maximum(norms, 1e-12))
