# SPDX-License-Identifier: Apache-2.0
"""The figures of `docs/papers/dp-vae.md`: a grid of runs on MovieLens-100K, one JSON file, and its
tables.

    python -m simulations.reproduce.grids.dp_vae run FILE.json [--only GROUP] [--cell CELL]
        [--seeds N]...
    python -m simulations.reproduce.grids.dp_vae tables FILE.json

Results in the file are not computed again, so an interrupted grid continues where it stopped. Runs
use a temporary folder that is deleted; only their metrics, the users' true epsilons, and the round
of divergence are kept.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clients.evaluation import evaluate_clients, mean_metrics
from clients.hosting.node import Node
from fedrec.baselines.evaluation import evaluate_baselines
from fedrec.data.cache import POPULATIONS
from fedrec.errors import ClientError
from fedrec.experiment.loading import load
from fedrec.metrics.ranking import ranking_metrics
from fedrec.metrics.reconstruction import PREFIX
from fedrec.privacy.personal.budgets import gdp_parameter
from fedrec.protocol.orders import EvaluateOrder
from fedrec.runtime.atomic_files import write_atomically
from simulations import runner
from simulations.reproduce.grids.dp_vae_tables import (
    BUDGETS,
    FACTORS,
    MEASURES,
    OF_ALL,
    comparisons,
    paired,
    tables,
)

FEDERATED = "dpvae-vae-ml100k"
PRIVATE = "dpvae-ml100k"
__all__ = ["comparisons", "paired"]
QUIET = ("evaluation.baselines=[]", "checkpoint.every=1000")
EVERYBODY = ("sampler={name='limited', cohort=943, participations=1}", "rounds=1")
SOUND = (
    *EVERYBODY,
    "step.participations=1",
    "step.examples=1000",
    "step.clip='user'",
    "step.clip-norm=0.1",
)
SOUND = (*SOUND, "step.weighting='precision'", "step.learning-rate=10.0")
# The paper's rate and batches of ten let one user who asks for an epsilon near zero end the run.
# Here a hundred users are averaged, by the precision of their noise, with a smaller rate.
TAME = (
    "sampler={name='limited', cohort=100, participations=1}",
    "rounds=10",
    "step.weighting='precision'",
)
TAME = (*TAME, "step.learning-rate=5e-4")
PAPER = ("step.mode='paper'",)
PRIORS = ("step.priors={source='onehot'}",)
WHOLE = ("evaluation.protocol='reconstruction'", "evaluation.ks=[20, 50, 100]")
P_MINS = (0.0, 0.02, 0.05, 0.1, 0.2)
OWN = "private-parameters=['user.*']"
PLAIN = f"step={{name='sgd', learning-rate=0.1, epochs=5, {OWN}, late-parameters=['item.*']}}"
PLAIN = (PLAIN, "rounds=200", "strategy.server-lr=0.03", "sampler.cohort=50")
NOISY = f"step={{name='dpsgd', {OWN}, delta=1.25e-5, clip-norm=1.5, budgets='equal'}}"
NOISY = (NOISY, "evaluation.fine-tune={upload=false}")


def cells() -> dict[str, dict[str, tuple[str, tuple[str, ...]]]]:
    """Group -> cell -> experiment and overrides."""
    found: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
        "federated": {
            "VAE": (FEDERATED, QUIET),
            "VAE, priors": (FEDERATED, (*QUIET, *PRIORS)),
            # the gain of a weaker divergence alone
            "VAE, no divergence": (FEDERATED, (*QUIET, "step.beta=0.0")),
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
            "VAE after one round": (
                FEDERATED,
                ("rounds=1", "evaluation.baselines=['popularity', 'ease', 'vae']"),
            )
        },
        "ladder": {
            f"sound, epsilon {epsilon:g} for all": (
                PRIVATE,
                (
                    *QUIET,
                    *SOUND,
                    f"step.epsilon={epsilon}",
                    "step.budgets='equal'",
                    "step.learning-rate=300.0",
                ),
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
    """Three models without noise, with a constant clip norm, with algorithm 2, and with only the
    private parameters trained; epsilon 1 for all, one upload each."""
    equal = ("model.name='ae'", "step.budgets='equal'")
    models = {name: ((own, *PLAIN), (own, *NOISY)) for name, own in FACTORS.items()}
    for name, (plain, noisy) in {**models, "AE": (("model.name='ae'",), equal)}.items():
        yield name, (FEDERATED, (*QUIET, *plain))
        yield f"{name}, constant", (PRIVATE, (*QUIET, *noisy, *TAME))
        yield f"{name}, optimal", (PRIVATE, (*QUIET, *noisy, *TAME, *PAPER))
        yield f"{name}, fresh", (PRIVATE, (*QUIET, *noisy, *TAME, "step.learning-rate=1e-12"))


def measured(experiment: str, overrides: tuple[str, ...], seed: int) -> dict[str, Any]:
    """The figures of one run."""
    started = time.perf_counter()
    seeded = [*overrides, f"seed={seed}"]
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
        whole = (
            {"whole": whole_histories(experiment, seeded, result.parameters)} if histories else {}
        )
    found = {
        "metrics": kept["metrics"],
        **whole,
        "baselines": kept["baselines"],
        "rounds": kept["rounds"],
    }
    if "personal" in kept:
        found["users"] = kept["personal"]["users"]
    return {**found, "seconds": time.perf_counter() - started}


def whole_histories(
    experiment: str, overrides: list[str], parameters: dict[str, np.ndarray]
) -> dict[str, float]:
    """How well parameters reconstruct whole histories, most of which are their input: not a measure
    of recommendation."""
    node = Node(load(experiment, [*overrides, *WHOLE]), 0, 1, None)
    table = evaluate_clients(node, parameters, EvaluateOrder(node.experiment.rounds, None))
    lengths = node.population.whole_history(table.index.to_numpy()).sum(1)
    table[OF_ALL] = table[f"{PREFIX}ndcg@100"] * _ideal(lengths) / _ideal(np.array([100]))
    return {name: value for name, value in mean_metrics(table).items() if name.startswith(PREFIX)}


def _ideal(lengths: np.ndarray) -> np.ndarray:
    """Discounted gain of the best list of 100 for histories of some lengths."""
    return (1 / np.log2(np.arange(2, 102))).cumsum()[np.minimum(lengths, 100) - 1]


def baselines_on_whole_histories(seed: int) -> dict[str, dict[str, float]]:
    """The same for popularity and EASE."""
    population = POPULATIONS.population(load(PRIVATE, [f"seed={seed}"]))
    names = ("popularity", "ease")
    return evaluate_baselines(
        names, population, held_out="test", ks=(20, 50, 100), protocol="reconstruction"
    )


def bounded(seed: int, p_min: float, baseline: str) -> dict[str, Any]:
    """A centralised system in which users below the minimum of theorem 1 at `p_min` do not train;
    on validation rows.

    Lists of all users are ranked, also of those who do not train, so that all values of `p_min`
    have the same ones.
    """
    population = POPULATIONS.population(
        load(PRIVATE, [f"seed={seed}", f"split={{name='bounded', p-min={p_min}}}"])
    )
    found = evaluate_baselines((baseline,), population, held_out="validation", ks=(20, 50, 100))
    return {"metrics": found[baseline], "training": len(population.partition.training_clients)}


def noisy_popularity(seed: int) -> dict[str, dict[str, float]]:
    """Popularity under the same noise: every user sends its history scaled to length 1, once, under
    its own noise.

    All users get one list, by the sum. The noise is drawn once for the sum, which has the same
    distribution.
    """
    population = POPULATIONS.population(load(PRIVATE, [f"seed={seed}"]))
    clients = population.evaluated_clients("test")
    lists = population.held_out(clients, "test")
    masks = {name: torch.from_numpy(getattr(lists, name)) for name in ("seen", "known", "relevant")}
    histories = population.histories(population.partition.training_clients)
    total = (histories / np.linalg.norm(histories, axis=1, keepdims=True)).sum(0)
    found = {}
    for epsilon in (*BUDGETS, 10.0, 100.0, 1000.0, math.inf):
        std = (
            2 * math.sqrt(len(histories)) / gdp_parameter(epsilon, 1.25e-5)
            if math.isfinite(epsilon)
            else 0.0
        )
        noisy = total + std * np.random.default_rng(seed).standard_normal(len(total))
        scores = torch.from_numpy(noisy).float().expand(len(clients), -1)
        metrics = ranking_metrics(scores, **masks, ks=(20, 50, 100))
        found[f"epsilon {epsilon:g} for all"] = {
            name: float(metrics[name].nanmean()) for name in MEASURES
        }
    return found


def run(file: Path, only: list[str], seeds: list[int], chosen: list[str] | None = None) -> None:
    """Compute the missing results; the file is written after each run.

    Args:
        file: of the figures.
        only: names of groups; none: all.
        seeds: of each cell.
        chosen: names of cells within the groups that are runs; none: all.
    """
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for seed in seeds if not only or "popularity" in only else ():
        known |= {
            f"popularity / {cell} / seed {seed}": {"metrics": m}
            for cell, m in noisy_popularity(seed).items()
        }
        write_atomically(file, json.dumps(known, indent=1) + "\n")
    for seed in seeds if not only or "whole" in only else ():
        known |= {
            f"whole / {n} / seed {seed}": {"whole": m}
            for n, m in baselines_on_whole_histories(seed).items()
        }
        write_atomically(file, json.dumps(known, indent=1) + "\n")
    for seed, p_min, name in (
        itertools.product(seeds, P_MINS, ("ease", "vae")) if not only or "p-min" in only else ()
    ):
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "tables"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--cell", action="append", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    (
        tables(given.file)
        if given.command == "tables"
        else run(given.file, given.only, given.seeds, given.cell)
    )


if __name__ == "__main__":
    main()
