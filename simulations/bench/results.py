# SPDX-License-Identifier: Apache-2.0
"""Results of cells as JSON: an entry for each, in the form of `simulations/reproduce/results.json`,
by `DATASET/PROTOCOL/SYSTEM`. `schema.json` is its JSON schema.

    "ml-100k/leave-one-out/fedmf": {
      "command": "fedrec bench run ml-100k leave-one-out fedmf --seeds 1",
      "fedrec": "0.1.0", "commit": "0a1b2c3d", "date": "2026-01-31", "machine": "x86_64, 2 cores",
      "seeds": 1,
      "rows": {"fedmf": {"hits@10": [0.1034, 0.0831, 0.1237], ...}},
      "inputs": {"fedmf": {"test_users": true, "client_rounds": 6000, "settings_tried": 4}}
    }

A number is its mean, then the ends of its 95 % interval where it has one (over users of one seed,
over seeds of several), then the value of each seed where there are several.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from fedrec.config import Config
from fedrec.errors import ExperimentError, RunError
from fedrec.report.page.sections import byte_text
from fedrec.runs.ids import installed_version
from fedrec.runtime.files import read_json, write_atomically
from simulations.bench.cell import CHANCE, DOWN, EPSILON, NAME, PROBE, QUALITY, SPREAD, UP
from simulations.bench.declaration import Bench, BenchCell, contributed
from simulations.reproduce.recorded import Number, Recorded, entry, recorded, text_of
from simulations.studies.declaration import Study, TaskJob
from simulations.studies.tables import duration

FILE = Path(__file__).with_name("results.json")
SCHEMA = Path(__file__).with_name("schema.json")
NUMBERS = (*QUALITY, *SPREAD, UP, DOWN, EPSILON, PROBE)
"""What every cell has; gaps between groups are further ones."""
_KEY = r"^[a-z0-9-]+/[a-z0-9-]+/[a-z0-9-]+$"
_SLACK = 0.01  # of the probe, within which it is at chance however narrow its interval is


class RecordedInputs(Config):
    """What a system had to learn from (`fedrec.report.inputs.Inputs`)."""

    user_features: tuple[str, ...] = ()
    """Side features of users that it uses."""
    item_features: tuple[str, ...] = ()
    """Side features of items that it uses."""
    low_rated: tuple[str, ...] = ()
    """Weights of rated items that are not positive; the bench has none."""
    test_users: bool = False
    """Whether it trains with known rows of the users that it is tested on."""
    client_rounds: int | None = Field(default=None, ge=0)
    """Participations of clients in rounds, added up."""
    settings_tried: int | None = Field(default=None, ge=1)
    """Settings that were compared on validation rows."""


class CellRecord(Config):
    """The results of a cell."""

    command: str = Field(pattern="^fedrec bench run ")
    """The command that makes them."""
    fedrec: str
    """Version of fedrec."""
    commit: str
    """Commit of its source, with a plus if files differed from it; empty: not from a checkout."""
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    """Day on which the last seed ended."""
    machine: str
    """Class of machine."""
    seeds: int = Field(ge=1)
    """Number of seeds, from 0, or of folds."""
    package: str = ""
    """Name and version of the package that brings the system; empty: fedrec."""
    rows: dict[str, dict[str, tuple[float | Literal["inf"] | None, ...]]]
    """The system, and by metric its numbers."""
    inputs: dict[str, RecordedInputs] = Field(default_factory=dict)
    """What it had to learn from."""


def schema() -> str:
    """The JSON schema of a file of results, as text."""
    table = TypeAdapter(dict[str, CellRecord]).json_schema(by_alias=False)
    table |= {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    table |= {"title": "FedRec-Bench results", "propertyNames": {"pattern": _KEY}}
    return json.dumps(table, indent=1) + "\n"


def done(
    bench: Bench, cells: Iterable[BenchCell], jobs: Iterable[TaskJob]
) -> dict[str, dict[str, Any]]:
    """The entries of finished cells.

    Args:
        bench: the declaration.
        cells: of one table.
        jobs: of its study, of any number of seeds; those after a missing one do not count.
    """
    jobs = sorted(jobs, key=lambda one: one.seed)
    found = {}
    for cell in cells:
        own = [job for job in jobs if job.task.name == cell.system]
        whole = list(itertools.takewhile(lambda job: job.found() is not None, own))
        if not whole:
            continue
        table = entry(Study(NAME, cell.key, "", (), (whole[0].task,)), whole)
        package = bench.systems[cell.system].package
        more = {"package": f"{package} {installed_version(package)}"} if package else {}
        command = f"fedrec bench run {' '.join(cell)} --seeds {len(whole)}"
        found[cell.key] = {"command": command, **more, **(table or {})}
    return found


def keep(found: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Put entries into a file of results, in place of what it had of these cells."""
    known = read_json(file) if file.is_file() else {}
    write_atomically(file, text_of(dict(sorted((known | dict(found)).items()))))


