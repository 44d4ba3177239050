# SPDX-License-Identifier: Apache-2.0
"""The study of a table of the bench (a dataset under a protocol), and the numbers of a cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedrec.data.population import POPULATIONS
from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import group_gaps
from fedrec.experiment.loading import read
from fedrec.experiment.schema import marked
from fedrec.experiment.tables import TRIED
from fedrec.report.rows import epsilon_of
from fedrec.runs.result import Result
from simulations.bench.declaration import Bench, BenchCell
from simulations.bench.probe import never_drawn
from simulations.studies.declaration import Found, Study, Task, TaskJob, filled
from simulations.studies.runs import SYSTEM, finished, values

NAME = "bench"
K = 10
DISCOUNTED = f"discounted-hits@{K}"
SAMPLED = 99  # items that a held-out one is ranked among, in expectation over all draws
QUALITY = (f"hits@{K}", DISCOUNTED, f"hits-of-100@{K}", f"ndcg-of-100@{K}")
SPREAD = (f"coverage@{K}", f"gini@{K}")
GAP = f"gap of {DISCOUNTED}, "
PROBE = f"probe hits-of-100@{K}"
UP = "bytes up"
DOWN = "bytes down"
EPSILON = "epsilon"
CHANCE = K / (SAMPLED + 1)
_OF_SYSTEM = (
    *("rounds", "model", "step", "strategy", "sampler", "privacy", "secure-aggregation"),
    "perturb",
)
"""What a system decides; all else is the protocol's."""


def experiment_table(
    bench: Bench, cell: BenchCell, candidate: int | None = None, *, validation: bool = False
) -> dict[str, Any]:
    """The experiment of a cell, as a table. The protocol sets dataset, split and evaluation,
    whatever the system's experiment says of them; all rows are positive.

    Args:
        bench: the declaration.
        cell: the cell.
        candidate: place of the settings; None: the chosen ones.
        validation: whether validation rows are ranked, as in a search.

    Raises:
        ExperimentError: the experiment of the system cannot be read.
    """
    system = bench.systems[cell.system]
    dataset = bench.datasets[cell.dataset]
    known = {
        "rounds": dataset.rounds,
        "cohort": dataset.cohort,
        "order": dataset.order,
        "role": "held-out" if validation else "training",
    }
    split = filled(bench.protocols[cell.protocol].split, known)
    own = read(system.experiment) if system.experiment else {}
    tuned = own.get("evaluation", {}).get("fine-tune")
    evaluation = {"baselines": [system.baseline] if system.baseline else []}
    evaluation |= {} if tuned is None else {"fine-tune": tuned}
    start = _only(own, _OF_SYSTEM)
    place = system.chosen.get(cell.protocol, 0) if candidate is None else candidate
    searched = system.candidates[place] if system.candidates else ()
    overrides = (*system.set, *system.protocols.get(cell.protocol, ()), *searched)
    table = read({**start, "split": split, "evaluation": evaluation}, filled([*overrides], known))
    tried = own.get(TRIED, 0) + (bench.budget if cell.protocol in system.chosen else 0)
    found = {
        **_only(table, _OF_SYSTEM),
        "name": f"{cell.system}-{cell.dataset}",
        "task": "ranking",
        "dataset": dict(dataset.dataset),
        "split": {**_only(table["split"], ("generalisation",)), **split},
        "evaluation": {
            **_only(table["evaluation"], ("baselines", "fine-tune")),
            "every": 0,
            "ks": [K],
            "sampled-items": SAMPLED,
            "held-out": "validation" if validation else "test",
        },
        "engine": {"threads": 1},
    }
    return _with_tried(found, max(1, tried), system.baseline)


def _only(table: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: table[key] for key in keys if key in table}


def _with_tried(table: dict[str, Any], tried: int, baseline: str) -> dict[str, Any]:
    """With the number of settings that were compared on validation rows, those of the search of
    the system's own experiment too."""
    if not baseline:
        return {**table, TRIED: tried}
    (one,) = table["evaluation"]["baselines"]
    named = {"name": one} if isinstance(one, str) else one
    return {**table, "evaluation": {**table["evaluation"], "baselines": [{**named, TRIED: tried}]}}


def study_of(bench: Bench, cells: Iterable[BenchCell]) -> Study:
    """The study of some cells of one table, a task for each.

    Args:
        bench: the declaration.
        cells: of one dataset and protocol, at least one; those with a reason to be missing are
            left out.

    Raises:
        ExperimentError: all have a reason to be missing.
    """
    own = _runnable(bench, list(cells))
    return _study(
        bench,
        own[0],
        [_task(bench, cell, cell.system, experiment_table(bench, cell)) for cell in own],
        bench.seeds,
    )


