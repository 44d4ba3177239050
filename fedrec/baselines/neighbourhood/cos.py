# SPDX-License-Identifier: Apache-2.0
"""Item-item neighbourhoods by cosine similarity (COS in PNBM, section 5.1).

`among = "all"` takes an item's norm over all of its ratings, the cosine of columns filled with
zeros; by default it is over the users who rated both items. The paper does not say which one it
uses.
"""

import numpy as np

from fedrec.baselines.neighbourhood._neighbours import Neighbours, NeighboursConfig
from fedrec.neighbourhood.profiles import Profiles
from fedrec.neighbourhood.similarity import cosine


class CosConfig(NeighboursConfig):
    """Settings of neighbourhoods by cosine."""


class Cos(Neighbours):
    """Predicts from similar items by cosine."""

    name = "cos"
    Config = CosConfig
    paper = "PNBM, section 5.1"

    def similarity(self, profiles: Profiles) -> np.ndarray:
        """`float64 [items, items]`, zero on the diagonal."""
        return cosine(profiles, self.config.among)
