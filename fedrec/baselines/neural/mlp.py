# SPDX-License-Identifier: Apache-2.0
"""MLP, a tower of layers over the embeddings of a user and an item (He et al. 2017, section 3.3):
`neumf` without its product."""

from typing import Literal

from fedrec.baselines.neural.neumf import CentralNeumf, CentralNeumfConfig


class MlpConfig(CentralNeumfConfig):
    """Settings of MLP."""

    factors: Literal[0] = 0
    """There is no product."""


class Mlp(CentralNeumf):
    """A tower of layers."""

    name = "mlp"
    Config = MlpConfig
    paper = "He et al. 2017, section 3.3"
    config: MlpConfig
