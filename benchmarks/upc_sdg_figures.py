# SPDX-License-Identifier: Apache-2.0
"""Tables 2 and 3, figures 2 to 4 and utility against linkage out of what `benchmarks/upc_sdg.py`
measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves import Panel, write_panels

METRICS = {"PR": "precision@20", "Recall": "recall@20", "NDCG": "ndcg-list@20"}
DEFINITIONS = ("paper", "released", "cosine")
TABLE_2 = {
    "original": "original",
    "upc-sdg k=0.2 gamma=0.9": "X+",
    "upc-sdg k=0.8 gamma=0.1": "X-",
    "random-replacement k=0.2": "random replacement, k .2",
    "random-replacement k=0.8": "random replacement, k .8",
}
"""What table 2 calls the settings, and their random neighbours."""
ABLATED = {"upc-sdg": "UPC-SDG", "ablation-s": "s", "ablation-r": "r", "ablation-f": "f"}
_NAME = re.compile(r"(?P<method>\S+)(?: (?P<rest>.*))?")

Row = Mapping[str, Any]


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per setting: means over its seeds, and behind `+-` the standard deviation over
    them; a recommender that did not learn from all seeds' tables counts those that it did."""
    groups: dict[str, list[dict[str, float]]] = {}
    for one in records:
        row = {
            f"{model} {key}": v
            for model, values in one["utility"].items()
            for key, v in values.items()
        }
        row |= {key: one[key] for key in ("kept", "linked") if key in one}
        row |= {f"recovered {key}": value for key, value in one.get("recovered", {}).items()}
        row |= {f"frequent {key}": value for key, value in one.get("frequent", {}).items()}
        for values in one.get("figures", {}).get("mean similarity by sensitivity", {}).values():
            row |= {f"similarity, {key}": value for key, value in values.items() if key != "rows"}
        groups.setdefault(one["name"], []).append({"kept": 1.0, "linked": 1.0, **row})
    columns = list(dict.fromkeys(key for rows in groups.values() for row in rows for key in row))
    found = []
    for name, rows in groups.items():
        values = {key: np.array([row[key] for row in rows if key in row], float) for key in columns}
        means = {key: float(v.mean()) if len(v) else np.nan for key, v in values.items()}
        spread = {f"+- {key}": float(v.std(ddof=1)) for key, v in values.items() if len(v) > 1}
        found.append({"setting": name, "seeds": len(rows), **means, **spread})
    return found


