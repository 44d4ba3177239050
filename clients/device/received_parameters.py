# SPDX-License-Identifier: Apache-2.0
"""Refusal of parameters that would make a node's answer depend on its data before noise is added.

With NaN in some rows of a table, or with rows missing, the work of a client that uses these rows
fails and that of others does not, so that a server learns from a failure which items a client has.
A node therefore checks all parameters before it reads a client's data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedrec.errors import RefusalError


def refuse_unsound(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], largest: float
) -> None:
    """Refuse received parameters that are not those of the experiment, or not finite and bounded.

    Args:
        arrays: the received parameters.
        shapes: shape of each parameter of the experiment.
        largest: largest absolute value of a number.

    Raises:
        RefusalError: a parameter is missing or unknown, or has another shape, other numbers than
            `float32`, or a number that is NaN, infinite or too large.
    """
    odd = sorted(set(arrays) ^ set(shapes))
    if odd:
        raise _other("the experiment's parameters", f"others: {', '.join(map(repr, odd[:3]))}")
    for name, value in arrays.items():
        if value.shape != shapes[name] or value.dtype != np.float32:
            raise _other(
                f"float32 {list(shapes[name])} for {name!r}", f"{value.dtype} {list(value.shape)}"
            )
        # not `> largest`, which is false for NaN
        if value.size and not max(-float(value.min()), float(value.max())) <= largest:
            raise _other(
                f"finite numbers of at most {largest:g} (largest-parameter)", f"others in {name!r}"
            )


def _other(expected: str, got: str) -> RefusalError:
    return RefusalError(
        "this node refuses the parameters of an order",
        expected=expected,
        got=got,
        fix="continue from an earlier checkpoint with a lower learning rate, if training diverged",
    )
