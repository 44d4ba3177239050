# SPDX-License-Identifier: Apache-2.0
"""A node's part in secure aggregation: its keys, shares of its secrets, a masked sum, and shares of others' secrets.

The node does not trust the server with more than the sum over a quorum of nodes. In each session it masks one sum and
answers one question about shares, with one kind of share for each node, and forgets its secrets with the answer. It
counts the quorum itself, from the list of nodes that it was shown and the experiment's settings.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from clients.hosting import Node
from clients.training import train_clients
from fedrec.errors import ClientError
from fedrec.secure import masks, shares, vector
from fedrec.secure.words import (
    KEY_BYTES,
    SEALED_BYTES,
    SEED_BYTES,
    SESSION_BYTES,
    MaskOrder,
    ShareOrder,
    ShareReply,
    UnmaskOrder,
    UnmaskReply,
    joined,
    pieces,
    there,
)
from fedrec.wire import TrainOrder

_PLACE_BYTES = 4


def channel_key(node: Node) -> bytes:
    """The node's public channel key of this run."""
    return masks.public_of(_channel(node))


def share(node: Node, order: ShareOrder) -> ShareReply:
    """Begin a session: fresh secrets, and shares of them for each node, sealed.

    Raises:
        ClientError: the order is not one of a sound session.
    """
    channels = _channels(node, order)
    nodes, quorum = len(channels), _quorum(node, len(channels))
    mask_seed, self_seed = masks.fresh_seed(), masks.fresh_seed()
    mask_key, channel = masks.public_of(masks.key_of(mask_seed)), _channel(node)
    dealt = list(zip(*(shares.split(secret, quorum, nodes) for secret in (mask_seed, self_seed)), strict=True))
    sealed = {
        place: shares.sealed(channel, channels[place], _route(order.session, order.place, place), pair, mask_key)
        for place, pair in enumerate(dealt)
        if place != order.place
    }
    node.vault.begin(
        order.session,
        {
            "place": _number(order.place),
            "channels": order.channels,
            "mask-seed": mask_seed,
            "self-seed": self_seed,
            "mask-share": dealt[order.place][0],
            "self-share": dealt[order.place][1],
        },
    )
    return ShareReply(mask_key, masks.commitment_of(self_seed), joined(sealed, nodes, SEALED_BYTES))


