# SPDX-License-Identifier: Apache-2.0
"""Which system is trained on a user's own table without privacy: the linear item-to-item model,
alternating least squares in rounds, or popularity, whichever ranks the held-out items of validation
users best. Test users play no part.

ALS in rounds is centralised iALS sweep by sweep (tests/strategies/test_federated_als.py), and so is
its score; iALS in native code takes a fraction of the time. All have the settings that they have
without a search.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from simulations.runner import run

LINEAR: dict[str, Any] = {
    "rounds": 2,
    "model": {"name": "item-weights"},
    "step": {"name": "gram"},
    "strategy": {"name": "popularity-start", "main": {"name": "gram"}},
    "sampler": {"name": "full"},
}
"""Rounds, model, step, strategy and sampler of the federated linear item-to-item model."""
ALS: dict[str, Any] = {
    "rounds": 15,
    "model": {"name": "ials", "moments": True},
    "step": {"name": "als"},
    "strategy": {"name": "fed-als"},
    "sampler": {"name": "full"},
}
"""The same of alternating least squares in rounds; users' factors stay on the devices."""
TITLES = {
    "linear": "linear item-to-item model",
    "als": "alternating least squares",
    "popularity": "popularity",
}
_METRIC = "ndcg@10"
MOST_ROWS = 5_000_000
"""Rows of a table up to which iALS is fitted beside the system: more take it many minutes."""
_OF_A_SYSTEM = ("rounds", "model.", "step.", "strategy.", "sampler.", "engine.")


@dataclass(frozen=True)
class SystemChoice:
    """The system that is trained.

    Attributes:
        system: `linear`, `als` or `popularity`.
        scores: `ndcg@10` on validation users, by system; empty where they were not compared.
        reason: why not.
    """

    system: str
    scores: Mapping[str, float]
    reason: str = ""

    def line(self) -> str:
        """The system and why."""
        if not self.scores:
            return f"system: {TITLES[self.system]}, {self.reason}"
        others = ", ".join(
            f"{TITLES[name]} {score:.4f}"
            for name, score in self.scores.items()
            if name != self.system
        )
        own = f"{TITLES[self.system]}, the best on validation users"
        return (
            f"system: {own} ({_METRIC} {self.scores[self.system]:.4f}; {others}; --system takes"
            " another)"
        )


def choose(
    table: Mapping[str, Any], asked: str | None, overrides: Sequence[str], rows: int
) -> SystemChoice:
    """The system to train on a table of interactions.

    Args:
        table: experiment of the linear model on it, as a TOML table.
        asked: the system that the user wants; None: the best one.
        overrides: as for `--set`; those of a system mean the linear one.
        rows: number of rows of the table.

    Raises:
        ExperimentError: there is no such system, or an override is wrong.
    """
    if asked is not None:
        if asked not in TITLES:
            raise ExperimentError(
                f"there is no system {asked!r} for a table",
                expected=", ".join(TITLES),
                got=asked,
                fix="name one of these, or run an experiment: fedrec list experiment",
            )
        return SystemChoice(asked, {}, "as asked for")
    if any(override.startswith(_OF_A_SYSTEM) for override in overrides):
        return SystemChoice("linear", {}, "whose settings are given")
    if "validation-users" not in table["split"]:
        return SystemChoice("linear", {}, "not compared with others: there are too few users")
    if rows > MOST_ROWS:
        reason = f"not compared with others: there are more than {MOST_ROWS:,} rows (--system als)"
        return SystemChoice("linear", {}, reason)
    scores = _scores(table, overrides)
    return SystemChoice(max(scores, key=lambda name: scores[name]), scores)


def with_system(table: Mapping[str, Any], system: str) -> dict[str, Any]:
    """The experiment of the linear model with another system in its place."""
    title = table["title"].replace(TITLES["linear"], TITLES[system])
    changed = {**table, "title": title}
    if system == "als":
        evaluation = {**table["evaluation"], "fine-tune": {"epochs": 1}}  # solves for new users
        changed |= {**ALS, "evaluation": evaluation}
    elif system == "popularity":
        changed |= {"rounds": 1}
    if system != "linear":  # its phases are what early stopping chooses between
        changed.pop("early-stopping", None)
    return changed


def _scores(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, float]:
    """How well each system ranks what is held out of validation users."""
    trial = load(table, overrides).table()
    trial.pop("early-stopping", None)
    trial["evaluation"] = {
        "every": 0,
        "ks": [10],
        "held-out": "validation",
        "baselines": ["popularity", "ials"],
    }
    with tempfile.TemporaryDirectory() as folder:
        found = run(trial, output=Path(folder) / "run")
    return {
        "linear": found.metrics[_METRIC],
        "als": found.baselines["ials"][_METRIC],
        "popularity": found.baselines["popularity"][_METRIC],
    }
