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
from fedrec.report.page.costs import byte_text

_NUMBER = 4  # bytes


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
    own = np.array([math.ceil(rows_per_user)])
    sent = int(
        (
            bytes_of_rows(own, _NUMBER, items * _NUMBER)
            + bytes_of_triangle(np.minimum(own, size), _NUMBER, whole)
        )[0]
    )
    most = int(bytes_of_triangle(np.array([size]), _NUMBER, whole)[0])
    said = f"traffic: a device with {own[0]:,} rows sends about {byte_text(sent)} in training"
    said += f" (one with all items {byte_text(most)})"
    if isinstance(settings, ItemWeightsConfig):
        said += f", and receives {byte_text(whole + items * _NUMBER)} of weights to recommend"
    return [*_fewer(settings, size, items), said]


def _fewer(settings: ProductsConfig, size: int, items: int) -> list[str]:
    if size == items:
        return []
    limit = f"{settings.traffic_limit:g} MB (--set model.traffic-limit=...)"
    reason = f"as many as fit into {limit}" if settings.items is None else "by model.items"
    return [
        f"weights: the {size:,} most popular of {items:,} items get them, {reason}; the others are"
        " recommended behind these, by popularity"
    ]
