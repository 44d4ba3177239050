# SPDX-License-Identifier: Apache-2.0
"""Membership attack: users with many of their own items at the top of their list are suspected."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from simulations.attacks.base import Attacked, MembershipAttack, MembershipConfig


class ExampleConfig(MembershipConfig):
    """Settings; unknown keys are rejected, and every field has a description."""

    length: int = Field(default=20, ge=1)
    """Items in a list."""


class Example(MembershipAttack):
    """Share of a user's own positives among the first items of its list."""

    Config = ExampleConfig
    config: ExampleConfig

    def suspicion(self, attacked: Attacked) -> np.ndarray:
        """One number per user of `attacked.users`: the higher, the more likely it trained."""
        lists = attacked.target.lists(attacked.users, self.config.length)
        found = []
        for user, own in zip(attacked.users.tolist(), lists, strict=True):
            positives = attacked.population.client(user).positives
            found.append(float(np.isin(positives, own).mean()) if len(positives) else 0.0)
        return np.array(found)
