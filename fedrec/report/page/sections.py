# SPDX-License-Identifier: Apache-2.0
"""The HTML report: charts, tables and notes, its sections, and the templates of pages."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, RunError
from fedrec.evaluation.tables import group_gaps, main_metric
from fedrec.experiment.schema import leak_words, marked
from fedrec.privacy.plan import PrivacyConfig
from fedrec.report.comparison import (
    Run,
    bootstrap_intervals,
    compare,
    epsilon_of,
    is_private,
    named,
    system_rows,
    system_users,
)
from fedrec.report.formats import INTERVAL, comparison_cells, comparison_notes
from fedrec.report.inputs import DIFFERENT, budgets_line, inputs_line, system_inputs
from fedrec.report.privacy_total import shown_together
from fedrec.report.summary import (
    answer_line,
    early_stopping_line,
    interruption_line,
    popularity_notes,
)
from fedrec.runs.folder import Result

if TYPE_CHECKING:
    from jinja2 import Environment

# Charts, tables and notes of a page, and its templates.
#
# Line charts and histograms are inline SVG. They take their colours from the page's style sheet, so
# that they follow dark mode and print, and weigh a few kilobytes; lines are distinguished by dashes
# and labels as well as by colour. Matplotlib's SVG has its colours fixed and is ten times as large.

# ends of the axes, in the units of `chart.html.j2`
_LEFT = 66
_RIGHT = 466
_BOTTOM = 212
_TOP = 14
_POINTS = 200  # points of a line; more are not visible
_TICKS = 5
_BINS = 20


class _Line(NamedTuple):
    """A line of a chart, through `points` with ascending x, all finite."""

    label: str
    points: Sequence[tuple[float, float]]


def _line_chart(lines: Sequence[_Line], title: str, x_label: str, y_label: str) -> str:
    """Render a line chart with a legend below; empty without any point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    every = [point for line in lines for point in line.points]
    xs = _Axis.of([x for x, _ in every], _LEFT, _RIGHT)
    ys = _Axis.of([0.0, *(y for _, y in every)], _BOTTOM, _TOP)
    drawn = []
    ends = []
    for label, points in lines:
        last = len(points) - 1
        shown = np.unique(np.linspace(0, last, min(last + 1, _POINTS)).astype(int)).tolist()
        drawn.append((label, [(xs.at(points[n][0]), ys.at(points[n][1])) for n in shown]))
        ends.append(f"{label}: from {points[0][1]:.4g} to {points[-1][1]:.4g}")
    axes = {"title": title, "x_label": x_label, "y_label": y_label, "xs": xs, "ys": ys}
    return rendered("chart.html.j2", **axes, summary="; ".join(ends), lines=drawn, bars=[])


def _histogram(values: np.ndarray, title: str, x_label: str, colour: int = 0) -> str:
    """Render a histogram of finite users' `values` `float [users]`. Empty without any."""
    if not len(values):
        return ""
    ends = min(0.0, float(values.min())), max(1.0, float(values.max()))
    counts, edges = np.histogram(values, bins=_BINS, range=ends)
    xs = _Axis.of(edges.tolist(), _LEFT, _RIGHT)
    ys = _Axis.of([0, *counts.tolist()], _BOTTOM, _TOP)
    bars = [
        (xs.at(low), ys.at(n), max(0.5, xs.at(high) - xs.at(low) - 1), ys.at(0) - ys.at(n))
        for n, low, high in zip(counts.tolist(), edges[:-1], edges[1:], strict=True)
        if n
    ]
    summary = (
        f"{len(values)} users; mean {values.mean():.4f}, median {np.median(values):.4f},"
        f" {np.mean(values == 0):.0%} at zero"
    )
    axes = {"title": title, "x_label": x_label, "y_label": "users", "xs": xs, "ys": ys}
    return rendered("chart.html.j2", **axes, summary=summary, lines=[], bars=bars, colour=colour)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    stop: float
    least_step: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, stop: float) -> _Axis:
        low = min(values)
        high = max(values)
        high = high if high > low else low + (abs(low) or 1.0)
        least = float(all(float(value).is_integer() for value in values))
        return cls(low, high, start, stop, least)

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels at multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough - 1e-12)
        step = max(step, self.least_step)
        first = math.ceil(self.low / step - 1e-9)
        numbers = range(first, math.floor(self.high / step + 1e-9) + 1)
        return [(self.at(number * step), f"{number * step:.4g}") for number in numbers]


# Parts of a page: tables and notes as plain values for the template.

_RESAMPLES = 2000


