# SPDX-License-Identifier: Apache-2.0
"""The workers of a sweep: this process, one run after the other, or Ray actors, several at a time.

Equal settings give equal numbers on both: an actor runs its experiment as this process would.
"""

from __future__ import annotations

import logging
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fedrec.errors import DataError, EngineError, FedrecError, RunError
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from simulations.sweep.folder import Job

Rounds = Callable[[Job, int, int], None]
"""Called with a run, its rounds so far, and all its rounds."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        job: the run.
        failure: its error; None when it is finished.
    """

    job: Job
    failure: str | None


class Workers(ABC):
    """Does runs.

    Attributes:
        size: number of runs at a time.
    """

    size: int = 1

    @abstractmethod
    def submit(self, job: Job, table: dict[str, Any], path: Path) -> None:
        """Begin a run, or resume it, in its folder."""

    @abstractmethod
    def next(self, report: Rounds) -> Outcome:
        """Wait for the end of a run.

        Raises:
            FedrecError: it failed for a reason that affects all runs, such as missing data.
        """


class InProcess(Workers):
    """One run after the other in this process."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Job, dict[str, Any], Path]] = []

    def submit(self, job: Job, table: dict[str, Any], path: Path) -> None:
        """Begin a run, or resume it, in its folder. The run itself is done by `next`."""
        self._waiting.append((job, table, path))

    def next(self, report: Rounds) -> Outcome:
        """Wait for the end of a run."""
        job, table, path = self._waiting.pop(0)
        return Outcome(job, perform(table, path, [_Rounds(job, report)]))


class OnRay(Workers):
    """Several runs at a time, each in an actor of its own.

    Args:
        actors: handles of the actors.
    """

    def __init__(self, actors: list[Any]) -> None:
        self.size = len(actors)
        self._free = list(actors)
        self._running: dict[Any, tuple[Job, Any, Path, int]] = {}

    def submit(self, job: Job, table: dict[str, Any], path: Path) -> None:
        """Begin a run, or resume it, in its folder."""
        actor = self._free.pop()
        self._running[actor.perform.remote(table, path)] = (
            job,
            actor,
            path,
            int(table.get("rounds", 0)),
        )

    def next(self, report: Rounds) -> Outcome:
        """Wait for the end of a run. Rounds are read from the run folders once a second."""
        import ray
        from ray.exceptions import RayError

        done: list[Any] = []
        while not done:
            done, _ = ray.wait(list(self._running), timeout=1.0)
            for job, _actor, path, rounds in self._running.values():
                if (path / "status.json").exists():
                    report(job, int(RunFolder(path).status()["round"]), rounds)
        job, actor, _, _ = self._running.pop(done[0])
        self._free.append(actor)
        try:
            return Outcome(job, ray.get(done[0]))
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, FedrecError):
                raise cause from None
            raise EngineError(
                f"run {job.name} was lost",
                expected="a Ray actor that lives until its run ends",
                got=f"{type(error).__name__}: {error}",
                fix="fewer --workers if memory was short; then run the same command again, "
                "nothing is lost",
            ) from None


def perform(table: dict[str, Any], path: Path, callbacks: list[Callback]) -> str | None:
    """Run the remaining part of a run.

    Returns:
        The error with which it ended, None if it finished.

    Raises:
        FedrecError: data, engine or disk are at fault, which affects all runs.
    """
    from simulations import runner

    try:
        if path.exists():
            runner.resume(path, callbacks=callbacks)
        else:
            runner.run(table, output=path, callbacks=callbacks)
    except (DataError, EngineError, RunError):
        raise
    except FedrecError as error:
        return error.text()
    except Exception as error:  # of a plug-in: the other runs continue, and its traceback is kept
        logging.getLogger("fedrec").warning("%s: %s", path.name, traceback.format_exc())
        return f"{type(error).__name__}: {error}"
    return None


class _Rounds(Callback):
    """Reports how many rounds of a run are done."""

    def __init__(self, job: Job, report: Rounds) -> None:
        super().__init__()
        self._job = job
        self._report = report
        self._rounds = 0

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        """The run begins with round `first_round` (more than 1 when resumed) of `rounds`."""
        self._rounds = rounds
        self._report(self._job, first_round - 1, rounds)

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        """A round is complete and saved; `row` is its line in rounds.csv. Return True to end the
        run here."""
        self._report(self._job, int(row["round"]), self._rounds)
        return False


class RunActor:
    """Does runs in a process of its own."""

    def perform(self, table: dict[str, Any], path: Path) -> str | None:
        return perform(table, path, [])


@contextmanager
def opened(size: int, address: str | None, device: str) -> Iterator[Workers]:
    """Workers for a number of runs at a time.

    Args:
        size: number of runs at a time; 1 without an address: this process.
        address: of a Ray cluster, whose machines must see the folder of the sweep; None: a local
            Ray is started.
        device: on which the runs compute; actors share the GPUs.

    Raises:
        EngineError: Ray cannot be started, or the cluster cannot be reached.
    """
    if size == 1 and address is None:
        yield InProcess()
        return
    from simulations.engines.ray_alone import alone
    from simulations.telemetry import disable_telemetry

    disable_telemetry(os.environ)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with alone() if address is None else nullcontext():
        yield from _on_ray(size, address, device)


def _on_ray(size: int, address: str | None, device: str) -> Iterator[Workers]:
    import ray

    from simulations.engines.ray import connect

    ours = not ray.is_initialized()
    connect(address, size, 0)
    try:
        gpus = ray.cluster_resources().get("GPU", 0.0) if device != "cpu" else 0.0
        remote = ray.remote(num_cpus=1, num_gpus=min(1.0, gpus / size), max_restarts=0)(RunActor)
        yield OnRay([remote.remote() for _ in range(size)])
    finally:
        if ours:
            ray.shutdown()
