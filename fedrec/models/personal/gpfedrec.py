# SPDX-License-Identifier: Apache-2.0
"""GPFedRec's model (Zhang et al., KDD 2024): a user's embedding and network, and item embeddings
that are shared and changed.

    logit(u, i) = network_u([p_u ; e_i + o_ui])

with ReLU between the layers. E (`item.id`) is the server's. p_u (`user.id`), the network and O_u
(`item.own`) are one user's and never leave the device: O_u is the change of the embeddings in the
user's last training, so that E + O_u is the user's final table. A round begins with E only (step
`gpfedrec`).

Where this differs from the paper's public code: a device keeps the change and not the whole table
of its last round, so that later updates of other users take effect.
"""

import itertools

import torch
from torch import Tensor

from fedrec.components.contract_check import covers_overrides
from fedrec.config import Config, Width
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.declaration import KernelModel, Layer
from fedrec.nn.layers import gather_rows, perceptron


class GpfedrecConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of user's and items' embeddings (paper's code: 32)."""
    hidden: tuple[Width, ...] = (32, 16, 8)
    """Widths of the hidden layers (paper's code: 32, 16, 8)."""


class Gpfedrec(Model):
    """A perceptron on a private user embedding and an item's embedding."""

    name = "gpfedrec"
    Config = GpfedrecConfig
    paper = "GPFedRec (Zhang et al. 2024), section 4"
    item_tables = ("item.id",)
    capturable = True
    config: GpfedrecConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Normal embeddings, nothing changed yet, Glorot-uniform layers `[in, out]`, zero
        biases."""
        config = self.config
        items = self.schema.num_items
        found = {
            "item.id": INIT_STD * torch.randn(items, config.embedding, generator=generator),
            "item.own": torch.zeros(items, config.embedding),
            "user.id": INIT_STD * torch.randn(config.embedding, generator=generator),
        }
        widths = (2 * config.embedding, *config.hidden, 1)
        for layer, (before, after) in enumerate(itertools.pairwise(widths)):
            bound = (6 / (before + after)) ** 0.5
            drawn = torch.rand(before, after, generator=generator)
            found[f"layer{layer}.weight"] = (2 * drawn - 1) * bound
            found[f"layer{layer}.bias"] = torch.zeros(after)
        return found

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used; without
        `item.own` the embeddings are the shared ones."""
        embedded = gather_rows(parameters["item.id"], items if rows is None else rows)
        if "item.own" in parameters:
            embedded = embedded + gather_rows(parameters["item.own"], items)
        layers = range(len(self.config.hidden) + 1)
        weights = [parameters[f"layer{layer}.weight"] for layer in layers]
        biases = [parameters[f"layer{layer}.bias"] for layer in layers]
        user = parameters["user.id"].unsqueeze(1)
        return perceptron([[user], [embedded]], weights, biases, "relu").view(items.shape)

    def network(self) -> KernelModel | None:
        """The declaration of predictions without `item.own`, from a user's own rows of the items,
        for native code; None if a subclass predicts or measures losses otherwise."""
        if not covers_overrides(type(self), "network", ("predict", "loss")):
            return None
        layers = range(len(self.config.hidden) + 1)
        return KernelModel(
            layers=tuple(Layer(f"layer{layer}.weight", f"layer{layer}.bias") for layer in layers),
            activation="relu",
            loss="logistic" if self.schema.task == "ranking" else "squared",
            item_table="item.id",
            user_rows=("user.id",),
        )
