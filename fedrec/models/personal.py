# SPDX-License-Identifier: Apache-2.0
"""Models with personal parts: GPFedRec, FedGNN, PFedRec and FedRAP, and Meta-MF, whose server
generates each user's own recommender."""

import itertools
import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.errors import ExperimentError
from fedrec.graphs import attended
from fedrec.models.base import INIT_STD, Model, Parameters, Users
from fedrec.nn.layers import KernelModel, Layer, gather_rows, glorot, perceptron, single_output
from fedrec.protocol.updates import ItemRequests

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


class ItemEmbeddingConfig(Config):
    """Settings of the model."""

    embedding: Width = 32
    """Width of the item embeddings (code of both papers: 32)."""


class _PersonalScore(Model):
    """Item embeddings and a personal linear score function."""

    Config = ItemEmbeddingConfig
    tasks = ("ranking",)
    item_tables = ("item.id",)
    config: ItemEmbeddingConfig

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
        if "item.personal" in parameters:
            embedded = embedded + gather_rows(parameters["item.personal"], items)
        return single_output(embedded, parameters["score.weight"]) + parameters["score.bias"]


class Pfedrec(_PersonalScore):
    """PFedRec: item embeddings and a personal linear score function."""

    name = "pfedrec"
    paper = "PFedRec (Zhang et al. 2023)"

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


