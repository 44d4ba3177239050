# SPDX-License-Identifier: Apache-2.0
"""Compression beside secure aggregation: masks are integers, so what clients send has to be whole
multiples of one step."""

from __future__ import annotations

from fedrec.components import registry
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section, component_of


def common_grid(compression: Section) -> tuple[float, int]:
    """The step of a compression, and the largest multiple of it that a client sends.

    Raises:
        ExperimentError: its clients do not round to one grid.
    """
    grid = component_of(registry.COMPRESSION, compression).grid
    if grid is None:
        raise ExperimentError(
            f"compression {compression.name!r} does not work with secure-aggregation: masks hide"
            " the sum of integers over whole tables, so rows, scales and coordinates that differ"
            " between clients cannot be added up behind them",
            expected="compression.name = 'rounding' with compression.largest, which rounds all"
            " clients' numbers to the same multiples of one step",
            got=f"compression {compression.name!r} without a common grid",
            fix="set compression.name = 'rounding' and compression.largest = 0.1 or another bound"
            " on a number of an update, or leave out one of the two tables",
        )
    return grid
