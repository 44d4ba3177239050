# SPDX-License-Identifier: Apache-2.0
"""Sections of a page: results, privacy and costs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fedrec.errors import ExperimentError
from fedrec.evaluation.tables import group_gaps, main_metric
from fedrec.experiment.schema import leak_words, marked
from fedrec.privacy.config import PrivacyConfig
from fedrec.report.comparison import compare
from fedrec.report.formats import INTERVAL, comparison_cells, comparison_notes
from fedrec.report.inputs import input_codes, system_inputs
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
)
from fedrec.report.privacy_total import shown_together
from fedrec.report.rows import Run, epsilon_of, is_private, system_rows
from fedrec.report.summary import answer_line, early_stopping_line, interruption_line, summary_notes
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.files import read_json

# The parts of a page about settings and results, for all users and for groups.

_LINES = 8  # in one chart
_METRICS = 5  # columns of the table of results
_MOST_DISTRIBUTIONS = 8
_MOST_GROUPS = 4
_BUDGETS = {"client-rounds": "client_rounds", "settings tried": "settings_tried"}
_CURVES = ("hits@10", "ndcg@10", "hits@5", "validation-", "exposure@")
_NOT_CURVES = (
    "round",
    "num-clients",
    "num-examples",
    "bytes-up",
    "bytes-down",
    "epsilon",
    "dropped-replies",
    "bounded-replies",
    "dropped-or-bounded",
    "simulated-seconds",
    "late-clients",
    "late-bytes",
    "staleness",
)
_HOUR = 3600.0


def answers(runs: Sequence[Run]) -> list[str]:
    """What the page opens with: whether each system is better than popularity and the strongest
    baseline."""
    found = ((run, answer_line(run.result)) for run in runs)
    return [f"{run.label}: {line}" if len(runs) > 1 else line for run, line in found if line]


def notes(runs: Sequence[Run]) -> list[Note]:
    """The total privacy cost of the runs, one sentence per federated system about popularity, and
    warnings."""
    several = len(runs) > 1
    said = [note for run in runs for note in _notes(run.label if several else run.name, run.result)]
    together = shown_together([run.result.folder for run in runs])
    return list(dict.fromkeys([*(Note(line, warning=True) for line in together), *said]))


def _notes(label: str, result: Result) -> Iterator[Note]:
    """The notes of one run."""
    name = result.experiment.name
    for line in leak_words(result.experiment):
        yield Note(f"{label}: {line}", warning=True)
    differ = input_codes(system_inputs(result)).warning
    if differ:
        yield Note(f"{label}: {differ}", warning=True)
    kept = early_stopping_line(result)
    if kept:
        yield Note(f"{label}: {kept}")
    interruption = interruption_line(result)
    if interruption:
        yield Note(f"{label}: {interruption}", warning=True)
    for line in summary_notes(result):
        named = line.startswith(name)
        yield Note(label + line.removeprefix(name) if named else line, warning=True)


def what(runs: Sequence[Run]) -> PageTable:
    """The systems and their data."""
    heads = ("run", "title", "data", "split", "model", "strategy", "rounds", "seed", "test users")
    rows = []
    for run in runs:
        result = run.result
        one = run.result.experiment
        federated = one.federated
        rows.append(
            Row(
                run.name,
                (
                    one.title or "-",
                    str(one.dataset.options.get("path") or one.dataset.name).rsplit("/", 1)[-1],
                    one.split.name,
                    one.model.name if federated else "-",
                    one.strategy.name if federated else "centralised alone",
                    Cell(_rounds(result)),
                    Cell(str(one.seed)),
                    Cell(f"{tested(result):,} ({one.evaluation.held_out})"),
                ),
                own=federated,
            )
        )
    return PageTable("Each run", heads, tuple(rows))


def _rounds(result: Result) -> str:
    """Number of rounds, and the best one if its parameters are kept; else the planned number where
    training ended earlier."""
    if result.early_stopping:
        return f"{len(result.rounds)} (best: {result.best_round})"
    return result.rounds_in_words.rpartition(" ")[0]


def tested(result: Result) -> int:
    """Number of users in the final evaluation."""
    return len(result.users)


def results_tables(runs: Sequence[Run]) -> list[PageTable]:
    """A table per run: its systems, metrics with 95% intervals over users, and epsilon."""
    systems = [_systems(run.result) for run in runs]
    samples = [
        _values(table, metric)
        for own in systems
        for table in own.values()
        for metric in _shown(own)
    ]
    cells = iter(interval_cells(samples))
    return [_results_table(*pair, cells) for pair in zip(runs, systems, strict=True)]


def _systems(result: Result) -> dict[str, pd.DataFrame]:
    """Metrics of each user by each system of a run, by label."""
    own = {marked(result.experiment): result.users} if result.experiment.federated else {}
    return {**own, **result.baseline_users}


def _results_table(run: Run, systems: dict[str, pd.DataFrame], cells: Iterator[Cell]) -> PageTable:
    """The table of a run, whose cells come in the order of its rows."""
    result = run.result
    columns = _shown(systems)
    private = {label: is_private(result, label) for label in systems}
    inputs = system_inputs(result)
    codes = input_codes(inputs)
    last: dict[str, dict[str, Cell | str]] = {}
    if any(private.values()):
        last["epsilon"] = {label: _epsilon(result, label) for label in systems}
    last["inputs"] = {label: codes.codes.get(label, "?") for label in systems}
    for head, key in _BUDGETS.items():
        known = {label: getattr(inputs.get(label), key, None) for label in systems}
        if any(known.values()):
            last[head] = {label: Cell(f"{n:,}" if n else "-") for label, n in known.items()}
    rows = tuple(
        Row(
            f"{label} (not private)" if any(private.values()) and not private[label] else label,
            (*(next(cells) for _ in columns), *(column[label] for column in last.values())),
            own=label == marked(result.experiment),
        )
        for label in systems
    )
    caption = f"{run.label}: means over users, 95% bootstrap intervals below"
    said = f"{caption}; {codes.legend}" if codes.legend else caption
    return PageTable(said, ("system", *columns, *last), rows)


def lists_tables(runs: Sequence[Run]) -> list[PageTable]:
    """A table per run: its systems, and the metrics of all users' lists together, such as coverage,
    for lists of the length of the main metric."""
    tables = []
    for _, label, result in runs:
        systems = system_rows(result)
        of_users = {str(name) for table in _systems(result).values() for name in table}
        length = (main_metric(next(iter(systems.values()), {})) or "").partition("@")[2]
        columns = [
            name
            for name in dict.fromkeys(name for row in systems.values() for name in row)
            if name not in of_users and name.partition("@")[2] in ("", length)
            if not name.endswith("epsilon")
        ]
        rows = tuple(
            Row(
                name,
                tuple(metric_cell(row.get(column, np.nan)) for column in columns),
                own=name == marked(result.experiment),
            )
            for name, row in systems.items()
        )
        caption = f"{label}: the lists of all users together"
        tables += [PageTable(caption, ("system", *columns), rows)] if columns else []
    return tables


def tests_table(results: Sequence[Result]) -> PageTable | None:
    """Paired tests of all systems; None where runs cannot be compared."""
    try:
        found = compare(results)
    except ExperimentError:
        return None
    heads, *rows = comparison_cells(found)
    body = tuple(Row(name, tuple(_with_intervals(heads[1:], cells))) for name, *cells in rows)
    heads = [head for head in heads if head != INTERVAL]
    caption = "; ".join(comparison_notes(found))
    return PageTable(caption[:1].upper() + caption[1:], tuple(heads), body)


def _with_intervals(heads: Sequence[str], cells: Sequence[str]) -> Iterator[Cell]:
    """The cells of a row; an interval stands below its number, so that the table fits a page."""
    for place, (head, cell) in enumerate(zip(heads, cells, strict=True)):
        if head != INTERVAL:
            follows = heads[place + 1 : place + 2] == [INTERVAL]
            yield Cell(cell, cells[place + 1].strip("[]").replace(",", " to") if follows else "")


def curves(runs: Sequence[Run]) -> list[str]:
    """Charts of the metrics over the rounds, and over simulated hours, of runs with three evaluated
    rounds or more."""
    named = [(run.label, run.result.rounds) for run in runs if len(run.result.rounds) > 2]
    columns = dict.fromkeys(
        str(name)
        for _, rounds in named
        for name in rounds
        if name not in _NOT_CURVES and len(pd.Series(rounds[name]).dropna()) > 2
    )
    shown = [
        name for name in columns if name in ("loss", "mae", "rmse") or name.startswith(_CURVES)
    ] or list(columns)[:2]
    charts = []
    for metric in shown:
        known = [(label, rounds) for label, rounds in named if metric in rounds]
        timed = [one for one in known if "simulated-seconds" in one[1]]
        by_round = [_line(label, rounds, "round", metric) for label, rounds in known]
        by_hour = [
            _line(label, rounds, "simulated-seconds", metric, unit=_HOUR) for label, rounds in timed
        ]
        charts += [*_charts(by_round, "round", metric), *_charts(by_hour, "simulated hour", metric)]
    return [chart for chart in charts if chart]


def _charts(lines: Sequence[Line], over: str, metric: str) -> Iterator[str]:
    """Charts of a metric, each with a few of the lines."""
    for start in range(0, len(lines), _LINES):
        part = lines[start : start + _LINES]
        yield line_chart(part, title=f"{metric} by {over}", x_label=over, y_label=metric)


def distributions(runs: Sequence[Run]) -> list[str]:
    """Distribution of a metric over users, for each run's system and once for popularity."""
    charts: list[str] = []
    for _, label, result in runs[:_MOST_DISTRIBUTIONS]:
        metric = main_metric(result.users)
        if metric is None:
            continue
        systems = {label: result.users}
        if not charts and "popularity" in result.baseline_users:
            systems["popularity"] = result.baseline_users["popularity"]
        for system, table in systems.items():
            title = f"{metric} of single users, {system}"
            charts.append(
                histogram(
                    _values(table, metric),
                    title=title,
                    x_label=metric,
                    colour=1 if system == "popularity" else 0,
                )
            )
    return [chart for chart in charts if chart]


