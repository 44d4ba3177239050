# SPDX-License-Identifier: Apache-2.0
"""The tables of the targeted-privacy grid: means, paired differences and costs, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student

SYSTEMS = ("metamf", "mf")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; infinite for one value."""
    if len(values) < 2:
        return float(np.mean(values)), math.inf
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)), float(student.ppf(0.975, len(values) - 1)) * spread


def summary(records: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """One row per setting without its seed: mean, interval and number of seeds of a metric."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if metric in record["metrics"]:
            key = tuple(
                record["setting"][name] for name in ("system", "epsilon", "budget", "select")
            )
            found.setdefault(key, []).append(record["metrics"][metric])
    rows = []
    for key, values in sorted(found.items()):
        mean, half = interval(values)
        names = dict(zip(("system", "epsilon", "budget", "select"), key, strict=True))
        rows.append(
            {**names, "metric": metric, "mean": mean, "half-width": half, "seeds": len(values)}
        )
    return rows


def differences(records: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Targeted minus random selection, paired by seed: mean, interval and number of seeds."""
    values = {
        tuple(
            record["setting"][name] for name in ("system", "epsilon", "budget", "seed", "select")
        ): record["metrics"]
        for record in records
    }
    found: dict[tuple[Any, ...], list[float]] = {}
    for (*key, seed, select), metrics in values.items():
        other = values.get((*key, seed, "random"))
        if select == "stereotypical" and other is not None and metric in metrics:
            found.setdefault(tuple(key), []).append(metrics[metric] - other[metric])
    rows = []
    for (system, epsilon, budget), gaps in sorted(found.items()):
        mean, half = interval(gaps)
        row = {"system": system, "epsilon": epsilon, "budget": budget, "metric": metric}
        rows.append({**row, "targeted - random": mean, "half-width": half, "seeds": len(gaps)})
    return rows


def losses(records: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """What perturbation costs: a metric minus that of the same system and seed with nothing
    perturbed."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for (system, epsilon, budget, select, _), cost in _costs(records, metric).items():
        found.setdefault((system, epsilon, budget, select), []).append(cost)
    return [
        _row(("system", "epsilon", "budget", "select"), key, metric, "loss", own)
        for key, own in found.items()
    ]


def systems(records: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """What perturbation costs meta matrix factorization minus what it costs matrix factorization,
    paired by seed."""
    costs = _costs(records, metric)
    found = dict[tuple[Any, ...], list[float]]()
    for (system, *where, seed), cost in costs.items():
        other = costs.get(("mf", *where, seed))
        if system == "metamf" and other is not None:
            found.setdefault(tuple(where), []).append(cost - other)
    return [
        _row(("epsilon", "budget", "select"), key, metric, "metamf - mf", own)
        for key, own in found.items()
    ]


def _costs(records: Sequence[dict[str, Any]], metric: str) -> dict[tuple[Any, ...], float]:
    """By system, epsilon, budget, select and seed, in order."""
    names = ("system", "epsilon", "budget", "select", "seed")
    values = {
        tuple(one["setting"][name] for name in names): one["metrics"][metric]
        for one in records
        if metric in one["metrics"]
    }
    costs = {}
    for key, value in sorted(values.items()):
        plain = values.get((key[0], 0.0, 1.0, "all", key[-1]))
        if plain is not None and key[1]:
            costs[key] = value - plain
    return costs


def _row(
    names: Sequence[str], key: Sequence[Any], metric: str, title: str, values: Sequence[float]
) -> dict[str, Any]:
    mean, half = interval(values)
    where = dict(zip(names, key, strict=True))
    return {**where, "metric": metric, title: mean, "half-width": half, "seeds": len(values)}


def tradeoff(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figure 4: of each setting that the attacker and some system have, means over their seeds."""

    def means(metric: str) -> dict[tuple[Any, ...], float]:
        names = ("system", "epsilon", "budget", "select")
        return {tuple(row[name] for name in names): row["mean"] for row in summary(records, metric)}

    success = means("balanced-accuracy")
    errors = means("rmse")
    rows = []
    for (_, *where), value in success.items():
        own = {
            f"rmse of {system}": errors[system, *where]
            for system in SYSTEMS
            if (system, *where) in errors
        }
        if own:
            named = dict(zip(("epsilon", "budget", "select"), where, strict=True))
            blank = {f"rmse of {system}": math.nan for system in SYSTEMS}
            rows.append({**named, "balanced-accuracy": value, **blank, **own})
    return rows


def drawing(rows: Sequence[dict[str, Any]], system: str) -> str:
    """The rows of `tradeoff` as an SVG: the attacker's success from left to right, a system's error
    from top to bottom.

    Down and to the left is better in both.
    """
    points = [(row["balanced-accuracy"], row[f"rmse of {system}"], row) for row in rows]
    points = [point for point in points if math.isfinite(point[1])]
    spans = [
        (min(values), max(values)) for values in zip(*((x, y) for x, y, _ in points), strict=True)
    ]

    def place(value: float, span: tuple[float, float], length: float) -> float:
        return 70 + (value - span[0]) / ((span[1] - span[0]) or 1.0) * length

    shapes = []
    for x, y, row in points:
        across = place(x, spans[0], 480)
        up = 420 - (place(y, spans[1], 300) - 30)
        colour = {"stereotypical": "#b22222", "random": "#1f5fa8"}.get(row["select"], "#222222")
        label = f"{row['epsilon']:g}, {row['budget']:g}" if row["epsilon"] else "nothing"
        shapes.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="5" fill="{colour}"/>')
        shapes.append(f'<text x="{across + 8:.1f}" y="{up + 4:.1f}" fill="{colour}">{label}</text>')
    (left, right), (low, high) = spans
    return "\n".join(
        [
            (
                '<svg xmlns="http://www.w3.org/2000/svg" width="680" height="460"'
                ' font-family="sans-serif" font-size="12">'
            ),
            (
                '<rect width="680" height="460" fill="white"/><path d="M50 20V410H640" fill="none"'
                ' stroke="#888888"/>'
            ),
            f'<text x="60" y="20">RMSE of {system}, {low:.4f} to {high:.4f} (upwards)</text>',
            (
                f'<text x="200" y="435">balanced accuracy of the attacker, {left:.3f} to'
                f" {right:.3f}</text>"
            ),
            (
                '<text x="60" y="455">epsilon, budget; red: stereotypical, blue: random, black: all'
                " or nothing</text>"
            ),
            *shapes,
            "</svg>\n",
        ]
    )
