# SPDX-License-Identifier: Apache-2.0
"""A SuperNode that replies to every message once, and never with the reply to another one.

Missing in Flower: a reply for a process that was killed together with its executor. The SuperNode
works on one message at a time, and waits for any reply without end: the node would stay online and
never take a message again. If a run is stopped while a message arrives, Flower's loop forgets the
message but its state does not: the late reply would be sent as the reply to the next message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from flwr.app import Error, Message
from flwr.supernode.nodestate import nodestate_factory

from simulations.deployment.flower.work_signal import WorkSignal

_FINISHED = "finished"
_COMPLETED = "completed"  # status of a task, and that of a finished one, by Flower
_CRASHED = Error(8, "ClientApp stopped responding.")  # as Flower's for a lost process


class AnsweringState(nodestate_factory.InMemoryNodeState):  # type: ignore[misc]
    """The state of a SuperNode that replies to every message once.

    Args:
        object_store: as Flower's.
        work_signal: sent to the executor for each task.
    """

    _newest_task: int | None = None

    def __init__(self, object_store: Any, work_signal: WorkSignal | None = None) -> None:
        super().__init__(object_store)
        self._work_signal = work_signal or WorkSignal(None)
        self._forgotten: deque[str] = deque(maxlen=1000)

    def store_message(self, message: Message) -> str | None:
        """As Flower's; a new message ends those before it."""
        if not message.metadata.reply_to_message_id:
            with self.lock_msg_store:
                stale = [
                    identifier
                    for identifier in self.msg_store
                    if identifier != message.metadata.message_id
                ]
                self._forgotten.extend(stale)
                self.delete_messages(message_ids=stale)
            for identifier in stale:
                self.object_store.delete(identifier)
        return super().store_message(message)

    def get_messages_legacy(self, **asked: Any) -> Sequence[Message]:
        """As Flower's, without replies to ended messages."""
        found = super().get_messages_legacy(**asked)
        return [
            message
            for message in found
            if message.metadata.reply_to_message_id not in self._forgotten
        ]

    def create_task(self, *args: Any, **kwargs: Any) -> int | None:
        """As Flower's, which keeps all tasks; there is one message, and so one task, at a time. The
        work signal wakes the executor."""
        with self.lock_task_store:
            for known in [
                task.task_id for task in self.task_store.values() if task.status.status == _FINISHED
            ]:
                del self.task_store[known]
        created = super().create_task(*args, **kwargs)
        self._newest_task = created if created is not None else self._newest_task
        self._work_signal.send()
        return created

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """As Flower's; a task that failed late must not reply to the message after its own."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status != _COMPLETED and task_id == self._newest_task:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id])}
            self._store_error_replies(runs, _CRASHED)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """As Flower's, which omits messages that the process had not fetched yet."""
        with self.lock_msg_store:
            for entry in self.msg_store.values():
                if (
                    entry.message.metadata.run_id in run_ids
                    and not entry.message.metadata.reply_to_message_id
                ):
                    entry.is_retrieved = True
            super()._store_error_replies(run_ids, error)