def groups(runs: Sequence[Run]) -> list[PageTable]:
    """Means over groups of users for each run's federated system, and their gaps."""
    return [
        _groups_table(f"{run.label}, by groups of users", run.result.groups)
        for run in runs[:_MOST_GROUPS]
        if len(run.result.groups)
    ]


def central_groups(runs: Sequence[Run]) -> list[PageTable]:
    """The same for each run's centralised systems."""
    return [
        _groups_table(f"{run.label}: {label}, by groups of users", table)
        for run in runs[:_MOST_GROUPS]
        for label, table in run.result.baseline_groups.items()
        if len(table)
    ]


def _groups_table(caption: str, means: pd.DataFrame) -> PageTable:
    columns = _shown({"": means.drop(columns="count")})
    rows = [
        Row(name, (Cell(str(int(row["count"]))), *(metric_cell(row[c]) for c in columns)))
        for name, row in sorted(_records(means), key=lambda one: "=" in one[0])
        if row["count"]
    ]
    rows += [
        Row(f"gap by {name}", ("", *(metric_cell(row[c]) for c in columns)))
        for name, row in _records(group_gaps(means).dropna(how="all"))
    ]
    return PageTable(caption, ("group", "users", *columns), tuple(rows))


def _records(table: pd.DataFrame) -> list[tuple[str, dict[str, float]]]:
    """Name and values of each row."""
    return [
        (str(name), dict(zip(map(str, table.columns), values, strict=True)))
        for name, values in zip(table.index, table.to_numpy(dtype=np.float64).tolist(), strict=True)
    ]


