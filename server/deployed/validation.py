# SPDX-License-Identifier: Apache-2.0
"""Validation of real nodes' replies: shapes and values, single updates, compressed sums, and
sizes."""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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


# Validation of the updates of single clients in a real node's reply, by node and client.
#
# A reply with other clients or parameters than were asked for is left out as a whole; of a sound
# reply, a client whose update is not finite, or whose counts are impossible, is left out alone.

LARGEST_LOSS = 1e6  # per client; the mean loss is only reported


def sound_clients(
    found: TrainEach, asked: Sequence[int], theta: Mapping[str, np.ndarray]
) -> tuple[TrainEach, list[int]]:
    """The clients of a reply that count, and those that are left out.

    Args:
        found: the reply.
        asked: the clients that this node was asked for.
        theta: the parameters that were sent.

    Raises:
        ValueError: the reply has other clients or parameters.
    """
    _refuse_other_clients(found, asked)
    _refuse_other_parameters(found.updates, theta)
    with np.errstate(over="ignore"):
        sound = np.isfinite(_squares_of_each(found.updates))
    sound &= (found.examples >= 0) & ~(np.abs(found.losses) > LARGEST_LOSS)
    return found.take(np.flatnonzero(sound)), found.clients[~sound].tolist()


def norms_of(found: TrainEach) -> dict[int, float]:
    """Norm of each client's update, by client."""
    norms = np.sqrt(_squares_of_each(found.updates))
    return dict(zip(found.clients.tolist(), norms.tolist(), strict=True))


def scaled_clients(found: TrainEach, factors: Mapping[int, float]) -> TrainEach:
    """The updates times the factor of their client; 1 for one that is not named."""
    updates = found.updates
    each = np.array([factors.get(client, 1.0) for client in found.clients.tolist()])
    rows = np.repeat(each, np.diff(updates.requests.offsets))
    moved = ClientArrays(
        updates.requests,
        {name: _times(value, each) for name, value in updates.values.items()},
        {name: _times(value, rows) for name, value in updates.rows.items()},
    )
    return replace(found, updates=moved)


def _times(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return values * factors.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype)


def _refuse_other_clients(found: TrainEach, asked: Sequence[int]) -> None:
    requests = found.updates.requests
    clients = requests.clients
    whole = all(a.ndim == 1 and a.dtype.kind == "i" for a in vars(requests).values())
    if not whole or (np.diff(clients) <= 0).any() or not np.isin(clients, asked).all():
        raise ValueError("clients that were not asked for")
    offsets = requests.offsets
    fits = len(offsets) == len(clients) + 1 and offsets[0] == 0 and (np.diff(offsets) >= 0).all()
    if not fits or offsets[-1] != len(requests.items):
        raise ValueError("numbers of rows that do not fit the clients")
    if found.examples.shape != clients.shape or found.losses.shape != clients.shape:
        raise ValueError("numbers of examples or losses that do not fit the clients")


def _refuse_other_parameters(updates: ClientArrays, theta: Mapping[str, np.ndarray]) -> None:
    requests = updates.requests
    strange = (updates.values.keys() | updates.rows.keys()) - theta.keys()
    if strange or updates.values.keys() & updates.rows.keys():
        raise ValueError(f"unknown or repeated parameters {sorted(strange)[:3]}")
    shapes = {name: (len(requests.clients), *theta[name].shape) for name in updates.values}
    shapes |= {name: (len(requests.items), *theta[name].shape[1:]) for name in updates.rows}
    for name, value in (updates.values | updates.rows).items():
        if value.shape != shapes[name] or value.dtype.kind != "f":
            raise ValueError(f"{name!r} has a wrong shape or no numbers")
    steps = np.diff(requests.items)
    last = requests.offsets[1:-1] - 1  # from one client to the next, items may fall
    steps[last[(last >= 0) & (last < len(steps))]] = 1
    least = min((len(theta[name]) for name in updates.rows), default=np.inf)
    if len(requests.items) and ((steps <= 0).any() or not _within(requests.items, least)):
        raise ValueError("rows that the tables do not have, or twice")


def _within(items: np.ndarray, count: float) -> bool:
    return bool(items.min() >= 0 and items.max() < count)


