# SPDX-License-Identifier: Apache-2.0
"""Substitutes for selected rows, and their similarity to the items that they replace."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedrec.baselines.base import Histories
from fedrec.baselines.pairwise import Bprmf, BprmfConfig
from fedrec.config import Config
from fedrec.data.client_data import nth_outside, row_numbers
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import Perturbation, Perturbed, TrainingData
from fedrec.errors import DataError
from fedrec.rng import stream

# Substitutes for selected rows: distinct items that the user does not have. UPC-SDG does not
# specify what happens if two rows of a user get the same substitute. Here a profile keeps its size:
# an item that the user has, or that already replaced another of its rows, is drawn again (which is
# equivalent to a draw from the distribution without it).

Draw = Literal["sample", "best"]
Scores = Callable[[np.ndarray], Tensor]
_CELLS_AT_ONCE = 24_000_000  # rows times items of a block with its own random stream
_CELLS_IN_CACHE = 2_000_000  # rows times items of scores in memory
_DRAWS_AT_ONCE = 16  # proposals per row


def random_substitutes(rows: Interactions, chosen: np.ndarray, seed: int) -> np.ndarray:
    """Draw substitutes uniformly from the items that a user does not have, without repetition.

    Args:
        rows: the training rows.
        chosen: `int64 [n]`: row numbers, grouped by user.
        seed: of the streams `"perturb-items"`, one per user.

    Returns:
        `int64 [n]`: the items that replace those of the chosen rows.

    Raises:
        DataError: a user has too few items left.
    """
    substitutes = np.empty(len(chosen), dtype=np.int64)
    for user, indices in _by_user(rows.users[chosen]):
        free = _free_items(rows, user, len(indices))
        ranks = stream(seed, "perturb-items", user).choice(free, size=len(indices), replace=False)
        visited = np.unique(rows.items[rows.rows_of(user)])
        substitutes[indices] = nth_outside(visited, ranks)
    return substitutes


def scored_substitutes(
    rows: Interactions, chosen: np.ndarray, scores: Scores, draw: Draw, seed: int
) -> np.ndarray:
    """Draw substitutes from softmax(scores), i.e. by arg max of scores plus Gumbel noise, or take
    the best ones.

    Args:
        rows: the training rows.
        chosen: `int64 [n]`: row numbers, grouped by user.
        scores: returns `float32 [m, items]` for m of the chosen rows.
        draw: `sample` from the softmax, or take the `best`.
        seed: of the streams `"perturb-draw"`, one per block of users; blocks depend on the data
            only.

    Returns:
        `int64 [n]`: the items that replace those of the chosen rows.

    Raises:
        DataError: a user has too few items left.
    """
    substitutes = np.empty(len(chosen), dtype=np.int64)
    for number, indices in enumerate(_blocks(rows, chosen)):
        generator = np.random.Generator(
            np.random.PCG64(stream(seed, "perturb-draw", number).integers(2**63))
        )
        substitutes[indices] = _distinct(rows, chosen[indices], scores, draw, generator)
    return substitutes


def _blocks(rows: Interactions, chosen: np.ndarray) -> list[np.ndarray]:
    """Split the chosen rows into blocks of whole users with at most `_CELLS_AT_ONCE` cells, or of
    one user, and return their indices."""
    most = max(1, _CELLS_AT_ONCE // rows.num_items)
    blocks: list[list[np.ndarray]] = []
    size = most
    for user, indices in _by_user(rows.users[chosen]):
        _free_items(rows, user, len(indices))
        if not blocks or size + len(indices) > most:
            blocks.append([])
            size = 0
        blocks[-1].append(indices)
        size += len(indices)
    return [np.concatenate(block) for block in blocks]


def _distinct(
    rows: Interactions, chosen: np.ndarray, scores: Scores, draw: Draw, random: np.random.Generator
) -> np.ndarray:
    """Draw an item for each row of a block, distinct within a user.

    Rows are assigned in random order; if all proposals of a row are taken, its user's items are
    removed from its distribution and proposals are drawn again.
    """
    users = rows.users[chosen]
    substitutes = np.full(len(chosen), -1, dtype=np.int64)
    taken: dict[int, set[int]] = {user: set() for user in np.unique(users).tolist()}
    open_rows = random.permutation(len(users))
    while len(open_rows):
        proposals = _proposals(rows, chosen[open_rows], taken, scores, draw, random)
        left = []
        for row, offered in zip(open_rows.tolist(), proposals.tolist(), strict=True):
            of_user = taken[int(users[row])]
            item = next((item for item in offered if item >= 0 and item not in of_user), None)
            if item is None:
                left.append(row)
            else:
                substitutes[row] = item
                of_user.add(item)
        open_rows = np.array(left, dtype=np.int64)
    return substitutes


def _proposals(
    rows: Interactions,
    chosen: np.ndarray,
    taken: Mapping[int, set[int]],
    scores: Scores,
    draw: Draw,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw items to try for each row, `int64 [rows, 16]`, without those that the user has or was
    assigned, padded with -1. Scores are computed in blocks that fit into the cache."""
    users = rows.users[chosen]
    count = len(chosen)
    proposals = np.full((count, _DRAWS_AT_ONCE), -1, dtype=np.int64)
    uniform = random.random(proposals.shape) if draw == "sample" else None
    at_once = max(1, _CELLS_IN_CACHE // rows.num_items)
    by_user = np.argsort(users, kind="stable")
    for start in range(0, count, at_once):
        some = by_user[start : start + at_once]
        table = scores(chosen[some])
        _mask_taken(table, rows, users[some], taken)
        if uniform is None:
            best = table.topk(min(_DRAWS_AT_ONCE, rows.num_items), dim=1)
            items = torch.where(best.values > -torch.inf, best.indices, -1)
            proposals[some, : items.shape[1]] = items.numpy()
        else:
            weights = table.sub_(table.amax(dim=1, keepdim=True)).exp_()
            proposals[some] = _drawn_by_weight(weights.numpy(), uniform[some])
    return proposals


def _drawn_by_weight(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Draw items with probabilities proportional to the weights in each row.

    Args:
        weights: `float32 [rows, items]`, finite, >= 0, in each row one above 0.
        uniform: `float64 [rows, draws]`, uniform in [0, 1).

    Returns:
        `int64 [rows, draws]`: for each row and draw the first item whose cumulative weight exceeds
        that share of the total; never one with weight 0.
    """
    drawn = np.empty(uniform.shape, dtype=np.int64)
    for row, sums in enumerate(np.cumsum(weights, axis=1, dtype=np.float64)):
        shares = np.searchsorted(sums, uniform[row] * sums[-1], side="right")
        # rounding can move a draw beyond the last item with positive weight
        drawn[row] = np.minimum(shares, np.searchsorted(sums, sums[-1]))
    return drawn


def _mask_taken(
    table: Tensor, rows: Interactions, users: np.ndarray, taken: Mapping[int, set[int]]
) -> None:
    """Set the scores of items that a row's user has, or that already replaced another of its rows,
    to minus infinity."""
    for user, indices in _by_user(users):
        replaced = np.array([*taken[user]], np.int64)
        items = np.concatenate([rows.items[rows.rows_of(user)], replaced])
        table[indices[0] : indices[-1] + 1, torch.from_numpy(items)] = -torch.inf


def _by_user(users: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each user and the indices of its rows; rows are grouped by user."""
    if not len(users):
        return
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    yield from zip(users[starts].tolist(), np.split(np.arange(len(users)), starts[1:]), strict=True)


def _free_items(rows: Interactions, user: int, count: int) -> int:
    """Number of items that a user does not have; an error if fewer than `count`."""
    free = rows.num_items - len(np.unique(rows.items[rows.rows_of(user)]))
    if count > free:
        raise DataError(
            f"too few unvisited items to replace rows of user {rows.user_ids[user]}",
            expected=f"at least {count} items that the user does not have",
            got=f"{free} of {rows.num_items}",
            fix="lower perturb.replacement-ratio, or leave the user out",
        )
    return free


# Similarity of two items by their embeddings (UPC-SDG, equation 2), by one of three definitions.
#
#     paper      (q_i.q_v - min_j q_i.q_j) / (q_i.q_i - min_j q_i.q_j)
#     released   (q_v.q_i - min_j q_v.q_j) / (max_j q_v.q_j - min_j q_v.q_j)
#     cosine     q_i.q_v / (|q_i| |q_v|)
#
# `paper` is 1 for the item itself and 0 for the least similar one, and exceeds 1 for longer vectors
# in the same direction, so its range does not end at 1. `released` is computed by the authors'
# public code: normalised by the substitute's row instead of the original's, always in [0, 1]. The
# text calls the quantity a cosine, but its formula is not one; `cosine` is.
#
# The least and largest products are over all items.

Definition = Literal["paper", "released", "cosine"]
_ITEMS_AT_ONCE = 512  # items per block of products in memory
_SMALL = 1e-12


class Similarity:
    """Similarity of items to other items, or to mixtures of items.

    Args:
        items: `float32 [items, d]`, the items' embeddings.
        definition: which of the three.
    """

    def __init__(self, items: Tensor, definition: Definition) -> None:
        self.items = items
        self.definition: Definition = definition
        self.least, self.most = _extremes(items)
        self.squares = items.square().sum(1)

    def of(
        self,
        originals: Tensor,
        others: Tensor,
        extremes: tuple[Tensor, Tensor] | None = None,
        definition: Definition | None = None,
    ) -> Tensor:
        """Compute the similarity of each original to the vector with the same index, `float32 [n]`.

        Args:
            originals: `int64 [n]`, items.
            others: `float32 [n, d]`, vectors of items, or mixtures of them.
            extremes: least and largest product of each vector with any item, `[n]` each; needed for
                `released` only.
            definition: default: the one of this object.
        """
        product = (self.items[originals] * others).sum(1)
        return self._value(product, originals, others.norm(dim=1), extremes, definition)

    def between(
        self, originals: Tensor, others: Tensor, definition: Definition | None = None
    ) -> Tensor:
        """Similarity of two lists of items `int64 [n]`, by any definition, `float32 [n]`."""
        extremes = self.least[others], self.most[others]
        return self.of(originals, self.items[others], extremes, definition)

    def rows(self, originals: Tensor) -> Tensor:
        """Compute the similarity of some originals to every item, `float32 [n, items]`."""
        product = self.items[originals] @ self.items.T
        extremes = self.least, self.most
        return self._value(product, originals[:, None], self.squares.sqrt(), extremes)

    def _value(
        self,
        product: Tensor,
        originals: Tensor,
        lengths: Tensor,
        extremes: tuple[Tensor, Tensor] | None,
        definition: Definition | None = None,
    ) -> Tensor:
        """Apply the definition to products of originals with others, the others' lengths, and their
        least and largest products with any item."""
        definition = definition or self.definition
        squares = self.squares[originals]
        if definition == "cosine":
            return product / (squares.sqrt() * lengths).clamp(min=_SMALL)
        if extremes is None or definition == "paper":
            extremes = self.least[originals], squares
        least, most = extremes
        return (product - least) / (most - least).clamp(min=_SMALL)


def _extremes(items: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest product of each item with any item, including itself, `[items]` each;
    computed in blocks."""
    products = [(part @ items.T).aminmax(dim=1) for part in items.split(_ITEMS_AT_ONCE)]
    least, most = (torch.cat(parts) for parts in zip(*products, strict=True))
    return least, most


# BPR-MF embeddings of the training rows, which define similarity (UPC-SDG, experiments).


def trained_embeddings(settings: BprmfConfig, rows: Interactions) -> tuple[Tensor, Tensor]:
    """Train embeddings of users and items on all rows, `float32 [users, d]` and `[items, d]`.

    Raises:
        DataError: no user has a positive and a negative item.
    """
    trained = Bprmf(settings)
    trained.fit(Histories(rows.num_items, rows.user_offsets, rows.items[rows.user_order]))
    return torch.from_numpy(trained.user_rows), torch.from_numpy(trained.items)


# Similarity of substitutes to the items that they replace, by gamma (UPC-SDG, figure 4), for any
# perturbation.
#
# Similarity is measured by BPR-MF embeddings of the *real* training rows, so the figures are for
# the holder of these rows and not part of a release. UPC-SDG reports the figures of its own
# embeddings; for other perturbations they are trained here, with UPC-SDG's settings but at most
# 30 million steps.

FIGURE = "mean similarity by sensitivity"
"""Name of the table among the figures of a perturbation."""
_DEFINITIONS: tuple[Definition, ...] = ("paper", "released", "cosine")
_MOST_STEPS = 30_000_000


def mean_similarity(
    originals: np.ndarray, substitutes: np.ndarray, similarity: Similarity, label: str = "all"
) -> dict[str, dict[str, float]]:
    """Mean similarity of items to their substitutes, by all three definitions.

    Args:
        originals: `int64 [n]`, items.
        substitutes: `int64 [n]`, the items that replace them.
        similarity: of the items, by any definition.
        label: key of the result: gamma, if there is one.

    Returns:
        By the label: the number of `rows`, and the mean by definition; empty for n = 0.
    """
    if not len(originals):
        return {}
    pair = torch.from_numpy(originals), torch.from_numpy(substitutes)
    means = {name: float(similarity.between(*pair, name).double().mean()) for name in _DEFINITIONS}
    return {label: {"rows": len(originals), **means}}


def measured_similarity(
    real: Interactions, perturbed: Perturbed, seed: int
) -> dict[str, dict[str, float]]:
    """Mean similarity for a perturbation that trains no embeddings, over rows with a changed item.

    Args:
        real: the training rows before.
        perturbed: the training rows after; rows without an origin are left out.
        seed: of the embeddings.
    """
    origin = np.asarray(perturbed.origin)
    rows = np.flatnonzero(origin >= 0)
    originals = real.items[origin[rows]]
    substitutes = perturbed.rows.items[rows]
    moved = originals != substitutes
    if not moved.any():
        return {}
    epochs = min(BprmfConfig().epochs, max(1, _MOST_STEPS // max(1, len(real))))
    _, items = trained_embeddings(BprmfConfig(epochs=epochs, seed=seed), real)
    similarity = Similarity(items, "paper")
    return mean_similarity(originals[moved], substitutes[moved], similarity)


# Selection of the rows to replace (UPC-SDG, equation 7), for all users at once.


class ReplacementConfig(Config):
    """Settings of a perturbation that replaces rows."""

    replacement_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share k of each user's training rows to replace, in [0, 1]; k n is rounded half up."""


def check_rows(data: TrainingData) -> None:
    """Check that training clients and tested users have training rows to derive synthetic rows.

    Raises:
        DataError: users, or the whole dataset, have no training rows.
    """
    users = np.union1d(data.clients, data.tested)
    none = users[np.bincount(data.rows.users, minlength=data.rows.num_users)[users] == 0]
    if len(none) or not len(data.rows):
        shown = ", ".join(str(data.rows.user_ids[user]) for user in none[:5])
        raise DataError(
            f"{data.rows.name} has users without training rows",
            expected="at least one training row of each training or test user",
            got=f"{len(none)} users without one ({shown})",
            fix="remove them from the dataset, or choose a split with training rows of each user",
        )


def replaced_counts(rows: Interactions, ratio: float) -> np.ndarray:
    """Number of replaced rows of each user, `int64 [users]`: k n rounded half up, for the ratio k,
    in [0, 1]."""
    counts = np.diff(rows.user_offsets)
    return np.floor(ratio * counts + 0.5 + 1e-9).astype(np.int64)  # .35 x 10 is 3.4999999999999996


def lowest(rows: Interactions, score: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Select the rows of each user with the smallest scores.

    Args:
        rows: the training rows.
        score: `float [rows]`; equal scores keep the order of the rows.
        counts: `int64 [users]`, number of rows of each user.

    Returns:
        `int64 [rows]`: row numbers, users ascending, each user's by rising score.
    """
    order = np.lexsort((score, rows.users))
    rank = np.arange(len(order)) - rows.user_offsets[rows.users[order]]
    return order[rank < counts[rows.users[order]]]


# Replacement of a share of each user's rows by random items: a baseline for synthetic data.


class RandomReplacement(Perturbation):
    """Replaces random rows of each user by uniformly random items that the user does not have."""

    name = "random-replacement"
    Config = ReplacementConfig
    config: ReplacementConfig

    def depends_on(self, rated: bool) -> str:
        """Return no dependence: random numbers are drawn for each user separately."""
        return ""

    def perturb(self, data: TrainingData) -> Perturbed:
        """Replace k n rows of each user; a row keeps its user, rating and time.

        Raises:
            DataError: a user has no training row, or too few other items.
        """
        check_rows(data)
        score = row_numbers(data.rows, self.seed, "perturb-rows")
        chosen = lowest(data.rows, score, replaced_counts(data.rows, self.config.replacement_ratio))
        items = data.rows.items.copy()
        items[chosen] = random_substitutes(data.rows, chosen, self.seed)
        figures = {"replaced rows": len(chosen)}
        return Perturbed(
            dataclasses.replace(data.rows, items=items), np.arange(len(items)), figures
        )

    def words(self) -> list[str]:
        """State that there is no guarantee."""
        return [
            f"Random replacement of {self.config.replacement_ratio:.0%} of each user's rows: the"
            " others are published unchanged, and no epsilon covers a profile. The unchanged rows"
            " identify most users: see `fedrec synthesise`."
        ]
