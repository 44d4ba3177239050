# SPDX-License-Identifier: Apache-2.0
"""The tables of the DP-VAE grid: means over seeds, and paired comparisons of its cells."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_rel, wilcoxon

from fedrec.metrics.reconstruction import PREFIX

# Table 11's SVD has 100 factors (table 4) and, as in common toolkits, biases; MF is not specified.
FACTORS = {
    "SVD": "model={name='mf', factors=100}",
    "MF": "model={name='mf', factors=20, biases=false}",
}
BUDGETS = (0.3, 0.5, 1.0, 1.5)
MEASURES = ("ndcg-list@100", "recall@20", "recall@50")
# over the best list of 100, whatever the history's length (paper, section 4.1)
OF_ALL = f"{PREFIX}ndcg@100-of-100"
WHOLE_MEASURES = tuple(
    f"{PREFIX}{name}" for name in ("ndcg@100", "ndcg@100-of-100", "recall@20", "recall@50")
)


def tables(file: Path) -> None:
    """Means and standard deviations over seeds, and paired tests of what the paper compares."""
    known = json.loads(file.read_text())
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, found in known.items():
        groups.setdefault(key.rpartition(" / ")[0], []).append(found)
    print("Mean ± standard deviation over seeds:\n")
    for name, runs in groups.items():
        if not name.startswith("whole / "):
            print(f"| {name} | {len(runs)} | {_row(_of(runs, 'metrics'))} |", _spent(runs))
        for baseline in runs[0].get("baselines", {}):
            print(
                f"| {baseline} beside it | {len(runs)} |"
                f" {_row([one['baselines'][baseline] for one in runs])} |"
            )
    print("\nWhole histories, most of which the models were given:\n")
    for name, runs in groups.items():
        if _of(runs, "whole"):
            print(f"| {name} | {len(runs)} | {_row(_of(runs, 'whole'), WHOLE_MEASURES)} |")
    print()
    for one, other in comparisons():
        for measure in MEASURES:
            print(
                f"{one} -> {other}, {measure}:"
                f" {paired(known, one, other, measure) or 'too few runs'}"
            )


def comparisons() -> list[tuple[str, str]]:
    """The paper's comparisons, and those of its budgets: group and cell, and the cells that may be
    better."""
    found = [
        ("federated / VAE", "federated / VAE, priors"),
        ("federated / VAE", "federated / VAE, no divergence"),
    ]
    found += [("federated / VAE, no divergence", "federated / VAE, priors")]
    found += [
        ("parts / constant", f"parts / {cell}")
        for cell in ("constant, priors", "optimal", "optimal, priors")
    ]
    for name in (*FACTORS, "AE"):
        constant, optimal, start = (
            f"table 11 / {name}, {how}" for how in ("constant", "optimal", "fresh")
        )
        found += [(constant, optimal), (start, constant), (start, optimal)]
    fresh = "budgets / fresh parameters"
    (least, *_, most) = BUDGETS
    for mode in ("sound", "paper", "paper, tamed"):
        found += [(fresh, f"budgets / {mode}, up to {epsilon}") for epsilon in BUDGETS]
        found += [(f"budgets / {mode}, up to {least}", f"budgets / {mode}, up to {most}")]
    return found


@dataclass(frozen=True)
class Paired:
    """Two cells, seed by seed.

    Attributes:
        gain: mean of the differences.
        interval: 95 % interval of it, by Student's t.
        student: p of the paired t-test, two-sided.
        wilcoxon: p of the signed-rank test, two-sided; with five seeds it is .0625 at least.
        seeds: number of seeds that both have.
    """

    gain: float
    interval: tuple[float, float]
    student: float
    wilcoxon: float
    seeds: int

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.gain:+.4f}, 95% interval {low:+.4f} to {high:+.4f}, paired t p ="
            f" {self.student:.3f}, Wilcoxon p = {self.wilcoxon:.3f}, {self.seeds} seeds"
        )


def paired(known: dict[str, Any], one: str, other: str, measure: str) -> Paired | None:
    """The gain from one cell to another; None with fewer than two seeds in which neither
    diverged."""
    seeds = [key.rpartition(" / ")[2] for key in known if key.rpartition(" / ")[0] == one]
    both = [(known[f"{one} / {seed}"], known.get(f"{other} / {seed}", {})) for seed in seeds]
    finished = [pair for pair in both if all("metrics" in run for run in pair)]
    values = np.array([[run["metrics"][measure] for run in pair] for pair in finished])
    if len(values) < 2:
        return None
    gain = values[:, 1] - values[:, 0]
    test: Any = ttest_rel(values[:, 1], values[:, 0])
    low, high = test.confidence_interval()
    signed: Any = wilcoxon(gain)
    return Paired(
        float(gain.mean()),
        (float(low), float(high)),
        float(test.pvalue),
        float(signed.pvalue),
        len(gain),
    )


def _of(runs: list[dict[str, Any]], kind: str) -> list[dict[str, float]]:
    return [one[kind] for one in runs if kind in one]


def _row(found: list[dict[str, float]], measures: tuple[str, ...] = MEASURES) -> str:
    if not found:
        return "diverged"
    known = [name for name in measures if all(name in one for one in found)]
    means = {name: np.array([one[name] for one in found]) for name in known}
    return " | ".join(f"{name} {_spread(values)}" for name, values in means.items())


def _spread(values: np.ndarray) -> str:
    """Mean and standard deviation; of a single value the mean only."""
    return f"{values.mean():.4f}" + (f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else "")


def _spent(runs: list[dict[str, Any]]) -> str:
    ended = [one["diverged in round"] for one in runs if "diverged in round" in one]
    parts = [f"diverged in rounds {', '.join(map(str, ended))}"] if ended else []
    users = [one["users"] for one in runs if "users" in one]
    for kind, word in (("nominal", "asked"), ("replace-one", "true")) if users else ():
        means = [
            np.mean([float(one[kind][place]) for one in users]) for place in ("p10", "p50", "p90")
        ]
        parts.append(f"{word} {', '.join(f'{mean:.3g}' for mean in means)}")
    if users:
        parts.append(f"(10, 50, 90 per cent of users, mean of {len(users)} seeds)")
    return "; ".join(parts)
