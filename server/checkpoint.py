# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: its extensions, the state of its strategy, and the files.

Checkpoints: all state between two rounds in one file, written whole, checked when read.

A checkpoint is a numpy archive without pickled objects: the global parameters, the strategy's
arrays, and one JSON text. The archive's checksums detect a damaged file; then the previous
checkpoint is used, with a warning.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedrec.components.registry import STRATEGY, resolve
from fedrec.components.sections import component_errors
from fedrec.errors import RunError
from fedrec.experiment.schema import Experiment
from fedrec.protocol.serialization import from_record, to_record
from fedrec.runs.folder import RunFolder
from fedrec.runtime.files import MOST_JSON, open_atomically, parse_json
from fedrec.runtime.ragged import add_prefix, strip_prefix
from strategies.base import Cohorts, CohortStrategy

# The interface of extensions, which the loop calls at fixed points of each round. The privacy
# guard, the budgets of users who add their own noise, and early stopping are extensions.


class RunExtension:
    """Extension that the loop calls at fixed points of each round; does nothing by default."""

    name = ""
    """Name of its table in the result and of its arrays in a checkpoint."""

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore the state that `memory()` returned for a checkpoint."""

    def announce(self, theta: Mapping[str, np.ndarray]) -> list[str]:
        """Return lines to print before the first round; `theta` are the initial parameters."""
        return []

    def why_stop(self, round_number: int) -> str:
        """Return the reason why a round must not start; empty if it may."""
        return ""

    def after_round(self, round_number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Called with the parameters after a round, which the next round may change in place;
        returns values for the round's row, numbers or texts."""
        return {}

    def memory(self) -> dict[str, np.ndarray]:
        """Return the extension's state for the checkpoint after a round."""
        return {}

    def report(self, rounds: int) -> dict[str, Any]:
        """Return the report after the last round, as JSON values; its sentences as `in words`."""
        return {}


log = logging.getLogger("fedrec")


@contextmanager
def reading(file: Path, expected: str, fix: str) -> Iterator[None]:
    """Raise an error that names the file if its content cannot be read.

    Args:
        file: a file of a run folder.
        expected: its content.
        fix: what to do about a damaged file.

    Raises:
        RunError: instead of any error, as a damaged file fails in many ways.
    """
    try:
        yield
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise RunError(f"{file} is damaged", expected=expected, got=got, fix=fix) from None


