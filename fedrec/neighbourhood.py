# SPDX-License-Identifier: Apache-2.0
"""Neighbourhood models: users' ratings as profiles, similarities of items, and similarities that
are learned from ratings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import AfterValidator
from scipy.sparse import csr_array

from fedrec.kernel.compiled import compiled

# Users' ratings in the form used by neighbourhood models: grouped by user, each item once.


@dataclass(frozen=True, eq=False)
class Profiles:
    """Ratings grouped by user.

    Attributes:
        num_items: size of the catalogue.
        offsets: `int64 [users + 1]`; user u's ratings are `offsets[u]:offsets[u + 1]`.
        items: `int64 [ratings]`, ascending and distinct within a user.
        values: `float64 [ratings]`.
    """

    num_items: int
    offsets: np.ndarray
    items: np.ndarray
    values: np.ndarray

    @property
    def num_users(self) -> int:
        """Number of users, including those without ratings."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """Number of ratings of each user, `int64 [users]`."""
        return np.diff(self.offsets)

    @property
    def users(self) -> np.ndarray:
        """User of each rating, `int64 [ratings]`."""
        return np.repeat(np.arange(self.num_users), self.counts)

    def centred(self, means: np.ndarray) -> Profiles:
        """Subtract each item's mean, `float64 [items]`, from its ratings."""
        return replace(self, values=self.values - means[self.items])

    def only(self, chosen: np.ndarray) -> Profiles:
        """Select the ratings for which `bool [ratings]` is true, of the same users."""
        counts = np.bincount(self.users[chosen], minlength=self.num_users)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Profiles(self.num_items, offsets, self.items[chosen], self.values[chosen])

    def at_most(self, ratings: int, keys: np.ndarray) -> Profiles:
        """Select at most a given number of ratings of each user: those with the smallest random
        keys, `float64 [ratings]`."""
        users = self.users
        order = np.lexsort((keys, users))
        rank = np.empty(len(users), dtype=np.int64)
        rank[order] = np.arange(len(users)) - self.offsets[:-1][users]
        return self.only(rank < ratings)

    def matrix(self, values: np.ndarray | None = None) -> csr_array:
        """Sparse matrix `[users, items]` of the ratings, or of other values `[ratings]`."""
        data = self.values if values is None else values
        return csr_array((data, self.items, self.offsets), shape=(self.num_users, self.num_items))


def item_means(profiles: Profiles) -> np.ndarray:
    """Mean rating of each item, `float64 [items]`; of all ratings where an item has none."""
    overall = float(profiles.values.mean()) if len(profiles.values) else 0.0
    counts = np.bincount(profiles.items, minlength=profiles.num_items)
    sums = np.bincount(profiles.items, profiles.values, profiles.num_items)
    return np.divide(sums, counts, out=np.full(profiles.num_items, overall), where=counts > 0)


# Similarities between items from users' ratings: cosine and Pearson correlation (PNBM, section 5.1,
# PCC and COS).
#
#     cos_ij = sum_u r_ui r_uj / sqrt(sum_u r_ui^2 sum_u r_uj^2)
#     pcc_ij = the same with the item's mean subtracted from each rating
#
# The papers do not specify the users in the sums of the denominator and the means: those who rated
# both items (`co-raters`), or all who rated the item (`all`). Without co-raters, or without
# variance among them, it is 0.

Among = Literal["co-raters", "all"]


def cosine(profiles: Profiles, among: Among = "co-raters") -> np.ndarray:
    """Cosine similarity of every pair of items, `float64 [items, items]`, zero on the diagonal."""
    ratings = profiles.matrix()
    products = _dense(ratings.T @ ratings)
    if among == "all":
        norms = np.sqrt(products.diagonal())
        return _ratio(products, np.outer(norms, norms))
    squares = _dense(profiles.matrix(np.square(profiles.values)).T @ _rated(profiles))
    return _ratio(products, np.sqrt(squares * squares.T))


def pearson(profiles: Profiles, among: Among = "co-raters") -> np.ndarray:
    """Correlation of every pair of items over their co-raters, `float64 [items, items]`, zero on
    the diagonal.

    Args:
        profiles: the ratings.
        among: the users whose ratings enter the means; sums are over co-raters in both cases.
    """
    if among == "all":
        counts = np.bincount(profiles.items, minlength=profiles.num_items)
        sums = np.bincount(profiles.items, profiles.values, profiles.num_items)
        return cosine(profiles.centred(sums / np.maximum(counts, 1)))
    rated = _rated(profiles)
    both = co_raters(profiles)
    # [i, j]: sum of i's ratings by those who also rated j
    sums = _dense(profiles.matrix().T @ rated)
    squares = _dense(profiles.matrix(np.square(profiles.values)).T @ rated)
    products = _dense(profiles.matrix().T @ profiles.matrix())
    variances = np.maximum(both * squares - np.square(sums), 0.0)
    variances[variances <= 1e-9 * both * squares] = (
        0.0  # with equal ratings only rounding errors remain
    )
    return _ratio(both * products - sums * sums.T, np.sqrt(variances * variances.T))


