# SPDX-License-Identifier: Apache-2.0
"""Grids of local nodes and the serial engine, the actor of a Ray node, and the private modules of
Flower that they import."""

import copy
import gc
import pickle
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedrec.components.registry import line_of
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import FedrecError
from fedrec.experiment.schema import from_run_config
from fedrec.runs.folder import RunFolder
from fedrec.runtime.shared_memory import share

# The only imports of Flower's private modules, for fedrec's grids.
#
# Flower makes messages inside a running task and lets its SuperLink number them. fedrec's grids
# have neither, so they set an identity and number the messages themselves. A test reports what
# broke when a new version of Flower changes this.

SERVER_NODE_ID = 1
CLIENT_RAISED = 2  # Flower's code for "the ClientApp raised an exception"


def identify_server() -> None:
    """Let this process make messages as the server of run 1; a no-op inside a real Flower task."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = SERVER_NODE_ID
        TaskIdentity.task_id = 1


def number(message: Message, identifier: str) -> None:
    """Give a message its id."""
    message.metadata.__dict__["_message_id"] = identifier


# Base of fedrec's grids: node ids, numbering of messages, and waiting for replies.

FIRST_NODE_ID = 2  # 1 is the server


class LocalGrid(Grid):
    """Grid over local nodes. A subclass submits messages and collects replies.

    Args:
        nodes: number of nodes; node i has the id `FIRST_NODE_ID + i`.
    """

    def __init__(self, nodes: int) -> None:
        identify_server()
        self._nodes = nodes
        self._sent = 0
        self._run: Any = None

    @abstractmethod
    def _submit(self, batch: list[Message]) -> None:
        """Start to process messages."""

    @abstractmethod
    def _collect(self, message_ids: set[str], timeout: float | None) -> list[Message]:
        """Collect the replies to the messages with these ids that arrive within `timeout` seconds;
        None waits for all."""

    def share(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Put parameters into memory that the nodes can read without a copy; here, shared memory of
        this machine."""
        return share(arrays)

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        return list(range(FIRST_NODE_ID, FIRST_NODE_ID + self._nodes))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        batch = list(messages)
        for message in batch:
            self._sent += 1
            number(message, f"message-{self._sent}")
        self._submit(batch)
        return [message.metadata.message_id for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return self._collect(set(message_ids), 0.0)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and return the replies, in the order of the messages; see
        `Grid.send_and_receive`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ids = self.push_messages(messages)
        rank = {identifier: rank for rank, identifier in enumerate(ids)}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        replies = self._collect(set(ids), left)
        return sorted(replies, key=lambda reply: rank[reply.metadata.reply_to_message_id])


def index_of(message: Message) -> int:
    """Index of the node that a message is for."""
    return message.metadata.dst_node_id - FIRST_NODE_ID


def contexts_of(resolved: str, output: str, nodes: int) -> list[Context]:
    """Context of each node, with node and run configuration as Flower would set them."""
    run_config: Any = {"resolved": resolved, "output": output}
    return [
        Context(
            1,
            FIRST_NODE_ID + index,
            {"partition-id": index, "num-partitions": nodes},
            RecordDict(),
            run_config,
        )
        for index in range(nodes)
    ]


# The serial engine: all nodes run sequentially in this process. For debugging and tests: an error
# in a client keeps its traceback.


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
        private = Message(RecordDict(records), metadata=message.metadata)  # type: ignore[call-overload]
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

    nodes = run.experiment.engine.nodes or 1
    yield SerialGrid(app, contexts_of(run.experiment.model_dump_json(), str(run.path), nodes))


class NodeActor:
    """Ray actor of one node, in its own process, see `simulations.engines.ray`.

    Args:
        context: of the node.
        population: all clients' data, which Ray reads from its object store without a copy.
    """

    def __init__(self, context: Context, population: Population) -> None:
        self.context = context
        POPULATIONS.hold(from_run_config(context.run_config), population)

    def handle(self, packed: bytes, names: list[str], *records: ArrayRecord) -> Message:
        """Answer a message. Its metadata and content are pickled; its large records of arrays,
        with their names, come from the object store."""
        gc.collect(1)  # messages before, which contain themselves and hold arrays of the store
        metadata, content = pickle.loads(packed)
        large = dict(zip(names, records, strict=True))
        full = RecordDict({**content, **large})
        message = Message(full, metadata=metadata)  # type: ignore[call-overload]
        return answer_or_error(message, self._work)

    def _work(self, message: Message) -> Message:
        from clients.app import app

        return app(message, self.context)


def answer_or_error(message: Message, work: Callable[[Message], Message]) -> Message:
    """Process a message, and return the reply, or an error as the reply."""
    try:
        return work(message)
    except KeyboardInterrupt as error:  # of a plug-in; Ray would take it for a cancelled task
        reason = f"KeyboardInterrupt ({line_of(error)})"
    except Exception as error:
        reason = error.text() if isinstance(error, FedrecError) else traceback.format_exc()
    return Message(Error(CLIENT_RAISED, reason), reply_to=message)
