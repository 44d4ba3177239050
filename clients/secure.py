# SPDX-License-Identifier: Apache-2.0
"""A node's side of secure aggregation: its keys, shares of its secrets, a masked sum, and shares of
others' secrets.

The server learns only the sum over a quorum of nodes. In each session, which begins only once, the
node masks one sum and answers one request for shares, with one kind of share for each node, and
then deletes its secrets. It counts the quorum itself, from the list of nodes that it received and
the experiment's settings. It also checks the other terms of the sum, the number of clients of each
node and the fixed-point precision, and binds them to its messages to other nodes: a server that
sends different terms to different nodes gets no sum. The training order and its parameters are
among the terms. A real node takes channel keys only from nodes that the deployment's authority has
certified. It takes part in a repeated round only with the same clients, and unmasks it only for the
same nodes and survivors, unless clients add noise: the difference of two sums is what the others
contribute.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from clients.node import Node
from clients.round import train_clients
from fedrec.errors import ClientError, RefusalError
from fedrec.experiment.phases import symmetric_of
from fedrec.experiment.schema import SecureAggregationConfig
from fedrec.protocol.messages import TrainOrder, TrainSum
from fedrec.protocol.secure import (
    COUNT_BYTES,
    KEY_BYTES,
    SEALED_BYTES,
    SEED_BYTES,
    SESSION_BYTES,
    ChannelReply,
    MaskOrder,
    ShareOrder,
    ShareReply,
    UnmaskOrder,
    UnmaskReply,
    counts_in,
    joined,
    listed,
    pieces,
    there,
    unlisted,
)
from fedrec.protocol.updates import Change
from fedrec.secure import keys, vector

log = logging.getLogger("fedrec")


def channel_key(node: Node) -> ChannelReply:
    """The node's public channel key of this run, and a proof of its origin.

    Raises:
        ClientError: the run has no secure aggregation.
    """
    _settings(node)
    key = keys.public_of(_channel(node))
    proof = b"" if node.identity is None else node.identity.proof(_statement(node, key))
    return ChannelReply(key, proof)


def share(node: Node, order: ShareOrder) -> ShareReply:
    """Begin a session: new secrets, and encrypted shares of them for each node.

    Raises:
        ClientError: the session is invalid or began before.
    """
    channels = _channels(node, order)
    nodes = len(channels)
    counts = counts_in(order.counts) if len(order.counts) == COUNT_BYTES * nodes else []
    if len(counts) < nodes or min(counts) < 1:
        raise _unsound("nodes without clients in the sum")
    if not 0 <= order.bits <= vector.MOST_BITS:  # fewer would round the others' sums away
        raise _unsound(f"{order.bits} binary digits")
    quorum = _quorum(node, nodes)
    # what must be the same for all nodes of a session
    bits = _number(order.bits)
    agreed = order.session, order.channels, order.counts, bits, order.training
    terms = keys.digest(b"terms", *agreed)
    mask_seed = keys.fresh_seed()
    self_seed = keys.fresh_seed()
    mask_key = keys.public_of(keys.key_of(mask_seed))
    channel = _channel(node)
    dealt = list(
        zip(*(keys.split(secret, quorum, nodes) for secret in (mask_seed, self_seed)), strict=True)
    )
    node.session_secrets.begin(
        order.session,
        {
            "place": _number(order.position),
            "channels": order.channels,
            "counts": order.counts,
            "bits": bits,
            "training": order.training,
            "terms": terms,
            "mask-seed": mask_seed,
            "self-seed": self_seed,
            "mask-share": dealt[order.position][0],
            "self-share": dealt[order.position][1],
        },
    )
    sealed = {
        rank: keys.sealed(
            channel, channels[rank], _route(terms, order.position, rank), pair, mask_key
        )
        for rank, pair in enumerate(dealt)
        if rank != order.position
    }
    return ShareReply(mask_key, keys.commitment_of(self_seed), joined(sealed, nodes, SEALED_BYTES))


def masked_sum(node: Node, arrays: Mapping[str, np.ndarray], order: TrainOrder) -> np.ndarray:
    """Train the clients of an order and return their masked sum and counts, `uint64 [length]`. On a
    real node, a sum that is too large for the fixed point counts as zero.

    Raises:
        RefusalError: the order's session or terms differ from the node's, the session already has a
            masked sum, no client takes part, or it is a second, different sum of the round.
        ClientError: a client of a simulated node failed, or the node's sum is too large.
    """
    secure = order.secure
    if secure is None:
        raise RefusalError(
            "the order requests an unmasked sum in a run with secure aggregation",
            expected="a session of secure aggregation",
            fix="none; the server must follow the experiment",
        )
    secrets = node.session_secrets.look(secure.session)
    rank = _read(secrets["place"])
    mask_keys = there(pieces(secure.mask_keys, KEY_BYTES))
    counts = counts_in(secrets["counts"])
    bits = _read(secrets["bits"])
    _check_order(node, order, counts, rank, bits)
    if vector.digest_of(order, arrays) != secrets["training"]:
        raise _unsound("a training order that differs from the one that the nodes agreed on")
    state = _received(node, secure, secrets, mask_keys)
    accepted = node.accept(order)
    if node.real and not (order.protection and order.protection.noise_scale):
        group = keys.digest(b"group", *pieces(secrets["channels"], KEY_BYTES))
        clients = keys.digest(b"clients", np.unique(np.asarray(accepted.clients)).tobytes())
        if not node.session_secrets.first_sum(order.round, clients, group):
            raise _second_sum(order.round)
        state |= {"round": _number(order.round), "group": group}
    # before masking: a node killed after this has dropped out
    node.session_secrets.masked(secure.session, state)
    shapes = vector.shapes_of(arrays, order.protection, symmetric_of(node.experiment, order.step))
    reply = train_clients(node, arrays, accepted)
    if node.real and not reply.clients:
        raise _unsound(f"an order in which {reply.clients} clients of this node take part")
    encode = partial(vector.encoded, arrays=arrays, shapes=shapes, bits=bits, nodes=len(counts))
    try:
        numbers = encode(reply)
    except ClientError as error:
        if not node.real:
            raise
        log.error("the node's sum is too large and counts as zero", exc_info=error)
        zeros: dict[str, Change] = {name: np.zeros_like(arrays[name]) for name in shapes}
        numbers = encode(TrainSum(zeros, reply.clients, 0.0, 0, 0.0, 0))
    numbers += keys.own_mask(secrets["self-seed"], len(numbers))
    others = keys.without(mask_keys, rank)
    return numbers + keys.pairwise_mask(
        keys.key_of(secrets["mask-seed"]), rank, others, secure.session, len(numbers)
    )


def unmask(node: Node, order: UnmaskOrder) -> UnmaskReply:
    """Return shares of the survivors' self-masks and of the others' mask keys, and end the session.

    Raises:
        ClientError: the session or another sum of the round was unmasked before, or the reported
            survivors are too few.
    """
    secrets = node.session_secrets.waiting(order.session)
    rank = _read(secrets["place"])
    nodes = len(order.survivors)
    of_masks = there(pieces(secrets["mask-shares"], SEED_BYTES))
    of_selves = there(pieces(secrets["self-shares"], SEED_BYTES))
    survivors = {other for other, flag in enumerate(order.survivors) if flag}
    known = nodes * SEED_BYTES == len(secrets["mask-shares"])
    if (
        not known
        or not survivors <= set(of_masks)
        or rank not in survivors
        or len(survivors) < _quorum(node, nodes)
    ):
        raise _unsound(f"{len(survivors)} survivors of {nodes} nodes")
    if "round" in secrets:
        again = _read(secrets["round"]), secrets["group"], order.survivors
        if not node.session_secrets.same_sum(*again):
            raise _second_sum(_read(secrets["round"]))
    node.session_secrets.end(order.session)
    shown = {other: (of_selves if other in survivors else of_masks)[other] for other in of_masks}
    return UnmaskReply(joined(shown, nodes, SEED_BYTES))


def _second_sum(round_number: int) -> RefusalError:
    return RefusalError(
        f"a second, different sum of round {round_number}",
        expected="the nodes, clients and survivors of the first sum, or client-side noise",
        got="other ones: the difference of both sums would reveal contributions of some clients",
        fix="Nothing to do: this round is skipped and the run continues.",
    )


def _received(
    node: Node, order: MaskOrder, secrets: Mapping[str, bytes], mask_keys: Mapping[int, bytes]
) -> dict[str, bytes]:
    """State of a session after its sum is masked: the node's index, and shares of each node's
    secrets."""
    channels = pieces(secrets["channels"], KEY_BYTES)
    sealed = pieces(order.sealed, SEALED_BYTES)
    rank = _read(secrets["place"])
    nodes = len(channels)
    sound = len(sealed) == nodes and len(order.mask_keys) == nodes * KEY_BYTES and rank in mask_keys
    if not sound or len(mask_keys) < _quorum(node, nodes):
        raise _unsound(f"{len(mask_keys)} of {nodes} nodes")
    opened = {rank: (secrets["mask-share"], secrets["self-share"])}
    try:
        for other, mask_key in keys.without(mask_keys, rank).items():
            route = _route(secrets["terms"], other, rank)
            opened[other] = keys.opened(
                _channel(node), channels[other], route, sealed[other], mask_key
            )
    except ValueError as error:
        raise _unsound(str(error)) from None
    of_masks, of_selves = ({other: pair[kind] for other, pair in opened.items()} for kind in (0, 1))
    return {
        "place": secrets["place"],
        "mask-shares": joined(of_masks, nodes, SEED_BYTES),
        "self-shares": joined(of_selves, nodes, SEED_BYTES),
    }


def _channels(node: Node, order: ShareOrder) -> list[bytes]:
    """Check and return the public channel keys of all nodes of a session."""
    sound = len(order.session) == SESSION_BYTES and len(order.channels) % KEY_BYTES == 0
    channels = pieces(order.channels, KEY_BYTES) if sound else []
    if not 0 <= order.position < len(channels) or channels[order.position] != keys.public_of(
        _channel(node)
    ):
        raise _unsound("a list of nodes without this one")
    if len(set(channels)) < len(channels) or _quorum(node, len(channels)) > len(channels):
        raise _unsound(f"{len(channels)} nodes with {len(set(channels))} distinct keys")
    if node.identity is not None:
        try:
            proofs = zip(unlisted(order.proofs), channels, strict=True)
            authors = {node.identity.author(proof, _statement(node, key)) for proof, key in proofs}
        except ValueError as error:
            raise _unsound(f"channel keys without a valid proof of origin: {error}") from None
        if len(authors) < len(channels):
            raise _unsound(f"{len(channels)} channel keys from {len(authors)} nodes")
    return channels


def _check_order(
    node: Node, order: TrainOrder, counts: Sequence[int], rank: int, bits: int
) -> None:
    """Check that an order's terms match those of the session and of the experiment."""
    if order.clients is None or len(set(order.clients.tolist())) != counts[rank]:
        raise _unsound(
            f"an order whose clients differ from the {counts[rank]} announced to the other nodes"
        )
    largest = _settings(node).largest
    expected = vector.session_bits(order.protection, sum(counts), len(counts), largest)
    if bits != expected:
        raise _unsound(f"{bits} binary digits instead of the experiment's {expected}")