def co_raters(profiles: Profiles) -> np.ndarray:
    """Number of users who rated both items, `float64 [items, items]`."""
    rated = _rated(profiles)
    return _dense(rated.T @ rated)


def shrunk(similarity: np.ndarray, both: np.ndarray, shrinkage: float) -> np.ndarray:
    """Similarities `[items, items]` times n / (n + shrinkage), where n users rated both items
    (Koren 2008, section 2.2)."""
    return similarity * (both / (both + shrinkage))


def nearest(similarity: np.ndarray, neighbours: int | None) -> np.ndarray:
    """Similarities `[items, items]` with only the `count` largest magnitudes of each row, 0
    elsewhere; ties go to the first. None: unchanged."""
    if neighbours is None or neighbours >= similarity.shape[1]:
        return similarity
    order = np.argsort(-np.abs(similarity), axis=1, kind="stable")
    largest = similarity.copy()
    np.put_along_axis(largest, order[:, neighbours:], 0.0, axis=1)
    return largest


def _rated(profiles: Profiles) -> csr_array:
    return profiles.matrix(np.ones(len(profiles.values)))


def _dense(product: csr_array) -> np.ndarray:
    return np.asarray(product.todense(), dtype=np.float64)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    ratios = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    np.fill_diagonal(ratios, 0.0)
    return ratios


# Predictions of a probabilistic neighbourhood model, and gradients of its loss (PNBM, equations 2
# to 5).
#
#     f_ui = m_i + sum_j s_ij (r_uj - m_j) / (prior + sum_j |s_ij|)
#
# with j over the items that u rated, without i.
#
# Where this differs from the paper:
#
# - Equation 5 leaves out the sign of the similarity; it is here.
# - With `prior` 0 predictions are the same for c S as for S, so a penalty on S has no minimiser and
#   only shrinks S. A `prior` above 0 shrinks predictions towards the item's mean, more so for users
#   with fewer ratings.


class Bounds(NamedTuple):
    """Bounds on an example's gradient; unbounded by default.

    Attributes:
        error: largest magnitude of the prediction's error.
        factor: largest magnitude of `d_uj - sign(s_ij) f`.
        floor: least denominator.
        prior: added to every denominator, >= 0.
        low, high: the scale of ratings; predictions beyond it are clipped and have no gradient.
    """

    error: float = math.inf
    factor: float = math.inf
    floor: float = 0.0
    prior: float = 0.0
    low: float = -math.inf
    high: float = math.inf


def predicted(
    similarity: np.ndarray,
    known: Profiles,
    means: np.ndarray,
    users: np.ndarray,
    items: np.ndarray,
    *,
    prior: float = 0.0,
) -> np.ndarray:
    """Predicted ratings (equation 2), `float64 [rows]`; the item's mean without rated neighbours.

    Args:
        similarity: `float64 [items, items]`.
        known: the users' ratings, including item means.
        means: `float64 [items]`.
        users: `int64 [rows]`.
        items: `int64 [rows]`.
        prior: added to the denominators.
    """
    ratings = known.centred(means)
    arrays = ratings.offsets, ratings.items, ratings.values
    above = np.empty(len(users))
    below = np.empty(len(users))
    _weighted_sums(similarity, *arrays, users, items, above, below)
    below += prior
    return means[items] + np.divide(above, below, out=np.zeros(len(users)), where=below > 0)


class Examples:
    """Ratings that a model learns from, each predicted from its user's other ratings.

    Args:
        profiles: the ratings.
        means: `float64 [items]`, the items' means.
    """

    def __init__(self, profiles: Profiles, means: np.ndarray) -> None:
        self.means = means
        self.centred = profiles.centred(means)
        self.users = profiles.users

    def __len__(self) -> int:
        return len(self.users)

    def gradient(self, similarity: np.ndarray, drawn: np.ndarray, bounds: Bounds) -> np.ndarray:
        """Gradient of half the sum of squared errors of some examples, `float64 [items, items]`.

        Args:
            similarity: `float64 [items, items]`.
            drawn: `int64 [n]`, indices of the examples; repeated ones count repeatedly.
            bounds: bounds on each example's gradient.
        """
        gradient = np.zeros_like(similarity)
        arrays = self.centred.offsets, self.centred.items, self.centred.values, self.means
        users = self.users[drawn]
        _add_gradients(similarity, *arrays, users, drawn, tuple(bounds), gradient)
        return gradient


