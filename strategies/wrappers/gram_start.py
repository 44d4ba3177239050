# SPDX-License-Identifier: Apache-2.0
"""Item factors from the sum of the clients' products in the first round; then another strategy.

    [model]
    name = "ials"
    moments = true
    products = true

    [strategy]
    name = "gram-start"
    main = { name = "fed-als" }

The Gram matrix G = X^T X of the interactions has the right singular vectors V and the squared
singular values s^2 of X. With X = U s V^T, users' factors U sqrt(s) and items' factors V sqrt(s)
are the best approximation of X of their width (PureSVD, Cremonesi et al. 2010), from which
alternating least squares start instead of from random numbers, and need fewer rounds. Each client
sends its products once (step `gram`), and the server needs their sum alone.

Under differential privacy the sum is a release of its own, phase `products`, charged to the same
ledger. Factors whose eigenvalue is below the noise edge start from random numbers as before.

Where this differs from the papers: they start from random numbers, or solve centrally.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
import torch

from fedrec.components import registry
from fedrec.experiment.sections import Section
from strategies._products import Products, ProductsStrategy
from strategies.fcf import FACTORS, with_factors
from strategies.wrappers._first_round import FirstRound, FirstRoundConfig

PRODUCTS = "products"


class GramStartConfig(FirstRoundConfig):
    """Settings of the start from the sum of products."""

    step: Annotated[Section, registry.STEP] = Section(name="gram")
    """Step of the clients in the first round."""
    main: Annotated[Section, registry.STRATEGY] = Section(name="fed-als")
    """Strategy of all rounds after the first; its clients run the experiment's step."""


class _Starting(ProductsStrategy):
    """Computes item factors from the sum of the clients' products."""

    products = "item.products"
    model = "ials"

    def solved(self, theta: Mapping[str, np.ndarray], products: Products) -> dict[str, np.ndarray]:
        """The items' factors, leading ones last, and their Gram matrix."""
        values, vectors = torch.linalg.eigh(products.gram)
        factors = np.array(theta[FACTORS], dtype=np.float64)
        kept = min(int((values > products.edge).sum()), factors.shape[1])
        if kept:
            start = vectors[:, -kept:] * values[-kept:] ** 0.25 / products.scale[:, None]
            factors[:, -kept:] = start.numpy()
        return with_factors(dict(theta), factors)


class GramStart(FirstRound):
    """Sums products in the first round, then runs another strategy, see `FirstRound`."""

    name = "gram-start"
    Config = GramStartConfig
    paper = "PureSVD (Cremonesi et al. 2010) as the start of iALS (Hu et al. 2008)"
    first_phase = PRODUCTS
    first_class = _Starting
