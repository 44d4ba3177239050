# SPDX-License-Identifier: Apache-2.0
"""Flower ServerApp, and execution of a run folder on a grid."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from threadpoolctl import threadpool_limits

from fedrec.experiment.schema import from_run_config
from fedrec.runs.folder import Result, RunFolder
from fedrec.runs.ids import default_folder
from fedrec.runtime.files import parse_json
from fedrec.runtime.process import interrupting
from server.callbacks.base import Callback, CallbackList, callbacks_of
from server.central import central_result
from server.deployed.federation import DeployedGrid
from server.exchange import name_nodes
from server.federation import node_names
from server.loop import Loop

# One execution of a run folder on a grid: baselines, rounds, evaluation, and the final status, also
# after errors.


def execute(run: RunFolder, grid: Grid, callbacks: Sequence[Callback] = ()) -> Result:
    """Run the remaining part of a run folder on a grid.

    Raises:
        FedrecError: an error that the user can fix; the run folder stays resumable.
        KeyboardInterrupt: the user stopped the run; likewise.
    """
    with _status(run, node_names(grid)):
        return Loop(run, grid, [*callbacks_of(run.experiment), *callbacks]).execute()


def execute_central(run: RunFolder, callbacks: Sequence[Callback] = ()) -> Result:
    """Run the remaining part of an experiment with centralised systems only, in this process.

    Raises:
        FedrecError: an error that the user can fix; the run folder stays resumable.
        KeyboardInterrupt: the user stopped the run; likewise.
    """
    with _status(run), _threads(run.experiment.engine.threads):
        return central_result(run, CallbackList([*callbacks_of(run.experiment), *callbacks]))


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Set the number of threads of torch and of the BLAS libraries of numpy and scipy, at most
    OMP_NUM_THREADS, because threads that wait for a busy core cost more than they gain."""
    before = torch.get_num_threads()
    wanted = number or before
    bound = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(wanted, int(bound)) if bound.isdecimal() and int(bound) else wanted
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _status(run: RunFolder, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Lock the folder, write its log, with these names of nodes, and record the final status."""
    with run.lock(), _log_to(run, names or {}), interrupting():
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
def _log_to(run: RunFolder, names: Mapping[str, str]) -> Iterator[None]:
    """Write the log of a run; if cohorts are secret, readable by its owner only, as it names failed
    nodes, and without the time of day, as rounds take longer with some clients."""
    logger = logging.getLogger("fedrec")
    times = None
    if run.experiment.hides_cohorts:
        run.log_file.touch(mode=0o600)
        run.log_file.chmod(0o600)
        times = "%Y-%m-%d --:--:--,---"  # as wide as a time
    handler = logging.FileHandler(run.log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", times))
    handler.addFilter(partial(name_nodes, names=names))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


# The Flower ServerApp: runs the experiment that the run configuration names, on Flower's own grid.
#
# Run configuration: `experiment` (TOML file or shipped name), `overrides` (like `--set`, separated
# by `;`), `output` (absolute path of the run folder, new or to be continued; default: below the
# runs directory).

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run to the end; errors are raised, so that Flower marks its run as failed."""
    run = _run_folder(context)
    logging.getLogger("fedrec").info("run folder %s", run.path)
    deployed = bool(context.run_config.get("deployment"))
    most = int(context.run_config.get("most-clients", 0))
    names = parse_json(str(context.run_config.get("node-names") or "{}"))
    result = execute(run, DeployedGrid(grid, most or None, names) if deployed else grid)
    logging.getLogger("flwr").info("fedrec: %s", result.metrics)


def _run_folder(context: Context) -> RunFolder:
    output = str(context.run_config.get("output", "") or "")
    if output and (Path(output) / "run.json").is_file():
        return RunFolder(Path(output))
    experiment = from_run_config(context.run_config)
    return RunFolder.create(experiment, Path(output) if output else default_folder(experiment))
