# SPDX-License-Identifier: Apache-2.0
"""Replies of a round without errors; an error if too many failed."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flwr.app import Message

from fedrec.errors import ClientError

log = logging.getLogger("fedrec")


def answers(replies: Iterable[Message], *, sent: int, max_failures: float) -> list[Message]:
    """The replies without an error.

    Args:
        replies: what came back.
        sent: number of messages sent; a missing reply is a failure.
        max_failures: largest tolerated share of failures, in [0, 1].

    Raises:
        ClientError: more failed; carries the first node's error.
    """
    replies = list(replies)
    good = [reply for reply in replies if not reply.has_error()]
    failed = [reply for reply in replies if reply.has_error()]
    missing = sent - len(replies)
    for reply in failed:
        log.warning("node %d failed: %s", reply.metadata.src_node_id, reply.error.reason)
    if missing:
        log.warning("%d of %d nodes did not answer in time", missing, sent)
    if sent and (sent - len(good)) / sent > max_failures:
        reason = failed[0].error.reason if failed else "no answer in time"
        raise ClientError(
            f"{sent - len(good)} of {sent} nodes failed",
            expected=f"at most a share of {max_failures:g}",
            got=str(reason).strip(),
            fix="fix the first error above, or raise engine.max-failures or engine.timeout",
        )
    return good
