# SPDX-License-Identifier: Apache-2.0
"""Embeddings of items from their public features only: a Gaussian prior on users' preferences.

A user's utility for item i is a sum of effects of the item's categories, so that over users its
covariance is a kernel between items, and the embeddings e_i are a factor of that kernel: e_i . e_j
= K(i, j). Five kinds of effects (Rasmussen and Williams 2006, chapter 4, for the kernels and their
sums and products):

* *categories*, such as genres: each has an effect of its own, independent of the others;
* *ordered categories*, such as decades of release: effects of neighbouring categories are alike,
  with covariance exp(-(a - b)^2 / 2 l^2) for the categories at places a and b; an item with several
  of them has their mean;
* *interactions*: each pair of a category and an ordered one, the latter at half the length scale;
* *words* of a text, such as a title, that few items have in common: they tell series and sequels;
* *vectors*, such as embeddings of texts or images: a linear kernel of the vectors less their mean,
  of mean squared length 1; an item without one has the mean.
"""

import numpy as np
from pydantic import Field, PositiveInt

from fedrec.config import Config
from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.errors import ExperimentError

_KEPT = 1e-6  # of the largest eigenvalue; below it a direction of a kernel is left out


class PublicPriorConfig(Config):
    """Settings of the prior over what users like, given the items' public features."""

    ordered: dict[str, float] = Field(default_factory=dict)
    """Features of the items whose categories have an order, that of their labels, with length
    scales in categories, > 0; the others have none."""
    feature_variance: float = Field(default=0.2, ge=0)
    """Prior variance of a user's liking of a category; 0 leaves unordered features out."""
    ordered_variance: float = Field(default=0.5, ge=0)
    """The same of an ordered category."""
    interaction_variance: float = Field(default=0.3, ge=0)
    """The same of an unordered and an ordered category together."""
    word_variance: float = Field(default=0.3, ge=0)
    """The same of a word of a text; 0 leaves texts out."""
    vector_variance: float = Field(default=0.5, ge=0)
    """The same along dense vectors, whose mean squared length is scaled to 1; 0 leaves them out."""
    word_items: tuple[PositiveInt, PositiveInt] = (2, 12)
    """Smallest and largest number of items that have a word; other words are left out: rare ones
    tell nothing of other items, and frequent ones little."""


def prior_features(config: PublicPriorConfig, known: FeatureNames) -> FeatureNames:
    """Those of a dataset's features that the prior uses."""
    return FeatureNames(
        items=known.items,
        item_texts=known.item_texts if config.word_variance else (),
        item_vectors=known.item_vectors if config.vector_variance else (),
    )


def feature_embeddings(
    features: FeatureTable, config: PublicPriorConfig, interactions: int = 32
) -> np.ndarray:
    """Embeddings whose products are the prior covariance of a user's utilities.

    Args:
        features: public ones of the items.
        config: the prior.
        interactions: largest number of columns for the interactions; the leading ones are kept.

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
            f"items have no feature {', '.join(unknown)}",
            expected=f"in `ordered`, features of the items: {', '.join(sorted(names)) or 'none'}",
            got=", ".join(unknown),
            fix="correct the names, or set dataset.eras = true for eras of MovieLens",
        )
    plain = [memberships(one) for one in features.features if one.name not in ordered]
    by_place = [one for one in features.features if one.name in ordered]
    smooth = [_smooth(one, ordered[one.name]) for one in by_place]
    columns = [np.zeros((features.rows, 0))]
    columns += [config.feature_variance**0.5 * table for table in plain]
    columns += [config.ordered_variance**0.5 * table for table in smooth]
    words = [_common_words(text, config.word_items) for text in features.texts]
    columns += [config.word_variance**0.5 * table for table in words]
    columns += [config.vector_variance**0.5 * one.standardised() for one in features.vectors]
    finer = [_smooth(one, ordered[one.name] / 2) for one in by_place]
    for table in plain:
        unit = unit_rows(table)
        for other in finer:
            pairs = (unit[:, :, None] * other[:, None, :]).reshape(features.rows, -1)
            columns.append(config.interaction_variance**0.5 * _leading(pairs, interactions))
    return np.concatenate(columns, axis=1)


def memberships(feature: Feature) -> np.ndarray:
    """`float64 [items, categories]`: 1 where an item has a category."""
    table = np.zeros((feature.rows, len(feature.categories)))
    codes = feature.padded()
    for column in codes.T:
        known = np.flatnonzero(column >= 0)
        table[known, column[known]] = 1.0
    return table


def unit_rows(table: np.ndarray) -> np.ndarray:
    """Rows of a table of memberships `[items, categories]` scaled to length 1; zeros stay."""
    return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1.0)


def _common_words(text: Feature, items: tuple[int, int]) -> np.ndarray:
    """`float64 [items, words]`: 1 where an item has a word that so many items have."""
    fewest, most = items
    table = memberships(text)
    counts = table.sum(0)
    return table[:, (counts >= fewest) & (counts <= most)]


def _smooth(feature: Feature, length_scale: float) -> np.ndarray:
    """`float64 [items, width]`: mean over an item's categories of a factor of their covariance."""
    table = memberships(feature)
    places = np.arange(table.shape[1], dtype=np.float64)
    covariance = np.exp(-((places[:, None] - places) ** 2) / (2 * length_scale**2))
    values, vectors = np.linalg.eigh(covariance)
    kept = values > _KEPT * values.max(initial=0.0)
    factor = vectors[:, kept] * np.sqrt(values[kept])
    return (table / np.maximum(table.sum(1, keepdims=True), 1.0)) @ factor


def _leading(table: np.ndarray, width: int) -> np.ndarray:
    """Rows of a table in its leading principal directions, at most `width` of them."""
    vectors = np.linalg.eigh(table.T @ table)[1]
    return table @ vectors[:, -width:]
