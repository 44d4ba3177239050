# SPDX-License-Identifier: Apache-2.0
"""Cross-entropies of softmaxes, over a catalogue without the logits of all examples in memory, and
over drawn items.

    loss = sum over examples n of w_n (log(sum over items j of exp(h_n . e_j)) - h_n . e_t(n))

The gradient is computed right with the logits, of a catalogue for a few examples at a time: the
logits of 10,000 examples and items take 400 MB, hidden states and embeddings a hundredth. Of drawn
items, exponentials are taken once instead of twice.
"""

from typing import Any

import torch
from torch import Tensor

_LOGITS_AT_ONCE = 1 << 18  # 1 MB; products of larger parts are slower, whose logits leave the cache


def catalogue_cross_entropy(
    hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Weighted cross-entropy of the targets among all items.

    Args:
        hidden: `[C, N, d]`, the hidden states of N examples of each client.
        table: `[C, items, d]`, the embeddings of the items.
        targets: `int64 [C, N]`.
        weights: `[C, N]`, without gradient.

    Returns:
        `[C]`, in nats.
    """
    return _CatalogueCrossEntropy.apply(hidden, table, targets, weights)


class _CatalogueCrossEntropy(torch.autograd.Function):
    """See `catalogue_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        total = hidden.new_zeros(len(hidden))
        of_hidden = torch.empty_like(hidden)
        of_table = torch.zeros_like(table)
        for part in _parts(hidden, table):
            wanted = targets[:, part, None]
            scale = weights[:, part, None]
            logits = torch.bmm(hidden[:, part], table.mT)
            chosen = logits.gather(2, wanted)
            most = logits.amax(2, keepdim=True)
            logits.sub_(most).exp_()
            sums = logits.sum(2, keepdim=True)
            total += (scale * (sums.log() + most - chosen)).sum((1, 2))
            logits.mul_(scale / sums)
            logits.scatter_add_(2, wanted, -scale)
            of_hidden[:, part] = torch.bmm(logits, table)
            of_table.baddbmm_(logits.mT, hidden[:, part])
        ctx.save_for_backward(of_hidden, of_table)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        scale = gradients[0][:, None, None]
        of_hidden, of_table = ctx.saved_tensors
        return of_hidden * scale, of_table * scale, None, None


def sampled_cross_entropy(
    hidden: Tensor, wanted: Tensor, drawn: Tensor, scale: float, weights: Tensor
) -> Tensor:
    """Weighted cross-entropy of wanted items among themselves and drawn ones.

    Args:
        hidden: `[C, N, d]`, the hidden states of N examples of each client.
        wanted: `[C, N, d]`, the embeddings of their targets.
        drawn: `[C, D, d]`, those of drawn items, the same for all examples of a client.
        scale: logarithm of what the sum of the drawn items' exponentials is multiplied by.
        weights: `[C, N]`, without gradient.

    Returns:
        `[C]`, in nats.
    """
    return _SampledCrossEntropy.apply(hidden, wanted, drawn, scale, weights)


class _SampledCrossEntropy(torch.autograd.Function):
    """See `sampled_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, wanted: Tensor, drawn: Tensor, scale: float, weights: Tensor
    ) -> Tensor:
        counted = weights[..., None]
        chosen = (hidden * wanted).sum(2, keepdim=True)
        logits = torch.bmm(hidden, drawn.mT)
        most = torch.maximum(logits.amax(2, keepdim=True) + scale, chosen)
        logits.sub_(most - scale).exp_()
        own = (chosen - most).exp_()
        sums = logits.sum(2, keepdim=True) + own
        total = (counted * (sums.log() + most - chosen)).sum((1, 2))
        logits.mul_(counted / sums)
        of_chosen = counted * (own / sums - 1)
        of_hidden = torch.bmm(logits, drawn).addcmul_(of_chosen, wanted)
        ctx.save_for_backward(of_hidden, of_chosen * hidden, torch.bmm(logits.mT, hidden))
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradients[0][:, None, None]
        of_hidden, of_wanted, of_drawn = (found * factor for found in ctx.saved_tensors)
        return of_hidden, of_wanted, of_drawn, None, None


def _parts(hidden: Tensor, table: Tensor) -> list[slice]:
    """The examples, a few at a time."""
    size = max(1, _LOGITS_AT_ONCE // (table.shape[0] * table.shape[1]))
    return [slice(start, start + size) for start in range(0, hidden.shape[1], size)]
