# SPDX-License-Identifier: Apache-2.0
"""The sections of the HTML report, and the page that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError, RunError
from fedrec.evaluation.tables import group_gaps, main_metric
from fedrec.experiment.schema import leak_words, marked
from fedrec.privacy.plan import PrivacyConfig
from fedrec.report.comparison import compare
from fedrec.report.formats import INTERVAL, comparison_cells, comparison_notes
from fedrec.report.inputs import BUDGETS, DIFFERENT, inputs_line, system_inputs
from fedrec.report.page.charts import (
    Cell,
    Line,
    Note,
    PageTable,
    Row,
    histogram,
    interval_cells,
    line_chart,
    metric_cell,
    number_cell,
    rendered,
)
from fedrec.report.privacy_total import shown_together
from fedrec.report.rows import Run, epsilon_of, is_private, named, system_rows
from fedrec.report.summary import answer_line, early_stopping_line, interruption_line, summary_notes
from fedrec.runs.result import Result
from fedrec.runtime.files import read_json

_LINES = 8  # in one chart
_METRICS = 5  # columns of the table of results
_MOST_DISTRIBUTIONS = 8
_MOST_GROUPS = 4
_CURVES = ("hits@10", "ndcg@10", "hits@5", "validation-", "exposure@", "loss", "mae", "rmse")
_HOUR = 3600.0


def _answers(runs: Sequence[Run]) -> list[str]:
    """First lines of the page: comparisons of each system with popularity and the best baseline."""
    lines = {run.label: answer_line(run.result) for run in runs}
    return [f"{label}: {line}" if len(runs) > 1 else line for label, line in lines.items() if line]


def notes(runs: Sequence[Run]) -> list[Note]:
    """Notes on total privacy cost, comparison of federated systems with popularity, and
    warnings."""
    total = shown_together([run.result.folder for run in runs])
    every = [Note(line, warning=True) for line in total]
    for run in runs:
        every += _notes(run.label if len(runs) > 1 else run.name, run.result)
    return list(dict.fromkeys(every))


def _notes(label: str, result: Result) -> Iterator[Note]:
    """Notes on one run."""
    name = result.experiment.name
    inputs = inputs_line(system_inputs(result))
    warnings = [*leak_words(result.experiment), inputs if inputs.startswith(DIFFERENT) else ""]
    yield from (Note(f"{label}: {line}", warning=True) for line in warnings if line)
    if selected := early_stopping_line(result):
        yield Note(f"{label}: {selected}")
    if interruption := interruption_line(result):
        yield Note(f"{label}: {interruption}", warning=True)
    for line in summary_notes(result):
        text = label + line.removeprefix(name) if line.startswith(name) else line
        yield Note(text, warning=True)


def _results_table(run: Run) -> PageTable:
    """Table of a run's systems: metrics with 95% intervals over users, and epsilon."""
    result = run.result
    systems = _systems(result)
    metrics = _shown(systems)
    cells = iter(
        interval_cells([_values(t, metric) for t in systems.values() for metric in metrics])
    )
    private = {label for label in systems if is_private(result, label)}
    inputs = system_inputs(result)
    columns: dict[str, dict[str, Cell]] = {}
    if private:
        columns["epsilon"] = {label: _epsilon(result, label) for label in systems}
    for title, field in BUDGETS.items():
        numbers = {label: getattr(inputs.get(label), field, None) for label in systems}
        if any(numbers.values()):
            columns[title] = {label: Cell(f"{n:,}" if n else "-") for label, n in numbers.items()}
    rows = tuple(
        Row(
            label if label in private or not private else f"{label} (not private)",
            (*(next(cells) for _ in metrics), *(column[label] for column in columns.values())),
            federated=label == marked(result.experiment),
        )
        for label in systems
    )
    caption = f"{run.label}: means over users, 95% bootstrap intervals below"
    stated = inputs_line(inputs)
    caption += f"; {stated}" if stated else ""
    return PageTable(caption, ("system", *metrics, *columns), rows)


