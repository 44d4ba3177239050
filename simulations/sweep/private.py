# SPDX-License-Identifier: Apache-2.0
"""Private choice of settings: a random number of trials, each with a setting that is drawn anew, of
which only the best is published (`fedrec.privacy.accounting.private_choice`).

The guarantee is for training users. Where validation users do not train, their rows give scores
without noise, and no epsilon is about them. Where they train, a score is a release like a round:
the mean of a metric in [0, 1] over n users moves by at most 1 / (n - 1), and gets noise.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrec.errors import ExperimentError, RunError
from fedrec.evaluation.metrics import lower_is_better
from fedrec.experiment.loading import load
from fedrec.experiment.schema import Experiment
from fedrec.privacy.accounting.private_choice import Law, RandomTrials
from fedrec.rng import stream
from fedrec.runtime.atomic_files import write_atomically
from fedrec.runtime.text_files import read_json
from simulations.sweep.space import Point, Space, grid, overrides

if TYPE_CHECKING:
    from fedrec.privacy.accounting.events import Release

_BOUNDED = ("hits", "ndcg", "recall", "hit-rate", "precision", "map", "ndcg-list")
SCORES = "scores.json"


@dataclass(frozen=True)
class PrivateChoice:
    """How a setting is chosen privately.

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

    def draws(self, experiment: Experiment, name: str, *address: int) -> np.random.Generator:
        """Random numbers of the choice, which have to be secret: from the operating system in mode
        `secure`, else from the seed."""
        if experiment.hides_cohorts:
            return np.random.default_rng(secrets.randbits(256))
        return stream(experiment.seed, f"private-choice/{name}", *address)


@dataclass(frozen=True)
class ChoiceCost:
    """What a private choice costs, before anything runs.

    Attributes:
        epsilon: of all that is published.
        delta: at which it holds.
        once: epsilon of one trial by the same accountant.
        validated: number of validation users.
        covered: whether they train, so that the guarantee is for them, too.
        choice: how the setting is chosen.
        aim: the metric.
    """

    epsilon: float
    delta: float
    once: float
    validated: int
    covered: bool
    choice: PrivateChoice
    aim: str

    def lines(self) -> Iterator[str]:
        """What is published at what cost, who is covered, and what has to stay secret."""
        number = f"{self.choice.law}, {self.choice.mean:g} on average"
        noisy = f" and its {self.aim} under noise" if self.covered else ""
        yield (
            f"Published: the best setting, its model{noisy}. Together they cost training users"
            f" epsilon {self.epsilon:.4g} at delta {self.delta:g}, whatever the number of trials is"
            f" ({number}); one trial alone, {self.once:.4g} by the same accountant."
        )
        if self.covered:
            yield (
                f"The {self.validated} validation users train: each score has noise of standard"
                f" deviation {self.choice.score_noise:g}, and the epsilon is for them, too."
            )
        else:
            yield (
                f"The {self.validated} validation users do not train: their rows choose the setting"
                " without noise, and no epsilon is about them."
            )
        yield (
            "Nothing else of the sweep may be published: not the number of trials, the tables of"
            " runs and settings, or another run."
        )


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
        ExperimentError: a setting is not private, a range is among the values, or a score needs
            noise.
    """
    from fedrec.data.population import Population
    from fedrec.privacy.accounting.backends.tight_rdp import TightRdp
    from fedrec.privacy.accounting.rdp import epsilon_of
    from server.privacy.phase_plans import PhasePlans

    settings = [load(experiment, overrides(point)) for point in grid(space)]
    population = Population.of(settings[0])
    trained = population.partition.training_clients
    users = population.interactions.users[population.partition.validation_rows]
    validated = np.unique(users)
    covered = bool(np.isin(validated, trained).any())
    backend = TightRdp()
    curves = []
    deltas = []
    for setting in settings:
        _refuse(setting, choice, aim, covered=covered)
        plans = PhasePlans.before_a_run(setting, trained)
        releases = dict(plans.planned().releases)
        if covered:
            score = _score_release(plans, choice, len(validated))
            releases[score] = releases.get(score, 0) + 1
        curves.append(backend.total(releases))
        deltas.append(plans.delta)
    curve = np.max(curves, axis=0)
    delta = max(deltas)
    epsilon = choice.number.epsilon(curve[:-1], delta)
    once = float(epsilon_of(curve, delta)[0])
    return ChoiceCost(epsilon, delta, once, len(validated), covered, choice, aim)


def noisy_scores(
    folder: Path, experiment: Experiment, choice: PrivateChoice, scores: Mapping[int, float]
) -> dict[int, float]:
    """The score of each trial, with noise if there is any; drawn once, and kept in the folder."""
    file = folder / SCORES
    known: dict[int, float] = {}
    if file.exists():
        try:
            known = {int(trial): float(score) for trial, score in read_json(file).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(
                f"{file} is damaged",
                expected="a score for each trial, as fedrec wrote it",
                got=str(error),
                fix="restore it from a backup: other noise would be a second release",
            ) from None
    for trial, score in scores.items():
        if trial not in known:
            drawn = choice.draws(experiment, "score", trial).standard_normal()
            known[trial] = score + choice.score_noise * float(drawn)
    write_atomically(file, json.dumps(known))
    return {trial: known[trial] for trial in scores}


def drawn_setting(choice: PrivateChoice, experiment: Experiment, space: Space, trial: int) -> Point:
    """The setting of a trial, uniformly from the grid, whatever was tried before."""
    points = grid(space)
    return points[int(choice.draws(experiment, "setting", trial).integers(len(points)))]


def _score_release(plans: Any, choice: PrivateChoice, users: int) -> Release:
    from fedrec.privacy.accounting.events import Release
    from fedrec.privacy.accounting.sampling import Full

    # a user moves the mean by at most 1 / n, and n by 1 if its rows decide whether it counts
    multiplier = choice.score_noise * max(1, users - 1)
    return Release("gaussian", Full(), plans.config.adjacency, multiplier)


def _refuse(setting: Experiment, choice: PrivateChoice, aim: str, *, covered: bool) -> None:
    privacy = setting.privacy
    rules = [
        (
            "privacy",
            "a table [privacy] with noise in all phases",
            privacy is None or privacy.noise_multiplier == 0 or "*" not in privacy.private_phases,
        ),
        (
            "placement",
            "placement = 'central' or 'distributed'",
            privacy is not None and privacy.placement == "local",
        ),
        (
            "early-stopping",
            "no [early-stopping] where validation users train, as it looks at their rows",
            covered and setting.early_stopping is not None,
        ),
        (
            "score-noise",
            "--score-noise, as validation users train",
            covered != (choice.score_noise > 0),
        ),
        (
            "aim",
            f"a metric in [0, 1], one of {', '.join(_BOUNDED)}, as validation users train",
            covered and (aim.partition("@")[0] not in _BOUNDED or lower_is_better(aim)),
        ),
    ]
    for name, expected, broken in rules:
        if broken:
            given = choice.score_noise > 0 and not covered and name == "score-noise"
            raise ExperimentError(
                f"this choice cannot be made private ({name})",
                expected="no --score-noise: validation users do not train" if given else expected,
                got=f"{aim}, score noise {choice.score_noise:g}, validation users "
                + ("train" if covered else "do not train"),
                fix="change it, or leave --private-choice out",
            )
