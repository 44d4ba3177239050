# SPDX-License-Identifier: Apache-2.0
"""Public dense vectors of items, such as embeddings of texts or images, in a model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrec.data.features import Vectors


class ItemVectors:
    """A linear projection of the items' vectors to the width of embeddings.

    Args:
        vectors: the vectors; they are standardised.

    Attributes:
        name: of the projection's matrix `[width, d]` among the parameters.
        width: of the vectors.
    """

    def __init__(self, vectors: Vectors) -> None:
        self.name = f"item.{vectors.name}"
        self.width = vectors.values.shape[1]
        self._values = torch.from_numpy(vectors.standardised())

    def rows(self, parameters: Mapping[str, Tensor], items: Tensor) -> Tensor:
        """Projections of items `int64 [C, N]` by each slice's matrix, `[C, N, d]`."""
        if self._values.device != items.device:
            self._values = self._values.to(items.device)
        return self._values[items] @ parameters[self.name]