def results(*files: Path) -> dict[BenchCell, Recorded]:
    """The results in some files; of a cell that is in several, those of the last file.

    Raises:
        RunError: a file cannot be read, or is not of the schema.
    """
    found: dict[BenchCell, Recorded] = {}
    for file in files:
        _refuse_other_forms(file)
        for key, one in recorded(file).items():
            found[BenchCell(*key.split("/"))] = one
    return found


def _refuse_other_forms(file: Path) -> None:
    try:
        table = read_json(file)
    except (OSError, ValueError) as error:
        raise _malformed(file, "a JSON file", str(error)) from None
    if not isinstance(table, dict):
        raise _malformed(file, "a JSON object of cells", type(table).__name__)
    for key, one in table.items():
        if not re.fullmatch(_KEY, key) or not isinstance(one, dict):
            raise _malformed(file, "DATASET/PROTOCOL/SYSTEM and its entry", repr(key))
        try:
            record = CellRecord.parse(one, at=key)
        except ExperimentError as error:
            raise _malformed(file, error.expected or "an entry", error.text()) from None
        system = key.rpartition("/")[2]
        absent = [name for name in NUMBERS if name not in record.rows.get(system, {})]
        if list(record.rows) != [system] or absent:
            raise _malformed(file, f"one row {system!r} with all numbers", f"no {absent[:3]}")


def _malformed(file: Path, expected: str, got: str) -> RunError:
    return RunError(
        f"{file} is no file of results of the bench",
        expected=expected,
        got=got,
        fix=f"see {SCHEMA}, and results.json in the folder that `fedrec bench run` prints",
    )


def at_chance(probe: Number) -> bool:
    """Whether the probe without a model found nothing: chance is within twice its interval."""
    half = 0.0 if math.isnan(probe.low) else probe.high - probe.mean
    return abs(probe.mean - CHANCE) <= max(2 * half, _SLACK)


def recorded_cells(*further: Path) -> dict[BenchCell, Recorded]:
    """The results that come with fedrec, those of contributed systems, and those in further
    files."""
    return results(FILE, *(file.with_name("results.json") for file in contributed()), *further)


def state(bench: Bench, cell: BenchCell, known: Mapping[BenchCell, Recorded]) -> str:
    """What is known of a cell: how many seeds are done, or why it is missing."""
    if cell in known:
        return f"done, {known[cell].seeds} of {bench.seeds} seeds"
    if why := bench.reason(cell):
        return why
    seconds = bench.systems[cell.system].seconds * bench.datasets[cell.dataset].slower
    return f"not run: about {duration(seconds * bench.seeds)} on one core"


def number_text(name: str, number: Number, *, interval: bool = False) -> str:
    """A number of a cell as text: bytes with their unit, a dash for an epsilon that is infinite.

    Args:
        name: of the metric.
        number: the number.
        interval: whether its interval is added.
    """
    if name in (UP, DOWN):
        return "-" if math.isnan(number.mean) else byte_text(number.mean)
    if name == EPSILON and math.isinf(number.mean):
        return "none"
    return number.text(interval=interval)
