# SPDX-License-Identifier: Apache-2.0
"""ClusterAttack (Yu et al. 2023): an untargeted attack that draws the items' embeddings together in
dense clusters, so that items can no longer be told apart.

Each round the items are clustered by k-means. Every row of a malicious update points to the centre
of the item's cluster; its norm is drawn between the mean norm of an honest client's rows and that
plus `spread` standard deviations, so that it looks like one.

Where this differs from the paper: the number of clusters is fixed; there it follows the moving
average of the clusters' size over the rounds, which would be state of the clients. The rows'
statistics are those of the client's own honest training on random items, not of a sample of
malicious clients with real histories. Other parameters are those of that training.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from clients.hosting.malicious import MaliciousBlock
from fedrec.errors import ExperimentError
from simulations.poisoning.base import UpdatePoisoning, UpdatePoisoningConfig
from simulations.poisoning.promotion import embedding_tables, generator_of, seed_of_round

_MOST_ITERATIONS = 100


class ClusterAttackConfig(UpdatePoisoningConfig):
    """Settings of ClusterAttack."""

    clusters: int = Field(default=5, ge=1)
    """Number of clusters."""
    spread: float = Field(default=3.0, ge=0)
    """Largest distance of a row's norm from the mean norm, in standard deviations."""


class ClusterAttack(UpdatePoisoning):
    """Draws items' embeddings together.

    Raises:
        ExperimentError: the model has no table of item embeddings.
    """

    name = "cluster-attack"
    Config = ClusterAttackConfig
    paper = "Yu et al. 2023"
    config: ClusterAttackConfig

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The updates, `[C, ...]` by parameter."""
        tables = embedding_tables(block)
        if not tables:
            raise ExperimentError(
                f"ClusterAttack cannot attack {type(block.model).__name__}",
                expected="a model with embeddings of items, such as privrec, mf or neumf",
                got=", ".join(block.shared),
                fix="choose another attack, such as random",
            )
        generator = seed_of_round(block)
        pulls = {name: self._pull(block.parameters[name], generator) for name in tables}
        changes = [one.changes_of(0) for one in block.honest]
        found = {name: torch.stack([own[name] for own in changes]) for name in block.shared}
        for name, pull in pulls.items():
            norms = found[name].norm(dim=2)
            drawn = [
                torch.rand(len(pull), generator=generator_of(member.random))
                for member in block.clients
            ]
            room = self.config.spread * torch.stack(drawn).to(norms) * norms.std(1, keepdim=True)
            found[name] = pull * (norms.mean(1, keepdim=True) + room)[:, :, None]
        return found

    def _pull(self, table: Tensor, generator: torch.Generator) -> Tensor:
        """Unit vectors from each item to the centre of its cluster, `[items, d]`."""
        centres, cluster = clustered(table, min(self.config.clusters, len(table)), generator)
        away = centres[cluster] - table
        return away / away.norm(dim=1, keepdim=True).clamp(min=1e-12)


def clustered(points: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clusters by Lloyd's algorithm from random points: centres `[count, d]`, and the cluster of
    each of the points `[n, d]`, `int64 [n]`."""
    first = torch.randperm(len(points), generator=generator)[:count]
    centres = points[first.to(points.device)].clone()
    cluster = torch.cdist(points, centres).argmin(1)
    for _ in range(_MOST_ITERATIONS):
        sums = torch.zeros_like(centres).index_add_(0, cluster, points)
        sizes = torch.bincount(cluster, minlength=count)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
        before = cluster
        cluster = torch.cdist(points, centres).argmin(1)
        if bool((cluster == before).all()):
            break
    return centres, cluster
