# SPDX-License-Identifier: Apache-2.0
"""Poisoning attacks by made-up profiles or sums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.malicious import MaliciousBlock
from fedrec.data.population import Known
from fedrec.models.linear import products_of
from fedrec.sums.products import BIAS, chosen_items
from simulations.poisoning.base import (
    ProfileConfig,
    ProfilePoisoning,
    UpdatePoisoning,
    UpdatePoisoningConfig,
    check_model,
    gradients_of,
    target_scores,
    with_fillers,
)

# Explicit boosting (Zhang et al. 2022, PipAttack, section 3.3; the baseline EB of Rong, He and Chen
# 2022): each malicious client raises its own predicted score of the targets.
#
# The whole update is in the targets' rows of the item tables, in the direction of the gradient of
# the score under the client's private parameters, and has the norm of an honest client's update
# times `norm`.
#
# Where this differs from the papers: their update is a step of gradient descent on the
# cross-entropy, which vanishes once the score is high; here the norm is set, because a server can
# bound it.


class HonestNormConfig(UpdatePoisoningConfig):
    """Settings of attacks whose updates have by default an honest norm."""

    norm: float | None = Field(default=1.0, gt=0)
    """L2 norm of each malicious update, in units of that of an honest client with a profile of
    random items."""


class ExplicitBoosting(UpdatePoisoning):
    """Explicit boosting: moves the targets' embeddings towards higher scores."""

    name = "explicit-boosting"
    Config = HonestNormConfig
    paper = "Zhang et al. 2022; Rong, He and Chen 2022"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Gradients of the targets' mean score with respect to their rows, `[C, ...]` by
        parameter."""
        tables = [name for name in block.model.item_tables if name in block.shared]
        gradients: dict[str, list[Tensor]] = {name: [] for name in tables}
        for client, trained in enumerate(block.honest):
            after = trained.parameters_of(0)
            private = {name: value for name, value in after.items() if name not in block.shared}
            leaves = {name: block.parameters[name].clone().requires_grad_() for name in tables}
            shared = {name: block.parameters[name] for name in block.shared} | leaves
            score = target_scores(block, shared, (private, block.features(client))).mean()
            for name, gradient in gradients_of(score, leaves).items():
                gradients[name].append(gradient)
        return {name: torch.stack(parts) for name, parts in gradients.items()}


# Bandwagon profiles (Kapoor et al. 2017): the targets among some popular and many random items.
#
# A tenth of the profile is drawn from the tenth of the catalogue that is most popular, the rest
# from all items, as in the comparison of FedRecAttack (Rong et al. 2022). Popularity is that known
# to the adversary (`adversary.public-share`).

POPULAR_SHARE = 0.1


class BandwagonProfiles(ProfilePoisoning):
    """Bandwagon profiles: the targets, some popular items and random ones."""

    name = "bandwagon"
    Config = ProfileConfig
    paper = "Kapoor et al. 2017; Rong et al. 2022"
    config: ProfileConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Create a profile of targets, popular and random items, `int64 [n]`."""
        count = self.config.fillers(known)
        popular = known.popular(max(1, known.items // 10))
        size = min(int(POPULAR_SHARE * count), len(popular))
        return with_fillers(known, random, random.choice(popular, size=size, replace=False), count)


# Popular profiles (Gunes et al. 2014): the targets among the most popular items, the same for all
# malicious clients. Popularity is that known to the adversary (`adversary.public-share`).


class PopularProfiles(ProfilePoisoning):
    """Popular profiles: the targets and the most popular items."""

    name = "popular"
    Config = ProfileConfig
    paper = "Gunes et al. 2014; Rong et al. 2022"
    config: ProfileConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Create a profile of targets and the most popular items, `int64 [n]`."""
        popular = known.popular(self.config.fillers(known))
        return np.concatenate([known.targets, popular])


# Random profiles (Lam and Riedl 2004): the targets among items drawn at random.


class RandomProfiles(ProfilePoisoning):
    """Random profiles: the targets and random items."""

    name = "random"
    Config = ProfileConfig
    paper = "Lam and Riedl 2004"
    config: ProfileConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Create a profile of targets and random items, `int64 [n]`."""
        none = np.empty(0, dtype=np.int64)
        return with_fillers(known, random, none, self.config.fillers(known))


# An attack on sums of products (steps `gram` and `counts`).
#
# A linear model is solved from the sum of x x^T over clients. A malicious client sends such a
# product of a vector in which a target has as much weight as the popular items together, so that
# the weights from these, which most users know, to the targets rise. It stays a product, as a
# server that solves for weights would notice a sum that is not positive semi-definite. Where items
# are counted first, it counts the targets alone. This attack is not from a paper. Its norm is in
# units of an honest client's: a matrix of n items has the norm n.


POPULAR = 50
"""Number of popular items paired with the targets, by the popularity known to the adversary."""


class ProductBoosting(UpdatePoisoning):
    """Product boosting: sends products of the targets with popular items.

    Raises:
        ExperimentError: the model is not computed from products.
    """

    name = "product-boosting"
    Config = HonestNormConfig
    config: HonestNormConfig

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft equal matrices or equal counts for all clients, `[C, ...]` by parameter."""
        name = products_of(block.parameters)
        products = "a model of products of items: model.name = 'item-weights' or 'fold-in'"
        check_model(block, name in block.parameters, products)
        if getattr(block.step, "outer", False):
            change = self._pairs(block, block.parameters[name])
        else:
            name = BIAS
            change = torch.zeros_like(block.parameters[name])
            change[torch.from_numpy(block.known.targets)] = 1.0
        return {name: change.expand(len(block.clients), *change.shape)}

    def _pairs(self, block: MaliciousBlock, products: Tensor) -> Tensor:
        """Product of targets and popular items, `[m, m]`; zeros for items without products."""
        bias = block.parameters.get(BIAS)
        catalogue = block.known.items
        counted = torch.zeros(catalogue) if bias is None else bias[:, 0].cpu()
        row_of = torch.full((catalogue,), -1)
        chosen = chosen_items(counted, len(products))
        row_of[chosen] = torch.arange(len(chosen))
        targets = row_of[torch.from_numpy(block.known.targets)]
        popular = row_of[torch.from_numpy(block.known.popular(POPULAR))]
        weights = torch.zeros(len(products))
        for rows in (targets[targets >= 0], popular[popular >= 0]):
            weights[rows] = max(1, len(rows)) ** -0.5
        return torch.outer(weights, weights).to(products)
