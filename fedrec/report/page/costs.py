# SPDX-License-Identifier: Apache-2.0
"""Cost of a run, and how to reproduce it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fedrec.report.naming import Run
from fedrec.report.page.parts import Cell, PageTable, Row
from fedrec.runs.folder import RunFolder

_HEADS = ("run", "training", "evaluation", "baselines", "model", "down", "up", "peak memory")


@dataclass(frozen=True)
class Reproduction:
    """How to reproduce a run: command, experiment and environment, as texts."""

    name: str
    command: str
    toml: str
    environment: str


def cost_table(runs: Sequence[Run]) -> PageTable:
    """Seconds, bytes and memory of each run; a dash where it was not measured."""
    rows = tuple(_row(run) for run in runs)
    caption = (
        "Time of this machine; down, up: bytes that all devices receive and send in training, with"
        " one client a device: rows that are zero are not sent, and of symmetric products one half"
    )
    return PageTable(caption, _HEADS, rows)


def _row(run: Run) -> Row:
    result = run.result
    folder = RunFolder(result.folder)
    summary = folder.summary()
    seconds = summary.get("seconds", {})
    cost = summary.get("cost", {})
    baselines = [folder.read_baseline(label) or {} for label in result.baselines]
    fitted = [sum(found.get("seconds", {}).values()) for found in baselines]
    memory = cost.get("peak-memory-mib")
    return Row(
        run.label,
        (
            _seconds(seconds.get("training")),
            _seconds(seconds.get("evaluation")),
            _seconds(sum(fitted) if fitted else None),
            _bytes(cost.get("parameter-bytes")),
            _bytes(cost.get("bytes-down")),
            _bytes(cost.get("bytes-up")),
            _bytes(None if memory is None else memory * 2**20),
        ),
        own=result.experiment.federated,
    )


def reproductions(runs: Sequence[Run]) -> list[Reproduction]:
    """The command and the experiment of each run."""
    found = []
    for _, label, result in runs:
        folder = RunFolder(result.folder)
        machine = folder.environment
        packages = ", ".join(
            f"{name} {version}" for name, version in machine.get("packages", {}).items() if version
        )
        environment = (
            f"Run {folder.about.get('created', '')}; Python {machine.get('python')}, {packages};"
            f" {machine.get('processor')}, {machine.get('cores')} cores."
        )
        command = f"fedrec run {shlex.quote(str(folder.path / 'experiment.toml'))}"
        found.append(Reproduction(label, command, result.experiment.toml(), environment))
    return found


def _seconds(value: float | None) -> Cell:
    if value is None:
        return Cell("-")
    return Cell(f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min")


def _bytes(value: float | None) -> Cell:
    return Cell("-" if value is None else byte_text(value))


def byte_text(value: float) -> str:
    """A number of bytes with three digits and its unit."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
