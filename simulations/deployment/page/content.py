# SPDX-License-Identifier: Apache-2.0
"""What the operator's page says: processes, nodes, and of each run its rounds, metrics, budget and
faults. Everything is read from the SuperLink and from run folders; nothing is changed.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pandas as pd

from fedrec.errors import FedrecError
from fedrec.report.page.charts import Cell, Note, PageTable, Row, number_cell, rendered
from fedrec.runs.folder import RunFolder
from simulations.deployment import operator
from simulations.deployment.layout import Deployment

_RUNS = 5  # newest runs on the page
_ROUNDS = 10  # newest rounds of each
_FAULTS = 20  # newest warnings of each
_LOG_BYTES = 1 << 20  # of the end of a log that are searched for them
_KNOWN = "epsilon", "dropped-replies", "num-clients", "loss"


@dataclass(frozen=True)
class RunPart:
    """What the page says of one run: facts by name, its newest rounds, its newest warnings."""

    name: str
    facts: tuple[tuple[str, str], ...]
    rounds: PageTable | None
    faults: tuple[str, ...]


def page(deployment: Deployment) -> str:
    """The page as HTML, with everything in it."""
    notes, nodes = _nodes(deployment)
    folders = sorted(
        (file.parent for file in (deployment.path / "runs").glob("*/run.json")),
        key=lambda folder: folder.stat().st_mtime,
        reverse=True,
    )
    return rendered(
        "federation.html.j2",
        title=f"Federation {deployment.path.name}",
        stamp=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        notes=notes,
        processes=_processes(deployment),
        nodes=nodes,
        runs=[run_part(folder) for folder in folders[:_RUNS]],
    )


def run_part(folder: Path) -> RunPart:
    """What the page says of the run in a folder; of a damaged one, what is wrong with it."""
    try:
        run = RunFolder(folder)
        state = run.status()
        experiment = run.experiment
        rounds = run.read_rounds()
    except FedrecError as error:
        return RunPart(folder.name, (("state", error.problem),), None, ())
    facts = [
        ("state", str(state["state"])),
        ("rounds", f"{state['round']:,} of {experiment.rounds:,}"),
    ]
    if experiment.privacy is not None:
        spent = "none yet" if "epsilon" not in rounds else f"{rounds['epsilon'].iloc[-1]:.4g}"
        most = experiment.privacy.budget
        facts.append(("epsilon spent", spent))
        facts.append(("budget", "none set" if most is None else f"epsilon {most:g}"))
    if "dropped-replies" in rounds:
        facts.append(
            ("replies dropped or missing", f"{rounds['dropped-replies'].to_numpy().sum():,.0f}")
        )
    return RunPart(folder.name, tuple(facts), _rounds(rounds), faults_in(run.log_file))


def faults_in(log: Path) -> tuple[str, ...]:
    """The newest warnings and errors at the end of a log, the newest first."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    told = [line for line in lines if " WARNING " in line or " ERROR " in line]
    return tuple(reversed(told[-_FAULTS:]))


def _rounds(rounds: pd.DataFrame) -> PageTable | None:
    if rounds.empty:
        return None
    metrics = [name for name in rounds if "@" in name or name in ("rmse", "mae", "mrr")]
    names = [name for name in _KNOWN if name in rounds] + metrics
    rows = tuple(
        Row(f"{int(row['round'])}", tuple(number_cell(float(row[name])) for name in names))
        for row in rounds.tail(_ROUNDS).iloc[::-1].to_dict("records")
    )
    return PageTable("Newest rounds", ("round", *names), rows)


def _processes(deployment: Deployment) -> PageTable:
    health = {None: "", True: "well", False: "no answer"}
    rows = tuple(
        Row(
            state.name,
            (
                "not running" if state.pid is None else "runs",
                Cell(str(state.restarts)),
                health[state.healthy],
            ),
        )
        for state in operator.states(deployment)
    )
    return PageTable("Processes of this machine", ("process", "state", "restarts", "health"), rows)


def _nodes(deployment: Deployment) -> tuple[list[Note], PageTable]:
    """Registered nodes and whether they are online; without a SuperLink, a note."""
    from simulations.deployment.flower import Control

    notes = []
    found = []
    try:
        with closing(Control(deployment.superlink, deployment.authority)) as control:
            found = control.nodes()
    except (httpx.HTTPError, OSError) as error:
        notes.append(Note(f"The SuperLink does not answer: {error}", warning=True))
    now = time.time()
    heard = sum(node.status == "online" and not node.overdue(now) for node in found)
    restarts = operator.node_restarts(deployment)
    rows = tuple(
        Row(node.name, (node.status, node.heard(now), Cell(str(restarts.get(node.name, "-")))))
        for node in found
    )
    caption = f"Nodes: {heard:,} of {len(found):,} registered ones heard of in time"
    return notes, PageTable(caption, ("node", "status", "last heartbeat", "restarts here"), rows)
