# SPDX-License-Identifier: Apache-2.0
"""Sums of the compressed updates that real nodes send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import RecordDict

from fedrec.compression.codec import Codec, clip_factor
from fedrec.experiment.schema import Experiment
from fedrec.protocol.compact import network_bytes
from fedrec.protocol.messages import pack_sum, unpack_sum
from fedrec.protocol.orders import SentUpdate, TrainOrder
from fedrec.protocol.records import read_arrays
from fedrec.protocol.sparse_update import Change, SparseUpdate, added, scaled
from strategies.dp import is_change


def decompressed(
    content: RecordDict, experiment: Experiment, order: TrainOrder, theta: Mapping[str, np.ndarray]
) -> RecordDict:
    """A node's answer with the sum of its clients' updates in place of what they sent compressed;
    an answer with a sum is returned as it is. What a client sent is clipped here too, if its node
    has not, and its bytes are counted here.

    Args:
        content: the answer, which is untrusted input.
        experiment: says how updates are compressed.
        order: what the node was asked for.
        theta: the parameters that it was sent, by name, of any shapes.

    Raises:
        ValueError: it cannot be decoded, is of more clients than were asked for, or weighs them
            otherwise.
        Exception: an array is malformed.
    """
    found = unpack_sum(content)
    codec = Codec.of(experiment, order.round)
    if found.updates is None or codec is None:
        return content
    _refuse_weights(found.updates, order, found.weight)
    names = theta if order.protection is None else order.protection.names
    updates = [
        _decoded(codec, one, order, {name: theta[name] for name in names}) for one in found.updates
    ]
    total = {
        name: _sum([update[name] for update in updates if name in update], theta[name])
        for name in names
    }
    sent = network_bytes(read_arrays(content))
    return pack_sum(replace(found, total=total, sent=sent, updates=None))


def _refuse_weights(updates: Sequence[SentUpdate], order: TrainOrder, weight: float) -> None:
    most = 0 if order.clients is None else len(order.clients)
    if len(updates) > most:
        raise ValueError(f"updates of {len(updates)} clients where {most} were asked for")
    shares = [one.share for one in updates]
    weighted = order.protection is None and order.weighting == "examples"
    if weighted and not (min(shares, default=0.0) >= 0 and sum(shares) <= weight):
        raise ValueError("weights of updates that are not those of the clients")
    if not weighted and any(share != 1 for share in shares):
        raise ValueError("weights of updates that all count the same")


def _decoded(
    codec: Codec, sent: SentUpdate, order: TrainOrder, theta: Mapping[str, np.ndarray]
) -> dict[str, Change]:
    strange = set(sent.payloads) - set(theta)
    if strange:
        raise ValueError(f"unknown parameters {sorted(strange)[:3]}")
    update = codec.decoded(sent.payloads, {name: value.shape for name, value in theta.items()})
    for name, change in update.items():
        if not is_change(change, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
    factor = sent.share
    if order.protection is not None:
        factor *= clip_factor(update, order.protection.clip)
    return update if factor == 1 else {name: scaled(one, factor) for name, one in update.items()}


def _sum(changes: Sequence[Change], table: np.ndarray) -> Change:
    """Sum of changes of a table `[...]`, in its type; rows if these are less than half of it."""
    if not changes:
        return np.zeros_like(table)
    total = changes[0]
    for change in changes[1:]:
        total = added(total, change, table)
    if not isinstance(total, SparseUpdate):
        return total.astype(table.dtype)
    if 2 * len(total.rows) >= len(table):
        return total.dense(table).astype(table.dtype)
    return SparseUpdate(total.shape, total.rows, total.values.astype(table.dtype), total.drift)
