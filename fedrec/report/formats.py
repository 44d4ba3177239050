# SPDX-License-Identifier: Apache-2.0
"""A comparison as a table for the terminal, CSV, Markdown and LaTeX."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from fedrec.report.comparison import Comparison
from fedrec.report.inputs import InputCodes, input_codes

if TYPE_CHECKING:
    from rich.table import Table

_GAP = 2  # characters between columns
_SIGNED = re.compile(r"(?<![\w.$])[+-]\d+\.\d+")
_ESCAPED = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "<": "$<$",
    ">": "$>$",
}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of formulas in spreadsheets
_MARKDOWN = set("\\`|*![")
Format = Literal["csv", "markdown", "latex"]
INTERVAL = "95% interval"
"""Head of a column with the interval of the column before it."""
_SEEDS = "t over seeds, Holm"
_ROUNDS = "client-rounds"
_TRIED = "settings tried"
_HEADS = (
    "system",
    "private",
    "inputs",
    "{metric}",
    INTERVAL,
    "difference",
    INTERVAL,
    "t, Holm",
    "Wilcoxon, Holm",
    _SEEDS,
    "effect d",
    "rank effect",
    "better/worse",
    _ROUNDS,
    _TRIED,
)


def comparison_cells(comparison: Comparison) -> list[list[str]]:
    """Heads and rows of texts; the reference first, then the others by their means, best first. The
    test over seeds has a column where there are several seeds; so have client-rounds and the
    numbers of settings that were tried, where a system states them."""
    table: dict[str, dict[str, Any]] = {
        str(row.pop("system")): row
        for row in comparison.table().reset_index().to_dict(orient="records")  # type: ignore[misc]
    }
    sign = 1 if comparison.lower_is_better else -1
    rest = sorted(comparison.tests, key=lambda label: sign * table[label]["mean"])
    spread = any(not pd.isna(row["sd"]) for row in table.values())
    metric = comparison.metric + (" ± sd over seeds" if spread else "")
    heads = [head.format(metric=metric) for head in _HEADS]
    codes = comparison_inputs(comparison).codes
    lines = [heads]
    for label in [comparison.reference, *rest]:
        lines.append(_cells(label, codes[label], table[label]))
    left_out = [] if _several_seeds(comparison) else [heads.index(_SEEDS)]
    for name, none in ((_ROUNDS, "-"), (_TRIED, "?")):
        place = heads.index(name)
        if all(line[place] == none for line in lines[1:]):
            left_out.append(place)
    return [[cell for at, cell in enumerate(line) if at not in left_out] for line in lines]


def comparison_inputs(comparison: Comparison) -> InputCodes:
    """The inputs of the systems in short."""
    return input_codes({label: system.inputs for label, system in comparison.systems.items()})


def _cells(label: str, code: str, row: dict[str, Any]) -> list[str]:
    spread = "" if pd.isna(row["sd"]) else f" ± {row['sd']:.4f} ({row['seeds']:.0f} seeds)"
    first = [
        label,
        "yes" if row["private"] else "no",
        code,
        f"{row['mean']:.4f}{spread}",
        f"[{row['mean_low']:.4f}, {row['mean_high']:.4f}]",
    ]
    last = [_count(row["client_rounds"], "-"), _count(row["settings_tried"], "?")]
    if "difference" not in row or pd.isna(row["difference"]):
        return [*first, "reference", *[""] * 7, *last]
    return [
        *first,
        f"{row['difference']:+.4f}",
        f"[{row['low']:+.4f}, {row['high']:+.4f}]",
        _p(row["t_holm"]),
        _p(row["wilcoxon_holm"]),
        _p(row["seed_holm"]),
        f"{row['effect']:+.2f}",
        f"{row['rank_effect']:+.2f}",
        f"{row['better']:.0f}/{row['worse']:.0f}",
        *last,
    ]


def _count(value: Any, none: str) -> str:
    return none if pd.isna(value) else f"{value:,.0f}"


def comparison_notes(comparison: Comparison) -> list[str]:
    """What the table shows, one line each; to be printed below it."""
    users = max(test.users for test in comparison.tests.values())
    lines = [
        f"differences to {comparison.reference}, over {users} users; 95% bootstrap intervals over"
        " users; p-values corrected by Holm"
    ]
    if _several_seeds(comparison):
        seeds = max(test.common_seeds for test in comparison.seed_tests.values())
        lines.append(
            "t and Wilcoxon are tests over users and hold for the seeds that were run; the test"
            f" over seeds ({seeds} seeds, {seeds - 1} degrees of freedom) counts the mean"
            " difference of each seed once, so that it includes how splits and trainings vary"
        )
    if _apart(comparison):
        lines.append(
            "a difference can differ from that of the printed means: it is the mean over the users"
            " with values of both systems under the same seed, each user once, however many seeds"
            " tested it; a system's mean is that of its seeds' means; both are rounded"
        )
    return lines + comparison_inputs(comparison).lines


def _several_seeds(comparison: Comparison) -> bool:
    return any(test.common_seeds > 1 for test in comparison.seed_tests.values())


def _apart(comparison: Comparison) -> bool:
    """Whether a printed difference is not that of the printed means."""
    means = {
        label: round(float(np.mean(list(system.by_seed.values()))), 4)
        for label, system in comparison.systems.items()
    }
    return any(
        round(means[label] - means[comparison.reference] - round(test.difference, 4), 4) != 0
        for label, test in comparison.tests.items()
    )


def comparison_text(comparison: Comparison, form: Format) -> str:
    """The comparison as text: `csv` with all numbers in full, `markdown` and `latex` for people,
    with the notes as a list and as comments."""
    if form == "csv":
        return csv_text(comparison.table().reset_index())
    heads, *rows = comparison_cells(comparison)
    notes = comparison_notes(comparison)
    if form == "markdown":
        named = [[_markdown(label), *numbers] for label, *numbers in rows]
        lines = [heads, ["---"] * len(heads), *named]
        table = ["| " + " | ".join(cell for cell in line) + " |" for line in lines]
        plain = (html.escape(note, quote=False) for note in notes)
        return "\n".join([*table, "", *(f"- {note}" for note in plain)]) + "\n"
    body = " \\\\\n".join(_latex_row(line) for line in rows)
    head = " & ".join(_latex(cell) for cell in heads)
    columns = "ll" + "r" * (len(heads) - 2)
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head} \\\\\n\\midrule\n{body} \\\\\n"
        "\\bottomrule\n\\end{tabular}\n" + "".join(f"% {note}\n" for note in notes)
    )


def csv_text(table: pd.DataFrame) -> str:
    """A table `[rows, columns]` as CSV, without its index. A text that a spreadsheet would take for
    a formula begins with an apostrophe, which spreadsheets do not show."""
    return table.mask(table.map(_is_formula), "'" + table.astype(str)).to_csv(index=False)


def _is_formula(value: object) -> bool:
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def comparison_terminal(comparison: Comparison, width: int) -> list[Table]:
    """The comparison as a rich table; as several where it is wider than `width` characters, each
    with the systems in front."""
    lines = comparison_cells(comparison)
    widths = [max(map(len, column)) + _GAP for column in zip(*lines, strict=True)]
    parts: list[list[int]] = [[]]
    for place in range(1, len(widths)):
        taken = widths[0] + sum(widths[other] for other in parts[-1])
        if parts[-1] and taken + widths[place] > width:
            parts.append([])
        parts[-1].append(place)
    return [
        _table([[line[0], *(line[place] for place in part)] for line in lines]) for part in parts
    ]


def _table(lines: Sequence[Sequence[str]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, _GAP, 0, 0))
    heads, *rows = lines
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def _p(value: float) -> str:
    if pd.isna(value):
        return "-"
    return "< .001" if value < 0.001 else f"{value:.3f}"


def _markdown(text: str) -> str:
    """A name in a Markdown table, in which HTML, links, emphasis and bars are only text."""
    plain = html.escape(text, quote=False)
    return "".join(f"\\{sign}" if sign in _MARKDOWN else sign for sign in plain)


def _latex_row(cells: Sequence[str]) -> str:
    """The cells of a row; the end of the row before would take a star or bracket for its own."""
    row = " & ".join(_latex(cell) for cell in cells)
    return "{}" + row if row.lstrip().startswith(("[", "*")) else row


def _latex(text: str) -> str:
    escaped = "".join(_ESCAPED.get(sign, sign) for sign in text)
    return _SIGNED.sub(r"$\g<0>$", escaped)  # outside of $ a minus is set as a hyphen
