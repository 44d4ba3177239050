# SPDX-License-Identifier: Apache-2.0
"""Messages of a session of secure aggregation, as plain fields; `fedrec.protocol.messages` packs
them into records.

Values per node are concatenated in the order of the nodes' positions; a node that has dropped out
has zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SESSION_BYTES = 16
SEED_BYTES = 16
KEY_BYTES = 32
COUNT_BYTES = 4
NONCE_BYTES = 12
_TAG_BYTES = 16  # of ChaCha20-Poly1305
SEALED_BYTES = NONCE_BYTES + 2 * SEED_BYTES + KEY_BYTES + _TAG_BYTES
"""Length of what one node sends another: a nonce, two shares, its public mask key, and a tag."""
_LENGTH_BYTES = 4


class Words:
    """Base class of messages of secure aggregation: integers and bytes."""


@dataclass(frozen=True)
class ChannelReply(Words):
    """A node's public channel key of a run.

    Attributes:
        key: the key.
        proof: proof of its origin; empty without a certificate.
    """

    key: bytes
    proof: bytes


@dataclass(frozen=True)
class ShareOrder(Words):
    """Start of a session: its nodes and terms, which are the same for all.

    Attributes:
        session: 16 bytes, unique for each session.
        position: position of the receiving node.
        channels: public channel keys, 32 bytes per node.
        proofs: proofs of their origin, see `listed`; empty without proofs.
        counts: number of each node's clients in the cohort, 4 bytes per node.
        bits: binary digits after the point.
        training: digest of the training order that follows, see `fedrec.secure.vector.digest_of`.
    """

    session: bytes
    position: int
    channels: bytes
    proofs: bytes
    counts: bytes
    bits: int
    training: bytes


@dataclass(frozen=True)
class ShareReply(Words):
    """A node's part in a session.

    Attributes:
        mask_key: its public mask key.
        commitment: commitment to the seed of its self-mask.
        sealed: 92 bytes for each node, zeros for itself: shares of its secrets.
    """

    mask_key: bytes
    commitment: bytes
    sealed: bytes


@dataclass(frozen=True)
class MaskOrder(Words):
    """Part of a training order: how the reply is masked.

    Attributes:
        session: the session.
        mask_keys: public mask keys, 32 bytes per node; zeros for nodes that dropped out.
        sealed: 92 bytes from each node for the receiving node.
    """

    session: bytes
    mask_keys: bytes
    sealed: bytes


@dataclass(frozen=True)
class UnmaskOrder(Words):
    """Nodes that sent a masked sum.

    Attributes:
        session: the session.
        survivors: one byte per node, 1 if its masked sum arrived.
    """

    session: bytes
    survivors: bytes


@dataclass(frozen=True)
class UnmaskReply(Words):
    """Shares of one secret of each node.

    Attributes:
        shares: 16 bytes per node: of the self-mask of a surviving node, of the mask key of one that
            dropped out, zeros for earlier dropouts.
    """

    shares: bytes


def pieces(joined: bytes, size: int) -> list[bytes]:
    """Split a concatenation into pieces of equal size.

    Raises:
        ValueError: the length is not a multiple of the size.
    """
    if len(joined) % size:
        raise ValueError(f"Expected a multiple of {size} bytes, got {len(joined)}.")
    return [joined[start : start + size] for start in range(0, len(joined), size)]


def joined(parts: Mapping[int, bytes], nodes: int, size: int) -> bytes:
    """Concatenate pieces by position, with zeros for missing ones."""
    return b"".join(parts.get(position, bytes(size)) for position in range(nodes))


def there(parts: Iterable[bytes]) -> dict[int, bytes]:
    """Non-zero pieces, by position."""
    return {position: part for position, part in enumerate(parts) if any(part)}


def listed(parts: Iterable[bytes]) -> bytes:
    """Concatenate pieces of any length, each after its length."""
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)


def unlisted(text: bytes) -> list[bytes]:
    """Split the result of `listed` into its pieces.

    Raises:
        ValueError: the bytes are malformed.
    """
    parts = []
    end = 0
    while end < len(text):
        start = end + _LENGTH_BYTES
        end = start + int.from_bytes(text[end:start], "little")
        if start > len(text) or end > len(text):
            raise ValueError("a list of pieces is cut off")
        parts.append(text[start:end])
    return parts


def counted(numbers: Iterable[int]) -> bytes:
    """Concatenate numbers of clients as bytes."""
    return b"".join(number.to_bytes(COUNT_BYTES, "little") for number in numbers)


def counts_in(text: bytes) -> list[int]:
    """Read the numbers passed to `counted`.

    Raises:
        ValueError: the length is wrong.
    """
    return [int.from_bytes(piece, "little") for piece in pieces(text, COUNT_BYTES)]