@compiled
def _weighted_sums(similarity, offsets, items, deviations, users, targets, above, below):
    """Numerator and denominator of equation 2 for pairs of a user and an item.

    Args:
        similarity: `float64 [items, items]`.
        offsets: `int64 [users + 1]`.
        items: `int64 [ratings]`.
        deviations: `float64 [ratings]`, ratings less their items' means.
        users: `int64 [n]`.
        targets: `int64 [n]`, the item of each pair, which is not a neighbour of itself.
        above, below: `float64 [n]`, outputs: numerators and denominators.
    """
    for pair in range(len(users)):
        row = similarity[targets[pair]]
        total = 0.0
        weight = 0.0
        for entry in range(offsets[users[pair]], offsets[users[pair] + 1]):
            if items[entry] != targets[pair]:
                total += row[items[entry]] * deviations[entry]
                weight += abs(row[items[entry]])
        above[pair] = total
        below[pair] = weight


@compiled
def _add_gradients(
    similarity, offsets, items, deviations, means, users, examples, bounds, gradient
):
    """Add the gradients of half the squared errors of some ratings (equation 5, with the sign of
    each similarity).

        df/ds_ij = (d_uj - sign(s_ij) f) / D,    D = prior + sum_j |s_ij|

    Args:
        similarity: `float64 [items, items]`.
        offsets, items, deviations: as in `_weighted_sums`; deviations are from `means`.
        means: `float64 [items]`.
        users: `int64 [n]`, the user of each example.
        examples: `int64 [n]`, its index among the ratings.
        bounds: error, factor, floor, prior, low, high, see `Bounds`.
        gradient: `float64 [items, items]`, added to.
    """
    most, widest, floor, prior, low, high = bounds
    for index in range(len(examples)):
        example = examples[index]
        first = offsets[users[index]]
        last = offsets[users[index] + 1]
        target = items[example]
        row = similarity[target]
        into = gradient[target]
        total = 0.0
        weight = 0.0
        for entry in range(first, last):
            value = row[items[entry]]
            if entry != example:
                total += value * deviations[entry]
                weight += abs(value)
        weight = max(prior + weight, floor)
        if weight == 0.0:
            continue
        guess = total / weight
        inside = min(max(guess, low - means[target]), high - means[target])
        if inside != guess:
            continue
        step = min(max(guess - deviations[example], -most), most) / weight
        for entry in range(first, last):
            if entry != example:
                value = row[items[entry]]
                pull = deviations[entry] - np.sign(value) * guess
                into[items[entry]] += step * min(max(pull, -widest), widest)


# Stochastic gradient Langevin dynamics (Welling and Teh 2011), one sample from exp(-energy) (PNBM,
# equations 7 and 11).
#
#     x <- x - eta_t / 2 gradient(x) + z,    z ~ N(0, temperature eta_t),    eta_t = eta_1 t^-decay
#
# With a temperature other than 1 the sampled distribution is exp(-energy / temperature), so the
# epsilon of a guarantee for the sample is divided by the temperature.

