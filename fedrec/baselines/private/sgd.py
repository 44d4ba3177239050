# SPDX-License-Identifier: Apache-2.0
"""Private systems trained centrally by DP-SGD on users: the denoising autoencoder and matrix
factorization."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.private.ranking import (
    PrivateBaseline,
    PrivateConfig,
    ReleaseKind,
    clip_factors,
)
from fedrec.config import Width
from fedrec.device import one_thread
from fedrec.models.vae import Ae, AeConfig
from fedrec.nn.layers import Adam
from fedrec.privacy.clipping import Clip
from fedrec.privacy.optimal_clip import noise_decides, optimal_clip
from fedrec.rng import stream, torch_stream

# Gradients of users that are outer products: their norms and clipped sums, without materialising
# the gradients.
#
# A user who enters an affine layer once, as one row x, has the gradient x^T g with respect to its
# weights, where g is the gradient with respect to its result (Goodfellow 2015). So |x^T g| = |x|
# |g|, in the L2 as in the L1 norm, and a sum over users with a factor each is one product of
# matrices.


@dataclass(frozen=True, eq=False)
class _OuterGradients:
    """Gradients of some users.

    Attributes:
        pairs: by parameter, `[users, a]` and `[users, b]`; a user's gradient is the outer product
            of its two rows. Where b is 1, the parameter has one axis.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def norms(self) -> Tensor:
        """L2 norm of each user's gradient over all parameters, `float64 [users]`."""
        squares = [
            left.double().square().sum(1) * right.double().square().sum(1)
            for left, right in self.pairs.values()
        ]
        return torch.stack(squares).sum(0).sqrt()

    @property
    def coordinates(self) -> int:
        """Number of coordinates of a gradient."""
        return sum(left.shape[1] * right.shape[1] for left, right in self.pairs.values())

    def dense(self) -> Tensor:
        """Gradients as dense rows, `[users, coordinates]`."""
        products = [
            torch.einsum("ua,ub->uab", left, right).flatten(1)
            for left, right in self.pairs.values()
        ]
        return torch.cat(products, dim=1)

    def clipped_sum(self, bound: float) -> dict[str, Tensor]:
        """Sum of the users' gradients, each clipped to a norm over all parameters, `float32` by
        parameter; users whose gradients are not finite are left out."""
        factors = clip_factors(Clip(bound), self.norms())
        total = {}
        for name, (left, right) in self.pairs.items():
            # A failed user has factor 0; NaN times 0 would be NaN.
            valid = (factors > 0)[:, None]
            scaled = torch.where(valid, right * factors[:, None], 0.0).to(left.dtype)
            product = (torch.where(valid, left, 0.0).T @ scaled).float()
            total[name] = product[:, 0] if right.shape[1] == 1 else product
        return total


# Private systems trained by DP-SGD on users: draw users, clip each user's gradient, add noise to
# the sum, take a step.
#
# In every step some users are drawn, each user's gradient is clipped to norm S over all parameters
# together, the sum gets Gaussian noise once, and Adam moves the parameters (Abadi et al. 2016 with
# users for examples, as McMahan et al. 2018). Cohorts are of fixed size under replace-one and
# Poisson under add-remove, for which amplification is proven. Gradients have signs, so replace-one
# costs 2 S.
#
# With `clip = "optimal"` S is the clip norm of DP-VAE's algorithm 2 ("DP-O" in its table 11),
# sought in every step among the norms of the cohort's gradients. It is computed from private
# gradients and can be inferred from the noise, so such a system is charged as not private.

_KIND = "gradients"
_WHY = "the clip norm of each step is chosen by algorithm 2 from private gradients"


class _DpSgdBaselineConfig(PrivateConfig):
    """Settings of systems that are trained by DP-SGD on users."""

    steps: int = Field(default=100, ge=1)
    """Gradient steps, each of which is a release."""
    cohort: int = Field(default=500, ge=1)
    """Users per step (expected number under add-remove); at most all."""
    clip: Literal["constant", "optimal"] = "constant"
    """`constant`: S is `clip-norm`; `optimal`: DP-VAE's algorithm 2, with infinite epsilon."""
    clip_norm: float = Field(default=1.0, ge=1e-9)
    """S, bound on the L2 norm of a user's gradient."""
    learning_rate: float = Field(default=0.003, gt=0)
    """Learning rate of Adam."""

    @model_validator(mode="after")
    def _noise_to_choose_by(self) -> Self:
        if self.clip == "optimal" and not self.noise:
            raise ValueError(
                "clip = 'optimal' requires noise = true, because it balances clipping and noise"
            )
        return self


