# SPDX-License-Identifier: Apache-2.0
"""Cost of the noise that a user's device adds itself, for the owner's limit over all runs.

Neighbours differ in all rows of one user (the sensitivity is 2S), and who takes part is known, so
that no sampling amplifies. Releases of Gaussian noise compose exactly by the sum of mu^2 (Dong,
Roth and Su 2022). A release with pure epsilon e is one of mu = -2 Phi^-1(1 / (1 + exp(e))): its
trade-off function lies above the chord of the Gaussian one.
"""

from __future__ import annotations

import math

from fedrec.components import registry
from fedrec.experiment.phases import Phase
from fedrec.experiment.sections import Section, component_settings
from fedrec.privacy.clipping import Clip
from fedrec.privacy.mechanisms.base import mechanism_of
from fedrec.privacy.personal.noise import PersonalNoise
from fedrec.privacy.protection import Protection

_DELTA = 1e-5


def own_noise(phase: Phase) -> PersonalNoise | None:
    """The settings of noise of each client's own in the step of a phase; None: it has none."""
    settings = component_settings(registry.STEP, Section.model_validate(phase.step))
    return settings if isinstance(settings, PersonalNoise) else None


def rho_of(protection: Protection | None, own: PersonalNoise | None) -> float | None:
    """mu^2 / 2 of one upload, which is zero-concentrated DP (Bun and Steinke 2016) for Gaussian
    noise; of the user with the largest budget; None: the noise has no known cost.

    Args:
        protection: of the order, with a noise scale above 0 where clients add noise.
        own: noise of the step, which counts instead.
    """
    if own is not None:
        cost = own.of_largest_budget().cost(0, "replace-one", 1)
        return cost / 2 if math.isfinite(cost) else None
    if protection is None or protection.noise_scale <= 0:
        return None
    moved = Clip(protection.clip_norm).sensitivity("replace-one")
    pair = mechanism_of(protection.mechanism).pair(protection.noise_scale / moved)
    if pair.mu is not None:
        return pair.mu**2 / 2
    from scipy.special import ndtri  # importing it is slow, and most noise has a mu

    mu = -2 * ndtri(1 / (1 + math.exp(min(pair.pure_epsilon, 700.0))))
    return float(mu) ** 2 / 2 if math.isfinite(pair.pure_epsilon) else None


def largest_rho(epsilon: float) -> float:
    """mu^2 / 2 of all uploads together that cost epsilon at delta 1e-5."""
    from fedrec.privacy.accounting.gdp import gdp_parameter  # likewise

    return gdp_parameter(epsilon, _DELTA) ** 2 / 2
