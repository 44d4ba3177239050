# SPDX-License-Identifier: Apache-2.0
"""The contract of a compression: what a client sends of its update, and what is made of it.

Compression comes after the clip and before the sum. An update whose decoded form has a larger norm
than the clip is scaled down before it is encoded (`Codec`), so that one client moves the sum by no
more than without compression, and the privacy of a run is the same: decoding is a function of one
client's data and of chance. Noise of the server comes later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from fedrec.config import Config
from fedrec.protocol.sparse_update import Change, SparseUpdate

Payload = Mapping[str, np.ndarray]
"""The arrays that are sent of one parameter; their bytes are what is counted."""


class Grid(NamedTuple):
    """Numbers to which all clients round alike: whole multiples of a step."""

    step: float
    """Distance of neighbouring numbers."""
    most: int
    """Largest multiple, on either side of zero."""


class Compression(ABC):
    """What is sent of a client's update.

    A built-in has a `name` and lives in `fedrec/compression/members/`, its configuration class
    above it.

    Args:
        config: its settings.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def keeps_error(self) -> bool:
        """Whether a client adds what was left out to its next update (error feedback), which it
        keeps with its private state; default: no."""
        return False

    @property
    def grid(self) -> Grid | None:
        """The grid that every decoded number is on, which depends on nothing but the settings, so
        that sums of updates are sums of small integers; default: there is none."""
        return None

    @abstractmethod
    def encode(
        self, change: Change, random: np.random.Generator, common: np.random.Generator
    ) -> Payload:
        """What is sent of a client's change of one parameter.

        Args:
            change: an array `[...]`, or of a table `[items, d]` the rows that changed; it is not
                changed in place.
            random: of this client and round.
            common: of this parameter and round, the same for all clients and for `decode`.
        """

    @abstractmethod
    def decode(
        self, payload: Payload, shape: tuple[int, ...], common: np.random.Generator
    ) -> Change:
        """The change that the server makes of it, of the parameter's shape.

        Args:
            payload: what `encode` returned.
            shape: of the parameter.
            common: as in `encode`, from its beginning.
        """


def rows_and_values(change: Change) -> tuple[np.ndarray | None, np.ndarray]:
    """Rows `int64 [R]`, None for all of them, and values `float64 [R, ...]` of a change."""
    if isinstance(change, SparseUpdate):
        if change.drift:
            raise ValueError("a client's update of a table names the rows that changed")
        return change.rows, change.values.astype(np.float64)
    return None, np.asarray(change, dtype=np.float64)


def placed(rows: np.ndarray | None, values: np.ndarray, shape: tuple[int, ...]) -> Change:
    """Rows `int64 [R]`, or None for all, and values `[R, ...]` as a change of a parameter of that
    shape."""
    if rows is None:
        return values.reshape(shape)
    return SparseUpdate(shape, rows.astype(np.int64), values.reshape(len(rows), *shape[1:]))


def with_rows(rows: np.ndarray | None, sent: Payload, shape: tuple[int, ...]) -> Payload:
    """What is sent of the values of rows `int64 [R]` of a parameter of that shape, with the numbers
    of the rows unless these are all."""
    return sent if rows is None else {"rows": row_numbers(rows, shape[0]), **sent}


def values_shape(payload: Payload, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the values of which `with_rows` told, `(R, ...)`."""
    return (len(payload["rows"]), *shape[1:]) if "rows" in payload else shape


def row_numbers(rows: np.ndarray, length: int) -> np.ndarray:
    """Row numbers `[R]` in the smallest unsigned type for a table of that length."""
    return rows.astype(np.min_scalar_type(max(0, length - 1)))
