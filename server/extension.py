# SPDX-License-Identifier: Apache-2.0
"""The interface of extensions, which the loop calls at fixed points of each round. The privacy
guard, the budgets of users who add their own noise, and early stopping are extensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord


class RunExtension:
    """Called by the loop at fixed points of each round; every method does nothing by default."""

    name = ""
    """Name of its table in the result and of its arrays in a checkpoint."""
    costly = False
    """Whether a lost round costs more than time; then each round is written to disk before the next
    one starts."""

    def begin(self, rounds: int) -> None:
        """A run starts at round 1.

        Args:
            rounds: number of rounds that were done before, by the run folder; 0 for a new one.
        """

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """A run is resumed from a checkpoint; `memory` is what `memory()` returned then."""

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Lines that are printed before the first round; `theta` are the initial parameters."""
        return []

    def why_stop(self, round_number: int) -> str:
        """The reason why a round may not start; empty if it may."""
        return ""

    def before_upload(self, round_number: int) -> None:
        """Called after the strategy has made its messages and before they are sent."""

    def after_training(self, round_number: int, arrays: ArrayRecord) -> None:
        """Called with the parameters after a round, which the next round may change in place."""

    def columns(self) -> dict[str, Any]:
        """Values for the row of a completed round: numbers or texts."""
        return {}

    def memory(self) -> dict[str, np.ndarray]:
        """The extension's state for the checkpoint after a round."""
        return {}

    def report(self, rounds: int) -> tuple[list[str], dict[str, Any]]:
        """The report after the last round, as sentences and as JSON values."""
        return [], {}