def _squares_of_each(updates: ClientArrays) -> np.ndarray:
    """Sum of squares of each client's update, `float64 [C]`; NaN or infinite where it is not
    finite."""
    clients = len(updates.requests.clients)
    total = np.zeros(clients)
    for value in updates.values.values():
        total += np.square(value.reshape(clients, -1), dtype=np.float64).sum(axis=1)
    places = np.repeat(np.arange(clients), np.diff(updates.requests.offsets))
    for value in updates.rows.values():
        each = np.square(value.reshape(len(value), -1), dtype=np.float64).sum(axis=1)
        total += np.bincount(places, each, clients)
    return total


# Sums of the compressed updates that real nodes send.


def decompressed(
    content: RecordDict, experiment: Experiment, order: TrainOrder, theta: Mapping[str, np.ndarray]
) -> RecordDict:
    """A node's answer with the sum of its clients' updates in place of what they sent compressed;
    an answer with a sum is returned as it is. What a client sent is clipped here too, if its node
    has not, and its bytes are counted here.

    Args:
        content: the answer, which is untrusted input.
        experiment: says how updates are compressed.
        order: what the node was asked for.
        theta: the parameters that it was sent, by name, of any shapes.

    Raises:
        ValueError: it cannot be decoded, is of more clients than were asked for, or weighs them
            otherwise.
        Exception: an array is malformed.
    """
    found = unpack_sum(content)
    codec = Codec.of(experiment, order.round)
    if found.updates is None or codec is None:
        return content
    _refuse_weights(found.updates, order, found.weight)
    names = theta if order.protection is None else order.protection.names
    updates = [
        _decoded(codec, one, order, {name: theta[name] for name in names}) for one in found.updates
    ]
    total = {
        name: _sum([update[name] for update in updates if name in update], theta[name])
        for name in names
    }
    sent = network_bytes(read_arrays(content))
    return pack_sum(replace(found, total=total, sent=sent, updates=None))


def _refuse_weights(updates: Sequence[SentUpdate], order: TrainOrder, weight: float) -> None:
    most = 0 if order.clients is None else len(order.clients)
    if len(updates) > most:
        raise ValueError(f"updates of {len(updates)} clients where {most} were asked for")
    shares = [one.share for one in updates]
    weighted = order.protection is None and order.weighting == "examples"
    if weighted and not (min(shares, default=0.0) >= 0 and sum(shares) <= weight):
        raise ValueError("weights of updates that are not those of the clients")
    if not weighted and any(share != 1 for share in shares):
        raise ValueError("weights of updates that all count the same")


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
    return update if factor == 1 else {name: scaled(one, factor) for name, one in update.items()}


def _sum(changes: Sequence[Change], table: np.ndarray) -> Change:
    """Sum of changes of a table `[...]`, in its type; rows if these are less than half of it."""
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


# Bounds on the size of a node's reply, by the usual size of a round's replies (norm bounding, Sun
# et al. 2019, with a bound that follows the replies).
#
# Nobody knows in advance how large updates are that are not clipped. So a node's sum counts at most
# as ten times the median of the round, per unit of weight; a larger one is scaled down to that. So
# is a node's number of examples, per client, with which its sum is weighted.

K = TypeVar("K")
LARGER = 10.0
"""How many times the usual size a reply may have."""
_ENOUGH = 3  # replies whose median one of them cannot determine
_REMEMBERED = 200  # number of earlier replies


