# SPDX-License-Identifier: Apache-2.0
"""FedRecAttack (Rong, Ye, et al. 2022): users' embeddings are approximated from public
interactions, and the targets are pushed above the items that each of these users is shown.

In each round the coalition fits an embedding to every honest user's public rows under the present
item embeddings (BPR, equation 10), and takes the gradient of

    sum over users u, and targets not among their public rows, of g(s_u - score of the target)

with s_u the score of the user's tenth item, and g(x) = x for x >= 0 and exp(x) - 1 below (equation
12). Each malicious client sends the rows of the targets and of some other items, drawn in
proportion to the norms of their gradients, each of norm `row-limit` at most.

Where this differs from the paper: embeddings are fitted anew in each round, so that clients keep no
state, from the shared value that honest devices start from. A client's other items are drawn in
each round. The paper's clients take their parts of the gradient one after the other, until it is
used up; here each of the expected number in a round takes an equal share of a row, limited in the
same way, which has the same sum, and no client needs to know what another one sent. The item to be
overtaken is the tenth of a user's list, for all targets; in the authors' code it is the tenth for
the first target, the ninth for the second and so on. Rows are limited in units of gradients, so
updates are multiplied by the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clients.hosting.malicious import MaliciousBlock
from fedrec.data.adversary.known import Known
from fedrec.errors import ExperimentError
from fedrec.nn.optimisers import Adam
from simulations.poisoning.base import UpdatePoisoning, UpdatePoisoningConfig
from simulations.poisoning.promotion import learning_rates, seed_of_round

ITEMS = "item.factors"
USERS = "user.factors"
_START_STD = 0.01  # of fitted embeddings around the value that devices start from
_PLACE = 10  # of the item in a user's list that a target is to overtake


class FedRecAttackConfig(UpdatePoisoningConfig):
    """Settings of FedRecAttack."""

    rows: int = Field(default=60, ge=1)
    """Number of items whose rows a malicious client changes (kappa)."""
    row_limit: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of a row (C)."""
    fit_steps: int = Field(default=10, ge=1)
    """Steps of Adam that fit the users' embeddings in a round."""
    fit_rate: float = Field(default=0.01, gt=0)
    """Their learning rate."""


class FedRecAttack(UpdatePoisoning):
    """Pushes the targets above the items at the top of approximated users' lists.

    Raises:
        ExperimentError: the model is no matrix factorisation.
    """

    name = "fedrec-attack"
    Config = FedRecAttackConfig
    paper = "Rong, Ye, Zhao, Yuen, Chen and He 2022"
    config: FedRecAttackConfig

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """The rows that each client sends, `[C, items, d]`."""
        if ITEMS not in block.shared or USERS in block.shared or USERS not in block.parameters:
            raise ExperimentError(
                f"FedRecAttack cannot attack {type(block.model).__name__}",
                expected="model.name = 'mf' and step.private-parameters = ['user.*']",
                got=", ".join(block.shared),
                fix="choose another attack, such as explicit-boosting",
            )
        table = block.parameters[ITEMS].cpu()
        start = block.parameters[USERS].cpu()
        users = self._fitted(block.known, table, start, seed_of_round(block))
        gradient = promotion_gradient(block.known, table, users)
        rate = learning_rates(block)[ITEMS]
        chosen = [self._rows(block.known, gradient, member.random) for member in block.clients]
        share = self._shares(block, gradient)
        found = torch.zeros(len(chosen), *table.shape)
        for place, rows in enumerate(chosen):
            own = gradient[rows] * share[rows, None]
            limit = self.config.row_limit / own.norm(dim=1).clamp(min=1e-30)
            found[place, rows] = -rate * own * limit.clamp(max=1.0)[:, None]
        return {ITEMS: found}

    def _fitted(
        self, known: Known, table: Tensor, start: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Embeddings of the honest users, `[honest, d]`, from their public rows by BPR; `start
        [d]` is the value that devices start from."""
        users = torch.from_numpy(known.users)
        liked = torch.from_numpy(known.public)
        drawn = _START_STD * torch.randn(known.honest, table.shape[1], generator=generator)
        embeddings = (start + drawn).requires_grad_()
        optimiser = Adam([embeddings], lr=self.config.fit_rate)
        for _ in range(self.config.fit_steps if len(liked) else 0):
            others = torch.randint(known.items, liked.shape, generator=generator)
            margins = (embeddings[users] * (table[liked] - table[others])).sum(1)
            optimiser.zero_grad()
            F.softplus(-margins).sum().backward()
            optimiser.step()
        return embeddings.detach()

    def _rows(self, known: Known, gradient: Tensor, random: np.random.Generator) -> Tensor:
        """`int64 [rows]`: the targets, and other items by the norms of their gradients."""
        norms = gradient.norm(dim=1).double().numpy() + 1e-12
        norms[known.targets] = 0.0
        count = min(self.config.rows - len(known.targets), known.items - len(known.targets))
        drawn = random.choice(known.items, max(0, count), replace=False, p=norms / norms.sum())
        return torch.from_numpy(np.concatenate([known.targets, drawn]))

    def _shares(self, block: MaliciousBlock, gradient: Tensor) -> Tensor:
        """`float32 [items]`: one over the expected number of clients that send a row."""
        norms = gradient.norm(dim=1) + 1e-12
        expected = block.together * (self.config.rows * norms / norms.sum()).clamp(max=1.0)
        expected[torch.from_numpy(block.known.targets)] = block.together
        return 1 / expected.clamp(min=1.0)


def promotion_gradient(known: Known, table: Tensor, users: Tensor) -> Tensor:
    """Gradient of the loss in the item embeddings, `[items, d]`.

    Args:
        known: has the targets and the users' public rows.
        table: item embeddings, `[items, d]`.
        users: embeddings of the honest users, `[honest, d]`.
    """
    seen = torch.zeros(len(users), len(table), dtype=torch.bool)
    seen[torch.from_numpy(known.users), torch.from_numpy(known.public)] = True
    targets = torch.from_numpy(known.targets)
    open_ = ~seen[:, targets]
    leaf = table.clone().requires_grad_()
    scores = users @ leaf.T
    others = scores.detach().masked_fill(seen, -torch.inf)
    others[:, targets] = -torch.inf
    shown = others.topk(min(_PLACE, len(table)), dim=1).indices[:, -1:]
    margin = scores.gather(1, shown) - scores[:, targets]
    losses = torch.where(margin < 0, margin.clamp(max=0).exp() - 1, margin)
    (gradient,) = torch.autograd.grad((losses * open_).sum(), [leaf])
    return gradient
