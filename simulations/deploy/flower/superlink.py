# SPDX-License-Identifier: Apache-2.0
"""The SuperLink: more patience with its database and with silent runs, and less that it keeps."""

from __future__ import annotations

import importlib
import sys
import time
from collections import deque
from threading import Lock
from typing import Any

from flwr.app import Message
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.superlink.cli.flower_superlink import flower_superlink
from sqlalchemy import select

TASK_SILENCE = 150.0
"""Half of the seconds after which the SuperLink gives up a ServerApp that it does not hear of (Flower: 30), so that a
machine may be suspended for some minutes. A ServerApp that ended is reported by its executor, at once."""
DATABASE_WAIT_MS = 60_000
"""Milliseconds that the SuperLink waits for a lock on its database."""
OVERDUE, TIDYING = 120.0, 30.0
"""Seconds that the SuperLink keeps what belongs to a message after its time; least seconds between two looks."""

# By name, because their packages give functions of the same names.
linkstate_factory: Any = importlib.import_module("flwr.server.superlink.linkstate.linkstate_factory")
sql_corestate: Any = importlib.import_module("flwr.supercore.corestate.sql_corestate")
sql_mixin: Any = importlib.import_module("flwr.supercore.sql_mixin")


class TidyLinkState(SqlLinkState):
    """The SuperLink's memory without the pieces of messages whose time is over.

    Flower forgets such a message when it is asked for, but keeps the parameters that it carried until the run ends:
    where nodes come and go, half a megabyte for each round of a small model. It also forgets a message before its
    answer has been read, and while a late answer is still being sent; so pieces go `OVERDUE` seconds later.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forgotten: deque[tuple[float, set[str]]] = deque()
        self._next_look, self._looking = time.monotonic() + TIDYING, Lock()

    def store_message_ins(self, message: Message) -> str | None:
        """See Flower's; now and then, what belongs to messages that are over is forgotten."""
        if time.monotonic() >= self._next_look and self._looking.acquire(blocking=False):
            try:
                self.forget_overdue(time.time() - OVERDUE)
                self.drop_pieces(time.monotonic() - OVERDUE)
            finally:
                self._next_look = time.monotonic() + TIDYING
                self._looking.release()
        return super().store_message_ins(message)

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """See Flower's; remembers whose pieces are to go."""
        if not message_ins_ids:
            return
        answered = MessageRes.reply_to_message_id.in_(message_ins_ids)
        with self.session() as session:
            answers = {str(found) for found in session.scalars(select(MessageRes.message_id).where(answered))}
            super().delete_messages(message_ins_ids)
        self._forgotten.append((time.monotonic(), message_ins_ids | answers))

    def forget_overdue(self, moment: float) -> None:
        """Forget messages whose lifetime ended before a moment, in seconds since 1970, with their answers."""
        ends = MessageIns.created_at + MessageIns.ttl
        with self.session() as session:
            found = session.scalars(select(MessageIns.message_id).where(ends < moment))
            self.delete_messages({str(identifier) for identifier in found})

    def drop_pieces(self, moment: float) -> None:
        """Drop the pieces of messages that were forgotten before a moment of the monotonic clock, if any are left."""
        while self._forgotten and self._forgotten[0][0] < moment:
            for identifier in self._forgotten.popleft()[1]:
                if identifier in self.object_store:
                    self.object_store.delete(identifier)


def superlink(arguments: list[str]) -> None:
    """`flower-superlink` that waits longer for its database than 5 s, and for its runs than a minute."""
    linkstate_factory.SqlLinkState = TidyLinkState
    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL = TASK_SILENCE
    kept = [(name, value) for name, value in sql_mixin.SQLITE_PRAGMAS if name != "busy_timeout"]
    sql_mixin.SQLITE_PRAGMAS = (("busy_timeout", str(DATABASE_WAIT_MS)), *kept)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()