class UsualSize:
    """The usual size of replies.

    Args:
        larger: how many times as large a reply may be.
    """

    def __init__(self, larger: float = LARGER) -> None:
        self._larger = larger
        self._known: deque[float] = deque(maxlen=_REMEMBERED)

    def factors(self, sizes: Mapping[K, float]) -> dict[K, float]:
        """Factors in (0, 1) for the replies above the bound, which they are to be scaled by.

        The bound is `larger` times the median of the positive sizes of this round; where these are
        fewer than three, of them and those of earlier rounds. In case of an even number it is the
        smaller of the two middle ones.

        Args:
            sizes: of each reply of a round, finite, at least 0.
        """
        positive = [size for size in sizes.values() if size > 0]
        known = sorted(positive if len(positive) >= _ENOUGH else [*self._known, *positive])
        if not known:
            return {}
        most = self._larger * known[(len(known) - 1) // 2]
        self._known.extend(min(size, most) for size in positive)
        return {key: most / size for key, size in sizes.items() if size > most}


def bounded_sum(found: TrainSum, *, update: float, examples: float, weighted: bool) -> RecordDict:
    """A node's sum, scaled down.

    Args:
        found: the sum.
        update: factor of the sum of updates.
        examples: factor of the number of examples.
        weighted: whether clients are weighted by their examples, and the sum with them.
    """
    share = examples if weighted else 1.0
    return pack_sum(
        replace(
            found,
            total={name: scaled(change, update * share) for name, change in found.total.items()},
            examples=round(found.examples * examples),
            weight=found.weight * share,
        )
    )


def bound_mean(
    reply: Message, theta: Mapping[str, np.ndarray], *, update: float, examples: float
) -> None:
    """Scale down a reply in Flower's standard form, in place: the change of the parameters, and the
    number of examples; `theta` are the parameters that were sent."""
    moved = {
        name: (theta[name] + update * (value.astype(np.float64) - theta[name])).astype(value.dtype)
        for name, value in read_arrays(reply.content).items()
    }
    (key,) = reply.content.array_records
    reply.content[key] = to_record(moved)
    (metrics,) = reply.content.metric_records.values()
    metrics["num-examples"] = round(float(metrics["num-examples"]) * examples)  # type: ignore[arg-type]


# Validation of real nodes' replies, before anything is computed from them.
#
# A reply is accepted only if it has the right parameters in the right shapes, finite numbers, no
# more clients than were named, and plausible weights and metrics. A rejected reply is treated as
# missing. Where updates are not clipped, a sum that is much larger per client than usual is scaled
# down, and so is one with many more examples per client, which would outweigh the others. This is
# not done under differential privacy, where the scale would depend on other users' data; there the
# strategy bounds each node's sum by the clip norm. Both are recorded with the node and the reason.

log = logging.getLogger("fedrec")
_FAR_ERROR = 1000.0
_FAR_ROWS = 100.0
"""How many times the usual error, or number of held-out rows, a client may have."""
_LARGEST = 1e9  # of metrics without a bound


class Asked(NamedTuple):
    """What a training message asked for.

    Attributes:
        content: the order.
        clients: how many clients it named, 0 for all.
        unprotected: whether their updates come without clip and noise.
        weighting: how they count in the sum.
        step: the local step.
        each: the clients, if the update of each is asked for; None: their sum.
    """

    content: RecordDict
    clients: int
    unprotected: bool
    weighting: str
    step: str
    each: Sequence[int] | None = None


class ReplyValidator:
    """Accepts, scales down or rejects nodes' replies.

    Args:
        dropped: records the rejected and the scaled ones.
        experiment: whose compression nodes use; None: they send sums.
    """

    def __init__(
        self, dropped: DroppedReplies | None = None, experiment: Experiment | None = None
    ) -> None:
        self._experiment = experiment
        self._dropped = dropped or DroppedReplies()
        # by step, because updates of one phase say nothing about those of another
        self._norms: defaultdict[str, UsualSize] = defaultdict(UsualSize)
        self._examples: defaultdict[str, UsualSize] = defaultdict(UsualSize)

    def trained(
        self,
        sent: Sequence[Message],
        replies: Sequence[Message],
        theta: Mapping[str, np.ndarray],
    ) -> list[Message]:
        """The accepted replies to training messages, in their order.

        Args:
            sent: the messages.
            replies: the answers, none of them an error.
            theta: the parameters of the round.
        """
        asked = {message.metadata.dst_node_id: _asked(message) for message in sent}
        good: dict[int, Message] = {}
        unprotected: dict[int, tuple[float, float]] = {}
        apart: dict[int, TrainEach] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if node in good:
                    raise ValueError("a second answer")
                order = asked[node]
                if order.each is not None:
                    apart[node] = self._sound(reply, order.each, theta)
                    good[node] = reply
                    continue
                if self._experiment is not None and self._experiment.compression is not None:
                    reply.content = decompressed(
                        reply.content,
                        self._experiment,
                        unpack_train_order(order.content),
                        theta,
                    )
                size = _inspected(reply, order, theta)
            except Exception as error:  # untrusted input may be anything
                reason = "not asked for" if node not in asked else _reason(error)
                log.warning("node %d: the answer is left out: %s", node, reason)
                self._dropped.dropped(node, reason)
                continue
            good[node] = reply
            if order.unprotected:
                unprotected[node] = size
        self._bound({node: good[node] for node in unprotected}, unprotected, asked, theta)
        self._bound_each(good, apart, asked)
        return list(good.values())

    def _sound(
        self, reply: Message, asked: Sequence[int], theta: Mapping[str, np.ndarray]
    ) -> TrainEach:
        """The clients of a reply that count."""
        found, left_out = sound_clients(unpack_each(reply.content), asked, theta)
        for client in left_out:
            node = reply.metadata.src_node_id
            reason = f"client {client}: its update is not finite, or its counts are impossible"
            log.warning("node %d: %s", node, reason)
            self._dropped.dropped(node, reason)
        return found

    def _bound_each(
        self,
        replies: Mapping[int, Message],
        apart: Mapping[int, TrainEach],
        asked: Mapping[int, Asked],
    ) -> None:
        """Scale down, in place, updates of single clients that are much larger than usual."""
        if not apart:
            return
        norms = {client: norm for one in apart.values() for client, norm in norms_of(one).items()}
        factors = self._norms[asked[next(iter(apart))].step].factors(norms)
        for node, found in apart.items():
            for client in sorted(factors.keys() & set(found.clients.tolist())):
                size = (norms[client], 0.0)
                reason = f"client {client}: {_words(size, factors[client], 1.0)}"
                log.warning("node %d: %s", node, reason)
                self._dropped.bounded(node, reason)
            replies[node].content = pack_each(scaled_clients(found, factors))

    def _bound(
        self,
        replies: Mapping[int, Message],
        sizes: Mapping[int, tuple[float, float]],
        asked: Mapping[int, Asked],
        theta: Mapping[str, np.ndarray],
    ) -> None:
        """Scale down, in place, replies of unusual size: norm per unit of weight, and number of
        examples per client."""
        if not replies:
            return
        step = asked[next(iter(replies))].step
        norms = self._norms[step].factors({one: norm for one, (norm, _) in sizes.items()})
        counts = self._examples[step].factors({one: count for one, (_, count) in sizes.items()})
        for node in sorted({*norms, *counts}):
            update = norms.get(node, 1.0)
            examples = counts.get(node, 1.0)
            reason = _words(sizes[node], update, examples)
            log.warning("node %d: %s", node, reason)
            self._dropped.bounded(node, reason)
            reply = replies[node]
            order = asked[node]
            if not order.clients:
                bound_mean(reply, theta, update=update, examples=examples)
                continue
            weighted = order.weighting == "examples"
            reply.content = bounded_sum(
                unpack_sum(reply.content), update=update, examples=examples, weighted=weighted
            )


def _words(size: tuple[float, float], update: float, examples: float) -> str:
    """Why a reply is scaled down."""
    parts = zip(
        size, (update, examples), ("norm of the update", "examples per client"), strict=True
    )
    return ", ".join(
        f"{what} {value:.3g} counts as {value * factor:.3g}, {LARGER:g} times the usual"
        for value, factor, what in parts
        if factor < 1
    )


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
        ValueError: it is not.
    """
    if not table.index.is_unique or not np.isin(table.index.to_numpy(), asked).all():
        raise ValueError("clients that were not asked for")
    if not len(table):
        return table
    if list(table.columns) != list(ranges):
        raise ValueError("other metrics than were asked for")
    values = table.to_numpy()
    low, high = np.clip(np.array(list(ranges.values())), -_LARGEST, _LARGEST).T
    inside = (values >= low) & (values <= high)
    # Recall and the like are not numbers for a user without held-out positives; errors always are.
    inside |= np.isnan(values) & (high < _LARGEST)
    if not inside.all():
        raise ValueError("a metric is out of its range")
    if ROWS in table and not _whole(table[ROWS].to_numpy()).all():
        raise ValueError("a number of held-out rows that is not a whole number of at least 1")
    return table


def _whole(values: np.ndarray) -> np.ndarray:
    """`bool [n]`: which numbers are integers from 1 on."""
    return (values >= 1) & (values % 1 == 0)


def of_usual_size(table: pd.DataFrame, ranges: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    """Metrics of all nodes without clients whose errors, or numbers of held-out rows, are outliers;
    for `ranges` see `evaluated`."""
    kept = np.ones(len(table), dtype=bool)
    for name in [name for name in table if math.isinf(ranges[str(name)][1])]:
        values = table[name].to_numpy()
        larger = _FAR_ROWS if name == ROWS else _FAR_ERROR
        kept &= (
            ~(values > larger * max(np.nanmedian(values), np.finfo(float).tiny))
            if len(values)
            else kept
        )
    if not kept.all():
        log.warning("metrics of %d clients are left out: far from the others'", int((~kept).sum()))
    return table.iloc[np.flatnonzero(kept)]


def _asked(message: Message) -> Asked:
    config: Any = next(iter(message.content.config_records.values()), {})
    clients = config.get("clients")
    weighting = str(config.get("weighting", "uniform"))
    each = list(clients) if clients is not None and config.get("each") else None
    return Asked(
        message.content,
        0 if clients is None else len(clients),
        "protection" not in config,
        weighting,
        str(config.get("step", "")),
        each,
    )


def _inspected(
    reply: Message, asked: Asked, theta: Mapping[str, np.ndarray]
) -> tuple[float, float]:
    """Norm of an answer per unit of weight, and its number of examples per client.

    Raises:
        ValueError: it is not what was asked for.
    """
    if not asked.clients:
        return _norm_of_mean(reply, theta)
    found = unpack_sum(reply.content)
    _check_counts(found, asked)
    unprotected = asked.unprotected
    strange = set(found.total) ^ set(theta if unprotected else found.total.keys() & theta.keys())
    if strange:
        raise ValueError(f"unknown or missing parameters {sorted(strange)[:3]}")
    most = asked.clients * vector_bytes(shapes_of(theta, None))
    if not 0 <= found.sent <= most:
        raise ValueError(f"{found.sent} bytes of {asked.clients} clients")
    for name, change in found.total.items():
        if not is_change(change, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
        if isinstance(change, SparseUpdate) and abs(change.drift) > found.weight:
            raise ValueError(
                f"{name!r} drifts by {change.drift:.3g} with a weight of {found.weight:g}"
            )
    with np.errstate(over="ignore"):
        squares = sum(_squares(change, theta[name]) for name, change in found.total.items())
    return math.sqrt(squares) / max(found.weight, 1.0), found.examples / max(found.clients, 1)


def _squares(change: Change, table: np.ndarray) -> float:
    """Sum of squares of a change, including the drift of every row."""
    if not isinstance(change, SparseUpdate) or not change.drift:
        values = change.values if isinstance(change, SparseUpdate) else change
        return float(np.square(values, dtype=np.float64).sum())
    return float(np.square(change.dense(table)).sum())


def _check_counts(found: TrainSum, asked: Asked) -> None:
    most = asked.clients
    if (
        not 0 <= found.clients <= most
        or not 0 <= found.losses <= most
        or not 0 <= found.unclipped <= most
    ):
        raise ValueError(f"{found.clients} clients where {most} were asked for")
    if found.examples < 0 or not abs(found.loss) <= LARGEST_LOSS * max(found.losses, 1):
        raise ValueError("impossible counts or losses")
    if asked.unprotected:
        expected = float(found.examples if asked.weighting == "examples" else found.clients)
    else:
        expected = float(found.clients)
    if not math.isclose(found.weight, expected, rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(
            f"weight {found.weight} of {found.clients} clients with {found.examples} examples"
        )


def _norm_of_mean(reply: Message, theta: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """For a reply in Flower's standard form: the distance of its parameters from those that were
    sent, and its number of examples."""
    arrays = unpack_parameters(reply.content)
    if list(arrays) != list(theta):
        raise ValueError("other parameters than were sent")
    squares = 0.0
    for name, array in arrays.items():
        if (
            array.shape != theta[name].shape
            or array.dtype.kind != "f"
            or not np.isfinite(array).all()
        ):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
        with np.errstate(over="ignore"):
            squares += float(np.square(array.astype(np.float64) - theta[name]).sum())
    (metrics,) = reply.content.metric_records.values()
    examples = metrics["num-examples"]
    if not isinstance(examples, int | float) or not 0 <= examples < 1e12:
        raise ValueError(f"num-examples {examples!r}")
    return math.sqrt(squares), float(examples)


def _reason(error: Exception) -> str:
    text = str(error)
    return (
        text if isinstance(error, ValueError) and text else f"{type(error).__name__} {text}".strip()
    )
