# SPDX-License-Identifier: Apache-2.0
"""Segment attack: profiles of the targets and of items that are popular together with each other,
so that the targets reach the users of these (Mobasher et al. 2005)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedrec.data.adversary.known import Known
from simulations.poisoning.base import ProfilePoisoning
from simulations.poisoning.profiles import ProfileConfig, with_fillers


class ExampleConfig(ProfileConfig):
    """Settings; unknown keys are rejected, and every field has a description."""

    segment: int = Field(default=5, ge=1)
    """Number of items of the segment."""


class Example(ProfilePoisoning):
    """Likes the targets, a segment of items and random ones."""

    Config = ExampleConfig
    config: ExampleConfig

    def profile(self, known: Known, random: np.random.Generator) -> np.ndarray:
        """The targets, the segment and random items, `int64 [n]`."""
        first = known.popular(1)
        together = np.isin(known.users, known.users[np.isin(known.public, first)])
        counts = np.bincount(known.public[together], minlength=known.items)
        counts[known.targets] = -1
        segment = np.argsort(-counts, kind="stable")[: self.config.segment]
        return with_fillers(known, random, segment, self.config.fillers(known))
