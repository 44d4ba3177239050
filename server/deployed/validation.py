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
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Message, RecordDict

from fedrec.compression.codec import Codec, clip_factor
from fedrec.evaluation.tables import ROWS
from fedrec.experiment.schema import Experiment
from fedrec.protocol.client_arrays import ClientArrays
from fedrec.protocol.messages import (
    pack_each,
    pack_sum,
    read_arrays,
    unpack_each,
    unpack_parameters,
    unpack_sum,
    unpack_train_order,
)
from fedrec.protocol.orders import SentUpdate, TrainEach, TrainOrder, TrainSum
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import Change, SparseUpdate, added, network_bytes, scaled
from fedrec.secure.vector import shapes_of, vector_bytes
from server.exchange import DroppedReplies
from strategies.dp import is_change

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("fedrec")
Key = tuple[int, int | None]
"""A node and one of its clients, or None for their sum."""
LARGER = 10.0
"""Largest size of a reply, in units of the usual one."""
LARGEST_LOSS = 1e6  # per client; the mean loss is only reported
_ENOUGH = 3  # replies whose median no single one determines
_REMEMBERED = 200  # number of earlier replies
_FAR_ERROR = 1000.0
_FAR_ROWS = 100.0
"""Largest error, or number of held-out rows, of a client, in units of the usual one."""
_LARGEST = 1e9  # of metrics without a bound


def norm_bounds(sizes: Mapping[Key, float], earlier: deque[float]) -> dict[Key, float]:
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


class ReplyValidator:
    """Accepts, scales down or rejects nodes' replies.

    Args:
        dropped: records rejected and scaled replies.
        experiment: defines the nodes' compression; None: they send sums.
    """

    def __init__(
        self, dropped: DroppedReplies | None = None, experiment: Experiment | None = None
    ) -> None:
        self._experiment = experiment
        self._dropped = dropped or DroppedReplies()
        # by step, as updates of different phases are not comparable
        earlier = partial(deque[float], maxlen=_REMEMBERED)
        self._norms: defaultdict[str, deque[float]] = defaultdict(earlier)
        self._examples: defaultdict[str, deque[float]] = defaultdict(earlier)

    def trained(
        self,
        sent: Sequence[Message],
        replies: Sequence[Message],
        theta: Mapping[str, np.ndarray],
    ) -> list[Message]:
        """Validate replies to training messages, and return the accepted ones, in their order.

        Args:
            sent: the messages.
            replies: the replies, without errors.
            theta: the parameters of the round.
        """
        orders = {
            message.metadata.dst_node_id: unpack_train_order(message.content) for message in sent
        }
        good: dict[int, Message] = {}
        norms: dict[Key, float] = {}
        examples: dict[Key, float] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node in good:
                    raise ValueError("duplicate reply")
                order = orders[node]
                if order.each:
                    norms |= self._sizes_of_each(reply, order, theta)
                else:
                    norm, count = self._size(reply, order, theta)
                    if order.protection is None:
                        norms[node, None] = norm
                        examples[node, None] = count
            except Exception as error:  # untrusted input may be anything
                reason = "unrequested" if node not in orders else _reason(error)
                log.warning("node %d: the reply is dropped: %s", node, reason)
                self._dropped.dropped(node, reason)
                continue
            good[node] = reply
        if norms:
            step = str(next(iter(orders.values())).step)  # the same for all nodes
            by_norm = norm_bounds(norms, self._norms[step])
            by_count = norm_bounds(examples, self._examples[step])
            for key in sorted({*by_norm, *by_count}, key=str):
                words = [
                    f"{what} {sizes[key]:.3g} counts as {sizes[key] * factors[key]:.3g}"
                    for what, sizes, factors in (
                        ("norm of the update", norms, by_norm),
                        ("examples per client", examples, by_count),
                    )
                    if key in factors
                ]
                self._bounded(*key, f"{', '.join(words)}, {LARGER:g} times the usual")
            for node in {node for node, _ in [*by_norm, *by_count]}:
                _scale(good[node], orders[node], theta, node, by_norm, by_count)
        return list(good.values())

    def _sizes_of_each(
        self, reply: Message, order: TrainOrder, theta: Mapping[str, np.ndarray]
    ) -> dict[Key, float]:
        """Norm of each client's update; invalid clients are removed in place."""
        node = reply.metadata.src_node_id
        asked = [] if order.clients is None else order.clients.tolist()
        each, left_out = sound_clients(unpack_each(reply.content), asked, theta)
        for client in left_out:
            reason = f"client {client}: its update is not finite, or its counts are invalid"
            log.warning("node %d: %s", node, reason)
            self._dropped.dropped(node, reason)
        reply.content = pack_each(each)
        norms = np.sqrt(_squares_of_each(each.updates)).tolist()
        clients = each.clients.tolist()
        return {(node, client): norm for client, norm in zip(clients, norms, strict=True)}

    def _size(
        self, reply: Message, order: TrainOrder, theta: Mapping[str, np.ndarray]
    ) -> tuple[float, float]:
        """Norm of a valid sum per unit of weight, and number of examples per client; a compressed
        sum is decoded in place.

        Raises:
            ValueError: the reply does not match the order.
        """
        if self._experiment is not None and self._experiment.compression is not None:
            reply.content = decompressed(reply.content, self._experiment, order, theta)
        if order.clients is None or not len(order.clients):
            return _size_of_mean(reply, theta)
        return _size_of_sum(unpack_sum(reply.content), order, theta)

    def _bounded(self, node: int, client: int | None, reason: str) -> None:
        reason = reason if client is None else f"client {client}: {reason}"
        log.warning("node %d: %s", node, reason)
        self._dropped.bounded(node, reason)


