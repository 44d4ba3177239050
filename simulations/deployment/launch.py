# SPDX-License-Identifier: Apache-2.0
"""Runs on a deployment: the same TOML file, run by the registered nodes.

The run folder is on the machine of the ServerApp. The nodes get the resolved experiment in Flower's
run configuration, and read their own data, never its `[dataset]`. Centralised baselines need the
data of all clients and are left out.
"""

import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from fedrec.errors import EngineError, RunError
from fedrec.experiment.schema import Experiment, load
from fedrec.runs.folder import Result, RunFolder
from fedrec.runtime.files import parse_json
from server.callbacks import Callback
from server.nodes import with_names
from simulations.deployment.layout import Deployment
from simulations.deployment.processes import Process, environment_of
from simulations.deployment.superlink import Control, RunState
from simulations.engines.flower import RunWatch, flower_home, flwr_run
from simulations.flower_commands import last_lines

DEADLINE = 120.0
"""Default number of seconds that a round waits for nodes."""
OUTAGE = 120.0
"""Seconds without an answer of the SuperLink after which waiting commands stop; the run
continues."""
MOST_FAILURES = 0.5
"""Default share of a round's nodes that may fail."""


def settled(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Experiment:
    """Adapt an experiment to deployments: no baselines, rounds that tolerate failing nodes, and by
    default only the final evaluation, because owners limit evaluations.

    Raises:
        ExperimentError: the experiment or an override is invalid.
    """
    experiment = load(source, overrides)
    before = experiment.engine
    engine = {"name": "flower", "threads": before.threads or 1}
    engine |= {"timeout": DEADLINE} if before.timeout == type(before)().timeout else {}
    engine |= {"max-failures": MOST_FAILURES} if before.max_failures == 0 else {}
    table = experiment.table()
    table["engine"] = {**table["engine"], **engine}
    each_round = experiment.evaluation.every == type(experiment.evaluation)().every
    table["evaluation"] = {
        **table["evaluation"],
        "baselines": [],
        **({"every": 0} if each_round else {}),
    }
    return load(table)


def start(deployment: Deployment, folder: RunFolder) -> int:
    """Submit a new or interrupted run folder to the SuperLink, and return Flower's id of the run.

    Raises:
        EngineError: the SuperLink rejected it.
    """
    with Control(deployment) as control:
        names = control.names()
    config = {
        "resolved": json.dumps(folder.experiment.table(), sort_keys=True),
        "output": str(folder.path),
        "deployment": True,
        "run": run_key(folder),
        "most-clients": deployment.settings.most_clients or 0,
        "node-names": json.dumps(names),
    }
    with tempfile.TemporaryDirectory(prefix="fedrec-deploy-") as scratch:
        home = flower_home(Path(scratch) / "home", deployment.superlink, deployment.authority)
        command = [*flwr_run(Path(scratch), config), "--format", "json"]
        environment = environment_of(Process("run", tuple(command), home))
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch)
    try:
        return int(parse_json(done.stdout)["run-id"])
    except (ValueError, KeyError):
        raise EngineError(
            "the SuperLink rejected the run",
            got=(done.stdout + done.stderr).strip()[-2000:],
            fix=f"fedrec deploy status {deployment.path}",
        ) from None


def run_key(folder: RunFolder) -> str:
    """Key of the nodes' private state, the same for a resumed run and unique among runs."""
    about = (folder.path / "run.json").read_bytes()
    return hashlib.sha256(str(folder.path).encode() + about).hexdigest()[:16]


def wait(
    deployment: Deployment, folder: RunFolder, run: int, *, callback: Callback | None = None
) -> Result:
    """Wait for the end of a run.

    Args:
        deployment: the deployment.
        folder: the run folder.
        run: Flower's id of the run.
        callback: called at the start and after each round recorded in the run folder.

    Raises:
        EngineError: the run failed, or its ServerApp was lost; the run folder has its reported
            rounds.
    """
    watch = RunWatch(folder, [] if callback is None else [callback])
    ended = _end_of(deployment, run, watch)
    watch.look()
    status = folder.status()
    if status["state"] == "finished":
        return folder.read_result()
    raise EngineError(
        "the run did not finish",
        got=(
            f"{ended.status}; the run folder has state {status['state']!r} after round"
            f" {len(folder.read_rounds())}\n"
            f"{_last_words(deployment, folder, ended)}"
        ),
        fix=f"fedrec deploy resume {deployment.path} {folder.path}; after a package was installed,"
        f" first fedrec deploy down {deployment.path}, and up",
    )


def _end_of(deployment: Deployment, run: int, watch: RunWatch) -> RunState:
    """Wait for the final status of a run in Flower, also while the SuperLink restarts."""
    heard = time.monotonic()
    with Control(deployment) as control:
        while True:
            try:
                state = next((state for state in control.runs() if state.run == run), None)
                heard = time.monotonic()
                if state is not None and state.status.startswith("finished"):
                    return state
            except httpx.HTTPError as error:
                if time.monotonic() - heard > OUTAGE:
                    raise EngineError(
                        f"the SuperLink has not answered for {OUTAGE:.0f} s",
                        got=str(error),
                        fix=f"fedrec deploy up {deployment.path}",
                    ) from None
            watch.look()
            time.sleep(1.0)


def resumable(path: Path) -> RunFolder:
    """Open the folder of an unfinished run.

    Raises:
        RunError: the run is finished.
    """
    folder = RunFolder(path)
    if folder.status()["state"] == "finished":
        raise RunError(f"run {path} is finished", fix="read its result.json")
    return folder


def _last_words(deployment: Deployment, folder: RunFolder, ended: RunState) -> str:
    """Details of a failure, with names of nodes in place of ids, and the last lines of the run's
    log, or of Flower's if the run ended before it had a log."""
    details = ended.details
    log = last_lines(folder.log_file)
    with suppress(httpx.HTTPError), Control(deployment) as control:
        details = with_names(details, control.names())
        if not folder.log_file.exists():
            log = "\n".join(control.log(ended.run).splitlines()[-12:])
    return f"{details}\n{log}"
