# SPDX-License-Identifier: Apache-2.0
"""Tables 2 and 3 and figures 2 and 4 of UPC-SDG on the authors' files, and utility against linkage
for each method.

    FEDREC_DATA=DATA python benchmarks/upc_sdg.py FOLDER --data office --seeds 0 1 2

For each seed and perturbation of the training rows, recommenders are trained on the perturbed rows
and tested on the original test file: PR, Recall and NDCG at 20 with two kinds of masking, and
disclosure measures of the table (kept share, linkage, recovery, similarity). `both` excludes real
and synthetic training items from the lists, `learned` only the synthetic ones, so that replaced
originals are ranked; `ease-device` is EASE fitted to the synthetic table and applied to real rows,
as a device could. LightGCN and NeuMF, which take longest, are trained on the tables of table 2
only. Finished parts are stored in FOLDER/results.json, so an interrupted study continues where it
stopped. `results.csv` has the means over seeds, `figure-2.svg`, `figure-4.svg` and
`utility-linkage.svg` the curves. `upc_sdg_choices.py` selects unspecified settings of the paper on
validation rows.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import upc_sdg_figures
from benchmarks.upc_sdg_figures import METRICS, TABLE_2

DATASETS = {"office": "amazon-upc", "gowalla": "gowalla"}
RATIOS = (0.2, 0.4, 0.6, 0.8)
SENSITIVITIES = (0.1, 0.3, 0.5, 0.7, 0.9)
MASKS = ("both", "learned")
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "office": {"random": {}, "bprmf": {}, "ease": {"regularisation": 200.0}},
    "gowalla": {  # EASE would need 20 GB
        "random": {},
        "bprmf": {"epochs": 800, "learning-rate": 0.02, "regularisation": 0.01},
    },
}
"""Recommenders that learn from every table, and their settings, chosen on validation rows."""
SLOW_MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "office": {
        "lightgcn": {"epochs": 600, "decay": 0.01},
        "neumf": {"epochs": 20, "regularisation": 0.01},
    },
    "gowalla": {},
}
"""Recommenders that learn from the tables of table 2."""
ABLATIONS = {
    "s": {"select": "random"},
    "r": {"generate": "random"},
    "f": {"generate": "fixed-similarity"},
}

Setting = dict[str, Any]


def upc(ratio: float, sensitivity: float, **more: Any) -> Setting:
    """A `[perturb]` table of UPC-SDG."""
    return {"name": "upc-sdg", "replacement-ratio": ratio, "sensitivity": sensitivity, **more}


def settings(data: str) -> dict[str, Setting | None]:
    """Name -> `[perturb]` table; names start with the method, by which curves are drawn."""
    found: dict[str, Setting | None] = {"original": None}
    trained = MODELS[data]["bprmf"]
    own = {"embeddings": trained} if trained else {}
    for ratio, sensitivity in ((0.2, 0.9), (0.8, 0.1)):
        name = f"upc-sdg k={ratio:g} gamma={sensitivity:g}"
        found[name] = upc(ratio, sensitivity, **own)
    for ratio in RATIOS if data == "office" else (0.2, 0.8):
        found[f"random-replacement k={ratio:g}"] = {
            "name": "random-replacement",
            "replacement-ratio": ratio,
        }
    if data != "office":
        return found
    for ratio, (letter, change) in itertools.product(RATIOS, ABLATIONS.items()):
        found[f"ablation-{letter} k={ratio:g} gamma=0.9"] = upc(ratio, 0.9, **change)
    for ratio in RATIOS:
        found[f"upc-sdg k={ratio:g} gamma=0.9"] = upc(ratio, 0.9)
    for epsilon in (4, 6, 8, 10):
        found[f"randomised-response eps={epsilon}"] = {
            "name": "randomised-response",
            "epsilon": float(epsilon),
        }
    for epsilon in (1, 5, 10, 1000):
        found[f"noisy-cooccurrence eps={epsilon}"] = {
            "name": "noisy-cooccurrence",
            "epsilon": float(epsilon),
        }
    for definition, ratio in itertools.product(("released", "cosine"), RATIOS):
        found[f"upc-{definition} k={ratio:g} gamma=0.9"] = upc(ratio, 0.9, similarity=definition)
        found[f"upc-{definition} k={ratio:g} gamma=0.1"] = upc(ratio, 0.1, similarity=definition)
    for ratio, sensitivity in itertools.product(RATIOS, SENSITIVITIES):
        found[f"upc-sdg k={ratio:g} gamma={sensitivity:g}"] = upc(ratio, sensitivity)
    return found


def population_of(data: str, perturb: Setting | None, seed: int, part: str) -> Any:
    """The clients; with a tenth of the training rows held out if `part` is `validation`."""
    from fedrec.data.population import Population
    from fedrec.experiment.loading import load

    table = {
        "name": "upc-sdg",
        "rounds": 1,
        "seed": seed,
        "dataset": {"name": DATASETS[data]},
        "split": {"name": "published", "validation": 0.1 if part == "validation" else 0.0},
        "sampler": {"name": "fixed-size", "cohort": 1},
        **({} if perturb is None else {"perturb": perturb}),
    }
    return Population.of(load(table))


def measure(
    data: str,
    perturb: Setting | None,
    seed: int,
    part: str,
    models: Mapping[str, Any],
    disclosed: bool = True,
) -> dict[str, Any]:
    """Metrics of each model and mask, and what the table tells if `disclosed`."""
    from fedrec.perturb.disclosure import disclosure
    from fedrec.perturb.mean_similarity import FIGURE, measured_similarity

    population = population_of(data, perturb, seed, part)
    found: dict[str, Any] = {"utility": utility(population, part, models, seed)}
    if disclosed and population.perturbed is not None:
        real = population.interactions.with_rows(population.partition.train_rows)
        found |= disclosure(real, population.perturbed, seed).table()
        figures = dict(population.perturbed.figures)
        if FIGURE not in figures and data == "office":
            figures[FIGURE] = measured_similarity(real, population.perturbed, seed)
        found["figures"] = figures
    return found


def utility(
    population: Any, part: str, models: Mapping[str, Any], seed: int, most: int | None = None
) -> dict[str, dict[str, float]]:
    """PR, Recall and NDCG at 20 of each model, by mask, over the users with held-out rows, or over
    `most` of them, the same each time."""
    found = {}
    tested = tested_users(population, part, most)
    plain = unperturbed(population)
    for name, options in models.items():
        model = made(name, options, seed)
        model.fit(training_histories(population))
        found[name] = metrics_of(model, population, tested, part)
        if name == "ease":
            found["ease-device"] = metrics_of(model, plain, tested, part, ("real",))
    return found


def made(name: str, options: Mapping[str, Any], seed: int) -> Any:
    """A recommender, not yet trained."""
    from fedrec.components.registry import BASELINE, resolve

    cls = resolve(BASELINE, name)
    seeded = {**options, "seed": seed} if "seed" in cls.Config.model_fields else options
    return cls(cls.Config.parse(seeded))


def training_histories(population: Any) -> Any:
    """What recommenders learn from."""
    from fedrec.baselines.base import Histories

    clients = population.partition.training_clients
    offsets, items = population.liked(clients)
    return Histories(population.interactions.num_items, offsets, items, clients)


def unperturbed(population: Any) -> Any:
    """The same clients with their real rows."""
    from fedrec.data.population import Population

    data = population.interactions
    partition = population.partition
    return Population(data, partition, task="ranking", positive_above=None)


def tested_users(population: Any, part: str, most: int | None = None) -> np.ndarray:
    """The users with held-out rows, or `most` of them, the same each time, `int64 [users]`."""
    from fedrec.rng import stream

    tested = population.evaluated_clients(part)
    if most is not None:
        tested = np.sort(stream(0, "tested").permutation(tested)[:most])
    return tested


def metrics_of(
    model: Any, asked: Any, tested: np.ndarray, part: str, masks: Sequence[str] = MASKS
) -> dict[str, float]:
    """PR, Recall and NDCG at 20 of a trained recommender, by mask, mean over the tested users.

    Args:
        model: the recommender.
        asked: population whose rows it is asked with.
        tested: `int64 [users]`.
        part: `validation` or `test`.
        masks: what is left out of the lists.
    """
    import torch

    from fedrec.baselines.base import Histories
    from fedrec.evaluation.lists import ranking_metrics

    sums: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(tested), 256):
        block = tested[start : start + 256]
        lists = asked.held_out(block, part)
        offsets, items = asked.liked(block)
        scores = model.scores(Histories(asked.interactions.num_items, offsets, items, block))
        fixed = {
            key: torch.from_numpy(getattr(lists, key)) for key in ("seen", "known", "relevant")
        }
        for how in masks:
            masked = torch.from_numpy(lists.masked(how))
            metrics = ranking_metrics(scores, **fixed, ks=(20,), masked=masked)
            for short, metric in METRICS.items():
                sums.setdefault(f"{how} {short}", []).append(metrics[metric])
    return {key: float(np.nanmean(np.concatenate(values))) for key, values in sums.items()}


def work(
    file: Path,
    wanted: Iterable[tuple[str, Setting | None, int]],
    data: str,
    models: Mapping[str, Mapping[str, Any]],
    limit: int = 10**9,
) -> None:
    """Measure the missing settings one by one; each is written down when it is there. The slow
    recommenders learn from the tables of table 2 alone."""
    done = 0
    for name, perturb, seed in wanted:
        records = json.loads(file.read_text()) if file.exists() else []
        known = next(
            (
                one
                for one in records
                if (one["name"], one["seed"], one["perturb"]) == (name, seed, perturb)
            ),
            None,
        )
        present = {} if known is None else known["utility"]
        missing = {
            key: value
            for key, value in models.items()
            if key not in present and (name in TABLE_2 or key not in SLOW_MODELS[data])
        }
        if not missing:
            continue
        if done == limit:
            return
        done += 1
        started = time.perf_counter()
        found = measure(data, perturb, seed, "test", missing, disclosed=known is None)
        seconds = round(time.perf_counter() - started, 1)
        if known is None:
            known = {"name": name, "seed": seed, "perturb": perturb, "seconds": 0.0, "utility": {}}
            records.append(known)
        utilities = {**known["utility"], **found["utility"]}
        known |= {**found, "utility": utilities, "seconds": known["seconds"] + seconds}
        file.with_suffix(".new").write_text(json.dumps(records, indent=1, default=float) + "\n")
        file.with_suffix(".new").replace(file)
        shown = {
            model: round(next(v for k, v in values.items() if k.endswith("Recall")), 4)
            for model, values in found["utility"].items()
        }
        print(
            f"{name}, seed {seed}: {shown}, linked {known.get('linked', 1):.3f}, {seconds} s",
            flush=True,
        )


def write(folder: Path, models: Sequence[str]) -> None:
    """Tables and drawings of what is there."""
    rows = upc_sdg_figures.summary(json.loads((folder / "results.json").read_text()))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(folder / "results.csv", "w", newline="") as opened:
        writer = csv.DictWriter(opened, columns)
        writer.writeheader()
        writer.writerows(rows)
    upc_sdg_figures.write(folder, rows, models)


def main() -> None:
    """Measure the missing settings, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", choices=DATASETS, default="office")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only settings whose name starts with one of these"
    )
    parser.add_argument("--models", nargs="+", help="only these recommenders; default: all")
    parser.add_argument(
        "--limit", type=int, default=10**9, help="largest number of settings to measure"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    known = {**MODELS[given.data], **SLOW_MODELS[given.data]}
    named = settings(given.data)
    if unknown := sorted(set(given.models or ()) - set(known)):
        parser.error(f"{given.data} has no recommender {unknown[0]!r}; known: {', '.join(known)}")
    models = {name: known[name] for name in given.models or known}
    chosen = [(name, table) for name, table in named.items() if name.startswith(tuple(given.only))]
    wanted = [(name, table, seed) for seed in given.seeds for name, table in chosen]
    work(given.folder / "results.json", wanted, given.data, models, given.limit)
    titles = [
        title for name in known for title in (name, *([f"{name}-device"] if name == "ease" else []))
    ]
    write(given.folder, titles)


if __name__ == "__main__":
    main()
