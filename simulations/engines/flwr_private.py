# SPDX-License-Identifier: Apache-2.0
"""The only imports of Flower's private modules, for grids of our own.

Flower makes messages inside a running task and lets its SuperLink number them. fedrec's grids have
neither, so they set an identity and number the messages themselves. A test reports what broke when
a new version of Flower changes this.
"""

from __future__ import annotations

from flwr.app import Message, Metadata, RecordDict
from flwr.supercore.task_identity import TaskIdentity

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


def rebuilt(metadata: Metadata, content: RecordDict) -> Message:
    """A message from its parts."""
    return Message(content, metadata=metadata)  # type: ignore[call-overload]
