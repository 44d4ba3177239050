# SPDX-License-Identifier: Apache-2.0
"""The likelihood-ratio attack (Carlini et al. 2022): shadow federations on random halves of the
users, and a target; `fedrec.attacks.lira` has the statistic."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from fedrec.attacks.lira import Mode, Variance, lira_scores
from fedrec.runtime.atomic_files import open_atomically
from simulations.attacks.base import TARGET, Attacked, AttackRun
from simulations.attacks.builtin.fit import Fit, FitConfig
from simulations.attacks.members import half_memberships


class LiraConfig(FitConfig):
    """Settings of the likelihood-ratio attack."""

    shadows: int = Field(default=16)
    """Number of shadow systems: even, at least 4."""
    mode: Mode = "online"
    """`online` compares systems that were trained with a user and without it; `offline` uses the
    latter alone."""
    variance: Variance = "global"
    """Of the signals: one for all users (`global`), or one per user (`user`)."""


class Lira(Fit):
    """Likelihood-ratio attack with shadow federations."""

    name = "lira"
    Config = LiraConfig
    paper = "Carlini et al. 2022"
    config: LiraConfig

    def trainings(self, attacked: Attacked) -> Mapping[str, AttackRun]:
        """The target, and shadow systems of half of the users each.

        Raises:
            ExperimentError: the number of shadow systems is wrong.
        """
        masks = half_memberships(len(attacked.users), self.config.shadows, self.seed)
        shadows = {
            f"shadow-{number:03d}": AttackRun(mask, attacked.seed_of("attack-run", number))
            for number, mask in enumerate(masks, 1)
        }
        return {**super().trainings(attacked), **shadows}

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """`float64 [users]`, see `lira_scores`. The signals are saved in `signals.npz`."""
        users = attacked.users
        shadows = [system for name, system in attacked.systems.items() if name != TARGET]
        arrays = {
            "target": self.signals(attacked, attacked.target),
            "member": np.isin(users, attacked.target.members),
            "shadows": np.stack([self.signals(attacked, one) for one in shadows]),
            "masks": np.stack([np.isin(users, one.members) for one in shadows]),
        }
        with open_atomically(attacked.folder / "signals.npz") as file:
            np.savez(file, users=users, **arrays)
        return lira_scores(
            arrays["target"],
            arrays["shadows"],
            arrays["masks"],
            mode=self.config.mode,
            variance=self.config.variance,
        )

    def threshold(self, suspicion: np.ndarray) -> float:
        """Online 0, offline the median."""
        return 0.0 if self.config.mode == "online" else super().threshold(suspicion)