def _line(label: str, rounds: pd.DataFrame, over: str, metric: str, unit: float = 1.0) -> Line:
    known = rounds[np.isfinite(rounds[metric].to_numpy(dtype=np.float64))]
    return Line(label, (known[over] / unit).tolist(), known[metric].tolist())


def _shown(systems: dict[str, pd.DataFrame]) -> list[str]:
    known = [str(name) for name in next(iter(systems.values()), pd.DataFrame())]
    first = [name for name in known if name.startswith(("hits@", "ndcg@", "mae", "rmse", "recon"))]
    return (first + [name for name in known if name not in first and name != "rows"])[:_METRICS]


def _values(table: pd.DataFrame, metric: str) -> np.ndarray:
    values = table[metric].to_numpy(dtype=np.float64) if metric in table else np.empty(0)
    return values[np.isfinite(values)]


def _epsilon(result: Result, label: str) -> Cell:
    value = epsilon_of(result, label)
    return Cell("∞") if value is None or value == float("inf") else number_cell(value)


RELEASE = "Simulation, not a release: the noise can be recomputed from the seed."
_UNITS = {
    "replace-one": "one user: all of its data, replaced by another user's",
    "add-remove": "one user: all of its data, added or removed",
}
_ATTACKS = {"audit.json": "audit", "attack.json": "attack"}


