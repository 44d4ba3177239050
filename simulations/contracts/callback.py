# SPDX-License-Identifier: Apache-2.0
"""The contract of a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedrec.components.registry import CALLBACK
from fedrec.runs.result import Result
from server.callbacks.base import Callback
from simulations.contracts.base import Contract, assert_that, same_bits


class CallbackContract(Contract):
    """Subclass it and set `component` to a `Callback`."""

    kind = CALLBACK
    random = False

    def placed(self) -> dict[str, Any]:
        """The sections that put the component into an experiment."""
        return {"callbacks": [self.section()]}

    def test_the_results_of_the_run_are_unchanged(self, tmp_path: Path) -> None:
        """It may end a run early, and changes nothing else."""
        watched = self._run(tmp_path / "watched", rounds=3)
        unwatched = self._run(tmp_path / "unwatched", rounds=len(watched.rounds), callbacks=None)
        same = same_bits(watched.parameters, unwatched.parameters)
        assert_that(same, "the run ends with other parameters")
        assert_that(watched.metrics == unwatched.metrics, "the run ends with other metrics")

    def test_after_a_round_it_returns_whether_to_stop(self) -> None:
        """`after_round` gives a truth value, and changes no row but its own copy."""
        callback: Callback = self.cls(self.config())
        row = {"round": 1, "loss": 0.5, "hits@5": 0.25}
        found = callback.after_round(dict(row), 0.1)
        right = isinstance(found, bool | np.bool_)
        assert_that(right, f"after_round gives {found!r}, neither True nor False")

    def test_a_resumed_run_can_be_watched(self, tmp_path: Path) -> None:
        """It begins in the middle, with a fresh object."""
        from simulations import runner

        self._run(tmp_path / "run", rounds=2)
        result = runner.resume(tmp_path / "run")
        assert_that(len(result.rounds) > 0, "no rounds")

    def _run(self, folder: Path, *, rounds: int, **changes: Any) -> Result:
        from simulations import runner

        small = self.small(f"rounds={rounds}")
        return runner.run(small.model_copy(update=changes), output=folder)
