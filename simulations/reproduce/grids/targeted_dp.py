# SPDX-License-Identifier: Apache-2.0
"""Figures 2 to 4 of the poster "targeted DP": rating errors and attribute inference over the data
budget.

    FEDREC_DATA=DATA python -m simulations.reproduce.grids.targeted_dp FOLDER --seeds 3

For each seed, epsilon, data budget and way to select, it trains federated meta matrix factorization
and federated matrix factorization on the perturbed ratings (MAE and RMSE on real held-out ratings),
and lets a neural attacker infer the users' gender from their perturbed profiles; with `--leaks`
also from the recommendation lists of the trained meta matrix factorization, and from the gradients
that devices would send in one more round. Results are saved in FOLDER/results.json and not computed
again, so an interrupted benchmark continues where it stopped. `accuracy.csv` and `attack.csv` hold
a mean over seeds per setting, with a 95 % interval of Student's t. Paired by seed are
`accuracy-differences.csv` (targeted minus random selection), `accuracy-losses.csv` (what
perturbation costs a system) and `accuracy-systems.csv` (what it costs meta matrix factorization
minus what it costs the other). `tradeoff.csv` and `tradeoff-SYSTEM.svg` are figure 4: errors and
the attacker's success of each setting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulations.reproduce.grids.tables import save_table
from simulations.reproduce.grids.targeted_tables import (
    SYSTEMS,
    differences,
    drawing,
    interval,
    losses,
    summary,
    systems,
    tradeoff,
)

SELECTS = ("stereotypical", "random")

__all__ = ["interval"]
ATTACK = "attack"
LEAKS = ("recommendations", "updates")


@dataclass(frozen=True)
class Setting:
    """One point of a figure.

    Attributes:
        system: that learns from the perturbed data, or the attacker.
        epsilon: nominal epsilon; 0 where nothing is perturbed.
        budget: data budget beta.
        select: `stereotypical`, `random`, or `all` where everything or nothing is protected.
        seed: of the experiment.
    """

    system: str
    epsilon: float
    budget: float
    select: str
    seed: int

    def overrides(self) -> list[str]:
        """As overrides of an experiment."""
        select = "stereotypical" if self.select == "all" else self.select
        epsilon = self.epsilon or 1.0  # of no effect on a profile without protected ratings
        perturb = [
            f"perturb.epsilon={epsilon}",
            f"perturb.budget={self.budget}",
            f"perturb.select={select}",
        ]
        return [*perturb, f"seed={self.seed}"]


def settings(
    systems: Sequence[str], epsilons: Sequence[float], budgets: Sequence[float], seeds: int
) -> Iterable[Setting]:
    """All settings, seed by seed; nothing is selected if everything or nothing is protected."""
    for seed in range(seeds):
        for system in systems:
            yield Setting(system, 0.0, 1.0, "all", seed)
        for budget, epsilon in itertools.product(budgets, epsilons):
            for select in ("all",) if budget == 0 else ("stereotypical", "random"):
                for system in systems:
                    yield Setting(system, epsilon, budget, select, seed)


def train(setting: Setting, overrides: Sequence[str]) -> dict[str, float]:
    """Errors of a system on real held-out ratings."""
    from simulations import runner

    folder = Path(tempfile.mkdtemp(prefix="targeted-dp-"))
    try:
        result = runner.run(
            f"targeted-dp-{setting.system}-ml1m",
            [*setting.overrides(), *overrides],
            output=folder / "run",
        )
        return {name: result.metrics[name] for name in ("mae", "rmse")}
    finally:
        shutil.rmtree(folder)


def train_and_attack(setting: Setting, overrides: Sequence[str]) -> dict[str, float]:
    """Errors as in `train`; for meta matrix factorization also the attacker's success on its lists
    and its clients' gradients."""
    from fedrec.components.registry import PERTURBATION
    from fedrec.experiment.loading import load
    from simulations.attacks.attribute import AttributeOptions, attack_attribute

    if setting.system != "metamf":
        return train(setting, overrides)
    experiment = load("targeted-dp-metamf-ml1m", [*setting.overrides(), *overrides])
    perturbation: Any = experiment.settings(PERTURBATION)
    folder = Path(tempfile.mkdtemp(prefix="targeted-dp-"))
    metrics = {}
    try:
        for source in LEAKS:
            options = AttributeOptions(perturbation.attribute, source=source)
            found = attack_attribute(experiment, options, folder)
            metrics |= {name: found.recommends[name] for name in ("mae", "rmse")}
            metrics[f"{source}-balanced-accuracy"] = found.success.balanced_accuracy.value
            metrics[f"{source}-auc"] = found.success.auc or 0.0
        return metrics
    finally:
        shutil.rmtree(folder)


