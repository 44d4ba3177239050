# SPDX-License-Identifier: Apache-2.0
"""Systems trained on pairs of a liked and another item: LightGCN, BPR-MF and WARP."""

import zlib
from functools import partial
from typing import Literal

import numpy as np
import torch
from numba import njit
from pydantic import Field
from scipy import sparse
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Histories, Sparse
from fedrec.baselines.training import SeededConfig, TrainingConfig, Triples, UserRowsBaseline, train
from fedrec.config import Width
from fedrec.data.interactions import FeatureNames, FeatureTable
from fedrec.errors import ExperimentError
from fedrec.kernel.compiled import compiled
from fedrec.rng import stream, torch_stream
from fedrec.sums.fold_in import memberships

# LightGCN (He et al. 2020): matrix factorization whose factors are averaged over the graph of users
# and items.
#
#     E^(l+1)     = D^-1/2 A D^-1/2 E^(l)
#     E           = (E^(0) + ... + E^(K)) / (K + 1)
#     score(u, i) = e_u . e_i
#
# with A the symmetric 0-1 matrix of who likes what and D its row sums (their equations 3 to 8).
# E^(0) is trained by Adam on the pairwise loss -ln sigma(score(u, liked) - score(u, other)), plus
# the decay times half the squared norms of the three rows of E^(0), means over a batch.
#
# E = P E^(0) is linear and P symmetric, so the gradient with respect to E^(0) is P times that with
# respect to E: one more propagation of a matrix that is zero outside the batch, without automatic
# differentiation.
#
# Where this differs from the paper: no known difference with the default settings. Like the
# authors' code, and unlike their text, it draws users uniformly, and then one of the user's items.
# Two settings for large graphs are not in the paper: `precision = "bfloat16"` propagates rows of
# half the size, and `final-rate` decreases the learning rate, so that fewer large batches suffice.


