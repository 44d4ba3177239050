# SPDX-License-Identifier: Apache-2.0
"""Data that have grown since a run, and rows of users who came after it, in the run's numbering.

Users and items of the run keep their numbers, to which parameters and private state belong. New
users come behind them. Rows of new items are left out, as the run has no parameters for these. All
rows are training rows: nothing is held out, and each user is served from its whole history.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.components.registry import DATASET
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.data.readers.table import TableConfig, indexed
from fedrec.data.splits.rules import Partition
from fedrec.data.tables import TableLayout, columns_of, read_table
from fedrec.errors import DataError
from fedrec.experiment.schema import Experiment

_LOG = logging.getLogger("fedrec")
_COLUMNS = {"rating": "rating", "time": "time"}  # columns where the data are no table


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
    layout = TableLayout.own(
        {config.user: str, config.item: str},
        {name: None for name in (config.rating, config.time) if name},
        {config.user: "dataset.user", config.item: "dataset.item"},
        separator=config.separator,
        header=config.header,
    )
    if isinstance(source, pd.DataFrame):
        path = Path("history")
        frame = columns_of("history", source, layout)
    else:
        path = Path(source)
        frame = read_table(path, layout)
    roles = {"rating": config.rating, "time": config.time}
    left_out = {role: None for role, name in roles.items() if name not in frame}
    return indexed("history", frame, config.model_copy(update=left_out), path)


def grown_population(
    experiment: Experiment, tables: Sequence[Interactions], users: np.ndarray, items: np.ndarray
) -> Population:
    """The clients of data that have grown.

    Args:
        experiment: of the run.
        tables: the data as they are, with all users and items of the run, and further rows.
        users: ids of the run's users, as texts, in the order of their numbers, `[users]`.
        items: the same of its items, `[items]`.

    Raises:
        DataError: users or items of the run are missing, training rows are perturbed, or ratings
            are needed and some rows have none.
    """
    for what, known, there in (
        ("users", users, tables[0].user_ids),
        ("items", items, tables[0].item_ids),
    ):
        missing = pd.Index(known).difference(pd.Index(there.astype(str)), sort=False)
        if len(missing):
            raise DataError(
                "the data have changed since the run",
                expected=f"the {len(known):,} {what} of the run, and any others",
                got=f"no {what.removesuffix('s')} {missing[0]!r}"
                + (f", and {len(missing) - 1:,} others are missing" if len(missing) > 1 else ""),
                fix="restore these rows, or run again",
            )
    if experiment.perturb is not None:
        raise DataError(
            "the data have changed since the run, which perturbed its training rows",
            expected="the data of the run, as new rows are not perturbed",
            got="new users or items",
            fix="restore the data as they were, or run again",
        )
    rows = _joined(tables, pd.Index(users), pd.Index(items))
    none = np.empty(0, dtype=np.int64)
    return Population(
        rows,
        Partition(none, np.arange(len(rows)), none, none),
        task=experiment.task,
        positive_above=experiment.positive_above,
        seed=experiment.seed_of_split,
    )


def _joined(tables: Sequence[Interactions], users: pd.Index, items: pd.Index) -> Interactions:
    """The rows of some tables, in the numbering of a run; features are those of the first table."""
    data = tables[0]
    known = len(users)
    for table in tables:
        names = pd.Index(table.user_ids.astype(str))
        users = users.append(names[~names.isin(users)])
    owners = [_numbers(users, table.user_ids)[table.users] for table in tables]
    columns = [_numbers(items, table.item_ids)[table.items] for table in tables]
    known_items = np.concatenate(columns) >= 0
    if not known_items.all():
        _LOG.warning(
            "%s of %s rows are of items that the run did not have, and are left out",
            f"{np.count_nonzero(~known_items):,}",
            f"{len(known_items):,}",
        )
    user_rows = pd.Index(data.user_ids.astype(str)).get_indexer(users)
    item_rows = pd.Index(data.item_ids.astype(str)).get_indexer(items)
    return replace(
        data,
        users=np.concatenate(owners)[known_items],
        items=np.concatenate(columns)[known_items],
        user_ids=_as_in(data.user_ids, users),
        item_ids=data.item_ids[item_rows],
        user_features=data.user_features.renumbered(user_rows, known),
        item_features=data.item_features.renumbered(item_rows, len(items)),
        ratings=_ratings(tables, known_items),
        times=_times(tables, known_items),
        published_test=None,
    )


def _numbers(names: pd.Index, ids: np.ndarray) -> np.ndarray:
    """The number of each id among names, `int64 [ids]`; -1: not there."""
    return names.get_indexer(pd.Index(ids.astype(str)))


def _as_in(ids: np.ndarray, names: pd.Index) -> np.ndarray:
    """Names as ids: numbers where the data's ids are numbers, and all names are, too."""
    numbers = np.issubdtype(ids.dtype, np.integer) and all(
        name.isdecimal() and len(name) < 19 for name in names
    )
    return names.to_numpy(dtype=object).astype(np.int64 if numbers else object)


def _ratings(tables: Sequence[Interactions], rows: np.ndarray) -> np.ndarray | None:
    if tables[0].ratings is None:
        return None
    ratings = [table.ratings for table in tables if table.ratings is not None]
    if len(ratings) < len(tables):
        raise DataError(
            "the history has no ratings",
            expected="a column of ratings, as the data of the run have",
            got="none",
            fix="add the column",
        )
    return np.concatenate(ratings)[rows]


def _times(tables: Sequence[Interactions], rows: np.ndarray) -> np.ndarray | None:
    """Times of all rows; rows without one are as new as the newest."""
    if tables[0].times is None:
        return None
    newest = tables[0].times.max(initial=0)
    times = [
        np.full(len(table), newest) if table.times is None else table.times for table in tables
    ]
    return np.concatenate(times)[rows]