def _systems(result: Result) -> dict[str, pd.DataFrame]:
    """Per-user metrics of each system of a run, by label."""
    federated = {marked(result.experiment): result.users} if result.experiment.federated else {}
    return {**federated, **result.baseline_users}


def _lists_tables(runs: Sequence[Run]) -> list[PageTable]:
    """Table per run of metrics of all users' lists, such as coverage, at the main metric's list
    length."""
    tables = []
    for run in runs:
        systems = system_rows(run.result)
        of_users = {str(name) for table in _systems(run.result).values() for name in table}
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
        numbers = [Cell(cell, spans.get(n, "")) for n, cell in enumerate(cells) if n not in below]
        rows.append(Row(cells[0], tuple(numbers[1:])))
    caption = "; ".join(comparison_notes(comparison))
    titles = tuple(head for head in heads if head != INTERVAL)
    return PageTable(caption[:1].upper() + caption[1:], titles, tuple(rows))


def curves(runs: Sequence[Run]) -> list[str]:
    """Charts of the metrics over the rounds, and over simulated hours, of runs with three evaluated
    rounds or more."""
    tables = {run.label: run.result.rounds for run in runs if len(run.result.rounds) > 2}
    columns = dict.fromkeys(
        str(name)
        for rounds in tables.values()
        for name in rounds
        if len(pd.Series(rounds[name]).dropna()) > 2
    )
    of_users = {str(name) for run in runs for name in run.result.users}
    shown = [name for name in columns if name.startswith(_CURVES)]
    charts = []
    for metric in shown or [name for name in columns if name in of_users][:2]:
        measured = {label: rounds for label, rounds in tables.items() if metric in rounds}
        for column, over, unit in (
            ("round", "round", 1.0),
            ("simulated-seconds", "simulated hour", _HOUR),
        ):
            lines = [
                _line(label, rounds.dropna(subset=metric), column, metric, unit)
                for label, rounds in measured.items()
                if column in rounds
            ]
            charts += [
                line_chart(
                    lines[start : start + _LINES],
                    title=f"{metric} by {over}",
                    x_label=over,
                    y_label=metric,
                )
                for start in range(0, len(lines), _LINES)
            ]
    return [chart for chart in charts if chart]


def _line(label: str, rounds: pd.DataFrame, over: str, metric: str, unit: float = 1.0) -> Line:
    finite = rounds[np.isfinite(rounds[metric].to_numpy(dtype=np.float64))]
    return Line(label, (finite[over] / unit).tolist(), finite[metric].tolist())


def distributions(runs: Sequence[Run]) -> list[str]:
    """Distribution of a metric over users, for each run's system and once for popularity."""
    charts: list[str] = []
    for run in runs[:_MOST_DISTRIBUTIONS]:
        metric = main_metric(run.result.users)
        if metric is None:
            continue
        tables = {run.label: run.result.users}
        baselines = {} if charts else run.result.baseline_users
        tables |= {label: baselines[label] for label in ("popularity",) if label in baselines}
        charts += [
            histogram(
                _values(table, metric),
                title=f"{metric} of single users, {label}",
                x_label=metric,
                colour=int(label == "popularity"),
            )
            for label, table in tables.items()
        ]
    return [chart for chart in charts if chart]


def _groups(runs: Sequence[Run]) -> list[PageTable]:
    """Means over groups of users for each run's federated system, and their gaps."""
    return [
        _groups_table(f"{run.label}, by groups of users", run.result.groups)
        for run in runs[:_MOST_GROUPS]
        if len(run.result.groups)
    ]


def _central_groups(runs: Sequence[Run]) -> list[PageTable]:
    """Means over groups of users for each run's centralised systems."""
    return [
        _groups_table(f"{run.label}: {label}, by groups of users", table)
        for run in runs[:_MOST_GROUPS]
        for label, table in run.result.baseline_groups.items()
        if len(table)
    ]


