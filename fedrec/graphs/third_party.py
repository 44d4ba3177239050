# SPDX-License-Identifier: Apache-2.0
"""The third party that finds users with common items without knowing the items (FedGNN, Wu et al.
2021, section 3.3).

Devices share a key. A device sends a token (a keyed hash) of each of its items with its user
embedding; the third party matches tokens and returns the embeddings of other devices with the same
token, without identities. It learns the number of items of each device, which devices share items,
and the embeddings, but not the items, unless a party with the key (a device, or a server that knows
the settings) reveals it: a whole catalogue can be hashed quickly.

Where this differs from the paper: a keyed hash replaces RSA on the ids. Both are deterministic, and
both can be reversed by a party with the key.
"""

import functools
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

NOTHING = -1
"""Padding of tokens."""
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
    """Matches tokens.

    Args:
        neighbours: largest number of embeddings returned for a token.
    """

    def __init__(self, neighbours: int) -> None:
        self.neighbours = neighbours
        self._tokens: dict[int, np.ndarray] = {}
        self._embeddings: dict[int, np.ndarray] = {}

    def register(self, sender: int, own: np.ndarray, embedding: np.ndarray) -> None:
        """Store what a device sent, replacing its previous data.

        Args:
            sender: number of the device.
            own: its tokens, `int64 [slots]`, `NOTHING` where a slot is empty.
            embedding: `float32 [d]`.
        """
        self._tokens[sender] = own
        self._embeddings[sender] = embedding

    def found(self, asking: Sequence[int], slots: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Neighbours of some devices, for each of its tokens up to `neighbours` other devices.

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
        given = np.zeros((len(asking), slots, self.neighbours, width), dtype=np.float32)
        counts = np.zeros((len(asking), slots), dtype=np.int64)
        state = self.state()
        if not state:
            return given, counts
        senders = state["senders"]
        known = np.isin(asking, senders)
        rows = np.searchsorted(senders, np.where(known, asking, senders[0]))
        holders = _Holders.of(state["tokens"])
        places, own = np.nonzero((state["tokens"][rows] != NOTHING) & known[:, None])
        others = holders.after(rows[places], own, self.neighbours)
        for number, found in enumerate(others.T):
            real = found != NOTHING
            given[places[real], own[real], number] = state["embeddings"][found[real]]
        counts[places, own] = (others != NOTHING).sum(1)
        return given, counts

    def state(self) -> dict[str, np.ndarray]:
        """As named arrays."""
        senders = sorted(self._tokens)
        if not senders:
            return {}
        return {
            "senders": np.array(senders, dtype=np.int64),
            "tokens": np.stack([self._tokens[sender] for sender in senders]),
            "embeddings": np.stack([self._embeddings[sender] for sender in senders]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        senders = state["senders"].tolist() if "senders" in state else []
        self._tokens = {one: state["tokens"][place] for place, one in enumerate(senders)}
        self._embeddings = {one: state["embeddings"][place] for place, one in enumerate(senders)}


class _Holders(NamedTuple):
    """Who sent each token.

    Attributes:
        senders: `int64 [pairs]`, rows of senders, by token and then ascending.
        ranks: `int64 [senders, slots]`, place of each pair of sender and slot among them.
        starts: `int64 [pairs]`, where the pairs of the same token begin.
        sizes: `int64 [pairs]`, how many they are.
    """

    senders: np.ndarray
    ranks: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, sent: np.ndarray) -> Self:
        """Of the tokens `int64 [senders, slots]`, `NOTHING` where a slot is empty."""
        rows, slots = np.nonzero(sent != NOTHING)
        order = np.argsort(sent[rows, slots], kind="stable")
        rows = rows[order]
        slots = slots[order]
        ranks = np.full(sent.shape, NOTHING)
        ranks[rows, slots] = np.arange(len(order))
        starts = np.flatnonzero(np.diff(sent[rows, slots], prepend=NOTHING))
        sizes = np.diff(starts, append=len(order))
        return cls(rows, ranks, starts.repeat(sizes), sizes.repeat(sizes))

    def after(self, rows: np.ndarray, slots: np.ndarray, most: int) -> np.ndarray:
        """For pairs of sender and slot, `int64 [asked]`, the rows of up to so many other senders of
        the same token, those that follow first, `int64 [asked, most]`; `NOTHING` for none."""
        ranks = self.ranks[rows, slots]
        starts = self.starts[ranks][:, None]
        sizes = self.sizes[ranks][:, None]
        steps = np.arange(1, most + 1)
        found = self.senders[starts + (ranks[:, None] - starts + steps) % sizes]
        return np.where(steps < sizes, found, NOTHING)
