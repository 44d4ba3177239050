# SPDX-License-Identifier: Apache-2.0
"""Poisoning attacks: their interface, and attacks by made-up profiles, sums and gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from scipy.cluster.vq import kmeans2
from torch import Tensor
from torch.nn import functional as F

from clients.malicious import MaliciousBlock
from clients.steps.descent import rates_by_name
from fedrec.config import Config
from fedrec.data.population import Known
from fedrec.errors import ExperimentError
from fedrec.models.base import HistoryModel, Parameters
from fedrec.models.linear import products_of
from fedrec.nn.layers import Adam
from fedrec.rng import torch_stream
from fedrec.sums.products import BIAS, chosen_items


class Poisoning(ABC):
    """Behaviour of malicious clients. Derive from `ProfilePoisoning` or `UpdatePoisoning`.

    A built-in has a `name` and lives in `simulations/poisoning.py`, its configuration
    class above it. It is stateless: its results depend only on its inputs.

    Args:
        config: settings of the attack.
    """

    Config: ClassVar[type[Config]] = Config

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Create the items of a malicious client's training rows, `int64 [n]`, distinct, in
        temporal order.

        Args:
            known: knowledge of the adversary.
            random: a stream of this client.
        """


class ProfilePoisoning(Poisoning):
    """Attack by made-up profiles, on which malicious clients train like honest ones. It works
    against every system, centralised ones included."""


class UpdatePoisoningConfig(Config):
    """Settings of attacks with made-up updates."""

    norm: float | None = Field(default=None, gt=0)
    """L2 norm of each malicious update, in units of that of an honest client with a profile of
    random items; default: unscaled."""


class UpdatePoisoning(Poisoning):
    """Attack by made-up updates; a subclass defines `crafted`.

    Malicious clients have profiles of random items, of usual length: the norm of an honest update
    is measured on them (`norm`), and centralised systems are fitted to them.
    """

    Config = UpdatePoisoningConfig
    config: UpdatePoisoningConfig

    @abstractmethod
    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft the updates before scaling, `[C, ...]` by parameter."""

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """Draw random items without targets, `int64 [n]`."""
        others = np.setdiff1d(np.arange(known.items), known.targets)
        return random.choice(others, size=min(known.usual, len(others)), replace=False)

    def updates(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Crafted updates, scaled to `norm` if it is set, `[C, ...]` by parameter; missing
        parameters are zero."""
        crafted = self.crafted(block)
        if self.config.norm is None:
            return crafted
        squares = [value.double().flatten(1).square().sum(1) for value in crafted.values()]
        norms = sum(squares[1:], squares[0]).sqrt()
        wanted = self.config.norm * block.honest_norms.to(norms)
        factors = wanted / norms.clamp(min=1e-300)
        return {
            name: value * factors.view(-1, *[1] * (value.dim() - 1))
            for name, value in crafted.items()
        }


class ProfileConfig(Config):
    """Settings of made-up profiles."""

    items: int | None = Field(default=None, ge=1)
    """Number of items of a profile, targets included; default: the median of honest clients."""

    def fillers(self, known: Known) -> int:
        """Number of items in addition to the targets."""
        return max(0, (self.items or known.usual) - len(known.targets))


def with_fillers(
    known: Known, random: np.random.Generator, chosen: np.ndarray, count: int
) -> np.ndarray:
    """Combine the targets, chosen items and random others, `int64 [n]`, in random order.

    Args:
        known: knowledge of the adversary.
        random: source of randomness.
        chosen: `int64 [m]`, items without targets.
        count: number of items without targets in all, as far as the catalogue has them.
    """
    taken = np.concatenate([known.targets, chosen])
    others = np.setdiff1d(np.arange(known.items), taken)
    size = min(max(0, count - len(chosen)), len(others))
    return random.permutation(
        np.concatenate([taken, random.choice(others, size=size, replace=False)])
    )


_Users = tuple[Parameters, tuple[Tensor, ...]]
"""Private parameters `[U, ...]` of some users, and their category codes per feature,
`int64 [U, width]`."""


def _generator_of(random: np.random.Generator) -> torch.Generator:
    """Torch generator from a client's stream, on the CPU."""
    return torch.Generator().manual_seed(int(random.integers(2**62)))


def _check_model(block: MaliciousBlock, fits: bool, expected: str) -> None:
    """Check that an attack fits the model, and state what it expects.

    Raises:
        ExperimentError: it does not fit.
    """
    if not fits:
        raise ExperimentError(
            f"this attack cannot attack {type(block.model).__name__}",
            expected=expected,
            got=", ".join(block.shared),
            fix="set adversary.attack = 'random', or another attack with made-up profiles",
        )


