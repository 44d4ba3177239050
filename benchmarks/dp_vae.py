# SPDX-License-Identifier: Apache-2.0
"""The figures of `docs/papers/dp-vae.md`: a grid of runs on MovieLens-100K, one JSON file, and its tables.

    python -m benchmarks.dp_vae run FILE.json [--only GROUP]... [--cell CELL]... [--seeds 0 1 2 3 4]
    python -m benchmarks.dp_vae tables FILE.json

What is in the file is not run again, so that a broken grid goes on where it stopped. Runs go into a temporary folder
and are thrown away; what is kept of each is its figures, the users' true epsilons, and where it diverged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_rel, wilcoxon

from clients.evaluation import evaluate_clients, mean_metrics
from clients.hosting import Node
from fedrec.baselines.evaluate import evaluate_baselines
from fedrec.data.kept import KEPT
from fedrec.errors import ClientError
from fedrec.experiment import load
from fedrec.files import write_atomically
from fedrec.metrics.ranking import ranking_metrics
from fedrec.metrics.reconstruction import PREFIX
from fedrec.privacy.personal import gdp_parameter
from fedrec.wire import EvaluateOrder
from simulations import runner

FEDERATED, PRIVATE = "dpvae-vae-ml100k", "dpvae-ml100k"
QUIET = ("evaluation.baselines=[]", "checkpoint.every=1000")
EVERYBODY = ("sampler={name='limited', cohort=943, participations=1}", "rounds=1")
SOUND = (*EVERYBODY, "step.participations=1", "step.examples=1000", "step.clip='user'", "step.clip-norm=0.1")
SOUND = (*SOUND, "step.weighting='precision'", "step.learning-rate=10.0")
# The paper's rate and batches of ten let one user who asks for an epsilon near zero end the run. Here a hundred users
# are averaged, by the precision of their noise, with a smaller rate.
TAME = ("sampler={name='limited', cohort=100, participations=1}", "rounds=10", "step.weighting='precision'")
TAME = (*TAME, "step.learning-rate=5e-4")
PAPER = ("step.mode='paper'",)
PRIORS = ("step.priors={source='onehot'}",)
WHOLE = ("evaluation.protocol='reconstruction'", "evaluation.ks=[20, 50, 100]")
P_MINS = (0.0, 0.02, 0.05, 0.1, 0.2)
BUDGETS = (0.3, 0.5, 1.0, 1.5)
# What table 11 calls SVD has 100 factors (its table 4) and, as toolkits have it, biases; of MF it says nothing.
FACTORS = {"SVD": "model={name='mf', factors=100}", "MF": "model={name='mf', factors=20, biases=false}"}
OWN = "private-parameters=['user.*']"
PLAIN = f"step={{name='sgd', learning-rate=0.1, epochs=5, {OWN}, late-parameters=['item.*']}}"
PLAIN = (PLAIN, "rounds=200", "strategy.server-lr=0.03", "sampler.cohort=50")
NOISY = f"step={{name='dpsgd', {OWN}, delta=1.25e-5, clip-norm=1.5, budgets='equal'}}"
NOISY = (NOISY, "evaluation.fine-tune={upload=false}")
MEASURES = ("ndcg-list@100", "recall@20", "recall@50")
OF_ALL = f"{PREFIX}ndcg@100-of-100"  # over the best list of 100, whatever the history's length (paper, section 4.1)
WHOLE_MEASURES = tuple(f"{PREFIX}{name}" for name in ("ndcg@100", "ndcg@100-of-100", "recall@20", "recall@50"))


def cells() -> dict[str, dict[str, tuple[str, tuple[str, ...]]]]:
    """Group -> cell -> experiment and overrides."""
    found: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
        "federated": {
            "VAE": (FEDERATED, QUIET),
            "VAE, priors": (FEDERATED, (*QUIET, *PRIORS)),
            "VAE, no divergence": (FEDERATED, (*QUIET, "step.beta=0.0")),  # what is gained by a weaker pull alone
        },
        "search": {
            f"server-lr {rate}, {rounds} rounds": (
                FEDERATED,
                (
                    *QUIET,
                    "evaluation.held-out='validation'",
                    f"strategy.server-lr={rate}",
                    f"rounds={rounds}",
                    f"step.anneal-rounds={rounds}",
                ),
            )
            for rate, rounds in ((0.001, 1880), (0.002, 1880), (0.004, 1880))
        },
        "budgets": {},
        "parts": {
            "constant": (PRIVATE, (*QUIET, *TAME)),
            "constant, priors": (PRIVATE, (*QUIET, *TAME, *PRIORS)),
            "optimal": (PRIVATE, (*QUIET, *TAME, *PAPER)),
            "optimal, priors": (PRIVATE, (*QUIET, *TAME, *PAPER, *PRIORS)),
        },
        "central": {
            "VAE after one round": (FEDERATED, ("rounds=1", "evaluation.baselines=['popularity', 'ease', 'vae']"))
        },
        "ladder": {
            f"sound, epsilon {epsilon:g} for all": (
                PRIVATE,
                (*QUIET, *SOUND, f"step.epsilon={epsilon}", "step.budgets='equal'", "step.learning-rate=300.0"),
            )
            for epsilon in (10.0, 100.0, 1000.0, 1e4)
        },
    }
    found["table 11"] = dict(_of_table_11())
    found["budgets"]["fresh parameters"] = PRIVATE, (*QUIET, "rounds=1", "step.epochs=0")
    for epsilon in BUDGETS:
        own = f"step.epsilon={epsilon}"
        found["budgets"][f"sound, up to {epsilon}"] = PRIVATE, (*QUIET, *SOUND, own)
        found["budgets"][f"paper, up to {epsilon}"] = PRIVATE, (*QUIET, *PAPER, own)
    for epsilon in BUDGETS:
        own = f"step.epsilon={epsilon}"
        found["budgets"][f"paper, tamed, up to {epsilon}"] = PRIVATE, (*QUIET, *TAME, *PAPER, own)
    return found


def _of_table_11() -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Three models without noise, with a constant clip norm, with algorithm 2, and untrained but for what stays on the
    device; epsilon 1 for all, one upload each."""
    equal = ("model.name='ae'", "step.budgets='equal'")
    models = {name: ((own, *PLAIN), (own, *NOISY)) for name, own in FACTORS.items()}
    for name, (plain, noisy) in {**models, "AE": (("model.name='ae'",), equal)}.items():
        yield name, (FEDERATED, (*QUIET, *plain))
        yield f"{name}, constant", (PRIVATE, (*QUIET, *noisy, *TAME))
        yield f"{name}, optimal", (PRIVATE, (*QUIET, *noisy, *TAME, *PAPER))
        yield f"{name}, fresh", (PRIVATE, (*QUIET, *noisy, *TAME, "step.learning-rate=1e-12"))