class _DpSgdBaseline(PrivateBaseline):
    """DP-SGD on users: noisy sums of clipped gradients; a subclass defines the model."""

    config: _DpSgdBaselineConfig

    def parts(self) -> tuple[ReleaseKind, ...]:
        """Releases: one sum of gradients per step."""
        unfounded = _WHY if self.config.clip == "optimal" else ""
        config = self.config
        return (ReleaseKind(_KIND, config.clip_norm, releases=config.steps, unfounded=unfounded),)

    def sampler(self, users: int) -> tuple[str, dict[str, float]]:
        """Sampler of a release's users and its settings, for a number of users; all by default."""
        name = "fixed-size" if self.config.adjacency == "replace-one" else "poisson"
        return name, {"cohort": min(self.config.cohort, users)}

    @abstractmethod
    def start(self, histories: Histories, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise the parameters on the device."""

    @abstractmethod
    def gradients(
        self, parameters: dict[str, Tensor], rows: Tensor, generator: torch.Generator
    ) -> _OuterGradients:
        """Gradients of the users' losses.

        Args:
            parameters: parameters before the step.
            rows: binary `float32 [users, items]`.
            generator: of dropout, on the CPU.
        """

    @one_thread()
    def fit(self, histories: Histories) -> None:
        """Train from fresh parameters, on a processor with one thread."""
        config = self.config
        generator = torch_stream(self.config.own_seed, f"baseline-{self.name}")
        releases = self.releases(histories.num_users)
        self._parameters = self.start(histories, generator)
        adam = Adam(self._parameters.values(), lr=config.learning_rate)
        plan = releases.plans[_KIND]
        for step in range(config.steps):
            cohort = self._cohort(histories.num_users, step)
            rows = histories.take(cohort).matrix().to(self.device)
            gradients = self.gradients(self._parameters, rows, generator)
            bound = config.clip_norm
            if config.clip == "optimal":
                noise_multiplier = plan.noise_scale / plan.clip_norm / plan.denominator
                bound = _chosen_clip(gradients, noise_multiplier) or bound
            total = gradients.clipped_sum(bound)
            flat = torch.cat([total[name].flatten() for name in self._parameters]).cpu().numpy()
            noisy = releases.release(_KIND, flat, clip_norm=bound) / np.float32(plan.denominator)
            sizes = [value.numel() for value in self._parameters.values()]
            pieces = torch.from_numpy(noisy).to(self.device).split(sizes)
            for value, piece in zip(self._parameters.values(), pieces, strict=True):
                value.grad = piece.view_as(value)
            adam.step()
        self._parameters = {name: value.detach() for name, value in self._parameters.items()}

    def _cohort(self, users: int, step: int) -> np.ndarray:
        name, settings = self.sampler(users)
        cohort = int(settings["cohort"])
        random = stream(self.config.own_seed, f"baseline-{self.name}/cohort", step)
        if name == "fixed-size":
            return np.sort(random.choice(users, cohort, replace=False))
        return np.flatnonzero(random.random(users) < cohort / users)


def _chosen_clip(gradients: _OuterGradients, noise_multiplier: float) -> float:
    """Clip norm of algorithm 2 for the users' gradients; 0 if all are zero.

    Args:
        gradients: gradients of a cohort. Users with a zero or non-finite gradient are ignored,
            because a bound of 0 would stop training.
        noise_multiplier: standard deviation of the noise in the mean of the cohort, over S.
    """
    norms = gradients.norms()
    valid = torch.isfinite(norms) & (norms > 0)
    if not bool(valid.any()):
        return 0.0
    if noise_decides(noise_multiplier, gradients.coordinates):
        return float(norms[valid].min())
    pairs = {name: (left[valid], right[valid]) for name, (left, right) in gradients.pairs.items()}
    return optimal_clip(_OuterGradients(pairs).dense(), noise_multiplier)


# A denoising autoencoder trained centrally by DP-SGD on users (DPAE of Fang et al. 2022, tables 8
# and 11).
#
# A user's loss is the multinomial one over its whole history. The user enters every affine layer
# once, as one row x, so its gradient is an outer product x^T g, and no user's gradient needs to be
# materialised (Goodfellow 2015).
#
# Where this differs from the paper: Fang et al. give every user an epsilon of its own and noise of
# its own for one upload (`clients/steps/vae.py` with model `ae` does that, with the paper's clip
# norm from private gradients as an option); here one epsilon is for all steps and holds for all
# data of a user. Adam instead of plain gradient descent.


class DpAeConfig(_DpSgdBaselineConfig, AeConfig):
    """Settings of the private autoencoder."""


class DpAe(_DpSgdBaseline):
    """Denoising autoencoder trained by DP-SGD on users."""

    name = "dpae"
    Config = DpAeConfig
    paper = "DP-VAE (Fang et al. 2022), tables 8 and 11, DPAE"
    config: DpAeConfig

    def start(self, histories: Histories, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise the parameters on the device."""
        self._model = Ae(self.config, histories.schema())
        fresh = self._model.initial(generator)
        return {name: value.to(self.device) for name, value in fresh.items()}

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the items, `float32 [users, items]`."""
        parameters = {name: value.unsqueeze(0) for name, value in self._parameters.items()}
        return self._model.history_scores(
            parameters, histories.matrix().to(self.device).unsqueeze(0)
        )[0]

    def gradients(
        self, parameters: dict[str, Tensor], rows: Tensor, generator: torch.Generator
    ) -> _OuterGradients:
        """Gradients of the losses of some users, given by `rows`, `float32 [users, items]`."""
        draw = self._model.draw((1, len(rows)), generator).to(self.device)
        inputs = {}
        outputs = {}

        def record(name: str, entering: Tensor, leaving: Tensor) -> Tensor:
            inputs[name] = entering.detach()[0]
            outputs[name] = leaving
            return leaving

        leaves = {
            name: value.detach().unsqueeze(0).requires_grad_() for name, value in parameters.items()
        }
        log_chances, _ = self._model.parts(leaves, rows.unsqueeze(0), draw, tap=record)
        loss = -(log_chances[0] * rows).sum()
        slopes = torch.autograd.grad(loss, list(outputs.values()))
        pairs = {}
        ones = rows.new_ones(len(rows), 1)
        for name, (gradient,) in zip(outputs, slopes, strict=True):
            pairs[f"{name}.weight"] = (inputs[name], gradient)
            pairs[f"{name}.bias"] = (gradient, ones)
        return _OuterGradients(pairs)


# Matrix factorization trained centrally by DP-SGD on users: "SVD" and "MF" with DP and DP-O in
# DP-VAE's table 11.
#
#     r_ui = c_u + b_i + x_u . y_i
#
# is fitted to the binary matrix of liked pairs. The items' factors and biases are released; in
# every step each user who is drawn is solved for, (x_u, c_u) being the ridge regression of its row
# on them, and sends the gradient of its squared error
#
#     -2 e_u (x_u, 1)^T,    e_u = r_u - c_u - b - Y x_u,
#
# which is one outer product, clipped to norm S. A user's solution is never released. Without biases
# this is "MF".
#
# Where this differs from the paper: Fang et al. (2022) give every user an epsilon and noise of its
# own for one upload (`clients/steps/dpsgd.py` does that); here one epsilon is for all steps and
# holds for all data of a user. For SVD and MF it states only rank 100 and gradient descent; "SVD"
# in toolkits is a model of ratings, which ranks unrated items poorly; here both model likes. Users
# are solved for in closed form, and Adam updates the items.

_INIT_STD = 0.1  # of the factors of items


class DpSvdConfig(_DpSgdBaselineConfig):
    """Settings of matrix factorization by DP-SGD."""

    factors: Width = 100
    """Width of x_u and y_i (the paper's rank)."""
    biases: bool = True
    """Whether items and users have biases."""
    user_regularisation: float = Field(default=10.0, gt=0)
    """Regularisation of x_u in the users' ridge regressions."""


class DpSvd(_DpSgdBaseline):
    """Item factors trained by DP-SGD on users."""

    name = "dp-svd"
    Config = DpSvdConfig
    paper = "DP-VAE (Fang et al. 2022), table 11, SVD and MF"
    config: DpSvdConfig

    def start(self, histories: Histories, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise the parameters on the device."""
        shape = histories.num_items, self.config.factors
        parameters = {"items": torch.randn(*shape, generator=generator) * _INIT_STD}
        if self.config.biases:
            parameters["biases"] = torch.zeros(shape[0])
        return {name: value.to(self.device) for name, value in parameters.items()}

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Predictions from newly solved user factors, `float32 [users, items]`."""
        return self._predicted(self._parameters, histories.matrix().to(self.device))[1]

    @torch.no_grad()
    def gradients(
        self, parameters: dict[str, Tensor], rows: Tensor, generator: torch.Generator
    ) -> _OuterGradients:
        """Gradients of the losses of users, given by `rows`, `float32 [users, items]`; without
        dropout."""
        users, predicted = self._predicted(parameters, rows)
        slopes = 2 * (predicted - rows)
        pairs = {"items": (slopes, users)}
        if self.config.biases:
            pairs["biases"] = slopes, rows.new_ones(len(rows), 1)
        return _OuterGradients(pairs)

    def _predicted(self, parameters: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """User factors x_u `[users, factors]` and predictions `[users, items]` from users' rows."""
        items = columns = parameters["items"]
        biases = parameters.get("biases", items.new_zeros(len(items)))
        if self.config.biases:
            # the user's bias is one more factor
            columns = torch.cat([items, items.new_ones(len(items), 1)], dim=1)
        gram = (columns.T @ columns).double()
        gram.diagonal()[: items.shape[1]] += self.config.user_regularisation
        solved = torch.linalg.solve(gram, ((rows - biases) @ columns).double().T).T.float()
        predicted = solved @ columns.T + biases
        return solved[:, : items.shape[1]], predicted
