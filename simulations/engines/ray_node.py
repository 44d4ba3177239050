# SPDX-License-Identifier: Apache-2.0
"""A node in a process of Ray."""

from __future__ import annotations

import gc
import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict

from fedrec.components.errors import line_of
from fedrec.errors import FedrecError
from simulations.engines.grid import CLIENT_RAISED, rebuilt

if TYPE_CHECKING:
    from simulations.engines.reply_buffers import Spots


class Answer(NamedTuple):
    """The reply of an actor.

    Attributes:
        message: the answer.
        spots: where its arrays are in the reply buffer that came with it, if they are there.
    """

    message: Message
    spots: Spots


class NodeActor:
    """One node in its own process.

    Args:
        node_id: the node's id.
        node_config: as Flower gives it.
        run_config: as Flower gives it.
        population: where all clients' data are, the fields of a `SharedPopulation`; as one value,
            because Ray replaces references that are arguments by what they refer to.
    """

    def __init__(
        self,
        node_id: int,
        node_config: dict[str, Any],
        run_config: dict[str, Any],
        population: tuple[Any, tuple[Any, ...]],
    ) -> None:
        from fedrec.data.population import POPULATIONS
        from fedrec.experiment.loading import from_run_config
        from simulations.engines.shared_population import SharedPopulation

        self.context = Context(1, node_id, node_config, RecordDict(), run_config)
        held = SharedPopulation(*population).get()
        POPULATIONS.hold(from_run_config(run_config), held)

    def handle(self, packed: bytes, *shared: ArrayRecord) -> Answer:
        """Answer one message, packed by `simulations.engines.ray`; its large arrays come
        separately, from the object store."""
        from simulations.engines import reply_buffers

        gc.collect(1)  # messages before, which contain themselves and hold arrays of the store
        metadata, rest, names, memory = pickle.loads(packed)
        message = rebuilt(
            metadata, RecordDict({**dict(rest), **dict(zip(names, shared, strict=True))})
        )
        answer = self._answer(message)
        spots = (
            {}
            if memory is None or answer.has_error()
            else reply_buffers.put(answer.content, memory)
        )
        return Answer(answer, spots)

    def _answer(self, message: Message) -> Message:
        def work(message: Message) -> Message:
            from clients.app import app

            return app(message, self.context)

        return answer_or_error(message, work)


def answer_or_error(message: Message, work: Callable[[Message], Message]) -> Message:
    """The answer to a message, or the error of the work on it as an answer."""
    try:
        return work(message)
    except KeyboardInterrupt as error:  # of a plug-in; Ray would take it for a cancelled task
        reason = f"KeyboardInterrupt ({line_of(error)})"
    except Exception as error:
        reason = error.text() if isinstance(error, FedrecError) else traceback.format_exc()
    return Message(Error(CLIENT_RAISED, reason), reply_to=message)
