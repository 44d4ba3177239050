# SPDX-License-Identifier: Apache-2.0
"""What real nodes send is looked at before anything is computed from it.

A reply counts only if it is what was asked for: the right parameters in the right shapes, finite numbers, no more
clients than were named. Where updates are not clipped, a sum that is much larger per client than others are is left out
too; under differential privacy it is not, because who is left out would then depend on others' data, and there the
strategy bounds each node's sum. A reply that does not count is as one that never came.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from flwr.app import Message

from fedrec import wire
from fedrec.row_sum import RowSum
from fedrec.wire import TrainSum
from strategies.dp import is_change

log = logging.getLogger("fedrec")
LARGER = 1000.0
"""How many times the usual norm an update per client may have."""
_REMEMBERED = 200  # norms of accepted replies


class Gate:
    """Lets through what nodes may send.

    Args:
        larger: how many times the usual norm an update per client may have.
    """

    def __init__(self, larger: float = LARGER) -> None:
        self._larger = larger
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)

    def trained(
        self, sent: Sequence[Message], replies: Sequence[Message], theta: Mapping[str, np.ndarray]
    ) -> list[Message]:
        """The replies to training messages that count, in their order.

        Args:
            sent: the messages.
            replies: the answers, none of them an error.
            theta: the parameters that were sent.
        """
        asked = {message.metadata.dst_node_id: _asked(message) for message in sent}
        norms: dict[int, float] = {}
        good: list[Message] = []
        for place, reply in enumerate(replies):
            node = reply.metadata.src_node_id
            try:
                clients, bare = asked.pop(node)  # a second answer, or one that nobody asked for, is refused
                norms[place] = _norm_of_sum(reply, clients, theta, bare) if clients else _norm_of_mean(reply, theta)
            except Exception as error:  # whatever an enemy may send
                log.warning("node %d: the answer is left out: %s", node, _reason(error))
                continue
            if not bare:
                del norms[place]
            good.append(reply)
        return self._of_usual_size(good, replies, norms)

    def _of_usual_size(
        self, good: list[Message], replies: Sequence[Message], norms: Mapping[int, float]
    ) -> list[Message]:
        present = [norm for norm in norms.values() if norm > 0]
        known = sorted([*self._usual, *present])
        if not known:
            return good
        usual = known[(len(known) - 1) // 2]
        left_out = []
        for place, norm in norms.items():
            if norm > self._larger * usual:
                node = replies[place].metadata.src_node_id
                log.warning("node %d: the answer is left out: norm %.3g per client, usual is %.3g", node, norm, usual)
                left_out.append(node)
            elif norm > 0:
                self._usual.append(norm)
        return [reply for reply in good if reply.metadata.src_node_id not in left_out]


def evaluated(table: pd.DataFrame, asked: np.ndarray, *, ranking: bool) -> pd.DataFrame:
    """A node's table of metrics, if it is one for clients that were asked for.

    Raises:
        ValueError: it is not.
    """
    if not table.index.is_unique or not np.isin(table.index.to_numpy(), asked).all():
        raise ValueError("clients that were not asked for")
    values = table.to_numpy()
    # Recall and the like are not numbers for a user without held-out positives.
    inside = np.isnan(values) | ((values >= 0) & (values <= (1 if ranking else 1e9)))
    if not inside.all():
        raise ValueError("a metric is out of its range")
    return table


def _asked(message: Message) -> tuple[int, bool]:
    """How many clients a message names, 0 for all; and whether their updates come bare."""
    config = next(iter(message.content.config_records.values()), {})
    clients = config.get("clients")
    return 0 if clients is None else len(clients), "protection" not in config  # type: ignore[arg-type]


def _norm_of_sum(reply: Message, asked: int, theta: Mapping[str, np.ndarray], bare: bool) -> float:
    found = wire.unpack_sum(reply.content)
    _check_counts(found, asked)
    strange = set(found.total) ^ set(theta if bare else found.total.keys() & theta.keys())
    if strange:
        raise ValueError(f"unknown or missing parameters {sorted(strange)[:3]}")
    for name, change in found.total.items():
        if not is_change(change, theta[name]):
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
    parts = [change.values if isinstance(change, RowSum) else change for change in found.total.values()]
    with np.errstate(over="ignore"):
        squares = sum(float(np.square(part.astype(np.float64)).sum()) for part in parts)
    return math.sqrt(squares) / max(found.weight, 1.0)


def _check_counts(found: TrainSum, asked: int) -> None:
    if not 0 <= found.clients <= asked or not 0 <= found.losses <= asked or not 0 <= found.unclipped <= asked:
        raise ValueError(f"{found.clients} clients where {asked} were asked for")
    if found.examples < 0 or not math.isfinite(found.weight) or not math.isfinite(found.loss):
        raise ValueError("counts or losses that cannot be")
    if found.weight < 0 or found.weight > max(found.examples, found.clients):
        raise ValueError(f"weight {found.weight} of {found.clients} clients with {found.examples} examples")


def _norm_of_mean(reply: Message, theta: Mapping[str, np.ndarray]) -> float:
    """Of an answer in Flower's standard form: how far its parameters are from those that were sent."""
    arrays = wire.unpack_parameters(reply.content)
    if list(arrays) != list(theta):
        raise ValueError("other parameters than were sent")
    squares = 0.0
    for name, array in arrays.items():
        if array.shape != theta[name].shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            raise ValueError(f"{name!r} has a wrong shape or is not finite")
        with np.errstate(over="ignore"):
            squares += float(np.square(array.astype(np.float64) - theta[name]).sum())
    (metrics,) = reply.content.metric_records.values()
    examples = metrics["num-examples"]
    if not isinstance(examples, int | float) or not 0 <= examples < 1e12:
        raise ValueError(f"num-examples {examples!r}")
    return math.sqrt(squares)


def _reason(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__} {text}".strip()
