# SPDX-License-Identifier: Apache-2.0
"""The server's side of one session of secure aggregation: its messages, and the sum. A session is
one attempt at one round. Nodes are identified by their positions in the list of channel keys. The
caller exchanges the messages and checks only the lengths of the replies.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence

import numpy as np

from fedrec.protocol.secure import (
    KEY_BYTES,
    SEALED_BYTES,
    SEED_BYTES,
    SESSION_BYTES,
    MaskOrder,
    ShareOrder,
    ShareReply,
    UnmaskOrder,
    UnmaskReply,
    counted,
    joined,
    listed,
    pieces,
)
from fedrec.secure import keys

log = logging.getLogger("fedrec")


class Session:
    """One session of secure aggregation.

    Args:
        channels: public channel key of each node.
        quorum: number of nodes required for a sum, and of shares for a secret.
        bits: binary digits after the point.
        counts: number of each node's clients in the cohort.
        training: digest of the training order, see `fedrec.secure.vector.digest_of`.
        proofs: proof of the origin of each channel key; empty without proofs.

    Attributes:
        dealt: the nodes' answers to the first exchange, by node, which the caller stores; other
            nodes have dropped out.
    """

    def __init__(
        self,
        channels: Sequence[bytes],
        quorum: int,
        bits: int,
        counts: Sequence[int],
        training: bytes,
        proofs: Sequence[bytes] = (),
    ) -> None:
        self.identifier = secrets.token_bytes(SESSION_BYTES)
        self.channels = list(channels)
        self.quorum = quorum
        self.bits = bits
        self.counts = list(counts)
        self.proofs = list(proofs)
        self.training = training
        self.dealt: dict[int, ShareReply] = {}

    @property
    def nodes(self) -> int:
        """Number of nodes at the start."""
        return len(self.channels)

    def share_orders(self) -> dict[int, ShareOrder]:
        """Orders of the first exchange, by node; empty if there are fewer nodes than the quorum."""
        if self.nodes < self.quorum:
            return {}
        who = b"".join(self.channels), listed(self.proofs), counted(self.counts)
        terms = *who, self.bits, self.training
        return {node: ShareOrder(self.identifier, node, *terms) for node in range(self.nodes)}

    def mask_orders(self) -> dict[int, MaskOrder]:
        """Orders of the second exchange, by node; empty if fewer than the quorum dealt shares."""
        if len(self.dealt) < self.quorum:
            return {}
        mask_keys = joined(self._mask_keys, self.nodes, KEY_BYTES)
        sealed = {node: pieces(reply.sealed, SEALED_BYTES) for node, reply in self.dealt.items()}
        shares = {
            node: {other: parts[node] for other, parts in sealed.items()} for node in self.dealt
        }
        return {
            node: MaskOrder(
                self.identifier, mask_keys, joined(shares[node], self.nodes, SEALED_BYTES)
            )
            for node in self.dealt
        }

    def unmask_orders(self, masked: Mapping[int, np.ndarray]) -> dict[int, UnmaskOrder]:
        """Orders of the third exchange, by node; empty if fewer than the quorum sent a masked sum.

        Args:
            masked: `uint64 [n]` by node.
        """
        if len(masked) < self.quorum:
            return {}
        survivors = bytes(node in masked for node in range(self.nodes))
        return {node: UnmaskOrder(self.identifier, survivors) for node in masked}

    def unmasked(
        self, masked: Mapping[int, np.ndarray], replies: Mapping[int, UnmaskReply]
    ) -> np.ndarray | None:
        """Unmask the sum of the masked sums, `uint64 [n]`.

        Returns:
            None if fewer than the quorum gave correct shares, so that the sum cannot be unmasked.
        """
        if len(masked) < self.quorum or len(replies) < self.quorum:
            return None
        shown = {node: pieces(reply.shares, SEED_BYTES) for node, reply in replies.items()}
        seeds = {
            of: keys.combined({by: parts[of] for by, parts in shown.items()}, self.quorum)
            for of in self.dealt
        }
        self_seeds = {node: seeds[node] for node in masked}
        dropped = {node: seed for node, seed in seeds.items() if node not in masked}
        announced = [
            keys.commitment_of(seed) == self.dealt[node].commitment
            for node, seed in self_seeds.items()
        ] + [
            keys.public_of(keys.key_of(seed)) == self.dealt[node].mask_key
            for node, seed in dropped.items()
        ]
        if not all(announced):
            log.warning(
                "shares of the secrets of %d nodes do not match what these nodes announced",
                announced.count(False),
            )
            return None
        return keys.unmasked(masked, self_seeds, dropped, self._mask_keys, self.identifier)

    @property
    def _mask_keys(self) -> dict[int, bytes]:
        return {node: reply.mask_key for node, reply in self.dealt.items()}
