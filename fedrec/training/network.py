# SPDX-License-Identifier: Apache-2.0
"""The records of compiled code: a declared model as numbers, one client, its batch, and working
memory.

All dense parameters of a client are stored in one vector, so that one compiled function serves all
models.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from fedrec.kernel.compiled import FAST, INNER
from fedrec.kernel.rows import aligned, whole_lines


class Network(NamedTuple):
    """A declared model as numbers. A parameter is named by its place in the vector of dense
    parameters.

    Attributes:
        users: `int64 [U, 5]`, per row of the user's own and feature of the users: place of the
            table, width, first row in the first weight, first and last column in the users' codes.
        features: `int64 [F, 7]`, per feature of the items: the same, with columns of `item_codes`,
            the number of categories, and the column of `item_shares`.
        item_codes: `int64 [items, width]`, codes of all features side by side, the real ones first,
            -1 for none.
        item_shares: `float32 [items, F]`, one over the number of codes.
        item_start: first row of the first weight that meets the items' rows.
        layers: `int64 [L, 4]`: place of the weight, inputs, outputs, place of the bias or -1.
        offsets: `int64 [O]`, places of the offsets.
        product: `int64 [3]`: place of the user's row, its width and place of the weight; a width of
            0 without a product.
        activation: see `fedrec.kernel.products`.
        logistic: whether the loss is logistic; else it is squared.
    """

    users: np.ndarray
    features: np.ndarray
    item_codes: np.ndarray
    item_shares: np.ndarray
    item_start: int
    layers: np.ndarray
    offsets: np.ndarray
    product: np.ndarray
    activation: int
    logistic: bool


class Rates(NamedTuple):
    """Step sizes `float32`, by kind of parameter; 0 for parameters that are fixed.

    Attributes:
        users: `[U]`.
        features: `[F]`.
        weights: `[L]`.
        biases: `[L]`.
        offsets: `[O]`.
        item: of the item table.
        item_bias: of the items' biases.
        product_user: of the user's row in the product.
        product_item: of the items' rows in the product.
    """

    users: np.ndarray
    features: np.ndarray
    weights: np.ndarray
    biases: np.ndarray
    offsets: np.ndarray
    item: np.float32
    item_bias: np.float32
    product_user: np.float32
    product_item: np.float32


class Client(NamedTuple):
    """The parameters that one client trains.

    Attributes:
        dense: `float32 [P]`.
        rows: `float32 [R, d]`, the rows of the item table that it touches; `[R, 0]` without an item
            table.
        biases: `float32 [R, 1]`, their biases; `[R, 0]` without.
        factors: `float32 [R, k]`, their rows in the product; `[R, 0]` without.
        codes: `int64 [W]`, the codes of the user's features side by side.
        first_row: offset to subtract from a place to get the row.
    """

    dense: np.ndarray
    rows: np.ndarray
    biases: np.ndarray
    factors: np.ndarray
    codes: np.ndarray
    first_row: int


class Batch(NamedTuple):
    """The examples of a step.

    Attributes:
        items: `int64 [n]`.
        places: `int64 [n]`, rows of the items, see `Client.first_row`.
        labels: `float32 [n]`.
    """

    items: np.ndarray
    places: np.ndarray
    labels: np.ndarray


class Scratch(NamedTuple):
    """Working memory of a step, reused in every step.

    Attributes:
        user: `[sum of widths]`, means of the rows of the users' tables.
        base: `[out]`, the part of bias and user in the outputs of the first layer.
        base_gradient: `[out]`, its gradient.
        gathered: `[B, d]`, rows of the item table.
        to_rows: `[B, d]`, their gradients.
        projected: `[most categories * out]`.
        of_categories: `[F, most categories * width]`, rows of the categories that occur in a batch.
        to_categories: `[most categories * width]`, their gradients.
        categories: `int64 [F, most categories]`, those that occur.
        numbers: `int64 [F, most categories]`, their places among these; -1 for others.
        category_counts: `int64 [F]`, how many occur.
        hidden: `[sum of outputs, times B]`, outputs of the layers, one after the other.
        gradients: two of the largest of these.
        product: `[k]`, what the items' rows in the product are multiplied by.
        summed: `[k]`, sums of these rows, weighted by the outputs' gradients.
        room: for transposed factors of products, as large as the largest weight.
    """

    user: np.ndarray
    base: np.ndarray
    base_gradient: np.ndarray
    gathered: np.ndarray
    to_rows: np.ndarray
    projected: np.ndarray
    of_categories: np.ndarray
    to_categories: np.ndarray
    categories: np.ndarray
    numbers: np.ndarray
    category_counts: np.ndarray
    hidden: np.ndarray
    gradients: np.ndarray
    product: np.ndarray
    summed: np.ndarray
    room: np.ndarray


@njit(**INNER)
def batch_of(examples, step, client):
    """The batch of a client's step, of items, places and labels `[S, C, B]` each, and numbers of
    examples `[S, C]`."""
    items, places, labels, counts = examples
    n = counts[step, client]
    return Batch(items[step, client, :n], places[step, client, :n], labels[step, client, :n])


@njit(**FAST)
def scratch_for(network, examples, width):
    """Working memory for steps with batches and rows of the given sizes."""
    inputs = 0
    categories = 0
    table = 0
    outputs = 0
    widest = 0
    for user in network.users:
        inputs = max(inputs, user[2] + user[1])
    for feature in network.features:
        categories = max(categories, feature[5])
        table = max(table, feature[5] * feature[1])
    room = 0
    for layer in network.layers:
        outputs = outputs + layer[2]
        widest = max(widest, layer[2])
        room = max(room, layer[1] * layer[2])
    return Scratch(
        aligned(1, inputs)[0],
        aligned(1, network.layers[0, 2])[0],
        aligned(1, network.layers[0, 2])[0],
        aligned(examples, width),
        aligned(examples, width),
        aligned(1, categories * network.layers[0, 2])[0],
        aligned(len(network.features), whole_lines(table)),
        aligned(1, table)[0],
        np.empty((len(network.features), categories), np.int64),
        np.empty((len(network.features), categories), np.int64),
        np.empty(len(network.features), np.int64),
        aligned(1, outputs * examples)[0],
        aligned(2, whole_lines(widest * examples)),
        aligned(1, network.product[1])[0],
        aligned(1, network.product[1])[0],
        aligned(1, room)[0],
    )
