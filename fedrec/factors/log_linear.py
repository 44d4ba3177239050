# SPDX-License-Identifier: Apache-2.0
"""A user's vector under a log-linear model of its liked items, given item embeddings.

Each liked item is drawn from the catalogue with p(i) proportional to s_i exp(w . e_i), where s is
popularity, e are item embeddings shared by all users, and w ~ N(0, I) is the user's vector. The
most probable vector maximises

    sum over liked i of a_i w . e_i - n log sum over j of s_j exp(w . e_j) - |w|^2 / 2

with weights a_i of the liked items and n their sum. It is concave, depends on this user's items
only, and has as many unknowns as an embedding has coordinates, so a device can solve it from data
that never leave it.

It is solved by gradient steps preconditioned with the curvature at w = 0, n C + I, where the
covariance C is the same for all users; in the eigenbasis of C it is diagonal. Step lengths are
those of Barzilai and Borwein (1988), and a step that lowers the objective is undone and halved.
"""

import torch
from torch import Tensor

_STEPS = (0.1, 3.0)  # smallest and largest step length, in units of the first


class LogLinear:
    """Computes user vectors for given embeddings and popularities.

    Args:
        embeddings: `float [items, width]`; user vectors and scores have the same precision.
        log_shares: `float [items]`, logarithms of popularities, which need not be normalised.
        iterations: largest number of steps.
        tolerance: iteration stops for users whose gradient norm (in the metric of the curvature at
            0) is at most this.
    """

    def __init__(
        self,
        embeddings: Tensor,
        log_shares: Tensor,
        *,
        iterations: int = 100,
        tolerance: float = 1e-2,
    ) -> None:
        shares = torch.softmax(log_shares, 0)
        centred = embeddings - shares @ embeddings
        curvature = ((centred * shares[:, None]).T @ centred).double()
        # In single precision LAPACK returns NaN for some matrices that lack many ranks.
        values, axes = (part.to(embeddings) for part in torch.linalg.eigh(curvature))
        self.curvature = values
        self.embeddings = centred @ axes
        self.log_shares = torch.log_softmax(log_shares, 0)
        self._iterations = iterations
        self._tolerance = tolerance
        self._rounding = 8 * torch.finfo(embeddings.dtype).eps

    def tastes(self, liked: Tensor) -> Tensor:
        """The most probable user vectors, in the basis of this object's `embeddings`.

        Args:
            liked: weights of the users' liked items, `float [users, items]`, >= 0.

        Returns:
            `float [users, width]`; zero for a user without items.
        """
        found = liked.new_zeros(len(liked), self.embeddings.shape[1])
        left = torch.arange(len(liked), device=liked.device)
        weights = liked.sum(1, keepdim=True)
        sums = liked @ self.embeddings
        metric = weights * self.curvature.clamp(min=0) + 1
        taste = torch.zeros_like(sums)
        length = torch.ones_like(weights)
        value, slope = self._objective(taste, weights, sums)
        for _ in range(self._iterations):
            open_ = (slope.square() / metric).sum(1) > self._tolerance**2
            found[left[~open_]] = taste[~open_]
            left, weights, sums, metric, taste, length, value, slope = (
                part[open_] for part in (left, weights, sums, metric, taste, length, value, slope)
            )
            if not len(left):
                break
            step = slope / metric
            moved = taste + length * step
            new_value, new_slope = self._objective(moved, weights, sums)
            better = (new_value >= value - self._rounding * value.abs())[:, None]
            bent = (step * (slope - new_slope)).sum(1, keepdim=True)
            next_length = length * (step.square() * metric).sum(1, keepdim=True) / bent
            next_length = torch.where(bent > 0, next_length, torch.ones_like(bent)).clamp(*_STEPS)
            length = torch.where(better, next_length, length / 2)
            taste = torch.where(better, moved, taste)
            slope = torch.where(better, new_slope, slope)
            value = torch.where(better[:, 0], new_value, value)
        found[left] = taste
        return found

    def scores(self, liked: Tensor) -> Tensor:
        """Logarithms of the personalised popularities, up to a constant per user, `float [users,
        items]`."""
        return self.tastes(liked) @ self.embeddings.T + self.log_shares

    def _objective(self, taste: Tensor, weights: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Value `[users]` and gradient `[users, width]`."""
        utilities = taste @ self.embeddings.T + self.log_shares
        totals = torch.logsumexp(utilities, 1)
        expected = (utilities - totals[:, None]).exp() @ self.embeddings
        value = (taste * sums).sum(1) - weights[:, 0] * totals - taste.square().sum(1) / 2
        return value, sums - weights * expected - taste
