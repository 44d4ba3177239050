# SPDX-License-Identifier: Apache-2.0
"""The interface of accountants' backends, which compute an upper bound on epsilon from counted
releases and a delta."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedrec.privacy.accounting.events import Release

BackendName = Literal["autodp", "pld"]
"""Backends that give valid upper bounds, the second tighter."""
DEFAULT_BACKEND: BackendName = "pld"
"""Default backend of experiments, baselines, the command line and Python callers."""


@dataclass(frozen=True)
class Bound:
    """An epsilon and where it comes from.

    Attributes:
        epsilon: upper bound, >= 0; infinite when there is none.
        order: Rényi order at which it was found; None for other methods.
    """

    epsilon: float
    order: float | None = None


class Backend(ABC):
    """Computes epsilon for counted releases under one adjacency. A subclass lives in
    `fedrec/privacy/accounting/backends/`."""

    method: ClassVar[str]
    """Description of the method for reports."""

    @abstractmethod
    def epsilon(self, releases: Mapping[Release, int], delta: float) -> Bound:
        """Smallest epsilon that the method proves for all releases together.

        Args:
            releases: how often each took place; all of one adjacency.
            delta: in [0, 1).

        Raises:
            ExperimentError: the method has no bound for one of the releases.
        """

    def epsilons(
        self,
        before: Mapping[Release, int],
        each: Mapping[Release, int],
        rounds: np.ndarray,
        delta: float,
    ) -> np.ndarray:
        """Epsilon after each number of further rounds with the releases `each`, `float64
        [len(rounds)]`, on top of the releases before."""
        found = [self.epsilon(_more(before, each, int(count)), delta).epsilon for count in rounds]
        return np.array(found, dtype=np.float64)


def _more(
    before: Mapping[Release, int], each: Mapping[Release, int], rounds: int
) -> dict[Release, int]:
    total = dict(before)
    for release, count in each.items():
        total[release] = total.get(release, 0) + count * rounds
    return total
