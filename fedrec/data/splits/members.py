# SPDX-License-Identifier: Apache-2.0
"""Another split in which only a random part of the training clients trains: the systems of a
membership attack.

Held-out users and rows are those of the other split, so that a system under attack is evaluated
like any other. Users that are not drawn keep their training rows, which are not used for training.

Where this differs from PrivRec section 4.6: there all users of the dataset are shadow users,
members or others; here the test users of the other split are not attacked.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedrec.components.registry import SPLIT, resolve
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.memberships import half_members, half_memberships, shadow_plan
from fedrec.data.split import Partition, Split
from fedrec.experiment.sections import Section, component_settings


class MembersConfig(Config):
    """Settings of a system of an attack."""

    base: dict[str, Any] = Field(default_factory=lambda: {"name": "user-holdout"})
    """The split that determines the candidates for training clients: its name and settings."""
    seed: int = Field(0, ge=0)
    """Seed of that split and of the draw, apart from the experiment's, which differs between
    federations."""
    draw: Literal["shadow", "target", "half"] = "target"
    """`shadow`, `target`: the two systems of PrivRec's attack; `half`: a system of the
    likelihood-ratio attack."""
    shadow_users: int = Field(1000, ge=2)
    """PrivRec: number of users whose data the attacker has."""
    used: float = Field(0.8, gt=0, lt=1)
    """PrivRec: share of these that train the shadow system."""
    members: float = Field(0.5, gt=0, lt=1)
    """PrivRec: share of the remaining users that train the target system."""
    runs: int = Field(16, ge=4)
    """Likelihood ratio: number of shadow systems, even."""
    run: int = Field(0, ge=0)
    """Likelihood ratio: number of the shadow system, from 1; 0 is the target system."""

    @model_validator(mode="after")
    def _is_one_of_the_runs(self) -> Self:
        if self.run > self.runs:
            raise ValueError("run of at most runs")
        return self


class Members(Split):
    """Draws the training users of one system of a membership attack; for `fedrec attack`."""

    Config = MembersConfig
    simulations_only = True
    paper = "PrivRec (Wang et al. 2021), section 4.6; Carlini et al. 2022"
    config: MembersConfig

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the other split, and draw the training clients.

        Raises:
            ExperimentError: there are too few users, or fewer runs than `run`.
        """
        config = self.config
        section = Section.model_validate(config.base)
        base = resolve(SPLIT, section.name)(
            component_settings(SPLIT, section, at="split.base"), config.seed
        )
        partition = base.split(interactions)
        users = partition.training_clients
        if config.draw == "half":
            masks = half_memberships(len(users), config.runs, config.seed)
            drawn = users[
                half_members(len(users), config.seed) if config.run == 0 else masks[config.run - 1]
            ]
        else:
            plan = shadow_plan(
                users,
                shadow_users=config.shadow_users,
                used_share=config.used,
                member_share=config.members,
                seed=config.seed,
            )
            drawn = plan.used if config.draw == "shadow" else plan.members
        return Partition(
            drawn, partition.train_rows, partition.validation_rows, partition.test_rows
        )
