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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from fedrec.evaluation.metrics import ROWS
from fedrec.experiment.schema import Experiment
from fedrec.protocol.messages import (
    pack_each,
    unpack_each,
    unpack_parameters,
    unpack_sum,
    unpack_train_order,
)
from fedrec.protocol.orders import TrainEach, TrainSum
from fedrec.protocol.sparse_update import Change, SparseUpdate
from fedrec.secure.vector import shapes_of, vector_bytes
from server.deployed.decompression import decompressed
from server.deployed.each_validation import (
    LARGEST_LOSS,
    norms_of,
    scaled_clients,
    sound_clients,
)
from server.deployed.usual_size import LARGER, UsualSize, bound_mean, bounded_sum
from server.exchange.dropped_replies import DroppedReplies
from strategies.dp import is_change

if TYPE_CHECKING:
    import pandas as pd

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
