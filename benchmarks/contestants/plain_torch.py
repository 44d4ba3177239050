# SPDX-License-Identifier: Apache-2.0
"""The work as most people write it: PyTorch modules and optimisers, one user after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from benchmarks.archive import BATCH, LEARNING_RATE, Arrays


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
        for place in range(
            sum(name.endswith("weight") and name.startswith("layer") for name in self.names)
        ):
            weight = torch.from_numpy(initial[f"layer{place}.weight"])
            layer = nn.Linear(*weight.shape)
            # the work keeps its own
            layer.weight.data = weight.T.clone(memory_format=torch.contiguous_format)
            layer.bias.data = torch.from_numpy(initial[f"layer{place}.bias"]).clone()
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
    work: Arrays, place: int, device: str = "cpu"
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of one user in one round; `place` counts through the rounds and their cohorts."""
    for epoch in work.epochs(place):
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