def _scale(
    reply: Message,
    order: TrainOrder,
    theta: Mapping[str, np.ndarray],
    node: int,
    by_norm: Mapping[Key, float],
    by_count: Mapping[Key, float],
) -> None:
    """Scale down, in place, a node's reply, or the updates of its clients."""
    update = by_norm.get((node, None), 1.0)
    examples = by_count.get((node, None), 1.0)
    if order.each:
        each = unpack_each(reply.content)
        factors = np.array([by_norm.get((node, client), 1.0) for client in each.clients.tolist()])
        reply.content = pack_each(_scaled_clients(each, factors))
    elif order.clients is None or not len(order.clients):
        _bound_mean(reply, theta, update, examples)
    else:
        weighted = order.weighting == "examples"
        bounded = _bounded_sum(unpack_sum(reply.content), update, examples, weighted=weighted)
        reply.content = pack_sum(bounded)


def _reason(error: Exception) -> str:
    text = str(error)
    known = isinstance(error, ValueError) and text
    return text if known else f"{type(error).__name__} {text}".strip()


# Sums over the clients of a node.


def _size_of_sum(
    reply: TrainSum, order: TrainOrder, theta: Mapping[str, np.ndarray]
) -> tuple[float, float]:
    """Norm of a sum per unit of weight, and its number of examples per client.

    Raises:
        ValueError: it does not match the order.
    """
    asked = 0 if order.clients is None else len(order.clients)
    _check_counts(reply, order, asked)
    wanted = set(theta) if order.protection is None else reply.total.keys() & theta.keys()
    strange = set(reply.total) ^ wanted
    if strange:
        raise ValueError(f"unknown or missing parameters {sorted(strange)[:3]}")
    if not 0 <= reply.sent <= asked * vector_bytes(shapes_of(theta, None)):
        raise ValueError(f"invalid number of bytes, {reply.sent}, for {asked} clients")
    for name, change in reply.total.items():
        if not is_change(change, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
        if isinstance(change, SparseUpdate) and abs(change.drift) > reply.weight:
            raise ValueError(
                f"{name!r} drifts by {change.drift:.3g} with a weight of {reply.weight:g}"
            )
    with np.errstate(over="ignore"):
        squares = sum(_squares(change, theta[name]) for name, change in reply.total.items())
    return math.sqrt(squares) / max(reply.weight, 1.0), reply.examples / max(reply.clients, 1)


def _squares(change: Change, table: np.ndarray) -> float:
    """Sum of squares of a change, including the drift of every row."""
    if not isinstance(change, SparseUpdate) or not change.drift:
        values = change.values if isinstance(change, SparseUpdate) else change
        return float(np.square(values, dtype=np.float64).sum())
    return float(np.square(change.dense(table)).sum())


def _check_counts(reply: TrainSum, order: TrainOrder, asked: int) -> None:
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


def _bounded_sum(reply: TrainSum, update: float, examples: float, *, weighted: bool) -> TrainSum:
    """Scale a node's sum of updates, and the number of examples by which clients may be
    weighted."""
    share = examples if weighted else 1.0
    return replace(
        reply,
        total={name: scaled(change, update * share) for name, change in reply.total.items()},
        examples=round(reply.examples * examples),
        weight=reply.weight * share,
    )


# Replies in Flower's standard form: parameters, and a number of examples.


def _size_of_mean(reply: Message, theta: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Distance of a reply's parameters from the sent ones, and its number of examples."""
    arrays = unpack_parameters(reply.content)
    if list(arrays) != list(theta):
        raise ValueError("unknown or missing parameters")
    squares = 0.0
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or not is_change(array, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
        with np.errstate(over="ignore"):
            squares += float(np.square(array.astype(np.float64) - theta[name]).sum())
    (metrics,) = reply.content.metric_records.values()
    examples = metrics["num-examples"]
    if not isinstance(examples, int | float) or not 0 <= examples < 1e12:
        raise ValueError(f"invalid num-examples {examples!r}")
    return math.sqrt(squares), float(examples)


def _bound_mean(
    reply: Message, theta: Mapping[str, np.ndarray], update: float, examples: float
) -> None:
    """Scale down, in place, the change of the parameters, and the number of examples; `theta` are
    the sent parameters."""
    moved = {
        name: (theta[name] + update * (value.astype(np.float64) - theta[name])).astype(value.dtype)
        for name, value in read_arrays(reply.content).items()
    }
    (key,) = reply.content.array_records
    reply.content[key] = to_record(moved)
    (metrics,) = reply.content.metric_records.values()
    metrics["num-examples"] = round(float(metrics["num-examples"]) * examples)  # type: ignore[arg-type]


# The updates of single clients.
#
# A reply with unrequested clients or parameters is dropped as a whole; from a valid reply, only
# clients whose update is not finite, or whose counts are invalid, are dropped.


def sound_clients(
    reply: TrainEach, asked: Sequence[int], theta: Mapping[str, np.ndarray]
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
    """Scale the updates by the factor of each client, `float64 [C]`."""
    updates = reply.updates
    of_rows = np.repeat(factors, np.diff(updates.requests.offsets))
    moved = ClientArrays(
        updates.requests,
        {name: _times(value, factors) for name, value in updates.values.items()},
        {name: _times(value, of_rows) for name, value in updates.rows.items()},
    )
    return replace(reply, updates=moved)


def _times(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return values * factors.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)


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


def _check_parameters(updates: ClientArrays, theta: Mapping[str, np.ndarray]) -> None:
    requests = updates.requests
    strange = (updates.values.keys() | updates.rows.keys()) - theta.keys()
    if strange or updates.values.keys() & updates.rows.keys():
        raise ValueError(f"unknown or repeated parameters {sorted(strange)[:3]}")
    shapes = {name: (len(requests.clients), *theta[name].shape) for name in updates.values}
    shapes |= {name: (len(requests.items), *theta[name].shape[1:]) for name in updates.rows}
    for name, value in (updates.values | updates.rows).items():
        if value.shape != shapes[name] or value.dtype.kind != "f":
            raise ValueError(f"{name!r} has a wrong shape or type")
    steps = np.diff(requests.items)
    last = requests.offsets[1:-1] - 1  # from one client to the next, items may fall
    steps[last[(last >= 0) & (last < len(steps))]] = 1
    least = min((len(theta[name]) for name in updates.rows), default=np.inf)
    items = requests.items
    if len(items) and ((steps <= 0).any() or items.min() < 0 or items.max() >= least):
        raise ValueError("unknown or duplicate rows")


def _squares_of_each(updates: ClientArrays) -> np.ndarray:
    """Sum of squares of each client's update, `float64 [C]`; NaN or infinite where it is not
    finite."""
    clients = len(updates.requests.clients)
    total = np.zeros(clients)
    for value in updates.values.values():
        total += np.square(value.reshape(clients, -1), dtype=np.float64).sum(axis=1)
    owners = np.repeat(np.arange(clients), np.diff(updates.requests.offsets))
    for value in updates.rows.values():
        each = np.square(value.reshape(len(value), -1), dtype=np.float64).sum(axis=1)
        total += np.bincount(owners, each, clients)
    return total


# Sums of the compressed updates that real nodes send.


def decompressed(
    content: RecordDict, experiment: Experiment, order: TrainOrder, theta: Mapping[str, np.ndarray]
) -> RecordDict:
    """Replace the compressed updates in a node's reply by their sum; a reply with a sum is returned
    unchanged. Updates are clipped here too, if the node has not, and their bytes are counted here.

    Args:
        content: the reply, which is untrusted input.
        experiment: defines the compression of updates.
        order: the node's order.
        theta: the sent parameters, by name, of any shapes.

    Raises:
        ValueError: it cannot be decoded, has more clients than requested, or other weights.
        Exception: an array is malformed.
    """
    reply = unpack_sum(content)
    codec = Codec.of(experiment, order.round)
    if reply.updates is None or codec is None:
        return content
    _check_weights(reply.updates, order, reply.weight)
    names = theta if order.protection is None else order.protection.names
    updates = [
        _decoded(codec, update, order, {name: theta[name] for name in names})
        for update in reply.updates
    ]
    total = {
        name: _sum([update[name] for update in updates if name in update], theta[name])
        for name in names
    }
    sent = network_bytes(read_arrays(content))
    return pack_sum(replace(reply, total=total, sent=sent, updates=None))


def _check_weights(updates: Sequence[SentUpdate], order: TrainOrder, weight: float) -> None:
    most = 0 if order.clients is None else len(order.clients)
    if len(updates) > most:
        raise ValueError(f"updates of {len(updates)} clients, but {most} were requested")
    shares = [update.share for update in updates]
    weighted = order.protection is None and order.weighting == "examples"
    if weighted and not (min(shares, default=0.0) >= 0 and sum(shares) <= weight):
        raise ValueError("weights of updates do not match those of the clients")
    if not weighted and any(share != 1 for share in shares):
        raise ValueError("weights of updates are not uniform")


def _decoded(
    codec: Codec, sent: SentUpdate, order: TrainOrder, theta: Mapping[str, np.ndarray]
) -> dict[str, Change]:
    strange = set(sent.payloads) - set(theta)
    if strange:
        raise ValueError(f"unknown parameters {sorted(strange)[:3]}")
    update = codec.decoded(sent.payloads, {name: value.shape for name, value in theta.items()})
    for name, change in update.items():
        if not is_change(change, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
    factor = sent.share
    if order.protection is not None:
        factor *= clip_factor(update, order.protection.clip)
    return update if factor == 1 else {name: scaled(part, factor) for name, part in update.items()}


def _sum(changes: Sequence[Change], table: np.ndarray) -> Change:
    """Sum of changes of a table `[...]`, in its type; sparse if less than half of it changed."""
    if not changes:
        return np.zeros_like(table)
    total = changes[0]
    for change in changes[1:]:
        total = added(total, change, table)
    if not isinstance(total, SparseUpdate):
        return total.astype(table.dtype)
    if 2 * len(total.rows) >= len(table):
        return total.dense(table).astype(table.dtype)
    return SparseUpdate(total.shape, total.rows, total.values.astype(table.dtype), total.drift)


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
