# SPDX-License-Identifier: Apache-2.0
"""Matrix factorization trained centrally by DP-SGD on users: "SVD" and "MF" with DP and DP-O in
DP-VAE's table 11.

    r_ui = c_u + b_i + x_u . y_i

is fitted to the binary matrix of liked pairs. The items' factors and biases are released; in every
step each user who is drawn is solved for, (x_u, c_u) being the ridge regression of its row on them,
and sends the gradient of its squared error

    -2 e_u (x_u, 1)^T,    e_u = r_u - c_u - b - Y x_u,

which is one outer product, clipped to norm S. A user's solution is never released. Without biases
this is "MF".

Where this differs from the paper: Fang et al. (2022) give every user an epsilon and noise of its
own for one upload (`clients/steps/dpsgd.py` does that); here one epsilon is for all steps and holds
for all data of a user. For SVD and MF it states only rank 100 and gradient descent; "SVD" in
toolkits is a model of ratings, which ranks unrated items poorly; here both model likes. Users are
solved for in closed form, and Adam updates the items.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.private.dpsgd._outer import OuterGradients
from fedrec.baselines.private.dpsgd._sampled import DpSgdBaseline, DpSgdBaselineConfig
from fedrec.config import Width

_INIT_STD = 0.1  # of the factors of items


class DpSvdConfig(DpSgdBaselineConfig):
    """Settings of matrix factorization by DP-SGD."""

    factors: Width = 100
    """Width of x_u and y_i (the paper's rank)."""
    biases: bool = True
    """Whether items and users have biases."""
    user_regularisation: float = Field(default=10.0, gt=0)
    """Regularisation of x_u in the users' ridge regressions."""


class DpSvd(DpSgdBaseline):
    """Factors of items, trained on clipped gradients of users under noise."""

    name = "dp-svd"
    Config = DpSvdConfig
    paper = "DP-VAE (Fang et al. 2022), table 11, SVD and MF"
    config: DpSvdConfig
    stream = "baseline-dp-svd"

    def start(self, histories: Histories, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters, on the device."""
        shape = histories.num_items, self.config.factors
        found = {"items": torch.randn(*shape, generator=generator) * _INIT_STD}
        if self.config.biases:
            found["biases"] = torch.zeros(shape[0])
        return {name: value.to(self.device) for name, value in found.items()}

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Predictions for users who are solved for now, `float32 [users, items]`."""
        return self._predicted(self._parameters, histories.matrix().to(self.device))[1]

    @torch.no_grad()
    def gradients(
        self, parameters: dict[str, Tensor], rows: Tensor, kept: Tensor | None = None
    ) -> OuterGradients:
        """Gradients of the losses of some users, given by `rows`, `float32 [users, items]`; there
        is no dropout."""
        users, predicted = self._predicted(parameters, rows)
        slopes = 2 * (predicted - rows)
        pairs = {"items": (slopes, users)}
        if self.config.biases:
            pairs["biases"] = slopes, rows.new_ones(len(rows), 1)
        return OuterGradients(pairs)

    def _predicted(self, parameters: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """x_u `[users, factors]`, and predictions `[users, items]`, of users given by their
        rows."""
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