@dataclass(frozen=True)
class PrivacyCard:
    """The privacy of one run.

    Attributes:
        name: of the run.
        facts: name and value, in order.
        lines: meaning and limits, in sentences.
        chart: epsilon by round, SVG; empty without.
        release: text that must accompany the epsilon; empty if none.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    chart: str = ""
    release: str = ""


def privacy_cards(runs: Sequence[Run]) -> list[PrivacyCard]:
    """A card per run."""
    return [_card(run.label, run.result) for run in runs]


def _card(name: str, result: Result) -> PrivacyCard:
    privacy = result.experiment.privacy
    if privacy is None:
        none = (
            ("epsilon", "∞: no differential privacy; the model may reveal anything about a user"),
        )
        return PrivacyCard(name, (*none, *_attacks(result)), result.privacy)
    kept = RunFolder(result.folder).summary().get("privacy", {})
    epsilons = {
        key.removeprefix("epsilon of "): _number(value)
        for key, value in kept.items()
        if key.startswith("epsilon of ")
    }
    facts = [
        ("epsilon", f"{_number(kept.get('epsilon'))} at delta {kept.get('delta', 0):g}"),
        *([("epsilon by accountant", str(kept["accountants"]))] if "accountants" in kept else []),
        *_by_phase("epsilon", epsilons),
        ("unit", _UNITS.get(privacy.adjacency, privacy.adjacency)),
        ("adjacency", privacy.adjacency),
        ("accountant", str(kept.get("method", privacy.backend))),
        ("mechanism", f"{privacy.mechanism}, noise added: {privacy.placement}"),
        *_clip_norms(privacy, epsilons),
        ("releases", str(kept.get("releases", "-"))),
        *_interruption(kept),
        *_attacks(result),
    ]
    if kept.get("noise"):
        facts.append(("noise and signal", " ".join(kept["noise"])))
    return PrivacyCard(
        name,
        tuple(facts),
        result.privacy,
        _chart(result),
        RELEASE if privacy.mode == "reproducible" else "",
    )


def _interruption(kept: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Charges for repeated rounds, and rounds that the budget left out, where there are any."""
    counts = {key: kept.get(key, 0) for key in ("charged-again", "rounds-not-run")}
    return [(key.replace("-", " "), str(count)) for key, count in counts.items() if count]


def _by_phase(name: str, values: Mapping[str, str]) -> list[tuple[str, str]]:
    """A fact per phase; none for a single phase."""
    several = values if len(values) > 1 else {}
    return [(f"{name} of phase {phase}", value) for phase, value in several.items()]


def _clip_norms(privacy: PrivacyConfig, phases: Iterable[str]) -> list[tuple[str, str]]:
    """The clip norm of each phase, or the only one; with adaptive clipping where it starts."""
    moves = " at first (adaptive)" if privacy.adaptive_clip else ""
    norms = {
        phase: f"{privacy.in_phase(phase).clip_norm:g}{moves}"
        for phase in phases
        if privacy.covers(phase)
    }
    if len(set(norms.values())) > 1:
        return _by_phase("clip norm", norms)
    return [("clip norm", next(iter(norms.values()), f"{privacy.clip_norm:g}{moves}"))]


def _chart(result: Result) -> str:
    rounds = result.rounds
    if "epsilon" not in rounds or len(rounds) < 2:
        return ""
    line = Line("epsilon", rounds["round"].tolist(), rounds["epsilon"].tolist())
    return line_chart([line], title="Epsilon spent by round", x_label="round", y_label="epsilon")


def _attacks(result: Result) -> list[tuple[str, str]]:
    """Results of audits and attacks of this run folder, or a remark that there are none or that a
    file is damaged."""
    found = []
    for file, name in _ATTACKS.items():
        table = _json(result, file)
        if not table and (result.folder / file).exists():
            found.append((name, f"{file} cannot be read"))
        numbers = [
            f"{key} {value:.4g}" for key, value in table.items() if isinstance(value, float | int)
        ]
        if numbers:
            found.append((name, ", ".join(numbers[:6])))
    return found or [("audit", "none was run (fedrec audit, fedrec attack)")]


def _json(result: Result, name: str) -> dict[str, Any]:
    try:
        found = read_json(result.folder / name)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object) -> str:
    if isinstance(value, float | int):
        return f"{value:.4g}"
    return "∞" if value == "inf" else "-"


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
