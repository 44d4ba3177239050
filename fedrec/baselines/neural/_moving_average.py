# SPDX-License-Identifier: Apache-2.0
"""The moving average of parameters while they are trained, which ranks better than the last ones:
these still move with every batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class MovingAverage:
    """Exponential moving average of tensors over steps (Polyak and Juditsky 1992 for the plain
    mean); the decay rises to its value over the first steps, so that the start does not count.

    Args:
        tensors: at the start.
        decay: in [0, 1); 0 keeps nothing.

    Attributes:
        values: the averages, in the order of the tensors; empty with a decay of 0.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        self.values = [value.detach().clone() for value in tensors] if decay else []
        self._decay, self._steps = decay, 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Take in the tensors after one more step."""
        self._steps += 1
        weight = 1 - min(self._decay, (1 + self._steps) / (10 + self._steps))
        for mean, value in zip(self.values, tensors, strict=False):  # none with a decay of 0
            mean.lerp_(value.detach(), weight)
