# SPDX-License-Identifier: Apache-2.0
"""Shards of a dataset: one file per node, with only the rows of its users.

They serve to try a deployment with an existing dataset, and to compare it with a simulation: the
rows keep their order, the split is that of the whole dataset, and a client id is the user's index,
so every client draws the same random numbers. User u is on node u mod n, as in a simulation.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import tomli_w

from fedrec.data.interactions import SEVERAL, Feature
from fedrec.data.population import Population
from fedrec.data.reader import Catalogue
from fedrec.experiment.schema import Experiment
from fedrec.runtime.files import write_atomically
from simulations.deployment.layout import Deployment, hand_over, write_private

_RUNS = 10
"""Number of runs of the experiment that the limits in a shard allow."""
_LAST_EVALUATIONS = 2  # without and with fine-tuning


def cut_for(deployment: Deployment, experiment: Experiment) -> Deployment:
    """Split an experiment's dataset for the nodes of a deployment, and set the largest number of
    clients per node.

    Raises:
        DataError: see `cut`.
    """
    settled = deployment.changed(
        most_clients=max(cut(experiment, deployment.node_folders()), default=1)
    )
    hand_over(settled)
    return settled


def cut(experiment: Experiment, folders: list[Path]) -> list[int]:
    """Write `data.csv`, `catalogue.json` and `node.toml` into the folder of each node.

    Returns:
        Number of users per node.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    population = Population.of(experiment)
    table = _rows(population)
    owner = table["user"].to_numpy() % len(folders)
    settings = {
        "numbers": True,
        "most-evaluations": _RUNS * (experiment.rounds + _LAST_EVALUATIONS),
        "most-rounds": _RUNS * experiment.rounds,
    }
    users = []
    for index, folder in enumerate(folders):
        rows = table.loc[owner == index]
        users.append(rows["user"].nunique())
        write_private(folder / "data.csv", rows.to_csv(index=False))
        Catalogue.of(population.interactions).write(folder / "catalogue.json")
        write_atomically(folder / "node.toml", tomli_w.dumps(settings))
    return users


def _rows(population: Population) -> pd.DataFrame:
    """All rows that the split uses, in the dataset's order."""
    data = population.interactions
    partition = population.partition
    part = np.full(len(data), "", dtype="<U10")
    trains = np.zeros(data.num_users, dtype=bool)
    trains[partition.training_clients] = True
    part[partition.train_rows] = np.where(trains[data.users[partition.train_rows]], "train", "tune")
    part[partition.validation_rows] = "validation"
    part[partition.test_rows] = "test"
    columns: dict[str, np.ndarray] = {
        "user": data.users,
        "item": data.item_ids.astype(str)[data.items],
    }
    if data.ratings is not None:
        columns["rating"] = data.ratings
    if population.time_positions is not None:
        columns["time"] = population.time_positions
    for feature in data.user_features.features:
        columns[feature.name] = _labels(feature)[data.users]
    columns["part"] = part
    return pd.DataFrame(columns).iloc[np.flatnonzero(part != "")]


def _labels(feature: Feature) -> np.ndarray:
    """Labels of each user, as text."""
    labels = []
    for user in range(feature.rows):
        codes = feature.codes[feature.offsets[user] : feature.offsets[user + 1]]
        labels.append(SEVERAL.join(feature.categories[code] for code in codes.tolist()))
    return np.array(labels, dtype=object)
