# SPDX-License-Identifier: Apache-2.0
"""Private choice of settings: random trials, of which only the best is published.

Private choice of settings: a random number of trials, each with a setting that is drawn anew, of
which only the best is published (`fedrec.privacy.accounting.accountant`).

All trials have one population: the data, the split and the threshold of positive rows are the same
for all settings, and the split draws from a seed of its own. What else is random in a trial follows
from a seed that says nothing of the trial's number, because the number is not published.

The guarantee is for training users. Where validation users do not train, their rows give scores
without noise, and no epsilon is about them. Where they train, a score is a release like a round and
gets noise: it is the mean of a metric in [0, 1] over the n users who have a validation row to rank.
If one user is replaced, n stays, or it becomes n - 1 or n + 1, as the new rows decide whether the
user counts. The mean then moves by at most 1 over the larger of both numbers. What is charged,
1 / (n - 1), bounds it whichever of the two tables is at hand.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedrec.data.population import Population
from fedrec.errors import ExperimentError, RunError
from fedrec.evaluation.tables import lower_is_better
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.experiment.tables import DataSettings
from fedrec.privacy.accounting.accountant import Law, RandomTrials
from fedrec.privacy.accounting.backends import Autodp
from fedrec.privacy.accounting.events import Release
from fedrec.privacy.accounting.rdp import epsilon_of
from fedrec.privacy.accounting.sampling import Full
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from fedrec.runs.result import Result
from fedrec.runtime.files import read_json, write_atomically
from server.checkpoint import Checkpoints, State
from server.early_stopping import ending
from server.privacy.phase_plans import PhasePlans
from simulations.studies.space import Point, Space, grid, overrides

_BOUNDED = ("hits", "discounted-hits", "recall", "hit-rate", "precision", "map", "ndcg")
_OF_TRAINING_USERS = "popularity"
_SEEDS = 2**53  # whole numbers that all readers of JSON know exactly
SCORES = "scores.json"


@dataclass(frozen=True)
class PrivateChoice:
    """Law and noise of a private choice of a setting.

    Attributes:
        law: distribution of the number of trials.
        mean: its mean.
        score_noise: standard deviation of the noise on a score; 0: none.
    """

    law: Law
    mean: float
    score_noise: float = 0.0

    @property
    def number(self) -> RandomTrials:
        """The random number of trials."""
        return RandomTrials(self.law, self.mean)

    def seeds(self, experiment: Experiment, trials: int) -> tuple[int, ...]:
        """A seed for each of some trials. In mode `secure` they are drawn like the rest of the
        choice, from the operating system, so that neither a published seed nor the initial values
        that follow from it tell the number of the trial. In mode `reproducible` they follow from
        the experiment's seed, so that a simulation can be repeated."""
        drawn = self.draws(experiment, "seeds").integers(_SEEDS, size=trials)
        return tuple(int(seed) for seed in drawn)

    def draws(self, experiment: Experiment, name: str, *address: int) -> np.random.Generator:
        """Random numbers of the choice, which have to be secret: from the operating system in mode
        `secure`, else from the seed."""
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
        scored: number of validation users whose rows give the scores.
        covered: whether validation users train, so that the guarantee is for them, too.
        choice: how the setting is chosen.
        aim: the metric.
    """

    epsilon: float
    delta: float
    once: float
    scored: int
    covered: bool
    choice: PrivateChoice
    aim: str

    def lines(self) -> Iterator[str]:
        """Sentences on what is published at what cost, who is covered, and what stays secret."""
        number = f"{self.choice.law}, {self.choice.mean:g} on average"
        noisy = " under noise" if self.covered else ""
        yield (
            f"Published: the best setting, its model and its {self.aim}{noisy}. Together they cost"
            f" training users epsilon {self.epsilon:.4g} at delta {self.delta:g}, whatever the"
            f" number of trials is ({number}); one trial alone, {self.once:.4g} by the same"
            " accountant."
        )
        if self.covered:
            yield (
                f"Validation users train. A score is a mean over {self.scored} of them, which one"
                f" user moves by at most {_sensitivity(self.scored):.4g}; it has noise of standard"
                f" deviation {self.choice.score_noise:g}, and the epsilon is for them, too."
            )
        else:
            yield (
                f"The {self.scored} validation users do not train: their rows choose the setting"
                " without noise, and no epsilon is about them."
            )
        yield (
            "Nothing else of the sweep may be published: not the number of trials, the number of"
            " the chosen one, the tables of runs and settings, or a run of the sweep."
        )

    def record(self) -> dict[str, Any]:
        """The privacy of the chosen run, as in its result.json."""
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "method": f"Rényi curve of the best of a {self.choice.law} number of trials",
            "choice": {
                "law": self.choice.law,
                "mean": self.choice.mean,
                "score-noise": self.choice.score_noise,
            },
            "in words": list(self.lines()),
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
            among the values, or a score needs noise.
    """
    settings = [load(experiment, overrides(point)) for point in grid(space)]
    check_same_data(settings)
    population = Population.of(settings[0])
    trained = population.partition.training_clients
    validated = population.interactions.users[population.partition.validation_rows]
    covered = bool(np.isin(validated, trained).any())
    evaluated = len(population.evaluated_clients("validation"))
    scored = min(evaluated, settings[0].evaluation.final_users or evaluated)
    backend = Autodp()
    curves = []
    deltas = []
    for setting in settings:
        _check_private(setting, choice, aim, covered=covered, sampled=scored < evaluated)
        plans = PhasePlans.before_a_run(setting, trained)
        releases = dict(plans.planned().releases)
        if covered:
            multiplier = choice.score_noise / _sensitivity(scored)
            score = Release("gaussian", Full(), plans.config.adjacency, multiplier)
            releases[score] = releases.get(score, 0) + 1
        curves.append(backend.total(releases))
        deltas.append(plans.delta)
    curve = np.max(curves, axis=0)
    delta = max(deltas)
    epsilon = choice.number.epsilon(curve[:-1], delta)
    once = float(epsilon_of(curve, delta)[0])
    return ChoiceCost(epsilon, delta, once, scored, covered, choice, aim)


