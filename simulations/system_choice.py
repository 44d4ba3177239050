# SPDX-License-Identifier: Apache-2.0
"""Trial runs on a user's own table before its run: which system ranks the held-out items of
validation users best, and what vectors of the items gain. Test users play no part in the choice.

ALS in rounds is centralised iALS sweep by sweep (tests/strategies/test_federated_als.py), and so is
its score; iALS in native code takes a fraction of the time. All systems have the settings that they
have without a search.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.errors import ExperimentError, FedrecError
from fedrec.evaluation.tables import NEW, OLD
from fedrec.experiment.schema import load
from fedrec.runs.folder import Result
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
"""Likewise for alternating least squares in rounds; users' factors stay on the devices."""
TITLES = {
    "linear": "linear item-to-item model",
    "als": "alternating least squares",
    "popularity": "popularity",
}
MOST_ROWS = 5_000_000
"""Largest number of rows for which iALS is fitted too; more take many minutes."""
_METRIC = "ndcg@10"
_OF_A_SYSTEM = ("rounds", "model.", "step.", "strategy.", "sampler.", "engine.")


def choose(
    table: Mapping[str, Any],
    asked: str | None,
    overrides: Sequence[str],
    rows: int,
    *,
    private: bool = False,
) -> tuple[str, str]:
    """Choose the system to train on a table of interactions: the linear item-to-item model,
    alternating least squares in rounds, or popularity.

    Args:
        table: experiment of the linear model on it, as a TOML table.
        asked: the system that the user wants; None: the best one.
        overrides: as for `--set`; those of a system mean the linear one.
        rows: number of rows of the table.
        private: whether a part of the experiment is under privacy.

    Returns:
        `linear`, `als` or `popularity`, and a line about it and the reason for it.

    Raises:
        ExperimentError: the system is unknown, or an override is wrong.
    """
    if asked is not None:
        if asked not in TITLES:
            raise ExperimentError(
                f"unknown system {asked!r}",
                expected=", ".join(TITLES),
                fix="name one of these, or run an experiment: fedrec list experiment",
            )
        return asked, f"system: {TITLES[asked]}, as asked for"
    if private:
        reason = "not compared with others under privacy"
    elif any(override.startswith(_OF_A_SYSTEM) for override in overrides):
        reason = "whose settings are given"
    elif "validation-users" not in table["split"]:
        reason = "not compared with others: there are too few users"
    elif rows > MOST_ROWS:
        reason = f"not compared with others: there are more than {MOST_ROWS:,} rows (--system als)"
    else:
        return _best(table, overrides)
    return "linear", f"system: {TITLES['linear']}, {reason}"


def _best(table: Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, str]:
    """Best system on the held-out rows of validation users, and the scores of all. Popularity is
    what the linear model has after its first round."""
    everybody = {"held-out": "validation", "every": 1, "users": MOST_ROWS}
    result = _result(_trial(table, overrides, {**everybody, "baselines": ["ials"]}))
    popularity, linear = result.rounds[_METRIC]
    scores = {
        "linear": linear,
        "als": result.baselines["ials"][_METRIC],
        "popularity": popularity,
    }
    best = max(scores, key=lambda name: scores[name])
    others = (f"{TITLES[name]} {score:.4f}" for name, score in scores.items() if name != best)
    return best, (
        f"system: {TITLES[best]}, the best on validation users ({_METRIC} {scores[best]:.4f};"
        f" {', '.join(others)}; --system selects another)"
    )


def with_system(table: Mapping[str, Any], system: str) -> dict[str, Any]:
    """Replace the linear model in an experiment by ALS or popularity. Phases of the linear model
    are what early stopping chooses between, so it is left out."""
    changed = {key: value for key, value in table.items() if key != "early-stopping"}
    changed["title"] = table["title"].replace(TITLES["linear"], TITLES[system])
    if system == "popularity":
        return changed | {"rounds": 1}
    evaluation = {**table["evaluation"], "fine-tune": {"epochs": 1}}  # solves for new users
    return changed | {**ALS, "evaluation": evaluation}


def vector_gain(table: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Measure what the vectors of a table gain, for items that nobody has used and for others.

    A fifth of the items is held out as a whole (split `new-items`). The system of the run ranks
    these items alone, and other held-out items of the same users, with the vectors and without
    them. This looks at held-out rows, which no guarantee covers.

    Args:
        table: the experiment on the table, as a TOML table.
        overrides: as for `--set`.

    Returns:
        Lines about it.
    """
    trial = _trial(table, overrides, {"baselines": ["content-map", "random"]})
    trial["split"] = {"name": "new-items"}
    bare = {key: value for key, value in trial["dataset"].items() if key != "item-vectors"}
    alone = {**trial, "dataset": bare, "evaluation": {**trial["evaluation"], "baselines": []}}
    try:
        given = _result(trial)
        without = _result(alone)
    except FedrecError as error:
        return [f"vectors: what they gain could not be measured: {error.text().splitlines()[0]}"]
    new, old = (
        f"{given.metrics[kind + _METRIC]:.4f} with them,"
        f" {without.metrics[kind + _METRIC]:.4f} without"
        for kind in (NEW, OLD)
    )
    content, chance = (given.baselines[name][NEW + _METRIC] for name in ("content-map", "random"))
    return [
        f"vectors, for new items (a fifth, held out as a whole, ranked alone): {_METRIC} {new}"
        f" (content-map {content:.4f}, chance {chance:.4f})",
        f"vectors, for other items of the same users (ranked alone): {_METRIC} {old}",
    ]


def _trial(
    table: Mapping[str, Any], overrides: Sequence[str], evaluation: Mapping[str, Any]
) -> dict[str, Any]:
    """Experiment of a trial run, which is evaluated at its end."""
    trial = load(table, overrides).table()
    trial.pop("early-stopping", None)
    return {**trial, "evaluation": {"every": 0, "ks": [10], **evaluation}}


def _result(trial: Mapping[str, Any]) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return run(trial, output=Path(folder) / "run")
