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

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
        given = self._given(liked)
        state = self._start(given)
        for _ in range(self._iterations):
            open_ = self._open(given, state)
            found[left[~open_]] = state.taste[~open_]
            left = left[open_]
            given = _Given(*(part[open_] for part in given))
            state = _State(*(part[open_] for part in state))
            if not len(left):
                break
            state = self._moved(given, state)
        found[left] = state.taste
        return found

    def scores(self, liked: Tensor) -> Tensor:
        """Logarithms of the personalised popularities, up to a constant per user, `float [users,
        items]`."""
        return self._utilities(self.tastes(liked))

    def traced_scores(self, liked: Tensor) -> Tensor:
        """`scores` of one user, `[1, items]`, as one loop that can be exported."""
        given = self._given(liked)

        def unfinished(count: Tensor, *state: Tensor) -> Tensor:
            return (count < self._iterations) & self._open(given, _State(*state)).any()

        def moved(count: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            return (count + 1, *self._moved(given, _State(*state)))

        found = torch.while_loop(unfinished, moved, (torch.tensor(0), *self._start(given)))
        return self._utilities(found[1])

    def _given(self, liked: Tensor) -> _Given:
        weights = liked.sum(1, keepdim=True)
        metric = weights * self.curvature.clamp(min=0) + 1
        return _Given(weights, liked @ self.embeddings, metric)

    def _start(self, given: _Given) -> _State:
        taste = torch.zeros_like(given.sums)
        return _State(taste, torch.ones_like(given.weights), *self._objective(taste, given))

    def _open(self, given: _Given, state: _State) -> Tensor:
        """`bool [users]`: whose gradient is longer than the tolerance."""
        return (state.slope.square() / given.metric).sum(1) > self._tolerance**2

    def _moved(self, given: _Given, state: _State) -> _State:
        """The state after one step."""
        step = state.slope / given.metric
        moved = state.taste + state.length * step
        value, slope = self._objective(moved, given)
        better = (value >= state.value - self._rounding * state.value.abs())[:, None]
        bent = (step * (state.slope - slope)).sum(1, keepdim=True)
        length = state.length * (step.square() * given.metric).sum(1, keepdim=True) / bent
        length = torch.where(bent > 0, length, torch.ones_like(bent)).clamp(*_STEPS)
        return _State(
            torch.where(better, moved, state.taste),
            torch.where(better, length, state.length / 2),
            torch.where(better[:, 0], value, state.value),
            torch.where(better, slope, state.slope),
        )

    def _utilities(self, taste: Tensor) -> Tensor:
        """`[users, items]`."""
        return F.linear(taste, self.embeddings) + self.log_shares

    def _objective(self, taste: Tensor, given: _Given) -> tuple[Tensor, Tensor]:
        """Value `[users]` and gradient `[users, width]`."""
        utilities = self._utilities(taste)
        totals = torch.logsumexp(utilities, 1)
        expected = (utilities - totals[:, None]).exp() @ self.embeddings
        value = (taste * given.sums).sum(1) - given.weights[:, 0] * totals
        slope = given.sums - given.weights * expected - taste
        return value - taste.square().sum(1) / 2, slope


class _Given(NamedTuple):
    """What users' histories add: their weights' sums `[users, 1]`, sums of embeddings and
    curvatures at 0, `[users, width]`."""

    weights: Tensor
    sums: Tensor
    metric: Tensor


class _State(NamedTuple):
    """Vectors `[users, width]`, lengths of the next step `[users, 1]`, and there the objective
    `[users]` and its gradient `[users, width]`."""

    taste: Tensor
    length: Tensor
    value: Tensor
    slope: Tensor
