# SPDX-License-Identifier: Apache-2.0
"""Item embeddings from public features and a noisy Gram matrix, user vectors given them, and a map
from what is public of items to the factors of a linear model."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config
from fedrec.data.interactions import Feature, FeatureNames, FeatureTable
from fedrec.errors import ExperimentError
from fedrec.sums.products import shrunk

_LOG = logging.getLogger("fedrec")

# A user's vector under a log-linear model of its liked items, given item embeddings.
#
# Each liked item is drawn from the catalogue with p(i) proportional to s_i exp(w . e_i), where s is
# popularity, e are item embeddings shared by all users, and w ~ N(0, I) is the user's vector. The
# most probable vector maximises
#
#     sum over liked i of a_i w . e_i - n log sum over j of s_j exp(w . e_j) - |w|^2 / 2
#
# with weights a_i of the liked items and n their sum. It is concave, depends on this user's items
# only, and has as many unknowns as an embedding has coordinates, so a device can solve it from data
# that never leave it.
#
# It is solved by gradient steps preconditioned with the curvature at w = 0, n C + I, where the
# covariance C is the same for all users; in the eigenbasis of C it is diagonal. Step lengths are
# those of Barzilai and Borwein (1988), and a step that lowers the objective is undone and halved.

_ITERATIONS = 100  # largest number of steps
_STEPS = (0.1, 3.0)  # smallest and largest step length, in units of the first


class LogLinear:
    """Log-linear model: user vectors for given embeddings and popularities.

    Args:
        embeddings: `float [items, width]`; user vectors and scores have the same precision.
        log_shares: `float [items]`, logarithms of popularities, which need not be normalised.
        tolerance: iteration stops for users whose gradient norm (in the metric of the curvature at
            0) is at most this.
    """

    def __init__(self, embeddings: Tensor, log_shares: Tensor, *, tolerance: float = 1e-2) -> None:
        shares = torch.softmax(log_shares, 0)
        centred = embeddings - shares @ embeddings
        curvature = ((centred * shares[:, None]).T @ centred).double()
        # In single precision LAPACK returns NaN for some matrices that lack many ranks.
        values, axes = (part.to(embeddings) for part in torch.linalg.eigh(curvature))
        self.curvature = values
        self.embeddings = centred @ axes
        self.log_shares = torch.log_softmax(log_shares, 0)
        self._tolerance = tolerance
        self._rounding = 8 * torch.finfo(embeddings.dtype).eps

    def tastes(self, liked: Tensor) -> Tensor:
        """Most probable user vectors, in the basis of this object's `embeddings`.

        Args:
            liked: weights of the users' liked items, `float [users, items]`, >= 0.

        Returns:
            `float [users, width]`; zero for a user without items.
        """
        tastes = liked.new_zeros(len(liked), self.embeddings.shape[1])
        unfinished = torch.arange(len(liked), device=liked.device)
        given = self._given(liked)
        state = self._start(given)
        for _ in range(_ITERATIONS):
            open_ = self._open(given, state)
            tastes[unfinished[~open_]] = state.taste[~open_]
            unfinished = unfinished[open_]
            given = _Given(*(part[open_] for part in given))
            state = _State(*(part[open_] for part in state))
            if not len(unfinished):
                break
            state = self._moved(given, state)
        tastes[unfinished] = state.taste
        return tastes

    def scores(self, liked: Tensor) -> Tensor:
        """Log of the personalised popularities, up to a constant per user, `float [users,
        items]`."""
        return self._utilities(self.tastes(liked))

    def traced_scores(self, liked: Tensor) -> Tensor:
        """Scores of one user, `[1, items]`, like `scores`, as one loop that can be exported."""
        given = self._given(liked)

        def unfinished(count: Tensor, *state: Tensor) -> Tensor:
            return (count < _ITERATIONS) & self._open(given, _State(*state)).any()

        def moved(count: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            return (count + 1, *self._moved(given, _State(*state)))

        _, taste, *_ = torch.while_loop(unfinished, moved, (torch.tensor(0), *self._start(given)))
        return self._utilities(taste)

    def _given(self, liked: Tensor) -> _Given:
        weights = liked.sum(1, keepdim=True)
        metric = weights * self.curvature.clamp(min=0) + 1
        return _Given(weights, liked @ self.embeddings, metric)

    def _start(self, given: _Given) -> _State:
        taste = torch.zeros_like(given.sums)
        return _State(taste, torch.ones_like(given.weights), *self._objective(taste, given))

    def _open(self, given: _Given, state: _State) -> Tensor:
        """Users with a gradient norm above the tolerance, `bool [users]`."""
        return (state.slope.square() / given.metric).sum(1) > self._tolerance**2

    def _moved(self, given: _Given, state: _State) -> _State:
        """Return the state after one step."""
        step = state.slope / given.metric
        moved = state.taste + state.length * step
        value, slope = self._objective(moved, given)
        better = (value >= state.value - self._rounding * state.value.abs())[:, None]
        bent = (step * (state.slope - slope)).sum(1, keepdim=True)
        length = state.length * (step.square() * given.metric).sum(1, keepdim=True) / bent
        length = torch.where(bent > 0, length, torch.ones_like(bent)).clamp(*_STEPS)
        return _State(
            torch.where(better, moved, state.taste),
            torch.where(better, length, state.length / 2),
            torch.where(better[:, 0], value, state.value),
            torch.where(better, slope, state.slope),
        )

    def _utilities(self, taste: Tensor) -> Tensor:
        """Utilities, `[users, items]`."""
        return F.linear(taste, self.embeddings) + self.log_shares

    def _objective(self, taste: Tensor, given: _Given) -> tuple[Tensor, Tensor]:
        """Value `[users]` and gradient `[users, width]` of the objective."""
        utilities = self._utilities(taste)
        totals = torch.logsumexp(utilities, 1)
        expected = (utilities - totals[:, None]).exp() @ self.embeddings
        value = (taste * given.sums).sum(1) - given.weights[:, 0] * totals
        slope = given.sums - given.weights * expected - taste
        return value - taste.square().sum(1) / 2, slope


class _Given(NamedTuple):
    """Statistics of users' histories: sums of weights `[users, 1]`, sums of embeddings and
    curvatures at 0, `[users, width]`."""

    weights: Tensor
    sums: Tensor
    metric: Tensor


class _State(NamedTuple):
    """Vectors `[users, width]`, lengths of the next step `[users, 1]`, objective `[users]` and its
    gradient `[users, width]`."""

    taste: Tensor
    length: Tensor
    value: Tensor
    slope: Tensor


# Embeddings of items from their public features only: a Gaussian prior on users' preferences.
#
# A user's utility for item i is a sum of effects of the item's categories, so that over users its
# covariance is a kernel between items, and the embeddings e_i are a factor of that kernel: e_i .
# e_j = K(i, j). Five kinds of effects (Rasmussen and Williams 2006, chapter 4, for the kernels and
# their sums and products):
#
# * *categories*, such as genres: each has an effect of its own, independent of the others;
# * *ordered categories*, such as decades of release: effects of neighbouring categories are alike,
#   with covariance exp(-(a - b)^2 / 2 l^2) for the a-th and the b-th category; an item with several
#   of them has their mean;
# * *interactions*: each pair of a category and an ordered one, the latter at half the length scale;
# * *words* of a text, such as a title, that few items have in common: they tell series and sequels;
# * *vectors*, such as embeddings of texts or images: a linear kernel of the vectors less their
#   mean, of mean squared length 1; an item without one has the mean.

_NEGLIGIBLE = 1e-6  # of the largest eigenvalue; below it a direction of a kernel is left out
# prior variances of a user's liking of an ordered category, of an unordered and an ordered category
# together, and of a word of a text
_ORDERED_VARIANCE = 0.5
_INTERACTION_VARIANCE = 0.3
_INTERACTIONS = 32  # largest number of columns of each pair of features, the leading ones
_WORD_VARIANCE = 0.3
_WORD_ITEMS = (2, 12)  # items that have a word: fewer or more carry little of other items


class PublicPriorConfig(Config):
    """Settings of the prior of users' preferences, given the items' public features."""

    ordered: dict[str, float] = Field(default_factory=dict)
    """Length scales, in categories, > 0, of item features with ordered categories, sorted by label;
    other features are unordered."""
    feature_variance: float = Field(default=0.2, ge=0)
    """Prior variance of a user's liking of a category; 0 leaves unordered features out."""
    vector_variance: float = Field(default=0.5, ge=0)
    """Prior variance along dense vectors with mean squared length 1; 0 leaves them out."""


