# SPDX-License-Identifier: Apache-2.0
"""Gradients of users that are outer products: their norms and clipped sums, without materialising
the gradients.

A user who enters an affine layer once, as one row x, has the gradient x^T g with respect to its
weights, where g is the gradient with respect to its result (Goodfellow 2015). So |x^T g| = |x| |g|,
in the L2 as in the L1 norm, and a sum over users with a factor each is one product of matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OuterGradients:
    """Gradients of some users.

    Attributes:
        pairs: by parameter, `[users, a]` and `[users, b]`; a user's gradient is the outer product
            of its two rows. Where b is 1, the parameter has one axis.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def norms(self) -> Tensor:
        """L2 norm of each user's gradient over all parameters, `float64 [users]`."""
        squares = [
            left.double().square().sum(1) * right.double().square().sum(1)
            for left, right in self.pairs.values()
        ]
        return torch.stack(squares).sum(0).sqrt()

    @property
    def coordinates(self) -> int:
        """Number of coordinates of a gradient."""
        return sum(left.shape[1] * right.shape[1] for left, right in self.pairs.values())

    def whole(self) -> Tensor:
        """The gradients themselves, `[users, coordinates]`."""
        parts = [
            torch.einsum("ua,ub->uab", left, right).flatten(1)
            for left, right in self.pairs.values()
        ]
        return torch.cat(parts, dim=1)

    def weighted_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """Sum of the users' gradients, each times its factor, `float32` by parameter.

        Args:
            factors: `[users]`, >= 0; a user with factor 0 is left out, even if its gradient is not
                finite.
        """
        total = {}
        for name, (left, right) in self.pairs.items():
            # A failed user has factor 0; NaN times 0 would be NaN.
            kept = (factors > 0)[:, None]
            scaled = torch.where(kept, right * factors[:, None], 0.0).to(left.dtype)
            found = (torch.where(kept, left, 0.0).T @ scaled).float()
            total[name] = found[:, 0] if right.shape[1] == 1 else found
        return total
