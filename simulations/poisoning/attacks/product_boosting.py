# SPDX-License-Identifier: Apache-2.0
"""An attack on sums of products (steps `gram` and `counts`): what one client can put into them.

A linear model is solved from the sum of x x^T over clients. A malicious client sends such a product
of a vector in which a target has as much weight as the popular items together, so that the weights
from these, which most users know, to the targets rise. It stays a product, as a server that solves
for weights would notice a sum that is not positive semi-definite. Where items are counted first, it
counts the targets alone. This attack is not from a paper. Its norm is in units of an honest
client's: a matrix of n items has the norm n.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field
from torch import Tensor

from clients.hosting.malicious import MaliciousBlock
from fedrec.errors import ExperimentError
from fedrec.factors.chosen_items import BIAS, chosen_items
from simulations.poisoning.base import UpdatePoisoning, UpdatePoisoningConfig


class ProductBoostingConfig(UpdatePoisoningConfig):
    """Settings of the attack on sums of products."""

    norm: float | None = Field(default=1.0, gt=0)
    """L2 norm of each malicious update, in units of that of an honest client with a profile of
    random items."""
    popular: int = Field(default=50, ge=1)
    """Number of popular items that the targets are paired with; popularity is what the adversary
    knows of it."""


class ProductBoosting(UpdatePoisoning):
    """Sends products of the targets with popular items.

    Raises:
        ExperimentError: the model is not computed from products.
    """

    name = "product-boosting"
    Config = ProductBoostingConfig
    config: ProductBoostingConfig

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The same matrix or the same counts for each client, `[C, ...]` by parameter."""
        name = block.model.products
        if not name:
            raise ExperimentError(
                f"model {type(block.model).__name__} is not computed from products of items",
                expected="model.name = 'item-weights' or 'fold-in'",
                got=", ".join(block.shared),
                fix="choose another attack, such as random",
            )
        if getattr(block.step, "outer", False):
            change = self._pairs(block, block.parameters[name])
        else:
            name = BIAS
            change = torch.zeros_like(block.parameters[name])
            change[torch.from_numpy(block.known.targets)] = 1.0
        return {name: change.expand(len(block.clients), *change.shape)}

    def _pairs(self, block: MaliciousBlock, products: Tensor) -> Tensor:
        """The product of targets and popular items, `[m, m]`; zeros for items that no products are
        about."""
        bias = block.parameters.get(BIAS)
        catalogue = block.known.items
        counted = torch.zeros(catalogue) if bias is None else bias[:, 0].cpu()
        row_of = torch.full((catalogue,), -1)
        chosen = chosen_items(counted, len(products))
        row_of[chosen] = torch.arange(len(chosen))
        targets = row_of[torch.from_numpy(block.known.targets)]
        popular = row_of[torch.from_numpy(block.known.popular(self.config.popular))]
        weights = torch.zeros(len(products))
        for rows in (targets[targets >= 0], popular[popular >= 0]):
            weights[rows] = max(1, len(rows)) ** -0.5
        return torch.outer(weights, weights).to(products)