def prior_features(config: PublicPriorConfig, known: FeatureNames) -> FeatureNames:
    """Features of a dataset that the prior uses."""
    vectors = known.item_vectors if config.vector_variance else ()
    return known._replace(users=(), item_vectors=vectors)


def feature_embeddings(features: FeatureTable, config: PublicPriorConfig) -> np.ndarray:
    """Item embeddings with products equal to the prior covariance of a user's utilities.

    Args:
        features: public ones of the items.
        config: the prior.

    Returns:
        `float64 [items, width]`.

    Raises:
        ExperimentError: an ordered feature is not an item feature.
    """
    ordered = config.ordered
    names = {feature.name for feature in features.features}
    unknown = sorted(set(ordered) - names)
    if unknown:
        raise ExperimentError(
            f"unknown item feature {', '.join(unknown)}",
            expected=f"in `ordered`, features of the items: {', '.join(sorted(names)) or 'none'}",
            got=", ".join(unknown),
            fix="correct the names, or set dataset.eras = true for eras of MovieLens",
        )
    plain = [memberships(feature) for feature in features.features if feature.name not in ordered]
    in_order = [feature for feature in features.features if feature.name in ordered]
    smooth = [_smooth(feature, ordered[feature.name]) for feature in in_order]
    columns = [np.zeros((features.rows, 0))]
    columns += [config.feature_variance**0.5 * table for table in plain]
    columns += [_ORDERED_VARIANCE**0.5 * table for table in smooth]
    columns += [_WORD_VARIANCE**0.5 * _common_words(text) for text in features.texts]
    columns += [config.vector_variance**0.5 * table.standardised() for table in features.vectors]
    finer = [_smooth(feature, ordered[feature.name] / 2) for feature in in_order]
    for table in plain:
        unit = _unit_rows(table)
        for other in finer:
            pairs = (unit[:, :, None] * other[:, None, :]).reshape(features.rows, -1)
            columns.append(_INTERACTION_VARIANCE**0.5 * _leading(pairs, _INTERACTIONS))
    return np.concatenate(columns, axis=1)


