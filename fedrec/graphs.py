# SPDX-License-Identifier: Apache-2.0
"""Graphs of users with common items: the third party that matches them, and graph attention."""

import functools
import hashlib
import hmac
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional as F

from fedrec.kernel.compiled import FAST, compiled
from fedrec.kernel.products import add_outputs, input_gradients, whole
from fedrec.kernel.rows import copy_row, matrix

# The third party that finds users with common items without knowing the items (FedGNN, Wu et al.
# 2021, section 3.3).
#
# Devices share a key. A device sends a token (a keyed hash) of each of its items with its user
# embedding; the third party matches tokens and returns the embeddings of other devices with the
# same token, without identities. It learns the number of items of each device, which devices share
# items, and the embeddings, but not the items, unless a party with the key (a device, or a server
# that knows the settings) reveals it: a whole catalogue can be hashed quickly.
#
# Where this differs from the paper: a keyed hash replaces RSA on the ids. Both are deterministic,
# and both can be reversed by a party with the key.

NOTHING = -1
"""Padding of tokens."""
# names of the arrays between a device and the third party
NEIGHBOURS = "third.neighbours"
COUNTS = "third.counts"
TOKENS = "third.tokens"
EMBEDDING = "third.user"
_BYTES = 6  # bytes of a hash in a token: 48 bits


def tokens(items: Sequence[int], key: str) -> np.ndarray:
    """Tokens of items, `int64 [items]`: equal for equal items, and uninformative without the
    key."""
    return np.array([_token(item, key) for item in items], dtype=np.int64)


@functools.lru_cache(maxsize=2**17)  # the devices of a simulation have the same items
def _token(item: int, key: str) -> int:
    digest = hmac.digest(key.encode(), str(item).encode(), hashlib.sha256)
    return int.from_bytes(digest[:_BYTES], "little")


