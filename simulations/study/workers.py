# SPDX-License-Identifier: Apache-2.0
"""The workers of a study: this process, one job after the other, or Ray actors, several at a time.

Equal settings give equal numbers on both: an actor runs its experiment as this process would.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

from fedrec.errors import EngineError, ExperimentError, FedrecError
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from simulations.study.job import Job

J = TypeVar("J", bound=Job)
Rounds = Callable[[Job, int, int], None]
"""Called with a job, the rounds of its run so far, and all its rounds."""


class JobOutcome(NamedTuple, Generic[J]):
    """How a job ended.

    Attributes:
        job: the job.
        failure: its error; None when it is finished.
    """

    job: J
    failure: str | None


class Workers(ABC, Generic[J]):
    """Performs jobs.

    Attributes:
        size: number of jobs at a time.
    """

    size: int = 1

    @abstractmethod
    def submit(self, job: J) -> None:
        """Begin a job."""

    @abstractmethod
    def next(self, report: Rounds) -> JobOutcome[J]:
        """Wait for the end of a job.

        Raises:
            FedrecError: it failed for a reason that affects all jobs, such as missing data.
        """


class InProcess(Workers[J]):
    """One job after the other in this process."""

    def __init__(self) -> None:
        self._waiting: list[J] = []

    def submit(self, job: J) -> None:
        """Begin a job. The work itself is done by `next`."""
        self._waiting.append(job)

    def next(self, report: Rounds) -> JobOutcome[J]:
        """Wait for the end of a job."""
        job = self._waiting.pop(0)
        return JobOutcome(job, job.attempt([_Rounds(job, report)]))


class OnRay(Workers[J]):
    """Several jobs at a time, each in an actor of its own.

    Args:
        actors: handles of the actors.
    """

    def __init__(self, actors: list[Any]) -> None:
        self.size = len(actors)
        self._free = list(actors)
        self._running: dict[Any, tuple[J, Any]] = {}

    def submit(self, job: J) -> None:
        """Begin a job."""
        actor = self._free.pop()
        self._running[actor.perform.remote(job)] = (job, actor)

    def next(self, report: Rounds) -> JobOutcome[J]:
        """Wait for the end of a job. Rounds are read from the run folders once a second."""
        import ray
        from ray.exceptions import RayError

        done: list[Any] = []
        while not done:
            done, _ = ray.wait(list(self._running), timeout=1.0)
            for job, _ in self._running.values():
                if (job.run_path / "status.json").exists():
                    run = RunFolder(job.run_path)
                    report(job, int(run.status()["round"]), run.experiment.rounds)
        job, actor = self._running.pop(done[0])
        self._free.append(actor)
        try:
            return JobOutcome(job, ray.get(done[0]))
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


class JobActor:
    """Performs jobs in a process of its own."""

    def perform(self, job: Job) -> str | None:
        return job.attempt([])


@contextmanager
def opened(size: int, address: str | None, device: str) -> Iterator[Workers[Any]]:
    """Workers for a number of jobs at a time.

    Args:
        size: number of jobs at a time; 1 without an address: this process.
        address: of a Ray cluster, whose machines must see the folder of the study; None: a local
            Ray is started.
        device: on which the runs compute; actors share the GPUs.

    Raises:
        ExperimentError: the number of workers is not at least 1.
        EngineError: Ray cannot be started, or the cluster cannot be reached.
    """
    if size < 1:
        raise ExperimentError(
            "the number of workers", expected="1 or more", got=str(size), fix="--workers 2"
        )
    if size == 1 and address is None:
        yield InProcess()
        return
    from simulations.engines.ray_alone import alone
    from simulations.telemetry import disable_telemetry

    disable_telemetry(os.environ)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with alone() if address is None else nullcontext():
        yield from _on_ray(size, address, device)


def _on_ray(size: int, address: str | None, device: str) -> Iterator[Workers[Any]]:
    import ray

    from simulations.engines.ray import connect

    ours = not ray.is_initialized()
    connect(address, size, 0)
    try:
        gpus = ray.cluster_resources().get("GPU", 0.0) if device != "cpu" else 0.0
        remote = ray.remote(num_cpus=1, num_gpus=min(1.0, gpus / size), max_restarts=0)(JobActor)
        yield OnRay([remote.remote() for _ in range(size)])
    finally:
        if ours:
            ray.shutdown()
