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
        holders = self._holders()
        given = np.zeros((len(asking), slots, self.neighbours, width), dtype=np.float32)
        counts = np.zeros((len(asking), slots), dtype=np.int64)
        for place, sender in enumerate(asking):
            for slot, token in enumerate(self._tokens.get(sender, np.empty(0, np.int64)).tolist()):
                if token == NOTHING:
                    continue
                same = holders[token]
                start = same.index(sender) + 1
                others = [*same[start:], *same[: start - 1]][: self.neighbours]
                counts[place, slot] = len(others)
                for number, other in enumerate(others):
                    given[place, slot, number] = self._embeddings[other]
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

    def _holders(self) -> dict[int, list[int]]:
        """Who sent each token, ascending."""
        found: dict[int, list[int]] = {}
        for sender in sorted(self._tokens):
            for token in self._tokens[sender].tolist():
                if token != NOTHING:
                    found.setdefault(token, []).append(sender)
        return found
