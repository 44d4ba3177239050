# SPDX-License-Identifier: Apache-2.0
"""Fills the pages from `simulations/reproduce/results.json`, after recording there what studies
found.

    FEDREC_DATA=DATA fedrec reproduce privrec table2 --output runs/table2
    python docs/fill_results.py runs/table2      # without folders: only fill the pages

A table stands between markers, with its source below it:

    <!-- results privrec/table2 columns="Hits@5;Hits@10" sort="Hits@10" paper -->
    <!-- end -->

`columns` and `rows` choose by names or patterns such as `PrivRec*`, in their order, `digits` is the
number of decimals (3), `sort` a column, `bare` leaves the intervals out, `paper` adds what the
paper prints, `differences` shows compared rows instead. `tested="ROW;..."` marks rows whose
settings were chosen on rows that the table tests. `pivot` is a regular expression with groups `row`
and `column` for texts `ROW; METRIC`. A single number:

    <!-- r privrec/table2; PrivRec; Hits@10 -->.205<!-- /r -->

With ` ±` before the end it has its interval. In place of the table of a study that is not recorded
stands its command. A number of tests of one kind, counted in their source (`counts`):

    <!-- count faults -->42<!-- /count -->
"""

from __future__ import annotations

import ast
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the results beside these pages, whichever checkout is installed
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from record_results import printed, record, study_of  # noqa: E402

from fedrec.components.registry import KINDS  # noqa: E402
from fedrec.experiment.schema import shipped_experiments  # noqa: E402
from fedrec.report.inputs import budgets_line, inputs_line  # noqa: E402
from simulations.reproduce.recorded import Number, Recorded, command, decimal, recorded, studies  # noqa: E402

_TABLE = re.compile(r"(<!-- results (\S+)(.*?) -->\n).*?(<!-- end -->)", re.S)
_NUMBER = re.compile(r"(<!-- r ([^;]+); (.+?); (.+?)( ±)? -->).*?(<!-- /r -->)")
_COUNT = re.compile(r"(<!-- count ([\w-]+) -->).*?(<!-- /count -->)")
_ORACLES = re.compile(
    r"^ *(?:from|import|\w+ = pytest\.importorskip\(\"|pytest\.importorskip\(\")\W*"
    r"(byzfl|cornac|dp_accounting|implicit|ir_measures|lightfm|opacus|sklearn|surprise"
    r"|torch_geometric)\b",
    re.M,
)
Cell = tuple[float, str]  # number and text
Table = dict[str, dict[str, Cell]]


def pages() -> list[Path]:
    """All that are filled."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, results: Mapping[str, Recorded]) -> str:
    """A page with its tables and numbers as they are recorded.

    Raises:
        LookupError: a study, row or metric is not recorded.
        ExperimentError: there is no such study.
    """

    def table(match: re.Match[str]) -> str:
        return match[1] + _table(match[2], shlex.split(match[3]), results) + match[4]

    def number(match: re.Match[str]) -> str:
        _, name, row, metric, interval, _ = match.groups()
        found = _number(results, name, row, metric)
        return match[1] + found.text(interval=bool(interval)) + match[6]

    text = _NUMBER.sub(number, _TABLE.sub(table, text))
    return _COUNT.sub(lambda match: f"{match[1]}{counts()[match[2]]}{match[3]}", text)


@cache
def counts() -> dict[str, int]:
    """How much verifies fedrec, by kind of test: counted in the source of the tests."""
    tests = {
        str(file.relative_to(ROOT / "tests")): file.read_text(encoding="utf-8")
        for file in sorted((ROOT / "tests").rglob("*.py"))
    }
    contracts = [file.read_text() for file in (ROOT / "simulations" / "contracts").glob("*.py")]
    oracles = {name: set(_ORACLES.findall(text)) for name, text in tests.items()}
    deployed = [text for text in tests.values() if "pytestmark = [pytest.mark.deployment" in text]
    audited = tests["simulations/attacks/test_audit_bounds.py"]
    broken = re.findall(
        r'variant == "([a-z][^"]+)"|"([a-z][^"]+)": (?:NOISE / |\d(?:,|}\.))', audited
    )
    fuzzing = {name: text.count("\n@given(") for name, text in tests.items()}
    fuzz = sum(number for name, number in fuzzing.items() if "test_fuzz" in name)
    return {
        "libraries": len(set().union(*oracles.values())),
        "oracle-files": sum(map(bool, oracles.values())),
        "kinds": len(KINDS),
        "contract-tests": sum(text.count("\n    def test_") for text in contracts),
        "faults": _entries(tests["simulations/test_contracts_can_fail.py"], "FAULTS"),
        "mutants": _entries(tests["strategies/test_cohort_strategies.py"], "MUTANTS"),
        "broken-servers": len(set(broken)),
        "fuzz-tests": fuzz,
        "property-tests": sum(fuzzing.values()) - fuzz,
        "deployment-tests": sum(text.count("\ndef test_") for text in deployed)
        + sum(text.count("\n@pytest.mark.deployment") for text in tests.values()),
        "experiments": len(shipped_experiments()),
        "studies": len(studies()),
        "recorded": len(recorded()),
        "published": len((ROOT / "simulations/reproduce/published.csv").read_text().splitlines())
        - 1,
    }


def _entries(source: str, name: str) -> int:
    """Number of entries of a list or dictionary that a file assigns to a name."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return len(node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts)  # pyright: ignore[reportAttributeAccessIssue]
    raise LookupError(f"no {name}")