def noisy_scores(
    folder: Path, experiment: Experiment, choice: PrivateChoice, scores: Mapping[int, float]
) -> dict[int, float]:
    """The score of each trial, with noise if there is any; drawn once, and saved in the folder.

    Raises:
        RunError: the saved scores are damaged, or not finite.
    """
    file = folder / SCORES
    noisy: dict[int, float] = {}
    if file.exists():
        try:
            noisy = {int(trial): _finite(value) for trial, value in read_json(file).items()}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise RunError(
                f"{file} is damaged",
                expected="a finite number for each trial, as fedrec wrote it",
                got=str(error),
                fix="restore it from a backup: other noise would be a second release",
            ) from None
    for trial in [trial for trial in scores if trial not in noisy]:
        drawn = choice.draws(experiment, "score", trial).standard_normal()
        noisy[trial] = scores[trial] + choice.score_noise * float(drawn)
    write_atomically(file, json.dumps(noisy))
    return {trial: noisy[trial] for trial in scores}


def _finite(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)  # type: ignore[arg-type]


def drawn_setting(choice: PrivateChoice, experiment: Experiment, space: Space, trial: int) -> Point:
    """The setting of a trial, uniformly from the grid, whatever was tried before."""
    points = grid(space)
    return points[int(choice.draws(experiment, "setting", trial).integers(len(points)))]


def _sensitivity(users: int) -> float:
    """By how much one user moves a score over some users at most, see above."""
    return 1 / max(1, users - 1)


def check_same_data(settings: Sequence[Experiment]) -> None:
    """Refuse settings whose clients or scored users differ.

    Raises:
        ExperimentError: they do.
    """
    keys = set(DataSettings.model_fields) - {"seed"}
    tables = [setting.model_dump(mode="json", include=keys) for setting in settings]
    differing = {key for table in tables for key in keys if table[key] != tables[0][key]}
    if len({setting.evaluation.final_users for setting in settings}) > 1:
        differing.add("evaluation.final_users")
    if differing:
        names = ", ".join(sorted(differing)).replace("_", "-")
        raise ExperimentError(
            f"the settings of a private choice have different data ({names})",
            expected="the same clients, held-out rows and scored users in all trials",
            got=f"--vary of {names}",
            fix="make one sweep for each value, and add up what their choices cost",
        )


def _check_private(
    setting: Experiment, choice: PrivateChoice, aim: str, *, covered: bool, sampled: bool
) -> None:
    """Refuse a setting of which no epsilon would hold.

    Args:
        setting: the experiment.
        choice: how the setting is chosen.
        aim: the metric.
        covered: whether validation users train.
        sampled: whether the final evaluation takes some of the validation users.

    Raises:
        ExperimentError: it is one.
    """
    privacy = setting.privacy
    bounded = aim.partition("@")[0] in _BOUNDED and not lower_is_better(aim)
    rules = {
        "a table [privacy] with noise in all phases": privacy is not None
        and privacy.noise_multiplier != 0
        and "*" in privacy.private_phases,
        "placement = 'central' or 'distributed'": privacy is None or privacy.placement != "local",
        "no [early-stopping] where validation users train, as it looks at their rows": (
            not covered or setting.early_stopping is None
        ),
        "--score-noise, as validation users train": not covered or choice.score_noise > 0,
        "no --score-noise: validation users do not train": covered or choice.score_noise == 0,
        f"a metric in [0, 1], one of {', '.join(_BOUNDED)}, as validation users train": (
            not covered or bounded
        ),
        "a metric of the validation users' own rows; this one counts those of training users": (
            not aim.startswith(_OF_TRAINING_USERS)
        ),
        "all validation users in the final evaluation ([evaluation] final-users), as they train:"
        " the sample is another one if one user more or less has a row to rank": (
            not (covered and sampled)
        ),
    }
    for expected, holds in rules.items():
        if not holds:
            raise ExperimentError(
                "this choice cannot be made private",
                expected=expected,
                got=f"{aim}, score noise {choice.score_noise:g}, validation users "
                + ("train" if covered else "do not train"),
                fix="change it, or leave --private-choice out",
            )


# What a private choice publishes: the folder `chosen/` of a sweep, a run folder with the chosen
# setting, its parameters, its score and the cost of the choice.
#
# It is made of these alone. Files of the chosen run that tell more stay private: metrics of rounds
# and users, which have no noise, its ledger, which states the cost of one trial, the times, and the
# name, which has the number of the trial.

CHOSEN = "chosen"
_PRIVATE = ("created", "command")  # when the sweep ended, and where it is


def publish(run: RunFolder, score: float, cost: ChoiceCost, folder: Path) -> None:
    """Make the published run of a sweep's folder from the chosen run; one that is there remains.

    Args:
        run: the chosen run, finished.
        score: its score, with noise if there is any.
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
    nobody = pd.DataFrame(index=pd.Index([], dtype="int64", name="client"))
    result = Result(
        experiment=run.experiment,
        folder=target.path,
        metrics={cost.aim: score},
        before_fine_tuning={},
        baselines={},
        rounds=pd.DataFrame(rounds),
        users=nobody,
        groups=pd.DataFrame(index=pd.Index([], name="group")),
    )
    target.write_result(result, {"privacy": cost.record()})