class LightgcnConfig(TrainingConfig):
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
        table = histories.csr()
        self.fitted = histories
        users = histories.num_users
        self._graph = _Graph(table, _PRECISIONS[config.precision], self.device)
        generator = torch_stream(config.seed, "baseline-lightgcn")
        first = (
            torch.randn(users + histories.num_items, config.factors, generator=generator)
            * _INIT_STD
        ).to(self.device)
        triples = Triples(table, "users", stream(config.seed, "baseline-lightgcn-triples"))
        steps = -(-triples.per_epoch // config.batch_size)

        def backward(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
            drawn, liked, other = batch
            rows = torch.from_numpy(np.stack([drawn, liked + users, other + users]))
            first.grad = self._gradient(first, rows.to(self.device))

        layers = train(
            [first], config, lambda _: triples.epoch(config.batch_size), backward, steps=steps
        )
        for _ in range(config.layers):
            layers.append(self._graph.propagate(layers[-1]))
        averaged = torch.stack(layers).mean(0)
        self.user_rows = averaged[:users].cpu().numpy()
        self._items = averaged[users:]

    def scores(self, histories: Histories) -> Tensor:
        """Products of the averaged rows, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories)).to(self.device) @ self._items.T

    def _gradient(self, first: Tensor, rows: Tensor) -> Tensor:
        """Gradient of the mean loss of a batch of triples `int64 [3, batch]` with respect to
        E^(0)."""
        averaged = self._graph.average(first, self.config.layers)
        users, liked, others = (F.embedding(index, averaged) for index in rows)
        slope = -torch.sigmoid((users * (others - liked)).sum(1, keepdim=True)) / rows.shape[1]
        outer = torch.zeros_like(first)
        changes = slope * (liked - others), slope * users, -slope * users
        for index, change in zip(rows, changes, strict=True):
            outer.index_add_(0, index, change)
        gradient = self._graph.average(outer, self.config.layers)
        share = self.config.decay / len(users)
        for index in rows:  # a product first: `alpha` would take index_add_ on a slow path
            gradient.index_add_(0, index, F.embedding(index, first).mul_(share))
        return gradient


class _Graph:
    """Symmetric graph of likes; its nodes are the users, then the items.

    Args:
        liked: binary `[users, items]`.
        precision: type of the rows that `average` propagates.
        device: device of the graph.
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
        self._precision = precision
        full = torch.from_numpy(weights).to(device)
        self._weights = {full.dtype: full, precision: full.to(precision)}
        self._columns, self._offsets = (
            torch.from_numpy(array.astype(np.int64)).to(device)
            for array in (both.indices, both.indptr)
        )

    def propagate(self, rows: Tensor) -> Tensor:
        """Multiply D^-1/2 A D^-1/2 by a matrix `[users + items, width]`, float32 or of this graph's
        precision; sums are float32, the result has the matrix's type."""
        return F.embedding_bag(
            self._columns,
            rows,
            self._offsets,
            mode="sum",
            per_sample_weights=self._weights[rows.dtype],
            include_last_offset=True,
        )

    def average(self, rows: Tensor, number: int) -> Tensor:
        """Multiply P by a matrix `[users + items, width]`: the mean of E^(0) to E^(number),
        `float32`; all but E^(0) are rounded to this graph's precision."""
        total = rows.clone()
        rows = rows.to(self._precision)
        for _ in range(number):
            rows = self.propagate(rows)
            total += rows
        return total.div_(number + 1)


# BPR-MF (Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009).
#
#     -ln sigma(p_u . (q_i - q_j)) + lambda / 2 (|p_u|^2 + |q_i|^2 + |q_j|^2)
#
# for each positive i of a user and a fresh item j that the user has not, by stochastic gradient
# descent, triple by triple. Factors and items are drawn in numpy, and the triples of an epoch are
# processed in native code.
#
# Where this differs from the papers: Rendle et al. draw triples with replacement, here each epoch
# visits every positive once in random order. UPC-SDG's experiments use LightGCN's code (Adam,
# batches of 2,048).


_BPR_INIT_STD = 0.1  # of the factors


class BprmfConfig(SeededConfig):
    """Settings of BPR-MF; the defaults were chosen on validation rows of Amazon Office."""

    factors: Width = 64
    """Number of factors (width of p_u and q_i)."""
    epochs: int = Field(default=800, ge=1)
    """Epochs over the positives."""
    learning_rate: float = Field(default=0.05, gt=0)
    """Learning rate."""
    regularisation: float = Field(default=0.05, ge=0)
    """Lambda: weight of the squared norms of the three rows of a triple."""


class Bprmf(UserRowsBaseline):
    """Matrix factorization by pairwise ranking.

    Attributes:
        items: `float32 [items, factors]`.
    """

    name = "bprmf"
    Config = BprmfConfig
    paper = "Rendle et al. 2009"
    config: BprmfConfig

    def fit(self, histories: Histories) -> None:
        """Train from fresh factors; a user with the whole catalogue has no negatives and is left
        out.

        Raises:
            DataError: no user has a positive and a negative item.
        """
        config = self.config
        random = stream(self.config.seed, "baseline-bprmf")
        sizes = (histories.num_users, config.factors), (histories.num_items, config.factors)
        self.user_rows, self.items = (
            random.normal(0, _BPR_INIT_STD, size).astype(np.float32) for size in sizes
        )
        self.fitted = histories
        triples = Triples(histories.csr(), "pairs", random)
        rates = np.float32(config.learning_rate), np.float32(config.regularisation)
        for _ in range(config.epochs):
            for columns in triples.epoch(triples.per_epoch):
                _epoch(self.user_rows, self.items, *columns, *rates)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores `p_u . q_i`, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories) @ self.items.T)


@partial(compiled, flags={"fastmath": True})
def _epoch(user_rows, item_rows, users, liked, others, rate, penalty):
    """Take one step for each triple.

    Args:
        user_rows: `float32 [users, factors]`, changed in place.
        item_rows: `float32 [items, factors]`, changed in place.
        users: `int64 [triples]`.
        liked: `int64 [triples]`, a positive of each.
        others: `int64 [triples]`, an item that each has not.
        rate: step size.
        penalty: lambda.
    """
    width = user_rows.shape[1]
    for n in range(len(others)):
        u = users[n]
        i = liked[n]
        j = others[n]
        difference = np.float32(0)
        for d in range(width):
            difference += user_rows[u, d] * (item_rows[i, d] - item_rows[j, d])
        slope = rate / (np.float32(1) + np.exp(difference))
        shrink = np.float32(1) - rate * penalty
        for d in range(width):
            p = user_rows[u, d]
            q_i = item_rows[i, d]
            q_j = item_rows[j, d]
            user_rows[u, d] = shrink * p + slope * (q_i - q_j)
            item_rows[i, d] = shrink * q_i + slope * p
            item_rows[j, d] = shrink * q_j - slope * p


