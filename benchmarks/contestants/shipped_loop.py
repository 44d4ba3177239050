# SPDX-License-Identifier: Apache-2.0
"""The same step as most people write it: PyTorch modules with whole tables, `torch.optim.SGD`, one
user at a time.

There is a module for PrivRec's network and one for matrix factorization. Counts and products of
users' items are added to one array by numpy; all other models take fedrec's own `reference` path,
which is such a loop.
Arguments as for `shipped.py`, without the path.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contestants.shipped import Numbers, initial, node_of, orders, trained
from clients.node import Node
from clients.step import private_names
from clients.steps.sgd import Sgd
from clients.steps.statistics import Counts, GramStep
from fedrec.experiment.sections import Section
from fedrec.models.mf import Mf
from fedrec.models.privrec import PrivRec
from fedrec.protocol.orders import TrainOrder
from fedrec.rng import stream
from fedrec.sums.products import BIAS, chosen_items, item_scale

ACTIVATIONS = {
    "identity": nn.Identity(),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class PrivRecNet(nn.Module):
    """PrivRec's network for one user at a time; parameters by fedrec's names, with `_` for the
    dot."""

    def __init__(self, model: PrivRec, start: Numbers) -> None:
        super().__init__()
        self.values = nn.ParameterDict(
            {n.replace(".", "_"): torch.from_numpy(v.copy()) for n, v in start.items()}
        )
        self.users = [
            (index, f"user_{name}")
            for index, (name, _) in enumerate(model.schema.user_features)
            if f"user.{name}" in start
        ]
        self.features = []
        for feature in model.schema.item_features.features:
            if f"item.{feature.name}" not in start:
                continue
            codes = torch.from_numpy(feature.padded())
            self.features.append(
                (f"item_{feature.name}", codes.clamp(min=0), (codes >= 0).float().unsqueeze(-1))
            )
        self.depth = len(model.config.hidden) + 1
        self.activation = ACTIVATIONS[model.config.activation]

    def forward(self, user: list[Tensor], items: Tensor) -> Tensor:
        parts = [
            self.values[name][user[index]].mean(0).expand(len(items), -1)
            for index, name in self.users
        ]
        parts.append(F.embedding(items, self.values["item_id"]))
        for name, codes, present in self.features:
            there = present[items]
            rows = F.embedding(codes[items], self.values[name]) * there
            parts.append(rows.sum(1) / there.sum(1).clamp(min=1))
        hidden = torch.cat(parts, 1)
        for layer in range(self.depth):
            hidden = self.activation(hidden) if layer else hidden
            hidden = torch.addmm(
                self.values[f"layer{layer}_bias"], hidden, self.values[f"layer{layer}_weight"]
            )
        outputs = hidden.squeeze(1)
        return (
            outputs + F.embedding(items, self.values["item_bias"]).squeeze(1)
            if "item_bias" in self.values
            else outputs
        )


class MfNet(nn.Module):
    """Matrix factorization for one user at a time."""

    def __init__(self, model: Mf, start: Numbers) -> None:
        super().__init__()
        self.values = nn.ParameterDict(
            {n.replace(".", "_"): torch.from_numpy(v.copy()) for n, v in start.items()}
        )

    def forward(self, user: list[Tensor], items: Tensor) -> Tensor:
        outputs = F.embedding(items, self.values["item_factors"]) @ self.values["user_factors"]
        if "bias" not in self.values:
            return outputs
        biases = F.embedding(items, self.values["item_bias"]).squeeze(1)
        return outputs + biases + self.values["user_bias"] + self.values["bias"]


class PlainLoop:
    """One user after the other, each from the global parameters.

    Args:
        node: gives users' data, and what the settings mean.
        step: the step.
        start: the global parameters.
    """

    def __init__(self, node: Node, step: Sgd, start: Numbers) -> None:
        self.node = node
        self.step = step
        self.start = start
        model = node.model
        self.net = MfNet(model, start) if isinstance(model, Mf) else PrivRecNet(model, start)
        self.measure = (
            F.mse_loss if model.schema.task == "rating" else F.binary_cross_entropy_with_logits
        )
        sgd = step.settings(list(start))
        by_name = {name: self.net.values[name.replace(".", "_")] for name in start}
        self.late = [by_name[name] for name in sgd.late if sgd.rate(name)]
        self.rates = {value: sgd.rate(name) for name, value in by_name.items() if sgd.rate(name)}
        for value in by_name.values():
            value.requires_grad_(value in self.rates)
        self.private = set(private_names(step, start))
        self.private_values = {}

    def round(self, order: TrainOrder) -> tuple[float, Numbers]:
        """Seconds of a round, and the sums of updates."""
        begun = time.perf_counter()
        start = {name: torch.from_numpy(value) for name, value in self.start.items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in order.clients.tolist():
            self._train(client, order.round, start)
            for name, value in start.items():
                value_after = self.net.values[name.replace(".", "_")].detach()
                if name in self.private:
                    self.private_values[client, name] = value_after.clone()
                else:
                    total[name] += value_after - value
        return time.perf_counter() - begun, {name: value.numpy() for name, value in total.items()}

    def _train(self, client: int, round_: int, start: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in start.items():
                self.net.values[name.replace(".", "_")].copy_(
                    self.private_values.get((client, name), value)
                )
        data = self.node.population.client(client)
        user = [torch.from_numpy(codes) for codes in data.features]
        early = torch.optim.SGD(self._groups(late=False), lr=1.0)
        every = torch.optim.SGD(self._groups(late=True), lr=1.0)
        random = stream(self.node.experiment.seed, "client", client, round_)
        drawn = self.step.batches(data, random)
        for number, size in enumerate(drawn.sizes):
            late = number >= len(drawn.sizes) - drawn.last_epoch
            for value in self.late:
                value.requires_grad_(late)
            batch = (torch.from_numpy(p[number, :size]) for p in (drawn.items, drawn.labels))
            self._descend(every if late else early, user, *batch)

    def _descend(
        self, optimiser: torch.optim.SGD, user: list[Tensor], items: Tensor, labels: Tensor
    ) -> None:
        optimiser.zero_grad()
        self.measure(self.net(user, items), labels).backward()
        optimiser.step()

    def _groups(self, late: bool) -> list[dict[str, object]]:
        moving = [
            value for value in self.rates if late or not any(value is other for other in self.late)
        ]
        return [{"params": [value], "lr": self.rates[value]} for value in moving]


class SumLoop:
    """Counts or products of one user's items after the other, added to one array.

    Args:
        node: gives users' data.
        step: `counts` or `gram`.
        start: the global parameters.
    """

    def __init__(self, node: Node, step: Counts | GramStep, start: Numbers) -> None:
        self.node = node
        self.step = step
        self.start = start
        products = isinstance(step, GramStep)
        self.name = step.products if products else BIAS
        bias = torch.from_numpy(start[BIAS][:, 0]) if BIAS in start else None
        size = len(start[self.name])
        chosen = torch.arange(size) if bias is None or not products else chosen_items(bias, size)
        self.rows = np.full(node.population.interactions.num_items, -1)
        self.rows[chosen.numpy()] = np.arange(size)
        exponent = step.config.exponent if isinstance(step, GramStep) else 0.0
        self.scale = np.ones(size)
        if bias is not None and exponent:
            self.scale = item_scale(bias[chosen], exponent).numpy()

    def round(self, order: TrainOrder) -> tuple[float, Numbers]:
        """Seconds of a round, and the sums of updates."""
        begun = time.perf_counter()
        total = {name: np.zeros_like(value, dtype=np.float64) for name, value in self.start.items()}
        sums = total[self.name]
        for client in order.clients.tolist():
            data = self.node.population.client(client)
            items, weights = data.weighted_items(self.step.config.low_rated)
            rows = self.rows[items]
            weights = weights[rows >= 0].astype(np.float64)
            rows = rows[rows >= 0]
            if isinstance(self.step, Counts):
                sums[rows, 0] += weights
            else:
                values = weights * self.scale[rows]
                sums[np.ix_(rows, rows)] += np.outer(values, values)
        return time.perf_counter() - begun, total


def rounds_of(
    name: str, step: str, users: int, rounds: int, **changes: object
) -> list[tuple[float, Numbers]]:
    """Seconds and sums of some rounds, by the plain loop or, for other models, by the reference
    path."""
    node = node_of(name, "reference")
    arrays = initial(node)
    given = orders(node, step, users, rounds, **changes)
    made = node.step(Section.model_validate(given[0].step))
    if isinstance(made, Counts | GramStep):
        sums = SumLoop(node, made, arrays)
        return [sums.round(order) for order in given]
    if type(made) is not Sgd or not isinstance(node.model, PrivRec | Mf):
        return [trained(node, arrays, order) for order in given]
    names = node.model.initial(torch.Generator()).keys()
    loop = PlainLoop(node, made, {name: arrays[name] for name in names})
    return [loop.round(order) for order in given]


def main(name: str, step: str, users: int, rounds: int) -> None:
    """Train, and print the seconds of each round but the first as JSON."""
    seconds = [taken for taken, _ in rounds_of(name, step, users, rounds + 1)]
    print(json.dumps({"users": users, "seconds": seconds[1:]}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