def measured(experiment: str, overrides: tuple[str, ...], seed: int) -> dict[str, Any]:
    """The figures of one run."""
    started, seeded = time.perf_counter(), [*overrides, f"seed={seed}"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = runner.run(experiment, seeded, output=Path(folder) / "run")
        except ClientError as error:
            after = re.search(r"diverged in round (\d+)", str(error))
            if after is None:
                raise
            return {"diverged in round": int(after.group(1))}
        kept = json.loads((result.folder / "result.json").read_text())
        histories = result.experiment.model.name in ("vae", "ae")  # other models are not given any
        whole = {"whole": whole_histories(experiment, seeded, result.parameters)} if histories else {}
    found = {"metrics": kept["metrics"], **whole, "baselines": kept["baselines"], "rounds": kept["rounds"]}
    if "personal" in kept:
        found["users"] = kept["personal"]["users"]
    return {**found, "seconds": time.perf_counter() - started}


def whole_histories(experiment: str, overrides: list[str], parameters: dict[str, np.ndarray]) -> dict[str, float]:
    """How well parameters give back whole histories, of which they were mostly given: no measure of recommendation."""
    node = Node(load(experiment, [*overrides, *WHOLE]), 0, 1, None)
    table = evaluate_clients(node, parameters, EvaluateOrder(node.experiment.rounds, None))
    lengths = node.population.whole_history(table.index.to_numpy()).sum(1)
    table[OF_ALL] = table[f"{PREFIX}ndcg@100"] * _ideal(lengths) / _ideal(np.array([100]))
    return {name: value for name, value in mean_metrics(table).items() if name.startswith(PREFIX)}


def _ideal(lengths: np.ndarray) -> np.ndarray:
    """Discounted gain of the best list of 100 for histories of some lengths."""
    return (1 / np.log2(np.arange(2, 102))).cumsum()[np.minimum(lengths, 100) - 1]


def baselines_on_whole_histories(seed: int) -> dict[str, dict[str, float]]:
    """The same of popularity and EASE."""
    population = KEPT.population(load(PRIVATE, [f"seed={seed}"]))
    names = ("popularity", "ease")
    return evaluate_baselines(names, population, held_out="test", ks=(20, 50, 100), protocol="reconstruction")


def bounded(seed: int, p_min: float, baseline: str) -> dict[str, Any]:
    """A central system where users with less than theorem 1 asks for at `p_min` do not train; validation part.

    Lists of all users are ranked, also of those who do not train, so that all values of `p_min` have the same ones.
    """
    population = KEPT.population(load(PRIVATE, [f"seed={seed}", f"split={{name='bounded', p-min={p_min}}}"]))
    found = evaluate_baselines((baseline,), population, held_out="validation", ks=(20, 50, 100))
    return {"metrics": found[baseline], "training": len(population.partition.training_clients)}


def noisy_popularity(seed: int) -> dict[str, dict[str, float]]:
    """Popularity under the same noise: every user sends its history scaled to length 1, once, under its own noise.

    All get one list, by the sum. The noise is drawn once for the sum, which has the same law.
    """
    population = KEPT.population(load(PRIVATE, [f"seed={seed}"]))
    clients = population.evaluated_clients("test")
    lists = population.held_out(clients, "test")
    masks = {name: torch.from_numpy(getattr(lists, name)) for name in ("seen", "known", "relevant")}
    histories = population.histories(population.partition.training_clients)
    total = (histories / np.linalg.norm(histories, axis=1, keepdims=True)).sum(0)
    found = {}
    for epsilon in (*BUDGETS, 10.0, 100.0, 1000.0, math.inf):
        std = 2 * math.sqrt(len(histories)) / gdp_parameter(epsilon, 1.25e-5) if math.isfinite(epsilon) else 0.0
        noisy = total + std * np.random.default_rng(seed).standard_normal(len(total))
        scores = torch.from_numpy(noisy).float().expand(len(clients), -1)
        metrics = ranking_metrics(scores, **masks, ks=(20, 50, 100))
        found[f"epsilon {epsilon:g} for all"] = {name: float(metrics[name].nanmean()) for name in MEASURES}
    return found


def run(file: Path, only: list[str], seeds: list[int], chosen: list[str] | None = None) -> None:
    """Run what is missing; the file is written after each run.

    Args:
        file: of the figures.
        only: names of groups; none: all.
        seeds: of each cell.
        chosen: names of cells within the groups that are runs; none: all.
    """
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in seeds if not only or "popularity" in only else ():
        known |= {f"popularity / {cell} / seed {seed}": {"metrics": m} for cell, m in noisy_popularity(seed).items()}
        write_atomically(file, json.dumps(known, indent=1) + "\n")
    for seed in seeds if not only or "whole" in only else ():
        known |= {f"whole / {n} / seed {seed}": {"whole": m} for n, m in baselines_on_whole_histories(seed).items()}
        write_atomically(file, json.dumps(known, indent=1) + "\n")
    for seed, p_min, name in itertools.product(seeds, P_MINS, ("ease", "vae")) if not only or "p-min" in only else ():
        key = f"p-min / {name}, {p_min} / seed {seed}"
        if key not in known:
            known[key] = bounded(seed, p_min, name)
            write_atomically(file, json.dumps(known, indent=1) + "\n")
    for group, own in cells().items():
        if only and group not in only:
            continue
        for cell, (experiment, overrides) in own.items():
            for seed in seeds if not chosen or cell in chosen else ():
                key = f"{group} / {cell} / seed {seed}"
                if key not in known:
                    known[key] = {"experiment": experiment, "overrides": overrides}
                    known[key] |= measured(experiment, overrides, seed)
                    write_atomically(file, json.dumps(known, indent=1) + "\n")
                    print(key, known[key].get("metrics", known[key]), flush=True)


def tables(file: Path) -> None:
    """Means and standard deviations over seeds, and paired tests of what the paper compares."""
    known = json.loads(file.read_text())
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, found in known.items():
        groups.setdefault(key.rpartition(" / ")[0], []).append(found)
    for name, runs in groups.items():
        if not name.startswith("whole / "):
            print(f"| {name} | {len(runs)} | {_row(_of(runs, 'metrics'))} |", _spent(runs))
        for baseline in runs[0].get("baselines", {}):
            print(f"| {baseline} beside it | {len(runs)} | {_row([one['baselines'][baseline] for one in runs])} |")
    print("\nWhole histories, most of which the models were given:\n")
    for name, runs in groups.items():
        if _of(runs, "whole"):
            print(f"| {name} | {len(runs)} | {_row(_of(runs, 'whole'), WHOLE_MEASURES)} |")
    print()
    for one, other in comparisons():
        for measure in MEASURES:
            print(f"{one} -> {other}, {measure}: {paired(known, one, other, measure) or 'too few runs'}")


def comparisons() -> list[tuple[str, str]]:
    """What the paper compares, and what its budgets are worth: group and cell, and those that may be better."""
    found = [("federated / VAE", "federated / VAE, priors"), ("federated / VAE", "federated / VAE, no divergence")]
    found += [("federated / VAE, no divergence", "federated / VAE, priors")]
    found += [("parts / constant", f"parts / {cell}") for cell in ("constant, priors", "optimal", "optimal, priors")]
    for name in (*FACTORS, "AE"):
        constant, optimal, start = (f"table 11 / {name}, {how}" for how in ("constant", "optimal", "fresh"))
        found += [(constant, optimal), (start, constant), (start, optimal)]
    fresh, (least, *_, most) = "budgets / fresh parameters", BUDGETS
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
        seeds: how many both have.
    """

    gain: float
    interval: tuple[float, float]
    student: float
    wilcoxon: float
    seeds: int

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.gain:+.4f}, 95% interval {low:+.4f} to {high:+.4f}, paired t p = {self.student:.3f}, "
            f"Wilcoxon p = {self.wilcoxon:.3f}, {self.seeds} seeds"
        )


def paired(known: dict[str, Any], one: str, other: str, measure: str) -> Paired | None:
    """What is gained from one cell to another; None with fewer than two seeds that ended without diverging in both."""
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
    return Paired(float(gain.mean()), (float(low), float(high)), float(test.pvalue), float(signed.pvalue), len(gain))


def _of(runs: list[dict[str, Any]], kind: str) -> list[dict[str, float]]:
    return [one[kind] for one in runs if kind in one]


def _row(found: list[dict[str, float]], measures: tuple[str, ...] = MEASURES) -> str:
    if not found:
        return "diverged"
    known = [name for name in measures if all(name in one for one in found)]
    means = {name: np.array([one[name] for one in found]) for name in known}
    return " | ".join(f"{name} {_spread(values)}" for name, values in means.items())


def _spread(values: np.ndarray) -> str:
    """Mean and standard deviation, which one value has not."""
    return f"{values.mean():.4f}" + (f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else "")


def _spent(runs: list[dict[str, Any]]) -> str:
    ended = [one["diverged in round"] for one in runs if "diverged in round" in one]
    told = [f"diverged in rounds {', '.join(map(str, ended))}"] if ended else []
    users = [one["users"] for one in runs if "users" in one]
    for kind, word in (("nominal", "asked"), ("replace-one", "true")) if users else ():
        means = [np.mean([float(one[kind][place]) for one in users]) for place in ("p10", "p50", "p90")]
        told.append(f"{word} {', '.join(f'{mean:.3g}' for mean in means)}")
    if users:
        told.append(f"(10, 50, 90 per cent of users, mean of {len(users)} seeds)")
    return "; ".join(told)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "tables"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--cell", action="append", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    tables(given.file) if given.command == "tables" else run(given.file, given.only, given.seeds, given.cell)


if __name__ == "__main__":
    main()