def _statement(node: Node, key: bytes) -> bytes:
    """The statement that a node signs: this is its channel key in this run."""
    return b"fedrec secure aggregation: channel key" + listed([node.run.encode(), key])


def _channel(node: Node) -> X25519PrivateKey:
    fresh = X25519PrivateKey.generate().private_bytes_raw()
    return X25519PrivateKey.from_private_bytes(node.session_secrets.channel(fresh))


def _settings(node: Node) -> SecureAggregationConfig:
    settings = node.experiment.secure_aggregation
    if not settings:
        raise RefusalError(
            "this run has no secure aggregation",
            expected="an experiment with secure-aggregation = true",
            fix="none; the server must follow the experiment",
        )
    return settings


def _quorum(node: Node, nodes: int) -> int:
    quorum = _settings(node).quorum(nodes)
    if quorum < node.least_nodes:
        raise _unsound(
            f"sums of {quorum} nodes; this node's owner requires at least {node.least_nodes}"
        )
    return quorum


def _unsound(got: str) -> RefusalError:
    return RefusalError(
        "invalid secure-aggregation message",
        expected=(
            "distinct nodes including this one, as many as the experiment requires, each with"
            " its own keys"
        ),
        got=got,
        fix="none; the round continues without this node",
    )


def _route(terms: bytes, sender: int, receiver: int) -> bytes:
    return terms + _number(sender) + _number(receiver)


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _read(number: bytes) -> int:
    return int.from_bytes(number, "little")