def _target_scores(block: MaliciousBlock, parameters: Parameters, users: _Users) -> Tensor:
    """Scores of the targets, `[U, targets]`.

    Args:
        block: block with targets and model.
        parameters: the shared ones, without cohort dimension.
        users: the users.

    Raises:
        ExperimentError: the model represents users by whole histories.
    """
    items = "a model that predicts single items, such as privrec, mf or neumf"
    _check_model(block, not isinstance(block.model, HistoryModel), items)
    params, features = users
    count = max([1, *map(len, [*params.values(), *features])])
    tables = {name: value.expand(count, *value.shape) for name, value in parameters.items()}
    targets = torch.from_numpy(block.known.targets).to(next(iter(tables.values())).device)
    return block.model.predict({**tables, **params}, features, targets.expand(count, -1))


def _made_up_users(block: MaliciousBlock, count: int, generator: torch.Generator) -> _Users:
    """Make up users with normal private parameters around zero, and random categories.

    Args:
        block: block with the model.
        count: number of users.
        generator: random generator, on the CPU.
    """
    device = block.step.device
    private = [name for name in block.parameters if name not in block.shared]
    params = {
        name: (
            _USER_STD * torch.randn(count, *block.parameters[name].shape, generator=generator)
        ).to(device)
        for name in private
    }
    features = tuple(
        torch.randint(categories, (count, 1), generator=generator).to(device)
        for _, categories in block.model.schema.user_features
    )
    return params, features


def _learning_rates(block: MaliciousBlock) -> dict[str, float]:
    """Learning rate of each shared parameter in honest clients' steps; 0.1 for steps without."""
    config = block.step.config
    rate = float(getattr(config, "learning_rate", 0.1))
    factors: Mapping[str, float] = rates_by_name(
        list(block.parameters), getattr(config, "rates", {})
    )
    return {name: rate * factors[name] for name in block.shared}


def _seed_of_round(block: MaliciousBlock) -> torch.Generator:
    """Generator shared by all malicious clients of a round, on the CPU."""
    return torch_stream(block.known.seed, "coalition", block.round)


def _embedding_tables(block: MaliciousBlock) -> list[str]:
    """Names of the shared item tables with more than one column."""
    return [
        name
        for name in block.model.item_tables
        if name in block.shared and block.parameters[name].shape[1] > 1
    ]


