# SPDX-License-Identifier: Apache-2.0
"""A gated recurrent unit over the last items of a user (Hidasi et al., Session-based
Recommendations with Recurrent Neural Networks, ICLR 2016).

    r, z = s(x W + b + h U + c),  n = tanh(x W' + b' + r * (h U' + c')),  h <- (1 - z) n + z h

Where this differs from the paper: a sequence is all of a user's items, without sessions, from h =
0. Input and output share their embeddings, without item biases (`constrained_embedding` of the
authors' code), so hidden states are as wide as embeddings. Losses are those of all models of
sequences here, instead of TOP1 and BPR among the items of a batch: clients have no batch in common.
Dropout is on embeddings and on the last layer's states.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedrec.models.base import Parameters
from fedrec.models.sequential.base import SequenceConfig, SequenceModel
from fedrec.nn.layers import affine
from fedrec.nn.recurrence import recurrent_states
from fedrec.protocol.orders import COMPILED_RECURRENCE


class Gru4RecConfig(SequenceConfig):
    """Settings of GRU4Rec."""

    layers: int = Field(default=1, ge=1)
    """Number of recurrent layers."""


class Gru4Rec(SequenceModel):
    """Item embeddings and recurrent layers."""

    name = "gru4rec"
    Config = Gru4RecConfig
    paper = "GRU4Rec (Hidasi et al. 2016)"
    config: Gru4RecConfig

    @property
    def dropped(self) -> int:
        """On the embeddings and on the states."""
        return 2

    @property
    def compiled(self) -> str | None:
        """That of the recurrence."""
        return COMPILED_RECURRENCE

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings; weights `[in, out]` uniform within 1 / sqrt(d), as in PyTorch, and
        zero biases."""
        width = self.config.width
        drawn = self.initial_items(generator)
        for layer in range(self.config.layers):
            for name in (f"layer{layer}.input", f"layer{layer}.state"):
                uniform = torch.rand(width, 3 * width, generator=generator)
                drawn[f"{name}.weight"] = (2 * uniform - 1) / width**0.5
                drawn[f"{name}.bias"] = torch.zeros(3 * width)
        return drawn

    def encode(
        self, parameters: Parameters, inputs: Tensor, counts: Tensor, kept: Tensor | None
    ) -> Tensor:
        """Hidden states, `[C, B, W, d]`, see `SequenceModel.encode`."""
        values = inputs if kept is None else inputs * kept[0]
        for layer in range(self.config.layers):
            name = f"layer{layer}"
            given = affine(parameters, f"{name}.input", values).transpose(1, 2)
            weight = parameters[f"{name}.state.weight"]
            bias = parameters[f"{name}.state.bias"]
            values = recurrent_states(given, weight, bias).transpose(1, 2)
        return values if kept is None else values * kept[1]