def _number(results: Mapping[str, Recorded], name: str, row: str, metric: str) -> Number:
    try:
        return results[name].rows[row][metric]
    except KeyError as missing:
        raise LookupError(f"nothing is recorded of {missing} in {name}; {row}; {metric}") from None


def _table(name: str, options: Sequence[str], results: Mapping[str, Recorded]) -> str:
    """A table between its markers, with its source."""
    if name not in results:
        return f"Not measured with this version: `{command(study_of(name))}`.\n"
    study = results[name]
    given: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        given[key] = value
    digits = int(given.get("digits", 3))
    table: Table = {}
    for (row, column), cell in _cells(study, given, digits).items():
        table.setdefault(row, {})[column] = cell
    rows = _chosen(list(table), given, "rows", name)
    names = list(dict.fromkeys(column for row in rows for column in table[row]))
    columns = _chosen(names, given, "columns", name)
    if "sort" in given:
        rows.sort(key=lambda row: -table[row].get(given["sort"], (-math.inf, ""))[0])
    lines = [[row, *(table[row].get(column, (0, "-"))[1] for column in columns)] for row in rows]
    head = ["", *columns]
    told: list[str] = []
    if "tested" in given:
        told.append("† Settings were chosen on rows of the data of which this table tests some.")
    if study.inputs and not given.keys() & {"pivot", "differences"}:
        inputs = {row: study.inputs[row] for row in rows if row in study.inputs}
        below = [line for line in (inputs_line(inputs), budgets_line(inputs)) if line]
        told += [f"{line[:1].upper()}{line[1:]}." for line in below]
    if "paper" in given:
        theirs = printed(name)
        head.append("paper")
        for line in lines:
            line.append(_paper([theirs.get((line[0], column)) for column in columns], digits))
    marked = _chosen(rows, given, "tested", name) if "tested" in given else []
    for line in lines:
        line[0] += " †" if line[0] in marked else ""
    text = [f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines]]
    paragraphs = [part for one in (*told, _source(study)) for part in ("", one)]
    return "\n".join([*text, *paragraphs]).replace("|  |", "| |") + "\n"


def _source(study: Recorded) -> str:
    """Command, seeds, version, machine and day, for below a table."""
    seeds = f", {study.seeds} seeds" if study.seeds > 1 else ""
    seeds += f", {study.part} tasks so far" if study.part else ""
    commit = study.commit.replace("+", " with changes") or "commit not known"
    version = f"fedrec {study.fedrec} ({commit}), {study.machine}, {study.date}"
    return f"`{study.command}`{seeds}; {version}"


def _cells(study: Recorded, given: Mapping[str, str], digits: int) -> dict[tuple[str, str], Cell]:
    """By row and column."""
    cells: dict[tuple[str, str], Cell] = {}
    if "differences" in given:
        for rows, own in study.differences.items():
            for metric, parts in own.items():
                mean, low, high, p = (decimal(one, digits) for one in parts[:4])
                cells[rows, metric] = (parts[0], f"{mean} ({low} to {high}), p = {p}")
    else:
        for row, numbers in study.rows.items():
            for metric, one in numbers.items():
                text = one.text(digits, interval="bare" not in given)
                cells[row, metric] = (one.mean, text)
    shape = re.compile(given.get("pivot", "(?P<row>.*); (?P<column>.*)"))
    found = {shape.fullmatch("; ".join(names)): cell for names, cell in cells.items()}
    return {(match["row"], match["column"]): cell for match, cell in found.items() if match}


def _paper(values: Sequence[float | None], digits: int) -> str:
    """What the paper prints of a row."""
    if all(value is None for value in values):
        return "-"
    cells = ("-" if value is None else decimal(value, digits) for value in values)
    return f"*{' / '.join(cells)}*"


def _chosen(names: list[str], given: Mapping[str, str], key: str, study: str) -> list[str]:
    """Those of the names that an option asks for, in its order."""
    if key not in given:
        return names
    found: list[str] = []
    for pattern in given[key].split(";"):
        own = [name for name in names if fnmatchcase(name, pattern) and name not in found]
        if not own:
            raise LookupError(f"{study} has no {key} {pattern!r}; it has {', '.join(names)}")
        found += own
    return found


def main() -> None:
    """Record the studies of the folders that are named, then fill all pages."""
    for folder in sys.argv[1:]:
        print("recorded", record(Path(folder)))
    results = recorded()
    for page in pages():
        before = page.read_text(encoding="utf-8")
        try:
            after = filled(before, results)
        except LookupError as error:
            raise SystemExit(f"{page}: {error}") from None
        if after != before:
            page.write_text(after, encoding="utf-8")
            print("filled", page)


if __name__ == "__main__":
    main()
