# SPDX-License-Identifier: Apache-2.0
"""Private choice of settings: only the best of a random number of trials, each with a randomly
drawn setting, is published (`fedrec.privacy.accounting.accountant`).

All trials have one population: the data, the split and the threshold of positive rows are the same
for all settings, and the split has its own seed. All other randomness of a trial follows from a
seed that does not reveal the trial's number, because the number is not published.

The guarantee is for training users. Validation users must not train: their rows give scores without
noise, and no epsilon covers them.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import DataSettings
from fedrec.privacy.accounting.accountant import RandomTrials, rdp_total
from fedrec.privacy.accounting.rdp import epsilon_of
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.files import write_json
from server.checkpoint import Checkpoints, State
from server.early_stopping import ending
from server.privacy.phase_plans import PhasePlans
from simulations.studies.search import Space, grid, overrides

_OF_TRAINING_USERS = "popularity"
_PRIVATE = ("created", "command")  # end and location of the sweep
CHOSEN = "chosen"
"""Publishable folder of a sweep."""


def choice_stream(experiment: Experiment, name: str, *address: int) -> np.random.Generator:
    """Random generator of a private choice, which must be secret. In mode `secure` it is seeded by
    the operating system, so that neither a published seed nor initial values derived from it
    reveal the trial's number; in mode `reproducible` it follows from the experiment's seed, so
    that a simulation can be repeated."""
    if experiment.hides_cohorts:
        return np.random.default_rng(secrets.randbits(256))
    return stream(experiment.seed, f"private-choice/{name}", *address)


@dataclass(frozen=True)
class ChoiceCost:
    """Cost of a private choice, known before the first run.

    Attributes:
        epsilon: epsilon of all published results.
        delta: delta of this epsilon.
        once: epsilon of one trial by the same accountant.
        choice: distribution of the number of trials.
        aim: the metric.
    """

    epsilon: float
    delta: float
    once: float
    choice: RandomTrials
    aim: str

    def lines(self) -> list[str]:
        """Sentences on published results, their cost, covered users and secret files."""
        return [
            f"Published: the best setting, its model and its {self.aim}. Together they cost"
            f" training users epsilon {self.epsilon:.4g} at delta {self.delta:g} for any number"
            f" of trials ({self.choice.law}, {self.choice.mean:g} on average); a single trial"
            f" costs {self.once:.4g} by the same accountant.",
            "Validation users do not train: their rows choose the setting without noise, and no"
            " epsilon covers them.",
            "All other results of the sweep must stay private: the number of trials, the number"
            " of the chosen trial, the tables of runs and settings, and the sweep's runs.",
        ]

    def record(self) -> dict[str, Any]:
        """Privacy of the chosen run, as in its result.json."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "method": f"Rényi curve of the best of a random ({self.choice.law}) number of trials",
            "choice": asdict(self.choice),
            "in words": self.lines(),
        }


def cost_of(
    experiment: Mapping[str, Any], space: Space, choice: RandomTrials, aim: str
) -> ChoiceCost:
    """Compute the cost of a private choice among the settings of a grid.

    Args:
        experiment: table of the experiment that is varied.
        space: lists of values; the most expensive setting counts at each Rényi order.
        choice: distribution of the number of trials.
        aim: the metric.

    Raises:
        ExperimentError: a setting is not private, settings have different data, the space has a
            range, or training users are scored.
    """
    settings = [load(experiment, overrides(point)) for point in grid(space)]
    _check_same_data(settings)
    population = Population.of(settings[0])
    trained = population.partition.training_clients
    validated = population.interactions.users[population.partition.validation_rows]
    curves = []
    deltas = []
    for setting in settings:
        _check_private(setting, aim, covered=bool(np.isin(validated, trained).any()))
        plans = PhasePlans.before_a_run(setting, trained)
        curves.append(rdp_total(dict(plans.planned().releases)))
        deltas.append(plans.delta)
    curve = np.max(curves, axis=0)
    delta = max(deltas)
    epsilon = choice.epsilon(curve[:-1], delta)
    return ChoiceCost(epsilon, delta, float(epsilon_of(curve, delta)), choice, aim)


def _check_same_data(settings: Sequence[Experiment]) -> None:
    """Check that all settings have the same clients and scored users.

    Raises:
        ExperimentError: they differ.
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
            fix="run one sweep per value, and add up the costs of their choices",
        )


def _check_private(setting: Experiment, aim: str, *, covered: bool) -> None:
    """Check that a setting has an epsilon for a private choice; validation users train if
    `covered`."""
    privacy = setting.privacy
    rules = {
        "a table [privacy] with noise": privacy is not None and privacy.noise_multiplier != 0,
        "placement = 'central' or 'distributed'": privacy is None or privacy.placement != "local",
        "validation users who do not train, as with split.validation-role = 'held-out'": (
            not covered
        ),
        "a metric of the validation users' own rows, not of training users": (
            not aim.startswith(_OF_TRAINING_USERS)
        ),
    }
    for expected, holds in rules.items():
        if not holds:
            raise ExperimentError(
                "this choice cannot be made private",
                expected=expected,
                got=f"{setting.name}, chosen by {aim}",
                fix="change this setting, or leave out --private-choice",
            )


def publish(run: RunFolder, score: float, cost: ChoiceCost, folder: Path) -> None:
    """Write the published run of a sweep, a run folder with the chosen setting, its parameters, its
    score and the cost of the choice, unless it exists.

    All other files of the chosen run stay private: metrics of rounds and users, the ledger, which
    states the cost of one trial, the times, and the name, which has the trial's number.

    Args:
        run: the chosen, finished run.
        score: its score.
        cost: cost of the choice.
        folder: folder of the sweep.
    """
    state = Checkpoints.of(run).latest()
    if state is None or (folder / CHOSEN / "result.json").is_file():
        return
    shutil.rmtree(folder / CHOSEN, ignore_errors=True)  # of an interrupted start
    target = RunFolder.create(run.experiment, folder / CHOSEN)
    about = {key: value for key, value in target.about.items() if key not in _PRIVATE}
    write_json(target.path / "run.json", about)
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
