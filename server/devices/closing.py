# SPDX-License-Identifier: Apache-2.0
"""Synchronous rounds on simulated devices: a round closes when enough clients have answered, or at
its deadline (Bonawitz et al. 2019, section 2.2: over-selection, and a round without stragglers).

Late answers are dropped. Their clients have downloaded the parameters, which `late-bytes` counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fedrec.experiment.tables import ClosingConfig
from server.cohorts.selection import SampledCohorts
from server.devices.timeline import SECONDS, Timeline


@dataclass(frozen=True, eq=False)
class Closed:
    """A round's answers.

    Attributes:
        taken: `int64 [n]`, places of the clients whose answers are taken, the first answer first.
        at: when the round closes, in simulated seconds.
    """

    taken: np.ndarray
    at: float


def closed(
    clients: np.ndarray, ends: np.ndarray, lost: np.ndarray, start: float, config: ClosingConfig
) -> Closed:
    """The answers that a round takes, and when it closes.

    Args:
        clients: `int64 [clients]`, which decide between answers of the same time.
        ends: `float64 [clients]`, when each has answered, or is lost.
        lost: `bool [clients]`, which do not answer.
        start: when the round started.
        config: when it closes.
    """
    if not len(clients):
        return Closed(np.empty(0, dtype=np.int64), start)
    order = np.lexsort((clients, ends))
    deadline = math.inf if config.deadline is None else start + config.deadline
    answers = order[~lost[order]]
    needed = config.needed(len(clients))
    taken = answers[ends[answers] <= deadline][:needed]
    if len(taken) == needed:
        return Closed(taken, float(ends[taken[-1]]))
    return Closed(taken, min(deadline, float(ends.max())))


class SynchronousTimeline(Timeline):
    """Rounds whose clients start at one time and from the same parameters."""

    def _plan(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        config = self.experiment.closing or ClosingConfig()
        start = self.clock
        present = None
        if self.devices.config.sometimes_away:
            cohort = cohorts.section.options.get("cohort", 1)
            number = math.ceil(config.asked(cohort))
            start = self._when_present(cohorts.clients, number, start)
            present = self._present(cohorts.clients, start)
        asked = cohorts.drawn(round_number, present)
        self._asked = len(asked)
        self._closed = closed(asked, *self._ends(asked, start), start, config)
        return np.sort(asked[self._closed.taken])

    def _complete(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        late = self._asked - len(self._closed.taken)
        self.clock = self._closed.at
        self._counts.update({"asked": self._asked, "late": late})
        return {SECONDS: self.clock, "late-clients": late, "late-bytes": late * self._bytes}

    def _in_words(self) -> str:
        asked = self._counts["asked"]
        late = self._counts["late"]
        if not late:
            return f"All {asked} answers came in time."
        share = late / asked
        return f"{late} of {asked} answers ({share:.1%}) were late or did not come, and not taken."
