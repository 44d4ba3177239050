# SPDX-License-Identifier: Apache-2.0
"""Replies of a round without errors; an error if too many failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from flwr.app import Message

from fedrec.errors import ClientError
from server.exchange.dropped_replies import DroppedReplies

log = logging.getLogger("fedrec")


def answers(
    replies: Iterable[Message],
    *,
    sent: Sequence[int],
    max_failures: float,
    dropped: DroppedReplies | None = None,
) -> list[Message]:
    """The replies without an error.

    Args:
        replies: what came back.
        sent: Flower's id of the node of each message sent; a missing reply is a failure.
        max_failures: largest tolerated share of failures, in [0, 1].
        dropped: records the failures.

    Raises:
        ClientError: more failed; carries the first node's error.
    """
    replies = list(replies)
    good = [reply for reply in replies if not reply.has_error()]
    failed = [reply for reply in replies if reply.has_error()]
    missing = Counter(sent) - Counter(reply.metadata.src_node_id for reply in replies)
    for reply in failed:
        log.warning("node %d failed: %s", reply.metadata.src_node_id, reply.error.reason)
    if missing:
        log.warning("%d of %d nodes did not answer in time", missing.total(), len(sent))
    if dropped is not None:
        for reply in failed:
            dropped.dropped(reply.metadata.src_node_id, f"failed: {reply.error.reason}")
        for node in missing.elements():
            dropped.dropped(node, "no answer in time")
    lost = len(sent) - len(good)
    if sent and lost / len(sent) > max_failures:
        reason = failed[0].error.reason if failed else "no answer in time"
        raise ClientError(
            f"{lost} of {len(sent)} nodes failed",
            expected=f"at most a share of {max_failures:g}",
            got=str(reason).strip(),
            fix="fix the first error above, or raise engine.max-failures or engine.timeout",
        )
    return good
