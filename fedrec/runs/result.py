# SPDX-License-Identifier: Apache-2.0
"""The result of a run, and its tables as files."""

from __future__ import annotations

import hashlib
import html
import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from fedrec.evaluation.tables import group_gaps
from fedrec.experiment.schema import Experiment
from fedrec.runtime.files import read_json

# in packages above this library, or that import this module: imported on first use, like
# `fedrec.run`
_SCORING = "simulations.recommending"
_ROWS = "fedrec.report.comparison"
_SHOWN = 5  # metrics of a short table


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Result of a finished run.

    Attributes:
        experiment: the resolved experiment.
        folder: the run folder.
        metrics: means over the evaluated users, such as `hits@10`, after on-device fine-tuning.
        before_fine_tuning: metrics of the shared parameters; empty without fine-tuning.
        baselines: metrics of each centralised baseline.
        rounds: one row per round.
        users: one row per evaluated user, one column per metric.
        groups: means over groups of users, one row per group.
        parameters: the final global parameters, by name.
        privacy: the privacy cost of the run and its meaning, one paragraph per line; empty without
            `[privacy]`, `[perturb]` and private baselines.
        baseline_users: one table like `users` per centralised baseline.
        baseline_groups: one table like `groups` per centralised baseline.
        early_stopping: with `[early-stopping]`: `metric`, `best`, `best-round`, `rounds`,
            `planned-rounds`, `stopped` and more; `parameters` are those of the best round.
    """

    experiment: Experiment
    folder: Path
    metrics: dict[str, float]
    before_fine_tuning: dict[str, float]
    baselines: dict[str, dict[str, float]]
    rounds: pd.DataFrame
    users: pd.DataFrame
    groups: pd.DataFrame
    parameters: dict[str, Any] = field(default_factory=dict)
    privacy: tuple[str, ...] = ()
    baseline_users: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    baseline_groups: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    early_stopping: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Short text: metrics of all systems, and the run folder."""
        rows = self._systems().to_string(float_format=lambda value: f"{value:.4f}", na_rep="-")
        return f"{self._about()}\n{rows}"

    def _repr_html_(self) -> str:
        """Short HTML table for notebooks."""
        rows = self._systems().to_html(float_format=lambda value: f"{value:.4f}", na_rep="-")
        return f"<p>{html.escape(self._about())}</p>{rows}"

    def _systems(self) -> pd.DataFrame:
        """Table of the first metrics of each system, and epsilon if any has one."""
        rows = importlib.import_module(_ROWS).system_rows(self)
        names = list(next(iter(rows.values()), {}))
        shown = [name for name in self.experiment.evaluation.shown or () if name in names]
        shown = shown or [name for name in names if name != "epsilon"][:_SHOWN]
        if any("epsilon" in row for row in rows.values()):
            shown.append("epsilon")
        return pd.DataFrame.from_dict(rows, orient="index").reindex(columns=shown)

    def _about(self) -> str:
        count = max([len(self.users), *map(len, self.baseline_users.values())], default=0)
        counts = f"{count:,} users tested, {self.rounds_in_words}"
        return f"{self.experiment.name}: {counts}, folder {self.folder}"

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    @property
    def epsilon(self) -> float | None:
        """Spent epsilon of the federated system; None without `[privacy]`, infinite if a phase has
        no noise."""
        if self.experiment.privacy is None:
            return None
        spent = self.rounds.get("epsilon")
        return None if spent is None else float(spent.iloc[-1])

    @property
    def rounds_in_words(self) -> str:
        """Number of rounds, with the planned number if training ended earlier."""
        done = self.num_rounds
        planned = self.experiment.rounds
        count = f"{done:,}" if done == planned else f"{done:,} of {planned:,}"
        return f"{count} round{'' if planned == 1 else 's'}"

    @property
    def best_round(self) -> int:
        """Round of the final parameters: the last one, or the best one of early stopping."""
        return int(self.early_stopping.get("best-round") or self.num_rounds)

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """Load the result of a finished run, with its final parameters.

        Raises:
            RunError: `folder` is not a run folder, or its run is not finished.
        """
        return importlib.import_module(_SCORING).load_result(folder)

    def recommend(
        self,
        users: Sequence[object] | None = None,
        k: int = 10,
        history: pd.DataFrame | str | Path | None = None,
        new_items: str | Path | None = None,
    ) -> pd.DataFrame:
        """Recommend the best k new items to each user, after on-device fine-tuning if the
        experiment has it.

        Args:
            users: ids as in the data or in the history; None: all users, those of the history if
                there is one.
            k: items per user, at least 1.
            history: further rows, of users of the run or of others, or their file; with the columns
                of the data.
            new_items: file of items that the run did not have, with their vectors or features;
                these alone are ranked, without training.

        Returns:
            One row per recommendation: `user`, `rank` (from 1), `item`, `score`.

        Raises:
            DataError: a user is not in the data, users or items of the run are no longer there, or
                the history is damaged.
            ExperimentError: the run has no federated system, no parameters, or none for a new user.
        """
        return importlib.import_module(_SCORING).recommend(self, users, k, history, new_items)

    def scores(self, users: Sequence[object] | None = None) -> pd.DataFrame:
        """Scores of the whole catalogue, one row per user and one column per item, by the data's
        ids.

        Raises:
            DataError: see `recommend`.
            ExperimentError: see `recommend`.
        """
        return importlib.import_module(_SCORING).scores(self, users)

    @property
    def gaps(self) -> pd.DataFrame:
        """Gaps between groups of users, one row per kind of group, as from `group_gaps`."""
        return group_gaps(self.groups)


# Tables of a run folder, verified by their digests.

USER = "user"
"""Column of users.csv with the data's ids."""
UNREADABLE = (ValueError, IndexError, OverflowError)  # those of pandas: ValueErrors
"""Exceptions raised by reading a damaged table."""
_TABLES = (
    "rounds.csv",
    "users.csv",
    "groups.csv",
    "baselines/*/users.csv",
    "baselines/*/groups.csv",
)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each table of a run folder, by its path within the folder."""
    files = sorted(file for pattern in _TABLES for file in folder.glob(pattern))
    return {str(file.relative_to(folder)): _sha256(file.read_bytes()) for file in files}


def read_content(folder: Path, name: str) -> bytes:
    """Read the file of a table of a run folder; if the run is finished, verify its digest in
    result.json.

    Args:
        folder: folder of the run.
        name: path of the table within the folder.

    Raises:
        OSError, ValueError: the file cannot be read, or was changed after it was written.
    """
    content = (folder / name).read_bytes()
    result = folder / "result.json"
    about = read_json(result) if result.is_file() else {}
    tables = about.get("tables", {}) if isinstance(about, dict) else None
    if not isinstance(tables, dict):
        raise ValueError("result.json has no digests by name under 'tables'")
    if tables.get(name) not in (None, _sha256(content)):
        raise ValueError("the file was changed after the run wrote it")
    return content


def table_of(content: bytes, index: int | None = None) -> pd.DataFrame:
    """Parse the content of a table's file.

    Args:
        content: content of the file.
        index: column of row names; other columns must be numbers, except the data's ids of users,
            which are dropped; None: no such column.

    Raises:
        `UNREADABLE`: not a table, or text in a column of numbers.
    """
    table = pd.read_csv(io.BytesIO(content), index_col=index)
    if index is not None:
        table = table.drop(columns=USER, errors="ignore")
    text = [column for column in table.columns if not is_numeric_dtype(table[column])]
    if index is not None and len(table) and text:
        raise ValueError(f"text in numeric column {text[0]!r}")
    return table


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