class ThirdParty:
    """Third party that matches tokens of items between devices.

    Args:
        neighbours: largest number of embeddings returned for a token.
    """

    def __init__(self, neighbours: int) -> None:
        self.neighbours = neighbours
        self._tokens: dict[int, np.ndarray] = {}
        self._embeddings: dict[int, np.ndarray] = {}

    def register(self, sender: int, tokens: np.ndarray, embedding: np.ndarray) -> None:
        """Store the tokens and the embedding of a device in place of its previous ones.

        Args:
            sender: number of the device.
            tokens: its tokens, `int64 [slots]`, `NOTHING` where a slot is empty.
            embedding: `float32 [d]`.
        """
        self._tokens[sender] = tokens
        self._embeddings[sender] = embedding

    def matched(
        self, asking: Sequence[int], slots: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find up to `neighbours` other devices for each token of some devices.

        If there are more, those with the next larger numbers are taken, so that not all devices get
        the same neighbours.

        Args:
            asking: numbers of devices.
            slots: tokens of each.
            width: d, of embeddings.

        Returns:
            `float32 [asking, slots, neighbours, d]`, padded with zeros, and how many are not
            padding, `int64 [asking, slots]`; 0 for a device that has not sent anything yet.
        """
        embeddings = np.zeros((len(asking), slots, self.neighbours, width), dtype=np.float32)
        counts = np.zeros((len(asking), slots), dtype=np.int64)
        state = self.state()
        if not state:
            return embeddings, counts
        senders = state["senders"]
        known = np.isin(asking, senders)
        rows = np.searchsorted(senders, np.where(known, asking, senders[0]))
        asked, slot = np.nonzero((state["tokens"][rows] != NOTHING) & known[:, None])
        others = _others(state["tokens"], rows[asked], slot, self.neighbours)
        present = others != NOTHING
        pairs, number = np.nonzero(present)
        embeddings[asked[pairs], slot[pairs], number] = state["embeddings"][others[present]]
        counts[asked, slot] = present.sum(1)
        return embeddings, counts

    def state(self) -> dict[str, np.ndarray]:
        """Return the state as named arrays."""
        senders = sorted(self._tokens)
        if not senders:
            return {}
        return {
            "senders": np.array(senders, dtype=np.int64),
            "tokens": np.stack([self._tokens[sender] for sender in senders]),
            "embeddings": np.stack([self._embeddings[sender] for sender in senders]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state`."""
        senders = state["senders"].tolist() if "senders" in state else []
        self._tokens = {sender: state["tokens"][n] for n, sender in enumerate(senders)}
        self._embeddings = {sender: state["embeddings"][n] for n, sender in enumerate(senders)}


def _others(sent: np.ndarray, senders: np.ndarray, slots: np.ndarray, most: int) -> np.ndarray:
    """Find up to `most` other senders of each of some tokens, the following ones first.

    Args:
        sent: tokens `int64 [senders, slots]`, `NOTHING` where a slot is empty.
        senders: `int64 [asked]`, the row of each token in question.
        slots: `int64 [asked]`, its column.
        most: largest number of others.

    Returns:
        Their rows, `int64 [asked, most]`; `NOTHING` for none.
    """
    rows, columns = np.nonzero(sent != NOTHING)
    order = np.argsort(sent[rows, columns], kind="stable")  # by token, then ascending
    rows = rows[order]
    columns = columns[order]
    ranks = np.full(sent.shape, NOTHING)
    ranks[rows, columns] = np.arange(len(order))
    starts = np.flatnonzero(np.diff(sent[rows, columns], prepend=NOTHING))
    sizes = np.diff(starts, append=len(order))
    asked = ranks[senders, slots][:, None]
    start, size = (part.repeat(sizes)[asked] for part in (starts, sizes))
    steps = np.arange(1, most + 1)
    others = rows[start + (asked - start + steps) % size]
    return np.where(steps < size, others, NOTHING)


# Products of, and sums over, rows of users' embeddings in compiled code. The rows are ordered by
# item; those of one item stay in cache while they are used.


@compiled
def add_products(starts, users, values, column_of, shared, sums):
    """Add the inner products of some users' rows, and of a shared table's, with all users' rows.

    Args:
        starts: `int64 [items + 1]`; an item's rows are those from `starts[i]` up to
            `starts[i + 1]`.
        users: `int64 [n]`, the user of each row, distinct within an item.
        values: `float32 [n, d]`.
        column_of: `int64 [users]`, the column of `sums` of each user; -1: none.
        shared: `float32 [items, d]`.
        sums: `float64 [users, columns + 1]`, added to; the last column is that of the shared table.
    """
    most = _most(starts[:-1], starts[1:])
    width = values.shape[1]
    room = np.empty(whole(most + 1) * width, np.float32)
    some = np.empty(whole(most + 1) * width, np.float32)
    lines = np.empty(whole(most + 1) * most, np.float32)
    targets = np.empty(most + 1, np.int64)
    for item in range(len(starts) - 1):
        rows = values[starts[item] : starts[item + 1]]
        owners = users[starts[item] : starts[item + 1]]
        if len(rows) == 0:
            continue
        asked = 0
        chosen = matrix(some, 0, whole(len(rows) + 1), width)
        for other in range(len(rows)):
            column = column_of[owners[other]]
            if column >= 0:
                targets[asked] = column
                copy_row(rows[other], chosen[asked])
                asked += 1
        targets[asked] = sums.shape[1] - 1
        copy_row(shared[item], chosen[asked])
        asked += 1
        columns = whole(asked)  # as single columns take as long as a block of them
        chosen[asked:columns] = 0
        products = matrix(lines, 0, len(rows), columns)
        input_gradients(rows, chosen[:columns], products, room)
        for other in range(len(rows)):
            into = sums[owners[other]]
            line = products[other]
            for n in range(asked):
                into[targets[n]] += line[n]


@compiled
def weighted_sums(begins, ends, users, values, asked, asking, weights, sums):
    """Add sums of an item's rows, weighted by user.

    Args:
        begins, ends: `int64 [items]`; an item's rows are those from `begins[i]` up to `ends[i]`.
        users: `int64 [rows]`, the user of each row.
        values: `float32 [rows, d]`.
        asked: `int64 [items + 1]`; an item's sums are those from `asked[i]` up to `asked[i + 1]`.
        asking: `int64 [n]`, whose weights a sum takes.
        weights: `float32 [askers, users]`.
        sums: `float32 [n, d]`, added to.
    """
    shares = np.empty(_most(begins, ends) * _most(asked[:-1], asked[1:]), np.float32)
    room = np.empty(0, np.float32)  # no factor is transposed
    for item in range(len(begins)):
        rows = values[begins[item] : ends[item]]
        owners = users[begins[item] : ends[item]]
        askers = asking[asked[item] : asked[item + 1]]
        if len(rows) == 0 or len(askers) == 0:
            continue
        factors = matrix(shares, 0, len(askers), len(rows))
        for n in range(len(askers)):
            shares_of_asker = weights[askers[n]]
            for other in range(len(rows)):
                factors[n, other] = shares_of_asker[owners[other]]
        add_outputs(factors, rows, sums[asked[item] : asked[item + 1]], room)


@compiled
def merge_rows(table, start, held, added, order):
    """Retain some rows of a table, and insert others between them, in the same memory: rows at its
    start are moved to its end, and vice versa.

    Args:
        table: `float32 [capacity, d]`, changed; the capacity is at least that for the rows that it
            has and those that are inserted.
        start: where its rows begin.
        held: how many they are.
        added: `float32 [a, d]`, other memory.
        order: `int64 [n]`, the source of each row in the end: a row that the table has, from 0 on
            and in ascending order, or `held` plus a row of `added`.

    Returns:
        Where the rows begin.
    """
    target = 0 if start else len(table) - len(order)
    for step in range(len(order)):
        n = step if start else len(order) - 1 - step
        source = order[n]
        row = table[start + source] if source < held else added[source - held]
        copy_row(row, table[target + n])
    return target


@njit(**FAST)
def _most(begins, ends):
    """Largest number of rows of an item."""
    most = 0
    for item in range(len(begins)):
        most = max(most, ends[item] - begins[item])
    return most


# One layer of graph attention (Velickovic et al. 2018, equations 1 to 4, one head).

_SLOPE = 0.2  # of the leaky ReLU, as in the paper


def attended(
    targets: Tensor,
    sources: Tensor,
    there: Tensor,
    weight: Tensor,
    of_source: Tensor,
    of_target: Tensor,
) -> Tensor:
    """Aggregate the neighbours of each target by attention.

        a_ij = softmax_j LeakyReLU(of_source . W s_ij + of_target . W t_i),    W sum_j a_ij s_ij

    Args:
        targets: `[..., n, d]`, of each graph.
        sources: `[..., n, k, d]`, up to k neighbours of each target.
        there: `bool [..., n, k]`, which of them are no padding.
        weight: W, `[..., d, o]`.
        of_source: `[..., o]`.
        of_target: `[..., o]`.

    Returns:
        `[..., n, o]`; zero for a target without neighbours.
    """
    # products with W are of targets, not of their neighbours, which are several times as many
    ends = weight @ torch.stack([of_source, of_target], -1)
    of_neighbours = (sources.flatten(-3, -2) @ ends[..., :1]).view(sources.shape[:-1])
    fitting = F.leaky_relu(of_neighbours + targets @ ends[..., 1:], _SLOPE)
    lowest = torch.finfo(fitting.dtype).min
    shares = torch.softmax(torch.where(there, fitting, lowest), dim=-1) * there
    return (shares.unsqueeze(-1) * sources).sum(-2) @ weight
