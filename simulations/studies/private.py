# SPDX-License-Identifier: Apache-2.0
"""Private choice of settings: a random number of trials, each with a setting that is drawn anew, of
which only the best is published (`fedrec.privacy.accounting.accountant`).

All trials have one population: the data, the split and the threshold of positive rows are the same
for all settings, and the split draws from a seed of its own. What else is random in a trial follows
from a seed that says nothing of the trial's number, because the number is not published.

The guarantee is for training users. Validation users must not train: their rows give scores without
noise, and no epsilon is about them.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import DataSettings
from fedrec.privacy.accounting.accountant import Law, RandomTrials
from fedrec.privacy.accounting.backends import Autodp
from fedrec.privacy.accounting.rdp import epsilon_of
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.files import write_atomically
from server.checkpoint import Checkpoints, State
from server.early_stopping import ending
from server.privacy.phase_plans import PhasePlans
from simulations.studies.search import Space, grid, overrides

_OF_TRAINING_USERS = "popularity"
_PRIVATE = ("created", "command")  # when the sweep ended, and where it is
CHOSEN = "chosen"
"""Folder of a sweep that may be published."""


class PrivateChoice(BaseModel, frozen=True, extra="forbid"):
    """Law of a private choice of a setting.

    Attributes:
        law: distribution of the number of trials.
        mean: its mean.
    """

    law: Law
    mean: float

    def draws(self, experiment: Experiment, name: str, *address: int) -> np.random.Generator:
        """Random numbers of the choice, which have to be secret. In mode `secure` they are drawn
        from the operating system, so that neither a published seed nor the initial values that
        follow from it tell the number of the trial; in mode `reproducible` they follow from the
        experiment's seed, so that a simulation can be repeated."""
        if experiment.hides_cohorts:
            return np.random.default_rng(secrets.randbits(256))
        return stream(experiment.seed, f"private-choice/{name}", *address)


