# SPDX-License-Identifier: Apache-2.0
"""Figures 1 to 3 of PNBM as tables and drawings, with the true epsilon beside the nominal one.

    FEDREC_DATA=DATA python benchmarks/pnbm.py FOLDER

First settings are chosen for each system and epsilon on validation rows of fold 1 (`chosen.json`),
as the paper searches them for each epsilon, then every system is tested on the five folds that
MovieLens-100K ships, seed by seed (`results.json`). Both files grow as work is done, and work that
is in them is not done again. At the end come the tables `figure-1.csv` to `figure-3.csv`, their
drawings, and `audit.csv`: what two data sets that differ in one rating show of the epsilon of
algorithm 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves import Panel, write_panels
from benchmarks.tables import save_table
from fedrec.errors import ExperimentError

FOLDS = range(1, 6)
SHARE = 0.1
SCREEN = 1  # the fold whose validation rows settings are chosen on
UNTRAINED = "pnbm-untrained"
"""Similarities as DPSGD-PNBM and DPPS-PNBM begin with them; nothing is learned."""
FIXED = ("item-mean", "pcc", "cos", "pnbm", UNTRAINED, "biased-mf")
COMPARED = ("item-mean", "pcc", "cos", UNTRAINED, "biased-mf")
BY_RATING = ("dpsgd-pnbm", "dpsgd-mf")
BY_USER = ("dpps-pnbm", "dpps-mf", "dp-item-mean", "pnbm-sound")
FIGURES = {
    1: (*BY_RATING, *COMPARED),
    2: (*BY_USER, *COMPARED),
    3: ("dpsgd-pnbm", "dpps-pnbm", UNTRAINED),
}
GRIDS: dict[str, dict[str, list[Any]]] = {
    "item-mean": {},
    "pcc": {"positive-only": [False, True], "shrinkage": [0.0, 40.0], "neighbours": [900]},
    "cos": {"among": ["co-raters", "all"], "shrinkage": [0.0, 40.0], "neighbours": [900]},
    UNTRAINED: {"start": ["uniform", "constant"], "epochs": [0]},
    "biased-mf": {"regularisation": [0.08, 0.1, 0.13]},
    "pnbm": {"learning-rate": [0.4], "epochs": [5, 10], "prior": [0.0, 5.0]},
    "dpsgd-pnbm": {
        "start": ["uniform", "constant"],
        "sample": [1.0, 0.05],
        "iterations": [1, 10],
        "learning-rate": [0.4],
        "rescale": [10.0],
        "floor": [15.0],
    },
    "dpps-pnbm": {
        "start": ["uniform", "constant"],
        "learning-rate": [8e-6],
        "temperature": [0.001, 0.09],
        "steps": [30],
    },
    "dpsgd-mf": {
        "learning-rate": [8e-3],
        "epochs": [5],
        "average-share": [0.5, 0.9],
        "damping": [5.0, 50.0, 500.0],
    },
    "dpps-mf": {
        "factors": [5, 10],
        "learning-rate": [8e-6, 10.0],
        "temperature": [1e-4],
        "steps": [300],
        "own-regularisation": [10.0, 20.0, 40.0],
    },
    "dp-item-mean": {
        "clip-norm": [1.5, 3.0, 6.0],
        "damping": [10.0, 50.0, 250.0, 1250.0],
        "user-damping": [5.0],
    },
    "pnbm-sound": {
        "items": [400],
        "rank": [1],
        "server-lr": [30.0, 300.0],
        "means-share": [3.0],
        "similarity-clip-norm": [0.1, 0.3],
        "rounds": [2, 4],
        "prior": [5.0],
    },
}


def split(fold: int, validation: float) -> dict[str, Any]:
    """The shipped fold."""
    from fedrec.data.reader import data_directory

    folder = str(data_directory() / "ml-100k")
    return {
        "name": "kfold",
        "shipped": True,
        "folder": folder,
        "fold": fold,
        "validation": validation,
    }


def measured(
    system: str, settings: Mapping[str, Any], epsilon: float, fold: int, seed: int, part: str
) -> dict[str, float]:
    """Errors of a system on the validation or test rows of a fold, and its epsilons."""
    if system == "pnbm-sound":
        return federated(settings, epsilon, fold, seed, part)
    from fedrec.evaluation.central import evaluate_baselines

    options = dict(settings)
    if epsilon:
        options["epsilon"] = epsilon
    if system not in ("item-mean", "pcc", "cos"):
        options["seed"] = seed
    name = "pnbm" if system == UNTRAINED else system
    found = evaluate_baselines({name: options}, _population(fold, part), held_out=part)[name]
    return {key: float(value) for key, value in found.items()}


def federated(
    settings: Mapping[str, Any], epsilon: float, fold: int, seed: int, part: str
) -> dict[str, float]:
    """The same of the federated system: means and similarities under one budget."""
    from simulations import runner

    folder = Path(tempfile.mkdtemp(prefix="pnbm-"))
    own = [
        f"privacy.epsilon={epsilon}",
        f"privacy.clip-norm={settings['similarity-clip-norm']}",
        f"privacy.phases.means.noise-factor={1 / settings['means-share']}",
        f"privacy.phases.means.clip-norm={settings['clip-norm']}",
        f"strategy.damping={settings['damping']}",
        f"strategy.main.server-lr={settings['server-lr']}",
        f"model.items={settings['items']}",
        f"model.rank={settings['rank']}",
        f"model.prior={settings['prior']}",
        f"rounds={settings['rounds']}",
        f"seed={seed}",
        f"evaluation.held-out={part}",
        "evaluation.baselines=[]",
    ]
    place = split(fold, SHARE if part == "validation" else 0.0)
    own += [f"split.{key}={json.dumps(value)}" for key, value in place.items() if key != "name"]
    try:
        result = runner.run("pnbm-sound-ml100k", own, output=folder / "run")
        spent = float(result.rounds["epsilon"].iloc[-1])
        return {
            "rmse": result.metrics["rmse"],
            "mae": result.metrics["mae"],
            "nominal-epsilon": epsilon,
            "epsilon": spent,
        }
    finally:
        shutil.rmtree(folder)


_POPULATIONS: dict[tuple[int, str], Any] = {}


def _population(fold: int, part: str) -> Any:
    from fedrec.data.population import Population
    from fedrec.experiment.loading import load

    key = (fold, part)
    if key not in _POPULATIONS:
        place = split(fold, SHARE if part == "validation" else 0.0)
        table = {
            "name": "pnbm",
            "rounds": 1,
            "task": "rating",
            "dataset": {"name": "ml-100k"},
            "split": place,
        }
        _POPULATIONS[key] = Population.of(load(table))
    return _POPULATIONS[key]


def work_list(
    epsilons: Sequence[float], seeds: int, systems: Sequence[str]
) -> list[tuple[str, float, int, int]]:
    """System, epsilon, fold and seed of everything that is tested, the first seed of all before the
    second of any."""
    jobs = []
    for seed, system in itertools.product(range(seeds), systems):
        if system in ("item-mean", "pcc", "cos") and seed:
            continue  # they draw nothing
        for epsilon in [0.0] if system in FIXED else epsilons:
            jobs += [(system, epsilon, fold, seed) for fold in FOLDS]
    return jobs


def choose(folder: Path, system: str, epsilon: float) -> dict[str, Any]:
    """The settings of least validation error, found once."""
    file = folder / "chosen.json"
    key = f"{system} {epsilon:g}"
    known = _read(file, {})
    if key in known:
        return known[key]["settings"]
    more: dict[str, Any] = {}
    if system == "pnbm-sound":  # the first round is the release that dp-item-mean makes
        means = choose(folder, "dp-item-mean", epsilon)
        more = {"clip-norm": means["clip-norm"], "damping": means["damping"]}
    grid = GRIDS[system]
    tried = []
    for values in itertools.product(*grid.values()):
        settings = {**dict(zip(grid, values, strict=True)), **more}
        try:
            error = measured(system, settings, epsilon, SCREEN, 1000, "validation")["rmse"]
        except ExperimentError:  # it diverged
            error = math.inf
        tried.append((error, settings))
        print(f"validation: {key} {settings} {tried[-1][0]:.4f}", flush=True)
    error, best = min(tried, key=lambda one: one[0])
    _write(file, {**_read(file, {}), key: {"rmse": error, "settings": best, "tried": len(tried)}})
    return best


def test(folder: Path, jobs: Iterable[tuple[str, float, int, int]]) -> None:
    """Test what is not in `results.json` yet."""
    file = folder / "results.json"
    for system, epsilon, fold, seed in jobs:
        setting = {"system": system, "epsilon": epsilon, "fold": fold, "seed": seed}
        if any(record["setting"] == setting for record in _read(file, [])):
            continue
        settings = choose(folder, system, epsilon)
        started = time.perf_counter()
        metrics = measured(system, settings, epsilon, fold, seed, "test")
        seconds = round(time.perf_counter() - started, 2)
        records = [*_read(file, []), {"setting": setting, "metrics": metrics, "seconds": seconds}]
        _write(file, records)
        print(f"{setting} {metrics} {seconds} s", flush=True)


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per system and epsilon: both epsilons, mean RMSE, and the spread over seeds of
    five-fold means."""
    found: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for record in records:
        found.setdefault((record["setting"]["system"], record["setting"]["epsilon"]), []).append(
            record
        )
    rows = []
    for (system, epsilon), own in found.items():
        by_seed: dict[int, list[float]] = {}
        for one in own:
            by_seed.setdefault(one["setting"]["seed"], []).append(one["metrics"]["rmse"])
        means = [float(np.mean(values)) for values in by_seed.values() if len(values) == len(FOLDS)]
        if not means:
            continue
        rows.append(
            {
                "system": system,
                "nominal epsilon": epsilon or "",
                "true epsilon": own[0]["metrics"].get("epsilon", ""),
                "rmse": float(np.mean(means)),
                "spread over seeds": float(np.std(means, ddof=1)) if len(means) > 1 else "",
                "seeds": len(means),
            }
        )
    return sorted(rows, key=lambda row: (row["system"], row["nominal epsilon"] or 0))


