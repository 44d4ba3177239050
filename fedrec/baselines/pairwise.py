# SPDX-License-Identifier: Apache-2.0
"""Systems trained on pairs of a liked and another item: LightGCN, BPR-MF and WARP."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from scipy import sparse
from torch import Tensor
from torch.nn import functional as F

from fedrec.baselines.base import Histories, Sparse, native, pointers
from fedrec.baselines.training import (
    TrainingConfig,
    Triples,
    UserRowsBaseline,
    UserRowsConfig,
    own_seed,
    train,
)
from fedrec.config import Width
from fedrec.data.features import FeatureNames, FeatureTable
from fedrec.errors import DataError, ExperimentError
from fedrec.rng import stream, torch_stream

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
# A new user is folded in with a row of zeros in E^(0): its embedding is propagated from its items
# over K layers.
#
# Where this differs from the paper: with the default settings, in nothing that is known. Like the
# authors' code, and unlike their text, it draws users uniformly, and then one of the user's items.
# Two settings for large graphs are not in the paper: `precision = "bfloat16"` propagates rows of
# half the size, and `final-rate` decreases the learning rate, so that fewer large batches suffice.


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


# BPR-MF (Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009).
#
#     -ln sigma(p_u . (q_i - q_j)) + lambda / 2 (|p_u|^2 + |q_i|^2 + |q_j|^2)
#
# for each positive i of a user and a fresh item j that the user has not, by stochastic gradient
# descent, one triple after the other. Factors and items are drawn in numpy, and the triples of an
# epoch are processed in native code.
#
# Where this differs from the papers: Rendle et al. draw triples with replacement, here each epoch
# visits every positive once in random order. UPC-SDG's experiments use LightGCN's code (Adam,
# batches of 2,048). A user who is folded in gets the gradient of the objective at p_u = 0: the sum
# of its items' factors, each minus the mean of all.


class BprmfConfig(UserRowsConfig):
    """Settings of BPR-MF; the defaults were chosen on validation rows of Amazon Office."""

    factors: Width = 64
    """Number of factors (width of p_u and q_i)."""
    epochs: int = Field(default=800, ge=1)
    """Epochs over the positives."""
    learning_rate: float = Field(default=0.05, gt=0)
    """Learning rate."""
    regularisation: float = Field(default=0.05, ge=0)
    """Lambda: weight of the squared norms of the three rows of a triple."""
    negatives: Literal["uniform", "popular"] = "uniform"
    """Sampling of j: uniformly from the items that the user does not have, or in proportion to
    popularity, skipping its own items."""
    biases: bool = False
    """Whether items have biases, which are added to p_u . q_i and trained and penalised like
    factors."""
    spread: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial factors."""


