# SPDX-License-Identifier: Apache-2.0
"""Interactions after a run, of its users or of others, in the run's numbering.

Users and items of the run keep their numbers, to which parameters and private state belong. New
users come behind them. Rows of new items are left out, as the run has no parameters for these. All
rows are training rows: nothing is held out, and each user is served from its whole history.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedrec.components.registry import DATASET
from fedrec.data.columns import ids_of
from fedrec.data.interactions import Interactions
from fedrec.data.population import Population
from fedrec.data.readers.table import TableConfig, indexed
from fedrec.data.splits.rules import Partition
from fedrec.data.tables import TableLayout, columns_of, read_table, table_start
from fedrec.errors import DataError
from fedrec.experiment.schema import Experiment

_LOG = logging.getLogger("fedrec")
_COLUMNS = {"rating": "rating", "time": "time"}  # columns where the data are no table
_HISTORY = Path("history")


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
    from_row = np.append(np.arange(data.num_users), np.full(len(users) - data.num_users, -1))
    rows = replace(
        data,
        **joined,
        user_ids=ids_of(pd.Series(users), _HISTORY),
        user_features=data.user_features.renumbered(from_row, data.num_users),
        published_test=None,
    )
    none = np.empty(0, dtype=np.int64)
    return Population(
        rows,
        Partition(none, np.arange(len(rows)), none, none),
        task=experiment.task,
        positive_above=experiment.positive_above,
        seed=experiment.seed_of_split,
    )
