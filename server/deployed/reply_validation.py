# SPDX-License-Identifier: Apache-2.0
"""Validation of real nodes' replies, before anything is computed from them.

A reply is accepted only if it has the right parameters in the right shapes, finite numbers, no more
clients than were named, and plausible weights and metrics. Where updates are not clipped, a sum
that is much larger per client than the others is rejected, too; so is one with many more examples
per client, which would outweigh the others. This is not done under differential privacy, where a
rejection would depend on other users' data; there the strategy bounds each node's sum. A rejected
reply is treated as missing.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from flwr.app import Message

from fedrec.experiment.schema import Experiment
from fedrec.metrics.ranking import ranking_metrics
from fedrec.metrics.rating import rating_errors
from fedrec.metrics.reconstruction import reconstruction_metrics
from fedrec.metrics.sampled import sampled_metrics
from fedrec.protocol.messages import unpack_parameters, unpack_sum
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.sparse_update import Change, SparseUpdate
from strategies.dp import is_change

log = logging.getLogger("fedrec")
LARGER = 1000.0
"""How many times the usual norm an update per client may have."""
MORE = 100.0
"""How many times the usual number of examples, or of held-out rows, a client may have."""
ROWS = "rows"
_UNBOUNDED = ("mae", "rmse", ROWS)  # metrics that are not in [0, 1]
_LARGEST_LOSS = 1e6  # per client; the mean loss is only reported
_REMEMBERED = 200  # number of accepted replies


class Asked(NamedTuple):
    """What a training message asked for.

    Attributes:
        clients: how many clients it named, 0 for all.
        bare: whether their updates come without clip and noise.
        weighting: how they count in the sum.
    """

    clients: int
    bare: bool
    weighting: str


class OutlierDetector:
    """The usual size of replies, to detect much larger ones.

    Args:
        larger: how many times as large is too large.
    """

    def __init__(self, larger: float) -> None:
        self._larger = larger
        self._known: deque[float] = deque(maxlen=_REMEMBERED)

    def too_large(self, values: Mapping[int, float]) -> set[int]:
        """Keys of the values above `larger` times the median of all positive ones; the other values
        are remembered for later medians."""
        known = sorted([*self._known, *(value for value in values.values() if value > 0)])
        if not known:
            return set()
        most = self._larger * known[(len(known) - 1) // 2]
        self._known.extend(value for value in values.values() if 0 < value <= most)
        return {key for key, value in values.items() if value > most}


class ReplyValidator:
    """Accepts or rejects nodes' replies.

    Args:
        larger: how many times the usual norm an update per client may have.
    """

    def __init__(self, larger: float = LARGER) -> None:
        self._norms, self._examples = OutlierDetector(larger), OutlierDetector(MORE)

    def trained(
        self, sent: Sequence[Message], replies: Sequence[Message], theta: Mapping[str, np.ndarray]
    ) -> list[Message]:
        """The accepted replies to training messages, in their order.

        Args:
            sent: the messages.
            replies: the answers, none of them an error.
            theta: the parameters that were sent.
        """
        asked = {message.metadata.dst_node_id: _asked(message) for message in sent}
        norms: dict[int, float] = {}
        examples: dict[int, float] = {}
        good: dict[int, Message] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                # a second reply, or one that was not requested, is rejected
                order = asked.pop(node)
                norm, examples[node] = _inspected(reply, order, theta)
            except Exception as error:  # untrusted input may be anything
                log.warning("node %d: the answer is left out: %s", node, _reason(error))
                continue
            if order.bare:
                norms[node] = norm
            good[node] = reply
        for node in sorted(self._norms.too_large(norms)):
            log.warning(
                "node %d: the answer is left out: norm %.3g per client is far from usual",
                node,
                norms[node],
            )
            examples.pop(node)
            good.pop(node)
        for node in sorted(self._examples.too_large({node: examples[node] for node in good})):
            log.warning(
                "node %d: the answer is left out: %.3g examples per client", node, examples[node]
            )
            good.pop(node)
        return list(good.values())


def evaluated(table: pd.DataFrame, asked: np.ndarray, columns: Sequence[str]) -> pd.DataFrame:
    """Check a node's table of metrics against the order, and return it.

    Args:
        table: the node's reply.
        asked: `int64 [clients]`, the clients.
        columns: names of the metrics that such clients have, and no others.

    Raises:
        ValueError: it is not.
    """
    if not table.index.is_unique or not np.isin(table.index.to_numpy(), asked).all():
        raise ValueError("clients that were not asked for")
    if len(table) and list(table.columns) != list(columns):
        raise ValueError("other metrics than were asked for")
    values = table.to_numpy()
    unbounded = table.columns.isin(_UNBOUNDED)
    inside = (values >= 0) & (values <= np.where(unbounded, 1e9, 1))
    # Recall and the like are not numbers for a user without held-out positives; errors always are.
    inside |= np.isnan(values) & ~unbounded
    if not inside.all():
        raise ValueError("a metric is out of its range")
    if ROWS in table and not _whole(table[ROWS].to_numpy()).all():
        raise ValueError("a number of held-out rows that is not a whole number of at least 1")
    return table


def _whole(values: np.ndarray) -> np.ndarray:
    """`bool [n]`: which numbers are integers from 1 on."""
    return (values >= 1) & (values % 1 == 0)


def of_usual_size(table: pd.DataFrame) -> pd.DataFrame:
    """Metrics of all nodes without clients whose errors, or numbers of held-out rows, are
    outliers."""
    kept = np.ones(len(table), dtype=bool)
    for name in table.columns.intersection(list(_UNBOUNDED)):
        values, larger = table[name].to_numpy(), MORE if name == ROWS else LARGER
        kept &= (
            ~(values > larger * max(np.nanmedian(values), np.finfo(float).tiny))
            if len(values)
            else kept
        )
    if not kept.all():
        log.warning("metrics of %d clients are left out: far from the others'", int((~kept).sum()))
    return table.iloc[np.flatnonzero(kept)]


def metrics_of(experiment: Experiment) -> list[str]:
    """Names of the metrics that a client of an experiment has."""
    settings = experiment.evaluation
    if experiment.task == "rating":
        return [*rating_errors(np.zeros(1), np.zeros(1)), ROWS]
    scores, nothing = (
        torch.zeros(1, max(settings.ks)),
        torch.zeros(1, max(settings.ks), dtype=torch.bool),
    )
    if settings.protocol == "reconstruction":
        return list(reconstruction_metrics(scores, nothing, settings.ks))
    found = list(
        ranking_metrics(scores, seen=nothing, known=nothing, relevant=nothing, ks=settings.ks)
    )
    if settings.sampled_items is not None:
        drawn = settings.sampled_items
        found += sampled_metrics(
            scores, seen=nothing, relevant=nothing, ks=settings.ks, sampled=drawn
        )
    return found


def _asked(message: Message) -> Asked:
    config: Any = next(iter(message.content.config_records.values()), {})
    clients = config.get("clients")
    weighting = str(config.get("weighting", "uniform"))
    return Asked(0 if clients is None else len(clients), "protection" not in config, weighting)


def _inspected(
    reply: Message, asked: Asked, theta: Mapping[str, np.ndarray]
) -> tuple[float, float]:
    """Norm of an answer and its number of examples, both per client.

    Raises:
        ValueError: it is not what was asked for.
    """
    if not asked.clients:
        return _norm_of_mean(reply, theta)
    found = unpack_sum(reply.content)
    _check_counts(found, asked)
    bare = asked.bare
    strange = set(found.total) ^ set(theta if bare else found.total.keys() & theta.keys())
    if strange:
        raise ValueError(f"unknown or missing parameters {sorted(strange)[:3]}")
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
    if found.examples < 0 or not abs(found.loss) <= _LARGEST_LOSS * max(found.losses, 1):
        raise ValueError("impossible counts or losses")
    if asked.bare:
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
