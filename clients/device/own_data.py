# SPDX-License-Identifier: Apache-2.0
"""A node's own data: a CSV file of one or more users, as clients with random ids.

Columns: `user`, `item`; `rating` and `time` where the catalogue has them; one column per user
feature (several values separated by `|`), or none; and, if the data are already split, `part`:
`train`, `tune` (rows with which a test user's device fine-tunes), `validation` or `test`. Without
it the experiment's split divides the node's own rows.

Interactions with items outside the catalogue are ignored. These data are never sent.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedrec.data.interactions import Feature, FeatureTable, Interactions, known_labels
from fedrec.data.population import Population
from fedrec.data.reader import Catalogue
from fedrec.data.splits.rules import Partition, partition_by
from fedrec.data.tables import Columns, OwnLayout, read_table, table_start
from fedrec.errors import DataError
from fedrec.experiment.schema import Experiment

log = logging.getLogger("fedrec")
_PARTS = ("train", "tune", "validation", "test")


def own_population(
    experiment: Experiment,
    data: Path,
    catalogue: Path,
    numbers_of_users: Callable[[list[str]], np.ndarray],
) -> Population:
    """Read a node's data as the population of an experiment; the experiment's `[dataset]` is
    ignored.

    Args:
        experiment: the experiment.
        data: the CSV file.
        catalogue: the operator's catalogue.
        numbers_of_users: returns a fixed `int64` number for each user name.

    Raises:
        DataError: a file is missing or malformed, or no user has a training row.
    """
    interactions, names, part = read_own(data, catalogue)
    numbers = numbers_of_users(names)
    order = np.argsort(numbers)  # clients are trained in the order of their numbers
    interactions = _reordered(interactions, order)
    partition = (
        partition_by(experiment.split, experiment.seed_of_split, interactions)
        if part is None
        else Partition(
            training_clients=np.unique(interactions.users[part == "train"]),
            train_rows=np.flatnonzero((part == "train") | (part == "tune")),
            validation_rows=np.flatnonzero(part == "validation"),
            test_rows=np.flatnonzero(part == "test"),
        )
    )
    return Population.of_parts(experiment, interactions, partition, numbers=numbers[order])


def read_own(data: Path, catalogue: Path) -> tuple[Interactions, list[str], np.ndarray | None]:
    """Read the interactions of a node's users, the users' names, and the part of each row,
    `[rows]`, if the file has this column. Cached until one of the files changes.

    Raises:
        DataError: see `own_population`.
    """
    return _read_own(data, catalogue, _version(data), _version(catalogue))


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None  # reading it raises the error
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=2)
def _read_own(
    data: Path, catalogue: Path, *_: object
) -> tuple[Interactions, list[str], np.ndarray | None]:
    import pandas as pd  # simulated nodes do without

    from fedrec.data.readers.table import ids_of, numbers_of, times_of

    known = Catalogue.read(catalogue)
    numeric = [name for name, has in (("rating", known.rated), ("time", known.timed)) if has]
    needed = {"user": str, "item": str, **dict.fromkeys(numeric)}
    present = table_start(data, OwnLayout({})).names
    optional = [name for name in (*dict(known.user_features), "part") if name in present]
    settings = dict.fromkeys(needed, "--data")
    columns = needed | dict.fromkeys(optional, str)
    frame = read_table(data, OwnLayout(columns, settings))
    items = pd.Index(known.item_ids).get_indexer(pd.Index(ids_of(frame["item"], data).astype(str)))
    listed = items >= 0
    if not listed.all():
        log.warning(
            "ignored %d interactions with items outside the catalogue", int((~listed).sum())
        )
    if not listed.any():
        raise DataError(
            f"no item in {data} is in the catalogue",
            expected="item names of the catalogue",
            got="only unknown items",
            fix="use this deployment's catalogue and its item names",
        )
    column = {name: values.loc[listed].reset_index(drop=True) for name, values in frame.items()}
    codes, names = pd.factorize(column["user"].astype(str), sort=True)
    interactions = Interactions(
        name="own data",
        users=codes,
        items=items[listed],
        user_ids=np.arange(len(names)),
        item_ids=known.item_ids.copy(),
        user_features=_user_features(known, column, codes, len(names)),
        item_features=known.item_features,
        ratings=numbers_of(column["rating"], data) if known.rated else None,
        times=times_of(column["time"], data) if known.timed else None,
    )
    return interactions, [str(name) for name in names], _parts(column, data)


def _parts(column: Columns, data: Path) -> np.ndarray | None:
    if "part" not in column:
        return None
    part = column["part"].astype(str).to_numpy()
    wrong = sorted(set(part.tolist()) - set(_PARTS))
    if wrong:
        raise DataError(
            f"{data}: unknown value in column part",
            expected=", ".join(_PARTS),
            got=repr(wrong[0]),
            fix="correct the column part, or leave it out",
        )
    return part


def _user_features(
    known: Catalogue, column: Columns, codes: np.ndarray, users: int
) -> FeatureTable:
    first = np.unique(codes, return_index=True)[1]
    features = []
    for name, categories in known.user_features:
        texts = [""] * users
        if name in column:
            texts = column[name].fillna("").astype(str).to_numpy()[first].tolist()
        parsed = [known_labels(text, categories) for text in texts]
        unknown = [label for _, others in parsed for label in others]
        if unknown:
            log.warning(
                "ignored %d values of feature %r that are not categories of the catalogue, such"
                " as %r",
                len(unknown),
                name,
                unknown[0],
            )
        features.append(Feature.coded(name, categories, [labels for labels, _ in parsed]))
    return FeatureTable(users, tuple(features))


def _reordered(interactions: Interactions, order: np.ndarray) -> Interactions:
    """Interactions with the users reordered."""
    features = interactions.user_features.renumbered(order)
    users = np.argsort(order)[interactions.users]
    return replace(interactions, users=users, user_features=features)
