# SPDX-License-Identifier: Apache-2.0
"""The serial engine: every node in this process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrec.runs.folder import RunFolder
from simulations.engines.grid import FIRST_NODE_ID, LocalGrid, contexts_of, place_of, rebuilt
from simulations.engines.ray_node import Answer, answer_or_error

# A node in a thread of this process, for grids whose other nodes are in processes of their own.


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


# The serial engine: every node in this process, one after the other. For debugging and tests: an
# error in a client keeps its traceback.

G = TypeVar("G", bound="SerialGrid")


class SerialGrid(LocalGrid):
    """Runs a ClientApp in this process.

    Args:
        app: the ClientApp of every node.
        contexts: the context of each node.
    """

    def __init__(self, app: ClientApp, contexts: list[Context]) -> None:
        super().__init__(len(contexts))
        self._app = app
        self._contexts = contexts
        self._replies: dict[str, Message] = {}

    def _submit(self, batch: list[Message]) -> None:
        for message in batch:
            self._replies[message.metadata.message_id] = self.answer(message)

    def answer(self, message: Message) -> Message:
        """The answer of the node that a message is for."""
        context = self._contexts[place_of(message)]
        # One record is shared between messages; a client that edits its copy must not edit the
        # others'.
        own = rebuilt(
            message.metadata,
            RecordDict({k: _copied(record) for k, record in message.content.items()}),
        )
        return self._app(own, context)

    def _collect(self, message_ids: set[str], timeout: float | None) -> list[Message]:
        return [
            self._replies.pop(identifier)
            for identifier in message_ids
            if identifier in self._replies
        ]


def _copied(record):
    if not isinstance(record, ArrayRecord):
        return copy.deepcopy(record)
    own = ArrayRecord()
    for name, array in record.items():
        own[name] = copy.copy(array)
    return own


@contextmanager
def open_grid(run: RunFolder, kind: type[G] = SerialGrid) -> Iterator[G]:
    """The grid of a run, of a subclass where a `kind` is named."""
    from clients.app import app

    experiment = run.experiment
    configs = contexts_of(experiment.model_dump_json(), str(run.path), experiment.engine.nodes or 1)
    contexts = [
        Context(1, FIRST_NODE_ID + place, node_config, RecordDict(), run_config)
        for place, (node_config, run_config) in enumerate(configs)
    ]
    yield kind(app, contexts)
