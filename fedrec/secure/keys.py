# SPDX-License-Identifier: Apache-2.0
"""Masks from pairwise keys, and shares of their secrets.

Pairwise key agreement of nodes, and the masks derived from the keys (Bonawitz et al. 2017,
section 4).

A node's masked numbers are x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv), modulo
2^64: b_u is the node's own seed, s_uv a key agreed between u and v by X25519 and HKDF-SHA256, and
PRG the keystream of ChaCha20. In the sum of all nodes the pairwise masks cancel. Every secret is
used for one session, which is one attempt at one round.

Where this differs from the paper: secrets are 128-bit seeds from which keys are derived, so that
each fits one Shamir share, and a node commits to the seed of its self-mask, so that false shares
are detected. Channel keys are used for a whole run; mask keys, as in the paper, are not: one that
was recovered from shares after its node dropped out would unmask the earlier rounds of that node.
"""

import os
import secrets
from collections.abc import Mapping

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedrec.protocol.secure import KEY_BYTES, NONCE_BYTES, SEED_BYTES, listed

_NONCE = bytes(16)  # every key is used for one keystream


def fresh_seed() -> bytes:
    """Draw 128 random bits from the operating system."""
    return secrets.token_bytes(SEED_BYTES)


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key of 32 bytes for one purpose (HKDF-SHA256)."""
    return HKDF(
        algorithm=SHA256(),
        length=KEY_BYTES,
        salt=None,
        info=b"fedrec secure aggregation: " + purpose,
    ).derive(secret)


def key_of(seed: bytes) -> X25519PrivateKey:
    """Private mask key of a seed."""
    return X25519PrivateKey.from_private_bytes(derived(seed, b"mask key"))


def public_of(key: X25519PrivateKey) -> bytes:
    """Public key of a private key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def commitment_of(seed: bytes) -> bytes:
    """Commitment to a seed, 32 bytes."""
    return digest(b"commitment", seed)


def digest(purpose: bytes, *parts: bytes) -> bytes:
    """SHA-256 of several byte strings in order, 32 bytes."""
    sha = Hash(SHA256())
    sha.update(b"fedrec secure aggregation: " + purpose + listed(parts))
    return sha.finalize()