Gradient = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""An unbiased estimate of the energy's gradient at a point, in the point's shape; a new array."""


def langevin(
    start: np.ndarray,
    gradient: Gradient,
    random: np.random.Generator,
    *,
    steps: int,
    rate: float,
    decay: float = 0.3,
    temperature: float = 1.0,
) -> np.ndarray:
    """Run a Langevin chain; return its last point, `float64 [...]` in the shape of the start.

    Args:
        start: the first point.
        gradient: gradient of the energy.
        random: source of randomness.
        steps: number of steps.
        rate: eta_1.
        decay: xi, of the step sizes.
        temperature: factor on the variance of the noise.
    """
    point = start.copy()
    for step in range(1, steps + 1):
        step_rate = rate * step**-decay
        change = gradient(point, random)
        change *= step_rate / 2
        point -= change
        noise = random.standard_normal(point.shape)
        noise *= np.sqrt(temperature * step_rate)
        point += noise
    return point


# Item means from sums over users, possibly clipped and noisy.
#
# For each of its ratings, a user contributes the rating mapped to [-1, 1] and a 1. For any two
# ratings the inner product r r' + 1 of these pairs is at least 0, so replacing a user moves the
# clipped sum by sqrt(2) S and not 2 S (`fedrec.privacy.accounting.sampling`). This would not hold
# for deviations in units of the rating scale, where r r' may be -4.


def _rising(scale: tuple[float, float]) -> tuple[float, float]:
    if not scale[0] < scale[1]:
        raise ValueError("the scale must run from a lower to a higher rating")
    return scale


Scale: TypeAlias = Annotated[tuple[float, float], AfterValidator(_rising)]
"""Lowest and highest rating, in settings."""


def scaled(values: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
    """Ratings mapped from the scale to [-1, 1], `float64` in their shape `[...]`; values outside
    the scale are clipped."""
    middle = (scale[0] + scale[1]) / 2
    half = (scale[1] - scale[0]) / 2
    return np.clip((values.astype(np.float64) - middle) / half, -1.0, 1.0)


def rating_sums(profiles: Profiles, scale: tuple[float, float], shares: np.ndarray) -> np.ndarray:
    """Sums of users' ratings, mapped to [-1, 1], and numbers of ratings, `float64 [items, 2]`.

    Args:
        profiles: the ratings.
        scale: lowest and highest rating; public.
        shares: `float64 [users]`, factor on each user's contribution.
    """
    weights = shares[profiles.users]
    ratings = scaled(profiles.values, scale)
    sums = np.bincount(profiles.items, weights * ratings, profiles.num_items)
    return np.stack([sums, np.bincount(profiles.items, weights, profiles.num_items)], axis=1)


def means_of(sums: np.ndarray, damping: float, scale: tuple[float, float]) -> np.ndarray:
    """Item means, `float64 [items]`, within the scale.

    An item's mean is shrunk towards the overall mean, as with `damping` additional ratings equal to
    it. Counts below 0 are treated as 0.

    Args:
        sums: `[items, 2]`, see `rating_sums`.
        damping: number of ratings, >= 0.
        scale: lowest and highest rating.
    """
    counts = np.maximum(sums[:, 1], 0.0)
    overall = float(np.clip(sums[:, 0].sum() / max(counts.sum(), 1.0), -1.0, 1.0))
    weights = counts + damping
    totals = sums[:, 0] + damping * overall
    means = np.divide(totals, weights, out=np.full(len(sums), overall), where=weights > 0)
    middle = (scale[0] + scale[1]) / 2
    half = (scale[1] - scale[0]) / 2
    return middle + half * np.clip(means, -1.0, 1.0)


# One user's part of the loss, a function of the similarities between this user's rated items only.


class Rest(NamedTuple):
    """Parts of a user's denominators and numerators that do not depend on learned similarities.

    Attributes:
        prior: added to the denominators, >= 0.
        weight: sum of the fixed similarities to items without learned similarities.
        total: these parts, each multiplied by the user's deviation.
        low, high: `float64 [n]`, least and largest predicted deviation of each item.
    """

    prior: float
    weight: float
    total: float
    low: np.ndarray
    high: np.ndarray


def own_gradient(
    similarity: np.ndarray, deviations: np.ndarray, rest: Rest
) -> tuple[np.ndarray, np.ndarray]:
    """Gradient of half the user's sum of squared errors (PNBM, equation 5, with signs), and the
    errors.

    Args:
        similarity: `float64 [n, n]`, between the user's items; its diagonal is ignored.
        deviations: `float64 [n]`, the user's ratings minus the items' means.
        rest: the parts that are not learned.

    Returns:
        `float64 [n, n]`, zero on the diagonal, and `float64 [n]`.
    """
    weights = similarity.copy()
    np.fill_diagonal(weights, 0.0)
    below = rest.prior + rest.weight + np.abs(weights).sum(axis=1)
    predictable = below > 0
    below = np.where(predictable, below, 1.0)
    guess = (weights @ deviations + rest.total) / below
    inside = np.clip(guess, rest.low, rest.high)
    errors = inside - deviations
    steps = np.where(predictable & (inside == guess), errors / below, 0.0)
    gradient = np.sign(weights)
    gradient *= -guess[:, None]
    gradient += deviations
    gradient *= steps[:, None]
    np.fill_diagonal(gradient, 0.0)
    return gradient, errors


# Initial similarities. The paper states that the initialisation matters, but does not specify it.

Start = Literal["constant", "uniform"]


def initial_similarity(start: Start, size: int, random: np.random.Generator) -> np.ndarray:
    """Initial similarities `float64 [size, size]` of items, zero on the diagonal.

    `constant`: 1 everywhere, which predicts an item's mean plus the mean of the user's deviations.
    `uniform`: drawn from (0, 1).
    """
    similarity = np.ones((size, size)) if start == "constant" else random.random((size, size))
    np.fill_diagonal(similarity, 0.0)
    return similarity