# LightFM with the WARP loss (Kula 2015; Weston, Bengio and Usunier 2011).
#
#     score(u, i) = p_u . q_i + b_i
#
# where p_u, q_i and b_i are sums over the id and the side features of u and of i.
#
# For each liked item of a user, other items are drawn, up to `max-sampled`, until one scores above
# it minus 1. If that is the t-th, the item's rank is about floor((items - 1) / t), and the step is
# along the gradient of
#
#     ln(max(1, rank)) (score(u, other) - score(u, liked)),    the weight at most 10
#
# by Adagrad, sequentially in random order. Drawn items that the user likes count as tried. A user
# is folded in by the same steps on its own row, which starts from its side features.
#
# Where this differs from LightFM: users have no bias, because it cancels in every ranking; there is
# only one thread, because results would not be reproducible with several; and no L2 penalty,
# which LightFM switches off by default.


class WarpConfig(SeededConfig):
    """Settings of LightFM with WARP."""

    factors: Width = 10
    """Number of factors (width of p_u and q_i)."""
    epochs: int = Field(default=30, ge=1)
    """Epochs over the liked pairs."""
    learning_rate: float = Field(default=0.05, gt=0)
    """Learning rate of Adagrad."""
    max_sampled: int = Field(default=10, ge=1)
    """Largest number of items sampled for a liked one; with more, steps are slower and the rank is
    more exact."""
    unseen_users: Literal["transductive", "fold-in"] = "transductive"
    """Treatment of evaluated users who are not training users: also trained on (`transductive`), or
    folded in afterwards (`fold-in`)."""
    features: tuple[str, ...] = ()
    """Names of side features of users and items that are added to their ids; none: ids only."""


class Warp(UserRowsBaseline):
    """Factors of ids and side features, trained to rank liked items first."""

    name = "warp"
    Config = WarpConfig
    paper = "Kula 2015; Weston et al. 2011"
    config: WarpConfig

    def __init__(self, config: WarpConfig) -> None:
        super().__init__(config)
        self.transductive = config.unseen_users == "transductive"

    @classmethod
    def features_used(cls, config: WarpConfig, known: FeatureNames) -> FeatureNames:
        """Side features that `features` names."""
        users, items = (
            tuple(name for name in names if name in config.features)
            for names in (known.users, known.items)
        )
        return FeatureNames(users, items)

    def fit(self, histories: Histories) -> None:
        """Train from fresh factors.

        Raises:
            ExperimentError: `features` names an unknown side feature.
        """
        self.fitted = histories
        users, self._item_parts = self._parts(histories)
        random = stream(self.config.seed, "baseline-warp")
        width = self.config.factors
        factors, items = (
            ((random.random((parts.shape[1], width)) - 0.5) / width).astype(np.float32)
            for parts in (users, self._item_parts)
        )
        # the last column of items' parts is the bias
        self._table = np.pad(items, ((0, 0), (0, 1)))
        self._squares = np.ones_like(self._table)
        self._descend(histories.csr(), users, factors, random, learn_items=True)
        self._features = factors[histories.num_users :]
        self.user_rows = np.asarray(users @ factors, dtype=np.float32)
        *columns, self._biases = np.asarray(self._item_parts @ self._table, dtype=np.float32).T
        self._items = np.stack(columns)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores of the catalogue, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories) @ self._items + self._biases)

    def rows_of_new(self, histories: Histories) -> np.ndarray:
        """Rows `float32 [users, width]`, see `UserRowsBaseline`, by the steps of training."""
        codes = self._parts(histories)[0][:, histories.num_users :]
        rows = np.asarray(codes @ self._features, dtype=np.float32)
        alone = sparse.csr_array(np.ones((1, 1), np.float32))
        for user in range(histories.num_users):
            liked = histories.block(user, user + 1)
            # a seed that does not depend on the other users of a block
            seed = zlib.crc32(np.sort(liked.items).astype(np.int64).tobytes())
            random = stream(seed, "fold-in")
            row = rows[user : user + 1]
            self._descend(liked.csr(), alone, row, random, learn_items=False)
        return rows

    def _descend(
        self,
        liked: Sparse,
        users: Sparse,
        user_table: np.ndarray,
        random: np.random.Generator,
        *,
        learn_items: bool,
    ) -> None:
        """Take the steps of all epochs on the liked pairs, each in random order; the tables change
        in place."""
        owners = np.repeat(np.arange(liked.shape[0]), np.diff(liked.indptr))
        matrices = [
            array.astype(np.int64)
            for table in (liked, users, self._item_parts)
            for array in (table.indptr, table.indices)
        ]
        tables = user_table, np.ones_like(user_table), self._table, self._squares
        settings = learn_items, self.config.learning_rate, self.config.max_sampled
        state = random.integers(1, 2**63, 1).astype(np.uint64)
        for _ in range(self.config.epochs):
            order = random.permutation(liked.nnz)
            _warp_steps(order, owners, *matrices, *tables, *settings, state)

    def _parts(self, histories: Histories) -> tuple[Sparse, Sparse]:
        """Ids and feature codes that sum to the row of each user, `[users, ids + codes]`, and of
        each item, `[items, ids + codes]`."""
        nothing = FeatureTable(0)
        users = nothing if histories.users is None else histories.user_features or nothing
        items = histories.item_features or nothing
        known = [*users.names, *items.names]
        unknown = sorted(set(self.config.features) - set(known))
        if unknown:
            raise ExperimentError(
                f"unknown side feature {unknown[0]!r}",
                fix=f"correct `features`; known features: {', '.join(known) or 'none'}",
            )

        def parts(table: FeatureTable, rows: np.ndarray) -> Sparse:
            named = [name for name in self.config.features if name in table.names]
            codes = [memberships(table[name])[rows] for name in named]
            columns: list[Sparse] = [sparse.eye_array(len(rows)), *codes]
            return sparse.csr_array(sparse.hstack(columns), dtype=np.float32)

        return parts(users, histories.numbers), parts(items, np.arange(histories.num_items))