@dataclass(frozen=True)
class _Cell:
    """A number and its interval, as texts."""

    value: str
    range: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table; `federated` marks the federated systems."""

    name: str
    cells: tuple[_Cell | str, ...]
    federated: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table with a caption."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]

    def is_text(self, column: int) -> bool:
        """True if a column holds sentences or names, and no numbers; column 0 names the rows."""
        return column == 0 or any(
            isinstance(cell := row.cells[column - 1], str) and cell != "" for row in self.rows
        )


@dataclass(frozen=True)
class Note:
    """A sentence at the top of the page."""

    text: str
    warning: bool = False


def _interval_cells(samples: Sequence[np.ndarray]) -> list[_Cell]:
    """Mean over users of each sample `[users]` and its 95% bootstrap interval; a dash without
    users."""
    samples = [values[np.isfinite(values)] for values in samples]
    filled = [values for values in samples if len(values)]
    intervals = iter(bootstrap_intervals(filled, resamples=_RESAMPLES))
    texts = ("{:.4f} to {:.4f}".format(*ends) for ends in intervals)
    return [
        _Cell(f"{values.mean():.4f}", next(texts)) if len(values) else _Cell("-")
        for values in samples
    ]


def number_cell(value: float | None) -> _Cell:
    """Format a number with four digits; a dash if it is missing."""
    return _Cell(_number(value))


def _number(value: object) -> str:
    """Format a number, also one of JSON, where infinity is a text."""
    if value in ("inf", math.inf):
        return "∞"
    known = isinstance(value, float | int) and not math.isnan(value)
    return f"{value:.4g}" if known else "-"


# The templates of pages, which escape every text.


def rendered(template: str, **values: Any) -> str:
    """Render a template of this folder; missing values are errors."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedrec.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quoted"] = shlex.quote
    return environment


_LINES = 8  # in one chart
_METRICS = 5  # columns of the table of results
_MOST_DISTRIBUTIONS = 8
_MOST_GROUPS = 4
_CURVES = ("hits@10", "ndcg@10", "hits@5", "validation-", "exposure@", "loss", "mae", "rmse")


def _all_notes(runs: Sequence[Run]) -> list[Note]:
    """Notes on total privacy cost, comparison of federated systems with popularity, and
    warnings."""
    total = shown_together([run.result.folder for run in runs])
    every = [Note(line, warning=True) for line in total]
    for run in runs:
        every += _notes(run.label if len(runs) > 1 else run.name, run.result)
    return list(dict.fromkeys(every))


def _notes(label: str, result: Result) -> Iterator[Note]:
    """Notes on one run."""
    inputs = inputs_line(system_inputs(result))
    warnings = [*leak_words(result.experiment), inputs if inputs.startswith(DIFFERENT) else ""]
    yield from (Note(f"{label}: {line}", warning=True) for line in warnings if line)
    if selected := early_stopping_line(result):
        yield Note(f"{label}: {selected}")
    if interruption := interruption_line(result):
        yield Note(f"{label}: {interruption}", warning=True)
    yield from (Note(f"{label}: {line}", warning=True) for line in popularity_notes(result))


def _results_table(run: Run) -> PageTable:
    """Table of a run's systems: metrics with 95% intervals over users, and epsilon."""
    result = run.result
    systems = system_users(result)
    metrics = _shown(systems)
    cells = iter(
        _interval_cells([_values(t, metric) for t in systems.values() for metric in metrics])
    )
    private = {label for label in systems if is_private(result, label)}
    inputs = system_inputs(result)
    rows = tuple(
        Row(
            label if label in private or not private else f"{label} (not private)",
            (*(next(cells) for _ in metrics), *([_epsilon(result, label)] if private else [])),
            federated=label == marked(result.experiment),
        )
        for label in systems
    )
    means = f"{run.label}: means over users, 95% bootstrap intervals below"
    caption = "; ".join(filter(None, [means, inputs_line(inputs), budgets_line(inputs)]))
    return PageTable(caption, ("system", *metrics, *(["epsilon"] if private else [])), rows)


def _lists_tables(runs: Sequence[Run]) -> list[PageTable]:
    """Table per run of metrics of all users' lists, such as coverage, at the main metric's list
    length."""
    tables = []
    for run in runs:
        systems = system_rows(run.result)
        of_users = {str(name) for table in system_users(run.result).values() for name in table}
        length = (main_metric(next(iter(systems.values()), {})) or "").partition("@")[2]
        columns = [
            name
            for name in dict.fromkeys(name for row in systems.values() for name in row)
            if name not in of_users and name.partition("@")[2] in ("", length)
            if not name.endswith("epsilon")
        ]
        federated = marked(run.result.experiment)
        rows = tuple(
            Row(name, tuple(_metric_cells(row, columns)), name == federated)
            for name, row in systems.items()
        )
        caption = f"{run.label}: the lists of all users together"
        tables += [PageTable(caption, ("system", *columns), rows)] if columns else []
    return tables


