# SPDX-License-Identifier: Apache-2.0
"""The check of results, such as contributed ones: their form, the probe, and a sample that is run
again and compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedrec.errors import RunError
from fedrec.rng import stream
from simulations.bench.cell import PROBE, study_of
from simulations.bench.declaration import Bench, BenchCell
from simulations.bench.results import at_chance
from simulations.reproduce.recorded import Number, Recorded, decimal
from simulations.studies.declaration import Found
from simulations.studies.runs import folder_of, run_study

TOLERANCE = 0.003
"""Largest difference of a metric in [0, 1]: other processors round sums otherwise, and training
amplifies that by a few users of some thousand."""
_RELATIVE = 0.01  # of numbers that are no such metrics, such as bytes


def sample(known: Iterable[BenchCell], count: int, seed: int) -> list[BenchCell]:
    """Some of the cells, drawn at random.

    Args:
        known: those that have results.
        count: how many, at most.
        seed: of the draw.
    """
    cells = sorted(known)
    drawn = stream(seed, "bench-check").permutation(len(cells))[:count]
    return [cells[place] for place in sorted(drawn.tolist())]


def refuse_unsound(bench: Bench, known: Mapping[BenchCell, Recorded]) -> None:
    """Check what needs no run: the cells are of the bench, and the probe is at chance.

    Raises:
        ExperimentError: the bench has no such dataset, protocol or system.
        RunError: more seeds than the bench has, or a list without a model finds held-out items.
    """
    for cell, record in known.items():
        list(bench.cells(*cell))
        probe = record.rows[cell.system][PROBE]
        if not at_chance(probe):
            raise RunError(
                f"{cell.key}: a list without a model finds held-out items",
                expected=f"{PROBE} at chance, .10",
                got=probe.text(),
                fix="let the step draw negatives outside of training rows alone",
            )
        if record.seeds > bench.seeds:
            raise RunError(
                f"{cell.key} has too many seeds",
                expected=f"at most {bench.seeds}",
                got=str(record.seeds),
                fix="run the command of the entry",
            )


def rerun(
    bench: Bench, cell: BenchCell, record: Recorded, seed: int, folder: Path
) -> Iterator[str]:
    """Run a seed of a cell again.

    Args:
        bench: the declaration.
        cell: the cell.
        record: its results.
        seed: the seed, below the number of seeds of the results.
        folder: for the run, new, empty, or of the same cell.

    Yields:
        A line for each number that differs.

    Raises:
        RunError: the run failed.
    """
    study = replace(study_of(bench, [cell]), first_seed=seed)
    jobs = study.jobs(folder_of(study, folder, quick=False).path, 1, quick=False)
    failures = run_study(folder_of(study, folder, quick=False), jobs)
    found = jobs[0].found() if jobs else None
    if found is None:
        raise RunError(
            f"{cell.key} could not be run again",
            expected="a cell that is not missing for a reason, and whose run ends",
            got="; ".join(failures.values()) or bench.reason(cell),
            fix="run the command of its entry, and record what it prints",
        )
    yield from differing(record.rows[cell.system], found[0], seed)


def differing(known: Mapping[str, Number], found: Sequence[Found], seed: int) -> Iterator[str]:
    """A line for each number of a seed that is not the recorded one.

    Args:
        known: by metric, what is recorded.
        found: what a run of the seed gave.
        seed: the seed.
    """
    again = {one.metric: one.value for one in found}
    for metric in dict.fromkeys([*known, *again]):
        if metric not in known or metric not in again:
            yield f"{metric}: only {'run again' if metric in again else 'recorded'}"
            continue
        number = known[metric]
        before = number.values[seed] if number.values else number.mean
        if not _same(before, again[metric]):
            yield f"{metric}: recorded {decimal(before, 4)}, again {decimal(again[metric], 4)}"


def _same(before: float, again: float) -> bool:
    if not math.isfinite(before) or not math.isfinite(again):
        return before == again or (math.isnan(before) and math.isnan(again))
    size = max(abs(before), abs(again))
    return abs(before - again) <= (TOLERANCE if size <= 1 else _RELATIVE * size)
