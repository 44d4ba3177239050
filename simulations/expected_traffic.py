# SPDX-License-Identifier: Apache-2.0
"""What the devices of a system of products will send and receive, told before the run."""

from __future__ import annotations

import math

import numpy as np

from fedrec.components.registry import MODEL
from fedrec.experiment.schema import Experiment
from fedrec.models.base import ProductsConfig
from fedrec.models.item_weights import ItemWeightsConfig
from fedrec.protocol.compact import bytes_of_rows, bytes_of_triangle
from fedrec.protocol.triangle import numbers_of
from fedrec.report.page.costs import byte_text

_NUMBER = 4  # bytes
_MASKED = 8


def traffic_lines(experiment: Experiment, items: int, rows_per_user: float) -> list[str]:
    """How many items have products and why, and what a device sends and receives because of it;
    nothing of other models.

    Args:
        experiment: resolved; of counts, then products.
        items: size of the catalogue.
        rows_per_user: mean number of rows of a user.
    """
    settings = experiment.settings(MODEL)
    if not isinstance(settings, ProductsConfig):
        return []
    size = min(settings.most_items, items)
    whole = size**2 * _NUMBER
    rows = math.ceil(rows_per_user)
    if experiment.secure_aggregation:
        sent = (
            f"every device sends {byte_text(_MASKED * (numbers_of(size) + items))} of masked sums"
        )
    elif experiment.privacy is not None and experiment.privacy.placement != "central":
        sent = f"every device sends {byte_text(_sent(items, size, items))} with its noise"
    else:
        sent = f"a device with {rows:,} rows sends about {byte_text(_sent(rows, size, items))}"
        sent += f" in training (one with all items {byte_text(_sent(items, size, items))})"
    said = f"traffic: {sent}"
    if isinstance(settings, ItemWeightsConfig):
        said += f", and receives {byte_text(whole + items * _NUMBER)} of weights to recommend"
    return [*_fewer(settings, size, items), said]


def _sent(rows: int, size: int, items: int) -> int:
    """Bytes of the counts and products of so many items."""
    own = np.array([rows])
    counts = bytes_of_rows(own, _NUMBER, items * _NUMBER)
    products = bytes_of_triangle(np.minimum(own, size), _NUMBER, size**2 * _NUMBER)
    return int((counts + products)[0])


def _fewer(settings: ProductsConfig, size: int, items: int) -> list[str]:
    if size == items:
        return []
    limit = f"{settings.traffic_limit:g} MB (--set model.traffic-limit=...)"
    reason = f"as many as fit into {limit}" if settings.items is None else "by model.items"
    return [
        f"weights: the {size:,} most popular of {items:,} items get them, {reason}; the others are"
        " recommended behind these, by popularity"
    ]
