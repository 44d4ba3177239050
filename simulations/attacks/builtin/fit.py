# SPDX-License-Identifier: Apache-2.0
"""The attack by fit (Yeom et al. 2018, section 3): a user whom the system fits well is called a
member.

Where this differs from the paper: it compares the loss of one example with the mean training loss;
here a user is the unit, its fit is a mean over its rows (`fedrec.attacks.signals`), and the median
of all users stands for the mean loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedrec.attacks.signals import Signal, fit_signals
from simulations.attacks.base import Attacked, MembershipAttack, MembershipConfig

if TYPE_CHECKING:
    from simulations.attacks.system import TrainedSystem


class FitConfig(MembershipConfig):
    """Settings of the attack by fit."""

    signal: Signal = "contrast"
    """How well scores fit a user: `positives` or `contrast`, see docs/attacks.md."""
    fine_tune: bool = False
    """Whether the model is fine-tuned on the user's data before the fit is measured."""


class Fit(MembershipAttack):
    """Suspects the users whom the system fits best; needs no shadow system."""

    name = "fit"
    Config = FitConfig
    paper = "Yeom et al. 2018, section 3"
    config: FitConfig

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """`float64 [users]`: how well the target fits each user."""
        return self.signals(attacked, attacked.target)

    def signals(self, attacked: Attacked, system: TrainedSystem) -> np.ndarray:
        """`float64 [users]`: how well a system fits each user."""
        blocks = system.scores(attacked.users, fine_tune=self.config.fine_tune)
        signal = self.config.signal
        return np.concatenate(
            [fit_signals(scores, attacked.population, part, signal) for part, scores in blocks]
        )