def memberships(feature: Feature) -> np.ndarray:
    """Multi-hot categories of items, `float64 [items, categories]`."""
    table = np.zeros((feature.rows, len(feature.categories)))
    codes = feature.padded()
    for column in codes.T:
        known = np.flatnonzero(column >= 0)
        table[known, column[known]] = 1.0
    return table


def _unit_rows(table: np.ndarray) -> np.ndarray:
    """Scale rows of memberships `[items, categories]` to length 1; zero rows stay zero."""
    return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1.0)


def public_directions(features: FeatureTable) -> np.ndarray:
    """Constant 1, then each feature's categories as a unit vector, `float64 [items, width]`."""
    units = [_unit_rows(memberships(feature)) for feature in features.features]
    return np.concatenate([np.ones((features.rows, 1)), *units], axis=1)


def _common_words(text: Feature) -> np.ndarray:
    """Words of items as 0 or 1, without rare and frequent words, `float64 [items, words]`."""
    fewest, most = _WORD_ITEMS
    table = memberships(text)
    counts = table.sum(0)
    return table[:, (counts >= fewest) & (counts <= most)]


def _smooth(feature: Feature, length_scale: float) -> np.ndarray:
    """Mean covariance factor of an item's ordered categories, `float64 [items, width]`."""
    table = memberships(feature)
    rank = np.arange(table.shape[1], dtype=np.float64)
    covariance = np.exp(-((rank[:, None] - rank) ** 2) / (2 * length_scale**2))
    values, vectors = np.linalg.eigh(covariance)
    large = values > _NEGLIGIBLE * values.max(initial=0.0)
    factor = vectors[:, large] * np.sqrt(values[large])
    return (table / np.maximum(table.sum(1, keepdims=True), 1.0)) @ factor


def _leading(table: np.ndarray, width: int) -> np.ndarray:
    """Project a table's rows on its leading principal directions, at most `width`."""
    vectors = np.linalg.eigh(table.T @ table)[1]
    return table @ vectors[:, -width:]


