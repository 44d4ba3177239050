# SPDX-License-Identifier: Apache-2.0
"""The Flower ClientApp of a node, the node that a Flower context describes, and the time limits of
its work."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.device.node import at_multiples_of, device_node_of
from clients.device.policy import Policy
from clients.evaluation import evaluate_clients, mean_metrics, requested_items
from clients.node import Node
from clients.round import only_reads, train_clients, train_each
from clients.secure import channel_key, masked_sum, share, unmask
from fedrec.errors import ClientError, RefusalError
from fedrec.experiment.schema import from_run_config
from fedrec.protocol.messages import (
    EvaluateOrder,
    ItemQuery,
    Presence,
    TrainOrder,
    check_settings,
    pack_arrays,
    pack_each,
    pack_masked,
    pack_order,
    pack_presence,
    pack_standard,
    pack_sum,
    pack_table,
    read_arrays,
    unpack_order,
    writable_arrays,
)
from fedrec.protocol.secure import ShareOrder, UnmaskOrder
from fedrec.protocol.serialization import for_the_network, from_the_network
from fedrec.protocol.updates import apply_changes

MOST_SECONDS = 3600.0
"""CPU seconds after which a real node's process for one message is ended."""


def _is_real(context: Context) -> bool:
    """True if a context belongs to a real node; decided by the node's configuration, not the
    server."""
    return "private-dir" in context.node_config


def node_of(context: Context) -> Node:
    """The node that a Flower context describes; made once per process.

    Reads `partition-id` and `num-partitions` from the node configuration and the experiment from
    the run configuration; real nodes are made by `clients.device.node`.
    """
    if _is_real(context):
        return device_node_of(context)
    given = context.run_config
    config = context.node_config
    experiment = str(given.get("resolved") or from_run_config(given).model_dump_json())
    output = str(given.get("output", "") or "")
    return _node(
        experiment, int(config.get("partition-id", 0)), int(config.get("num-partitions", 1)), output
    )


@lru_cache(maxsize=64)
def _node(experiment: str, partition: int, nodes: int, output: str) -> Node:
    private = Path(output) / "private" if output else None
    return Node(from_run_config({"resolved": experiment}), partition, nodes, private)


@contextmanager
def _ended_after(processor: float, elapsed: float) -> Iterator[None]:
    """End this process after `processor` seconds of CPU time of all threads (by the signal
    SIGVTALRM) or `elapsed` seconds (SIGALRM); 0: no limit.

    This also ends work in native code, which no exception would interrupt. The executor reports the
    failure.
    """
    limits = {signal.ITIMER_VIRTUAL: processor, signal.ITIMER_REAL: elapsed}
    before = {timer: signal.setitimer(timer, limit) for timer, limit in limits.items() if limit}
    try:
        yield
    finally:
        for timer, earlier in before.items():
            signal.setitimer(timer, *earlier)


def _seconds_left(sent: float, lives: float, now: float) -> float:
    """Seconds until the deadline for the reply to a message.

    Args:
        sent: the server's time when the message was created, in seconds.
        lives: seconds until the message expires.
        now: this machine's time. If by this clock the message is from the future or expired, the
            clocks differ, and it counts as created now.
    """
    left = sent + lives - now
    return left if 0 < left < lives else lives


# The Flower ClientApp of a node: unpack the message, let the node do the work, pack the answer.

log = logging.getLogger("fedrec")
ClientAppCallable = Callable[[Message, Context], Message]


