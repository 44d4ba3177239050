# SPDX-License-Identifier: Apache-2.0
"""MF, matrix factorization for likes: p_u . q_i + b is a logit, trained on cross-entropy with drawn
items (`neumf`).

It is GMF (He et al. 2017) with all weights of the product equal to 1. The federated `mf` has the
same product, and biases of users and items.
"""

import torch
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.neural.gmf import GmfConfig
from fedrec.baselines.neural.neumf import CentralNeumf


class CentralMfConfig(GmfConfig):
    """Settings of MF."""


class CentralMf(CentralNeumf):
    """An unweighted product of factors."""

    name = "mf"
    Config = CentralMfConfig
    paper = "Koren et al. 2009"
    config: CentralMfConfig

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Initial parameters other than the rows: Glorot-uniform layers, zero biases."""
        return {"b": torch.zeros(())}

    def joined_logits(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits of pairs of embeddings `[..., width]`, which broadcast."""
        return (users * items).sum(-1) + self.shared["b"]

    @torch.no_grad()
    def scores(self, histories: Histories) -> Tensor:
        """Logits of the catalogue, `float32 [users, items]`."""
        return (
            torch.from_numpy(self.rows(histories)).to(self.device) @ self.shared["items"].T
            + self.shared["b"]
        )
