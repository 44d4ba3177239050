# SPDX-License-Identifier: Apache-2.0
"""The interface of callbacks, which are called on events of a run and may end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedrec.config import Config
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result


class Callback:
    """Observes a run. All methods do nothing by default.

    A built-in has a `name` and lives in `server/callbacks/`, its configuration class above it.
    An experiment names it in `callbacks = [{ name = "...", ... }]`; from Python, instances can be
    passed to `fedrec.run`. The state of a callback is not saved: a resumed run has a new instance.

    Args:
        config: its settings, if it has any.

    Attributes:
        tracker: whether it only reports to another program. If it fails, the run goes on without
            it; the failure of another callback ends the run.
    """

    Config: ClassVar[type[Config]] = Config
    paper: ClassVar[str] = ""
    tracker: ClassVar[bool] = False

    def __init__(self, config: Config | None = None) -> None:
        self.config = config

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """The run begins with round `first_round` (more than 1 when resumed) of `rounds`."""

    def on_message(self, text: str) -> None:
        """A line for the user: what begins next other than a round, or why the run ends early."""

    def on_baseline(self, label: str, number: int, total: int) -> None:
        """Centralised system `number` of `total` (from 1) is fitted next and then evaluated
        (`on_evaluation`)."""

    def on_update(
        self, round_number: int, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
    ) -> None:
        """Parameters before and after a round; read-only. Not called on the flower engine."""

    def on_release(self, round_number: int, mean: Mapping[str, np.ndarray]) -> None:
        """The noisy mean update of a private round, float64, before the strategy's rule; only of
        fedrec's own strategies."""

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """A round is complete and saved; `row` is its line in rounds.csv, and `seconds` how long it
        took, NaN in privacy mode `secure`. Return True to end the run here."""
        return False

    def on_evaluation(self, done: int, total: int) -> None:
        """`done` of `total` users of a baseline or of the final evaluation are evaluated."""

    def on_end(self, result: Result) -> None:
        """The run is finished."""
