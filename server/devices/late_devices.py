# SPDX-License-Identifier: Apache-2.0
"""The simulated time of devices, which decides beside the sampler who takes part in rounds."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from typing import Any

import numpy as np

from fedrec.runtime.text_files import parse_json
from server.cohorts.selection import SampledCohorts
from server.extension import RunExtension


class LateDevices(RunExtension):
    """Chooses the clients of each round among those that the sampler draws, and counts."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._columns: dict[str, Any] = {}

    @abstractmethod
    def cohort(self, round_number: int, cohorts: SampledCohorts) -> np.ndarray:
        """The clients whose answers a round takes, `int64 [clients]`, ascending; the same at
        each call until the round is complete."""

    def columns(self) -> dict[str, Any]:
        """Numbers of clients whose answers came late, and the like."""
        return self._columns

    def memory(self) -> dict[str, np.ndarray]:
        """The totals."""
        return {"counts": np.frombuffer(json.dumps(self._counts).encode(), dtype=np.uint8)}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        self._counts = Counter(parse_json(memory["counts"].tobytes()))