def _tests_table(results: Sequence[Result]) -> PageTable | None:
    """Table of paired tests of all systems; None if the runs cannot be compared."""
    try:
        comparison = compare(results)
    except ExperimentError:
        return None
    heads, *lines = comparison_cells(comparison)
    below = [n for n, head in enumerate(heads) if head == INTERVAL]
    rows = []
    for cells in lines:
        spans = {n - 1: cells[n].strip("[]").replace(",", " to") for n in below}
        numbers = [_Cell(cell, spans.get(n, "")) for n, cell in enumerate(cells) if n not in below]
        rows.append(Row(cells[0], tuple(numbers[1:])))
    caption = "; ".join(comparison_notes(comparison))
    titles = tuple(head for head in heads if head != INTERVAL)
    return PageTable(caption[:1].upper() + caption[1:], titles, tuple(rows))


def _curves(runs: Sequence[Run]) -> list[str]:
    """Charts of the metrics over the rounds, of runs with three evaluated rounds or more."""
    main = {main_metric(run.result.users) for run in runs}
    columns = dict.fromkeys(str(name) for run in runs for name in run.result.rounds)
    charts = []
    for metric in (name for name in columns if name in main or name.startswith(_CURVES)):
        every = [
            _line(run.label, run.result.rounds, metric)
            for run in runs
            if metric in run.result.rounds
        ]
        lines = [line for line in every if len(line.points) > 2]
        charts += [
            _line_chart(lines[start : start + _LINES], f"{metric} by round", "round", metric)
            for start in range(0, len(lines), _LINES)
        ]
    return charts


def _line(label: str, rounds: pd.DataFrame, metric: str) -> _Line:
    """Line of the finite values of a metric over the rounds."""
    finite = rounds[np.isfinite(rounds[metric].to_numpy(dtype=np.float64))]
    return _Line(label, list(zip(finite["round"], finite[metric], strict=True)))


def distributions(runs: Sequence[Run]) -> list[str]:
    """Distribution of a metric over users, for each run's system and once for popularity."""
    charts: list[str] = []
    for run in runs[:_MOST_DISTRIBUTIONS]:
        metric = main_metric(run.result.users)
        if metric is None:
            continue
        tables = [(run.label, run.result.users)]
        if not charts and "popularity" in run.result.baseline_users:
            tables.append(("popularity", run.result.baseline_users["popularity"]))
        for colour, (label, table) in enumerate(tables):
            title = f"{metric} of single users, {label}"
            charts.append(_histogram(_values(table, metric), title, metric, colour))
    return [chart for chart in charts if chart]


def _groups_table(name: str, means: pd.DataFrame) -> PageTable:
    """Means of a system over groups of users, and their gaps."""
    columns = _shown({"": means.drop(columns="count")})
    rows = [
        Row(name, (_Cell(str(int(row["count"]))), *_metric_cells(row, columns)))
        for name, row in sorted(_records(means), key=lambda record: "=" in record[0])
        if row["count"]
    ]
    rows += [
        Row(f"gap by {name}", ("", *_metric_cells(row, columns)))
        for name, row in _records(group_gaps(means).dropna(how="all"))
    ]
    caption = f"{name}, by groups of users"
    return PageTable(caption, ("group", "users", *columns), tuple(rows))


def _metric_cells(values: Mapping[str, float], columns: Iterable[str]) -> list[_Cell]:
    """Mean of each metric; a dash if it is missing."""
    means = (values.get(column, np.nan) for column in columns)
    return [_Cell("-" if np.isnan(mean) else f"{mean:.4f}") for mean in means]


def _records(table: pd.DataFrame) -> list[tuple[str, dict[str, float]]]:
    """Name and values of each row."""
    return [(str(name), row.to_dict()) for name, row in table.astype(np.float64).iterrows()]


def _shown(systems: dict[str, pd.DataFrame]) -> list[str]:
    names = [str(name) for name in next(iter(systems.values()), pd.DataFrame())]
    first = [name for name in names if name.startswith(("hits@", "ndcg@", "mae", "rmse", "recon"))]
    return (first + [name for name in names if name not in first and name != "rows"])[:_METRICS]


