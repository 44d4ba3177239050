# SPDX-License-Identifier: Apache-2.0
"""Native code of centralised systems: compiled when it is first called, on rows in threads."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from fedrec.baselines.base import Sparse


def native(**flags: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that Numba compiles at its first call: importing Numba is slow, and not
    needed to read settings.

    Args:
        flags: of `numba.njit`.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def code() -> Any:
            from fedrec.runtime.compilation import compiled

            return compiled(function, flags)

        return functools.wraps(function)(lambda *given: code()(*given))

    return decorated


def pointers(table: Sparse) -> tuple[np.ndarray, np.ndarray]:
    """Where each row begins, `int64 [rows + 1]`, and its columns, `int64 [entries]`: native code is
    compiled for each type."""
    return table.indptr.astype(np.int64, copy=False), table.indices.astype(np.int64, copy=False)


def over_rows(
    function: Callable[..., Any], given: tuple[Any, ...], bounds: np.ndarray, found: np.ndarray
) -> np.ndarray:
    """Rows `found`, which native code writes in a thread for each part of them.

    Args:
        function: takes `given`, the first row, the row after the last, and `found`.
        given: its first arguments.
        bounds: ascending, `int64 [threads + 1]`, rows between the parts.
        found: `[rows, ...]`.
    """
    function(*given, 0, 0, found)  # compiled by one thread
    with ThreadPoolExecutor(len(bounds) - 1) as pool:
        list(pool.map(lambda part: function(*given, *part, found), pairwise(bounds.tolist())))
    return found
