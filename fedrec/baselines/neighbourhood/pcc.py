# SPDX-License-Identifier: Apache-2.0
"""Item-item neighbourhoods by Pearson correlation (PCC in PNBM, section 5.1).

With negative similarities it is worse on MovieLens-100K than user and item biases alone; with
`positive-only` it is better. The paper does not say which one it uses.
"""

import numpy as np

from fedrec.baselines.neighbourhood._neighbours import Neighbours, NeighboursConfig
from fedrec.neighbourhood.profiles import Profiles
from fedrec.neighbourhood.similarity import pearson


class PccConfig(NeighboursConfig):
    """Settings of neighbourhoods by correlation."""


class Pcc(Neighbours):
    """Predicts from correlated items."""

    name = "pcc"
    Config = PccConfig
    paper = "PNBM, section 5.1"

    def similarity(self, profiles: Profiles) -> np.ndarray:
        """`float64 [items, items]`, zero on the diagonal."""
        return pearson(profiles, self.config.among)
