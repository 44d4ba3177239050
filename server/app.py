# SPDX-License-Identifier: Apache-2.0
"""The Flower ServerApp: runs the experiment that the run configuration names, on Flower's own grid.

Run configuration: `experiment` (TOML file or shipped name), `overrides` (like `--set`, separated by
`;`), `output` (absolute path of the run folder, new or to be continued; default: below the runs
directory).
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrec.experiment.loading import from_run_config
from fedrec.runs.directory import default_folder
from fedrec.runs.folder import RunFolder
from fedrec.runtime.text_files import parse_json
from server.deployed.grid import DeployedGrid
from server.run import execute

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run to the end; an error is raised, so that Flower marks its run as failed."""
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