@dataclass(frozen=True)
class ChoiceCost:
    """Cost of a private choice, before anything runs.

    Attributes:
        epsilon: of all that is published.
        delta: at which it holds.
        once: epsilon of one trial by the same accountant.
        choice: how the setting is chosen.
        aim: the metric.
    """

    epsilon: float
    delta: float
    once: float
    choice: PrivateChoice
    aim: str

    def lines(self) -> list[str]:
        """Sentences on what is published at what cost, who is covered, and what stays secret."""
        return [
            f"Published: the best setting, its model and its {self.aim}. Together they cost"
            f" training users epsilon {self.epsilon:.4g} at delta {self.delta:g}, whatever the"
            f" number of trials is ({self.choice.law}, {self.choice.mean:g} on average); one trial"
            f" alone, {self.once:.4g} by the same accountant.",
            "Validation users do not train: their rows choose the setting without noise, and no"
            " epsilon is about them.",
            "Nothing else of the sweep may be published: not the number of trials, the number of"
            " the chosen one, the tables of runs and settings, or a run of the sweep.",
        ]

    def record(self) -> dict[str, Any]:
        """The privacy of the chosen run, as in its result.json."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "method": f"Rényi curve of the best of a {self.choice.law} number of trials",
            "choice": self.choice.model_dump(),
            "in words": self.lines(),
        }


def cost_of(
    experiment: Mapping[str, Any], space: Space, choice: PrivateChoice, aim: str
) -> ChoiceCost:
    """The cost of a private choice among the settings of a grid.

    Args:
        experiment: table of the experiment that is varied.
        space: lists of values; the costliest setting counts, at each Rényi order.
        choice: how the setting is chosen.
        aim: the metric.

    Raises:
        ExperimentError: a setting is not private or has other data than the others, a range is
            among the values, or the scores are of training users.
    """
    settings = [load(experiment, overrides(point)) for point in grid(space)]
    check_same_data(settings)
    population = Population.of(settings[0])
    trained = population.partition.training_clients
    validated = population.interactions.users[population.partition.validation_rows]
    backend = Autodp()
    curves = []
    deltas = []
    for setting in settings:
        _check_private(setting, aim, covered=bool(np.isin(validated, trained).any()))
        plans = PhasePlans.before_a_run(setting, trained)
        curves.append(backend.total(dict(plans.planned().releases)))
        deltas.append(plans.delta)
    curve = np.max(curves, axis=0)
    delta = max(deltas)
    epsilon = RandomTrials(choice.law, choice.mean).epsilon(curve[:-1], delta)
    return ChoiceCost(epsilon, delta, float(epsilon_of(curve, delta)[0]), choice, aim)


def check_same_data(settings: Sequence[Experiment]) -> None:
    """Check that all settings have the same clients and scored users.

    Raises:
        ExperimentError: they have not.
    """
    keys = set(DataSettings.model_fields) - {"seed"}
    tables = [setting.model_dump(mode="json", include=keys) for setting in settings]
    for table, setting in zip(tables, settings, strict=True):
        table["evaluation.final_users"] = setting.evaluation.final_users
    differing = sorted(key for key in tables[0] if any(t[key] != tables[0][key] for t in tables))
    if differing:
        names = ", ".join(differing).replace("_", "-")
        raise ExperimentError(
            f"the settings of a private choice have different data ({names})",
            expected="the same clients, held-out rows and scored users in all trials",
            got=f"--vary of {names}",
            fix="make one sweep for each value, and add up what their choices cost",
        )


def _check_private(setting: Experiment, aim: str, *, covered: bool) -> None:
    """Check that an epsilon holds of a setting, whose validation users train if `covered`."""
    privacy = setting.privacy
    rules = {
        "a table [privacy] with noise in all phases": privacy is not None
        and privacy.noise_multiplier != 0
        and "*" in privacy.private_phases,
        "placement = 'central' or 'distributed'": privacy is None or privacy.placement != "local",
        "validation users who do not train, as with split.validation-role = 'held-out'": (
            not covered
        ),
        "a metric of the validation users' own rows; this one counts those of training users": (
            not aim.startswith(_OF_TRAINING_USERS)
        ),
    }
    for expected, holds in rules.items():
        if not holds:
            raise ExperimentError(
                "this choice cannot be made private",
                expected=expected,
                got=f"{setting.name}, chosen by {aim}",
                fix="change it, or leave --private-choice out",
            )


def publish(run: RunFolder, score: float, cost: ChoiceCost, folder: Path) -> None:
    """Make the published run of a sweep's folder, a run folder with the chosen setting, its
    parameters, its score and the cost of the choice; one that is there remains.

    It is made of these alone. Files of the chosen run that tell more stay private: metrics of
    rounds and users, its ledger, which states the cost of one trial, the times, and the name, which
    has the number of the trial.

    Args:
        run: the chosen run, finished.
        score: its score.
        cost: of the choice.
        folder: of the sweep.
    """
    state = Checkpoints.of(run).latest()
    if state is None or (folder / CHOSEN / "result.json").is_file():
        return
    shutil.rmtree(folder / CHOSEN, ignore_errors=True)  # of an interrupted start
    target = RunFolder.create(run.experiment, folder / CHOSEN)
    about = {key: value for key, value in target.about.items() if key not in _PRIVATE}
    write_atomically(target.path / "run.json", json.dumps(about, indent=2) + "\n")
    last, parameters = ending(state)
    rounds = [{"round": number + 1, "epsilon": cost.epsilon} for number in range(last)]
    Checkpoints.of(target).save(State(last, parameters))
    target.write_rounds(rounds, [])
    target.set_status("finished", last)
    result = Result(
        experiment=run.experiment,
        folder=target.path,
        metrics={cost.aim: score},
        before_fine_tuning={},
        baselines={},
        rounds=pd.DataFrame(rounds),
        users=pd.DataFrame(index=pd.Index([], dtype="int64", name="client")),
        groups=pd.DataFrame(index=pd.Index([], name="group")),
    )
    target.write_result(result, {"privacy": cost.record()})