def panel(rows: Sequence[Mapping[str, Any]], title: str) -> Panel:
    """RMSE over nominal epsilon; dashed lines for what has none, the edge for what is above 1.3."""
    lines: dict[str, list[tuple[float, float]]] = {}
    levels: dict[str, float] = {}
    for row in rows:
        if row["nominal epsilon"]:
            lines.setdefault(row["system"], []).append((row["nominal epsilon"], row["rmse"]))
        else:
            levels[row["system"]] = row["rmse"]
    return Panel(f"{title}: RMSE", "nominal epsilon", lines, levels, logarithmic=True, most=1.3)


def audit(folder: Path) -> None:
    """What one rating of a user with n shows of algorithm 1, at the floor of its denominators."""
    from fedrec.attacks.audit.one_rating import audit_one_rating
    from fedrec.baselines.private.dpsgd_pnbm import DpsgdPnbmConfig

    rows = []
    for ratings, epsilon in itertools.product((30, 100, 200), (0.1, 0.5, 1.0)):
        config = DpsgdPnbmConfig(
            epsilon=epsilon, iterations=1, start="constant", rescale=0.05, learning_rate=0.1
        )
        found = audit_one_rating(config, ratings, 1000)
        rows.append(
            {
                "ratings": ratings,
                "nominal epsilon": epsilon,
                "epsilon at least": round(found.epsilon, 3),
            }
        )
    save_table(folder / "audit.csv", rows)


