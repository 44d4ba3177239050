# SPDX-License-Identifier: Apache-2.0
"""Functions with custom gradients: states of gated recurrent units and softmax cross-entropy."""

from typing import Any

import torch
from torch import Tensor

from fedrec.device import takes_compiled

# The states of gated recurrent units (Cho et al. 2014, in the form of `torch.nn.GRU`), with a
# leading cohort dimension.
#
#     r, z = s(g + h U + c),  n = tanh(g' + r * (h U' + c')),  h <- (1 - z) n + z h
#
# PyTorch's operations pass over the numbers of all clients at every position, and add up a gradient
# of every client's weight there. If several clients are trained on a processor, compiled code
# processes them sequentially.


def recurrent_states(
    given: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None = None
) -> Tensor:
    """Recurrent states after each position, from an initial state of zeros.

    Args:
        given: `[C, W, B, 3 d]`, contributions of the inputs of W positions of B sequences to reset
            gate, update gate and new state.
        weight: `[C, d, 3 d]`, of the state.
        bias: `[C, 3 d]`, likewise.
        present: `bool [C, W, B]`, false where a sequence has no item, which does not change its
            state; None: all have one.

    Returns:
        `[C, W, B, d]`.
    """
    if takes_compiled(given) and weight.dtype == given.dtype:
        return _States.apply(given, weight, bias, present)
    width = weight.shape[1]
    state = given.new_zeros(len(given), given.shape[2], width)
    states = []
    for step, inputs in enumerate(given.unbind(1)):
        added = torch.baddbmm(bias.unsqueeze(1), state, weight)
        gates = torch.sigmoid(inputs[..., : 2 * width] + added[..., : 2 * width])
        reset, update = gates.chunk(2, -1)
        new = torch.tanh(torch.addcmul(inputs[..., 2 * width :], reset, added[..., 2 * width :]))
        after = torch.lerp(new, state, update)
        state = after if present is None else after.where(present[:, step, :, None], state)
        states.append(state)
    return torch.stack(states, 1)


class _States(torch.autograd.Function):
    """Autograd function of `recurrent_states` in compiled code, see `fedrec.kernel.recurrence`."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None
    ) -> Tensor:
        from fedrec.kernel.recurrence import (
            recurrent_forward,  # imports Numba, which is slow and not always needed
        )

        width = weight.shape[1]
        if weight.stride(0) == bias.stride(0) == 0:  # one for all clients stays in the caches
            weight, bias = (tensor[:1] for tensor in (weight, bias))
        real = given.new_empty(len(given), 0, 0, dtype=torch.bool) if present is None else present
        given, real, weight, bias = (tensor.contiguous() for tensor in (given, real, weight, bias))
        states = given.new_empty(*given.shape[:3], width)
        gates = torch.empty_like(given)
        recalled = torch.empty_like(states)
        passed = states, gates, recalled
        recurrent_forward(*(tensor.numpy() for tensor in (given, real, weight, bias, *passed)))
        ctx.save_for_backward(real, weight, *passed)
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from fedrec.kernel.recurrence import recurrent_backward

        real, weight, states, gates, recalled = ctx.saved_tensors
        to_given = torch.empty_like(gates)
        to_weight = weight.new_empty(len(states), *weight.shape[1:])
        to_bias = weight.new_empty(len(states), weight.shape[2])
        used = gradients[0].contiguous(), real, weight, states, gates, recalled
        to = to_given.numpy(), to_weight.numpy(), to_bias.numpy()
        recurrent_backward(*(tensor.numpy() for tensor in used), to)
        return to_given, to_weight, to_bias, None


# The cross-entropy of a softmax over a catalogue without the logits of all examples in memory.
#
#     loss = sum over examples n of w_n (log(sum over items j of exp(h_n . e_j)) - h_n . e_t(n))
#
# The gradient is computed right with the logits, of a catalogue for a few examples at a time: the
# logits of 10,000 examples and items take 400 MB, hidden states and embeddings a hundredth.

_LOGITS_AT_ONCE = 1 << 18  # 1 MB; products of larger parts are slower, as logits leave the cache


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
    """Autograd function of `catalogue_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        total = hidden.new_zeros(len(hidden))
        of_hidden = torch.empty_like(hidden)
        of_table = torch.zeros_like(table)
        size = max(1, _LOGITS_AT_ONCE // (table.shape[0] * table.shape[1]))
        for start in range(0, hidden.shape[1], size):
            part = slice(start, start + size)
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
