# SPDX-License-Identifier: Apache-2.0
"""Poisoning attacks that send made-up gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from clients.malicious import MaliciousBlock
from fedrec.data.population import Known
from fedrec.nn.layers import Adam
from simulations.poisoning.base import (
    MADE_UP,
    MadeUpUsers,
    UpdatePoisoning,
    Users,
    check_model,
    embedding_tables,
    generator_of,
    learning_rates,
    made_up_users,
    promotion_loss,
    seed_of_round,
    target_scores,
)

# FedRecAttack (Rong, Ye, et al. 2022): users' embeddings are approximated from public interactions,
# and the targets are pushed above the items that each of these users is shown.
#
# In each round the coalition fits an embedding to every honest user's public rows under the present
# item embeddings (BPR, equation 10), and takes the gradient of
#
#     sum over users u, and targets not among their public rows, of g(s_u - score of the target)
#
# with s_u the score of the user's tenth item, and g(x) = x for x >= 0 and exp(x) - 1 below
# (equation 12). Each malicious client sends the rows of the targets and of some other items, drawn
# in proportion to the norms of their gradients, each of norm `ROW_LIMIT` at most.
#
# Where this differs from the paper: embeddings are fitted again in each round, so that clients are
# stateless, from the shared initial value of honest devices. A client's other items are drawn in
# each round. The paper's clients take their parts of the gradient sequentially, until it is
# exhausted; here each of the expected number in a round takes an equal share of a row, limited in
# the same way, which has the same sum, and no client needs to know what another one sent. The item
# to be overtaken is the tenth of a user's list, for all targets; in the authors' code it is the
# tenth for the first target, the ninth for the second and so on. Rows are limited in units of
# gradients, so updates are multiplied by the learning rate.

ITEMS = "item.factors"
USERS = "user.factors"
_START_STD = 0.01  # of fitted embeddings around the value that devices start from
_PLACE = 10  # of the item in a user's list that a target is to overtake
ROWS = 60  # kappa, item rows that a malicious client changes
ROW_LIMIT = 1.0  # C, largest norm of the gradient of a row
FIT_STEPS = 10
FIT_RATE = 0.01  # of Adam, for the users' embeddings in a round


class FedRecAttack(UpdatePoisoning):
    """FedRecAttack: pushes the targets above the top items of approximated users' lists.

    Raises:
        ExperimentError: the model is not a matrix factorisation.
    """

    name = "fedrec-attack"
    paper = "Rong, Ye, Zhao, Yuen, Chen and He 2022"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft the row updates of each client, `[C, items, d]`."""
        private = USERS in block.parameters and USERS not in block.shared
        expected = "model.name = 'mf' and step.private-parameters = ['user.*']"
        check_model(block, private and ITEMS in block.shared, expected)
        table = block.parameters[ITEMS].cpu()
        start = block.parameters[USERS].cpu()
        users = self._fitted(block.known, table, start, seed_of_round(block))
        gradient = promotion_gradient(block.known, table, users)
        rate = learning_rates(block)[ITEMS]
        chosen = [self._rows(block.known, gradient, member.random) for member in block.clients]
        share = self._shares(block, gradient)
        sent = torch.zeros(len(chosen), *table.shape)
        for client, rows in enumerate(chosen):
            part = gradient[rows] * share[rows, None]
            limit = ROW_LIMIT / part.norm(dim=1).clamp(min=1e-30)
            sent[client, rows] = -rate * part * limit.clamp(max=1.0)[:, None]
        return {ITEMS: sent}

    def _fitted(
        self, known: Known, table: Tensor, start: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Fit embeddings of the honest users, `[honest, d]`, to their public rows by BPR; `start
        [d]` is the devices' initial value."""
        users = torch.from_numpy(known.users)
        liked = torch.from_numpy(known.public)
        drawn = _START_STD * torch.randn(known.honest, table.shape[1], generator=generator)
        embeddings = (start + drawn).requires_grad_()
        optimiser = Adam([embeddings], lr=FIT_RATE)
        for _ in range(FIT_STEPS if len(liked) else 0):
            others = torch.randint(known.items, liked.shape, generator=generator)
            margins = (embeddings[users] * (table[liked] - table[others])).sum(1)
            optimiser.zero_grad()
            F.softplus(-margins).sum().backward()
            optimiser.step()
        return embeddings.detach()

    def _rows(self, known: Known, gradient: Tensor, random: np.random.Generator) -> Tensor:
        """Targets, and other items drawn by the norms of their gradients, `int64 [rows]`."""
        norms = gradient.norm(dim=1).double().numpy() + 1e-12
        norms[known.targets] = 0.0
        count = min(ROWS - len(known.targets), known.items - len(known.targets))
        drawn = random.choice(known.items, max(0, count), replace=False, p=norms / norms.sum())
        return torch.from_numpy(np.concatenate([known.targets, drawn]))

    def _shares(self, block: MaliciousBlock, gradient: Tensor) -> Tensor:
        """Reciprocal of the expected number of clients that send a row, `float32 [items]`."""
        norms = gradient.norm(dim=1) + 1e-12
        expected = block.together * (ROWS * norms / norms.sum()).clamp(max=1.0)
        expected[torch.from_numpy(block.known.targets)] = block.together
        return 1 / expected.clamp(min=1.0)


def promotion_gradient(known: Known, table: Tensor, users: Tensor) -> Tensor:
    """Gradient of the loss with respect to the item embeddings, `[items, d]`.

    Args:
        known: the targets and the users' public rows.
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


# ClusterAttack (Yu et al. 2023): an untargeted attack that draws the items' embeddings together in
# dense clusters, so that items can no longer be told apart.
#
# Each round the items are clustered by k-means. Every row of a malicious update points to the
# centre of the item's cluster; its norm is drawn between the mean norm of an honest client's rows
# and that plus three standard deviations, so that it looks like one.
#
# Where this differs from the paper: the number of clusters is fixed; there it follows the moving
# average of the clusters' size over the rounds, which would be state of the clients. The rows'
# statistics are those of the client's own honest training on random items, not of a sample of
# malicious clients with real histories. Other parameters are those of that training.

CLUSTERS = 5
SPREAD = 3.0
_MOST_ITERATIONS = 100


class ClusterAttack(UpdatePoisoning):
    """ClusterAttack: draws the item embeddings together into clusters.

    Raises:
        ExperimentError: the model has no table of item embeddings.
    """

    name = "cluster-attack"
    paper = "Yu et al. 2023"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft the updates, `[C, ...]` by parameter."""
        tables = embedding_tables(block)
        embedded = "a model with embeddings of items, such as privrec, mf or neumf"
        check_model(block, bool(tables), embedded)
        generator = seed_of_round(block)
        pulls = {name: self._pull(block.parameters[name], generator) for name in tables}
        changes = [trained.changes_of(0) for trained in block.honest]
        honest = {name: torch.stack([change[name] for change in changes]) for name in block.shared}
        for name, pull in pulls.items():
            norms = honest[name].norm(dim=2)
            drawn = [
                torch.rand(len(pull), generator=generator_of(member.random))
                for member in block.clients
            ]
            room = SPREAD * torch.stack(drawn).to(norms) * norms.std(1, keepdim=True)
            honest[name] = pull * (norms.mean(1, keepdim=True) + room)[:, :, None]
        return honest

    def _pull(self, table: Tensor, generator: torch.Generator) -> Tensor:
        """Unit vectors from each item to the centre of its cluster, `[items, d]`."""
        centres, cluster = clustered(table, min(CLUSTERS, len(table)), generator)
        away = centres[cluster] - table
        return away / away.norm(dim=1, keepdim=True).clamp(min=1e-12)


def clustered(points: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cluster points by Lloyd's algorithm from random centres: centres `[count, d]`, and the
    cluster of each of the points `[n, d]`, `int64 [n]`."""
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


# PIECK (Zhang et al. 2024): popular items are found by how far their embeddings have moved, and the
# targets are promoted with these, without any knowledge of the data.
#
# Of the paper's two variants this is user approximation (PIECK-UEA): the popular items' embeddings
# are taken for those of users, and the targets are promoted for these, in models in which both are
# in one space.
#
# Where this differs from the paper: an item's movement is the distance of its embedding from its
# initial value, which every client can compute, and not the sum over the first rounds that the
# client takes part in, so that clients are stateless; popular items are selected again in each
# round. In the first round nothing has moved, and nothing is sent.

POPULAR = 10
"""Number of popular items."""


class Pieck(UpdatePoisoning):
    """PIECK: promotes the targets by popular items, identified by their movement.

    Raises:
        ExperimentError: the model is not a matrix factorisation.
    """

    name = "pieck"
    paper = "Zhang et al. 2024"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft steps of gradient descent on the targets' embeddings, `[C, items, d]`, equal for
        all clients."""
        name = self._table(block)
        table = block.parameters[name]
        moved = (table - block.initial[name].to(table)).norm(dim=1)
        targets = torch.from_numpy(block.known.targets).to(table.device)
        moved[targets] = -1.0
        count = min(POPULAR, len(moved) - len(targets))
        popular = moved.argsort(descending=True, stable=True)[:count]
        step = torch.zeros_like(table)
        if bool((moved[popular] > 0).any()):
            rows = table[targets].clone().requires_grad_()
            loss = promotion_loss(table[popular] @ rows.T)
            (gradient,) = torch.autograd.grad(loss, [rows])
            step[targets] = -learning_rates(block)[name] * gradient
        return {name: step.expand(len(block.clients), *step.shape)}

    def _table(self, block: MaliciousBlock) -> str:
        """Name of the changed item table: the first with more than one column."""
        tables = embedding_tables(block)
        fits = bool(tables) and USERS in block.parameters
        check_model(block, fits, "users and items in one embedding space, as in model mf")
        return tables[0]


# A-hum (Rong, He and Chen 2022, section 4.3): like A-ra, but for hard users, who do not like the
# targets.
#
# A random user is made hard by steps of gradient descent on its private parameters, on the
# cross-entropy of the targets as negatives.
#
# Where this differs from the paper: of models that represent users by features alone, hard users
# are those with the lowest scores among ten times as many random ones.

HARD_STEPS = 30
HARD_RATE = 0.001
_CANDIDATES = 10  # random users for each hard one, where there are no private parameters


class HardUserMining(MadeUpUsers):
    """A-hum: promotes the targets for users who do not like them."""

    name = "a-hum"
    paper = "Rong, He and Chen 2022, A-hum"

    def users(self, block: MaliciousBlock, generator: torch.Generator) -> Users:
        """Make up hard users."""
        private = len(block.shared) < len(block.parameters)
        count = MADE_UP if private else _CANDIDATES * MADE_UP
        params, features = made_up_users(block, count, generator)
        shared = {name: block.parameters[name] for name in block.shared}
        if not private:
            scores = target_scores(block, shared, (params, features)).detach().mean(1)
            hardest = scores.argsort(stable=True)[:MADE_UP]
            return params, tuple(codes[hardest] for codes in features)
        for _ in range(HARD_STEPS):
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            scores = target_scores(block, shared, (leaves, features))
            # each user is trained alone, so the loss is a sum over users
            loss = F.binary_cross_entropy_with_logits(
                scores, torch.zeros_like(scores), reduction="none"
            )
            gradients = torch.autograd.grad(loss.mean(1).sum(), list(leaves.values()))
            moved = zip(params.items(), gradients, strict=True)
            params = {name: value - HARD_RATE * step for (name, value), step in moved}
        return params, features


# A-ra (Rong, He and Chen 2022, section 4.2): malicious clients approximate honest users by random
# ones and promote the targets for these.
#
# Where this differs from the paper: of models that represent users by features, a made-up user has
# random categories; the paper has embeddings alone.


class RandomApproximation(MadeUpUsers):
    """A-ra: promotes the targets for random users."""

    name = "a-ra"
    paper = "Rong, He and Chen 2022, A-ra"

    def users(self, block: MaliciousBlock, generator: torch.Generator) -> Users:
        """Make up random users."""
        return made_up_users(block, MADE_UP, generator)
