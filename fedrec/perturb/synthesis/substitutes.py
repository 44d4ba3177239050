# SPDX-License-Identifier: Apache-2.0
"""Substitutes for selected rows: distinct items that the user does not have. UPC-SDG does not
specify what happens if two rows of a user get the same substitute. Here a profile keeps its size:
an item that the user has, or that already replaced another of its rows, is drawn again (which is
equivalent to a draw from the distribution without it).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedrec.baselines._native import native
from fedrec.data.interactions import Interactions
from fedrec.data.negatives import nth_outside
from fedrec.errors import DataError
from fedrec.rng import stream

Draw = Literal["sample", "best"]
Scores = Callable[[np.ndarray], Tensor]
_CELLS_AT_ONCE = 24_000_000  # rows times items of a block with its own random stream
_CELLS_IN_CACHE = 2_000_000  # rows times items of scores in memory
_DRAWS_AT_ONCE = 16  # proposals per row
_ROWS_AT_ONCE = 4


def random_substitutes(rows: Interactions, chosen: np.ndarray, seed: int) -> np.ndarray:
    """Uniform draws from the items that a user does not have, without repetition.

    Args:
        rows: the training rows.
        chosen: `int64 [n]`: row numbers, grouped by user.
        seed: of the streams `"perturb-items"`, one per user.

    Returns:
        `int64 [n]`: the items that replace those of the chosen rows.

    Raises:
        DataError: a user has too few items left.
    """
    found = np.empty(len(chosen), dtype=np.int64)
    users = rows.users[chosen]
    for user, places in _by_user(users):
        own = np.unique(rows.items[rows.rows_of(user)])
        free = _require_free(rows, user, own, len(places))
        ranks = stream(seed, "perturb-items", user).choice(free, size=len(places), replace=False)
        found[places] = nth_outside(own, ranks)
    return found


def scored_substitutes(
    rows: Interactions,
    chosen: np.ndarray,
    scores: Scores,
    draw: Draw,
    seed: int,
) -> np.ndarray:
    """Items drawn from softmax(scores), which is equivalent to the arg max of scores plus Gumbel
    noise, or the best ones.

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
    found = np.empty(len(chosen), dtype=np.int64)
    for number, places in enumerate(_blocks(rows, chosen)):
        generator = np.random.Generator(
            np.random.PCG64(stream(seed, "perturb-draw", number).integers(2**63))
        )
        found[places] = _distinct(rows, chosen[places], scores, draw, generator)
    return found


