# SPDX-License-Identifier: Apache-2.0
"""Models with personal parts: GPFedRec, FedGNN, PFedRec and FedRAP."""

import itertools
import math

import torch
from torch import Tensor

from fedrec.config import Config, Width
from fedrec.graphs import attended
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.layers import KernelModel, Layer, gather_rows, glorot, perceptron, single_output

# GPFedRec's model (Zhang et al., KDD 2024): a user's embedding and network, and item embeddings
# that are shared and changed.
#
#     logit(u, i) = network_u([p_u ; e_i + o_ui])
#
# with ReLU between the layers. E (`item.id`) is the server's. p_u (`user.id`), the network and O_u
# (`item.own`) are one user's and never leave the device: O_u is the change of the embeddings in the
# user's last training, so that E + O_u is the user's final table. A round begins with E only (step
# `gpfedrec`).
# Where this differs from the paper's public code: a device stores the change, not the whole table
# of its last round, so that later updates of other users take effect.


class GpfedrecConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of user's and items' embeddings (paper's code: 32)."""
    hidden: tuple[Width, ...] = (32, 16, 8)
    """Widths of the hidden layers (paper's code: 32, 16, 8)."""


class Gpfedrec(Model):
    """GPFedRec: a perceptron on a private user embedding and an item embedding."""

    name = "gpfedrec"
    Config = GpfedrecConfig
    paper = "GPFedRec (Zhang et al. 2024), section 4"
    tasks = ("ranking",)
    item_tables = ("item.id",)
    config: GpfedrecConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise normal embeddings, zero changes, Glorot-uniform layers `[in, out]`, zero
        biases."""
        config = self.config
        items = self.schema.num_items
        parameters = {
            "item.id": INIT_STD * torch.randn(items, config.embedding, generator=generator),
            "item.own": torch.zeros(items, config.embedding),
            "user.id": INIT_STD * torch.randn(config.embedding, generator=generator),
        }
        widths = (2 * config.embedding, *config.hidden, 1)
        for layer, (before, after) in enumerate(itertools.pairwise(widths)):
            parameters[f"layer{layer}.weight"] = glorot(before, after, generator)
            parameters[f"layer{layer}.bias"] = torch.zeros(after)
        return parameters

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

    def network(self) -> KernelModel:
        """Declaration for native code of predictions without `item.own`, from the user's item
        rows."""
        layers = range(len(self.config.hidden) + 1)
        return KernelModel(
            layers=tuple(Layer(f"layer{layer}.weight", f"layer{layer}.bias") for layer in layers),
            activation="relu",
            loss="logistic" if self.schema.task == "ranking" else "squared",
            item_table="item.id",
            user_rows=("user.id",),
        )


# FedGNN's model (Wu et al. 2021): graph attention over a user's items and over those who share
# them.
#
#     x_i    = e_i + attention of item i over p_u and its neighbouring users' embeddings
#     h_u    = p_u + attention of p_u over the x_i of the user's items
#     logit(u, j) = h_u . e_j
#
# The graph is local to a device: its items, and for each of them embeddings of other users that a
# third party found. p_u (`user.id`) and h_u (`user.vector`) are never sent to the server; a device
# computes h_u in each of its rounds (step `fedgnn`) and ranks by the last one. A device that has
# never been in a round has no h_u and cannot rank.
#
# Where this differs from the paper, which predicts ratings: a score is the inner product, and an
# item's own embedding is added to the aggregated ones. Its public code weights neighbours by
# attention without a softmax, which is used here.


class FedgnnConfig(Config):
    """Settings of the model."""

    embedding: Width = 16
    """Width of all embeddings (paper: 256)."""


class Fedgnn(Model):
    """FedGNN: item embeddings, and a user vector computed from a local graph."""

    name = "fedgnn"
    Config = FedgnnConfig
    paper = "FedGNN (Wu et al. 2021), section 3.2"
    tasks = ("ranking",)
    item_tables = ("item.id",)
    config: FedgnnConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise normal embeddings, Glorot-uniform layers `[in, out]` and a zero user
        vector."""
        width = self.config.embedding
        parameters = {
            "item.id": INIT_STD * torch.randn(self.schema.num_items, width, generator=generator),
            "user.id": INIT_STD * torch.randn(width, generator=generator),
            "user.vector": torch.zeros(width),
        }
        for layer in ("items", "users"):
            parameters[f"{layer}.weight"] = glorot(width, width, generator)
            for end in ("source", "target"):
                parameters[f"{layer}.{end}"] = glorot(width, 1, generator)[:, 0]
        return parameters

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        embedded = gather_rows(parameters["item.id"], items if rows is None else rows)
        return torch.bmm(embedded, parameters["user.vector"].unsqueeze(-1)).squeeze(-1)

    def vector(
        self, parameters: Parameters, liked: Tensor, real: Tensor, near: Tensor, there: Tensor
    ) -> Tensor:
        """User vectors h_u, `[C, d]`.

        Args:
            parameters: `[C, ...]` each.
            liked: `[C, n, d]`, embeddings of the user's items.
            real: `bool [C, n]`, false for padding.
            near: `[C, n, k, d]`, embeddings of other users with each of these items.
            there: `bool [C, n, k]`, false for padding.
        """
        user = parameters["user.id"].unsqueeze(1)
        users = user.unsqueeze(1).expand(*liked.shape[:2], 1, -1)
        known = torch.cat([real.unsqueeze(-1), there], -1)
        sources = torch.cat([users, near], 2)
        items = liked + attended(liked, sources, known, *_layer(parameters, "items"))
        taken = attended(user, items.unsqueeze(1), real.unsqueeze(1), *_layer(parameters, "users"))
        return (user + taken).squeeze(1)


def _layer(parameters: Parameters, name: str) -> tuple[Tensor, Tensor, Tensor]:
    weight, source, target = (parameters[f"{name}.{p}"] for p in ("weight", "source", "target"))
    return weight, source, target


# PFedRec's model (Zhang et al. 2023): shared item embeddings, and a score function of each user's
# own.
#
#     logit(u, i) = w_u . v_i + b_u
# Users have no embedding: the score function is personal and never leaves the device (step
# `pfedrec`).


class PfedrecConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of the item embeddings (paper's code: 32)."""


class Pfedrec(Model):
    """PFedRec: item embeddings and a personal linear score function."""

    name = "pfedrec"
    Config = PfedrecConfig
    paper = "PFedRec (Zhang et al. 2023)"
    tasks = ("ranking",)
    item_tables = ("item.id",)
    config: PfedrecConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise normal embeddings and a uniform score function without offset."""
        width = self.config.embedding
        items = INIT_STD * torch.randn(self.schema.num_items, width, generator=generator)
        weight = (2 * torch.rand(width, 1, generator=generator) - 1) / math.sqrt(width)
        return {"item.id": items, "score.weight": weight, "score.bias": torch.zeros(1)}

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        embedded = gather_rows(parameters["item.id"], items if rows is None else rows)
        return single_output(embedded, parameters["score.weight"]) + parameters["score.bias"]

    def kernel(self) -> KernelModel:
        """Declaration for native code: one layer on the item's embedding."""
        return KernelModel(
            layers=(Layer("score.weight", "score.bias"),),
            activation="identity",
            loss="logistic" if self.schema.task == "ranking" else "squared",
            item_table="item.id",
        )


# FedRAP's model (Li, Long and Zhou, ICLR 2024): an item's embedding is the sum of a shared and a
# personal part.
#
#     logit(u, i) = w_u . (c_i + d_ui) + b_u
#
# C (`item.id`) is shared. D_u (`item.personal`), w_u and b_u are one user's and never leave the
# device (step `fedrap`). D_u has a row for every item, but is not a compact item table: each device
# holds it whole.
#
# Where this differs from the paper's public code: D starts at zero and not at random, so that a
# user who was never in a round is ranked by the shared part only.


class FedrapConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of both parts of an item's embedding (paper's code: 32)."""


class Fedrap(Model):
    """FedRAP: sums of shared and personal item embeddings under a linear score function."""

    name = "fedrap"
    Config = FedrapConfig
    paper = "FedRAP (Li et al. 2024), section 3"
    tasks = ("ranking",)
    item_tables = ("item.id",)
    config: FedrapConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise a normal shared part, a zero personal part, a uniform score function."""
        items = self.schema.num_items
        width = self.config.embedding
        shared = INIT_STD * torch.randn(items, width, generator=generator)
        weight = (2 * torch.rand(width, 1, generator=generator) - 1) / math.sqrt(width)
        return {
            "item.id": shared,
            "item.personal": torch.zeros(items, width),
            "score.weight": weight,
            "score.bias": torch.zeros(1),
        }

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. Users' features are not used."""
        shared = gather_rows(parameters["item.id"], items if rows is None else rows)
        added = shared + gather_rows(parameters["item.personal"], items)
        return single_output(added, parameters["score.weight"]) + parameters["score.bias"]