def _at_the_border(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Decode messages to a real node, and remove error texts from its replies: an error may quote
    the node's files, or reveal which files exist, so its text stays in the node's log."""
    if not _is_real(context):
        return call_next(message, context)
    sent = message.metadata.created_at
    left = _seconds_left(sent, message.metadata.ttl, time.time())
    try:
        with at_multiples_of(Policy.of(context.node_config).reply_seconds):
            if message.has_content():
                check_settings(message.metadata.message_type, message.content)
                from_the_network(message.content)
            with _ended_after(MOST_SECONDS, left):
                answer = call_next(message, context)
    except RefusalError:
        raise
    except Exception as error:
        log.error("a message failed", exc_info=error)
        raise ClientError(
            "the node failed to process this message", fix="see executor.txt in the node's logs"
        ) from None
    if answer.has_content():
        for_the_network(answer.content)
    return answer


app = ClientApp(mods=[_at_the_border])


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Reply with the clients that this node hosts."""
    node = node_of(context)
    presence = Presence(node.partition, node.training, node.evaluated)
    if not node.real:
        presence = replace(presence, work=node.work, paths=node.paths, validated=node.validated)
    return Message(pack_presence(presence), reply_to=message)


@app.query("initial")
def initial(message: Message, context: Context) -> Message:
    """Reply with initial parameters: a function of the experiment and its seed, the same on every
    node."""
    fresh = node_of(context).initial()
    arrays = {name: value.numpy() for name, value in fresh.items()}
    return Message(pack_arrays(arrays), reply_to=message)


@app.query("items")
def items(message: Message, context: Context) -> Message:
    """Reply with the items whose rows the named clients need, before parameters are generated for
    them."""
    order = unpack_order(ItemQuery, message.content)
    node = node_of(context)
    node.check(order)
    return Message(pack_arrays(requested_items(node, order).arrays()), reply_to=message)


@app.query("secure_channel")
def secure_channel(message: Message, context: Context) -> Message:
    """Reply with the public channel key, with which other nodes encrypt messages to this one."""
    return Message(pack_order(channel_key(node_of(context))), reply_to=message)


@app.query("secure_shares")
def secure_shares(message: Message, context: Context) -> Message:
    """Begin a session of secure aggregation: reply with shares of the node's secrets for the other
    nodes."""
    order = unpack_order(ShareOrder, message.content)
    return Message(pack_order(share(node_of(context), order)), reply_to=message)


@app.query("secure_unmask")
def secure_unmask(message: Message, context: Context) -> Message:
    """End a session: reply with shares that unmask the sum of its nodes."""
    order = unpack_order(UnmaskOrder, message.content)
    return Message(pack_order(unmask(node_of(context), order)), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the named clients and reply with their sum or with single updates; without names, train
    all and reply in Flower's standard form."""
    node = node_of(context)
    order = unpack_order(TrainOrder, message.content)
    arrays = (
        read_arrays(message.content)
        if only_reads(node, order)
        else writable_arrays(message.content)
    )
    node.check(order, arrays)
    if order.secure is not None or node.experiment.secure_aggregation:
        return Message(pack_masked(masked_sum(node, arrays, order)), reply_to=message)
    if order.each:
        return Message(pack_each(train_each(node, arrays, node.accept(order))), reply_to=message)
    if order.clients is not None:
        return Message(pack_sum(train_clients(node, arrays, node.accept(order))), reply_to=message)
    order = TrainOrder(order.round, None, "examples", order.step, order.overrides)
    reply = train_clients(node, arrays, node.accept(order))
    mean = apply_changes(arrays, reply.total, 1 / max(reply.weight, 1.0))
    metrics = {"num-examples": reply.examples, "loss": reply.loss / max(reply.losses, 1)}
    return Message(pack_standard(mean, metrics), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the named clients and reply with a table; without names, evaluate all and reply with
    means."""
    arrays = writable_arrays(message.content)
    order = unpack_order(EvaluateOrder, message.content)
    node = node_of(context)
    node.check(order, arrays)
    evaluated = evaluate_clients(node, arrays, order)
    if order.clients is not None:
        return Message(
            pack_table(evaluated.clients, evaluated.columns, evaluated.sums), reply_to=message
        )
    return Message(pack_standard(None, mean_metrics(evaluated)), reply_to=message)
