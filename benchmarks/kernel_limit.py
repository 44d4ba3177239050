# SPDX-License-Identifier: Apache-2.0
"""What the compiled training of a shipped experiment could be, and what it is, on one core.

    FEDREC_DATA=DATA python -m benchmarks.kernel_limit privrec-ml1m sgd

Counts the operations of matrix products in the local steps of a round, measures how many a
second this core does at most, in tiles of a few shapes whose numbers are in the L1 cache, and
in products of the step's own shapes, and compares with the time of training. Operations outside of
products (activations, gathering rows, steps of biases) are not counted: their time is what is left.
All products are counted and timed whole, though training leaves out zeros of ReLU, and rows of
categories of items that do not occur in a batch.

Arguments: experiment, step, users (default 64), overrides.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from benchmarks.contestants.shipped import initial, node_of, orders, trained
from fedrec.kernel.compiled import FAST
from fedrec.kernel.products import WIDE, add_outputs, descend_weights, input_gradients, tile
from fedrec.kernel.rows import aligned
from fedrec.training import kernel

SHAPES = ((8, 32), (10, 32), (12, 32)) if WIDE else ((4, 16), (5, 16), (6, 16))
"""Rows and columns of the tiles that are tried."""
PRODUCTS = {"forward": add_outputs, "of inputs": input_gradients, "of weights": descend_weights}
"""Kinds of products: the forward pass, and the two gradients."""
Shape = tuple[str, int, int, int]
"""Kind, rows of the batch or table, and a weight's inputs and outputs."""


@dataclass
class Seen:
    """What compiled training was asked to do, and its processor time."""

    products: Counter[Shape] = field(default_factory=Counter)
    clients: int = 0
    numbers: int = 0
    """Parameters of all clients."""
    seconds: float = 0.0

    def watched(self, real: Callable[..., None]) -> Callable[..., None]:
        """The compiled function, watched."""

        def train(network: Any, rates: Any, examples: Any, steps: Any, *rest: Any) -> None:
            counts = examples[3]
            _, _, _, dense, (rows, *_), *_ = rest
            for client, taken in enumerate(steps):
                for rows_of_batch in counts[:taken, client].tolist():
                    self.products.update(_products(network, rows_of_batch, rows.shape[2]))
            self.clients += len(steps)
            self.numbers += dense.size + rows.size
            begun = time.process_time()
            real(network, rates, examples, steps, *rest)
            self.seconds += time.process_time() - begun

        return train


def _products(network: Any, examples: int, width: int) -> Iterator[Shape]:
    """The products of one step."""
    out = int(network.layers[0, 2])
    tables = [(int(feature[5]), int(feature[1])) for feature in network.features]
    first = [(examples, width)] if width else []
    for rows, inputs in first + tables:
        yield from ((kind, rows, inputs, out) for kind in PRODUCTS)
    for _, inputs, outputs, _ in network.layers[1:].tolist():
        yield from ((kind, examples, inputs, outputs) for kind in PRODUCTS)


def operations(shape: Shape) -> int:
    """Multiplications and additions of a product."""
    return 2 * shape[1] * shape[2] * shape[3]


def product_seconds(shape: Shape) -> float:
    """Processor time of one product whose numbers are in the caches."""
    kind, rows, inputs, outputs = shape
    values, weights, results = (
        aligned(*size) for size in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )
    for numbers in (values, weights, results):
        numbers[:] = 1
    room = np.empty(4 * (weights.size + values.size + results.size) + 4096, dtype=np.float32)
    given = {
        "forward": (values, weights, results, room),
        "of inputs": (results, weights, values, room),
        "of weights": (np.float32(1e-30), values, results, weights, room),
    }[kind]
    return least_seconds(_repeated(PRODUCTS[kind]), *given)


