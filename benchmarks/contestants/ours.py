# SPDX-License-Identifier: Apache-2.0
"""One piece of federated work, written down so that any simulator can do the same and end with the
same numbers, and fedrec's run of it: through its strategy, grid and clients.

The shape of MovieLens-1M (4,800 training users, long-tailed, 165 interactions on average),
PrivRec's network, 5 local epochs of plain SGD in batches of 32 over a user's rows, and the mean of
the users' updates added to the parameters. The cohorts and the order of every batch are part of the
work, so nothing is left to a simulator's random numbers.

Arguments of fedrec's run: work, cohort, items, engine, device, GiB for blocks.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contestants.archive import BATCH, EPOCHS, LEARNING_RATE, Arrays, RoundClock
from fedrec.components.registry import MODEL, SAMPLER, resolve
from fedrec.data.population import Population
from fedrec.experiment.schema import Experiment, load
from fedrec.rng import stream, torch_stream
from fedrec.runs.folder import RunFolder
from server.callbacks import Callback
from simulations.runner import run


def experiment(
    cohort: int,
    items: int,
    rounds: int,
    engine: str,
    device: str = "cpu",
    memory_gib: float = 1.0,
    clip: float = 0.0,
) -> Experiment:
    """The work as a fedrec experiment; on a GPU with one node, which has up to `memory_gib` for its
    blocks.

    With a `clip` norm every user's whole update is clipped to it, as for differential privacy, and
    no noise is added.
    """
    table: dict[str, Any] = {
        "name": "benchmark",
        "rounds": rounds,
        "positive-above": 3.0,
        "dataset": {"name": "synthetic", "users": 6000, "items": items, "mean-interactions": 165},
        "split": {"name": "user-holdout", "test-users": 0.2},
        "model": {"name": "privrec"},
        "step": {
            "name": "sgd",
            "epochs": EPOCHS,
            "batch-size": BATCH,
            "learning-rate": LEARNING_RATE,
            "negatives": 0,
            "low-rated": "negative",
        },
        "strategy": {"name": "reptile"},
        "sampler": {"name": "fixed-size", "cohort": cohort},
        "evaluation": {"every": 0, "final-users": 1, "baselines": [], "fine-tune": {"epochs": 0}},
        # so that the whole writing of one is in the measured rounds
        "checkpoint": {"every": max(1, rounds // 2)},
        "engine": {
            "name": engine,
            "nodes": 2 if engine == "ray" and device == "cpu" else 1,
            "threads": 1,
            "device": device,
            "memory-gib": memory_gib,
        },
    }
    if clip:
        table["privacy"] = {"clip-norm": clip, "noise-multiplier": 0}
    return load(table)


def write(path: Path, cohort: int, items: int, rounds: int, clip: float = 0.0) -> None:
    """Write the work as a numpy archive.

    Arrays: `initial/NAME` the parameters; `genres [items, width]` codes, -1 for none;
    `cohorts [rounds, M]`; and for every place p in a round's cohort: `users [rounds, M, 3]` feature
    codes, and the examples of all epochs in order, `offsets [rounds * M + 1]` into `items` and
    `labels`; `lengths [rounds * M]` is the number of examples in one epoch. `clip` is the norm that
    each user's update is clipped to, 0 for none.
    """
    work = experiment(cohort, items, rounds, "serial")
    population = Population.of(work)
    model = resolve(MODEL, work.model.name)(work.settings(MODEL), population.schema())
    initial = {
        f"initial/{n}": v.numpy() for n, v in model.initial(torch_stream(work.seed, "init")).items()
    }
    sampler = resolve(SAMPLER, work.sampler.name)(
        work.settings(SAMPLER), population.partition.training_clients, work.seed
    )
    cohorts = np.stack([sampler.sample(number) for number in range(1, rounds + 1)])
    chosen_items = []
    chosen_labels = []
    lengths = []
    users = []
    for number, clients in enumerate(cohorts, start=1):
        for client in clients.tolist():
            data = population.client(client)
            random = stream(work.seed, "client", client, number)
            order = np.concatenate([random.permutation(len(data.items)) for _ in range(EPOCHS)])
            chosen_items.append(data.items[order])
            chosen_labels.append(data.labels[order])
            lengths.append(len(data.items))
            users.append([int(codes[0]) for codes in data.features])
    np.savez(
        path,
        **initial,
        genres=population.interactions.item_features["genres"].padded(),
        cohorts=cohorts,
        users=np.array(users).reshape(rounds, cohort, -1),
        items=np.concatenate(chosen_items),
        labels=np.concatenate(chosen_labels),
        lengths=np.array(lengths),
        clip=np.array(clip),
        offsets=np.concatenate([[0], np.cumsum([len(part) for part in chosen_items])]),
    )


class Clock(RoundClock, Callback):
    """Notes when each round is over, everything that belongs to it included."""

    def on_start(self, run: RunFolder, first_round: int, rounds: int) -> None:
        self.begin()

    def after_round(self, row: dict[str, Any], seconds: float) -> bool:
        self.end()
        return False


def main(path: str, cohort: int, items: int, engine: str, device: str, memory_gib: float) -> None:
    """Do the work and print when the rounds were and how far the parameters went."""
    with np.load(path) as file:
        rounds = len(file["cohorts"])
        clip = float(file["clip"])
    watch = Clock()
    table = experiment(cohort, items, rounds, engine, device, memory_gib, clip)
    with tempfile.TemporaryDirectory() as folder:
        result = run(table, output=Path(folder) / "run", callbacks=[watch])
    # not before: fedrec itself begins from its own seed, and holds no second copy
    initial = Arrays(path).initial()
    print(watch.report([result.parameters[name] for name in initial], list(initial.values())))


if __name__ == "__main__":
    work, users, catalogue, engine_name, device_name, memory = sys.argv[1:]
    main(work, int(users), int(catalogue), engine_name, device_name, float(memory))
