# SPDX-License-Identifier: Apache-2.0
"""The interface of callbacks, and the callbacks of a run.

The callbacks of a run: those that its experiment names, and those that its caller brings.

A callback may observe and end the run, but not change its results: it gets read-only parameters,
and an error in it names the callback. A tracker that fails does not end the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fedrec.components.errors import component_errors
from fedrec.components.registry import CALLBACK
from fedrec.config import Config
from fedrec.errors import FedrecError
from fedrec.experiment.schema import Experiment
from fedrec.experiment.sections import component_of
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result

# The interface of callbacks, which are called on events of a run and may end it.


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


log = logging.getLogger("fedrec")
_LONGEST = 300  # characters of a reason


def callbacks_of(experiment: Experiment) -> list[Callback]:
    """The callbacks that an experiment names, made from their settings.

    Raises:
        ComponentError: one cannot be made.
    """
    return [component_of(CALLBACK, section) for section in experiment.callbacks or ()]


class CallbackList(Callback):
    """All callbacks of a run as one; they are called in order.

    Args:
        callbacks: the callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        self._failed: list[Callback] = []  # trackers that are not called any more
        self.ended_by: list[str] = []  # classes of those that end the run after the last round

    @classmethod
    def of(cls, callbacks: Sequence[Callback] | CallbackList) -> CallbackList:
        """Callbacks as one, which they may be already."""
        return callbacks if isinstance(callbacks, CallbackList) else cls(callbacks)

    @property
    def compares(self) -> bool:
        """Whether a callback needs the parameters before and after a round."""
        return any(
            type(callback).on_update is not Callback.on_update for callback in self.callbacks
        )

    @property
    def watches(self) -> bool:
        """Whether a callback needs the noisy mean updates of private rounds."""
        return any(
            type(callback).on_release is not Callback.on_release for callback in self.callbacks
        )

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """The run begins with round `first_round` (more than 1 when resumed) of `rounds`."""
        self._tell("on_start", run, first_round, rounds)

    def on_message(self, text: str) -> None:
        """Something other than a training round begins, such as the fitting of baselines."""
        self._tell("on_message", text)

    def on_baseline(self, label: str, number: int, total: int) -> None:
        """Centralised system `number` of `total` (from 1) is fitted next and then evaluated
        (`on_evaluation`)."""
        self._tell("on_baseline", label, number, total)

    def on_update(
        self, round_number: int, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
    ) -> None:
        """Parameters before and after a round; read-only. Not called on the flower engine."""
        if self.compares:
            self._tell("on_update", round_number, _read_only(before), _read_only(after))

    def on_release(self, round_number: int, mean: Mapping[str, np.ndarray]) -> None:
        """The noisy mean update of a private round, before the strategy's rule; read-only."""
        self._tell("on_release", round_number, _read_only(mean))

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """A round is complete and saved; `row` is its line in rounds.csv. Return True to end the
        run here. Each callback gets its own copy of the row."""
        self.ended_by = [
            type(callback).__name__
            for callback in self.callbacks
            if self._one(callback, "after_round", dict(row), seconds)
        ]
        return bool(self.ended_by)

    def on_evaluation(self, done: int, total: int) -> None:
        """`done` of `total` users of a baseline or of the final evaluation are evaluated."""
        self._tell("on_evaluation", done, total)

    def on_end(self, result: Result) -> None:
        """The run is finished."""
        self._tell("on_end", result)

    def _tell(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            self._one(callback, hook, *arguments)

    def _one(self, callback: Callback, hook: str, *arguments: Any) -> Any:
        if any(callback is failed for failed in self._failed):
            return None
        try:
            with component_errors(CALLBACK.name, callback, f"in {hook}"):
                return getattr(callback, hook)(*arguments)
        except FedrecError as error:
            if not callback.tracker:
                raise
            self._failed.append(callback)
            reason = " ".join(str(error.got or error.problem).split())[:_LONGEST]
            name = type(callback).__name__
            log.warning("%s failed, and the run goes on without it: %s", name, reason)
            return None


def _read_only(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    views = {name: value.view() for name, value in arrays.items()}
    for view in views.values():
        view.setflags(write=False)
    return views
