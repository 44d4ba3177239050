# SPDX-License-Identifier: Apache-2.0
"""Secret sharing: any `quorum` of the shares reconstruct a secret, and fewer reveal nothing (Shamir
1979); encryption of shares for other nodes.

Shamir's scheme is that of PyCryptodome, over GF(2^128). Shares are relayed by the server, encrypted
for the receiving node with ChaCha20-Poly1305 under a key agreed between the two nodes. A node uses
each session once, so each key encrypts one message; nonces are random as a second safeguard.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedrec.protocol.secure import NONCE_BYTES, SEED_BYTES
from fedrec.secure.masks import agreed


def split(secret: bytes, quorum: int, nodes: int) -> list[bytes]:
    """Shares of a secret of 16 bytes, 16 bytes each, one per node in the order of places.

    Raises:
        ValueError: not 1 < quorum <= nodes.
    """
    if not 1 < quorum <= nodes:
        raise ValueError(f"Expected 1 < quorum <= nodes, got quorum={quorum} and nodes={nodes}.")
    return [bytes(share) for _, share in Shamir.split(quorum, nodes, secret, ssss=False)]


def combined(shares: Mapping[int, bytes], quorum: int) -> bytes:
    """The secret, from the shares of at least `quorum` nodes by place; false shares give a false
    secret.

    Raises:
        ValueError: there are fewer than `quorum` shares.
    """
    if len(shares) < quorum:
        raise ValueError(f"Expected at least {quorum} shares, got {len(shares)}.")
    chosen = [(place + 1, share) for place, share in sorted(shares.items())[:quorum]]
    return bytes(Shamir.combine(chosen, ssss=False))


def sealed(
    channel: X25519PrivateKey,
    other: bytes,
    route: bytes,
    pair: tuple[bytes, bytes],
    mask_key: bytes,
) -> bytes:
    """Two shares and the sender's public mask key, encrypted for one node.

    Args:
        channel: the sender's private channel key.
        other: the receiver's public channel key.
        route: the session with its terms, sender and receiver; never the same twice.
        pair: shares of the seed of the sender's mask key, and of the seed of its self-mask.
        mask_key: its public mask key, so that the server cannot replace it.
    """
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _cipher(channel, other, route).encrypt(nonce, b"".join(pair) + mask_key, route)


def opened(
    channel: X25519PrivateKey, other: bytes, route: bytes, message: bytes, mask_key: bytes
) -> tuple[bytes, bytes]:
    """The two shares passed to `sealed`.

    Raises:
        ValueError: the message is not from that sender, not for this session, or has another mask
            key.
    """
    try:
        plain = _cipher(channel, other, route).decrypt(
            message[:NONCE_BYTES], message[NONCE_BYTES:], route
        )
    except InvalidTag:
        raise ValueError(
            "a message with shares is not from the node that it is said to be from"
        ) from None
    if plain[2 * SEED_BYTES :] != mask_key:
        raise ValueError("a node's mask key is not the one that it sent the others")
    return plain[:SEED_BYTES], plain[SEED_BYTES : 2 * SEED_BYTES]


def _cipher(channel: X25519PrivateKey, other: bytes, route: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(agreed(channel, other, b"shares " + route))
