# SPDX-License-Identifier: Apache-2.0
"""GMF, generalised matrix factorization (He et al. 2017, section 3.2): `neumf` without its
tower."""

from fedrec.baselines.neural.neumf import CentralNeumf, CentralNeumfConfig
from fedrec.config import Width


class GmfConfig(CentralNeumfConfig):
    """Settings of GMF."""

    factors: Width = 32
    """Number of factors (width of the product)."""
    tower: tuple[()] = ()
    """There is none."""


class Gmf(CentralNeumf):
    """A weighted product of factors."""

    name = "gmf"
    Config = GmfConfig
    paper = "He et al. 2017, section 3.2"
    config: GmfConfig
