# SPDX-License-Identifier: Apache-2.0
"""Whether a private personal model can learn from a table at an epsilon, decided from what is
public: the numbers of users, items and rows, and the settings. Otherwise private popularity, which
releases one number per item instead of one per pair of items, is given the whole budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedrec.experiment.phases import MAIN
from fedrec.experiment.schema import Experiment

LEAST = 0.2
"""The least signal. Chosen on validation users of four tables (Gowalla, MovieLens-100K, Amazon
Video and Office) at epsilon 1 and 5, one seed each: in the two cases below it (.11 and .13) private
popularity was better, in the six above it the personal model was, or level (Office, epsilon 5)."""


@dataclass(frozen=True)
class Signal:
    """What a private personal model can learn.

    Attributes:
        ratio: mean of the entries of the sum of the clients' products, if every row were of one of
            its items, over the standard deviation of their noise.
        clients: number of training clients.
        items: number of items that the products are about.
    """

    ratio: float
    clients: int
    items: int

    @property
    def suffices(self) -> bool:
        """Whether the personal model is trained."""
        return self.ratio >= LEAST

    @property
    def clients_needed(self) -> int:
        """Training clients that would suffice: the signal grows with their number, the noise hardly
        does."""
        return int(np.ceil(self.clients * LEAST / self.ratio))

    def _shows(self, text: str) -> bool:
        """Whether the ratio, as it is printed, is on its own side of the least one."""
        return (float(text) >= LEAST) == self.suffices

    def lines(self, epsilon: float) -> list[str]:
        """What is trained, why, and what would change that."""
        digits = next(n for n in range(2, 18) if self._shows(f"{self.ratio:.{n}g}"))
        given = f"epsilon {epsilon:g} with {self.clients:,} training users: "
        measured = (
            f"sums of products of {self.items:,} items are about {self.ratio:.{digits}g} times"
            f" their noise (at least {LEAST:g} is needed)"
        )
        if self.suffices:
            return [
                given + "a personal model is trained (fold-in on private embeddings); " + measured
            ]
        return [
            given + "the whole budget goes to private popularity, one list for everybody, because"
            " noise would cover what a personal model can learn; " + measured,
            f"a personal model needs about {self.clients_needed:,} training users at this epsilon,"
            " or a larger epsilon (--set rounds=2 trains it nevertheless)",
        ]


def signal_of(experiment: Experiment, users: int, rows_per_user: float) -> Signal:
    """The signal of an experiment with a private model of products.

    Args:
        experiment: with `[privacy]`, on an own table of interactions, of two rounds.
        users: number of training users, at least 1.
        rows_per_user: mean number of rows of a user.

    Raises:
        ExperimentError: no noise reaches the target epsilon.
    """
    from server.privacy.phase_plans import PhasePlans

    plan = PhasePlans.before_a_run(experiment, np.arange(users)).plans[MAIN]
    items = experiment.model.options["items"]
    noise = plan.noise_scale / plan.sensitivity
    return Signal(users * rows_per_user / (items**2 * noise), users, items)
