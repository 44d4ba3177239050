# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of parameters during training. It ranks better than the last
parameters, which still change with every batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class MovingAverage:
    """Exponential moving average of tensors over steps (Polyak and Juditsky 1992 for the plain
    mean); the decay rises to its value over the first steps, so that the initial values have no
    weight.

    Args:
        tensors: initial values, of any shapes.
        decay: in [0, 1); 0 keeps nothing.

    Attributes:
        values: the averages, in the order of the tensors; empty with a decay of 0.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        self.values = [value.detach().clone() for value in tensors] if decay else []
        self._decay = decay
        self._steps = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Update the averages with the tensors `[...]` after a step, in the order and shapes of
        `values`."""
        self._steps += 1
        weight = 1 - min(self._decay, (1 + self._steps) / (10 + self._steps))
        for mean, value in zip(self.values, tensors, strict=False):  # none with a decay of 0
            mean.lerp_(value.detach(), weight)
