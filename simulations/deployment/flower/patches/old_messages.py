# SPDX-License-Identifier: Apache-2.0
"""Deletes the pieces of expired messages.

Missing in Flower: it deletes an expired message when it is requested, but keeps its parameters
until the run ends: if nodes fail, half a megabyte per round of a small model. It also deletes a
message before its reply has been read, and while a late reply is still being sent; so pieces are
deleted `OVERDUE` seconds later.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from flwr.app import Message
from flwr.server.superlink.linkstate import linkstate_factory
from sqlalchemy import bindparam, text

from simulations.deployment.flower.patches.rare_writes import Throttle

OVERDUE = 120.0
TIDYING = 30.0
"""Seconds that the data of a message are kept after it expired; smallest number of seconds between
two clean-ups."""
_EXPIRED = text("SELECT message_id FROM message_ins WHERE created_at + ttl < :moment")
_ANSWERS = text(
    "SELECT message_id FROM message_res WHERE reply_to_message_id IN :messages"
).bindparams(bindparam("messages", expanding=True))


class OldMessages(linkstate_factory.SqlLinkState):  # type: ignore[misc]
    """The state of a SuperLink without pieces of expired messages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forgotten: deque[tuple[float, set[str]]] = deque()
        self._tidying = Throttle(TIDYING, at_once=False)

    def store_message_ins(self, message: Message) -> str | None:
        """As Flower's; also deletes the data of expired messages from time to time."""
        self._tidying.run(self._tidy)
        return super().store_message_ins(message)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """As Flower's; records the messages whose pieces are to be deleted."""
        if not message_ins_ids:
            return
        with self.session() as session:
            found = session.execute(_ANSWERS, {"messages": list(message_ins_ids)})
            answers = {str(identifier) for identifier in found.scalars()}
            super().delete_messages(message_ins_ids)
        self._forgotten.append((time.monotonic(), message_ins_ids | answers))

    def _tidy(self) -> None:
        self.forget_overdue(time.time() - OVERDUE)
        self.drop_pieces(time.monotonic() - OVERDUE)

    def forget_overdue(self, moment: float) -> None:
        """Delete messages that expired before a time, in seconds since 1970, with their replies."""
        with self.session() as session:
            found = session.execute(_EXPIRED, {"moment": moment}).scalars()
            self.delete_messages({str(identifier) for identifier in found})

    def drop_pieces(self, moment: float) -> None:
        """Delete the pieces of messages that were deleted before a time of the monotonic clock, if
        any are left."""
        store = self.object_store
        while self._forgotten and self._forgotten[0][0] < moment:
            for identifier in self._forgotten.popleft()[1]:
                if identifier in store:
                    store.delete(identifier)
