# SPDX-License-Identifier: Apache-2.0
"""The central denoising autoencoder (Mult-DAE, Liang et al. 2018): `vae` without a distribution of
codes."""

from typing import Literal

from fedrec.baselines.neural.vae import CentralVae, CentralVaeConfig
from fedrec.models.ae import Ae


class CentralAeConfig(CentralVaeConfig):
    """Settings of the central autoencoder, in addition to those of the network."""

    beta: Literal[0] = 0
    """Not used: there is no prior."""


class CentralAe(CentralVae):
    """Trained with Adam on batches of users."""

    name = "ae"
    Config = CentralAeConfig
    paper = "Mult-DAE (Liang et al. 2018)"
    network = Ae
    config: CentralAeConfig