def masked_sum(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> np.ndarray:
    """Train the clients of an order; their sum and its counts, masked, `uint64 [n]`.

    Raises:
        ClientError: the order is not one of the node's present session, a sum was masked in it before, or the sum is
            too large for the fixed point.
    """
    secure = order.secure
    if secure is None:
        raise ClientError(
            "this run has secure aggregation, and the order wants a bare sum",
            expected="a session of secure aggregation",
            got="none",
            fix="none; the server must ask as the experiment says",
        )
    secrets = node.vault.look(secure.session)
    place, mask_keys = int.from_bytes(secrets["place"], "little"), there(pieces(secure.mask_keys, KEY_BYTES))
    kept = _received(node, secure, secrets, mask_keys)
    node.vault.masked(secure.session, kept)  # before anything is masked: a node killed after this has dropped out
    shapes = vector.shapes_of(arrays, order.protection)
    nodes = len(pieces(secrets["channels"], KEY_BYTES))
    numbers = vector.encoded(train_clients(node, arrays, node.accept(order)), arrays, shapes, secure.bits, nodes)
    numbers += masks.own_mask(secrets["self-seed"], len(numbers))
    others = masks.without(mask_keys, place)
    return numbers + masks.pairwise_mask(
        masks.key_of(secrets["mask-seed"]), place, others, secure.session, len(numbers)
    )


def unmask(node: Node, order: UnmaskOrder) -> UnmaskReply:
    """Shares of the survivors' self-masks and of the others' mask keys; the session is over for this node.

    Raises:
        ClientError: the session was unmasked before, or too few nodes are said to have survived.
    """
    secrets = node.vault.waiting(order.session)
    place, nodes = int.from_bytes(secrets["place"], "little"), len(order.survivors)
    of_masks = there(pieces(secrets["mask-shares"], SEED_BYTES))
    of_selves = there(pieces(secrets["self-shares"], SEED_BYTES))
    survivors = {other for other, flag in enumerate(order.survivors) if flag}
    known = nodes * SEED_BYTES == len(secrets["mask-shares"])
    if not known or not survivors <= set(of_masks) or place not in survivors or len(survivors) < _quorum(node, nodes):
        raise _unsound(f"{len(survivors)} survivors of {nodes} nodes")
    node.vault.end(order.session)
    told = {other: (of_selves if other in survivors else of_masks)[other] for other in of_masks}
    return UnmaskReply(joined(told, nodes, SEED_BYTES))


def _received(
    node: Node, order: MaskOrder, secrets: Mapping[str, bytes], mask_keys: Mapping[int, bytes]
) -> dict[str, bytes]:
    """What is kept of a session once a sum is masked in it: its place, and shares of each node's two secrets."""
    channels, sealed = pieces(secrets["channels"], KEY_BYTES), pieces(order.sealed, SEALED_BYTES)
    place, nodes = int.from_bytes(secrets["place"], "little"), len(channels)
    sound = len(sealed) == nodes and len(order.mask_keys) == nodes * KEY_BYTES and place in mask_keys
    if not sound or len(mask_keys) < _quorum(node, nodes):
        raise _unsound(f"{len(mask_keys)} of {nodes} nodes")
    found = {place: (secrets["mask-share"], secrets["self-share"])}
    try:
        for other, mask_key in masks.without(mask_keys, place).items():
            route = _route(order.session, other, place)
            found[other] = shares.opened(_channel(node), channels[other], route, sealed[other], mask_key)
    except ValueError as error:
        raise _unsound(str(error)) from None
    of_masks, of_selves = ({other: pair[kind] for other, pair in found.items()} for kind in (0, 1))
    return {
        "place": secrets["place"],
        "mask-shares": joined(of_masks, nodes, SEED_BYTES),
        "self-shares": joined(of_selves, nodes, SEED_BYTES),
    }


def _channels(node: Node, order: ShareOrder) -> list[bytes]:
    """Public channel keys of all nodes, of a session that this node takes part in."""
    sound = len(order.session) == SESSION_BYTES and len(order.channels) % KEY_BYTES == 0
    channels = pieces(order.channels, KEY_BYTES) if sound else []
    if not 0 <= order.place < len(channels) or channels[order.place] != channel_key(node):
        raise _unsound("a list of nodes without this one")
    if len(set(channels)) < len(channels) or _quorum(node, len(channels)) > len(channels):
        raise _unsound(f"{len(channels)} nodes, {len(set(channels))} of them different ones")
    return channels


def _channel(node: Node) -> X25519PrivateKey:
    fresh = X25519PrivateKey.generate().private_bytes_raw()
    return X25519PrivateKey.from_private_bytes(node.vault.channel(fresh))


def _quorum(node: Node, nodes: int) -> int:
    settings = node.experiment.secure_aggregation
    if not settings:
        raise ClientError(
            "this run has no secure aggregation",
            expected="an experiment with secure-aggregation = true",
            got="an order of secure aggregation",
            fix="none; the server must ask as the experiment says",
        )
    quorum = settings.quorum(nodes)
    if quorum < node.least_nodes:
        raise _unsound(f"sums of {quorum} nodes, where this node's owner wants {node.least_nodes} at least")
    return quorum


def _unsound(got: str) -> ClientError:
    return ClientError(
        "this node refuses a step of secure aggregation",
        expected="different nodes with this one among them, as many as the experiment wants, each with its own keys",
        got=got,
        fix="none; the round goes on without this node",
    )


def _route(session: bytes, sender: int, receiver: int) -> bytes:
    return session + _number(sender) + _number(receiver)


def _number(value: int) -> bytes:
    return value.to_bytes(_PLACE_BYTES, "little")