def agreed(key: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """Agree on a key of 32 bytes that only the owners of the two keys can compute.

    Raises:
        ValueError: the other's public key is invalid.
    """
    return derived(key.exchange(X25519PublicKey.from_public_bytes(other)), purpose)


def _keystream(key: bytes, length: int) -> np.ndarray:
    """Keystream of ChaCha20, `uint64 [length]`."""
    stream = Cipher(ChaCha20(key, _NONCE), mode=None).encryptor().update(bytes(8 * length))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


def own_mask(seed: bytes, length: int) -> np.ndarray:
    """A node's self-mask PRG(b_u), `uint64 [length]`."""
    return _keystream(derived(seed, b"self mask"), length)


def pairwise_mask(
    key: X25519PrivateKey, node: int, others: Mapping[int, bytes], session: bytes, length: int
) -> np.ndarray:
    """Sum of a node's pairwise masks, `uint64 [length]`.

    Args:
        key: its private mask key.
        node: its position in the list of nodes.
        others: public mask keys of the other nodes, by node.
        session: the session.
        length: number of integers.

    Raises:
        ValueError: a public key is invalid.
    """
    total = np.zeros(length, dtype=np.uint64)
    for other, public in others.items():
        pair = b"pair mask %d %d " % (min(node, other), max(node, other)) + session
        mask = _keystream(agreed(key, public, pair), length)
        if node < other:
            total += mask
        else:
            total -= mask
    return total


def unmasked(
    masked: Mapping[int, np.ndarray],
    own_seeds: Mapping[int, bytes],
    dropped_seeds: Mapping[int, bytes],
    mask_keys: Mapping[int, bytes],
    session: bytes,
) -> np.ndarray:
    """Remove the masks from the sum of the survivors' numbers, `uint64 [n]`.

    Args:
        masked: masked numbers `uint64 [n]` of the nodes that sent them, by node.
        own_seeds: seeds of their self-masks.
        dropped_seeds: seeds of the mask keys of the nodes that dropped out.
        mask_keys: public mask keys of all these nodes.
        session: the session.
    """
    total = np.zeros_like(next(iter(masked.values())))
    for node, numbers in masked.items():
        total += numbers
        total -= own_mask(own_seeds[node], len(total))
    survivors = {node: mask_keys[node] for node in masked}
    for node, seed in dropped_seeds.items():
        total += pairwise_mask(key_of(seed), node, survivors, session, len(total))
    return total


def without(keys: Mapping[int, bytes], node: int) -> dict[int, bytes]:
    """Keys of all nodes except one."""
    return {other: key for other, key in keys.items() if other != node}


# Secret sharing: any `quorum` of the shares reconstruct a secret, and fewer reveal nothing (Shamir
# 1979); encryption of shares for other nodes.
#
# Shamir's scheme is that of PyCryptodome, over GF(2^128). Shares are relayed by the server,
# encrypted for the receiving node with ChaCha20-Poly1305 under a key agreed between the two nodes.
# A node uses each session once, so each key encrypts one message; nonces are random as a second
# safeguard.


def split(secret: bytes, quorum: int, nodes: int) -> list[bytes]:
    """Split a secret of 16 bytes into shares of 16 bytes, one per node in the order of positions.

    Raises:
        ValueError: not 1 < quorum <= nodes.
    """
    if not 1 < quorum <= nodes:
        raise ValueError(f"Expected 1 < quorum <= nodes, got quorum={quorum} and nodes={nodes}.")
    return [bytes(share) for _, share in Shamir.split(quorum, nodes, secret, ssss=False)]


def combined(shares: Mapping[int, bytes], quorum: int) -> bytes:
    """Reconstruct a secret from the shares of at least `quorum` nodes, by node; false shares give a
    false secret.

    Raises:
        ValueError: there are fewer than `quorum` shares.
    """
    if len(shares) < quorum:
        raise ValueError(f"Expected at least {quorum} shares, got {len(shares)}.")
    chosen = [(node + 1, share) for node, share in sorted(shares.items())[:quorum]]
    return bytes(Shamir.combine(chosen, ssss=False))


def sealed(
    channel: X25519PrivateKey,
    other: bytes,
    route: bytes,
    pair: tuple[bytes, bytes],
    mask_key: bytes,
) -> bytes:
    """Encrypt two shares and the sender's public mask key for one node.

    Args:
        channel: the sender's private channel key.
        other: the receiver's public channel key.
        route: the session with its terms, sender and receiver; never used twice.
        pair: shares of the seed of the sender's mask key, and of the seed of its self-mask.
        mask_key: its public mask key, so that the server cannot replace it.
    """
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _cipher(channel, other, route).encrypt(nonce, b"".join(pair) + mask_key, route)


def opened(
    channel: X25519PrivateKey, other: bytes, route: bytes, message: bytes, mask_key: bytes
) -> tuple[bytes, bytes]:
    """Decrypt the two shares passed to `sealed`.

    Raises:
        ValueError: the message is not from that sender, not for this session, or has another mask
            key.
    """
    try:
        plain = _cipher(channel, other, route).decrypt(
            message[:NONCE_BYTES], message[NONCE_BYTES:], route
        )
    except InvalidTag:
        raise ValueError("a message with shares is not from its stated sender") from None
    if plain[2 * SEED_BYTES :] != mask_key:
        raise ValueError("a node's mask key differs from the one in its shares")
    return plain[:SEED_BYTES], plain[SEED_BYTES : 2 * SEED_BYTES]


def _cipher(channel: X25519PrivateKey, other: bytes, route: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(agreed(channel, other, b"shares " + route))
