# SPDX-License-Identifier: Apache-2.0
"""Support for nodes that run another ClientApp than fedrec's; each takes part as one client.

Such an app has no notion of clients and steps: it gets `arrays` and `config`, trains, and replies
with new `arrays` and `metrics["num-examples"]`, as in Flower's documentation. This grid wraps
Flower's and translates the replies into fedrec's format: the update is `theta_local -
theta_global`, the metrics are those of one user.

Such an app neither clips nor adds noise. Under central differential privacy the server still bounds
the node's sum, by the clip norm of its one client; experiments whose clients add the noise are
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedrec.components.registry import MODEL, resolve
from fedrec.data.cache import POPULATIONS
from fedrec.errors import ClientError, ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.protocol.client_arrays import ClientArrays, ItemRequests
from fedrec.protocol.messages import (
    HELLO,
    INITIAL,
    pack_each,
    pack_parameters,
    pack_presence,
    pack_sum,
    pack_table,
    unpack_evaluate,
    unpack_presence,
    unpack_train,
)
from fedrec.protocol.orders import Presence, TrainEach, TrainOrder, TrainSum
from fedrec.protocol.records import ARRAYS
from fedrec.protocol.zero_copy import to_record, zero_copy_arrays
from fedrec.rng import torch_stream
from server.exchange.wrapped_grid import WrappedGrid

_NOT_OURS = "function registered with name 'hello'"
_EXAMPLES = "num-examples"


class ForeignClientGrid(WrappedGrid):
    """Flower's grid over nodes that run fedrec's or another ClientApp.

    Args:
        grid: Flower's.
        experiment: the resolved experiment; `train-config` goes to the other nodes with each
            training message.
    """

    def __init__(self, grid: Grid, experiment: Experiment) -> None:
        super().__init__(grid)
        self._experiment = experiment
        self._clients: dict[int, int] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies; those of other ClientApps are translated into
        fedrec's format.

        Raises:
            ClientError: one of them answered with other parameters.
            ExperimentError: it would have to add noise.
        """
        batch = list(messages)
        asked = {message.metadata.dst_node_id: message for message in batch}
        answered = [message for message in batch if self._is_initial(message)]
        sent = [message for message in batch if message not in answered]
        for message in sent:
            self._prepare(message)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout)) if sent else []
        if {message.metadata.message_type for message in batch} == {HELLO}:
            return self._presences(replies, asked)
        fresh = [
            Message(pack_parameters(self._initial()), reply_to=message) for message in answered
        ]
        return [*fresh, *(self._in_our_words(reply, asked) for reply in replies)]

    def _is_initial(self, message: Message) -> bool:
        return (
            message.metadata.message_type == INITIAL
            and message.metadata.dst_node_id in self._clients
        )

    def _prepare(self, message: Message) -> None:
        """Add the settings that a foreign app may read to its training message."""
        if (
            message.metadata.dst_node_id in self._clients
            and message.metadata.message_type == "train"
        ):
            for config in message.content.config_records.values():
                for key, value in (self._experiment.train_config or {}).items():
                    config[key] = value

    def _presences(self, replies: list[Message], asked: Mapping[int, Message]) -> list[Message]:
        """Every node's presence; a node that does not know the query hosts one client, with an id
        assigned here."""
        strangers = [
            one for one in replies if one.has_error() and _NOT_OURS in str(one.error.reason)
        ]
        others = [one for one in replies if one not in strangers]
        known = [unpack_presence(one.content) for one in others if not one.has_error()]
        client = max((int(np.max(p.training, initial=-1)) for p in known), default=-1) + 1
        client = max(client, *(int(np.max(p.evaluated, initial=-1)) + 1 for p in known), 0)
        partition = max((presence.partition for presence in known), default=-1) + 1
        nodes = sorted(one.metadata.src_node_id for one in strangers)
        self._clients = {node: client + place for place, node in enumerate(nodes)}
        for place, node in enumerate(nodes):
            own = np.array([self._clients[node]])
            presence = Presence(partition + place, own, own)
            others.append(Message(pack_presence(presence), reply_to=asked[node]))
        return others

    def _initial(self) -> dict[str, np.ndarray]:
        """The reply of a fedrec node, computed from the server's own copy of the catalogue."""
        schema = POPULATIONS.population(self._experiment).schema()
        model = resolve(MODEL, self._experiment.model.name)(
            self._experiment.settings(MODEL), schema
        )
        fresh = model.initial(torch_stream(self._experiment.seed, "init"))
        return {name: value.numpy() for name, value in fresh.items()}

    def _in_our_words(self, reply: Message, asked: Mapping[int, Message]) -> Message:
        node = reply.metadata.src_node_id
        if node not in self._clients or reply.has_error():
            return reply
        message = asked[node]
        if message.metadata.message_type == "train":
            _, order = unpack_train(_without_arrays(message))
            if order.clients is None:
                return reply  # sent by one of Flower's strategies, in Flower's standard form
            theta = zero_copy_arrays(next(iter(message.content.array_records.values())))
            found = _sum_of(reply.content, theta, order, node)
            if order.each:
                each = _each_of(found, self._clients[node])
                return Message(pack_each(each), reply_to=message)
            return Message(pack_sum(found), reply_to=message)
        _, order = unpack_evaluate(_without_arrays(message))
        if order.clients is None:
            return reply
        return Message(_row_of(reply.content, self._clients[node]), reply_to=message)