def _gradients_of(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a scalar `[]` with respect to leaves, `[...]` each; zeros for unused leaves."""
    gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True))


# Common part of A-ra and A-hum: the gradient of the targets' loss for made-up users.

_MADE_UP = 10
"""Number of made-up users per malicious client and round."""
_USER_STD = 0.01
"""Standard deviation of the made-up users' private parameters."""


class _MadeUpUsers(UpdatePoisoning):
    """Gradient descent on the cross-entropy of the targets as positives of made-up users, with the
    learning rates of honest clients, over all shared parameters."""

    @abstractmethod
    def users(self, block: MaliciousBlock, generator: torch.Generator) -> _Users:
        """Make up the users of one client; `generator` is that client's."""

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Take the steps of gradient descent, `[C, ...]` by parameter."""
        rates = _learning_rates(block)
        steps: dict[str, list[Tensor]] = {name: [] for name in block.shared}
        for member in block.clients:
            users = self.users(block, _generator_of(member.random))
            leaves = {
                name: block.parameters[name].clone().requires_grad_() for name in block.shared
            }
            loss = _promotion_loss(_target_scores(block, leaves, users))
            for name, gradient in _gradients_of(loss, leaves).items():
                steps[name].append(-rates[name] * gradient)
        return {name: torch.stack(parts) for name, parts in steps.items()}


def _promotion_loss(scores: Tensor) -> Tensor:
    """Mean cross-entropy `[]` of logits `[...]` as positives."""
    return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


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
            score = _target_scores(block, shared, (private, block.features(client))).mean()
            for name, gradient in _gradients_of(score, leaves).items():
                gradients[name].append(gradient)
        return {name: torch.stack(parts) for name, parts in gradients.items()}


# Bandwagon profiles (Kapoor et al. 2017): the targets among some popular and many random items.
#
# A tenth of the profile is drawn from the tenth of the catalogue that is most popular, the rest
# from all items, as in the comparison of FedRecAttack (Rong et al. 2022). Popularity is that known
# to the adversary (`adversary.public-share`).

_POPULAR_SHARE = 0.1


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
        size = min(int(_POPULAR_SHARE * count), len(popular))
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


_PAIRED = 50
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
        _check_model(block, name in block.parameters, products)
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
        popular = row_of[torch.from_numpy(block.known.popular(_PAIRED))]
        weights = torch.zeros(len(products))
        for rows in (targets[targets >= 0], popular[popular >= 0]):
            weights[rows] = max(1, len(rows)) ** -0.5
        return torch.outer(weights, weights).to(products)


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
# in proportion to the norms of their gradients, each of norm `_ROW_LIMIT` at most.
#
# Where this differs from the paper: embeddings are fitted again in each round, so that clients are
# stateless, from the shared initial value of honest devices. A client's other items are drawn in
# each round. The paper's clients take their parts of the gradient sequentially, until it is
# exhausted; here each of the expected number in a round takes an equal share of a row, limited in
# the same way, which has the same sum, and no client needs to know what another one sent. The item
# to be overtaken is the tenth of a user's list, for all targets; in the authors' code it is the
# tenth for the first target, the ninth for the second and so on. Rows are limited in units of
# gradients, so updates are multiplied by the learning rate.

_ITEMS = "item.factors"
_USERS = "user.factors"
_START_STD = 0.01  # of fitted embeddings around the value that devices start from
_PLACE = 10  # of the item in a user's list that a target is to overtake
_ROWS = 60  # kappa, item rows that a malicious client changes
_ROW_LIMIT = 1.0  # C, largest norm of the gradient of a row
_FIT_STEPS = 10
_FIT_RATE = 0.01  # of Adam, for the users' embeddings in a round


class FedRecAttack(UpdatePoisoning):
    """FedRecAttack: pushes the targets above the top items of approximated users' lists.

    Raises:
        ExperimentError: the model is not a matrix factorisation.
    """

    name = "fedrec-attack"
    paper = "Rong, Ye, Zhao, Yuen, Chen and He 2022"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft the row updates of each client, `[C, items, d]`."""
        private = _USERS in block.parameters and _USERS not in block.shared
        expected = "model.name = 'mf' and step.private-parameters = ['user.*']"
        _check_model(block, private and _ITEMS in block.shared, expected)
        table = block.parameters[_ITEMS].cpu()
        start = block.parameters[_USERS].cpu()
        users = self._fitted(block.known, table, start, _seed_of_round(block))
        gradient = _promotion_gradient(block.known, table, users)
        rate = _learning_rates(block)[_ITEMS]
        chosen = [self._rows(block.known, gradient, member.random) for member in block.clients]
        share = self._shares(block, gradient)
        sent = torch.zeros(len(chosen), *table.shape)
        for client, rows in enumerate(chosen):
            part = gradient[rows] * share[rows, None]
            limit = _ROW_LIMIT / part.norm(dim=1).clamp(min=1e-30)
            sent[client, rows] = -rate * part * limit.clamp(max=1.0)[:, None]
        return {_ITEMS: sent}

    def _fitted(
        self, known: Known, table: Tensor, start: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Fit embeddings of the honest users, `[honest, d]`, to their public rows by BPR; `start
        [d]` is the devices' initial value."""
        users = torch.from_numpy(known.users)
        liked = torch.from_numpy(known.public)
        drawn = _START_STD * torch.randn(known.honest, table.shape[1], generator=generator)
        embeddings = (start + drawn).requires_grad_()
        optimiser = Adam([embeddings], lr=_FIT_RATE)
        for _ in range(_FIT_STEPS if len(liked) else 0):
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
        count = min(_ROWS - len(known.targets), known.items - len(known.targets))
        drawn = random.choice(known.items, max(0, count), replace=False, p=norms / norms.sum())
        return torch.from_numpy(np.concatenate([known.targets, drawn]))

    def _shares(self, block: MaliciousBlock, gradient: Tensor) -> Tensor:
        """Reciprocal of the expected number of clients that send a row, `float32 [items]`."""
        norms = gradient.norm(dim=1) + 1e-12
        expected = block.together * (_ROWS * norms / norms.sum()).clamp(max=1.0)
        expected[torch.from_numpy(block.known.targets)] = block.together
        return 1 / expected.clamp(min=1.0)


def _promotion_gradient(known: Known, table: Tensor, users: Tensor) -> Tensor:
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

_CLUSTERS = 5
_SPREAD = 3.0
_ITERATIONS = 100


class ClusterAttack(UpdatePoisoning):
    """ClusterAttack: draws the item embeddings together into clusters.

    Raises:
        ExperimentError: the model has no table of item embeddings.
    """

    name = "cluster-attack"
    paper = "Yu et al. 2023"

    def crafted(self, block: MaliciousBlock) -> Mapping[str, Tensor]:
        """Craft the updates, `[C, ...]` by parameter."""
        tables = _embedding_tables(block)
        embedded = "a model with embeddings of items, such as privrec, mf or neumf"
        _check_model(block, bool(tables), embedded)
        generator = _seed_of_round(block)
        pulls = {name: self._pull(block.parameters[name], generator) for name in tables}
        changes = [trained.changes_of(0) for trained in block.honest]
        honest = {name: torch.stack([change[name] for change in changes]) for name in block.shared}
        for name, pull in pulls.items():
            norms = honest[name].norm(dim=2)
            drawn = [
                torch.rand(len(pull), generator=_generator_of(member.random))
                for member in block.clients
            ]
            room = _SPREAD * torch.stack(drawn).to(norms) * norms.std(1, keepdim=True)
            honest[name] = pull * (norms.mean(1, keepdim=True) + room)[:, :, None]
        return honest

    def _pull(self, table: Tensor, generator: torch.Generator) -> Tensor:
        """Unit vectors from each item to the centre of its cluster, `[items, d]`."""
        away = _centres(table, min(_CLUSTERS, len(table)), generator) - table
        return away / away.norm(dim=1, keepdim=True).clamp(min=1e-12)


def _centres(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Centre of the cluster of each point, `[n, d]`, by Lloyd's algorithm from random points."""
    host = points.cpu().numpy()
    first = torch.randperm(len(points), generator=generator)[:count].numpy()
    centres, cluster = kmeans2(host, host[first], iter=_ITERATIONS, minit="matrix")
    return torch.from_numpy(centres[cluster]).to(points)


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

_POPULAR = 10
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
        tables = _embedding_tables(block)
        fits = bool(tables) and _USERS in block.parameters
        _check_model(block, fits, "users and items in one embedding space, as in model mf")
        name = tables[0]  # the item table that is changed
        table = block.parameters[name]
        moved = (table - block.initial[name].to(table)).norm(dim=1)
        targets = torch.from_numpy(block.known.targets).to(table.device)
        moved[targets] = -1.0
        count = min(_POPULAR, len(moved) - len(targets))
        popular = moved.argsort(descending=True, stable=True)[:count]
        step = torch.zeros_like(table)
        if bool((moved[popular] > 0).any()):
            rows = table[targets].clone().requires_grad_()
            loss = _promotion_loss(table[popular] @ rows.T)
            (gradient,) = torch.autograd.grad(loss, [rows])
            step[targets] = -_learning_rates(block)[name] * gradient
        return {name: step.expand(len(block.clients), *step.shape)}


# A-hum (Rong, He and Chen 2022, section 4.3): like A-ra, but for hard users, who do not like the
# targets.
#
# A random user is made hard by steps of gradient descent on its private parameters, on the
# cross-entropy of the targets as negatives.
#
# Where this differs from the paper: of models that represent users by features alone, hard users
# are those with the lowest scores among ten times as many random ones.

_HARD_STEPS = 30
_HARD_RATE = 0.001
_CANDIDATES = 10  # random users for each hard one, where there are no private parameters


class HardUserMining(_MadeUpUsers):
    """A-hum: promotes the targets for users who do not like them."""

    name = "a-hum"
    paper = "Rong, He and Chen 2022, A-hum"

    def users(self, block: MaliciousBlock, generator: torch.Generator) -> _Users:
        """Make up hard users."""
        private = len(block.shared) < len(block.parameters)
        count = _MADE_UP if private else _CANDIDATES * _MADE_UP
        params, features = _made_up_users(block, count, generator)
        shared = {name: block.parameters[name] for name in block.shared}
        if not private:
            scores = _target_scores(block, shared, (params, features)).detach().mean(1)
            hardest = scores.argsort(stable=True)[:_MADE_UP]
            return params, tuple(codes[hardest] for codes in features)
        for _ in range(_HARD_STEPS):
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            scores = _target_scores(block, shared, (leaves, features))
            # each user is trained alone, so the loss is a sum over users
            loss = F.binary_cross_entropy_with_logits(
                scores, torch.zeros_like(scores), reduction="none"
            )
            gradients = torch.autograd.grad(loss.mean(1).sum(), list(leaves.values()))
            moved = zip(params.items(), gradients, strict=True)
            params = {name: value - _HARD_RATE * step for (name, value), step in moved}
        return params, features


# A-ra (Rong, He and Chen 2022, section 4.2): malicious clients approximate honest users by random
# ones and promote the targets for these.
#
# Where this differs from the paper: of models that represent users by features, a made-up user has
# random categories; the paper has embeddings alone.


class RandomApproximation(_MadeUpUsers):
    """A-ra: promotes the targets for random users."""

    name = "a-ra"
    paper = "Rong, He and Chen 2022, A-ra"

    def users(self, block: MaliciousBlock, generator: torch.Generator) -> _Users:
        """Make up random users."""
        return _made_up_users(block, _MADE_UP, generator)
