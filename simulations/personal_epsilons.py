# SPDX-License-Identifier: Apache-2.0
"""The true epsilon of each user in experiments whose users add their own noise, computed before
training. It follows from the experiment: budgets from their seed, cohorts from seed and round. A
sampled user is charged even if its upload fails.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedrec.components import registry
from fedrec.data.population import Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import Experiment
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.privacy.personal.report import epsilon_table
from server.privacy.personal_budgets import refuse_phases


def personal_noise(experiment: Experiment) -> PersonalNoise:
    """The users' noise of a resolved experiment.

    Raises:
        ExperimentError: its step has none.
    """
    settings = experiment.settings(registry.STEP)
    if isinstance(settings, PersonalNoise):
        return settings
    raise ExperimentError(
        "users have no personal budgets with this step",
        expected="step dpvae or dpsgd",
        got=experiment.step.name,
        fix="take an experiment with one of these steps, such as dpvae-ml100k",
    )


def personal_epsilons(experiment: Experiment, rounds: int | None = None) -> pd.DataFrame:
    """One row per training client, see `fedrec.privacy.personal.report.epsilon_table`.

    Args:
        experiment: a resolved experiment whose users add noise of their own.
        rounds: number of rounds; default: all of the experiment.

    Raises:
        ExperimentError: the experiment has another step, or phases with other steps.
    """
    settings = personal_noise(experiment)
    refuse_phases(experiment)
    clients = Population.of(experiment).partition.training_clients
    sampler_class = registry.resolve(registry.SAMPLER, experiment.sampler.name)
    sampler = sampler_class(experiment.settings(registry.SAMPLER), clients, experiment.seed)
    asked = np.zeros(len(clients), dtype=np.int64)
    for number in range(1, (experiment.rounds if rounds is None else rounds) + 1):
        asked[np.searchsorted(clients, sampler.sample(number))] += 1
    return epsilon_table(settings, clients.tolist(), asked.tolist())