def _groups_table(caption: str, means: pd.DataFrame) -> PageTable:
    columns = _shown({"": means.drop(columns="count")})
    rows = [
        Row(name, (Cell(str(int(row["count"]))), *_metric_cells(row, columns)))
        for name, row in sorted(_records(means), key=lambda record: "=" in record[0])
        if row["count"]
    ]
    rows += [
        Row(f"gap by {name}", ("", *_metric_cells(row, columns)))
        for name, row in _records(group_gaps(means).dropna(how="all"))
    ]
    return PageTable(caption, ("group", "users", *columns), tuple(rows))


def _metric_cells(values: Mapping[str, float], columns: Iterable[str]) -> list[Cell]:
    return [metric_cell(values.get(column, np.nan)) for column in columns]


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


def _epsilon(result: Result, label: str) -> Cell:
    value = epsilon_of(result, label)
    return Cell("∞") if value is None or value == float("inf") else number_cell(value)


_UNITS = {
    "replace-one": "all data of one user, replaced by another user's",
    "add-remove": "all data of one user, added or removed",
}
_ATTACKS = {"audit.json": "audit", "attack.json": "attack"}
_FACTS = {
    "method": "accountant",
    "releases": "releases",
    "charged-again": "charged again",
    "rounds-not-run": "rounds not run",
    "noise": "noise and signal",
}


def privacy_cards(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Privacy of each run: the `run`, `facts` by name, and a `chart` of epsilon by round, SVG or
    empty."""
    return [
        {
            "run": run,
            "facts": _facts(run) | _attacks(run.result),
            "chart": _epsilon_chart(run.result.rounds),
        }
        for run in runs
    ]


def _epsilon_chart(rounds: pd.DataFrame) -> str:
    if "epsilon" not in rounds or len(rounds) < 2:
        return ""
    line = Line("epsilon", rounds["round"].tolist(), rounds["epsilon"].tolist())
    title = "Epsilon spent by round"
    return line_chart([line], title=title, x_label="round", y_label="epsilon")


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
        "unit": _UNITS.get(privacy.adjacency, privacy.adjacency),
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


def _attacks(result: Result) -> dict[str, str]:
    """Results of audits and attacks in this run folder, or a note that they are missing or
    damaged."""
    facts = {}
    for file, name in _ATTACKS.items():
        if (result.folder / file).exists():
            try:
                table = read_json(result.folder / file).items()
            except (OSError, ValueError, AttributeError):
                facts[name] = f"{file} cannot be read"
                continue
            numbers = [
                f"{key} {value:.4g}" for key, value in table if isinstance(value, float | int)
            ]
            facts |= {name: ", ".join(numbers[:6])} if numbers else {}
    return facts or {"audit": "not run (see fedrec audit, fedrec attack)"}


def _number(value: object) -> str:
    if isinstance(value, float | int):
        return f"{value:.4g}"
    return "∞" if value == "inf" else "-"


# Self-contained HTML page about runs: no scripts, network or other files.
#
# It is accessible on phones, in print, in dark mode, by keyboard and with screen readers.

_SHOWN_RESULTS = 4  # tables of single runs before the comparison of all
_SHOWN_NOTES = 5  # notes shown above the first section; the others are collapsed


def report(results: Sequence[Result], *, title: str | None = None) -> str:
    """Render a self-contained HTML page about finished runs.

    Args:
        results: results of finished runs.
        title: title of the page; default: from the experiments.

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
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M")
    page = {
        "title": title or results[0].experiment.title * (len(results) == 1) or shown,
        "subtitle": f"{count}, reported by fedrec {fedrec.__version__} on {stamp}",
        "version": fedrec.__version__,
        "answers": _answers(runs),
        "notes": notes(runs),
        "runs": runs,
        "results": [_results_table(run) for run in runs],
        "lists": _lists_tables(runs),
        "tests": _tests_table(results),
        "curves": curves(runs),
        "distributions": distributions(runs),
        "groups": _groups(runs),
        "central_groups": _central_groups(runs),
        "privacy": privacy_cards(runs),
    }
    return rendered(
        "page.html.j2", page=page, shown_notes=_SHOWN_NOTES, shown_results=_SHOWN_RESULTS
    )