@dataclass(frozen=True, eq=False)
class State:
    """State of a run between two rounds.

    Attributes:
        round: the last complete round; 0 before the first.
        parameters: the global parameters.
        strategy: arrays and numbers of the strategy's state; empty after a round without a
            checkpoint.
        rounds: one row of metrics per round so far.
        timings: one row of seconds per round so far; empty if cohorts are secret.
    """

    round: int
    parameters: dict[str, np.ndarray]
    strategy: dict[str, np.ndarray] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """Checkpoints of one run.

    Args:
        folder: folder of the checkpoints.
        digest: digest of the experiment; checkpoints of another one raise an error.
        keep: number of checkpoints to keep.
        earlier: digests of the same experiment before it was amended.
    """

    def __init__(
        self, folder: Path, digest: str, *, keep: int, earlier: Iterable[str] = ()
    ) -> None:
        self.folder = folder
        self.digest = digest
        self.keep = keep
        self._known = (digest, *earlier)

    @classmethod
    def of(cls, run: RunFolder) -> Checkpoints:
        """Open the checkpoints of a run folder, also from before its experiment was amended."""
        digest = run.experiment.digest()
        keep = run.experiment.checkpoint.keep
        return cls(run.checkpoints, digest, keep=keep, earlier=run.digests)

    def save(self, state: State) -> None:
        """Write the state of a round and drop the oldest checkpoints beyond `keep`.

        Raises:
            RunError: it cannot be written; the earlier ones are intact.
        """
        arrays = add_prefix({"parameters/": state.parameters, "strategy/": state.strategy})
        about = {
            "round": state.round,
            "rounds": state.rounds,
            "timings": state.timings,
            "digest": self.digest,
            "arrays": list(arrays),
        }
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        with open_atomically(self._file(state.round)) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        for old in self._files()[: -self.keep]:
            old.unlink()

    def latest(self) -> State | None:
        """Load the newest readable state; None without checkpoints.

        Raises:
            RunError: there are checkpoints, and none can be read; or it belongs to another
                experiment.
        """
        files = self._files()
        for file in reversed(files):
            try:
                about, arrays = _content(file)
            except Exception as error:  # as a damaged file fails in many ways
                text = "checkpoint %s is damaged (%s: %s); using the previous one"
                log.warning(text, file.name, type(error).__name__, error)
                continue
            return self._state(about, arrays)
        if files:
            raise RunError(
                f"no checkpoint in {self.folder} can be read",
                got=f"{len(files)} damaged files",
                fix="start a new run with `fedrec run`",
            )
        return None

    def _state(self, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> State:
        """The state of a file with this content."""
        if about["digest"] not in self._known:
            raise RunError(
                "the checkpoint belongs to another experiment",
                fix="start a new run with `fedrec run`",
            )
        return State(
            about["round"],
            strip_prefix("parameters/", arrays),
            strip_prefix("strategy/", arrays),
            about["rounds"],
            about["timings"],
        )

    def _file(self, round_number: int) -> Path:
        return self.folder / f"round-{round_number:06d}.npz"

    def _files(self) -> list[Path]:
        return sorted(
            file
            for file in self.folder.glob("round-*.npz")
            if re.fullmatch(r"round-\d+\.npz", file.name)
        )


def _content(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a file's description of the state, and its arrays.

    Raises:
        ValueError: the description is invalid, or does not list the arrays.
    """
    with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    about = parse_json(arrays.pop("about").tobytes(), MOST_JSON)
    if not isinstance(about["digest"], str) or type(about["round"]) is not int:
        raise ValueError("missing digest of the experiment, or round number")
    rows = [*about["rounds"], *about["timings"]]
    if about["round"] < 0 or not all(isinstance(row, dict) for row in rows):
        raise ValueError("missing rows of rounds or timings")
    if sorted(about["arrays"]) != sorted(arrays):
        raise ValueError("missing or additional arrays")
    return about, arrays


# Creates strategies, and saves their state between rounds.
#
# fedrec's own strategies return their state (`state`, `restore`). Flower's keep it in plain
# attributes (the moments of `FedAdam`, the momentum of `FedAvgM`), so for them every attribute that
# holds arrays is saved.


def make_strategy(experiment: Experiment, cohorts: Cohorts) -> Strategy:
    """Make the strategy of an experiment, fedrec's or any of Flower's."""
    cls = resolve(STRATEGY, experiment.strategy.name)
    settings = experiment.settings(STRATEGY)
    with component_errors(STRATEGY.name, cls, "when it was made"):
        if issubclass(cls, CohortStrategy):
            return cls(settings, cohorts, {"name": experiment.step.name, **experiment.step.options})
        return cls(**(settings if isinstance(settings, dict) else {"config": settings}))


def _strategy_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """Return the state of a strategy, as named arrays, which later rounds may change in place."""
    if isinstance(strategy, CohortStrategy):
        return strategy.state()
    state: dict[str, np.ndarray] = {}
    for name, value in vars(strategy).items():
        parts: dict[Any, Any] = {"": value}
        if isinstance(value, ArrayRecord):
            parts = dict(from_record(value))
        elif isinstance(value, dict | list):
            parts = value if isinstance(value, dict) else dict(enumerate(value))
        kinds = (cls.__name__ for cls in _SAVED if isinstance(value, cls))
        kind = "" if isinstance(value, bool) else next(kinds, "")
        of_arrays = parts and all(isinstance(part, np.ndarray) for part in parts.values())
        if kind in ("int", "float") or (kind and of_arrays):
            state |= {f"{name}/{kind}/{key}": np.asarray(part) for key, part in parts.items()}
    return state


def _restore_strategy(strategy: Strategy, state: Mapping[str, np.ndarray]) -> None:
    """Restore the state that `_strategy_state` returned."""
    if isinstance(strategy, CohortStrategy):
        strategy.restore(dict(state))
        return
    attributes: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for key, array in state.items():
        name, kind, part = key.split("/", 2)
        attributes.setdefault((name, kind), {})[part] = array
    for (name, kind), parts in attributes.items():
        setattr(strategy, name, next(m for c, m in _SAVED.items() if c.__name__ == kind)(parts))


_SAVED: dict[type, Callable[[dict[str, np.ndarray]], Any]] = {
    ArrayRecord: to_record,
    dict: dict,
    list: lambda parts: [parts[str(index)] for index in range(len(parts))],
    np.ndarray: lambda parts: parts[""],
    int: lambda parts: int(parts[""]),
    float: lambda parts: float(parts[""]),
}
"""Types of attributes of Flower's strategies that are saved, and how each is made from its named
arrays."""


def memory_of(strategy: Strategy, extensions: Iterable[RunExtension]) -> dict[str, np.ndarray]:
    """Return the state of a strategy and of the extensions of a run, as named arrays."""
    memory = _strategy_state(strategy)
    for extension in extensions:
        named = extension.memory().items()
        memory |= {f"{extension.name}:{name}": array for name, array in named}
    return memory


def restore(
    memory: Mapping[str, np.ndarray], strategy: Strategy, extensions: Iterable[RunExtension]
) -> None:
    """Restore what `memory_of` returned."""
    of_extensions: dict[str, dict[str, np.ndarray]] = {e.name: {} for e in extensions}
    of_strategy = {}
    for key, array in memory.items():
        name, mark, rest = key.partition(":")
        if mark and name in of_extensions:
            of_extensions[name][rest] = array
        else:
            of_strategy[key] = array
    _restore_strategy(strategy, of_strategy)
    for extension in extensions:
        extension.restore(of_extensions[extension.name])
