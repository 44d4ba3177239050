# SPDX-License-Identifier: Apache-2.0
"""The encoders of sessions and items, as pure functions of parameters with a leading cohort
dimension.

f_Sigma of PrivRec's equations 8 and 9 is a GRU (Cho et al. 2014; sessions: Hidasi et al. 2016)
whose last hidden state stands for the session; f_Psi is a feed-forward network on an item's
embedding.

Where this differs from the paper: it gives no sizes. f_Psi has one hidden layer (ReLU), as wide as
the GRU's state.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedrec.nn.recurrence import recurrent_states

PREFIX = "session."


def recommender_part(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that are not the encoders'."""
    return {name: value for name, value in parameters.items() if not name.startswith(PREFIX)}


def initial_encoder(width: int, hidden: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Fresh parameters, without the cohort dimension: GRU uniform in +-1/sqrt(hidden), He-uniform
    weights of f_Psi.

    Args:
        width: width of the item embedding, d.
        hidden: width of the encodings, h.
        generator: source of randomness.

    Returns:
        `session.gru.input.weight` `[d, 3h]` and `.bias` `[3h]`, `session.gru.state.weight`
        `[h, 3h]` and `.bias`, in the order reset, update, new; `session.item0.weight` `[d, h]` and
        `.bias`, `session.item1.weight` `[h, h]`.
    """

    def uniform(bound: float, *shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) * bound

    gru = 1 / math.sqrt(hidden)
    first = math.sqrt(6 / width)
    second = math.sqrt(6 / (2 * hidden))
    return {
        f"{PREFIX}gru.input.weight": uniform(gru, width, 3 * hidden),
        f"{PREFIX}gru.input.bias": uniform(gru, 3 * hidden),
        f"{PREFIX}gru.state.weight": uniform(gru, hidden, 3 * hidden),
        f"{PREFIX}gru.state.bias": uniform(gru, 3 * hidden),
        f"{PREFIX}item0.weight": uniform(first, width, hidden),
        f"{PREFIX}item0.bias": torch.zeros(hidden),
        f"{PREFIX}item1.weight": uniform(second, hidden, hidden),
    }


def encode_sessions(
    parameters: Mapping[str, Tensor], embeddings: Tensor, present: Tensor
) -> Tensor:
    """Last hidden state of the GRU, which starts from zero.

    Args:
        parameters: `[C, ...]` each, see `initial_encoder`.
        embeddings: `[C, n, T, d]`, n sessions of at most T items.
        present: `bool [C, n, T]`; absent items do not change the state.

    Returns:
        `[C, n, h]`; zeros for a session without items.
    """
    _, sessions, steps, _ = embeddings.shape
    inputs = _linear(parameters, "gru.input", embeddings.transpose(1, 2).flatten(1, 2))
    weight = parameters[f"{PREFIX}gru.state.weight"]
    bias = parameters[f"{PREFIX}gru.state.bias"]
    given = inputs.unflatten(1, (steps, sessions))
    return recurrent_states(given, weight, bias, present.transpose(1, 2))[:, -1]


def encode_items(parameters: Mapping[str, Tensor], embeddings: Tensor) -> Tensor:
    """f_Psi on each item's embedding: `[C, ..., d]` gives `[C, ..., h]`."""
    hidden = torch.relu(_linear(parameters, "item0", embeddings.flatten(1, -2)))
    # A bias here would add the same number to the scores of all candidates, which does not change
    # their softmax.
    return torch.bmm(hidden, parameters[f"{PREFIX}item1.weight"]).unflatten(
        1, embeddings.shape[1:-1]
    )


def _linear(parameters: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    weight = parameters[f"{PREFIX}{name}.weight"]
    bias = parameters[f"{PREFIX}{name}.bias"]
    return torch.baddbmm(bias.unsqueeze(1), inputs, weight)
