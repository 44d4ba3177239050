# SPDX-License-Identifier: Apache-2.0
"""Implicit alternating least squares (Hu, Koren and Volinsky 2008; Rendle et al. 2021).

With c the weight of a liked pair and 1 that of any other,

    sum over liked (u, i) of c (1 - x_u . y_i)^2  +  sum over all others of (x_u . y_i)^2
        + lambda (sum of w_u^nu |x_u|^2 + sum of w_i^nu |y_i|^2)

is minimised alternately over all users' x_u given the items and over all items' y_i given the
users. Each is a ridge regression over the whole catalogue, whose Gram matrix is shared: A_u = Y^T Y
+ (c - 1) sum over liked of y y^T. Rows of about the same number of likes are solved for together.
w_u is the weight of all of the user's pairs, c for each liked one and 1 for each other. With nu = 0
this is Hu et al.'s loss, with nu = 1 its penalty grows as in Rendle et al., who weigh unliked pairs
by 1 / (c - 1) instead and scale everything by that.

With `low-rated` = r, a pair that was rated and is not positive has a share r of the loss of a liked
pair and 1 - r of that of any other, so that sums over liked items become sums over rated ones with
weights 1 and r.

With `solver = "cg"` a row takes a few steps of conjugate gradients from its previous value instead
(Takacs, Pilaszy and Tikk 2011), which reduces the cost by the square of the width. Users to be
scored are always solved for exactly from their known items, whether they were training users or
not.

Where this differs from Hu et al.: c is a setting, where they have 1 + alpha r (`implicit` and other
libraries have alpha r, which is this); an item that a user has several times counts once.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Baseline, Histories, Sparse
from fedrec.baselines.factorisation._ials_steps import improved
from fedrec.config import Width
from fedrec.data.low_rated import LowRatedConfig
from fedrec.rng import torch_stream

_NUMBERS_AT_ONCE = 1_000_000  # factors that are gathered at once; they stay in cache


class CentralIalsConfig(LowRatedConfig):
    """Settings of implicit alternating least squares."""

    factors: Width = 64
    """Number of factors (width of x_u and y_i)."""
    weight: float = Field(default=8.0, ge=1)
    """Weight c of a liked pair; that of all other pairs is 1."""
    regularisation: float = Field(default=10.0, gt=0)
    """Regularisation lambda, > 0."""
    frequency_exponent: float = Field(default=0.0, ge=0, le=1)
    """Exponent nu, by which the penalty grows with the weight of a user's or an item's pairs; 0:
    lambda for all."""
    sweeps: int = Field(default=15, ge=1)
    """Number of sweeps over users and items."""
    solver: Literal["exact", "cg"] = "exact"
    """Solver during fitting: Cholesky decomposition (`exact`), or a few steps of conjugate
    gradients (`cg`)."""
    cg_steps: int = Field(default=3, ge=1)
    """Steps of conjugate gradients in each sweep."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial item factors."""


class CentralIals(Baseline):
    """Weighted matrix factorization with each side solved for exactly."""

    name = "ials"
    Config = CentralIalsConfig
    paper = "Hu et al. 2008"
    config: CentralIalsConfig

    def fit(self, histories: Histories) -> None:
        """Solve for users and items in turns."""
        by_user = histories.csr(low_rated=self.config.low_rated)
        by_item = by_user.T.tocsr()
        generator = torch_stream(self.config.seed, "baseline-ials")
        width = self.config.factors
        items = torch.randn(histories.num_items, width, generator=generator) * (0.1 / width**0.5)
        users = torch.zeros(histories.num_users, width)
        improve = self.config.solver == "cg"
        if not improve:  # conjugate gradients are native code of the processor
            users = users.to(self.device)
            items = items.to(self.device)
        for _ in range(self.config.sweeps):
            users = solved(by_user, items, self.config, users if improve else None)
            items = solved(by_item, users, self.config, items if improve else None)
        self._items = items.to(self.device)

    def scores(self, histories: Histories) -> Tensor:
        """Products of the users' factors, solved for now, and the items',
        `float32 [users, items]`."""
        rows = histories.csr(low_rated=self.config.low_rated)
        return solved(rows, self._items, self.config) @ self._items.T


def solved(
    liked: Sparse, fixed: Tensor, config: CentralIalsConfig, start: Tensor | None = None
) -> Tensor:
    """Factors of each row given those of the columns; zero for an empty row.

    Args:
        liked: `[rows, columns]`, how much of each pair is liked, in (0, 1]; 0 elsewhere.
        fixed: `float [columns, factors]`; its precision is that of the computation.
        config: weights and penalty.
        start: `[rows, factors]`, initial values of conjugate gradients; None: rows are solved for
            exactly.

    Returns:
        `[rows, factors]`.
    """
    width = fixed.shape[1]
    extra = config.weight - 1
    totals = torch.from_numpy(extra * liked.sum(1) + liked.shape[1]).to(fixed)
    penalty = config.regularisation * totals**config.frequency_exponent
    if start is not None:
        given = {"weight": config.weight, "penalty": penalty.numpy(), "steps": config.cg_steps}
        return torch.from_numpy(improved(liked, fixed.numpy(), start.numpy(), **given))
    gram = fixed.T @ fixed
    padded = torch.cat([fixed, fixed.new_zeros(1, width)])
    found = fixed.new_zeros(liked.shape[0], width)

    def solve(rows: Tensor, columns: Tensor, shares: Tensor) -> None:
        rows = rows.to(fixed.device)
        part = padded[columns.to(fixed.device)]
        own = part * shares.to(fixed).unsqueeze(-1)
        right = config.weight * own.sum(1)
        matrix = torch.baddbmm(
            gram.expand(len(rows), -1, -1), own.transpose(1, 2), part, alpha=extra
        )
        matrix.diagonal(dim1=1, dim2=2).add_(penalty[rows][:, None])
        found[rows] = torch.cholesky_solve(right[..., None], torch.linalg.cholesky(matrix))[..., 0]

    threads = torch.get_num_threads() if fixed.device.type == "cpu" else 1
    _in_threads(solve, _alike(liked, width), threads)
    return found


def _in_threads(
    work: Callable[..., None], parts: Iterator[tuple[Tensor, ...]], threads: int
) -> None:
    """Each part on one thread: the products are too small to be split among PyTorch's threads."""
    if threads == 1:
        for part in parts:
            work(*part)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(lambda part: work(*part), parts))
    torch.set_num_threads(threads)  # the products of this thread were set back with the others


def _alike(liked: Sparse, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Non-empty rows in groups of about equal length: `int64 [group]`, and columns and values
    `[group, length]`.

    Shorter rows are filled up with the column after the last.
    """
    counts = np.diff(liked.indptr)
    order = np.argsort(counts, kind="stable")
    start = int(np.searchsorted(counts[order], 1))
    while start < len(order):
        # As many rows as fit with the length of the last of them, but none longer than the first by
        # more than a fourth.
        longest = max(counts[order[start]] * 5 // 4, 8)
        stop = start + max(1, _NUMBERS_AT_ONCE // (width * max(longest, width)))
        stop = max(start + 1, min(stop, int(np.searchsorted(counts[order], longest, side="right"))))
        rows = order[start:stop]
        length = int(counts[rows[-1]])
        places = np.arange(length)
        inside = places < counts[rows][:, None]
        columns = np.full((len(rows), length), liked.shape[1])
        entries = (liked.indptr[rows][:, None] + places)[inside]
        columns[inside] = liked.indices[entries]
        values = np.zeros(columns.shape, liked.dtype)
        values[inside] = liked.data[entries]
        yield torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(values)
        start = stop
