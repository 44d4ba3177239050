# SPDX-License-Identifier: Apache-2.0
"""The contract of an accountant's backend: from counted releases and a delta to an upper bound on
epsilon."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedrec.privacy.accounting.events import Release

BackendName = Literal["autodp", "tight-rdp", "pld"]
"""Backends that give valid upper bounds, the later ones tighter."""
DEFAULT_BACKEND: BackendName = "pld"
"""What experiments, baselines, the command line and Python callers get unless they choose."""


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
    """What it does, in words for a report."""

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
        self, before: Mapping[Release, int], release: Release, rounds: np.ndarray, delta: float
    ) -> np.ndarray:
        """Epsilon after each number of further releases, `float64 [len(rounds)]`, on top of those
        before."""
        found = [
            self.epsilon(_more(before, release, int(count)), delta).epsilon for count in rounds
        ]
        return np.array(found, dtype=np.float64)


def _more(before: Mapping[Release, int], release: Release, count: int) -> dict[Release, int]:
    total = dict(before)
    total[release] = total.get(release, 0) + count
    return total