def _values(table: pd.DataFrame, metric: str) -> np.ndarray:
    values = table[metric].to_numpy(dtype=np.float64) if metric in table else np.empty(0)
    return values[np.isfinite(values)]


def _epsilon(result: Result, label: str) -> _Cell:
    value = epsilon_of(result, label)
    return number_cell(math.inf if value is None else value)


_FACTS = {
    "method": "accountant",
    "releases": "releases",
    "charged-again": "charged again",
    "rounds-not-run": "rounds not run",
    "noise": "noise and signal",
}


def _privacy_cards(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Privacy of each run: the `run`, `facts` by name, and a `chart` of epsilon by round, SVG or
    empty."""
    return [
        {"run": run, "facts": _facts(run), "chart": _epsilon_chart(run.result.rounds)}
        for run in runs
    ]


def _epsilon_chart(rounds: pd.DataFrame) -> str:
    if "epsilon" not in rounds or len(rounds) < 2:
        return ""
    line = _line("epsilon", rounds, "epsilon")
    return _line_chart([line], "Epsilon spent by round", "round", "epsilon")


def _facts(run: Run) -> dict[str, str]:
    privacy = run.result.experiment.privacy
    if privacy is None:
        return {"epsilon": "∞: no differential privacy; the model may reveal anything about a user"}
    spent = run.folder.summary().get("privacy", {})
    epsilons = {
        key.removeprefix("epsilon of "): _number(value)
        for key, value in spent.items()
        if key.startswith("epsilon of ")
    }
    facts = {"epsilon": f"{_number(spent.get('epsilon'))} at delta {spent.get('delta', 0):g}"}
    if len(epsilons) > 1:
        facts |= {f"epsilon of phase {phase}": value for phase, value in epsilons.items()}
    facts |= {
        "adjacency": privacy.adjacency,
        "mechanism": f"{privacy.mechanism}, noise added: {privacy.placement}",
        **_clip_norms(privacy, epsilons),
    }
    for key, title in _FACTS.items():
        if value := spent.get(key):
            facts[title] = " ".join(value) if isinstance(value, list) else str(value)
    return facts


def _clip_norms(privacy: PrivacyConfig, phases: Iterable[str]) -> dict[str, str]:
    """Clip norm of each phase."""
    norms = {
        f"clip norm of phase {phase}": f"{privacy.in_phase(phase).clip_norm:g}" for phase in phases
    }
    if len(set(norms.values())) > 1:
        return norms
    return {"clip norm": next(iter(norms.values()), f"{privacy.clip_norm:g}")}


# Self-contained HTML page about runs: no scripts, network or other files.
#
# It is accessible on phones, in print, in dark mode, by keyboard and with screen readers.

_SHOWN_RESULTS = 4  # tables of single runs before the comparison of all
_SHOWN_NOTES = 5  # notes shown above the first section; the others are collapsed


def report(results: Sequence[Result]) -> str:
    """Render a self-contained HTML page about finished runs.

    Args:
        results: results of finished runs.

    Raises:
        RunError: `results` is empty.
    """
    if not results:
        raise RunError("no runs to report", fix="name folders of finished runs")
    import fedrec

    names = list(dict.fromkeys(marked(result.experiment) for result in results))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    count = f"{len(results)} run{'s' if len(results) > 1 else ''}"
    runs = named(results)
    answers = [(run, line) for run in runs if (line := answer_line(run.result))]
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M")
    page = {
        "title": results[0].experiment.title * (len(results) == 1) or shown,
        "subtitle": f"{count}, reported by fedrec {fedrec.__version__} on {stamp}",
        "version": fedrec.__version__,
        # comparisons of each system with popularity and the best baseline
        "answers": [f"{run.label}: {line}" if len(runs) > 1 else line for run, line in answers],
        "notes": _all_notes(runs),
        "runs": runs,
        "results": [_results_table(run) for run in runs],
        "lists": _lists_tables(runs),
        "tests": _tests_table(results),
        "curves": _curves(runs),
        "distributions": distributions(runs),
        "groups": [
            _groups_table(run.label, run.result.groups)
            for run in runs[:_MOST_GROUPS]
            if len(run.result.groups)
        ],
        "central_groups": [
            _groups_table(f"{run.label}: {label}", table)
            for run in runs[:_MOST_GROUPS]
            for label, table in run.result.baseline_groups.items()
            if len(table)
        ],
        "privacy": _privacy_cards(runs),
    }
    return rendered(
        "page.html.j2", page=page, shown_notes=_SHOWN_NOTES, shown_results=_SHOWN_RESULTS
    )