def peak(rows: int, columns: int) -> float:
    """Operations a second of a tile, over 256 numbers."""
    add = tile(rows, columns)

    @njit(**FAST)
    def run(times: int, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        for _ in range(times):
            add(
                np.float32(1), 256, a.ctypes.data, 256, 1, b.ctypes.data, columns, out.ctypes.data,
                columns,
            )  # fmt: skip

    shapes = ((rows, 256), (256, columns), (rows, columns))
    given = [np.zeros(shape, dtype=np.float32) for shape in shapes]
    return 2 * rows * columns * 256 / least_seconds(run, *given)


@cache
def _repeated(product: Callable[..., None]) -> Callable[..., None]:
    @njit(**FAST)
    def run(times, *given):
        for _ in range(times):
            product(*given)

    return run


def least_seconds(run: Callable[..., None], *given: Any) -> float:
    """Processor time of one of many runs, the least of four measurements of 4 ms or more."""
    run(1, *given)
    times = 1
    while (seconds := _clocked(run, times, *given)) < 0.004:
        times *= 2
    return min(seconds, *(_clocked(run, times, *given) for _ in range(3))) / times


def _clocked(run: Callable[..., None], times: int, *given: Any) -> float:
    begun = time.process_time()
    run(times, *given)
    return time.process_time() - begun


def main(name: str, step: str, users: str = "64", *overrides: str) -> None:
    """Train two rounds, measure the products of the second, and print both."""
    if not users.isdecimal() or not int(users):
        raise SystemExit(f"expected a number of users, got {users!r}; leave it out for 64")
    node = node_of(name, "kernel", *overrides)
    known = [section.name for section in node.steps]
    if step not in known:
        raise SystemExit(f"expected a step of {name}: {', '.join(known)}; got {step!r}")
    arrays = initial(node)
    warm, order = orders(node, step, int(users), 2)
    trained(node, arrays, warm)
    seen = Seen()
    kernel.train_clients = seen.watched(kernel.train_clients)
    begun = time.process_time()
    trained(node, arrays, order)
    whole = time.process_time() - begun
    most = {shape: peak(*shape) for shape in SHAPES}
    best = max(most.values())
    print("tiles:", ", ".join(f"{r} x {c} {v / 1e9:.0f} GFLOP/s" for (r, c), v in most.items()))
    work = {shape: count * operations(shape) for shape, count in seen.products.items()}
    found = {shape: product_seconds(shape) for shape in work}
    _print_largest(work, found, best)
    total = sum(work.values())
    print(
        f"a user: {total / seen.clients / 1e6:.1f} MFLOP in products,"
        f" {seen.numbers / seen.clients / 1e3:.0f} thousand parameters"
    )
    in_products = sum(found[shape] * count for shape, count in seen.products.items())
    times = {"products at the peak": total / best, "products": in_products}
    times |= {"compiled training": seen.seconds, "everything": whole}
    for part, seconds in times.items():
        print(f"{part:>22}{1e3 * seconds / seen.clients:>8.3f} ms a user")


def _print_largest(
    work: Mapping[Shape, int], seconds: Mapping[Shape, float], best: float, most: int = 12
) -> None:
    """The products with most operations: their share of all, and their speed."""
    print(f"{'product':>12}{'rows':>6}{'in':>6}{'out':>6}{'of all':>9}{'GFLOP/s':>9}{'of peak':>9}")
    total = sum(work.values())
    for shape in sorted(work, key=lambda one: -work[one])[:most]:
        kind, rows, inputs, outputs = shape
        speed = operations(shape) / seconds[shape]
        print(
            f"{kind:>12}{rows:>6}{inputs:>6}{outputs:>6}{work[shape] / total:>9.1%}"
            f"{speed / 1e9:>9.1f}{speed / best:>9.0%}"
        )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(
            f"expected an experiment and the name of its step, got {sys.argv[1:]}; for example:"
            " python -m benchmarks.kernel_limit privrec-ml1m sgd"
        )
    main(*sys.argv[1:])