class Bprmf(UserRowsBaseline):
    """Matrix factorization by pairwise ranking.

    Attributes:
        items: `float32 [items, factors]`.
        biases: `float32 [items]`; zero without them.
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
        for _ in self.training(histories):
            pass

    def training(self, histories: Histories) -> Iterator[int]:
        """`fit`, one epoch at a time, so that the model can be evaluated during training.

        Args:
            histories: positives of the users.

        Yields:
            The number of completed epochs; the factors are those after them.

        Raises:
            DataError: no user has a positive and a negative item.
        """
        config = self.config
        random = stream(self.config.seed, "baseline-bprmf")
        sizes = (histories.num_users, config.factors), (histories.num_items, config.factors)
        self.own, self.items = (
            random.normal(0, config.spread, size).astype(np.float32) for size in sizes
        )
        self.fitted = histories
        self.biases = np.zeros(histories.num_items, dtype=np.float32)
        liked = histories.distinct()
        own_users = liked.rows()
        own_items = liked.items
        offsets = liked.offsets
        counts = np.diff(offsets)
        trained = np.flatnonzero((histories.num_items - counts)[own_users] > 0)
        if not len(trained):
            raise DataError(
                "there is nothing to rank",
                expected="a user with positives and other items",
                got="none",
                fix="lower positive-above, or choose another split or dataset",
            )
        triples = Triples(liked.csr(), "pairs", random)
        keys = own_users * histories.num_items + own_items
        steps = (np.float32(config.learning_rate), np.float32(config.regularisation))
        for epoch in range(config.epochs):
            order = random.permutation(trained)
            if config.negatives == "uniform":
                others = triples.others(own_users[order])
            else:
                others = own_items[random.integers(0, len(own_items), len(order))]
                pairs = own_users[order] * histories.num_items + others
                new = keys[np.searchsorted(keys, pairs).clip(max=len(keys) - 1)] != pairs
                order = order[new]
                others = others[new]
            _epoch(
                self.own,
                self.items,
                self.biases,
                own_users[order],
                own_items[order],
                others,
                *steps,
                config.biases,
            )
            yield epoch + 1

    def scores(self, histories: Histories) -> torch.Tensor:
        """`p_u . q_i`, and biases, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories) @ self.items.T + self.biases)

    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only."""
        rows = np.zeros((histories.num_users, self.config.factors), dtype=np.float32)
        np.add.at(rows, histories.rows(), self.items[histories.items] - self.items.mean(axis=0))
        return rows


@native(fastmath=True)
def _epoch(users, items, biases, own_users, own_items, others, rate, penalty, biased) -> None:
    """One step for each triple.

    Args:
        users: `float32 [users, factors]`, changed in place.
        items: `float32 [items, factors]`, changed in place.
        biases: `float32 [items]`, changed in place if `biased`.
        own_users: `int64 [triples]`.
        own_items: `int64 [triples]`, a positive of each.
        others: `int64 [triples]`, an item that each has not.
        rate: step size.
        penalty: lambda.
        biased: whether biases learn.
    """
    width = users.shape[1]
    for n in range(len(others)):
        u = own_users[n]
        i = own_items[n]
        j = others[n]
        difference = biases[i] - biases[j]
        for d in range(width):
            difference += users[u, d] * (items[i, d] - items[j, d])
        slope = rate / (np.float32(1) + np.exp(difference))
        shrink = np.float32(1) - rate * penalty
        for d in range(width):
            own = users[u, d]
            liked = items[i, d]
            other = items[j, d]
            users[u, d] = shrink * own + slope * (liked - other)
            items[i, d] = shrink * liked + slope * own
            items[j, d] = shrink * other - slope * own
        if biased:
            biases[i] = shrink * biases[i] + slope
            biases[j] = shrink * biases[j] - slope


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
# by Adagrad, one step after the other in random order. Drawn items that the user likes count as
# tried. A user is folded in by the same steps on its own row, which starts from its side features.
#
# Where this differs from LightFM: users have no bias, because it cancels in every ranking; there is
# only one thread, because results would not be reproducible with several; there is no L2 penalty,
# which LightFM switches off by default.


class WarpConfig(UserRowsConfig):
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
    features: tuple[str, ...] = ()
    """Names of side features of users and items that are added to their ids; none: ids only."""


class Warp(UserRowsBaseline):
    """Factors of ids and side features, trained to rank liked items first."""

    name = "warp"
    Config = WarpConfig
    paper = "Kula 2015; Weston et al. 2011"
    config: WarpConfig

    @classmethod
    def features_used(cls, config: WarpConfig, known: FeatureNames) -> FeatureNames:
        """Those that `features` names."""
        sides = (known.users, known.items)
        return FeatureNames(
            *(tuple(name for name in side if name in config.features) for side in sides)
        )

    def fit(self, histories: Histories) -> None:
        """Train from fresh factors.

        Raises:
            ExperimentError: there is no side feature of a name in `features`.
        """
        config = self.config
        random = stream(self.config.seed, "baseline-warp")
        self.fitted = histories
        liked = histories.csr()
        user_has, item_has = self._described(histories)
        self._item_has = pointers(item_has)
        users, items = (
            ((random.random((part.shape[1], config.factors)) - 0.5) / config.factors).astype(
                np.float32
            )
            for part in (user_has, item_has)
        )
        biases = np.zeros(len(items), np.float32)
        tables = (
            users,
            np.ones_like(users),
            items,
            np.ones_like(items),
            biases,
            np.ones_like(biases),
        )
        state = random.integers(1, 2**63, 1).astype(np.uint64)
        owner = np.repeat(np.arange(histories.num_users), np.diff(liked.indptr))
        for _ in range(config.epochs):
            order = random.permutation(len(owner))
            self._epoch(order, owner, liked, pointers(user_has), tables, True, state)
        self._features = users
        self._item_tables = tables[2:]
        self.own = np.asarray(user_has @ users, dtype=np.float32)
        self._items = np.asarray(item_has @ items, dtype=np.float32)
        self._biases = np.asarray(item_has @ biases, dtype=np.float32)

    def scores(self, histories: Histories) -> torch.Tensor:
        """Scores of the catalogue, `float32 [users, items]`."""
        return torch.from_numpy(self.rows(histories) @ self._items.T + self._biases)

    def folded_in(self, histories: Histories) -> np.ndarray:
        """`float32 [users, width]`: rows of users that were not in training, each computed from its
        own items only."""
        codes = _codes(
            histories.user_features, self._of_users, histories.users, histories.num_users
        )
        start = codes @ self._features[self.fitted.num_users :] if codes.shape[1] else 0.0
        rows = np.zeros((histories.num_users, self.config.factors), np.float32) + start
        alone = np.arange(2), np.zeros(1, np.int64)  # its own row only
        for user in range(histories.num_users):
            block = histories.block(user, user + 1)
            liked = block.csr()
            own = rows[user : user + 1]
            random = stream(own_seed(block.items), "fold-in")
            state = random.integers(1, 2**63, 1).astype(np.uint64)
            pairs = np.concatenate(
                [random.permutation(liked.nnz) for _ in range(self.config.epochs)]
            )
            tables = (own, np.ones_like(own), *self._item_tables)
            self._epoch(pairs, np.zeros(liked.nnz, np.int64), liked, alone, tables, False, state)
        return rows

    def _epoch(
        self,
        order: np.ndarray,
        owner: np.ndarray,
        liked: Sparse,
        user_has: tuple[np.ndarray, np.ndarray],
        tables: tuple[np.ndarray, ...],
        learn_items: bool,
        state: np.ndarray,
    ) -> None:
        """Steps on the liked pairs in an order; the tables change in place."""
        from fedrec.baselines.warp_steps import (
            descend,  # imports Numba, which is slow and not needed to read settings
        )

        native: Any = descend  # pyright counts arguments that are unpacked as one each
        matrices = (*pointers(liked), *user_has, *self._item_has)
        config = self.config
        native(
            order,
            owner,
            *matrices,
            *tables,
            learn_items,
            config.learning_rate,
            config.max_sampled,
            state,
        )

    def _described(self, histories: Histories) -> tuple[Sparse, Sparse]:
        """The ids and feature codes that sum to the row of each user, `[users, ids + codes]`, and
        of each item, `[items, ids + codes]`."""
        tables = (
            (None if histories.users is None else histories.user_features),
            histories.item_features,
        )
        names = [() if table is None else table.names for table in tables]
        unknown = sorted(set(self.config.features) - {name for part in names for name in part})
        if unknown:
            raise ExperimentError(
                f"there is no side feature {unknown[0]!r}",
                expected="names of side features of the dataset's users or items",
                got=", ".join(self.config.features),
                fix="known: " + (", ".join(name for part in names for name in part) or "none"),
            )
        self._of_users, of_items = (
            [n for n in self.config.features if n in part] for part in names
        )
        ids = np.arange(histories.num_items)
        number = histories.num_users
        codes = (
            _codes(tables[0], self._of_users, histories.users, number),
            _codes(tables[1], of_items, ids, histories.num_items),
        )
        ids_and_codes = (
            [sparse.eye_array(part.shape[0]).astype(np.float32), part] for part in codes
        )
        users, items = (sparse.csr_array(sparse.hstack(parts)) for parts in ids_and_codes)
        return users, items


def _codes(
    table: FeatureTable | None, names: Sequence[str], rows: np.ndarray | None, number: int
) -> Sparse:
    """Which categories some rows have, binary
    `float32 [rows, categories of all these features]`."""
    parts: list[Sparse] = [sparse.csr_array((number, 0), dtype=np.float32)]
    if table is None or rows is None:
        return parts[0]
    for name in names:
        feature = table[name]
        shape = (feature.rows, len(feature.categories))
        whole: Sparse = sparse.csr_array(
            (np.ones(len(feature.codes), np.float32), feature.codes, feature.offsets), shape
        )
        parts.append(whole[rows])
    return sparse.csr_array(sparse.hstack(parts))
