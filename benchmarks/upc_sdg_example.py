# SPDX-License-Identifier: Apache-2.0
"""Figure 3 of UPC-SDG as a table: the substitutes of one user's items at each gamma (k .2, Amazon
Office).

    FEDREC_DATA=DATA python benchmarks/upc_sdg_example.py [--rows 10] [--seed 0]

The user is the first with that many training rows. Items are only numbers in the published files,
so each is described by embeddings of the real rows: its cosine with the replaced item, its rank
among the items that the user does not have (1: best), and its popularity rank.
"""

from __future__ import annotations

import argparse

import numpy as np


def example(size: int, seed: int) -> list[str]:
    """The table in Markdown."""
    from fedrec.baselines.base import Histories
    from fedrec.baselines.pairwise import Bprmf, BprmfConfig
    from fedrec.data.population import Population
    from fedrec.experiment.loading import load

    table = {
        "name": "upc-sdg",
        "rounds": 1,
        "seed": seed,
        "dataset": {"name": "amazon-upc"},
        "split": {"name": "published"},
        "sampler": {"name": "fixed-size", "cohort": 1},
    }
    whole = Population.of(load(table))
    rows = whole.interactions.with_rows(whole.partition.train_rows)
    user = int(np.flatnonzero(np.diff(rows.user_offsets) == size)[0])
    own = rows.rows_of(user)
    trained = Bprmf(BprmfConfig(seed=seed))
    trained.fit(Histories(rows.num_items, rows.user_offsets, rows.items[rows.user_order]))
    unit = trained.items / np.linalg.norm(trained.items, axis=1, keepdims=True)
    liking = trained.user_rows[user] @ trained.items.T
    liking[rows.items[own]] = -np.inf
    frequency = np.bincount(rows.items, minlength=rows.num_items)
    lines = [
        (
            f"User {rows.user_ids[user]}, {size} training rows:"
            f" {', '.join(map(str, rows.item_ids[rows.items[own]]))}"
        ),
        "",
        "| gamma | item | becomes | cosine | place by liking | place by popularity |",
        "|---|---|---|---|---|---|",
    ]
    for gamma in (0.9, 0.7, 0.5, 0.3, 0.1):
        wanted = {"name": "upc-sdg", "replacement-ratio": 0.2, "sensitivity": gamma}
        found = Population.of(load({**table, "perturb": wanted})).perturbed
        for row in own:
            old = int(rows.items[row])
            new = int(found.rows.items[row])
            if old != new:
                places = (
                    int((liking > liking[new]).sum()) + 1,
                    int((frequency > frequency[new]).sum()) + 1,
                )
                told = f"{float(unit[old] @ unit[new]):.2f} | {places[0]} | {places[1]}"
                lines.append(
                    f"| {gamma:g} | {rows.item_ids[old]} | {rows.item_ids[new]} | {told} |"
                )
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("\n".join(example(given.rows, given.seed)))


if __name__ == "__main__":
    main()
