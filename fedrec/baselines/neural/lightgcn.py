# SPDX-License-Identifier: Apache-2.0
"""LightGCN (He et al. 2020): matrix factorization whose factors are averaged over the graph of
users and items.

    E^(l+1)     = D^-1/2 A D^-1/2 E^(l)
    E           = (E^(0) + ... + E^(K)) / (K + 1)
    score(u, i) = e_u . e_i

with A the symmetric 0-1 matrix of who likes what and D its row sums (their equations 3 to 8). E^(0)
is trained by Adam on the pairwise loss -ln sigma(score(u, liked) - score(u, other)), plus the decay
times half the squared norms of the three rows of E^(0), means over a batch.

E = P E^(0) is linear and P symmetric, so the gradient with respect to E^(0) is P times that with
respect to E: one more propagation of a matrix that is zero outside the batch, without automatic
differentiation.

A new user is folded in with a row of zeros in E^(0): its embedding is propagated from its items
over K layers.

Where this differs from the paper: with the default settings, in nothing that is known. Like the
authors' code, and unlike their text, it draws users uniformly, and then one of the user's items.
Two settings for large graphs are not in the paper: `precision = "bfloat16"`
propagates rows of half the size, and `final-rate` decreases the learning rate, so that fewer large
batches suffice.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Histories, Sparse
from fedrec.baselines.training import TrainingConfig, train
from fedrec.baselines.triples import Triples
from fedrec.baselines.user_rows import UserRowsBaseline, UserRowsConfig
from fedrec.config import Width
from fedrec.rng import stream, torch_stream


class LightgcnConfig(UserRowsConfig, TrainingConfig):
    """Settings of LightGCN."""

    factors: Width = 64
    """Width of the embeddings."""
    layers: int = Field(default=3, ge=0)
    """Number of propagation layers K; 0: matrix factorization."""
    epochs: int = Field(default=100, ge=1)
    """Epochs; each has as many triples as there are liked pairs. The paper has 1000."""
    batch_size: int = Field(default=2048, ge=1)
    """Triples per step."""
    decay: float = Field(default=1e-4, ge=0)
    """L2 penalty on the rows of a triple."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of propagated rows in training; parameters, gradients and scores are float32.
    bfloat16 has 8 bits of mantissa, half the memory traffic, and on x86-64 several times the speed
    (elsewhere it may be slower)."""


_INIT_STD = 0.1  # of the initial rows, as in the authors' code
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Lightgcn(UserRowsBaseline):
    """Factors of users and items, averaged over their graph."""

    name = "lightgcn"
    Config = LightgcnConfig
    paper = "He et al. 2020"
    config: LightgcnConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh rows."""
        config = self.config
        liked = histories.csr()
        self.fitted = histories
        users = histories.num_users
        self._graph = Graph(liked, _PRECISIONS[config.precision], self.device)
        generator = torch_stream(config.seed, "baseline-lightgcn")
        first = (
            torch.randn(users + histories.num_items, config.factors, generator=generator)
            * _INIT_STD
        ).to(self.device)
        triples = Triples(liked, "users", stream(config.seed, "baseline-lightgcn-triples"))
        steps = -(-triples.per_epoch // config.batch_size)

        def backward(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
            own, good, other = batch
            rows = torch.from_numpy(np.stack([own, good + users, other + users]))
            first.grad = self._gradient(first, rows.to(self.device))

        trained = train(
            [first], config, lambda _: triples.epoch(config.batch_size), backward, steps=steps
        )
        self._settle(trained[0])

    def scores(self, histories: Histories) -> Tensor:
        """Products of the averaged rows, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories)).to(self.device) @ self._items.T

    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only."""
        liked = histories.csr()
        degrees = np.diff(liked.indptr)[:, None]
        return (liked @ self._arriving) / np.sqrt(np.maximum(degrees, 1)).astype(np.float32)

    def _settle(self, first: Tensor) -> None:
        """Store what scores are computed from: the averaged rows, and the contribution of each item
        to a user who is folded in."""
        layers = self._graph.layers(first, self.config.layers)
        users = self.fitted.num_users
        everything = torch.stack(layers).mean(0)
        self.own = everything[:users].cpu().numpy()
        self._items = everything[users:]
        passed_on = (torch.stack(layers).sum(0) - layers[-1]) / (self.config.layers + 1)
        self._arriving = (passed_on * self._graph.scale[:, None])[users:].cpu().numpy()

    def _gradient(self, first: Tensor, rows: Tensor) -> Tensor:
        """Gradient of the mean loss of a batch of triples `int64 [3, batch]` with respect to
        E^(0)."""
        own, good, other = self._graph.average_at(rows, first, self.config.layers)
        slope = -torch.sigmoid((own * (other - good)).sum(1, keepdim=True)) / rows.shape[1]
        outer = torch.zeros_like(first)
        for place, part in zip(
            rows, (slope * (good - other), slope * own, -slope * own), strict=True
        ):
            outer.index_add_(0, place, part)
        found = self._graph.average(outer, self.config.layers)
        share = self.config.decay / len(own)
        for place in rows:  # a product first: `alpha` would take index_add_ on a slow path
            found.index_add_(0, place, F.embedding(place, first).mul_(share))
        return found


class Graph:
    """Who likes what, as a symmetric graph of users and then items.

    Args:
        liked: binary `[users, items]`.
        precision: type of the rows that `average` propagates.
        device: where it is kept.

    Attributes:
        scale: `float32 [users + items]`, one over the square root of the degree; 0 where there is
            none.
    """

    def __init__(
        self,
        liked: Sparse,
        precision: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        both = sparse.csr_array(sparse.block_array([[None, liked], [liked.T, None]]))
        degrees = np.diff(both.indptr)
        scale = np.where(degrees > 0, 1 / np.sqrt(np.maximum(degrees, 1)), 0).astype(np.float32)
        weights = scale[np.repeat(np.arange(len(degrees)), degrees)] * scale[both.indices]
        self.scale = torch.from_numpy(scale).to(device)
        self._precision = precision
        full = torch.from_numpy(weights).to(device)
        self._weights = {full.dtype: full, precision: full.to(precision)}
        self._columns, self._offsets = (
            torch.from_numpy(p.astype(np.int64)).to(device) for p in (both.indices, both.indptr)
        )

    def propagate(self, rows: Tensor) -> Tensor:
        """D^-1/2 A D^-1/2 times a matrix `[users + items, width]`, float32 or of this graph's
        precision; sums are float32, the result is of the matrix's type."""
        return F.embedding_bag(
            self._columns,
            rows,
            self._offsets,
            mode="sum",
            per_sample_weights=self._weights[rows.dtype],
            include_last_offset=True,
        )

    def layers(self, rows: Tensor, number: int) -> list[Tensor]:
        """E^(0), which is given, to E^(number), each `[users + items, width]`."""
        found = [rows]
        for _ in range(number):
            found.append(self.propagate(found[-1]))
        return found

    def average_at(self, places: Tensor, rows: Tensor, number: int) -> list[Tensor]:
        """The rows of `average` at some positions `int64 [n, batch]`, n times `float32 [batch,
        width]`, without computing all others."""
        # one after the other: large temporary arrays would take most of the time
        totals = [F.embedding(own, rows) for own in places]
        rows = rows.to(self._precision)
        for _ in range(number):
            rows = self.propagate(rows)
            for total, own in zip(totals, places, strict=True):
                total += F.embedding(own, rows)
        return [total.div_(number + 1) for total in totals]

    def average(self, rows: Tensor, number: int) -> Tensor:
        """P times a matrix `[users + items, width]`: the mean of E^(0) to E^(number), `float32`;
        all but E^(0) are rounded to this graph's precision."""
        total = rows.clone()
        rows = rows.to(self._precision)
        for _ in range(number):
            rows = self.propagate(rows)
            total += rows
        return total.div_(number + 1)
