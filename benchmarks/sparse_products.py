# SPDX-License-Identifier: Apache-2.0
"""Matrix products that leave out zeros of ReLU, beside whole ones, on one core.

    python -m benchmarks.sparse_products            # 32 x 256 numbers by 256 x 128
    python -m benchmarks.sparse_products 32 128 64

Speeds are those of whole products: their operations by the processor time. The zeros are others in
each of 200 batches, so that the processor cannot learn where they are. Arguments: rows of a batch,
and a weight's inputs and outputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from benchmarks.kernel_limit import least_seconds
from fedrec.kernel import products
from fedrec.kernel.rows import aligned
from fedrec.kernel.sparse import add_sparse_outputs, descend_sparse, room_of_sparse, sparse_enough
from fedrec.runtime.compilation import FAST

BATCHES = 200
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Of zeros."""
RATE = np.float32(1e-9)
"""Of the steps: so small that the weights keep their size in all batches."""


@njit(**FAST)
def _forward(inputs, gradient, weights, outputs, to_inputs, room):
    products.add_outputs(inputs, weights, outputs, room)


@njit(**FAST)
def _sparse_forward(inputs, gradient, weights, outputs, to_inputs, room):
    add_sparse_outputs(inputs, weights, outputs)


@njit(**FAST)
def _backward(inputs, gradient, weights, outputs, to_inputs, room):
    products.input_gradients(gradient, weights, to_inputs, room)
    products.descend_weights(RATE, inputs, gradient, weights, room)


@njit(**FAST)
def _sparse_backward(inputs, gradient, weights, outputs, to_inputs, room):
    descend_sparse(RATE, inputs, gradient, weights, to_inputs, room)


PRODUCTS = {"forward": 1, "both backward": 2}
"""Number of products."""
WHOLE = dict(zip(PRODUCTS, (_forward, _backward), strict=True))
SPARSE = dict(zip(PRODUCTS, (_sparse_forward, _sparse_backward), strict=True))


@cache
def _over_batches(product: Callable[..., None]) -> Callable[..., None]:
    @njit(**FAST)
    def run(times, inputs, gradients, *others):
        for _ in range(times):
            for n in range(len(inputs)):
                product(inputs[n], gradients[n], *others)

    return run


def numbers(share: float, rows: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    """What the products are given, with a share of zeros in the inputs of all batches."""
    random = np.random.default_rng(0)
    values = aligned(BATCHES, rows * inputs)
    values[:] = np.abs(random.standard_normal(values.shape))
    values[random.random(values.shape) < share] = 0
    gradients = aligned(BATCHES, rows * outputs)
    gradients[:] = random.standard_normal(gradients.shape)
    weights = aligned(inputs, outputs)
    weights[:] = random.standard_normal(weights.shape)
    batches = values.reshape(BATCHES, rows, inputs), gradients.reshape(BATCHES, rows, outputs)
    results = aligned(rows, outputs), aligned(rows, inputs)
    return *batches, weights, *results, _room(rows, inputs, outputs)


def _room(rows: int, inputs: int, outputs: int) -> np.ndarray:
    """Working memory."""
    return aligned(1, room_of_sparse(rows, inputs, outputs))[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the products with each share of zeros, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, default in (("rows", 32), ("inputs", 256), ("outputs", 128)):
        parser.add_argument(name, nargs="?", type=int, default=default)
    options = parser.parse_args(arguments)
    sizes = options.rows, options.inputs, options.outputs
    if min(sizes) < 1 or not _without_zeros(*sizes):
        parser.error(
            f"expected rows, and inputs and outputs that are multiples of 64, got {sizes}; others"
            " are multiplied whole"
        )
    print("GFLOP/s".ljust(16), *(f"{kind:>15}" for kind in PRODUCTS))
    _print_row("whole", WHOLE, numbers(SHARES[0], *sizes), sizes)
    for share in SHARES:
        _print_row(f"{share} of zeros", SPARSE, numbers(share, *sizes), sizes)


def _without_zeros(rows: int, inputs: int, outputs: int) -> bool:
    """Whether training leaves out zeros in products of these sizes."""
    zeros = np.zeros((rows, inputs), dtype=np.float32)
    return bool(sparse_enough(zeros, outputs, _room(rows, inputs, outputs)))


def _print_row(
    label: str,
    table: Mapping[str, Callable[..., None]],
    given: tuple[Any, ...],
    sizes: tuple[int, int, int],
) -> None:
    seconds = [least_seconds(_over_batches(product), *given) for product in table.values()]
    rows, inputs, outputs = sizes
    work = [BATCHES * count * 2 * rows * inputs * outputs for count in PRODUCTS.values()]
    speeds = [count / taken / 1e9 for count, taken in zip(work, seconds, strict=True)]
    print(label.ljust(16), *(f"{speed:>15.0f}" for speed in speeds))


if __name__ == "__main__":
    main()
