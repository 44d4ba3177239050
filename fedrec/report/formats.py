# SPDX-License-Identifier: Apache-2.0
"""Formats of a comparison: terminal, CSV, Markdown and LaTeX."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from fedrec.report.comparison import Comparison
from fedrec.report.inputs import budgets_line, inputs_line

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
"""Header of a column with the interval of the previous column."""


def comparison_cells(comparison: Comparison) -> list[list[str]]:
    """Header and rows as texts: the reference, then the other systems, best mean first. The test
    over seeds has a column where there are several seeds."""
    table = comparison.table.sort_values(
        "mean", ascending=comparison.lower_is_better, kind="stable"
    )
    others = [label for label in table.index if label != comparison.reference]
    table = table.loc[[comparison.reference, *others]].reset_index()
    spread = " ± sd over seeds" if table["sd"].notna().any() else ""
    columns = [
        ("system", "{system}"),
        ("private", "{private}"),
        (comparison.metric + spread, "{mean:.4f}{spread}"),
        (INTERVAL, "[{mean_low:.4f}, {mean_high:.4f}]"),
    ]
    tests = [
        ("difference", "{difference:+.4f}"),
        (INTERVAL, "[{low:+.4f}, {high:+.4f}]"),
        ("t, Holm", "{t_holm}"),
        ("Wilcoxon, Holm", "{wilcoxon_holm}"),
        *([("t over seeds, Holm", "{seed_holm}")] if _several_seeds(comparison) else []),
        ("effect d", "{effect:+.2f}"),
        ("better/worse", "{better:.0f}/{worse:.0f}"),
    ]
    rows = []
    for row in table.to_dict(orient="records"):
        texts = {name: _p(row[name]) for name in ("t_holm", "wilcoxon_holm", "seed_holm")}
        texts["private"] = "yes" if row["private"] else "no"
        sd = row["sd"]
        texts["spread"] = "" if pd.isna(sd) else f" ± {sd:.4f} ({row['seeds']:.0f} seeds)"
        forms = [form for _, form in (columns if pd.isna(row["difference"]) else columns + tests)]
        cells = [form.format(**{**row, **texts}) for form in forms]
        if len(forms) == len(columns):
            cells += ["reference", *[""] * (len(tests) - 1)]
        rows.append(cells)
    return [[head for head, _ in columns + tests], *rows]


def comparison_notes(comparison: Comparison) -> list[str]:
    """Explanations to print below the table, one per line."""
    users = int(np.nanmax(comparison.table["users"]))
    lines = [
        f"differences to {comparison.reference}, over {users} users; 95% bootstrap intervals over"
        " users; p-values corrected by Holm"
    ]
    if _several_seeds(comparison):
        seeds = int(np.nanmax(comparison.table["common_seeds"]))
        lines.append(
            f"the test over seeds ({seeds} seeds, {seeds - 1} degrees of freedom) includes how"
            " splits and trainings vary; the others hold for the seeds that were run"
        )
    lines += [inputs_line(comparison.inputs), budgets_line(comparison.inputs)]
    return [line for line in lines if line]


def _several_seeds(comparison: Comparison) -> bool:
    return bool((comparison.table["common_seeds"] > 1).any())


def comparison_text(comparison: Comparison, form: Format) -> str:
    """Format a comparison as text: `csv` with all numbers in full, `markdown` and `latex` for
    people, with the notes as a list and as comments."""
    if form == "csv":
        return csv_text(comparison.table.reset_index())
    heads, *rows = comparison_cells(comparison)
    notes = comparison_notes(comparison)
    if form == "markdown":
        named = [[_markdown(label), *numbers] for label, *numbers in rows]
        lines = [heads, ["---"] * len(heads), *named]
        table = [f"| {' | '.join(line)} |" for line in lines]
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
    """Format a table `[rows, columns]` as CSV, without its index. Texts that spreadsheets would
    read as formulas get a leading apostrophe."""
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
    """Comparison as rich tables, split at `width` characters; each begins with the systems."""
    names, *columns = zip(*comparison_cells(comparison), strict=True)
    groups: list[list[Sequence[str]]] = []
    used = 0
    for column in columns:
        used += _width(column)
        if not groups or used > width:
            groups.append([names])
            used = _width(names) + _width(column)
        groups[-1].append(column)
    return [_table(group) for group in groups]


def _width(column: Sequence[str]) -> int:
    return max(map(len, column)) + _GAP


def _table(columns: Sequence[Sequence[str]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, _GAP, 0, 0))
    for column in columns:
        justify = "left" if column is columns[0] else "right"
        table.add_column(column[0], justify=justify, overflow="fold")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(escape, row))
    return table


def _p(value: float) -> str:
    if pd.isna(value):
        return "-"
    return "< .001" if value < 0.001 else f"{value:.3f}"


def _markdown(text: str) -> str:
    """Escape HTML, links, emphasis and bars in a name of a Markdown table."""
    plain = html.escape(text, quote=False)
    return "".join(f"\\{sign}" if sign in _MARKDOWN else sign for sign in plain)


def _latex_row(cells: Sequence[str]) -> str:
    """Join the cells of a row; a leading star or bracket is protected from the previous row's
    end."""
    row = " & ".join(_latex(cell) for cell in cells)
    return "{}" + row if row.lstrip().startswith(("[", "*")) else row


def _latex(text: str) -> str:
    escaped = "".join(_ESCAPED.get(sign, sign) for sign in text)
    return _SIGNED.sub(r"$\g<0>$", escaped)  # outside of $ a minus is set as a hyphen