def attack(setting: Setting, overrides: Sequence[str]) -> dict[str, float]:
    """Success of the neural attacker on perturbed profiles, which do not depend on the system."""
    from fedrec.components.registry import PERTURBATION
    from fedrec.experiment.loading import load
    from simulations.attacks.attribute import AttributeOptions, attack_attribute

    experiment = load("targeted-dp-mf-ml1m", [*setting.overrides(), *overrides])
    found = attack_attribute(
        experiment, AttributeOptions(experiment.settings(PERTURBATION).attribute), Path(".")
    ).success
    return {
        "balanced-accuracy": found.balanced_accuracy.value,
        "accuracy": found.accuracy.value,
        "auc": found.auc or 0.0,
    }


def _work(
    folder: Path,
    wanted: Iterable[Setting],
    run: Callable[[Setting, Sequence[str]], dict[str, float]],
    more: list[str],
) -> None:
    file = folder / "results.json"

    def done() -> list[dict[str, Any]]:
        return json.loads(file.read_text()) if file.exists() else []

    for setting in wanted:
        if any(record["setting"] == asdict(setting) for record in done()):
            continue
        started = time.perf_counter()
        metrics = run(setting, more)
        seconds = round(time.perf_counter() - started, 1)
        records = done()  # read again: another process may have added results meanwhile
        records.append({"setting": asdict(setting), "metrics": metrics, "seconds": seconds})
        file.with_suffix(".new").write_text(json.dumps(records, indent=1) + "\n")
        file.with_suffix(".new").replace(file)
        print(f"{setting} {metrics} {seconds} s", flush=True)


def _write(folder: Path) -> None:
    records = json.loads((folder / "results.json").read_text())
    tables = {"accuracy-losses": losses, "accuracy-systems": systems}
    for name, made in tables.items():
        save_table(
            folder / f"{name}.csv",
            [row for metric in ("rmse", "mae") for row in made(records, metric)],
        )
    joined = tradeoff(records)
    save_table(folder / "tradeoff.csv", joined)
    for system in SYSTEMS:
        if any(math.isfinite(row[f"rmse of {system}"]) for row in joined):
            (folder / f"tradeoff-{system}.svg").write_text(drawing(joined, system))
    leaks = tuple(
        f"{source}-{figure}" for source in LEAKS for figure in ("balanced-accuracy", "auc")
    )
    for name, metrics in (
        ("accuracy", ("rmse", "mae")),
        ("attack", ("balanced-accuracy", "auc", *leaks)),
    ):
        rows = [row for metric in metrics for row in summary(records, metric)]
        gaps = [row for metric in metrics for row in differences(records, metric)]
        for suffix, table in (("", rows), ("-differences", gaps)):
            save_table(folder / f"{name}{suffix}.csv", table)


def main() -> None:
    """Compute the missing results, then write and print all tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.1, 3.0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0, 0.3, 0.7])
    parser.add_argument(
        "--attack-budgets", type=float, nargs="+", default=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9]
    )
    parser.add_argument("--systems", choices=SYSTEMS, nargs="+", default=SYSTEMS)
    parser.add_argument(
        "--selects", choices=("stereotypical", "random"), nargs="+", default=SELECTS
    )
    parser.add_argument("--first-seed", type=int, default=0, help="seeds before it are left out")
    parser.add_argument(
        "--leaks", action="store_true", help="also attack lists and gradients of metamf"
    )
    parser.add_argument("--part", choices=("accuracy", "attack", "all", "tables"), default="all")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()

    def chosen(wanted: Iterable[Setting]) -> Iterable[Setting]:
        return (
            one
            for one in wanted
            if one.select in ("all", *given.selects) and one.seed >= given.first_seed
        )

    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part in ("accuracy", "all"):
        wanted = settings(given.systems, given.epsilons, given.budgets, given.seeds)
        _work(
            given.folder,
            chosen(wanted),
            train_and_attack if given.leaks else train,
            given.overrides,
        )
    if given.part in ("attack", "all"):
        wanted = settings((ATTACK,), given.epsilons, given.attack_budgets, given.seeds)
        _work(given.folder, chosen(wanted), attack, given.overrides)
    _write(given.folder)


if __name__ == "__main__":
    main()