# The part of a noisy Gram matrix that popularity and public features do not explain.
#
# If users liked items independently of each other and in proportion to popularity, the off-diagonal
# entries of the Gram matrix would be y_i y_j, with y proportional to popularity. If users'
# utilities also have the covariance e_i . e_j, they are y_i y_j (1 + e_i . e_j), to first order. So
# from a noisy Gram matrix G and public embeddings f_i
#
#     R = G - y y^T - Y F F^T Y,    Y = diag(y),    R_ii = 0
#
# contains what public features do not explain, and noise. Its eigenvalues above the noise edge,
# shrunk to what they were before noise pushed them (Gavish and Donoho 2017, spiked symmetric
# matrices in operator norm), give further coordinates of the embeddings: (Y^2 + k^2)^-1 Y V
# sqrt(values), where k damps rare items, whose rows of G are nearly noise. All of this is
# post-processing of one release.

_POPULARITY_VARIANCE = 0.1  # prior variance of a user's liking of popular items


class LearnedConfig(Config):
    """Settings of the coordinates that are learned from the Gram matrix."""

    damping: float = Field(default=0.7, ge=0)
    """Damping of rare items' learned coordinates, in units of the mean expected root of an
    entry."""


def placed_embeddings(
    gram: Tensor,
    chosen: Tensor,
    scale: Tensor,
    shares: Tensor,
    public: Tensor,
    config: LearnedConfig,
    *,
    edge: float,
    factors: int,
) -> Tensor:
    """Learned embedding coordinates of the whole catalogue, 0 for items that are not chosen; the
    first is the logarithm of an item's popularity.

    Args:
        gram: noisy and symmetric, of the chosen items in their scale, `float64 [m, m]`; unchanged.
        chosen: the items of its rows, `int64 [m]`.
        scale: factor of each of these items in `gram`, > 0, `float64 [m]`.
        shares: popularities of all items, > 0, with sum 1, `float64 [items]`.
        public: public coordinates of all items, `float64 [items, width]`.
        config: damping.
        edge: see `_learned_embeddings`.
        factors: see `_learned_embeddings`.

    Returns:
        `float64 [items, factors]`, leading coordinates last.
    """
    popularity = _POPULARITY_VARIANCE**0.5 * shares.log()[:, None][:, :factors]
    known = torch.cat([public, popularity], 1)
    learned = _learned_embeddings(
        gram,
        _expected_profile(gram, shares[chosen] * scale),
        (known - shares @ known)[chosen],
        edge=edge,
        factors=factors - popularity.shape[1],
        damping=config.damping,
    )
    placed = learned.new_zeros(len(shares), factors)
    placed[:, : popularity.shape[1]] = popularity
    if learned.shape[1]:
        placed[chosen, -learned.shape[1] :] = learned
    return placed


def _expected_profile(gram: Tensor, popularity: Tensor) -> Tensor:
    """Multiple y of the popularities with products y_i y_j closest to the off-diagonal Gram matrix.

    Args:
        gram: symmetric, `float64 [m, m]`.
        popularity: `float64 [m]`, > 0, in the scale of the Gram matrix's items.

    Returns:
        `float64 [m]`; of length 1e-6 if no positive multiple fits because of noise.
    """
    products = torch.outer(popularity, popularity).fill_diagonal_(0)
    scale = float((gram * products).sum() / products.square().sum().clamp(min=1e-300))
    return popularity * max(scale, 1e-12 / float(popularity.square().sum())) ** 0.5


def _learned_embeddings(
    gram: Tensor, profile: Tensor, public: Tensor, *, edge: float, factors: int, damping: float
) -> Tensor:
    """Additional coordinates of item embeddings, from the part that public ones do not explain.

    Args:
        gram: noisy and symmetric, `float64 [m, m]`; unchanged.
        profile: y, `float64 [m]`, > 0, see `_expected_profile`.
        public: F, `float64 [m, width]`, centred.
        edge: largest eigenvalue of noise alone, see `fedrec.sums.products.noise_edge`; 0 without
            noise.
        factors: largest number of coordinates.
        damping: k in units of the mean of y, >= 0.

    Returns:
        `float64 [m, at most factors]`, leading ones last; without columns if everything is below
        the noise edge.
    """
    explained = profile[:, None] * public
    rest = gram - torch.outer(profile, profile) - explained @ explained.T
    rest.fill_diagonal_(0)
    values, vectors = torch.linalg.eigh((rest + rest.T) / 2)
    first = len(values) - min(int((values > max(edge, 0.0)).sum()), factors)
    values = values[first:]
    vectors = vectors[:, first:]
    damped = profile / (profile.square() + (damping * profile.mean()) ** 2)
    return damped[:, None] * vectors * shrunk(values, max(edge, 0.0)).sqrt()


