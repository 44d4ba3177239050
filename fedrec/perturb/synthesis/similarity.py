# SPDX-License-Identifier: Apache-2.0
"""Similarity of two items by their embeddings (UPC-SDG, equation 2), in three definitions.

    paper      (q_i.q_v - min_j q_i.q_j) / (q_i.q_i - min_j q_i.q_j)
    released   (q_v.q_i - min_j q_v.q_j) / (max_j q_v.q_j - min_j q_v.q_j)
    cosine     q_i.q_v / (|q_i| |q_v|)

`paper` is 1 for the item itself and 0 for the least similar one, and exceeds 1 for longer vectors
in the same direction, so its range does not end at 1. `released` is computed by the authors' public
code: normalised by the substitute's row instead of the original's, always in [0, 1]. The text calls
the quantity a cosine, but its formula is not one; `cosine` is.

The least and largest product of an item are among its products with all items.
"""

import copy
from typing import Literal, Self

import torch
from torch import Tensor

Definition = Literal["paper", "released", "cosine"]
_ITEMS_AT_ONCE = 512  # items per block of products in memory
_SMALL = 1e-12


class Similarity:
    """Similarity of items to items, or to mixtures of items.

    Args:
        items: `float32 [items, d]`, the items' embeddings.
        definition: which of the three.
    """

    def __init__(self, items: Tensor, definition: Definition) -> None:
        self.items = items
        self.definition = definition
        self.least, self.most = _extremes(items)
        self.own = items.square().sum(1)

    def defined(self, definition: Definition) -> Self:
        """The similarity of the same items by another definition."""
        other = copy.copy(self)
        other.definition = definition
        return other

    def of(
        self, originals: Tensor, others: Tensor, extremes: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Similarity of each original to the vector with the same index.

        Args:
            originals: `int64 [n]`, items.
            others: `float32 [n, d]`, vectors of items, or mixtures of them.
            extremes: least and largest product of each vector with any item, `[n]` each; needed for
                `released` only.

        Returns:
            `float32 [n]`.
        """
        product = (self.items[originals] * others).sum(1)
        if self.definition == "cosine":
            return product / (self.own[originals].sqrt() * others.norm(dim=1)).clamp(min=_SMALL)
        if self.definition == "paper":
            least = self.least[originals]
            return (product - least) / (self.own[originals] - least).clamp(min=_SMALL)
        if extremes is None:
            raise ValueError(
                "Expected the extremes of the other vectors' rows for the definition 'released'."
            )
        least, most = extremes
        return (product - least) / (most - least).clamp(min=_SMALL)

    def between(self, originals: Tensor, others: Tensor) -> Tensor:
        """Similarity of items to items, `int64 [n]` each; `float32 [n]`."""
        return self.of(originals, self.items[others], (self.least[others], self.most[others]))

    def rows(self, originals: Tensor) -> Tensor:
        """Similarity of some originals to every item, `float32 [n, items]`."""
        product = self.items[originals] @ self.items.T
        if self.definition == "cosine":
            lengths = self.own.sqrt()
            return product / (lengths[originals, None] * lengths).clamp(min=_SMALL)
        if self.definition == "paper":
            least = self.least[originals, None]
            return (product - least) / (self.own[originals, None] - least).clamp(min=_SMALL)
        return (product - self.least) / (self.most - self.least).clamp(min=_SMALL)


def _extremes(items: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest product of each item with any, itself included, `[items]` each; in blocks
    of items."""
    products = [(part @ items.T).aminmax(dim=1) for part in items.split(_ITEMS_AT_ONCE)]
    least, most = (torch.cat(parts) for parts in zip(*products, strict=True))
    return least, most
