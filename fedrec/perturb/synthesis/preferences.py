# SPDX-License-Identifier: Apache-2.0
"""Users' preferences: the share of replaced rows (k), and the largest similarity of a substitute
(gamma)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import Field

from fedrec.config import Config
from fedrec.data.files.columns import ids_of, numbers_of
from fedrec.data.files.tables import TableLayout, read_table
from fedrec.data.interactions import Interactions
from fedrec.data.perturbation import TrainingData
from fedrec.errors import DataError

RATIO = "replacement-ratio"
SENSITIVITY = "sensitivity"


class ReplacementConfig(Config):
    """Settings of a perturbation that replaces rows."""

    replacement_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share k of each user's training rows to replace, in [0, 1]; k n is rounded half up."""
    users: Path | None = None
    """CSV or Parquet file with preferences per user: a column `user` and any of `replacement-ratio`
    and `sensitivity`. It must contain all users with training rows; default: the same for all."""


@dataclass(frozen=True, eq=False)
class Preferences:
    """The users' preferences, `float64 [users]` each.

    Attributes:
        ratio: replacement ratio k, in [0, 1].
        sensitivity: gamma, >= 0.
    """

    ratio: np.ndarray
    sensitivity: np.ndarray


def preferences_of(
    config: ReplacementConfig, rows: Interactions, sensitivity: float = 0.0
) -> Preferences:
    """The preferences of all users.

    Args:
        config: the common ratio, and the table of users.
        rows: the training rows.
        sensitivity: the common gamma, >= 0.

    Raises:
        DataError: the table misses a user with training rows, names one twice, or a value is out of
            its range.
    """
    common = {RATIO: config.replacement_ratio, SENSITIVITY: sensitivity}
    columns = {
        name: np.full(rows.num_users, value, dtype=np.float64) for name, value in common.items()
    }
    if config.users is not None:
        columns |= _from_table(config.users, rows)
    _refuse_outside(config.users, rows, RATIO, columns[RATIO], 1.0)
    _refuse_outside(config.users, rows, SENSITIVITY, columns[SENSITIVITY], np.inf)
    return Preferences(columns[RATIO], columns[SENSITIVITY])


def refuse_missing_rows(data: TrainingData) -> None:
    """Refuse training clients and tested users without a training row: there is nothing to make
    synthetic rows from.

    Raises:
        DataError: some have none, or there is no row at all.
    """
    users = np.union1d(data.clients, data.tested)
    none = users[np.bincount(data.rows.users, minlength=data.rows.num_users)[users] == 0]
    if len(none) or not len(data.rows):
        shown = ", ".join(str(data.rows.user_ids[user]) for user in none[:5])
        raise DataError(
            f"{data.rows.name} has users without training rows",
            expected="at least one training row of each user who trains or is tested",
            got=(
                f"none of {len(none)} ({shown}{', ...' if len(none) > 5 else ''})"
                if len(none)
                else "no row at all"
            ),
            fix=(
                "leave these users out of the dataset, or choose a split that leaves each user"
                " a row"
            ),
        )


def _from_table(path: Path, rows: Interactions) -> dict[str, np.ndarray]:
    wanted: dict[str, type | None] = {RATIO: None, SENSITIVITY: None}
    table = read_table(path, TableLayout.own({"user": str}, wanted, {"user": "perturb.users"}))
    present = [name for name in wanted if name in table]
    if not present:
        raise DataError(
            f"{path} has no preferences of users",
            expected=f"a column {RATIO} or {SENSITIVITY}",
            got="neither",
            fix="name the columns so",
        )
    names = pd.Index(ids_of(table["user"], path).astype(str))
    if not names.is_unique:
        twice = str(names[names.duplicated()][0])
        raise DataError(
            f"{path} names a user twice",
            expected="each user once",
            got=twice,
            fix="leave one row out",
        )
    place = names.get_indexer(pd.Index(rows.user_ids.astype(str)))
    missing = np.flatnonzero((place < 0) & (np.bincount(rows.users, minlength=rows.num_users) > 0))
    if len(missing):
        shown = ", ".join(str(rows.user_ids[user]) for user in missing[:5])
        raise DataError(
            f"{path} misses users",
            expected="a row for every user with training rows",
            got=f"none for {len(missing)} of them: {shown}{', ...' if len(missing) > 5 else ''}",
            fix="add a row for each, or leave perturb.users out: then all users want the same",
        )
    # A user without training rows has no rows to replace; its values have no effect.
    return {name: np.where(place < 0, 0.0, _exact(table[name], path)[place]) for name in present}


def _exact(column: pd.Series, path: Path) -> np.ndarray:
    numbers_of(column, path)  # rejects values that are not numbers
    return np.asarray(pd.to_numeric(column), dtype=np.float64)


def _refuse_outside(
    path: Path | None, rows: Interactions, name: str, values: np.ndarray, most: float
) -> None:
    wrong = np.flatnonzero(~((values >= 0) & (values <= most)))
    if len(wrong):
        raise DataError(
            f"a wrong {name}" + (f" in {path}" if path else ""),
            expected="a number in [0, 1]" if most == 1 else "a number >= 0",
            got=f"{values[wrong[0]]:g} for user {rows.user_ids[wrong[0]]}",
            fix=f"correct {name}" + (f" of this user in {path}" if path else ""),
        )
