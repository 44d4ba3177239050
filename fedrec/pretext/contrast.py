# SPDX-License-Identifier: Apache-2.0
"""The contrastive loss on masked views (PrivRec equations 8 to 10), written once for a leading
cohort dimension.

Where this differs from the paper:

- Equations 8 and 9 are maximised; this is their negative, which is minimised.
- Their normalising sum runs over the negatives alone, which has no bound. Here the true item or
  segment is in it too, as in InfoNCE (van den Oord et al. 2018), which the paper cites; the loss is
  then a cross-entropy and at least 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedrec.pretext.encoder import encode_items, encode_sessions
from fedrec.pretext.views import ViewLayout


def info_nce(query: Tensor, candidates: Tensor) -> Tensor:
    """Minus the log-probability of the first candidate, by inner products with the query.

    Args:
        query: `[..., h]`.
        candidates: `[..., K, h]`, the true one first.

    Returns:
        `[...]`.
    """
    scores = (candidates * query.unsqueeze(-2)).sum(-1)
    return torch.logsumexp(scores, -1) - scores[..., 0]


def item_loss(
    parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor, layout: ViewLayout
) -> Tensor:
    """Equation 8: mean over the views of each client.

    Args:
        parameters: `[C, ...]` each, of the encoders.
        embeddings: `[C, V, layout.width, d]`, of the items of the views; anything in place of
            padding.
        present: `bool [C, V, layout.width]`, false for padding; a view without any item does not
            count.
        layout: how a view lies in a row.

    Returns:
        `[C]`; 0 for a client without views.
    """
    masked, candidates, *_ = embeddings.split(layout.widths, 2)
    real = present.split(layout.widths, 2)[0]
    losses = info_nce(
        encode_sessions(parameters, masked, real), encode_items(parameters, candidates)
    )
    return _mean(losses, real[..., 0])


def segment_loss(
    parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor, layout: ViewLayout
) -> Tensor:
    """Equation 9: mean over the views of each client that have negative segments, `[C]`; see
    `item_loss`."""
    *_, masked, segments = embeddings.split(layout.widths, 2)
    *_, real, in_segments = present.split(layout.widths, 2)
    cohort, views, _, width = masked.shape
    shape = cohort, views * (1 + layout.segment_negatives), layout.segment
    candidates = encode_sessions(
        parameters, segments.reshape(*shape, width), in_segments.reshape(shape)
    )
    queries = encode_sessions(parameters, masked, real)
    return _mean(
        info_nce(queries, candidates.unflatten(1, (views, 1 + layout.segment_negatives))),
        real[..., 0],
    )


def _mean(losses: Tensor, counted: Tensor) -> Tensor:
    """Mean of `[C, V]` over the views that count, `[C]`; 0 where none does."""
    return (losses * counted).sum(-1) / counted.sum(-1).clamp(min=1)
