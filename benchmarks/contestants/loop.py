# SPDX-License-Identifier: Apache-2.0
"""The work as most people write it: PyTorch modules and optimisers, one user after the other.

One process; `--sparse` uses sparse embedding gradients.

Arguments: work, device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from benchmarks.contestants.archive import BATCH, LEARNING_RATE, Arrays, RoundClock


class Net(nn.Module):
    """PrivRec's network with full tables."""

    def __init__(self, work: Arrays, *, sparse: bool) -> None:
        super().__init__()
        initial = work.initial()
        self.names = list(initial)
        tables = [name for name in self.names if not name.startswith("layer")]
        self.tables = nn.ModuleDict(
            {name.replace(".", "_"): self._table(initial[name], sparse) for name in tables}
        )
        self.layers = nn.ModuleList()
        for index in range(
            sum(name.endswith("weight") and name.startswith("layer") for name in self.names)
        ):
            weight = torch.from_numpy(initial[f"layer{index}.weight"])
            layer = nn.Linear(*weight.shape)
            # the work keeps its own
            layer.weight.data = weight.T.clone(memory_format=torch.contiguous_format)
            layer.bias.data = torch.from_numpy(initial[f"layer{index}.bias"]).clone()
            self.layers.append(layer)
        self.users = [name.replace(".", "_") for name in tables if name.startswith("user.")]
        genres = torch.from_numpy(work["genres"])
        self.register_buffer("genres", genres.clamp(min=0), persistent=False)
        self.register_buffer("present", (genres >= 0).float().unsqueeze(-1), persistent=False)

    @staticmethod
    def _table(values: np.ndarray, sparse: bool) -> nn.Embedding:
        return nn.Embedding.from_pretrained(
            torch.from_numpy(values.copy()), freeze=False, sparse=sparse
        )

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        parts = [
            self.tables[name](code).expand(len(items), -1)
            for name, code in zip(self.users, user, strict=True)
        ]
        present = self.present[items]
        pooled = (self.tables["item_genres"](self.genres[items]) * present).sum(1) / present.sum(
            1
        ).clamp(min=1)
        hidden = torch.cat([*parts, self.tables["item_id"](items), pooled], 1)
        for layer in self.layers[:-1]:
            hidden = torch.relu(layer(hidden))
        return self.layers[-1](hidden).squeeze(1)

    def arrays(self) -> list[np.ndarray]:
        """The parameters, always in the same order."""
        return [value.detach().cpu().numpy() for value in self.parameters()]


def batches(
    work: Arrays, index: int, device: str = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of one user in one round; `index` counts through the rounds and their cohorts."""
    for epoch in work.epochs(index):
        items, labels = (torch.from_numpy(part).to(device).split(BATCH) for part in epoch)
        yield from zip(items, labels, strict=True)


def train(
    net: Net, user: torch.Tensor, examples: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """One user's local work."""
    optimiser = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for items, labels in examples:
        optimiser.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(net(user, items), labels).backward()
        optimiser.step()


def update(net: Net, start: Mapping[str, torch.Tensor], clip: float) -> dict[str, torch.Tensor]:
    """What training changed, by parameter; clipped to an L2 norm over all of it together, unless
    that is 0."""
    moved = {name: value - start[name] for name, value in net.state_dict().items()}
    if clip:
        norm = torch.stack([value.norm() for value in moved.values()]).norm().item()
        if norm > clip:
            for value in moved.values():
                value *= clip / norm
    return moved


def main(path: str, device: str, sparse: bool) -> None:
    """Do the work and print when the rounds were and how far the parameters went."""
    torch.set_num_threads(1)
    work = Arrays(path)
    net = Net(work, sparse=sparse).to(device)
    rounds, cohort = work["cohorts"].shape
    users = torch.from_numpy(work["users"]).to(device)
    clock = RoundClock()
    for number in range(rounds):
        clock.begin()
        theta = {name: value.detach().clone() for name, value in net.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in theta.items()}
        for index in range(cohort):
            net.load_state_dict(theta)
            train(net, users[number, index], batches(work, number * cohort + index, device))
            for name, moved in update(net, theta, work.clip).items():
                total[name] += moved
        net.load_state_dict({name: theta[name] + total[name] / cohort for name in theta})
        if device != "cpu":
            torch.cuda.synchronize()
        clock.end()
    print(clock.report(net.arrays(), Net(work, sparse=False).arrays()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--sparse" in sys.argv)
