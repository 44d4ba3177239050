# SPDX-License-Identifier: Apache-2.0
"""What a run's item embeddings alone know: an item-kNN on their cosines.

    FEDREC_DATA=DATA python -m benchmarks.item_knn RUN

Each user's candidates are ranked by the sum of their cosines with the user's known positives. Of
every checkpoint in the run folder the item embeddings are taken, so `checkpoint.every` equal to the
rounds of stage one keeps those that it ends with. First stand two lists without any training:
popularity, and cosines of columns of the interactions, a count of pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedrec.data.population import Population
from fedrec.evaluation.lists import ranking_metrics
from fedrec.runs.folder import RunFolder


def counted_cosines(liked: Tensor) -> Tensor:
    """Cosines `[items, items]` of the columns of interactions `[users, items]`; an item has none
    with itself."""
    units = F.normalize(liked, dim=0)
    return (units.T @ units).fill_diagonal_(0)


def learned_cosines(embeddings: Tensor) -> Tensor:
    """Cosines `[items, items]` of embeddings `[items, d]`."""
    units = F.normalize(embeddings, dim=1)
    return units @ units.T


def judge(population: Population, part: str, ks: tuple[int, ...]) -> Callable[[Tensor], str]:
    """Gives Hits@k of cosines `[items, items]`, or of one list `[items]` for all, in words."""
    clients = population.evaluated_clients(part)
    held_out = population.held_out(clients, part)
    liked = torch.from_numpy(population.histories(clients))
    masks = {name: torch.from_numpy(getattr(held_out, name)) for name in ("seen", "relevant")}
    known = torch.from_numpy(held_out.known)

    def told(ranked: Tensor) -> str:
        scores = liked @ ranked if ranked.dim() == 2 else ranked.expand(len(liked), -1)
        found = ranking_metrics(scores, **masks, known=known, ks=ks)
        return ", ".join(f"Hits@{k} {np.nanmean(found[f'hits@{k}']):.4f}" for k in ks)

    return told


def main() -> None:
    """Print a line for each list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--table", default="item.id", help="the item embeddings' name")
    given = parser.parse_args()
    run = RunFolder(given.run)
    evaluation = run.experiment.evaluation
    population = Population.of(run.experiment)
    liked = torch.from_numpy(population.histories(population.training_clients))
    told = judge(population, evaluation.held_out, evaluation.ks)
    print(f"popularity: {told(liked.sum(0))}")
    print(f"counted pairs: {told(counted_cosines(liked))}")
    for file in sorted(run.checkpoints.glob("round-*.npz")):
        table = torch.from_numpy(np.load(file)[f"parameters/{given.table}"])
        print(f"{file.stem}: {told(learned_cosines(table))}", flush=True)


if __name__ == "__main__":
    main()
