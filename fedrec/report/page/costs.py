# SPDX-License-Identifier: Apache-2.0
"""Cost of a run, and how to reproduce it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.report.naming import Run
from fedrec.report.page.parts import Cell, Row, Table

_HEADS = ("run", "training", "evaluation", "baselines", "model", "sent in all", "peak memory")


@dataclass(frozen=True)
class Repeat:
    """How to reproduce a run: command, experiment and environment, as texts."""

    name: str
    command: str
    toml: str
    environment: str


def cost_table(runs: Sequence[Run]) -> Table:
    """Seconds, bytes and memory of each run; a dash where it was not measured."""
    rows = tuple(_row(run) for run in runs)
    caption = (
        "Time of this machine; sent in all: parameters down to and updates up from every client of"
        " every round, as dense arrays"
    )
    return Table(caption, _HEADS, rows)


def _row(run: Run) -> Row:
    result = run.result
    kept = _read(result.folder / "result.json")
    seconds = kept.get("seconds", {})
    cost = kept.get("cost", {})
    fitted = [
        sum(_read(file).get("seconds", {}).values())
        for file in sorted(result.folder.glob("baselines/*/result.json"))
    ]
    size, sent, memory = (
        cost.get(key) for key in ("parameter-bytes", "bytes-sent", "peak-memory-mib")
    )
    return Row(
        run.label,
        (
            _seconds(seconds.get("training")),
            _seconds(seconds.get("evaluation")),
            _seconds(sum(fitted) if fitted else None),
            _bytes(size),
            _bytes(sent),
            _bytes(None if memory is None else memory * 2**20),
        ),
        own=result.experiment.federated,
    )


def repeats(runs: Sequence[Run]) -> list[Repeat]:
    """The command and the experiment of each run."""
    found = []
    for _, label, result in runs:
        about = _read(result.folder / "environment.json")
        packages = ", ".join(
            f"{name} {version}" for name, version in about.get("packages", {}).items() if version
        )
        created = _read(result.folder / "run.json").get("created", "")
        command = f"fedrec run {shlex.quote(str(result.folder / 'experiment.toml'))}"
        environment = f"Run {created}; Python {about.get('python')}, {packages}"
        machine = f"{about.get('processor')}, {about.get('cores')} cores"
        toml = (result.folder / "experiment.toml").read_text(encoding="utf-8")
        found.append(Repeat(label, command, toml, f"{environment}; {machine}."))
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _seconds(value: float | None) -> Cell:
    if value is None:
        return Cell("-")
    return Cell(f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min")


def _bytes(value: float | None) -> Cell:
    if value is None:
        return Cell("-")
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return Cell(f"{value:.3g} {unit}")
        value /= 1000
    return Cell("-")
