# SPDX-License-Identifier: Apache-2.0
"""The contrastive loss on masked views (PrivRec equations 8 to 10), with a leading cohort
dimension, for both kinds of encoders.

Where this differs from the paper:

- Equations 8 and 9 are maximised; this is their negative, which is minimised.
- Their normalising sum is over the negatives only, so the loss is unbounded. Here the true item or
  segment is in it too, as in InfoNCE (van den Oord et al. 2018), which the paper cites; the loss is
  then a cross-entropy and at least 0.
- A temperature divides the inner products, as is usual where they are cosines (Chen et al. 2020,
  SimCLR); 1 is the paper's.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedrec.pretext.encoder import encode_items, encode_sessions
from fedrec.pretext.mean_encoder import mean_directions, unit_rows
from fedrec.pretext.views import ViewLayout

EncoderName = Literal["gru", "mean"]


class Contrast(NamedTuple):
    """Settings for encoding and comparing sessions and items.

    Attributes:
        encoder: `gru` with a feed-forward network for items (paper), or `mean`, directions of the
            embeddings themselves.
        temperature: what inner products are divided by, > 0.
    """

    encoder: EncoderName = "gru"
    temperature: float = 1.0

    def sessions(
        self, parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
    ) -> Tensor:
        """Encoded sessions `[C, n, h]` of embeddings `[C, n, T, d]`, see `encode_sessions`."""
        return _SESSIONS[self.encoder](parameters, embeddings, present)

    def items(self, parameters: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
        """Encoded items `[C, ..., h]` of embeddings `[C, ..., d]`."""
        if self.encoder == "mean":
            return unit_rows(embeddings)
        return encode_items(parameters, embeddings)


_SESSIONS: dict[EncoderName, Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]] = {
    "gru": encode_sessions,
    "mean": lambda _, embeddings, present: mean_directions(embeddings, present),
}


PAPER = Contrast()
"""As in the paper."""


def info_nce(query: Tensor, candidates: Tensor, temperature: float = 1.0) -> Tensor:
    """Minus the log-probability of the first candidate, by inner products with the query.

    Args:
        query: `[..., h]`.
        candidates: `[..., K, h]`, the true one first.
        temperature: what the inner products are divided by.

    Returns:
        `[...]`.
    """
    scores = (candidates @ query.unsqueeze(-1)).squeeze(-1) / temperature
    return torch.logsumexp(scores, -1) - scores[..., 0]


def item_loss(
    parameters: Mapping[str, Tensor],
    embeddings: Tensor,
    present: Tensor,
    layout: ViewLayout,
    contrast: Contrast = PAPER,
) -> Tensor:
    """Equation 8: mean over the views of each client.

    Args:
        parameters: `[C, ...]` each, of the encoders.
        embeddings: `[C, V, layout.width, d]`, of the items of the views; arbitrary values at
            padding.
        present: `bool [C, V, layout.width]`, false for padding; a view without any item does not
            count.
        layout: columns of a view.
        contrast: how sessions and items are encoded and compared.

    Returns:
        `[C]`; 0 for a client without views.
    """
    masked, candidates, *_ = embeddings.split(layout.widths, 2)
    real = present.split(layout.widths, 2)[0]
    losses = info_nce(
        contrast.sessions(parameters, masked, real),
        contrast.items(parameters, candidates),
        contrast.temperature,
    )
    return _mean(losses, real.any(-1))


def segment_loss(
    parameters: Mapping[str, Tensor],
    embeddings: Tensor,
    present: Tensor,
    layout: ViewLayout,
    contrast: Contrast = PAPER,
) -> Tensor:
    """Equation 9: mean over the views of each client that have negative segments, `[C]`; see
    `item_loss`."""
    *_, masked, segments = embeddings.split(layout.widths, 2)
    *_, real, in_segments = present.split(layout.widths, 2)
    cohort, views, _, width = masked.shape
    shape = cohort, views * (1 + layout.segment_negatives), layout.segment
    candidates = contrast.sessions(
        parameters, segments.reshape(*shape, width), in_segments.reshape(shape)
    )
    queries = contrast.sessions(parameters, masked, real)
    candidates = candidates.unflatten(1, (views, 1 + layout.segment_negatives))
    return _mean(info_nce(queries, candidates, contrast.temperature), real[..., 0])


def _mean(losses: Tensor, counted: Tensor) -> Tensor:
    """Mean of `[C, V]` over the views that count, `[C]`; 0 where none does."""
    return (losses * counted).sum(-1) / counted.sum(-1).clamp(min=1)
