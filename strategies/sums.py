# SPDX-License-Identifier: Apache-2.0
"""Strategies that need only the sum of the clients' updates: they move the parameters by its mean
(FedAvg, REPTILE, FedAdam), or solve a system from it, also for new items."""

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedrec.components import registry
from fedrec.components.sections import Section, component_settings
from fedrec.config import Config, Width
from fedrec.errors import ExperimentError
from fedrec.models.linear import LEARNED, LEFT, MAP, PRODUCTS, PUBLIC, RIGHT, WEIGHTS
from fedrec.runtime.ragged import add_prefix, strip_prefix
from fedrec.sums.fold_in import LearnedConfig, MapConfig, mapped, placed_embeddings
from fedrec.sums.products import (
    BIAS,
    Solution,
    above_edge,
    chosen_items,
    is_semi_definite,
    item_scale,
    noise_edge,
    semi_definite,
    solved_weights,
    transition_weights,
    unpacked,
)
from strategies.base import Aggregate, Cohorts, CohortStrategy, ServerRate

# FedAvg (McMahan et al. 2017): the mean of the clients' parameters, weighted by their numbers of
# examples.
#
# theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k


class FedAvg(CohortStrategy):
    """FedAvg: averages the clients' parameters, weighted by examples."""

    name = "fedavg"
    paper = "FedAvg (McMahan et al. 2017), algorithm 1"
    weighting = "examples"

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client. A cohort without any example changes nothing."""
        if aggregate.weight == 0:
            return theta
        return aggregate.added_to(theta, 1 / aggregate.weight)


# REPTILE as a federated strategy (PrivRec section 2.2.2, equation 6; Nichol et al. 2018).
#
#     theta <- theta + alpha2 * (1 / M) * sum_tau (theta_tau - theta)
#
# Every client counts the same, however much data it has. M is the number of clients that answered.
#
# Where this differs from the paper: alpha2 may fall linearly to zero, as in the experiments of
# Nichol et al.; in the paper it is constant, and its value is not given.


class ReptileConfig(ServerRate):
    """Settings of REPTILE."""

    server_lr: float = Field(default=1.0, gt=0)
    """Step of the shared parameters towards the mean of the clients' (alpha2 in PrivRec)."""


