# SPDX-License-Identifier: Apache-2.0
"""The states of gated recurrent units (Cho et al. 2014, in the form of `torch.nn.GRU`), with a
leading cohort dimension.

    r, z = s(g + h U + c),  n = tanh(g' + r * (h U' + c')),  h <- (1 - z) n + z h

PyTorch's operations pass over the numbers of all clients at every place, and add up a gradient of
every client's weight there. Where several are trained on a processor, compiled code takes one after
the other.
"""

from typing import Any

import torch
from torch import Tensor

from fedrec.device import takes_compiled


def recurrent_states(
    given: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None = None
) -> Tensor:
    """States after each place, from a first state of zeros.

    Args:
        given: `[C, W, B, 3 d]`, what the inputs of W places of B sequences add to reset gate,
            update gate and new state.
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
    for place, own in enumerate(given.unbind(1)):
        added = torch.baddbmm(bias.unsqueeze(1), state, weight)
        gates = torch.sigmoid(own[..., : 2 * width] + added[..., : 2 * width])
        reset, update = gates.chunk(2, -1)
        new = torch.tanh(torch.addcmul(own[..., 2 * width :], reset, added[..., 2 * width :]))
        after = torch.lerp(new, state, update)
        state = after if present is None else after.where(present[:, place, :, None], state)
        states.append(state)
    return torch.stack(states, 1)


class _States(torch.autograd.Function):
    """`recurrent_states` in compiled code, see `fedrec.kernel.recurrence`."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None
    ) -> Tensor:
        from fedrec.kernel.recurrence import (
            recurrent_forward,  # imports Numba, which is slow and not always needed
        )

        width = weight.shape[1]
        if weight.stride(0) == bias.stride(0) == 0:  # one for all clients stays in the caches
            weight, bias = (one[:1] for one in (weight, bias))
        real = given.new_empty(len(given), 0, 0, dtype=torch.bool) if present is None else present
        given, real, weight, bias = (one.contiguous() for one in (given, real, weight, bias))
        states = given.new_empty(*given.shape[:3], width)
        gates = torch.empty_like(given)
        recalled = torch.empty_like(states)
        passed = states, gates, recalled
        recurrent_forward(*(one.numpy() for one in (given, real, weight, bias, *passed)))
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
        recurrent_backward(*(one.numpy() for one in used), to)
        return to_given, to_weight, to_bias, None
