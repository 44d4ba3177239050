# SPDX-License-Identifier: Apache-2.0
"""Tables 2 and 3 and figures 2 and 4 of UPC-SDG on the authors' files, and utility against linkage
for each method.

    FEDREC_DATA=DATA python benchmarks/upc_sdg.py FOLDER --data office --seeds 3

For each seed and way to perturb the training rows, recommenders learn from what comes out and are
tested on the original test file: PR, Recall and NDCG at 20 with two ways of masking, and beside
them what the table still tells (kept share, linkage, recovery, similarity). `both` leaves real and
synthetic training items out of the lists, `learned` the synthetic ones alone, so that replaced
originals compete; `ease-device` is EASE fitted to the synthetic table and asked with real rows, as
a device could. What is done is in FOLDER/results.json and is not done again, so a broken-off study
goes on where it was. `results.csv` has the means over seeds, `utility-linkage-MODEL.svg` the
curves. With `--choose` what the paper leaves open is measured on validation rows instead
(FOLDER/chosen.json).
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
from benchmarks.upc_sdg_figures import METRICS

DATASETS = {"office": "amazon-upc", "gowalla": "gowalla"}
RATIOS, SENSITIVITIES = (0.2, 0.4, 0.6, 0.8), (0.1, 0.3, 0.5, 0.7, 0.9)
MASKS = ("both", "learned")
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
    corners = {"upc-sdg k=0.2 gamma=0.9": upc(0.2, 0.9), "upc-sdg k=0.8 gamma=0.1": upc(0.8, 0.1)}
    found |= corners
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


def choices() -> dict[str, Setting | None]:
    """What the paper leaves open, one thing at a time, in the middle of its grid of k and gamma."""
    changes: dict[str, dict[str, Any]] = {
        "as shipped": {},
        "best": {"draw": "best"},
        "beta=0": {"attention": {"beta": 0.0}},
        "rate=0.001": {"generator": {"learning-rate": 1e-3}},
        "tau=1": {"generator": {"temperature": 1.0}},
        "beta=1": {"attention": {"beta": 1.0}},
        "tau=0.2": {"generator": {"temperature": 0.2}},
    }
    return {name: upc(0.6, 0.5, **change) for name, change in changes.items()}


def measure(
    data: str, perturb: Setting | None, seed: int, part: str, models: Mapping[str, Any]
) -> dict[str, Any]:
    """Metrics of each model and mask, and what the table tells."""
    from fedrec.data.population import Population
    from fedrec.experiment.loading import load
    from fedrec.perturb.disclosure import disclosure
    from fedrec.perturb.mean_similarity import FIGURE, measured_similarity

    table = {
        "name": "upc-sdg",
        "rounds": 1,
        "seed": seed,
        "dataset": {"name": DATASETS[data]},
        "split": {"name": "published", "validation": 0.1 if part == "validation" else 0.0},
        "sampler": {"name": "fixed-size", "cohort": 1},
        **({} if perturb is None else {"perturb": perturb}),
    }
    population = Population.of(load(table))
    found: dict[str, Any] = {"utility": utility(population, part, models, seed)}
    if population.perturbed is not None:
        real = population.interactions.with_rows(population.partition.train_rows)
        found |= disclosure(real, population.perturbed, seed).table()
        figures = dict(population.perturbed.figures)
        if FIGURE not in figures and data == "office":
            figures[FIGURE] = measured_similarity(real, population.perturbed, seed)
        found["figures"] = figures
    return found


def utility(
    population: Any, part: str, models: Mapping[str, Any], seed: int
) -> dict[str, dict[str, float]]:
    """PR, Recall and NDCG at 20 of each model, by mask, over the users with held-out rows."""
    import torch

    from fedrec.baselines.base import Histories
    from fedrec.components.registry import BASELINE, resolve
    from fedrec.data.population import Population
    from fedrec.metrics.ranking import ranking_metrics

    data, clients = population.interactions, population.partition.training_clients
    plain = Population(data, population.partition, task="ranking", positive_above=None)
    tested, found = population.evaluated_clients(part), {}
    for name, options in models.items():
        cls = resolve(BASELINE, name)
        seeded = {**options, "seed": seed} if "seed" in cls.Config.model_fields else options
        model = cls(cls.Config.parse(seeded))
        model.fit(Histories(data.num_items, *population.liked(clients), clients))
        for title, asked, masks in (
            (name, population, MASKS),
            (f"{name}-device", plain, ("real",)),
        ):
            if asked is plain and name != "ease":
                continue
            sums: dict[str, list[np.ndarray]] = {}
            for start in range(0, len(tested), 256):
                block = tested[start : start + 256]
                lists = population.held_out(block, part)
                scores = model.scores(Histories(data.num_items, *asked.liked(block), block))
                fixed = {
                    key: torch.from_numpy(getattr(lists, key))
                    for key in ("seen", "known", "relevant")
                }
                for how in masks:
                    masked = torch.from_numpy(lists.masked(how))
                    metrics = ranking_metrics(scores, **fixed, ks=(20,), masked=masked)
                    for short, metric in METRICS.items():
                        sums.setdefault(f"{how} {short}", []).append(metrics[metric].numpy())
            found[title] = {
                key: float(np.nanmean(np.concatenate(parts))) for key, parts in sums.items()
            }
    return found


def work(
    file: Path,
    wanted: Iterable[tuple[str, Setting | None, int]],
    data: str,
    part: str,
    models: Any,
    limit: int,
) -> None:
    """Measure what is missing, one setting after the other; each is written down when it is
    there."""
    done = 0
    for name, perturb, seed in wanted:
        records = json.loads(file.read_text()) if file.exists() else []
        if any(
            (one["name"], one["seed"], one["perturb"]) == (name, seed, perturb) for one in records
        ):
            continue
        if done == limit:
            return
        done += 1
        started = time.perf_counter()
        found = measure(data, perturb, seed, part, models)
        seconds = round(time.perf_counter() - started, 1)
        records.append(
            {"name": name, "seed": seed, "perturb": perturb, "seconds": seconds, **found}
        )
        file.with_suffix(".new").write_text(json.dumps(records, indent=1, default=float) + "\n")
        file.with_suffix(".new").replace(file)
        shown = {
            model: round(next(v for k, v in values.items() if k.endswith("Recall")), 4)
            for model, values in found["utility"].items()
        }
        print(
            f"{name}, seed {seed}: {shown}, linked {found.get('linked', 1):.3f}, {seconds} s",
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
    """Measure what is missing, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", choices=DATASETS, default="office")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--choose", action="store_true", help="settings on validation rows instead of the tables"
    )
    parser.add_argument("--only", default="", help="only settings whose name starts with this")
    parser.add_argument(
        "--epochs", type=int, default=None, help="of BPR-MF: as a baseline, and for the embeddings"
    )
    parser.add_argument(
        "--limit", type=int, default=10**9, help="measure at most so many settings, and stop"
    )
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    epochs = {} if given.epochs is None else {"epochs": given.epochs}
    models: dict[str, Any] = {"random": {}, "bprmf": epochs, "ease": {"regularisation": 200.0}}
    if given.choose or given.data != "office":
        models = {"random": {}, "bprmf": epochs}  # on Gowalla EASE would need 20 GB
    named = choices() if given.choose else settings(given.data)
    for table in named.values():
        if table is not None and table["name"] == "upc-sdg" and epochs:
            table["embeddings"] = epochs
    chosen = [(name, table) for name, table in named.items() if name.startswith(given.only)]
    wanted = [(name, table, seed) for seed in range(given.seeds) for name, table in chosen]
    file = given.folder / ("chosen.json" if given.choose else "results.json")
    work(file, wanted, given.data, "validation" if given.choose else "test", models, given.limit)
    if not given.choose:
        titles = [
            title
            for name in models
            for title in (name, *([f"{name}-device"] if name == "ease" else []))
        ]
        write(given.folder, titles)


if __name__ == "__main__":
    main()