def expected_counts(noisy: np.ndarray, std: float) -> np.ndarray:
    """Posterior mean of counts with Gaussian noise.

    The prior is exponential, with the mean of the noisy counts: most items are rare. Then a count
    is distributed as a normal number that is > 0 and has mean noisy - std^2 / mean.

    Args:
        noisy: counts, `float [items]`.
        std: standard deviation of the noise, >= 0.

    Returns:
        `float64 [items]`, > 0; without noise the counts, at least 1/2.
    """
    counts = noisy.astype(np.float64)
    if std == 0:
        return np.maximum(counts, 0.5)
    moved = torch.from_numpy((counts - std**2 / max(float(counts.mean()), 1.0)) / std)
    log_density = -0.5 * moved.square() - 0.5 * np.log(2 * np.pi)
    hazard = (log_density - torch.special.log_ndtr(moved)).exp()
    return np.maximum(std * (moved + hazard).numpy(), 1e-9 * std)


# From what is public of items, their vectors and categories, to the factors of a linear model.
#
# A linear item-to-item model has weights B = L R^T: a user with items x has the vector t = x L, and
# item i the score t . R_i. PureSVD has L = R = V, the first right singular vectors of the users'
# matrix, and EASE has L = I and R = B^T. An item that nobody has used has no R_i. It follows from
# its columns c_i, vectors and categories of unit length, by ridge regression over the items that
# users have used:
#
#     M = (C^T C + lambda I)^-1 C^T R,    R_i = c_i M
#
# (as in attribute-to-feature mappings, Gantner et al. 2010). Items that have factors keep them.
# Both L and R follow from the sum of the users' products alone, and the columns are public, so that
# the map costs no privacy beyond that of the sum. An item's columns depend on the item alone.


class MapConfig(Config):
    """Setting of the map from columns to factors."""

    map_regularisation: float = Field(default=1.0, gt=0)
    """Lambda of the ridge regression from vectors and categories, of unit length each, > 0."""


def content_names(known: FeatureNames) -> FeatureNames:
    """The features of a dataset that columns are made of."""
    return FeatureNames(items=known.items, item_vectors=known.item_vectors)


def content_columns(features: FeatureTable, *, categories: bool = True) -> Tensor:
    """The columns of items, `float32 [items, columns]`: each dense vector, and the categories of
    each feature, with length 1; zeros where an item has none. Where nothing is known of any item,
    one column is the same for all, so that new items are ranked alike.

    Args:
        features: of the items.
        categories: whether to take categories beside vectors; without vectors they are taken.
    """
    vectors = features.vectors
    tables = [F.normalize(torch.tensor(vector.values, dtype=torch.float64)) for vector in vectors]
    if categories or not vectors:
        tables += [torch.from_numpy(_unit_rows(memberships(f))) for f in features.features]
    if not tables:
        _LOG.warning(
            "nothing is public of the items, neither vectors nor categories: new items are ranked"
            " alike (dataset.item-vectors; docs/guides/new-items.md)"
        )
        tables = [torch.ones(features.rows, 1)]
    return torch.cat(tables, 1).float()


def mapped(
    left: Tensor,
    right: Tensor,
    chosen: Tensor,
    used: Tensor,
    columns: Tensor,
    regularisation: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A linear model of the whole catalogue.

    Args:
        left: L of the chosen items, `float64 [m, width]`.
        right: R of the chosen items, likewise.
        chosen: these items, `int64 [m]`.
        used: which of them users have used, `bool [m]`; the others have no factors of their own.
        columns: of all items, `float [items, columns]`.
        regularisation: lambda, > 0.

    Returns:
        What an item of a user adds to the user's vector, `float64 [items, width]`; factors of
        items, whose products with the user's vector are scores, likewise; and M, `float64 [columns,
        width]`.
    """
    public = columns.double()
    known = public[chosen[used]]
    matrix = known.T @ known
    matrix.diagonal().add_(regularisation)
    weights = torch.linalg.solve(matrix, known.T @ right[used])
    outputs = public @ weights
    outputs[chosen[used]] = right[used]
    inputs = torch.zeros_like(outputs)
    inputs[chosen[used]] = left[used]
    return inputs, outputs, weights