class Fedrap(_PersonalScore):
    """FedRAP: sums of shared and personal item embeddings under a linear score function."""

    name = "fedrap"
    paper = "FedRAP (Li et al. 2024), section 3"

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise a normal shared part, a zero personal part, a uniform score function."""
        drawn = super().initial(generator)
        return {**drawn, "item.personal": torch.zeros_like(drawn["item.id"])}


# Meta matrix factorization (Lin et al., SIGIR 2020): a server that generates each user's own
# recommender.
#
#     c_u   = M^T u                             collaborative vector: user embedding, shared memory
#     h     = relu(W c_u + b)                   one hidden layer for each of the parts below
#     E_u   = U_u V_u                           item embeddings `[items, d]` of rank k
#     r_ui  = w2^T relu(W1^T e_ui + b1) + b2    the rating network of the user
#
# U_u, V_u, W1, b1, w2 and b2 are affine functions of the hidden layers. The server keeps the user
# embeddings, the memory and these functions; a client gets U_u (the rows that it needs), V_u and
# the rating network, and nothing else.
#
# Where this differs from the paper and its published code:
#
# - That code trains centrally on batches of ratings, and for each rating multiplies a one-hot
#   vector with the user's whole item table. Here `generate` makes the rows that a client names, and
#   training is federated (`strategies/per_client.py`).
# - The first layer of the rating network is linear in the embedding, so V_u W1 `[k, h]` is
#   multiplied out first; E_u itself, d numbers per item, is never made.
# - User embeddings start small (`user-std`) and not with standard deviation 1 as there. Users then
#   start alike and diverge by their ratings; with a large standard deviation the generator
#   memorises ratings (RMSE of 0.99 against 0.94).
# - Ranking: the same network, its output a logit.

_HEADS = ("layer0", "layer1", "item")


class MetaMfConfig(Config):
    """Settings of meta matrix factorization."""

    user: Width = 32
    """Width of the user embedding u (published code: 32)."""
    memory: Width = 128
    """Width of the collaborative vector c_u (published code: 128)."""
    generator: Width = 128
    """Width of the hidden layers of the generator (published code: 512)."""
    embedding: Width = 32
    """Width d of the item embeddings (published code: 32)."""
    rank: Width = 8
    """Rank k of a user's item table (published code: 8)."""
    hidden: Width = 8
    """Width of the hidden layer of the rating network (published code: 8)."""
    user_std: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial user embeddings."""
    center: float = 0.0
    """Constant of the initial predictions, such as the middle of the rating scale."""


class MetaMf(Model):
    """Meta matrix factorization: generator (`initial`, `generate`) and recommender (`predict`).

    Raises:
        ExperimentError: a generated parameter is missing, as when the server's parameters are
            passed instead.
    """

    name = "metamf"
    Config = MetaMfConfig
    paper = "MetaMF (Lin et al. 2020)"
    item_tables = ("item.low",)
    config: MetaMfConfig

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise the server's parameters: normal user embeddings and memory (Glorot), uniform
        layers as in PyTorch."""
        config = self.config
        schema = self.schema
        users = torch.randn(schema.num_users, config.user, generator=generator) * config.user_std
        memory = torch.randn(config.user, config.memory, generator=generator)
        parameters = {
            "user.id": users,
            "memory": memory * math.sqrt(2 / (config.user + config.memory)),
        }
        for head in _HEADS:
            parameters[f"{head}.hidden.weight"] = _uniform(
                generator, config.memory, config.memory, config.generator
            )
            parameters[f"{head}.hidden.bias"] = _uniform(generator, config.memory, config.generator)
        width = config.generator
        for name, size in self._generated().items():
            parameters[f"{name}.matrix"] = _uniform(generator, width, width, size)
            parameters[f"{name}.offset"] = _uniform(generator, width, size)
        parameters["layer1.bias.offset"] += config.center
        parameters["item.low.matrix"] = _uniform(
            generator, width, schema.num_items, config.rank, width
        )
        parameters["item.low.offset"] = _uniform(generator, width, schema.num_items, config.rank)
        return parameters

    def predict(
        self, parameters: Parameters, users: Users, items: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Predictions before the output activation, `[C, B]`. The parameters are generated ones;
        users' features are not used."""
        if "item.low" not in parameters:
            raise ExperimentError(
                "metamf can only predict with the parameters that the server generates for each"
                " client",
                fix="set strategy.name and step.name = 'metamf', and a split that tests training"
                " users, such as split.name = 'ratio'",
            )
        low = gather_rows(parameters["item.low"], items if rows is None else rows)
        first = torch.bmm(parameters["item.rise"], parameters["layer0.weight"])
        hidden = torch.relu(torch.baddbmm(parameters["layer0.bias"].unsqueeze(1), low, first))
        return single_output(hidden, parameters["layer1.weight"]) + parameters["layer1.bias"]

    def _generated(self) -> dict[str, int]:
        """Name and size of each generated parameter except the item table."""
        config = self.config
        return {
            "layer0.weight": config.embedding * config.hidden,
            "layer0.bias": config.hidden,
            "layer1.weight": config.hidden,
            "layer1.bias": 1,
            "item.rise": config.rank * config.embedding,
        }


def generate(
    parameters: Parameters, clients: Tensor, requests: ItemRequests | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Generate the parameters of some clients; differentiable with respect to `parameters`.

    Args:
        parameters: the server's, without cohort dimension.
        clients: `int64 [C]`, user ids.
        requests: the rows of the item table that each client needs; None: all.

    Returns:
        Parameters of `MetaMf.predict`, `[C, ...]` each, but for the item table; and of that,
        `item.low`, the requested rows `[P, k]`, or all `[C, items, k]`.

    Raises:
        ExperimentError: these are not the parameters of `MetaMf`.
    """
    if "item.low.matrix" not in parameters:
        raise ExperimentError(
            f"the model cannot generate parameters: it has only {', '.join(parameters)}",
            fix="set model.name = 'metamf', or choose another strategy",
        )
    vectors = parameters["user.id"][clients] @ parameters["memory"]
    hidden = {
        head: torch.relu(
            torch.addmm(
                parameters[f"{head}.hidden.bias"], vectors, parameters[f"{head}.hidden.weight"]
            )
        )
        for head in _HEADS
    }
    flat = {
        name: torch.addmm(
            parameters[f"{name}.offset"],
            hidden[name.partition(".")[0]],
            parameters[f"{name}.matrix"],
        )
        for name in ("layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias", "item.rise")
    }
    rank = parameters["item.low.matrix"].shape[1]
    width = flat["layer0.bias"].shape[1]
    shapes = {"layer0.weight": (-1, width), "layer1.weight": (-1, 1), "item.rise": (rank, -1)}
    values = {
        name: value.view(len(clients), *shapes.get(name, (-1,))) for name, value in flat.items()
    }
    table = parameters["item.low.matrix"]
    offset = parameters["item.low.offset"]
    if requests is None:
        low = F.linear(hidden["item"], table.flatten(0, 1)).view(len(clients), -1, rank)
        return values, low + offset
    items = torch.from_numpy(requests.items).to(table.device)
    rows = F.embedding(items, table.flatten(1)).view(-1, *table.shape[1:])
    # client by client, as the rows of one client fit the processor's caches
    parts = zip(rows.split(np.diff(requests.offsets).tolist()), hidden["item"], strict=True)
    low = torch.cat([rows.new_zeros(0, rank), *(part @ client for part, client in parts)])
    return values, low + offset[items]


def _uniform(generator: torch.Generator, fan_in: int, *shape: int) -> Tensor:
    return (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(fan_in)
