# SPDX-License-Identifier: Apache-2.0
"""Shares: any quorum reconstructs the secret, fewer do not, and only the recipient can read a
share."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedrec.protocol.secure import SEALED_BYTES
from fedrec.secure import masks, shares

SECRET = b"sixteen bytes ab"


@pytest.mark.parametrize(("quorum", "nodes"), [(2, 2), (2, 3), (3, 5), (4, 5)])
def test_every_quorum_gives_the_secret(quorum, nodes):
    dealt = shares.split(SECRET, quorum, nodes)
    for chosen in itertools.combinations(range(nodes), quorum):
        assert shares.combined({place: dealt[place] for place in chosen}, quorum) == SECRET
    assert shares.combined(dict(enumerate(dealt)), quorum) == SECRET


@settings(
    deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.binary(min_size=16, max_size=16), st.integers(2, 7), st.data())
def test_any_quorum_of_any_size(secret, nodes, data):
    quorum = data.draw(st.integers(2, nodes))
    chosen = data.draw(st.sets(st.integers(0, nodes - 1), min_size=quorum))
    dealt = shares.split(secret, quorum, nodes)
    assert shares.combined({place: dealt[place] for place in chosen}, quorum) == secret


def test_fewer_are_refused_and_reveal_nothing():
    """With one share too few, every secret is possible: each is consistent with some last share."""
    dealt = shares.split(SECRET, 3, 5)
    with pytest.raises(ValueError, match="at least 3 shares, got 2"):
        shares.combined({0: dealt[0], 4: dealt[4]}, 3)
    guesses = {
        shares.combined({0: dealt[0], 4: dealt[4], 2: bytes([n]) * 16}, 3) for n in range(50)
    }
    assert len(guesses) == 50 and SECRET not in guesses
    assert SECRET not in dealt and len(set(dealt)) == 5
    assert shares.split(SECRET, 3, 5) != dealt


@pytest.mark.parametrize(("quorum", "nodes"), [(1, 3), (4, 3), (0, 0)])
def test_a_quorum_that_cannot_be_is_refused(quorum, nodes):
    with pytest.raises(ValueError, match="quorum"):
        shares.split(SECRET, quorum, nodes)


def test_a_false_share_gives_another_secret():
    dealt = dict(enumerate(shares.split(SECRET, 2, 2)))
    assert shares.combined({**dealt, 1: bytes(16)}, 2) != SECRET


@pytest.fixture(scope="module")
def sent():
    """Two private keys, and the message from the first one's owner to the second's."""
    sender, receiver = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    pair, mask_key = (bytes(range(16)), bytes(range(16, 32))), bytes(range(32))
    return (
        sender,
        receiver,
        pair,
        mask_key,
        shares.sealed(sender, masks.public_of(receiver), b"r", pair, mask_key),
    )


def test_the_receiver_reads_what_was_sent(sent):
    sender, receiver, pair, mask_key, message = sent
    assert shares.opened(receiver, masks.public_of(sender), b"r", message, mask_key) == pair
    assert len(message) == SEALED_BYTES and pair[0] not in message and pair[1] not in message


def test_nobody_else_does_and_nothing_can_be_exchanged(sent):
    sender, receiver, _, mask_key, message = sent
    stranger, public = X25519PrivateKey.generate(), masks.public_of(sender)
    with pytest.raises(ValueError, match="not from the node"):
        shares.opened(stranger, public, b"r", message, mask_key)
    with pytest.raises(ValueError, match="not from the node"):
        shares.opened(receiver, masks.public_of(stranger), b"r", message, mask_key)
    with pytest.raises(ValueError, match="not from the node"):
        shares.opened(receiver, public, b"another session", message, mask_key)
    with pytest.raises(ValueError, match="not from the node"):
        shares.opened(receiver, public, b"r", bytes([message[0] ^ 1]) + message[1:], mask_key)
    with pytest.raises(ValueError, match="mask key is not the one"):
        shares.opened(receiver, public, b"r", message, bytes(32))
