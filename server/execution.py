# SPDX-License-Identifier: Apache-2.0
"""One execution of a run folder on a grid: baselines, rounds, evaluation, and an honest status whatever happens."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flwr.serverapp import Grid

from fedrec.baselines.evaluate import evaluate_baselines, evaluate_rating_baselines
from fedrec.data.kept import KEPT
from fedrec.data.population import sample_clients
from fedrec.experiment import Experiment
from fedrec.runs import Result, RunFolder
from server.audience import Audience, callbacks_of
from server.callbacks.base import Callback
from server.loop import Loop


def execute(run: RunFolder, grid: Grid, callbacks: Sequence[Callback] = ()) -> Result:
    """Run what is left of a run folder on a grid.

    Raises:
        FedrecError: something that the user can mend; the run folder stays resumable.
        KeyboardInterrupt: the user stopped it; likewise.
    """
    with _status(run):
        audience = Audience([*callbacks_of(run.experiment), *callbacks])
        baselines = run_baselines(run, audience)
        return Loop(run, grid, audience).execute(baselines)


def run_baselines(run: RunFolder, audience: Audience) -> dict[str, dict[str, float]]:
    """Metrics of the experiment's baselines; computed once per run folder."""
    done = run.read_baselines()
    if done is not None:
        return done
    audience.on_stage("fitting baselines")
    metrics = _baselines(run.experiment)
    run.write_baselines(metrics)
    return metrics


def _baselines(experiment: Experiment) -> dict[str, dict[str, float]]:
    names = experiment.evaluation.baseline_settings()
    if not names:
        return {}
    settings = experiment.evaluation
    population = KEPT.population(experiment)
    clients = sample_clients(population.evaluated_clients(settings.held_out), settings.final_users, experiment.seed)
    if experiment.task == "rating":
        return evaluate_rating_baselines(names, population, held_out=settings.held_out, clients=clients)
    return evaluate_baselines(
        names,
        population,
        held_out=settings.held_out,
        ks=settings.ks,
        clients=clients,
        protocol=settings.protocol,
    )


@contextmanager
def _status(run: RunFolder) -> Iterator[None]:
    """Hold the folder, write its log, and say at the end how it ended."""
    with run.lock(), _log_to(run), _signals():
        run.set_status("running", run.status()["round"])
        try:
            yield
        except KeyboardInterrupt:
            run.set_status("interrupted", run.status()["round"])
            raise
        except BaseException as error:
            logging.getLogger("fedrec").error("%s", error)
            run.set_status("failed", run.status()["round"])
            raise


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt a run as Ctrl-C does, so that its folder says so.

    Not where others have handlers: Flower's processes take their leave of the SuperLink. Ray's only ends the process.
    """
    changed = {}
    if threading.current_thread() is threading.main_thread():
        for sign in (signal.SIGTERM, signal.SIGHUP):
            present = signal.getsignal(sign)
            if present is signal.SIG_DFL or getattr(present, "__module__", "").startswith("ray."):
                changed[sign] = present
                signal.signal(sign, _interrupt)
    try:
        yield
    finally:
        for sign, before in changed.items():
            signal.signal(sign, before)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def _log_to(run: RunFolder) -> Iterator[None]:
    logger = logging.getLogger("fedrec")
    handler = logging.FileHandler(run.log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()
