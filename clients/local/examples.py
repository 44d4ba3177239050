# SPDX-License-Identifier: Apache-2.0
"""The labelled examples that a client learns from: its rated rows, or its positives and drawn
negatives."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedrec.data.client_data import ClientData
from fedrec.data.negatives import draw_negatives
from fedrec.data.schema import Schema


def labelled(
    data: ClientData,
    schema: Schema,
    negatives: int,
    low_rated: Literal["ignore", "negative"],
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Items `int64 [n]` and labels `float32 [n]`.

    Args:
        data: of one client.
        schema: its task says what a label is: a rating, or 1 and 0.
        negatives: unobserved items per positive (ranking only).
        low_rated: how rows that are not positive are used (ranking only).
        random: source of the negatives.

    A client that likes the whole catalogue has no negatives; it is no error, or its data would
    decide whether a private run ends.
    """
    items = data.items
    labels = data.labels
    if schema.task == "rating":
        return items, labels
    if low_rated == "ignore":
        items = items[labels > 0]
        labels = labels[labels > 0]
    count = negatives * int((labels > 0).sum())
    if not count or len(data.never_negative) >= schema.num_items:
        return items, labels
    drawn = draw_negatives(data.never_negative, schema.num_items, count, random)
    return np.concatenate([items, drawn]), np.concatenate(
        [labels, np.zeros(count, dtype=np.float32)]
    )
