# SPDX-License-Identifier: Apache-2.0
"""What came after a run: interactions of its users or of others, and items that it did not have."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.components.registry import DATASET
from fedrec.data.interactions import Feature, FeatureTable, Interactions, Vectors, known_labels
from fedrec.data.population import Population
from fedrec.data.reader import read_rows
from fedrec.data.readers.table import TableConfig, ids_of, indexed
from fedrec.data.splits.rules import Partition
from fedrec.data.tables import TableLayout, columns_of, read_table, table_start
from fedrec.errors import DataError
from fedrec.experiment.schema import Experiment

_LOG = logging.getLogger("fedrec")
_COLUMNS = {"rating": "rating", "time": "time"}  # columns where the data are no table
_HISTORY = Path("history")

# Interactions after a run, of its users or of others, in the run's numbering.
#
# Users and items of the run keep their numbers, to which parameters and private state belong. New
# users come behind them. Rows of new items are left out, as the run has no parameters for these.
# All rows are training rows: nothing is held out, and each user is served from its whole history.


def read_history(source: pd.DataFrame | str | Path, experiment: Experiment) -> Interactions:
    """Rows of users from a table with the columns of the experiment's table; with the columns
    `user`, `item`, `rating` and `time` beside other data. The columns of ratings and times may be
    missing.

    Args:
        source: the rows, or their file (CSV, Parquet or JSON).
        experiment: of the run.

    Raises:
        DataError: a column is missing, or a value is wrong.
    """
    settings = experiment.settings(DATASET)
    config = (
        settings if isinstance(settings, TableConfig) else TableConfig.parse(_COLUMNS, at="history")
    )
    layout = TableLayout.own({}, separator=config.separator, header=config.header)
    path = _HISTORY if isinstance(source, pd.DataFrame) else Path(source)
    present = list(source) if isinstance(source, pd.DataFrame) else table_start(path, layout).names
    left_out = {role: None for role in ("rating", "time") if getattr(config, role) not in present}
    config = config.model_copy(update=left_out)
    needed = {config.user: "dataset.user", config.item: "dataset.item"}
    more = [name for name in (config.rating, config.time) if name]
    kinds = {**dict.fromkeys(needed, str), **dict.fromkeys(more)}
    layout = replace(layout, columns=kinds, settings=needed)
    if isinstance(source, pd.DataFrame):
        frame = columns_of("history", source, layout)
    else:
        frame = read_table(path, layout)
    return indexed("history", frame, config, path)


def with_history(experiment: Experiment, data: Interactions, history: Interactions) -> Population:
    """Add the rows and users of a history to a run's data, and return the clients.

    Raises:
        DataError: the run perturbed its training rows, or has ratings and the history has none.
    """
    if experiment.perturb is not None or (data.ratings is not None and history.ratings is None):
        raise DataError(
            "the history cannot be added to the data of the run",
            expected="rows with ratings where the data have them, and data without [perturb]",
            fix="add the column of ratings, or recommend to users of the run without a history",
        )
    users = pd.Index(data.user_ids.astype(str))
    names = pd.Index(history.user_ids.astype(str))
    users = users.append(names[~names.isin(users)])
    items = pd.Index(data.item_ids.astype(str)).get_indexer(history.item_ids.astype(str))
    known = items[history.items] >= 0
    if not known.all():
        _LOG.warning(
            "%s of %s rows are left out: their items are unknown to the run",
            f"{np.count_nonzero(~known):,}",
            f"{len(known):,}",
        )
    columns = {
        "users": (data.users, users.get_indexer(names)[history.users]),
        "items": (data.items, items[history.items]),
    }
    if data.ratings is not None and history.ratings is not None:
        columns["ratings"] = data.ratings, history.ratings
    if data.times is not None:  # rows without a time are as new as the newest
        newest = np.full(len(history), data.times.max(initial=0))
        columns["times"] = data.times, newest if history.times is None else history.times
    joined = {name: np.concatenate([old, new[known]]) for name, (old, new) in columns.items()}
    rows = replace(
        data,
        **joined,
        user_ids=ids_of(pd.Series(users), _HISTORY),
        user_features=data.user_features.extended(np.full(len(users) - data.num_users, -1)),
        published_test=None,
    )
    none = np.empty(0, dtype=np.int64)
    partition = Partition(none, np.arange(len(rows)), none, none)
    return Population.of_parts(experiment, rows, partition)


# Items that came after a run, which its model ranks by what is public of them, without training.
#
# Their file has the ids of the items in the column `item` (or as the data call it), and what the
# run knows of its own items: a column for each feature, such as `genres` with `Drama|Comedy`, and
# the numbers of the vector in all other columns. A file of vectors, `.npy` beside `.txt`, is enough
# where the run knows vectors alone. Categories that the run does not have are left out.


def with_items_of(data: Interactions, path: Path, item: str) -> Interactions:
    """The data of a run with the items of a file behind its own; `item` is the name of the column
    of items.

    Raises:
        DataError: the file is damaged, an id is missing, is there twice or is one of the run's, or
            vectors have another length than the run's.
    """
    known = data.item_features
    if path.suffix == ".npy":
        names, values = read_rows(path)
        frame = pd.DataFrame(index=range(len(names)))
    else:
        names, frame, values = _table(path, item, known)
    ids = names.astype(str).str.strip()
    old = ids.isin(data.item_ids.astype(str))
    for wrong, got in ((ids == "", "none"), (ids.duplicated(), "twice"), (old, "in the run")):
        if wrong.any():
            raise _wrong(path, "new ids, each once", f"{ids[wrong][0]!r}: {got}", "correct the ids")
    vectors = tuple(_vectors(path, table, values) for table in known.vectors)
    features, texts = (
        tuple(_feature(feature, frame, words=kind is known.texts) for feature in kind)
        for kind in (known.features, known.texts)
    )
    rows = data.num_items + len(ids)
    numbers = np.issubdtype(data.item_ids.dtype, np.integer) and ids.str.isdecimal().all()
    added = ids.to_numpy(dtype=object).astype(np.int64 if numbers else object)
    return replace(
        data,
        item_ids=np.concatenate(
            [data.item_ids if numbers else data.item_ids.astype(object), added]
        ),
        item_features=FeatureTable(rows, features, texts, vectors),
    )


def _table(
    path: Path, item: str, known: FeatureTable
) -> tuple[pd.Index, pd.DataFrame, np.ndarray | None]:
    """Ids, columns of features, and vectors `[items, width]` of a table."""
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        ids = pd.Index(frame.pop(item if item in frame else "item"))
        named = [feature.name for feature in known.every if feature.name in frame]
        others = frame.drop(columns=named)
        values = others.to_numpy().astype(np.float32) if known.vectors else None
    except (OSError, ValueError, KeyError) as error:
        names = ", ".join(["item", *(feature.name for feature in known.every)])
        expected = f"a CSV file with the columns {names}, and the numbers of a vector in the others"
        raise _wrong(path, expected, str(error), "correct the table") from None
    return ids, pd.DataFrame(frame[named]), values


def _vectors(path: Path, known: Vectors, values: np.ndarray | None) -> Vectors:
    width = known.values.shape[1]
    if values is None or values.shape[1] != width or not np.isfinite(values).all():
        got = f"{0 if values is None else values.shape[1]} numbers"
        raise _wrong(
            path,
            f"{width} finite numbers of each item, as the vectors {known.name!r} of the run have",
            got if got != f"{width} numbers" else "NaN or infinity",
            "encode the new items like those of the run",
        )
    every = np.concatenate([known.values, values.astype(np.float32)])
    return Vectors(known.name, every, np.concatenate([known.known, np.ones(len(values), bool)]))


def _feature(known: Feature, frame: pd.DataFrame, *, words: bool) -> Feature:
    """A feature of the run's items and of the new ones behind them."""
    categories = set(known.categories)
    texts: list[str] = frame[known.name].tolist() if known.name in frame else [""] * len(frame)
    labels: list[list[str]] = []
    unknown = set[str]()
    for text in texts:
        if words:
            labels.append([w for w in Feature.words("", [text]).categories if w in categories])
        else:
            among, others = known_labels(text, categories) if text else ([], [])
            labels.append(list(dict.fromkeys(among)))
            unknown.update(others)
    if unknown:
        _LOG.warning("%s: the run has no %s; left out", known.name, ", ".join(sorted(unknown)[:5]))
    new = Feature.coded(known.name, known.categories, labels)
    return replace(
        known,
        offsets=np.concatenate([known.offsets, known.offsets[-1] + new.offsets[1:]]),
        codes=np.concatenate([known.codes, new.codes]),
    )


def _wrong(path: Path, expected: str, got: str, fix: str) -> DataError:
    return DataError(f"{path}: these items cannot be ranked", expected=expected, got=got, fix=fix)