def table_2(rows: Iterable[Row], models: Sequence[str]) -> list[str]:
    """PR, Recall and NDCG of each model on X, X+, X- and their random neighbours, as Markdown."""
    by_name = {row["setting"]: row for row in rows}
    lines = ["| table | " + " | ".join(models) + " |", "|" + "---|" * (len(models) + 1)]
    for name, title in TABLE_2.items():
        if name in by_name:
            cells = [
                " / ".join(_told(by_name[name], _key(model, metric)) for metric in METRICS)
                for model in models
            ]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def table_3(rows: Iterable[Row], model: str) -> list[str]:
    """Recall of the whole method and of its ablations at gamma .9, with linkage, as Markdown."""
    found = {
        (method, k): row
        for row, method, k, gamma in _placed(rows)
        if method in ABLATED and gamma == 0.9
    }
    ratios = sorted({k for _, k in found})
    lines = [
        "| | " + " | ".join(f"k {k:g}" for k in ratios) + " |",
        "|" + "---|" * (len(ratios) + 1),
    ]
    for method, title in ABLATED.items():
        cells = [
            (
                f"{_told(found[method, k], _key(model, 'Recall'))}, linked"
                f" {_told(found[method, k], 'linked', 3)}"
                if (method, k) in found
                else "-"
            )
            for k in ratios
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def figure_2(rows: Sequence[Row], model: str) -> list[Panel]:
    """A metric against gamma, a curve for each k, a panel for each metric."""
    levels = {"original": "original"}
    levels |= {f"random, k {k:g}": f"random-replacement k={k:g}" for k in (0.2, 0.8)}
    by_name = {row["setting"]: row for row in rows}
    panels = []
    for metric in METRICS:
        key = _key(model, metric)
        flat = {title: by_name[name][key] for title, name in levels.items() if name in by_name}
        panels.append(Panel(f"{model}: {metric}@20", "gamma", _by_ratio(rows, key), flat))
    return panels


def figure_4(rows: Sequence[Row]) -> list[Panel]:
    """Mean similarity of items and substitutes against gamma, a curve for each k, a panel for each
    definition."""
    by_name = {row["setting"]: row for row in rows}
    random = by_name.get("random-replacement k=0.2", {})
    panels = []
    for definition in DEFINITIONS:
        key = f"similarity, {definition}"
        levels = {"random replacement": random[key]} if np.isfinite(random.get(key, np.nan)) else {}
        panels.append(
            Panel(f"mean similarity ({definition})", "gamma", _by_ratio(rows, key), levels)
        )
    return panels


def linkage(rows: Sequence[Row], columns: Mapping[str, str]) -> list[Panel]:
    """Utility against the share of users who are linked, a curve per method: up and to the left is
    better.

    Args:
        rows: see `summary`.
        columns: what is drawn upwards, by the title of its panel.
    """
    panels = []
    for title, column in columns.items():
        curves: dict[str, list[tuple]] = {}
        levels = {}
        for row in rows:
            method, rest = _NAME.fullmatch(row["setting"]).group("method", "rest")
            if not np.isfinite(row.get(column, np.nan)):
                continue
            if method == "original":
                levels["original"] = row[column]
                continue
            *strength, last = rest.split()
            name = f"{method} {last}" if strength else method
            curves.setdefault(name, []).append(
                (row["linked"], row[column], " ".join(strength) or last)
            )
        panels.append(Panel(title, "share of users linked", curves, levels))
    return panels


def write(folder: Path, rows: Sequence[Row], models: Sequence[str]) -> None:
    """All drawings and tables of what has been measured; what has not is left out."""
    if any(_key("bprmf", "Recall") in row for row in rows):
        _draw(folder, rows, models)
    lines = [*table_2(rows, models), "", *table_3(rows, "bprmf"), ""]
    (folder / "tables.md").write_text("\n".join(lines))
    print("\n" + "\n".join(lines))


def _draw(folder: Path, rows: Sequence[Row], models: Sequence[str]) -> None:
    if any(gamma is not None for _, _, _, gamma in _placed(rows)):
        write_panels(folder / "figure-2.svg", figure_2(rows, "bprmf"))
        write_panels(folder / "figure-4.svg", figure_4(rows))
    columns = {"bprmf: Recall@20": "bprmf both Recall"}
    if "ease" in models:
        columns |= {
            "ease: Recall@20": "ease both Recall",
            "ease, real rows on the device": "ease-device real Recall",
        }
    drawn = [row for row in rows if not _inner(row["setting"])]
    write_panels(folder / "utility-linkage.svg", linkage(drawn, columns))


def _inner(name: str) -> bool:
    """Gammas between the least and the largest, whose curves would lie between theirs."""
    return name.startswith("upc-") and not name.endswith(("gamma=0.1", "gamma=0.9"))


def _placed(rows: Iterable[Row]) -> list[tuple[Row, str, float, float | None]]:
    """Row, method, k and gamma of the settings that have a k."""
    found = []
    for row in rows:
        method, _, rest = row["setting"].partition(" ")
        values = dict(part.split("=") for part in rest.split())
        if "k" in values:
            found.append(
                (
                    row,
                    method,
                    float(values["k"]),
                    float(values["gamma"]) if "gamma" in values else None,
                )
            )
    return found


def _by_ratio(rows: Sequence[Row], key: str) -> dict[str, list[tuple[float, float]]]:
    """A column of UPC-SDG's rows against gamma, a curve for each k."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row, method, k, gamma in sorted(_placed(rows), key=lambda one: one[2]):
        if method == "upc-sdg" and gamma is not None and np.isfinite(row.get(key, np.nan)):
            curves.setdefault(f"k {k:g}", []).append((gamma, row[key]))
    return curves


def _key(model: str, metric: str) -> str:
    return f"{model} {'real' if model.endswith('-device') else 'both'} {metric}"


def _told(row: Row, key: str, digits: int = 4) -> str:
    """A mean, with its standard deviation where there are several seeds; without the zero before
    the point."""
    if not np.isfinite(row.get(key, np.nan)):
        return "-"
    spread = row.get(f"+- {key}")
    shown = f"{row[key]:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")
    return re.sub(r"\b0\.", ".", shown)
