# SPDX-License-Identifier: Apache-2.0
"""Tables of a study: a paper's and our numbers, and differences paired by fold or seed."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.report.comparison import wilcoxon
from fedrec.report.inputs import COLUMNS as INPUT_COLUMNS
from fedrec.report.inputs import Inputs, budgets_line, inputs_line
from fedrec.report.privacy_total import shown_together
from fedrec.runtime.files import write_atomically
from simulations.studies.declaration import Cell, Found, Study, TaskJob

COLUMNS = (
    *("dataset", "model", "metric", "published", "ours", "low", "high", "draws", "difference"),
    *INPUT_COLUMNS,
)
Rows = tuple[str, ...]
_QUICK = (
    "QUICK: simulations ran for two rounds on synthetic data, so their numbers are meaningless;"
    " this only tests that all tasks run."
)


def write(
    study: Study, path: Path, jobs: Iterable[TaskJob], printed: Mapping[Cell, float], *, quick: bool
) -> tuple[pd.DataFrame, list[str]]:
    """Create and write the tables of finished jobs: ITEM.csv and, if rows are compared,
    ITEM-differences.csv.

    Args:
        study: the study.
        path: its folder.
        jobs: jobs of the study.
        printed: the paper's numbers.
        quick: whether it is the small version.

    Returns:
        The paper's and our numbers, see `comparison`; and sentences for a reader: differences of
        compared rows, and notes.
    """
    done = [(job, results) for job in jobs if (results := job.results()) is not None]
    independent = draws((job, results) for job, (results, _) in done)
    table = comparison(printed, (number for _, number in independent), best=study.best)
    count = len({job.seed for job, _ in done})
    compared = differences(study.compared, independent)
    notes = [
        *_difference_lines(compared),
        *([_QUICK] if quick else []),
        *study.differs,
        *_input_notes(number for _, (numbers, _) in done for number in numbers),
        f"Our numbers took {duration(sum(seconds for _, (_, seconds) in done))}, "
        f"{count} seed{'s' if count > 1 else ''}.",
        "95 % intervals: over several folds or seeds (Student's t), otherwise over users.",
        *shown_together(run.parent for run in sorted(path.rglob("run.json"))),
    ]
    write_atomically(path / f"{study.item}.csv", table.to_csv(index=False))
    if study.compared:
        write_atomically(path / f"{study.item}-differences.csv", compared.to_csv(index=False))
    return table, notes


def _difference_lines(compared: pd.DataFrame) -> Iterator[str]:
    for row in compared.to_dict("records"):
        if row["draws"] > 1:
            yield (
                f"{row['rows']}, {row['metric']}: {row['difference']:+.4f} ({row['low']:+.4f} to "
                f"{row['high']:+.4f}), t p = {row['t']:.3f}, Wilcoxon p = {row['wilcoxon']:.3f}, "
                f"{row['draws']} draws"
            )


def draws(done: Iterable[tuple[TaskJob, Sequence[Found]]]) -> list[tuple[int, Found]]:
    """Independent draws of each number: one per fold of a study whose tasks have a key `fold`, else
    one per seed. The folds of one split test different rows, so each counts as a draw, although
    their training rows overlap. Seeds on the same fold share its test rows, and several values of
    one seed share its data and its model: these are averaged first and count once.

    Args:
        done: jobs and their numbers.

    Returns:
        The fold or seed of each draw, which pairs it with the draws of other rows, and the mean of
        its values; without the interval over users if it has several values.
    """
    values: dict[tuple[Cell, int], list[Found]] = {}
    for job, results in done:
        draw = job.task.options.get("fold", job.seed)
        for result in results:
            values.setdefault((result.cell, draw), []).append(result)
    return [(draw, _averaged(group)) for (_, draw), group in values.items()]


def _averaged(group: Sequence[Found]) -> Found:
    if len(group) == 1:
        return group[0]
    mean = float(np.mean([result.value for result in group]))
    inputs = [asdict(stated) for stated in inputs_of(group).values()]
    return replace(group[0], value=mean, low=None, high=None, inputs=next(iter(inputs), None))


def comparison(
    printed: Mapping[Cell, float], results: Iterable[Found], *, best: bool = False
) -> pd.DataFrame:
    """Create a table with one row per number: those of the paper in its order, then additional
    ones.

    Args:
        printed: the paper's numbers.
        results: our numbers, one per draw of a cell, see `draws`.
        best: whether rows are sorted by our results for each metric, best first.

    Returns:
        Columns `COLUMNS`. `low` and `high` bound a 95 % interval: over two or more draws (Student's
        t), or over the users of a single run; NaN if unknown.
    """
    ours: dict[Cell, list[Found]] = {}
    for result in results:
        ours.setdefault(result.cell, []).append(result)
    cells = [*printed, *(cell for cell in ours if cell not in printed)]
    if best:
        cells.sort(key=lambda cell: (cell[2], _loss(ours.get(cell, []))))
    stated = inputs_of(itertools.chain.from_iterable(ours.values()))
    rows = []
    for cell in cells:
        value = printed.get(cell, math.nan)
        mean, low, high = _interval(ours.get(cell, []))
        both = math.isfinite(mean) and math.isfinite(value)
        difference = mean - value if both else math.nan
        numbers = (value, mean, low, high, len(ours.get(cell, [])), difference)
        inputs = stated.get(cell[:2])
        row = dict(zip(COLUMNS, (*cell, *numbers), strict=False))
        rows.append(row | (inputs.cells() if inputs else {}))
    return pd.DataFrame(rows, columns=COLUMNS)


def _input_notes(results: Iterable[Found]) -> list[str]:
    """Sentences on the inputs of rows, client-rounds and numbers of settings tried."""
    stated = inputs_of(results)
    several = len({data for data, _ in stated}) > 1
    named = {": ".join(row) if several else row[1]: inputs for row, inputs in stated.items()}
    return [line for line in (inputs_line(named), budgets_line(named)) if line]


def inputs_of(results: Iterable[Found]) -> dict[tuple[str, str], Inputs]:
    """Inputs of rows that state them, by data set and name; client-rounds are means over seeds."""
    every: dict[tuple[str, str], list[Inputs]] = {}
    for result in results:
        if result.inputs is not None:
            every.setdefault(result.cell[:2], []).append(Inputs.of_table(result.inputs))
    means = {}
    for row, seeds in every.items():
        rounds = [inputs.client_rounds for inputs in seeds if inputs.client_rounds is not None]
        means[row] = replace(seeds[0], client_rounds=round(np.mean(rounds)) if rounds else None)
    return means


def _loss(results: Sequence[Found]) -> float:
    """Mean result with the sign for which smaller is better; infinite without a result."""
    mean = _interval(results)[0]
    if math.isnan(mean):
        return math.inf
    return mean if results[0].lower_is_better else -mean


def differences(compared: Iterable[Rows], results: Iterable[tuple[int, Found]]) -> pd.DataFrame:
    """Test differences of rows of a table, paired by draw.

    Args:
        compared: two rows, second minus first, or four: the second difference minus the first.
        results: numbers with their fold or seed, see `draws`.

    Returns:
        Columns `rows`, `metric`, `difference` (mean over common draws), `low` and `high` (95 %
        interval, Student's t), `t` and `wilcoxon` (p of the paired t-test and of the signed-rank
        test, two-sided; with five draws the latter is at least .0625), `draws`; NaN with fewer than
        two common draws or with values that are not finite.
    """
    values: dict[tuple[str, str], dict[int, float]] = {}
    for draw, result in results:
        values.setdefault((result.model, result.metric), {})[draw] = result.value
    rows = []
    for names in compared:
        for metric in dict.fromkeys(metric for row, metric in values if row == names[0]):
            columns = [values.get((name, metric), {}) for name in names]
            common = [draw for draw in columns[0] if all(draw in column for column in columns)]
            table = np.array([[column[draw] for draw in common] for column in columns])
            before, after = table[:2] if len(names) == 2 else table[1::2] - table[::2]
            rows.append({"rows": " -> ".join(names), "metric": metric, **_tested(before, after)})
    columns = ["rows", "metric", "difference", "low", "high", "t", "wilcoxon", "draws"]
    return pd.DataFrame(rows, columns=columns)


def _tested(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    if not (len(before) and np.isfinite([before, after]).all()):  # epsilons may be infinite
        return {"difference": math.nan, "draws": len(before)}
    gain = after - before
    tested = {"difference": float(gain.mean()), "draws": len(gain)}
    if len(gain) < 2:
        return tested
    if not gain.any():  # SciPy would divide by zero
        return {**tested, "low": 0.0, "high": 0.0, "t": 1.0, "wilcoxon": 1.0}
    from scipy.stats import ttest_rel  # importing it takes 0.7 s, and every run imports this module

    test: Any = ttest_rel(after, before)
    low, high = test.confidence_interval()
    p = {"t": float(test.pvalue), "wilcoxon": wilcoxon(gain)}
    return {**tested, "low": float(low), "high": float(high), **p}


def _interval(results: Sequence[Found]) -> tuple[float, float, float]:
    """Mean and the ends of its interval, clipped to the metric's range, which does not change the
    coverage."""
    if not results:
        return math.nan, math.nan, math.nan
    first = results[0]
    numbers = np.array([result.value for result in results])
    mean = float(numbers.mean())
    low = high = math.nan
    if len(results) == 1:
        low = math.nan if first.low is None else first.low
        high = math.nan if first.high is None else first.high
    elif np.isfinite(numbers).all():
        from scipy.stats import t as student  # as above

        half = student.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / math.sqrt(len(numbers))
        low = mean - float(half)
        high = mean + float(half)
    least = -math.inf if first.least is None else first.least
    most = math.inf if first.most is None else first.most
    return mean, max(low, least), min(high, most)


def cells_of(row: Mapping[Any, Any]) -> list[str]:
    """Format a row: dataset, model, metric, published, ours, interval."""
    span = "" if math.isnan(row["low"]) else f"{row['low']:.4f} to {row['high']:.4f}"
    names = [str(row[name]) for name in ("dataset", "model", "metric")]
    return [*names, _number(row["published"]), _number(row["ours"]), span]


def _number(value: float) -> str:
    """Format a number with four decimals, large integers without; a dash for NaN."""
    if math.isnan(value) or math.isinf(value):
        return "-" if math.isnan(value) else "inf"
    return f"{value:,.0f}" if abs(value) >= 100 and value == round(value) else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