def search_of(bench: Bench, cells: Iterable[BenchCell]) -> Study:
    """The search of the settings of some systems: a task for each candidate, on validation rows of
    seed 0, the table in the order of the results.

    Raises:
        ExperimentError: all cells have a reason to be missing, or no settings to compare.
    """
    own = _runnable(bench, list(cells), searched=True)
    tasks = [
        _task(
            bench,
            cell,
            f"{cell.system}-{place}",
            experiment_table(bench, cell, place, validation=True),
            searched=True,
        )
        for cell in own
        for place in range(len(bench.systems[cell.system].candidates))
    ]
    found = _study(bench, own[0], tasks, 1)
    return replace(found, item=f"{found.item}-search", best=True)


def _runnable(
    bench: Bench, cells: Sequence[BenchCell], *, searched: bool = False
) -> list[BenchCell]:
    """Those of the cells of one table that are run, or whose settings are compared."""

    def why_not(cell: BenchCell) -> str:
        comparable = bench.systems[cell.system].candidates or not searched
        return bench.reason(cell) or ("" if comparable else "no settings to compare")

    own = [cell for cell in cells if not why_not(cell)]
    if own:
        return own
    dataset, protocol, _ = cells[0]
    others = [one.system for one in bench.cells(dataset, protocol) if not why_not(one)]
    raise ExperimentError(
        f"the bench runs nothing of {', '.join(cell.key for cell in cells)}",
        expected=f"for {dataset} {protocol} one of {', '.join(others)}",
        got="; ".join(f"{cell.system}: {why_not(cell)}" for cell in cells),
        fix=f"`fedrec bench list {dataset} {protocol}` lists the cells",
    )


def _study(bench: Bench, cell: BenchCell, tasks: list[Task], seeds: int) -> Study:
    dataset = bench.datasets[cell.dataset]
    title = f"{bench.protocols[cell.protocol].title}, {dataset.title}"
    folder = () if cell.dataset == "synthetic" else (str(dataset.dataset["name"]),)
    item = f"{cell.dataset}-{cell.protocol}"
    return Study(NAME, item, title, folder, tuple(tasks), seeds=seeds)


def _task(
    bench: Bench, cell: BenchCell, name: str, table: dict[str, Any], *, searched: bool = False
) -> Task:
    system = bench.systems[cell.system]
    options = {
        "experiment": table,
        "dataset": cell.dataset,
        "row": name,
        "label": system.baseline or SYSTEM,
    }
    seconds = system.seconds * bench.datasets[cell.dataset].slower
    measure = measure_search if searched else measure_cell
    return Task(name, seconds, f"{measure.__module__}:{measure.__name__}", options)


def measure_search(
    job: TaskJob, experiment: Mapping[str, Any], dataset: str, row: str, label: str
) -> Iterator[Found]:
    """How well settings rank validation rows."""
    result = finished(job, experiment)
    yield from values(result, dataset, {label: row}, {name: name for name in QUALITY})
    _forget_clients(job)


def measure_cell(
    job: TaskJob, experiment: Mapping[str, Any], dataset: str, row: str, label: str
) -> Iterator[Found]:
    """The numbers of one seed of a cell."""
    result = finished(job, experiment)
    yield from values(result, dataset, {label: row}, {n: n for n in (*QUALITY, *SPREAD)})
    for name, value in _further(result, label).items():
        yield Found(dataset, row, name, value, lower_is_better=True)
    for name, column in ((UP, "bytes-up"), (DOWN, "bytes-down")):
        sent = math.nan  # by systems that have everybody's data in one place
        if label == SYSTEM:
            clients = len(POPULATIONS.population(result.experiment).training_clients)
            sent = round(result.rounds[column].to_numpy().sum() / clients)
        yield Found(dataset, row, name, sent, lower_is_better=True)
    chance = np.array([CHANCE])  # nothing is drawn by centralised systems here
    if label == SYSTEM:
        chance = never_drawn(result.experiment)[f"hits-of-100@{K}"]
    half = 1.96 * float(np.nanstd(chance)) / math.sqrt(len(chance))
    mean = float(np.nanmean(chance))
    yield Found(dataset, row, PROBE, mean, mean - half, mean + half)
    _forget_clients(job)


def _further(result: Result, label: str) -> dict[str, float]:
    """Epsilon, and the gaps between groups of users."""
    groups = result.groups if label == SYSTEM else result.baseline_groups[label]
    gaps = group_gaps(groups)[DISCOUNTED].dropna().to_dict()
    name = marked(result.experiment) if label == SYSTEM else label
    epsilon = epsilon_of(result, name)
    found = {EPSILON: math.inf if epsilon is None else epsilon}
    return found | {f"{GAP}{kind}": float(gap) for kind, gap in gaps.items()}


def _forget_clients(job: TaskJob) -> None:
    """Remove what clients keep, which may be as large as the catalogue times the users."""
    for file in job.run_path.glob("private/*"):
        file.unlink()