@njit
def _drawn(state, below):
    """Random integer below a limit, by xorshift64*."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64(((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % np.uint64(below))


@njit
def _sum(starts, parts, row, table, out):
    """Write the sum of the parts of a row."""
    out[:] = 0
    for entry in range(starts[row], starts[row + 1]):
        out += table[parts[entry]]


@njit
def _move(starts, parts, row, table, squares, gradient, rate):
    """Take a step of Adagrad on each part of a row."""
    for entry in range(starts[row], starts[row + 1]):
        part = parts[entry]
        for d in range(len(gradient)):
            table[part, d] -= rate / np.sqrt(squares[part, d]) * gradient[d]
            squares[part, d] += gradient[d] * gradient[d]


@partial(compiled, flags={})
def _warp_steps(
    order, owners, liked_from, liked, user_from, user_parts, item_from, item_parts,
    users, user_squares, items, item_squares, learn_items, rate, max_sampled, state,
):  # fmt: skip
    """Take one step for each liked pair in `order`; `owners[n]` is the user of pair n, `liked[n]`
    its item, ascending. Rows of items, and of `p`, which then is 1, end with the bias."""
    num_items = len(item_from) - 1
    width = users.shape[1]
    p = np.ones(width + 1, np.float32)
    q = np.empty(width + 1, np.float32)
    other = np.empty(width + 1, np.float32)
    for pair in order:
        user = owners[pair]
        item = liked[pair]
        liked_items = liked[liked_from[user] : liked_from[user + 1]]
        _sum(user_from, user_parts, user, users, p[:width])
        _sum(item_from, item_parts, item, items, q)
        score = np.dot(p[:width], q[:width]) + q[width]
        for tries in range(1, max_sampled + 1):
            drawn = _drawn(state, num_items)
            _sum(item_from, item_parts, drawn, items, other)
            if np.dot(p[:width], other[:width]) + other[width] <= score - 1:
                continue
            rank = np.searchsorted(liked_items, drawn)
            if rank < len(liked_items) and liked_items[rank] == drawn:
                continue
            # ln of the estimated rank, at most 10
            weight = np.float32(min(10.0, np.log(max(1.0, np.floor((num_items - 1) / tries)))))
            difference = weight * (other - q)
            if learn_items:
                _move(item_from, item_parts, item, items, item_squares, -weight * p, rate)
                _move(item_from, item_parts, drawn, items, item_squares, weight * p, rate)
            _move(user_from, user_parts, user, users, user_squares, difference[:width], rate)
            break
