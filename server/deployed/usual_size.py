# SPDX-License-Identifier: Apache-2.0
"""Bounds on the size of a node's reply, by the usual size of a round's replies (norm bounding, Sun
et al. 2019, with a bound that follows the replies).

Nobody knows in advance how large updates are that are not clipped. So a node's sum counts at most
as ten times the median of the round, per unit of weight; a larger one is scaled down to that. So is
a node's number of examples, per client, with which its sum is weighted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
from flwr.app import Message, RecordDict

from fedrec.protocol.messages import pack_sum
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.records import read_arrays
from fedrec.protocol.sparse_update import scaled
from fedrec.protocol.zero_copy import to_record

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
