# SPDX-License-Identifier: Apache-2.0
"""Replies of a round without errors; an error if too many failed."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from flwr.app import Error, Message

from fedrec.errors import ClientError, RefusalError
from server.exchange.dropped_replies import DroppedReplies

log = logging.getLogger("fedrec")
# how Flower writes an exception of a ClientApp
_RAISED = re.compile(r"<class '([\w.]+)'>:<'(.*)'>", re.DOTALL)
_REFUSAL = f"{RefusalError.__module__}.{RefusalError.__qualname__}"


def reason_of(error: Error) -> str:
    """The text of a node's error, without the class that Flower puts before it."""
    found = _RAISED.fullmatch(str(error.reason))
    return (found[2] if found else str(error.reason)).strip()


def is_refusal(error: Error) -> bool:
    """Whether a node refused an order, and did not fail."""
    found = _RAISED.fullmatch(str(error.reason))
    return found is not None and found[1] == _REFUSAL


def answers(
    replies: Iterable[Message],
    *,
    sent: Sequence[int],
    max_failures: float,
    dropped: DroppedReplies | None = None,
    may_be_late: bool = False,
) -> list[Message]:
    """The replies without an error.

    Args:
        replies: what came back.
        sent: Flower's id of the node of each message sent; a missing reply is a failure.
        max_failures: largest tolerated share of failures, in [0, 1].
        dropped: records the failures.
        may_be_late: whether a missing reply is none.

    Raises:
        ClientError: more failed; carries the first node's error.
    """
    replies = list(replies)
    good = [reply for reply in replies if not reply.has_error()]
    failed = [reply for reply in replies if reply.has_error()]
    missing = Counter(sent) - Counter(reply.metadata.src_node_id for reply in replies)
    for reply in failed:
        log.warning("node %d failed: %s", reply.metadata.src_node_id, reason_of(reply.error))
    if missing:
        log.warning("%d of %d nodes did not answer in time", missing.total(), len(sent))
    if dropped is not None:
        for reply in failed:
            dropped.dropped(reply.metadata.src_node_id, f"failed: {reason_of(reply.error)}")
        for node in missing.elements():
            dropped.dropped(node, "no answer in time")
    lost = len(failed) if may_be_late else len(sent) - len(good)
    if sent and lost / len(sent) > max_failures:
        reason = reason_of(failed[0].error) if failed else "no answer in time"
        raise ClientError(
            f"{lost} of {len(sent)} nodes failed",
            expected=f"at most a share of {max_failures:g}",
            got=reason,
            fix="fix the first error above, or raise engine.max-failures or engine.timeout",
        )
    return good