def _blocks(rows: Interactions, chosen: np.ndarray) -> list[np.ndarray]:
    """Indices of the chosen rows in blocks of whole users, each with at most the given number of
    cells, or of one user."""
    users = rows.users[chosen]
    most = max(1, _CELLS_AT_ONCE // rows.num_items)
    blocks: list[list[np.ndarray]] = [[]]
    size = 0
    for user, places in _by_user(users):
        _require_free(rows, user, np.unique(rows.items[rows.rows_of(user)]), len(places))
        if size and size + len(places) > most:
            blocks.append([])
            size = 0
        blocks[-1].append(places)
        size += len(places)
    return [np.concatenate(block) for block in blocks if block]


def _distinct(
    rows: Interactions, chosen: np.ndarray, scores: Scores, draw: Draw, random: np.random.Generator
) -> np.ndarray:
    """An item for each row of a block, distinct within a user.

    Rows are assigned in random order; if all proposals of a row are taken, its user's items are
    removed from its distribution and proposals are drawn again.
    """
    users = rows.users[chosen]
    found = np.full(len(chosen), -1, dtype=np.int64)
    taken: dict[int, set[int]] = {user: set() for user in np.unique(users).tolist()}
    open_rows = random.permutation(len(users))
    while len(open_rows):
        proposals = _proposals(rows, chosen[open_rows], taken, scores, draw, random)
        left = []
        for row, offered in zip(open_rows.tolist(), proposals.tolist(), strict=True):
            own = taken[int(users[row])]
            item = next((item for item in offered if item >= 0 and item not in own), None)
            if item is None:
                left.append(row)
            else:
                found[row] = item
                own.add(item)
        open_rows = np.array(left, dtype=np.int64)
    return found


def _proposals(
    rows: Interactions,
    chosen: np.ndarray,
    taken: Mapping[int, set[int]],
    scores: Scores,
    draw: Draw,
    random: np.random.Generator,
) -> np.ndarray:
    """`int64 [rows, 16]`: items in the order in which they are tried, without those that the user
    has or got; padded with -1. Scores are computed and used in blocks that stay in cache."""
    users = rows.users[chosen]
    count = len(chosen)
    found = np.full((count, _DRAWS_AT_ONCE), -1, dtype=np.int64)
    uniform = random.random(found.shape) if draw == "sample" else None
    at_once = max(1, _CELLS_IN_CACHE // rows.num_items)
    by_user = np.argsort(users, kind="stable")
    for start in range(0, count, at_once):
        some = by_user[start : start + at_once]
        table = scores(chosen[some])
        _mask_own(table, rows, users[some], taken)
        if uniform is None:
            best = table.topk(min(_DRAWS_AT_ONCE, rows.num_items), dim=1)
            items = torch.where(best.values > -torch.inf, best.indices, -1)
            found[some, : items.shape[1]] = items.numpy()
        else:
            weights = table.sub_(table.amax(dim=1, keepdim=True)).exp_()
            found[some] = drawn_by_weight(weights.numpy(), uniform[some])
    return found


def drawn_by_weight(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Items, each with a probability in proportion to its weight in its row.

    Args:
        weights: `float32 [rows, items]`, finite, >= 0, in each row one above 0.
        uniform: `float64 [rows, draws]`, uniform in [0, 1).

    Returns:
        `int64 [rows, draws]`: for each row and draw the first item whose cumulative weight exceeds
        that share of the total; never one with weight 0.
    """
    found = np.empty(uniform.shape, dtype=np.int64)
    _draw(weights, uniform, found)
    return found


@native(boundscheck=False)
def _draw(weights: np.ndarray, uniform: np.ndarray, found: np.ndarray) -> None:
    """See `drawn_by_weight`. Sums of several rows at once: each addition waits for the one before
    it in its row."""
    items = weights.shape[1]
    sums = np.empty((_ROWS_AT_ONCE, items), dtype=np.float64)
    for first in range(0, len(weights), _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, len(weights) - first)
        sums[:count, 0] = weights[first : first + count, 0]
        for item in range(1, items):
            for n in range(count):
                sums[n, item] = sums[n, item - 1] + weights[first + n, item]
        for n in range(count):
            total = sums[n, -1]
            # rounding can move a draw beyond the last item with positive weight
            last = np.searchsorted(sums[n], total)
            for m in range(uniform.shape[1]):
                drawn = np.searchsorted(sums[n], uniform[first + n, m] * total, side="right")
                found[first + n, m] = min(drawn, last)


def _mask_own(
    table: Tensor, rows: Interactions, users: np.ndarray, taken: Mapping[int, set[int]]
) -> None:
    """Set the scores of items that a row's user has, or that already replaced another of its rows,
    to minus infinity."""
    for user, places in _by_user(users):
        own = np.concatenate([rows.items[rows.rows_of(user)], np.array([*taken[user]], np.int64)])
        table[places[0] : places[-1] + 1, torch.from_numpy(own)] = -torch.inf


def _by_user(users: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each user and the indices of its rows; rows are grouped by user."""
    if not len(users):
        return
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    yield from zip(users[starts].tolist(), np.split(np.arange(len(users)), starts[1:]), strict=True)


def _require_free(rows: Interactions, user: int, own: np.ndarray, count: int) -> int:
    free = rows.num_items - len(own)
    if count > free:
        raise DataError(
            f"user {rows.user_ids[user]} has too few other items to replace rows by",
            expected=f"at least {count} items that the user has not",
            got=f"{free} of {rows.num_items}",
            fix="lower perturb.replacement-ratio, or leave the user out",
        )
    return free
