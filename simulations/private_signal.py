# SPDX-License-Identifier: Apache-2.0
"""Whether a private linear model can learn from a number of users at an epsilon, decided from what
is public: the numbers of users and items, and the settings. Otherwise private popularity, which
releases one number per item instead of one per pair of items, is given the whole budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedrec.experiment.phases import MAIN
from fedrec.experiment.schema import Experiment

_LEAST = 0.6
_ITEMS = 3000
"""The least signal is 0.6, or items / 3000 in larger catalogues, whose users share fewer items.
Chosen on eight tables (120 to 11,830 items, 300 to 8,072 users) at epsilon 1, 2 and 5, one seed
each: in the ten cases below it, private popularity was better; in eight of the fourteen above it,
the linear model was."""


@dataclass(frozen=True)
class Signal:
    """What a private linear model can learn at most.

    Attributes:
        ratio: norm of the largest possible sum of the clients' products / that of its noise.
        least: ratio below which private popularity is used.
        clients: number of training clients.
    """

    ratio: float
    least: float
    clients: int

    @property
    def suffices(self) -> bool:
        """Whether the linear model is trained."""
        return self.ratio >= self.least

    @property
    def users_needed(self) -> float:
        """Times as many training users as there are that would suffice: the signal grows with their
        number, the noise hardly does."""
        return self.least / self.ratio


def signal_of(experiment: Experiment, users: int, items: int) -> Signal:
    """The signal of an experiment with a private linear model.

    Args:
        experiment: with `[privacy]`, on an own table of interactions, of two rounds.
        users: number of training users, at least 1.
        items: size of the catalogue.

    Raises:
        ExperimentError: no noise reaches the target epsilon.
    """
    from server.privacy.phase_plans import PhasePlans

    plan = PhasePlans.before_a_run(experiment, np.arange(users)).plans[MAIN]
    weighted = min(items, experiment.model.options["items"])
    ratio = plan.clip_norm / (plan.mean_noise_std * weighted)
    return Signal(ratio, max(_LEAST, items / _ITEMS), users)