class Reptile(CohortStrategy):
    """REPTILE: moves the initialisation towards the mean of the locally trained parameters."""

    name = "reptile"
    Config = ReptileConfig
    paper = "PrivRec (Wang et al. 2021), eq. 6"
    config: ReptileConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client."""
        return aggregate.added_to(theta, self.config.rate(aggregate.round) / aggregate.clients)


# FedAdam (Reddi et al. 2021, Adaptive Federated Optimization, algorithm 2) over cohorts of clients.
#
#     D     <- mean over the cohort of (theta_k - theta)
#     m     <- b1 m + (1 - b1) D
#     v     <- b2 v + (1 - b2) D^2
#     theta <- theta + server-lr * m / (sqrt(v) + tau)
#
# Flower's own FedAdam averages nodes; this one samples clients, and may run under differential
# privacy, because it uses only the mean.
#
# Where this differs from the paper: eta may fall linearly to zero (`anneal-rounds`), and m and v
# are divided by 1 - b^t as in Adam (Kingma and Ba 2015), where algorithm 2 starts v at tau^2 and
# corrects nothing. With one local step of gradient descent, this is then Adam on the cohort as
# batch, but for tau, which counts in units of the local step size.

_TAU = 1e-8


class _Moments:
    """Moments of the gradients of named parameters, float64, as Adam divides them (Kingma and Ba
    2015).

    Args:
        betas: decay rates b1 and b2 of the first and the second moment.
    """

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.betas = betas
        self._first: dict[str, np.ndarray] = {}
        self._second: dict[str, np.ndarray] = {}
        self._steps = 0

    def steps(self, gradients: Mapping[str, np.ndarray], rate: float) -> dict[str, np.ndarray]:
        """Add gradients, and return Adam's step along each at a learning rate."""
        self._steps += 1
        whole = [1 - beta**self._steps for beta in self.betas]
        steps = {}
        for name, gradient in gradients.items():
            first = self._first.setdefault(name, np.zeros(gradient.shape))
            second = self._second.setdefault(name, np.zeros(gradient.shape))
            first += (1 - self.betas[0]) * (gradient - first)
            second += (1 - self.betas[1]) * (np.square(gradient) - second)
            steps[name] = rate * (first / whole[0]) / (np.sqrt(second / whole[1]) + _TAU)
        return steps

    def state(self) -> dict[str, np.ndarray]:
        """Return both moments and the number of steps."""
        moments = add_prefix({"first/": self._first, "second/": self._second})
        return {**moments, "steps": np.array(self._steps)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._steps = int(state["steps"])
        self._first = {name: v.copy() for name, v in strip_prefix("first/", state).items()}
        self._second = {name: v.copy() for name, v in strip_prefix("second/", state).items()}


class FedAdamConfig(ServerRate):
    """Settings of FedAdam."""

    server_lr: float = Field(default=0.001, gt=0)
    """Server learning rate (eta)."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Weight of a client in the mean update: uniform, which differential privacy requires, or its
    number of examples, which makes a cohort's examples one batch."""


class FedAdam(CohortStrategy):
    """FedAdam: Adam on the server, with the mean update of the cohort in place of a gradient."""

    name = "fed-adam"
    Config = FedAdamConfig
    paper = "Adaptive Federated Optimization (Reddi et al. 2021), algorithm 2"
    config: FedAdamConfig

    def __init__(self, config: FedAdamConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self.weighting = config.weighting
        self._moments = _Moments()
        self.memories = {"": self._moments}

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client. A cohort without any example, by which it is weighted, changes nothing."""
        divisor = aggregate.clients if self.weighting == "uniform" else aggregate.weight
        if not divisor:
            return theta
        means = {name: total / divisor for name, total in aggregate.total().items()}
        steps = self._moments.steps(means, self.config.rate(aggregate.round))
        return {name: theta[name] + step for name, step in steps.items()}


# Strategies that compute a model from the sum of the clients' products of items (steps `gram` and
# `transitions`).
#
# A client's products of its own items with themselves are positive semi-definite, and so is a sum
# of them. Without noise, any other sum contains something that no honest client sends, for which
# EASE has no solution, or one of any size. The nearest positive semi-definite matrix replaces it,
# with a warning.
#
# The server needs only the sum, so secure aggregation can hide every client's products, and a
# single Gaussian release makes the model private. Cohorts of several rounds are added up and scaled
# to the whole population.

_LOG = logging.getLogger("fedrec")


@dataclass(frozen=True, eq=False)
class Products:
    """Sum of all clients' products, with noise if the run is private.

    Attributes:
        gram: sum for m scaled items, `float64 [m, m]`; symmetric if the products are, and then
            positive semi-definite unless there is noise.
        chosen: items of its rows, `int64 [m]`, ascending.
        scale: factor of each item, > 0, `float64 [m]`.
        edge: largest singular value of its noise alone; 0 without noise.
    """

    gram: Tensor
    chosen: Tensor
    scale: Tensor
    edge: float


class ProductsStrategy(CohortStrategy):
    """Base of strategies that compute parameters from the sum of the clients' products.

    Attributes:
        products: name of the parameter whose change carries the products.
        model: name of the model.
        sender: name of the step that sends them.
        symmetric: whether the products are symmetric.
    """

    products: ClassVar[str]
    model: ClassVar[str]
    sender: ClassVar[str] = "gram"
    symmetric: ClassVar[bool] = True

    def __init__(self, config: Config, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._total = np.zeros((0, 0))
        self._clients = 0.0
        self._variance = 0.0

    @abstractmethod
    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Compute parameters from the sum of the products, by name; the others stay.

        Args:
            theta: the current global parameters, unchanged.
            products: the sum of all rounds so far.
        """

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client."""
        products = aggregate.total()[self.products]
        self._total = products + self._total if self._total.size else products
        self._clients += aggregate.clients
        if self.privacy is not None:
            self._variance += (self.privacy.plan.mean_noise_std * aggregate.clients) ** 2
        return {**theta, **self.solved(theta, self._scaled(theta.get(BIAS)))}

    def check_parameters(self, theta: Mapping[str, np.ndarray]) -> None:
        """Check that the model is computed from products of items."""
        if self.products not in theta:
            raise ExperimentError(
                f"the model has no products of items {self.products!r}",
                expected=f"model.name = {self.model!r} and step.name = {self.sender!r}",
                got=", ".join(theta),
                fix="set both, or another strategy",
            )

    def state(self) -> dict[str, np.ndarray]:
        """Return the sum so far, its number of clients, and the variance of its noise."""
        numbers = np.array([self._clients, self._variance])
        return {"total": self._total, "numbers": numbers}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._total = np.asarray(state["total"], dtype=np.float64)
        self._clients, self._variance = (float(number) for number in state["numbers"])

    def _scaled(self, bias: np.ndarray | None) -> Products:
        """Scale the sum so far to all clients, and make noise symmetric. Without biases all items
        are chosen and count alike."""
        factor = len(self.cohorts.clients) / max(self._clients, 1.0)
        total = (self._total + self._total.T) / 2 if self.symmetric else self._total
        gram = torch.from_numpy(total * factor)
        biases = torch.zeros(len(gram)) if bias is None else torch.from_numpy(np.array(bias[:, 0]))
        chosen = chosen_items(biases, len(gram))
        # a step without that setting counts all items alike
        step = component_settings(registry.STEP, Section(**self.step))
        scale = item_scale(biases[chosen], getattr(step, "exponent", 0.0))
        edge = noise_edge(factor * math.sqrt(self._variance), len(gram))
        edge *= 1.0 if self.symmetric else math.sqrt(2)  # noise of a half is in both halves
        if self.symmetric and edge == 0:
            gram = _honest(gram)
        return Products(gram, chosen, scale, edge)


def _honest(gram: Tensor) -> Tensor:
    """Project a symmetric sum `float64 [m, m]` to the nearest positive semi-definite matrix."""
    if is_semi_definite(gram):
        return gram
    _LOG.warning(
        "The sum of the clients' products is not positive semi-definite, as it would be for any"
        " histories: a client sent something else. The nearest positive semi-definite matrix"
        " replaces it."
    )
    return semi_definite(gram)


# A linear item-to-item model from the sum of the clients' products: EASE or PureSVD in one round.
#
#     B_ij = -P_ij / P_jj,    P = (G + lambda I)^-1,    G = sum over clients of (D x)(D x)^T
#
# (Steck 2019, equation 8). With every client in the round and no noise the weights are those of the
# centralised EASE or PureSVD.
#
#     [strategy]
#     name = "popularity-start"
#     main = { name = "gram" }
#
# counts the items first. The most popular items then have weights and the others follow in the
# order of their popularity, which is necessary for catalogues of more than the model's `items`.
#
# Where this differs from the papers: they solve it centrally. Under noise the eigenvalues below the
# noise edge are cut first, and lambda grows with it (`fedrec.sums.products`).


class GramStrategyConfig(Config):
    """Settings of the linear model."""

    solution: Solution = "ease"
    """`ease`, or `puresvd`, which keeps the leading eigenvectors and is more robust to noise."""
    regularisation: float = Field(default=300.0, gt=0)
    """Regularisation lambda of `ease`, > 0; about 100 to 1000."""
    factors: Width = 12
    """Largest number of eigenvectors of `puresvd`; those below the noise edge are dropped in any
    case."""


class GramStrategy(ProductsStrategy):
    """EASE or PureSVD: sums the products and solves for the weights."""

    name = "gram"
    Config = GramStrategyConfig
    paper = "EASE (Steck 2019), equation 8"
    products = WEIGHTS
    model = "item-weights"
    config: GramStrategyConfig

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Compute the weights, unscaled, `float32 [items, items]` of the chosen items."""
        config = self.config
        scale = products.scale
        weights = solved_weights(
            products.gram,
            products.edge,
            solution=config.solution,
            factors=config.factors,
            regularisation=config.regularisation,
            ridge=1.0,
        )
        return {WEIGHTS: (scale[:, None] * weights / scale).float().numpy()}


# A model of transitions between items from the sum of the clients' own, in one round
# (`fedrec.sums.products`).
#
# With every client in the round and no noise the weights are those of the centralised
# `transitions`. With `popularity-start` the most popular items have weights:
#
#     [strategy]
#     name = "popularity-start"
#     main = { name = "transitions" }
#
# Under noise the sum is a matrix of low rank plus noise: singular values below the noise edge are
# cut and the others shrunk (Gavish and Donoho 2017, square matrices, Frobenius norm), and then the
# scale of the items is taken out.


class TransitionsStrategyConfig(Config):
    """Settings of the transition weights."""

    factors: Width = 12
    """Largest number of singular vectors under noise; those below the noise edge are dropped in any
    case."""


class TransitionsStrategy(ProductsStrategy):
    """Markov chain: sums the transitions and normalises them."""

    name = "transitions"
    Config = TransitionsStrategyConfig
    paper = "a smoothed Markov chain; FPMC (Rendle et al. 2010) without factors"
    products = WEIGHTS
    model = "transitions"
    sender = "transitions"
    symmetric = False
    config: TransitionsStrategyConfig

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Compute the weights, `float32 [items, items]` of the chosen items."""
        total = _denoised(products.gram, products.edge, self.config.factors)
        total = total / products.scale[:, None] / products.scale
        return {WEIGHTS: transition_weights(total).float().numpy()}


def _denoised(total: Tensor, edge: float, limit: int) -> Tensor:
    """Remove noise from a matrix; without noise it stays unchanged."""
    if edge == 0:
        return total
    left, values, right = torch.linalg.svd(total, full_matrices=False)
    shrunk = (values.square() - edge**2).clamp(min=0).sqrt()[:limit]
    return (left[:, :limit] * shrunk) @ right[:limit]


# Federated collaborative filtering (Ammad-ud-din et al. 2019, equations 7 to 10): the server's step
# on the items.
#
# Clients run the step `als` on the model `ials`. With N training clients and means over the cohort,
#
#     g_i   = 2 N mean(user.gram) y_i - 2 N mean(item.right)_i + 2 lambda y_i
#     y_i  <- Adam(y_i, g_i)
#
# g_i is the gradient of the loss of implicit matrix factorization with respect to y_i, at the
# users' factors that were solved for.
#
# Where this differs from the paper: g_i is computed from the users' second moments and the rows of
# the items that they like, which gives the same sum as one gradient per user and item; the sums of
# a cohort are scaled up to all clients, so that lambda keeps its meaning.

FACTORS = "item.factors"
GRAM = "user.gram"
RIGHT_PRODUCTS = "item.right"
MOMENTS = "item.moments"


class FcfConfig(ServerRate):
    """Settings of the server's Adam."""

    server_lr: float = Field(default=0.05, gt=0)
    """Step size of Adam."""
    regularisation: float = Field(default=10.0, ge=0)
    """Regularisation lambda of the items' factors."""


class Fcf(CohortStrategy):
    """FCF: Adam on the items' factors, with the gradient computed from the clients' sums."""

    name = "fcf"
    Config = FcfConfig
    paper = "FCF (Ammad-ud-din et al. 2019), eq. 7-10"
    config: FcfConfig

    def __init__(self, config: FcfConfig, cohorts: Cohorts, step: dict[str, Any]) -> None:
        super().__init__(config, cohorts, step)
        self._moments = _Moments((0.1, 0.99))
        self.memories = {"": self._moments}

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client.

        Raises:
            ExperimentError: the model has no such parameters, or its clients send moments.
        """
        _check_model(theta, moments=False)
        factors = theta[FACTORS].astype(np.float64)
        gradient = self.gradient(factors, summed(aggregate, len(self.cohorts.clients)))
        steps = self._moments.steps({FACTORS: gradient}, self.config.rate(aggregate.round))
        return with_factors(theta, factors - steps[FACTORS])

    def gradient(self, factors: np.ndarray, sums: dict[str, np.ndarray]) -> np.ndarray:
        """Gradient of the loss with respect to the items' factors, `float64 [items, d]`."""
        gram = (sums[GRAM] + sums[GRAM].T) / 2  # noise is not symmetric
        return 2 * (factors @ gram - sums[RIGHT_PRODUCTS] + self.config.regularisation * factors)


def summed(aggregate: Aggregate, everybody: int) -> dict[str, np.ndarray]:
    """Scale the cohort's sums up to all clients, float64."""
    scale = everybody / aggregate.clients
    total = aggregate.total()
    # moments of a large catalogue are not copied if all clients took part
    return total if scale == 1 else {name: scale * value for name, value in total.items()}


def with_factors(theta: dict[str, np.ndarray], factors: np.ndarray) -> dict[str, np.ndarray]:
    """Set new item factors `[items, d]` and their Gram matrix; the clients' sums stay zero."""
    return {**theta, FACTORS: factors, "item.gram": factors.T @ factors}


def _check_model(theta: dict[str, np.ndarray], *, moments: bool) -> None:
    """Check that the model is implicit matrix factorization.

    Raises:
        ExperimentError: it is another model, or clients do not send the needed sums.
    """
    needed = {FACTORS, GRAM, RIGHT_PRODUCTS, "item.gram"}
    flag = str(moments).lower()
    if needed - set(theta) or (MOMENTS in theta) != moments:
        raise ExperimentError(
            "the items' factors cannot be computed from the updates of these clients",
            got=f"a model with {', '.join(theta)}",
            fix=f"set model.name = 'ials', model.moments = {flag} and step.name = 'als'",
        )


# Alternating least squares in rounds: clients solve for users, the server for items (Chien et al.
# 2021).
#
# Clients run the step `als` on the model `ials` with `moments = true`. With sums over all clients,
#
#     y_i = (user.gram + (c - 1) item.moments_i + lambda I)^-1 c item.right_i
#
# One round with all clients is one sweep of implicit ALS (Hu et al. 2008): the baseline `ials` from
# the same initial factors. The sums of a smaller cohort are scaled up to all clients.
#
# Under differential privacy the sums are noisy; matrices are then projected onto the positive
# semi-definite ones before they are solved with, which is post-processing. Where this differs from
# the paper: a user's whole message has one clip norm, where the paper clips x_u and weights each of
# a user's items.

_NUMBERS_AT_ONCE = 250_000  # numbers in the items' matrices that are solved at once, in the cache


class FedAlsConfig(Config):
    """Settings of alternating least squares; `weight` must be that of the step."""

    weight: float = Field(default=8.0, ge=1)
    """Weight c of a liked item; that of all others is 1."""
    regularisation: float = Field(default=10.0, gt=0)
    """Regularisation lambda of the items' factors."""


class FedAls(CohortStrategy):
    """Alternating least squares: solves for the items' factors exactly in every round."""

    name = "fed-als"
    Config = FedAlsConfig
    paper = "DP-ALS (Chien et al. 2021); Hu et al. 2008"
    config: FedAlsConfig

    def apply(self, theta: dict[str, np.ndarray], aggregate: Aggregate) -> dict[str, np.ndarray]:
        """Compute the next global parameters from the current ones and a round's aggregate with at
        least one client.

        Raises:
            ExperimentError: the model has no such parameters, or its clients send no moments.
        """
        _check_model(theta, moments=True)
        sums = {
            name: torch.from_numpy(value)
            for name, value in summed(aggregate, len(self.cohorts.clients)).items()
        }
        noisy = self.privacy is not None
        gram = (sums[GRAM] + sums[GRAM].T) / 2
        if noisy:
            gram = semi_definite(gram)
        width = len(gram)
        at_once = max(1, _NUMBERS_AT_ONCE // width**2)
        solved = []
        for start in range(0, len(sums[RIGHT_PRODUCTS]), at_once):
            part = slice(start, start + at_once)
            moments = unpacked(sums[MOMENTS][part])
            if noisy:
                moments = semi_definite(moments)
            matrix = moments.mul_(self.config.weight - 1).add_(gram)
            matrix.diagonal(dim1=1, dim2=2).add_(self.config.regularisation)
            right = self.config.weight * sums[RIGHT_PRODUCTS][part].unsqueeze(-1)
            solved.append(torch.cholesky_solve(right, torch.linalg.cholesky(matrix)).squeeze(-1))
        return with_factors(theta, torch.cat(solved).numpy())


# Item embeddings from the sum of the clients' products, public features and popularity, to which
# each device fits its user's taste (model `fold-in`).
#
#     [strategy]
#     name = "popularity-start"
#     step = { name = "counts", low-rated = 0.3 }
#     estimate = "posterior-mean"
#     main = { name = "fold-in" }
#
# Two rounds, in which every client uploads once each: its counts, which choose the items of the
# second round and tell how popular all are, and its products of those items (step `gram`). The
# server needs the sums alone. It takes what popularity and public features explain from the sum of
# the products; the leading eigenvectors of the rest are further coordinates of the items
# (`fedrec.sums.fold_in`). Under noise those below the noise edge are left out. That is
# post-processing and costs no privacy, and neither do tastes, which never leave the devices.
#
# With every client in both rounds this is the centralised baseline `dp-fold-in`.


class FoldInStrategyConfig(LearnedConfig):
    """Settings of the learned coordinates; their largest number is the model's `factors`."""


class FoldInStrategy(ProductsStrategy):
    """Fold-in: sums the products and computes the items' learned coordinates."""

    name = "fold-in"
    Config = FoldInStrategyConfig
    paper = "fold-in of iALS (Hu et al. 2008) and EASE's Gram matrix (Steck 2019), from one release"
    products = PRODUCTS
    model = "fold-in"
    config: FoldInStrategyConfig

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Compute the learned coordinates of all items, `float32 [items, factors]`."""
        shares = torch.softmax(torch.from_numpy(theta[BIAS][:, 0].astype(np.float64)), 0)
        learned = placed_embeddings(
            products.gram,
            products.chosen,
            products.scale,
            shares,
            torch.from_numpy(theta[PUBLIC].astype(np.float64)),
            self.config,
            edge=products.edge,
            factors=theta[LEARNED].shape[1],
        )
        return {LEARNED: learned.float().numpy()}


# A linear model with a map from items' content to its factors, from one sum of the clients'
# products.
#
#     [strategy]
#     name = "popularity-start"
#     main = { name = "content-map" }
#
# Two rounds, in which every client uploads once each: its counts, which choose the items of the
# second round, and its products of those items (step `gram`): the sum that strategies `gram` and
# `fold-in` release, so that the guarantee is theirs. Factors and map are post-processing of it and
# of public columns (`fedrec.sums.fold_in`). Under noise eigenvalues below the noise edge are left
# out, and items that were not chosen have factors by their content, as new ones do.
#
# With every client in both rounds, all items chosen and no noise this is the centralised baseline
# `content-map`.


class ContentMapStrategyConfig(MapConfig):
    """Settings of the model and of the map; the number of factors is the model's."""

    solution: Solution = "puresvd"
    """The model of the chosen items: `puresvd`, or `ease`, which needs as many factors in the model
    as there are chosen items."""
    regularisation: float = Field(default=500.0, gt=0)
    """Lambda of `ease`, > 0."""


class ContentMapStrategy(ProductsStrategy):
    """Sums the products, and solves for factors and for the map from content to them."""

    name = "content-map"
    Config = ContentMapStrategyConfig
    paper = "attribute-to-feature mappings (Gantner et al. 2010), from one release"
    products = PRODUCTS
    model = "content-map"
    config: ContentMapStrategyConfig

    def check_parameters(self, theta: Mapping[str, np.ndarray]) -> None:
        """Refuse a model without such factors, or with too few of them."""
        super().check_parameters(theta)
        wide = self.config.solution == "ease"
        if MAP not in theta or (wide and theta[LEFT].shape[1] < len(theta[PRODUCTS])):
            raise ExperimentError(
                "the model has no factors that the strategy 'content-map' could compute",
                got=", ".join(f"{name} {list(value.shape)}" for name, value in theta.items()),
                fix="set model.name = 'content-map', for 'ease' with as many factors as items",
            )

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """Factors of all items, `float32 [items, factors]`, and the map."""
        width = theta[LEFT].shape[1]
        # an item's own product is the number of its users, under noise of this deviation
        std = products.edge / (2 * len(products.gram)) ** 0.5
        used = products.gram.diagonal() > std
        scale = products.scale[:, None]
        left, right = self._factors(products, width)
        left, right, weights = mapped(
            scale * left,
            right / scale,
            products.chosen,
            used,
            torch.from_numpy(theta[PUBLIC]),
            self.config.map_regularisation,
        )
        values = {LEFT: left, RIGHT: right, MAP: weights}
        return {name: _padded(value, width).numpy() for name, value in values.items()}

    def _factors(self, products: Products, width: int) -> tuple[Tensor, Tensor]:
        """L and R of the chosen items in their scale, `float64 [m, factors]`."""
        if self.config.solution == "puresvd":
            vectors = above_edge(products.gram, products.edge, width)[1]
            return vectors, vectors
        weights = solved_weights(
            products.gram,
            products.edge,
            solution="ease",
            factors=0,
            regularisation=self.config.regularisation,
            ridge=1.0,
        )
        return torch.eye(len(weights), dtype=weights.dtype), weights.T


def _padded(values: Tensor, width: int) -> Tensor:
    """`float32 [n, width]`, zeros behind the columns `[n, fewer]`."""
    return F.pad(values, (0, width - values.shape[1])).float()
