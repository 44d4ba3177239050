# SPDX-License-Identifier: Apache-2.0
"""The attack by fit (Yeom et al. 2018, section 3): a user whom the system fits well is called a
member.

Where this differs from the paper: it compares the loss of one example with the mean training loss;
here a user is the unit, its fit is a mean over its rows (`fedrec.attacks.signals`), and the median
of all users stands for the mean loss.
"""

from __future__ import annotations

import numpy as np

from fedrec.attacks.base import Attack, Attacked
from fedrec.attacks.signals import Signal, fit_signals
from fedrec.config import Config


class FitConfig(Config):
    """Settings of the attack by fit."""

    signal: Signal = "contrast"
    """How well scores fit a user: `positives` or `contrast`, see `fedrec.attacks.signals`."""


class Fit(Attack):
    """Suspects the users whom the system fits best; needs no shadow system."""

    Config = FitConfig
    paper = "Yeom et al. 2018, section 3"
    config: FitConfig

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """`float64 [users]`, one number per user of `attacked.users`: the higher, the more likely
        it trained."""
        blocks = attacked.scores(attacked.users)
        signal = self.config.signal
        return np.concatenate(
            [fit_signals(scores, attacked.population, part, signal) for part, scores in blocks]
        )
