# SPDX-License-Identifier: Apache-2.0
"""Systems that rank items which nobody has used, by what is public of them: their vectors and
categories."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Baseline, Histories, Sparse, TooLarge
from fedrec.baselines.linear import right_singular_vectors
from fedrec.config import Width
from fedrec.data.features import FeatureNames
from fedrec.data.interactions import LowRatedConfig
from fedrec.sums.content import (
    MapConfig,
    content_columns,
    content_names,
    mapped,
    similarities,
)
from fedrec.sums.products import solved_weights

_MOST_ITEMS = 20_000  # whose similarities or weights fit the memory
_NEGLIGIBLE = 1e-5  # of the largest singular value; vectors below it are arbitrary

# Content-based nearest neighbours: an item's score is the sum of a power of its cosines with the
# user's items, between vectors, or between categories where there are no vectors. The power makes
# near neighbours count more than many far ones.


class ContentKnnConfig(LowRatedConfig):
    """Settings of neighbours by content."""

    power: float = Field(default=6.0, gt=0)
    """Power of the cosine, > 0."""


class ContentKnn(Baseline):
    """Sums of a power of the cosine between a user's items and all others."""

    name = "content-knn"
    Config = ContentKnnConfig
    config: ContentKnnConfig

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Vectors, or categories without any."""
        used = content_names(known)
        return used._replace(items=()) if used.item_vectors else used

    def fit(self, histories: Histories) -> None:
        """Compute the similarities; nothing is learned from the users.

        Raises:
            TooLarge: the catalogue is too large for them.
        """
        _check_size(histories.num_items)
        columns = content_columns(histories.schema().item_features, categories=False)
        self._similarities = similarities(columns.numpy(), self.config.power)

    def scores(self, histories: Histories) -> Tensor:
        """Sums of the similarities of each user's items, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(rows @ self._similarities)


# A linear model of the items that users have used, with a map from content to its factors for the
# others (`fedrec.sums.content`): PureSVD, or EASE. Old items are ranked among themselves exactly as
# by these.


class ContentMapConfig(LowRatedConfig, MapConfig):
    """Settings of the linear model and of the map."""

    solution: Literal["puresvd", "ease"] = "puresvd"
    """The model of the used items: `puresvd`, or `ease`, whose columns of weights are mapped."""
    factors: Width = 64
    """Number of singular vectors of `puresvd`, at most all."""
    regularisation: float = Field(default=500.0, gt=0)
    """Lambda of `ease`, > 0."""


class ContentMap(Baseline):
    """Factors of used items from users, and those of the others from their content."""

    name = "content-map"
    Config = ContentMapConfig
    paper = "attribute-to-feature mappings (Gantner et al. 2010) of PureSVD (Cremonesi et al. 2010)"
    config: ContentMapConfig

    @classmethod
    def features_used(cls, config: Any, known: FeatureNames) -> FeatureNames:
        """Vectors and categories of items."""
        return content_names(known)

    def fit(self, histories: Histories) -> None:
        """Solve for the factors of the used items, and for the map.

        Raises:
            TooLarge: the catalogue is too large for `ease`.
        """
        columns = content_columns(histories.schema().item_features)
        rows = histories.csr(np.float64, self.config.low_rated)
        used = np.asarray(rows.sum(0)).ravel() > 0
        left, right = self._solved(rows)
        chosen = torch.arange(len(used))
        used = torch.from_numpy(used)
        model = mapped(left, right, chosen, used, columns, self.config.map_regularisation)
        self._left = model.left.float()
        self._right = model.right.float()

    def scores(self, histories: Histories) -> Tensor:
        """Products of the users' vectors and the items' factors, `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return torch.from_numpy(rows @ self._left.numpy()) @ self._right.T

    def _solved(self, rows: Sparse) -> tuple[Tensor, Tensor]:
        """L and R of all items, `float64 [items, width]`."""
        if self.config.solution == "ease":
            _check_size(rows.shape[1])
            gram = torch.from_numpy((rows.T @ rows).toarray())
            weights = solved_weights(
                gram,
                0.0,
                solution="ease",
                factors=0,
                regularisation=self.config.regularisation,
                ridge=0.0,
            )
            return torch.eye(len(weights), dtype=torch.float64), weights.T
        vectors = right_singular_vectors(rows, self.config.factors)
        lengths = np.linalg.norm(rows @ vectors.T, axis=0)
        large = lengths > _NEGLIGIBLE * lengths.max(initial=0.0)
        factors = torch.from_numpy(vectors[large].T.copy())
        return factors, factors


def _check_size(items: int) -> None:
    if items > _MOST_ITEMS:
        raise TooLarge(
            "the catalogue is too large for weights between all items",
            expected=f"at most {_MOST_ITEMS:,} items",
            got=f"{items:,} items",
            fix="leave this system out, or take solution = 'puresvd' of content-map",
        )
