# SPDX-License-Identifier: Apache-2.0
"""SASRec and GRU4Rec on one user's sequence after the other, as most people write it: whole tables,
`torch.nn.functional`, `torch.optim.SGD`.

As a command it trains the same rounds in turns in this loop and in blocks, and prints the processor
time of both, in ms a user. Arguments: experiment, users per round, rounds, overrides.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contestants.shipped import (
    Numbers,
    initial,
    node_of,
    orders,
    section_of,
    trained,
)
from clients.node import Node
from clients.steps.sequence import SequenceBatches, SequenceStep
from fedrec.models.sequential import SasRec, SequenceModel
from fedrec.protocol.orders import TrainOrder
from fedrec.rng import stream


class SequenceNet(nn.Module):
    """A model of sequences; parameters by fedrec's names, with `_` for the dot."""

    def __init__(self, model: SequenceModel, start: Numbers) -> None:
        super().__init__()
        self.model = model
        self.values = nn.ParameterDict(
            {n.replace(".", "_"): torch.from_numpy(v.copy()) for n, v in start.items()}
        )
        self.gru: nn.GRU | None = None
        if not isinstance(model, SasRec):
            width = model.config.width
            self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, sequence: Tensor, kept: list[Tensor]) -> Tensor:
        values = F.embedding(sequence, self.values["item_id"]) * math.sqrt(self.model.config.width)
        if self.gru is None:
            return self._attended(values, kept)
        values = values * kept[0]
        names = ("input_weight", "state_weight", "input_bias", "state_bias")
        own = [self.values[f"layer0_{name}"] for name in names]
        weights = dict(zip(("weight_ih_l0", "weight_hh_l0"), (v.T for v in own[:2]), strict=True))
        weights |= dict(zip(("bias_ih_l0", "bias_hh_l0"), own[2:], strict=True))
        return torch.func.functional_call(self.gru, weights, (values[None],))[0][0] * kept[1]

    def _attended(self, values: Tensor, kept: list[Tensor]) -> Tensor:
        places = self.values["place"][: len(values)].flip(0)
        values = (values + places) * kept[0]
        for block in range((len(kept) - 1) // 2):
            name = f"block{block}"
            joined = self._affine(f"{name}_attention", self._norm(f"{name}_norm1", values))
            query, key, value = joined[None].chunk(3, -1)
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)[0]
            values = values + self._affine(f"{name}_output", found) * kept[1 + 2 * block]
            inner = torch.relu(self._affine(f"{name}_inner", self._norm(f"{name}_norm2", values)))
            values = values + self._affine(f"{name}_outer", inner) * kept[2 + 2 * block]
        return self._norm("norm", values)

    def _affine(self, name: str, values: Tensor) -> Tensor:
        return torch.addmm(self.values[f"{name}_bias"], values, self.values[f"{name}_weight"])

    def _norm(self, name: str, values: Tensor) -> Tensor:
        weight = self.values[f"{name}_weight"]
        return F.layer_norm(values, weight.shape, weight, self.values[f"{name}_bias"])


class SequenceLoop:
    """One user after the other, each from the global parameters, with fedrec's draws.

    Args:
        node: gives users' data.
        step: the step.
        start: the global parameters.
    """

    def __init__(self, node: Node, step: SequenceStep, start: Numbers) -> None:
        self.node = node
        self.step = step
        self.start = {name: torch.from_numpy(value) for name, value in start.items()}
        self.net = SequenceNet(step.model, start)
        self.optimiser = torch.optim.SGD(self.net.values.parameters(), step.config.learning_rate)

    def round(self, order: TrainOrder) -> tuple[float, Numbers]:
        """Seconds of a round, and the sums of updates."""
        begun = time.perf_counter()
        total = {name: torch.zeros_like(value) for name, value in self.start.items()}
        for client in order.clients.tolist():
            self._train(client, order.round)
            for name, value in self.start.items():
                total[name] += self.net.values[name.replace(".", "_")].detach() - value
        return time.perf_counter() - begun, {name: value.numpy() for name, value in total.items()}

    def _train(self, client: int, round_: int) -> None:
        with torch.no_grad():
            for name, value in self.start.items():
                self.net.values[name.replace(".", "_")].copy_(value)
        random = stream(self.node.experiment.seed, "client", client, round_)
        batches = self.step.batches(self.node.population.client(client), random)
        if not isinstance(batches, SequenceBatches):
            return
        drawn = batches.drawn
        for items, size, seed in zip(batches.items, batches.sizes, batches.seeds, strict=True):
            own = torch.from_numpy(items)
            width = len(own) - drawn - 1
            generator = torch.Generator().manual_seed(int(seed))
            kept = self.step.model.keep([generator], 1, width)
            sequence = own[drawn:size]
            count = len(sequence) - 1
            masks = [torch.ones(1)] * self.step.model.dropped
            if kept is not None:
                masks = list(kept[:, 0, 0, :count])
            self.optimiser.zero_grad()
            states = self.net(sequence[:-1], masks)
            self._loss(states, sequence[1:], own[:drawn]).backward()
            self.optimiser.step()

    def _loss(self, states: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        table = self.net.values["item_id"]
        model = self.step.model
        if model.config.loss == "softmax":
            return F.cross_entropy(states @ table.T, targets)
        wanted = (states * F.embedding(targets, table)).sum(1)
        if model.config.loss == "binary":
            raise NotImplementedError("Expected a softmax.")
        others = states @ F.embedding(negatives, table).T
        others = others + math.log((model.schema.num_items - 1) / len(negatives))
        logits = torch.cat([wanted[:, None], others], 1)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def main(name: str, users: int, rounds: int, *overrides: str) -> None:
    """Train in turns, after one round of each that is not counted, and print the times."""
    node = node_of(name, "auto", *overrides)
    arrays = initial(node)
    loop = SequenceLoop(node, node.step(section_of(node, "sequence")), arrays)
    found: dict[str, list[float]] = {"loop": [], "blocks": []}
    for order in orders(node, "sequence", users, rounds + 1):
        for kind, times in found.items():
            begun = time.process_time()
            loop.round(order) if kind == "loop" else trained(node, arrays, order)
            times.append((time.process_time() - begun) / users * 1e3)
    for kind, times in found.items():
        print(f"{kind}: least {min(times[1:]):.2f}, median {np.median(times[1:]):.2f} ms a user")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
