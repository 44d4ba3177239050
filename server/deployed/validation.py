# SPDX-License-Identifier: Apache-2.0
"""Validation of real nodes' replies, before anything is computed from them.

A reply is accepted only if it has the right parameters in the right shapes, finite numbers, no more
clients than were named, and plausible weights and metrics. A rejected reply is treated as missing.
Where updates are not clipped, a sum that is much larger per client than usual is scaled down, and
so is one with many more examples per client, which would outweigh the others. This is not done
under differential privacy, where the scale would depend on other users' data; there the strategy
bounds each node's sum by the clip norm. Both are recorded with the node and the reason.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from fedrec.evaluation.tables import ROWS
from fedrec.protocol.messages import (
    TrainEach,
    TrainOrder,
    TrainSum,
    pack_each,
    pack_standard,
    pack_sum,
    read_arrays,
    unpack_each,
    unpack_order,
    unpack_sum,
)
from fedrec.protocol.updates import Change, ClientArrays, numbers_in, scaled
from fedrec.secure.vector import shapes_of, vector_bytes
from server.nodes import DroppedReplies
from strategies.dp import is_change

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedrec")
Key = tuple[int, int | None]
"""A node and one of its clients, or None for their sum."""
Theta = Mapping[str, np.ndarray]
"""Parameters of a round, which were sent to the nodes."""
Reply = TrainSum | TrainEach
Sizes = Mapping[Key, float]
"""Sizes of replies, or factors that scale them down."""
LARGER = 10.0
"""Largest size of a reply, in units of the usual one."""
LARGEST_LOSS = 1e6  # per client; the mean loss is only reported
_ENOUGH = 3  # replies whose median no single one determines
_REMEMBERED = 200  # number of earlier replies
_FAR_ERROR = 1000.0
_FAR_ROWS = 100.0
"""Largest error, or number of held-out rows, of a client, in units of the usual one."""
_LARGEST = 1e9  # of metrics without a bound


def _norm_bounds(sizes: Sizes, earlier: deque[float]) -> dict[Key, float]:
    """Scale factors in (0, 1) of replies above the usual size (norm bounding, Sun et al. 2019, with
    a bound that follows the replies).

    The size of unclipped updates is unknown in advance. The bound is `LARGER` times the median of
    the positive sizes of this round; if these are fewer than three, of these and those of earlier
    rounds. For an even number it is the smaller of the two middle ones.

    Args:
        sizes: size of each reply of a round, finite, at least 0.
        earlier: sizes of earlier replies; the new sizes are appended.
    """
    positive = [size for size in sizes.values() if size > 0]
    usual = sorted(positive if len(positive) >= _ENOUGH else [*earlier, *positive])
    if not usual:
        return {}
    most = LARGER * usual[(len(usual) - 1) // 2]
    earlier.extend(min(size, most) for size in positive)
    return {key: most / size for key, size in sizes.items() if size > most}


_SIZES = "norm of the update", "examples per client"


class _Answer(NamedTuple):
    """A valid reply to an order, and the message that contains it."""

    message: Message
    order: TrainOrder
    reply: Reply


class ReplyValidator:
    """Accepts, scales down or rejects nodes' replies.

    Args:
        dropped: records rejected and scaled replies.
    """

    def __init__(self, dropped: DroppedReplies | None = None) -> None:
        self._dropped = dropped or DroppedReplies()
        # by step, as updates of different phases are not comparable
        self._earlier = defaultdict[tuple[str, str], deque[float]](
            partial(deque[float], maxlen=_REMEMBERED)
        )

    def trained(
        self, sent: Sequence[Message], replies: Sequence[Message], theta: Theta
    ) -> list[Message]:
        """Validate replies to training messages, and return the accepted ones, in their order.

        Args:
            sent: the messages.
            replies: the replies, without errors.
            theta: the parameters of the round.
        """
        orders = {
            message.metadata.dst_node_id: unpack_order(TrainOrder, message.content)
            for message in sent
        }
        good: dict[int, _Answer] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node in good or node not in orders:
                    raise ValueError("duplicate reply" if node in good else "unrequested")
                valid = self._valid(reply, orders[node], theta)
                good[node] = _Answer(reply, orders[node], valid)
            except Exception as error:  # untrusted input may be anything
                text = str(error)
                known = isinstance(error, ValueError) and text
                self._drop(node, text if known else f"{type(error).__name__} {text}".strip())
        self._bound(good, theta)
        return [answer.message for answer in good.values()]

    def _valid(self, message: Message, order: TrainOrder, theta: Theta) -> Reply:
        """Read a reply, from which invalid clients are removed.

        Raises:
            ValueError: the reply does not match the order.
        """
        if order.clients is None:
            return _mean(message.content, theta)
        if order.each:
            each, left_out = _sound_clients(
                unpack_each(message.content), order.clients.tolist(), theta
            )
            for client in left_out:
                text = f"client {client}: its update is not finite, or its counts are invalid"
                self._drop(message.metadata.src_node_id, text)
            message.content = pack_each(each)
            return each
        reply = unpack_sum(message.content)
        _check_sum(reply, order, theta)
        return reply

    def _drop(self, node: int, reason: str) -> None:
        log.warning("node %d: the reply is dropped: %s", node, reason)
        self._dropped.dropped(node, reason)

    def _bound(self, answers: Mapping[int, _Answer], theta: Theta) -> None:
        """Scale down the replies, by node, that are much larger than usual, in their messages."""
        steps = (answer.order.step for answer in answers.values())  # the same for all nodes
        step = str(next(steps, None))
        factors: list[Sizes] = []
        texts = defaultdict[Key, list[str]](list)
        for kind, sizes in zip(_SIZES, _sizes(answers, theta), strict=True):
            factors.append(_norm_bounds(sizes, self._earlier[kind, step]))
            for key, factor in factors[-1].items():
                texts[key].append(f"{kind} {sizes[key]:.3g} counts as {sizes[key] * factor:.3g}")
        for (node, client), parts in sorted(texts.items(), key=str):
            who = "" if client is None else f"client {client}: "
            reason = f"{who}{', '.join(parts)}, {LARGER:g} times the usual"
            log.warning("node %d: %s", node, reason)
            self._dropped.bounded(node, reason)
        for node in {node for node, _ in texts}:
            answers[node].message.content = _scaled(node, answers[node], theta, *factors)


def _sizes(answers: Mapping[int, _Answer], theta: Theta) -> tuple[Sizes, Sizes]:
    """Norms of updates, and numbers of examples of a client; without those that are never scaled:
    sums under differential privacy."""
    norms: dict[Key, float] = {}
    examples: dict[Key, float] = {}
    for node, (_, order, reply) in answers.items():
        if isinstance(reply, TrainEach):
            each = np.sqrt(_squares_of_each(reply.updates)).tolist()
            norms.update(((node, c), n) for c, n in zip(reply.clients.tolist(), each, strict=True))
        elif order.protection is None:
            norms[node, None] = _norm(reply.total) / max(reply.weight, 1.0)
            examples[node, None] = reply.examples / max(reply.clients, 1)
    return norms, examples


def _scaled(node: int, answer: _Answer, theta: Theta, norms: Sizes, examples: Sizes) -> RecordDict:
    """Content of a node's message whose reply is scaled by factors for norms and numbers of
    examples."""
    content = answer.message.content
    order = answer.order
    reply = answer.reply
    if isinstance(reply, TrainEach):
        factors = [norms.get((node, client), 1.0) for client in reply.clients.tolist()]
        return pack_each(_scaled_clients(reply, np.array(factors)))
    fewer = examples.get((node, None), 1.0)
    share = fewer if order.clients is not None and order.weighting == "examples" else 1.0
    total = scaled(reply.total, norms.get((node, None), 1.0) * share)
    count = round(reply.examples * fewer)
    if order.clients is not None:
        return pack_sum(replace(reply, total=total, examples=count, weight=reply.weight * share))
    arrays = {
        name: (theta[name] + total[name]).astype(sent.dtype)
        for name, sent in read_arrays(content).items()
    }
    (metrics,) = content.metric_records.values()
    return pack_standard(arrays, {**metrics, "num-examples": count})  # type: ignore[dict-item]


def _check_changes(changes: Mapping[str, Change], theta: Theta) -> None:
    for name, change in changes.items():
        if not is_change(change, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")


# Sums over the clients of a node.


def _check_sum(reply: TrainSum, order: TrainOrder, theta: Theta) -> None:
    """Check a sum.

    Raises:
        ValueError: it does not match the order.
    """
    _check_counts(reply, order, theta)
    wanted = set(theta) if order.protection is None else reply.total.keys() & theta.keys()
    strange = set(reply.total) ^ wanted
    if strange:
        raise ValueError(f"unknown or missing parameters {sorted(strange)[:3]}")
    _check_changes(reply.total, theta)


def _norm(changes: Mapping[str, Change]) -> float:
    """Norm of changes."""
    squares = 0.0
    with np.errstate(over="ignore"):
        for change in changes.values():
            squares += float(np.square(numbers_in(change), dtype=np.float64).sum())
    return math.sqrt(squares)


def _check_counts(reply: TrainSum, order: TrainOrder, theta: Theta) -> None:
    asked = 0 if order.clients is None else len(order.clients)
    if not all(0 <= count <= asked for count in (reply.clients, reply.losses)):
        raise ValueError(f"{reply.clients} clients, but {asked} were requested")
    if reply.examples < 0 or not abs(reply.loss) <= LARGEST_LOSS * max(reply.losses, 1):
        raise ValueError("invalid counts or losses")
    weighted = order.protection is None and order.weighting == "examples"
    expected = float(reply.examples if weighted else reply.clients)
    if not math.isclose(reply.weight, expected, rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(
            f"invalid weight {reply.weight} of {reply.clients} clients, {reply.examples} examples"
        )
    if not 0 <= reply.sent <= asked * vector_bytes(shapes_of(theta, None)):
        raise ValueError(f"invalid number of bytes, {reply.sent}, for {asked} clients")


def _mean(content: RecordDict, theta: Theta) -> TrainSum:
    """Read a reply in Flower's standard form, parameters and a number of examples, as the sum of
    one client.

    Raises:
        ValueError: it does not match the order.
    """
    arrays = read_arrays(content)
    if list(arrays) != list(theta):
        raise ValueError("unknown or missing parameters")
    _check_changes(arrays, theta)
    (metrics,) = content.metric_records.values()
    count: Any = metrics["num-examples"]
    if not isinstance(count, int | float) or not 0 <= count < 1e12:
        raise ValueError(f"invalid num-examples {count!r}")
    changes = {name: value.astype(np.float64) - theta[name] for name, value in arrays.items()}
    return TrainSum(changes, clients=1, weight=1.0, examples=count, loss=0.0, losses=0)  # type: ignore[arg-type]


# The updates of single clients.
#
# A reply with unrequested clients or parameters is dropped as a whole; from a valid reply, only
# clients whose update is not finite, or whose counts are invalid, are dropped.


def _sound_clients(
    reply: TrainEach, asked: Sequence[int], theta: Theta
) -> tuple[TrainEach, list[int]]:
    """Split a reply into its valid clients, and the ids of those that are dropped.

    Args:
        reply: a node's reply.
        asked: the clients requested from this node.
        theta: the parameters that were sent.

    Raises:
        ValueError: the reply has unrequested clients or parameters.
    """
    _check_clients(reply, asked)
    _check_parameters(reply.updates, theta)
    with np.errstate(over="ignore"):
        sound = np.isfinite(_squares_of_each(reply.updates))
    sound &= (reply.examples >= 0) & ~(np.abs(reply.losses) > LARGEST_LOSS)
    return reply.take(np.flatnonzero(sound)), reply.clients[~sound].tolist()


def _scaled_clients(reply: TrainEach, factors: np.ndarray) -> TrainEach:
    """Reply with the updates scaled by the factor of each client, `[C]`."""
    updates = reply.updates
    of_rows = factors[updates.requests.owners]

    def times(arrays: Mapping[str, np.ndarray], by: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: value * by.reshape(-1, *[1] * (value.ndim - 1)).astype(value.dtype)
            for name, value in arrays.items()
        }

    moved = ClientArrays(
        updates.requests, times(updates.values, factors), times(updates.rows, of_rows)
    )
    return replace(reply, updates=moved)


def _check_clients(reply: TrainEach, asked: Sequence[int]) -> None:
    requests = reply.updates.requests
    clients = requests.clients
    integers = all(a.ndim == 1 and a.dtype.kind == "i" for a in vars(requests).values())
    if not integers or (np.diff(clients) <= 0).any() or not np.isin(clients, asked).all():
        raise ValueError("unrequested clients")
    offsets = requests.offsets
    fits = len(offsets) == len(clients) + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
    if not fits or offsets[-1] != len(requests.items):
        raise ValueError("numbers of rows do not match the clients")
    if reply.examples.shape != clients.shape or reply.losses.shape != clients.shape:
        raise ValueError("numbers of examples or losses do not match the clients")


def _check_parameters(updates: ClientArrays, theta: Theta) -> None:
    requests = updates.requests
    strange = (updates.values.keys() | updates.rows.keys()) - theta.keys()
    if strange or updates.values.keys() & updates.rows.keys():
        raise ValueError(f"unknown or repeated parameters {sorted(strange)[:3]}")
    shapes = {name: (len(requests.clients), *theta[name].shape) for name in updates.values}
    shapes |= {name: (len(requests.items), *theta[name].shape[1:]) for name in updates.rows}
    for name, value in (updates.values | updates.rows).items():
        if value.shape != shapes[name] or value.dtype.kind != "f":
            raise ValueError(f"{name!r} has a wrong shape or type")
    items = requests.items
    rows = min((len(theta[name]) for name in updates.rows), default=0)
    inside = (items >= 0) & (items < rows)
    if not inside.all() or (np.diff(updates.requests.owners * rows + items) <= 0).any():
        raise ValueError("unknown or duplicate rows")


def _squares_of_each(updates: ClientArrays) -> np.ndarray:
    """Sum of squares of each client's update, `float64 [C]`; NaN or infinite where it is not
    finite."""
    clients = len(updates.requests.clients)
    total = np.zeros(clients)
    for value in updates.values.values():
        total += np.square(value.reshape(clients, -1), dtype=np.float64).sum(axis=1)
    for value in updates.rows.values():
        each = np.square(value.reshape(len(value), -1), dtype=np.float64).sum(axis=1)
        total += np.bincount(updates.requests.owners, each, clients)
    return total


# Metrics.


def evaluated(
    table: pd.DataFrame, asked: np.ndarray, ranges: Mapping[str, tuple[float, float]]
) -> pd.DataFrame:
    """Check a node's table of metrics against the order, and return it.

    Args:
        table: the node's reply.
        asked: `int64 [clients]`, the clients.
        ranges: smallest and largest value of each metric that such clients have, see
            `Metrics.ranges`.

    Raises:
        ValueError: the table does not match the order.
    """
    if not table.index.is_unique or not np.isin(table.index.to_numpy(), asked).all():
        raise ValueError("unrequested clients")
    if not len(table):
        return table
    if list(table.columns) != list(ranges):
        raise ValueError("unrequested or missing metrics")
    values = table.to_numpy()
    low, high = np.clip(np.array(list(ranges.values())), -_LARGEST, _LARGEST).T
    inside = (values >= low) & (values <= high)
    # Recall and the like are not numbers for a user without held-out positives; errors always are.
    inside |= np.isnan(values) & (high < _LARGEST)
    if not inside.all():
        raise ValueError("a metric is out of its range")
    rows = table[ROWS].to_numpy() if ROWS in table else np.ones(1)
    if not ((rows >= 1) & (rows % 1 == 0)).all():
        raise ValueError("a number of held-out rows is not a whole number of at least 1")
    return table


def of_usual_size(table: pd.DataFrame, ranges: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    """Drop clients whose errors, or numbers of held-out rows, are outliers among the metrics of all
    nodes; for `ranges` see `evaluated`."""
    if not len(table):
        return table
    usual = np.ones(len(table), dtype=bool)
    for name in [name for name in table if math.isinf(ranges[str(name)][1])]:
        values = table[name].to_numpy()
        larger = _FAR_ROWS if name == ROWS else _FAR_ERROR
        usual &= ~(values > larger * max(np.nanmedian(values), np.finfo(float).tiny))
    if not usual.all():
        log.warning("metrics of %d clients are dropped as outliers", int((~usual).sum()))
    return table.iloc[np.flatnonzero(usual)]
