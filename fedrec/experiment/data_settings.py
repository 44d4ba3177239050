# SPDX-License-Identifier: Apache-2.0
"""The settings that the clients' data depend on; `fedrec.data` needs no others."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fedrec.components import registry
from fedrec.config import Config
from fedrec.experiment.sections import Section, component_settings


class DataSettings(Config):
    """Dataset, split, perturbation, seed and task of an experiment."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of all random streams."""
    task: Literal["ranking", "rating"] = "ranking"
    """`ranking`: implicit feedback, sigmoid and cross-entropy; `rating`: explicit ratings, linear
    and squared error."""
    positive_above: float | None = None
    """Rows with a rating above this are positive; default: all rows are positive."""
    dataset: Section
    """Dataset and the options of its reader."""
    split: Section = Section(name="user-holdout")
    """Training and held-out rows."""
    perturb: Section | None = None
    """Perturbation of the training rows before training; default: none."""

    def settings(self, kind: registry.Kind) -> Any:
        """Settings of the component in the section of that kind: its `Config`, or keyword arguments
        without one."""
        return component_settings(kind, getattr(self, kind.key))