def tables(folder: Path) -> None:
    """Write tables and drawings of what has been tested."""
    rows = rows_of(_read(folder / "results.json", []))
    save_table(folder / "all.csv", rows)
    for figure, systems in FIGURES.items():
        own = [row for row in rows if row["system"] in systems]
        if any(row["nominal epsilon"] for row in own):
            save_table(folder / f"figure-{figure}.csv", own)
            write_panels(
                folder / f"figure-{figure}.svg", [panel(own, f"figure {figure}, MovieLens-100K")]
            )


def _read(file: Path, empty: Any) -> Any:
    return json.loads(file.read_text()) if file.exists() else empty


def _write(file: Path, value: Any) -> None:
    file.with_suffix(".new").write_text(json.dumps(value, indent=1) + "\n")
    file.with_suffix(".new").replace(file)


def main() -> None:
    """Run the missing parts, then write and print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=[0.1, 0.5, 1.0, 5.0, 10.0, 20.0]
    )
    parser.add_argument("--systems", nargs="+", choices=tuple(GRIDS), default=tuple(GRIDS))
    parser.add_argument("--part", choices=("accuracy", "audit", "tables", "all"), default="all")
    given = parser.parse_args()
    logging.getLogger("fedrec").setLevel(logging.ERROR)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part in ("accuracy", "all"):
        test(given.folder, work_list(given.epsilons, given.seeds, given.systems))
    if given.part in ("audit", "all"):
        audit(given.folder)
    tables(given.folder)


if __name__ == "__main__":
    main()
