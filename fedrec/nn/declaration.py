# SPDX-License-Identifier: Apache-2.0
"""Declaration of a model for training in native code: a multilayer perceptron on embeddings, or a
factorization.

The prediction for item i of a user is

    y = b_i + sum of offsets + MLP([r_1, ..., m_1, ..., m_U, q_i, n_1, ..., n_F]) + h . (p * s_i)

where the r are rows of the user's own, m_u is the mean of the rows of a table that the user's u-th
feature names, q_i the item's row in the item table, n_f the mean of the rows of a table that the
item's f-th feature names, and b_i the item's bias. The last layer of the MLP has one output. With
one layer, no features and the user's factors as its weight, y is a matrix factorization. The last
term (NeuMF) is the product of another row of the user's own and another row of the item.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

Activation = Literal["identity", "relu", "sigmoid", "tanh"]
Loss = Literal["logistic", "squared"]


@dataclass(frozen=True)
class Layer:
    """An affine layer.

    Attributes:
        weight: name of the parameter `[in, out]`, or `[in]` for one output.
        bias: name of the parameter `[out]`; None without one.
    """

    weight: str
    bias: str | None = None


@dataclass(frozen=True, eq=False)
class ItemFeature:
    """A public feature of the items that enters by an embedding.

    Attributes:
        table: name of the parameter `[categories, d]`.
        codes: `int64 [items, width]`, the categories of each item, -1 for none.
    """

    table: str
    codes: np.ndarray

    @cached_property
    def categories(self) -> int:
        """The smallest number of categories for all codes; computed once, because it needs a pass
        over all items."""
        return int(self.codes.max(initial=-1)) + 1


@dataclass(frozen=True)
class Product:
    """The elementwise product of a user's row and an item's, an additional input of the last layer.

    Attributes:
        user: name of the parameter `[k]`.
        item_table: name of the parameter `[items, k]`. The first k rows of the last layer's weight
            `[k + in, 1]` meet the product.
    """

    user: str
    item_table: str


@dataclass(frozen=True, eq=False)
class KernelModel:
    """A model in the form that native code trains. All names are of parameters.

    Attributes:
        layers: the affine layers of the MLP, in order; the last has one output.
        activation: between layers, not after the last.
        loss: `logistic` (cross-entropy of the logit y) or `squared` (of the rating y), averaged
            over a batch.
        user_tables: one table `[categories, d]` per feature of the users, in the order of the
            features; empty: they are not used.
        item_table: the item table `[items, d]`; None: items are represented by their features only.
        item_features: features of the items.
        item_bias: the table `[items, 1]` of biases; None without one.
        offsets: parameters of one number that are added to every prediction.
        user_rows: parameters `[d]`, each a row of the user's own.
        product: a product of two more rows; None without one.
    """

    layers: tuple[Layer, ...]
    activation: Activation
    loss: Loss
    user_tables: tuple[str, ...] = ()
    item_table: str | None = None
    item_features: tuple[ItemFeature, ...] = ()
    item_bias: str | None = None
    offsets: tuple[str, ...] = ()
    user_rows: tuple[str, ...] = ()
    product: Product | None = None

    @property
    def product_table(self) -> str | None:
        """Name of the item table of the product; None without one."""
        return self.product.item_table if self.product is not None else None

    @property
    def item_tables(self) -> tuple[str, ...]:
        """Names of the parameters with one row per item."""
        tables = (self.item_table, self.item_bias, self.product_table)
        return tuple(name for name in tables if name is not None)

    @property
    def dense(self) -> tuple[str, ...]:
        """Names of all other parameters, in the order of their memory layout."""
        layers = [
            name for layer in self.layers for name in (layer.weight, layer.bias) if name is not None
        ]
        return (
            *((self.product.user,) if self.product is not None else ()),
            *self.user_rows,
            *self.user_tables,
            *(feature.table for feature in self.item_features),
            *layers,
            *self.offsets,
        )

    @cached_property
    def item_codes(self) -> tuple[np.ndarray, np.ndarray]:
        """Concatenated codes of all features, padding last within each feature, and one over the
        number of codes.

        Returns:
            `int64 [items, width]`, -1 for none, and `float32 [items, F]`.
        """
        codes = [-np.sort(-feature.codes, axis=1) for feature in self.item_features]
        if not codes:
            return np.zeros((0, 0), dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
        counts = np.stack([(own >= 0).sum(1) for own in codes], axis=1)
        return np.ascontiguousarray(np.concatenate(codes, axis=1)), (
            1 / np.maximum(counts, 1)
        ).astype(np.float32)
