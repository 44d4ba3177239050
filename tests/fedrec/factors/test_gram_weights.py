# SPDX-License-Identifier: Apache-2.0
"""Weights from Gram matrices: only directions that the matrix has are kept."""

import torch

from fedrec.factors.gram import solved_weights


def test_directions_that_are_zero_but_for_rounding_are_left_out():
    """One direction, and five factors asked for: the other four would be arbitrary."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.rand(12, 1, generator=generator, dtype=torch.float64)
    rounding = 1e-14 * torch.randn(12, 12, generator=generator, dtype=torch.float64)
    gram = direction @ direction.T + rounding + rounding.T
    weights = solved_weights(
        gram, 0.0, solution="puresvd", factors=5, regularisation=1.0, ridge=0.0
    )
    unit = direction / direction.norm()
    torch.testing.assert_close(weights, unit @ unit.T, atol=1e-10, rtol=0)
