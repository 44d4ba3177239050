# SPDX-License-Identifier: Apache-2.0
"""Encoders without parameters: directions of the item embeddings themselves.

A session is the mean of its items' unit embeddings, scaled to length 1, so that its inner product
with an item's unit embedding is a cosine. The learned cosines are those that an item-kNN ranks by.
A recurrent network and a network for items (PrivRec's f_Sigma and f_Psi) can instead learn in their
own parameters what is common to items, so that the cosines of the embeddings are uninformative.
"""

from torch import Tensor
from torch.nn import functional as F


def unit_rows(embeddings: Tensor) -> Tensor:
    """Embeddings `[..., d]` scaled to length 1; zeros stay zeros."""
    return F.normalize(embeddings, dim=-1)


def mean_directions(embeddings: Tensor, present: Tensor) -> Tensor:
    """The direction of the mean of sessions' unit embeddings.

    Args:
        embeddings: `[..., T, d]`, sessions of at most T items.
        present: `bool [..., T]`; absent items are ignored.

    Returns:
        `[..., d]`, of length 1; zeros for a session without items.
    """
    own = unit_rows(embeddings) * present.unsqueeze(-1)
    return unit_rows(own.sum(-2))
