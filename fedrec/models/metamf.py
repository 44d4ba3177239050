# SPDX-License-Identifier: Apache-2.0
"""Meta matrix factorization (Lin et al., SIGIR 2020): a server that generates each user's own
recommender.

    c_u   = M^T u                             collaborative vector: user embedding, shared memory
    h     = relu(W c_u + b)                   one hidden layer for each of the parts below
    E_u   = U_u V_u                           item embeddings `[items, d]` of rank k
    r_ui  = w2^T relu(W1^T e_ui + b1) + b2    the rating network of the user

U_u, V_u, W1, b1, w2 and b2 are affine functions of the hidden layers. The server keeps the user
embeddings, the memory and these functions; a client gets U_u (the rows that it needs), V_u and the
rating network, and nothing else.

Where this differs from the paper and its published code:

- That code trains centrally on batches of ratings, and for each rating multiplies a one-hot vector
  with the user's whole item table. Here `generate` makes the rows that a client names, and training
  is federated (`strategies/per_client.py`).
- The first layer of the rating network is linear in the embedding, so V_u W1 `[k, h]` is multiplied
  out first; E_u itself, d numbers per item, is never made.
- User embeddings start small (`user-std`) and not with standard deviation 1 as there. Users then
  start alike and diverge by their ratings; with a large standard deviation the generator memorises
  ratings (RMSE of 0.99 against 0.94).
- Ranking: the same network, its output a logit.
"""

import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.config import Config, Width
from fedrec.errors import ExperimentError
from fedrec.models.base import Model, Parameters, Users
from fedrec.nn.layers import gather_rows, single_output
from fedrec.protocol.updates import ItemRequests

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
        _check(parameters)
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


def _check(parameters: Parameters) -> None:
    if "item.low" not in parameters:
        raise ExperimentError(
            "metamf can only predict with the parameters that the server generates for each client",
            fix="set strategy.name and step.name = 'metamf', and a split that tests training users,"
            " such as split.name = 'ratio'",
        )
