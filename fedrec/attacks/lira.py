# SPDX-License-Identifier: Apache-2.0
"""The likelihood-ratio attack (Carlini et al. 2022, algorithm 1 and section VI) with federations in
place of models.

Shadow systems are trained on random halves of the users. For each user, the signals of systems that
were trained with it and of those that were not are fitted by two normal distributions; the attack's
score is the log ratio of their densities at the target system's signal (online), or how improbable
so large a signal is without the user (offline).

Where this differs from the paper: one "example" is one user with all its data; the signal is a mean
over the user's positives (`fedrec.attacks.signals`); there is no augmentation, so one signal per
user and system.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import log_ndtr

Mode = Literal["online", "offline"]
Variance = Literal["global", "user"]

_SMALLEST_SD = 1e-12


def lira_scores(
    target: np.ndarray,
    shadows: np.ndarray,
    member: np.ndarray,
    *,
    mode: Mode = "online",
    variance: Variance = "global",
) -> np.ndarray:
    """Score of each user; higher means "member".

    Args:
        target: `float [users]`, signals under the target system.
        shadows: `float [runs, users]`, signals under the shadow systems.
        member: `bool [runs, users]`, which users trained which system; each user needs two systems
            of each kind (offline: two that it did not train).
        mode: `"online"` compares both fits; `"offline"` uses only systems that the user did not
            train, which an attacker can train before choosing whom to attack.
        variance: `"user"` fits a variance per user; `"global"` pools it over users, better with few
            shadow systems.

    Returns:
        `float64 [users]`: online, log density ratio (0 is undecided); offline, minus the log of the
        probability of such a large signal without the user (log 2 is the middle).

    Raises:
        ValueError: shapes differ, or a user has too few systems of a kind.
    """
    target = np.asarray(target, np.float64)
    shadows = np.asarray(shadows, np.float64)
    if shadows.shape != member.shape or shadows.shape[1:] != target.shape:
        raise ValueError(
            f"Expected [users] and [runs, users] twice, got {target.shape}, {shadows.shape},"
            f" {member.shape}."
        )
    mean, sd = _fit(shadows, ~member, variance)
    if mode == "offline":
        return -log_ndtr(-(target - mean) / sd)
    mean_in, sd_in = _fit(shadows, member, variance)
    return _log_density(target, mean_in, sd_in) - _log_density(target, mean, sd)


def _fit(
    signals: np.ndarray, chosen: np.ndarray, variance: Variance
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation `[users]` over the chosen runs of each user."""
    counts = chosen.sum(axis=0)
    if counts.min(initial=2) < 2:
        raise ValueError("Expected at least two shadow systems of each kind for every user.")
    mean = np.where(chosen, signals, 0.0).sum(axis=0) / counts
    squares = np.where(chosen, np.square(signals - mean), 0.0).sum(axis=0)
    freedom = counts - 1
    spread = (
        squares / freedom
        if variance == "user"
        else np.full(len(mean), squares.sum() / freedom.sum())
    )
    return mean, np.sqrt(np.maximum(spread, _SMALLEST_SD**2))


def _log_density(value: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    return -np.log(sd) - np.square((value - mean) / sd) / 2
