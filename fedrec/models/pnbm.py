# SPDX-License-Identifier: Apache-2.0
"""A probabilistic neighbourhood model whose similarities clients learn together (PNBM, equations 1
to 3).

    f_ui = m_i + sum_j s_ij (r_uj - m_j) / (prior + sum_j |s_ij|)

with j over the items that u rated, without i.

Item means, counts of ratings, and similarities between the `items` most rated items are shared. A
user's ratings are used on its device only. Any other two items have the similarity `start`.
Initially all similarities are `start`, and the prediction is the item's mean plus the user's mean
deviation, shrunk towards 0.

Where this differs from the paper: there is a `prior` in the denominator (0 in the paper, where the
scale of S means nothing); similarities may be of low rank, S = start + A B^T; and the model is
designed for noise on sums of users' updates (`clients/steps/pnbm.py`,
`strategies/phases.py`).
"""

import torch
from pydantic import Field
from torch import Tensor

from fedrec.config import Config
from fedrec.data.interactions import Schema
from fedrec.errors import ExperimentError
from fedrec.models.base import INIT_STD, HistoryForm, HistoryModel, Parameters
from fedrec.neighbourhood.learned import Scale


class PnbmConfig(Config):
    """Settings of the federated neighbourhood model."""

    scale: Scale = (1.0, 5.0)
    """Lowest and highest rating; public."""
    items: int | None = Field(default=None, ge=2)
    """Number of items with similarities, the most rated ones by the counts of the first round;
    default: all."""
    rank: int | None = Field(default=None, ge=1)
    """Rank k of the learned similarities, S = start + A B^T with two tables `[items, k]`; default:
    full rank, `[items, items]`."""
    start: float = Field(default=1.0, gt=0)
    """Initial similarity of any two items."""
    prior: float = Field(default=5.0, ge=0)
    """Constant added to denominators, like this number of additional ratings without deviation at
    similarity 1."""


class Pnbm(HistoryModel):
    """Probabilistic neighbourhood model: item means and similarities.

    Raises:
        ExperimentError: `items` exceeds the catalogue.
    """

    name = "pnbm"
    Config = PnbmConfig
    tasks = ("rating",)
    paper = "PNBM, equations 1-3"
    item_tables = ("item.mean", "item.count")
    config: PnbmConfig

    def __init__(self, config: PnbmConfig, schema: Schema) -> None:
        super().__init__(config, schema)
        if config.items is not None and config.items > schema.num_items:
            raise ExperimentError(
                "model.items exceeds the catalogue",
                expected=f"at most {schema.num_items}",
                got=str(config.items),
                fix="leave out model.items to use all items",
            )
        self.size = schema.num_items if config.items is None else config.items

    @property
    def form(self) -> HistoryForm:
        return HistoryForm(rated=True)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initialise means in the middle of the scale, zero counts, and similarities equal or close
        to `start`."""
        items = self.schema.num_items
        config = self.config
        parameters = {
            "item.mean": torch.full((items, 1), sum(config.scale) / 2),
            "item.count": torch.zeros(items, 1),
        }
        if config.rank is None:
            return {**parameters, "similarity": torch.full((self.size, self.size), config.start)}
        drawn = torch.randn(2, self.size, config.rank, generator=generator) * INIT_STD
        return {
            **parameters,
            "similarity.left": drawn[0].clone(),
            "similarity.right": drawn[1].clone(),
        }

    def chosen(self, counts: Tensor) -> Tensor:
        """Items with similarities, `int64 [size]`, chosen by their counts `[items, 1]`; the r-th
        has row r."""
        if self.size == self.schema.num_items:
            return torch.arange(self.size, device=counts.device)
        return torch.argsort(counts[:, 0], descending=True, stable=True)[: self.size]

    def similarities(self, parameters: Parameters) -> Tensor:
        """Learned similarities, `[C, size, size]`."""
        if self.config.rank is None:
            return parameters["similarity"]
        left = parameters["similarity.left"]
        right = parameters["similarity.right"]
        return self.config.start + left @ right.transpose(-1, -2)

    def history_scores(self, parameters: Parameters, histories: Tensor) -> Tensor:
        """Predicted ratings `[C, B, items]`, see `HistoryModel.history_scores`; histories contain
        ratings."""
        means = parameters["item.mean"].squeeze(-1).unsqueeze(1)
        known = (histories > 0).to(histories.dtype)
        deviations = (histories - means) * known
        start = self.config.start
        above = start * (deviations.sum(-1, keepdim=True) - deviations)
        below = start * (known.sum(-1, keepdim=True) - known)
        similarities = self.similarities(parameters)
        similarities = (
            similarities
            - torch.diag_embed(similarities.diagonal(dim1=-2, dim2=-1))
            + start * torch.eye(self.size, device=similarities.device)
        )
        for client, counts in enumerate(parameters["item.count"]):
            chosen = self.chosen(counts)
            above[client][:, chosen] += (
                deviations[client][:, chosen] @ (similarities[client] - start).T
            )
            below[client][:, chosen] += (
                known[client][:, chosen] @ (similarities[client].abs() - start).T
            )
        below = self.config.prior + below
        guess = torch.where(below > 0, above / below.clamp(min=1e-12), 0.0)
        return (means + guess).clamp(*self.config.scale)
