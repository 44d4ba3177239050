# SPDX-License-Identifier: Apache-2.0
"""Training users of an attack's systems, drawn from the attack's seed, and a split for them.

Held-out users and rows are those of the other split, so that a system under attack is evaluated
like any other. Training rows of users that are not drawn are not used.

Where this differs from PrivRec section 4.6: there all users of the dataset are shadow users,
members or others; here the test users of the other split are not attacked.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np

from fedrec.components.registry import SPLIT
from fedrec.components.sections import Section, component_of
from fedrec.config import Config
from fedrec.data.interactions import Interactions
from fedrec.data.splits.rules import Partition, Split, partition_by
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Adjacency
from fedrec.rng import stream


class MembersConfig(Config):
    """Settings of a split with fewer training clients."""

    base: dict[str, Any]
    """The other split: its name and settings."""
    seed: int
    """Seed of the split; the experiment's seed differs between the systems of an attack."""
    members: str
    """Bit mask of its training clients that train, in base64."""


class Members(Split):
    """Split with a part of the training clients of another split."""

    Config = MembersConfig
    config: MembersConfig

    @classmethod
    def section(cls, base: dict[str, Any], seed: int, members: np.ndarray) -> dict[str, Any]:
        """Section with name and settings; `members` is `bool [training clients]`."""
        bits = base64.b64encode(np.packbits(members).tobytes()).decode()
        name = f"{cls.__module__}:{cls.__name__}"
        return {"name": name, "base": base, "seed": seed, "members": bits}

    def depends_on(self, adjacency: Adjacency) -> str:
        """Return the dependence of the other split."""
        base = Section.model_validate(self.config.base)
        return component_of(SPLIT, base, self.config.seed).depends_on(adjacency)

    def split(self, interactions: Interactions) -> Partition:
        """Divide the interactions like the other split, and choose among the training clients.

        Raises:
            ExperimentError: the number of training clients differs from the number of bits.
        """
        base = Section.model_validate(self.config.base)
        partition = partition_by(base, self.config.seed, interactions)
        users = partition.training_clients
        packed = np.frombuffer(base64.b64decode(self.config.members), dtype=np.uint8)
        if len(packed) != -(-len(users) // 8):
            raise ExperimentError(
                "the members of a system were drawn from other users",
                expected=f"a bit for each of {len(users)} training clients",
                got=f"{8 * len(packed)} bits",
                fix="choose another --output",
            )
        chosen = np.unpackbits(packed, count=len(users)).astype(bool)
        return replace(partition, training_clients=users[chosen])


_USED = 0.8  # share of the shadow users that train the shadow system
_MEMBERS = 0.5  # share of the other users that train the target system


def shadow_parts(users: np.ndarray, shadow_users: int, seed: int) -> list[np.ndarray]:
    """Divide users for the attack of PrivRec (section 4.6).

    Args:
        users: `int64 [users]`, all users.
        shadow_users: number of shadow users of the attacker (paper: 1000).
        seed: seed of the stream `"attack-shadow"`.

    Returns:
        `int64 [n]`, ascending, each: shadow users that train the shadow system, other shadow users,
        users that train the target system, all others.

    Raises:
        ExperimentError: one of the four parts would be empty.
    """
    shuffled = stream(seed, "attack-shadow").permutation(np.sort(users))
    cuts = [
        round(_USED * shadow_users),
        shadow_users,
        shadow_users + round(_MEMBERS * (len(users) - shadow_users)),
    ]
    parts = np.split(shuffled, cuts) if shadow_users < len(users) else []
    if not parts or any(len(part) == 0 for part in parts):
        raise ExperimentError(
            "too few users for the attack",
            expected="shadow users of both kinds, members and others",
            got=f"{len(users)} users, {shadow_users} of them shadow users",
            fix=f"--shadow-users {max(2, len(users) // 3)}",
        )
    return [np.sort(part) for part in parts]


def half_memberships(users: int, runs: int, seed: int) -> np.ndarray:
    """Members of each of an even number of shadow systems, `bool [runs, users]`; every user trains
    exactly half of the systems."""
    order = stream(seed, "attack-halves").random((runs, users)).argsort(axis=0)
    return order.argsort(axis=0) < runs // 2


def half_members(users: int, seed: int) -> np.ndarray:
    """Members of the target system, `bool [users]`: half of the users (rounded down)."""
    member = np.zeros(users, dtype=bool)
    member[stream(seed, "attack-target").permutation(users)[: users // 2]] = True
    return member
