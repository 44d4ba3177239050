# SPDX-License-Identifier: Apache-2.0
"""The serial engine: all nodes run sequentially in this process. For debugging and tests: an error
in a client keeps its traceback."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrec.runs.folder import RunFolder
from simulations.engines.grid import FIRST_NODE_ID, LocalGrid, contexts_of, index_of, rebuilt


class SerialGrid(LocalGrid):
    """Grid that runs a ClientApp in this process.

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
        """Process a message at its node, and return the reply."""
        # One record is shared between messages; a client that edits its copy must not edit the
        # others'.
        records = {name: _copied(record) for name, record in message.content.items()}
        private = rebuilt(message.metadata, RecordDict(records))
        return self._app(private, self._contexts[index_of(message)])

    def _collect(self, message_ids: set[str], timeout: float | None) -> list[Message]:
        return [
            self._replies.pop(identifier)
            for identifier in message_ids
            if identifier in self._replies
        ]


def _copied(record):
    if not isinstance(record, ArrayRecord):
        return copy.deepcopy(record)
    copied = ArrayRecord()
    for name, array in record.items():
        copied[name] = copy.copy(array)
    return copied


@contextmanager
def open_grid(run: RunFolder) -> Iterator[SerialGrid]:
    """Open the grid of a run."""
    from clients.app import app

    experiment = run.experiment
    configs = contexts_of(experiment.model_dump_json(), str(run.path), experiment.engine.nodes or 1)
    contexts = [
        Context(1, FIRST_NODE_ID + index, node_config, RecordDict(), run_config)
        for index, (node_config, run_config) in enumerate(configs)
    ]
    yield SerialGrid(app, contexts)