def _without_arrays(message: Message) -> RecordDict:
    """A message's content without its arrays."""
    return RecordDict({**message.content.config_records, ARRAYS: to_record({})})


def _sum_of(
    content: RecordDict, theta: Mapping[str, np.ndarray], order: TrainOrder, node: int
) -> TrainSum:
    """The update of a node in the form of a sum over one client."""
    found = zero_copy_arrays(next(iter(content.array_records.values()), to_record({})))
    if set(found) != set(theta) and len(found) == len(theta):
        # a record made of a list names its arrays 0, 1, 2, ...
        found = dict(zip(theta, found.values(), strict=True))
    shapes = [
        {name: tuple(value.shape) for name, value in table.items()} for table in (theta, found)
    ]
    if shapes[0] != {name: shapes[1].get(name) for name in shapes[0]}:
        raise ClientError(
            f"node {node} answered with other parameters than it was sent",
            expected=repr(shapes[0]),
            got=repr(shapes[1]),
            fix=(
                "its ClientApp must reply with all arrays that it received, in the same shapes"
                " and order"
            ),
        )
    metrics = _metrics(content)
    examples = int(metrics.get(_EXAMPLES, 0))
    protection = order.protection
    if protection is not None and protection.noise_scale:
        raise ExperimentError(
            f"node {node} runs another ClientApp, which adds no noise",
            expected="privacy.placement = 'central', or fedrec's clients on every node",
            got="noise added by the clients",
            fix="set privacy.placement = 'central'",
        )
    weight = float(examples) if order.weighting == "examples" and protection is None else 1.0
    total = {name: weight * (found[name].astype(np.float64) - theta[name]) for name in theta}
    loss = next((float(value) for name, value in metrics.items() if "loss" in name), None)
    silent = protection is not None and protection.silent
    reported = None if silent else loss
    shown = 0 if silent else examples
    losses = int(reported is not None)
    return TrainSum(total, 1, weight, shown, reported or 0.0, losses)  # type: ignore[arg-type]


def _each_of(found: TrainSum, client: int) -> TrainEach:
    """The sum over one client as this client's update."""
    requests = ItemRequests.of(np.array([client]), [np.empty(0, dtype=np.int64)])
    values = {name: np.asarray(change)[None] for name, change in found.total.items()}
    loss = found.loss if found.losses else np.nan
    arrays = ClientArrays(requests, values, {})
    return TrainEach(arrays, np.array([found.examples]), np.array([loss]))


def _row_of(content: RecordDict, client: int) -> RecordDict:
    """A node's metrics as those of one client."""
    metrics = _metrics(content).items()
    columns = {name: np.array([value]) for name, value in metrics if name != _EXAMPLES}
    return pack_table(np.array([client]), columns)


def _metrics(content: RecordDict) -> dict[str, float]:
    record = next(iter(content.metric_records.values()), MetricRecord())
    return {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
