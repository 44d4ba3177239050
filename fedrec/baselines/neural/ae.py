# SPDX-License-Identifier: Apache-2.0
"""The central denoising autoencoder (Mult-DAE, Liang et al. 2018): `vae` without a distribution of
codes."""

from __future__ import annotations

from typing import Literal

from fedrec.baselines.neural.vae import Vae, VaeConfig
from fedrec.models.ae import Ae as AeModel


class AeConfig(VaeConfig):
    """Settings of the central autoencoder, in addition to those of the network."""

    beta: Literal[0] = 0
    """Not used: there is no prior."""


class Ae(Vae):
    """Trained with Adam on batches of users."""

    Config = AeConfig
    paper = "Mult-DAE (Liang et al. 2018)"
    network = AeModel
    config: AeConfig
