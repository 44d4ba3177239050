# SPDX-License-Identifier: Apache-2.0
"""The result of a run: metrics, curves and parameters."""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedrec.evaluation.groups import group_gaps
from fedrec.experiment.schema import Experiment

# in packages above this library, or that need this one, looked up by name on first use, like
# `fedrec.run`
_SCORING = "simulations.recommending"
_ROWS = "fedrec.report.rows"
_SHOWN = 5  # metrics of a short table


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of a finished run.

    Attributes:
        experiment: the resolved experiment.
        folder: the run folder.
        metrics: means over the evaluated users, such as `hits@10`, after on-device fine-tuning.
        before_fine_tuning: the same for the shared parameters; empty when there is no fine-tuning.
        baselines: the same metrics of each centralised baseline.
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
        """The result in a few lines: metrics of all systems, and where the rest is."""
        rows = self._systems().to_string(float_format=lambda value: f"{value:.4f}", na_rep="-")
        return f"{self._about()}\n{rows}"

    def _repr_html_(self) -> str:
        """The same as a table for notebooks."""
        rows = self._systems().to_html(float_format=lambda value: f"{value:.4f}", na_rep="-")
        return f"<p>{html.escape(self._about())}</p>{rows}"

    def _systems(self) -> pd.DataFrame:
        """The first metrics of each system, and epsilon where one has it."""
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
        """Epsilon that the federated system has spent; None without `[privacy]`, infinite where a
        phase has no noise."""
        if self.experiment.privacy is None:
            return None
        spent = self.rounds.get("epsilon")
        return None if spent is None else float(spent.iloc[-1])

    @property
    def rounds_in_words(self) -> str:
        """Number of rounds, beside the planned number where training ended earlier."""
        done = self.num_rounds
        planned = self.experiment.rounds
        count = f"{done:,}" if done == planned else f"{done:,} of {planned:,}"
        return f"{count} round{'' if planned == 1 else 's'}"

    @property
    def best_round(self) -> int:
        """The round of the final parameters: the last one, unless there was early stopping."""
        return int(self.early_stopping.get("best-round") or self.num_rounds)

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """The result of a finished run, with its final parameters.

        Raises:
            RunError: `folder` is no run folder, or its run is not finished.
        """
        return importlib.import_module(_SCORING).load_result(folder)

    def recommend(
        self,
        users: Sequence[object] | None = None,
        k: int = 10,
        history: pd.DataFrame | str | Path | None = None,
    ) -> pd.DataFrame:
        """The best k items of each user without a row of that user, after on-device fine-tuning if
        the experiment has it.

        Args:
            users: ids as in the data or in the history; None: all users, those of the history if
                there is one.
            k: items per user, at least 1.
            history: further rows, of users of the run or of others, or their file; with the columns
                of the data.

        Returns:
            One row per recommendation: `user`, `rank` (from 1), `item`, `score`.

        Raises:
            DataError: a user is not in the data, users or items of the run are no longer there, or
                the history is damaged.
            ExperimentError: the run has no federated system, no parameters, or none for a new user.
        """
        return importlib.import_module(_SCORING).recommend(self, users, k, history)

    def scores(self, users: Sequence[object] | None = None) -> pd.DataFrame:
        """Scores of the whole catalogue, one row per user and one column per item, by the data's
        ids.

        Raises:
            DataError: see `recommend`.
            ExperimentError: likewise.
        """
        return importlib.import_module(_SCORING).scores(self, users)

    @property
    def gaps(self) -> pd.DataFrame:
        """Gaps between groups of users, one row per kind of group, as from `group_gaps`."""
        return group_gaps(self.groups)
