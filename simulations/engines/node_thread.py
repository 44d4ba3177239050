# SPDX-License-Identifier: Apache-2.0
"""A node in a thread of this process, for grids whose other nodes are in processes of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from flwr.app import Message

from simulations.engines.ray_node import Answer, answer_or_error


class NodeThread:
    """Answers one message after the other, so that the server can wait for other nodes meanwhile.

    The thread does not keep the process from ending: one that hangs is not waited for.

    Args:
        work: answers a message.
    """

    def __init__(self, work: Callable[[Message], Message]) -> None:
        self._work = work
        self._messages: SimpleQueue[tuple[Message, Future[Answer]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="fedrec-node", daemon=True).start()

    def send(self, message: Message) -> Future[Answer]:
        """Have a message answered."""
        answer: Future[Answer] = Future()
        self._messages.put((message, answer))
        return answer

    def close(self) -> None:
        """End the thread after the messages that were sent."""
        self._messages.put(None)

    def _serve(self) -> None:
        while (sent := self._messages.get()) is not None:
            message, answer = sent
            answer.set_result(Answer(answer_or_error(message, self._work), {}))
            del sent, message, answer  # which hold arrays, while the thread waits
