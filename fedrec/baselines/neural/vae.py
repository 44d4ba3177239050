# SPDX-License-Identifier: Apache-2.0
"""The central variational autoencoder (Liang et al. 2018), the reference for the federated one.

Where this differs from the papers: Fang et al. name plain gradient descent and a learning rate of
0.005, with which the network hardly learns in 30 epochs of MovieLens-100K; Adam is used, as in
Liang et al. Beta rises linearly to its last value over all steps.
"""

from pydantic import Field

from fedrec.baselines.histories import HistoriesConfig, HistoryBaseline
from fedrec.models.vae import Vae, VaeConfig


class CentralVaeConfig(HistoriesConfig, VaeConfig):
    """Settings of the central variational autoencoder, in addition to those of the network."""

    epochs: int = Field(default=60, ge=1)
    """Epochs over the users."""
    batch_size: int = Field(default=10, ge=1)
    """Users per gradient step (paper: 10 for MovieLens-100K)."""
    beta: float = Field(default=0.5, ge=0)
    """Final weight beta of the divergence from the prior (paper: 0.5 for MovieLens-100K)."""


class CentralVae(HistoryBaseline):
    """Trained with Adam on batches of users."""

    name = "vae"
    Config = CentralVaeConfig
    paper = "Mult-VAE (Liang et al. 2018)"
    network = Vae
    stream = "baseline-vae"
    config: CentralVaeConfig
