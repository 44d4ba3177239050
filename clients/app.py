# SPDX-License-Identifier: Apache-2.0
"""The Flower ClientApp of a node: unpack the message, let the node do the work, pack the answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from clients.device.policy import Policy
from clients.device.reply_times import at_multiples_of
from clients.device.time_limit import ended_after, seconds_left
from clients.evaluation import evaluate_clients, mean_metrics
from clients.generated import requested_items
from clients.node_of_context import is_real, node_of
from clients.secure import channel_key, masked_sum, share, unmask
from clients.training.round import only_reads, train_clients, train_each
from fedrec.errors import ClientError, RefusalError
from fedrec.protocol.messages import (
    pack_each,
    pack_item_requests,
    pack_parameters,
    pack_presence,
    pack_standard,
    pack_sum,
    pack_table,
    refuse_strange_settings,
    unpack_evaluate,
    unpack_item_query,
    unpack_train_order,
)
from fedrec.protocol.orders import Presence, TrainOrder
from fedrec.protocol.records import array_names, own_arrays, read_arrays
from fedrec.protocol.secure import ShareOrder, UnmaskOrder
from fedrec.protocol.secure_messages import pack_channel, pack_masked, pack_words, unpack_words
from fedrec.protocol.sparse_update import apply_changes
from fedrec.protocol.zero_copy import for_the_network, from_the_network

log = logging.getLogger("fedrec")
ClientAppCallable = Callable[[Message, Context], Message]


def _at_the_border(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Decodes messages to a real node, and removes error texts from its replies: an error may quote
    the node's files, or reveal which files exist, so its text stays in the node's log unless its
    owner allows the operator to read it."""
    real = is_real(context)
    if not real and not context.run_config.get("deployment"):
        return call_next(message, context)
    policy = Policy()
    try:
        if real:
            policy = Policy.of(context.node_config)
        with at_multiples_of(policy.reply_seconds if real else 0.0):
            if message.has_content():
                refuse_strange_settings(message.metadata.message_type, message.content)
                from_the_network(message.content)
            with ended_after(*(_limits(message, policy) if real else (0.0, 0.0))):
                answer = call_next(message, context)
    except RefusalError:
        raise
    except Exception as error:
        if not real:
            raise
        log.error("a message failed", exc_info=error)
        raise ClientError(
            "the node failed to process this message",
            got=str(error) if policy.report_errors else None,
            fix="see executor.txt in the node's own logs; its owner may set report-errors = true",
        ) from None
    if answer.has_content():
        for_the_network(answer.content)
    return answer


def _limits(message: Message, policy: Policy) -> tuple[float, float]:
    """Seconds of processor time, and of elapsed time, for the work on a message."""
    sent = message.metadata.created_at
    return policy.most_seconds, seconds_left(sent, message.metadata.ttl, time.time())


app = ClientApp(mods=[_at_the_border])


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Reply with the clients that this node hosts."""
    node = node_of(context)
    presence = Presence(
        node.partition,
        node.training,
        node.evaluated,
        node.work,
        node.paths,
        node.validated,
    )
    return Message(pack_presence(presence), reply_to=message)


@app.query("initial")
def initial(message: Message, context: Context) -> Message:
    """Reply with initial parameters: a function of the experiment and its seed, the same on every
    node."""
    fresh = node_of(context).initial()
    return Message(
        pack_parameters({name: value.numpy() for name, value in fresh.items()}), reply_to=message
    )


@app.query("items")
def items(message: Message, context: Context) -> Message:
    """Reply with the items whose rows the named clients need, before parameters are generated for
    them."""
    order = unpack_item_query(message.content)
    node = node_of(context)
    node.refuse_generated()
    return Message(pack_item_requests(requested_items(node, order)), reply_to=message)


@app.query("secure_channel")
def secure_channel(message: Message, context: Context) -> Message:
    """Reply with the public channel key, with which other nodes encrypt messages to this one."""
    return Message(pack_channel(*channel_key(node_of(context))), reply_to=message)


@app.query("secure_shares")
def secure_shares(message: Message, context: Context) -> Message:
    """Begin a session of secure aggregation: reply with shares of the node's secrets for the other
    nodes."""
    order = unpack_words(ShareOrder, message.content)
    return Message(pack_words(share(node_of(context), order)), reply_to=message)


@app.query("secure_unmask")
def secure_unmask(message: Message, context: Context) -> Message:
    """End a session: reply with shares that unmask the sum of its nodes."""
    order = unpack_words(UnmaskOrder, message.content)
    return Message(pack_words(unmask(node_of(context), order)), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the named clients and reply with their sum or with single updates; without names, train
    all and reply in Flower's standard form."""
    node = node_of(context)
    order = unpack_train_order(message.content)
    node.check_train(order, array_names(message.content))
    arrays = (
        read_arrays(message.content) if only_reads(node, order) else own_arrays(message.content)
    )
    node.check_parameters(arrays)
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
    arrays, order = unpack_evaluate(message.content)
    node = node_of(context)
    node.check_evaluate(order)
    node.check_parameters(arrays)
    if order.each:
        node.refuse_generated()
    found = evaluate_clients(node, arrays, order)
    if order.clients is not None:
        return Message(pack_table(found.clients, found.columns, found.sums), reply_to=message)
    return Message(pack_standard(None, mean_metrics(found)), reply_to=message)
