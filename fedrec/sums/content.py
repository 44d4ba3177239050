# SPDX-License-Identifier: Apache-2.0
"""From what is public of items, their vectors and categories, to the factors of a linear model.

A linear item-to-item model has weights B = L R^T: a user with items x has the vector t = x L, and
item i the score t . R_i. PureSVD has L = R = V, the first right singular vectors of the users'
matrix, and EASE has L = I and R = B^T. An item that nobody has used has no R_i. It follows from its
columns c_i, vectors and categories of unit length, by ridge regression over the items that users
have used:

    M = (C^T C + lambda I)^-1 C^T R,    R_i = c_i M

(as in attribute-to-feature mappings, Gantner et al. 2010). Items that have factors keep them. Both
L and R follow from the sum of the users' products alone, and the columns are public, so that the
map costs no privacy beyond that of the sum. An item's columns depend on the item alone.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.sums.fold_in import memberships, unit_rows

_LOG = logging.getLogger("fedrec")


class MapConfig(Config):
    """Setting of the map from columns to factors."""

    map_regularisation: float = Field(default=1.0, gt=0)
    """Lambda of the ridge regression from vectors and categories, of unit length each, > 0."""


class Mapped(NamedTuple):
    """A linear model of the whole catalogue.

    Attributes:
        left: what an item of a user adds to the user's vector, `float64 [items, width]`.
        right: factors of items, whose products with the user's vector are scores, likewise.
        weights: M, `float64 [columns, width]`.
    """

    left: Tensor
    right: Tensor
    weights: Tensor


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
    tables = [unit(torch.tensor(vector.values, dtype=torch.float64)) for vector in vectors]
    if categories or not vectors:
        tables += [torch.from_numpy(unit_rows(memberships(f))) for f in features.features]
    if not tables:
        _LOG.warning(
            "nothing is public of the items, neither vectors nor categories: new items are ranked"
            " alike (dataset.item-vectors; docs/guides/new-items.md)"
        )
        tables = [torch.ones(features.rows, 1)]
    return torch.cat(tables, 1).float()


def unit(rows: Tensor) -> Tensor:
    """Rows `[n, width]` scaled to length 1; rows of zeros stay."""
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


def mapped(
    left: Tensor,
    right: Tensor,
    chosen: Tensor,
    used: Tensor,
    columns: Tensor,
    regularisation: float,
) -> Mapped:
    """The model of the whole catalogue.

    Args:
        left: L of the chosen items, `float64 [m, width]`.
        right: R of the chosen items, likewise.
        chosen: these items, `int64 [m]`.
        used: which of them users have used, `bool [m]`; the others have no factors of their own.
        columns: of all items, `float [items, columns]`.
        regularisation: lambda, > 0.
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
    return Mapped(inputs, outputs, weights)


def similarities(columns: np.ndarray, power: float) -> np.ndarray:
    """The power of the cosines between items with columns `float32 [items, columns]`, at least 0,
    `float32 [items, items]`."""
    rows = unit(torch.from_numpy(columns).double()).float()
    return (rows @ rows.T).clamp_(min=0).pow_(power).numpy()
