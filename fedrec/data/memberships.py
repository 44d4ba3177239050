# SPDX-License-Identifier: Apache-2.0
"""Training users of the systems of an attack, drawn from the attack's seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedrec.errors import ExperimentError
from fedrec.rng import stream


@dataclass(frozen=True, eq=False)
class ShadowPlan:
    """The users of the paper's attack (PrivRec section 4.6), each `int64 [n]`, ascending, disjoint.

    Attributes:
        used: `int64 [n]`, shadow users that train the shadow system.
        unused: `int64 [n]`, shadow users that train nothing.
        members: `int64 [n]`, users that train the target system.
        others: `int64 [n]`, all other users that are not shadow users.
    """

    used: np.ndarray
    unused: np.ndarray
    members: np.ndarray
    others: np.ndarray


def shadow_plan(
    users: np.ndarray, *, shadow_users: int, used_share: float, member_share: float, seed: int
) -> ShadowPlan:
    """Divide users for the paper's attack.

    Args:
        users: `int64 [users]`, all users.
        shadow_users: number of shadow users of the attacker (paper: 1000).
        used_share: share of these that train the shadow system (paper: .8).
        member_share: share of the remaining users that train the target system (paper: .5).
        seed: of the stream `"attack-shadow"`.

    Raises:
        ExperimentError: one of the four parts would be empty.
    """
    shuffled = stream(seed, "attack-shadow").permutation(np.sort(users))
    used = round(used_share * shadow_users)
    members = shadow_users + round(member_share * (len(users) - shadow_users))
    parts = np.split(shuffled, [used, shadow_users, members]) if shadow_users < len(users) else []
    if not parts or any(len(part) == 0 for part in parts):
        raise ExperimentError(
            "too few users for the attack",
            expected="shadow users of both kinds, and members and others beside them",
            got=f"{len(users)} users, {shadow_users} of them shadow users",
            fix=f"--shadow-users {max(2, len(users) // 3)}",
        )
    return ShadowPlan(*(np.sort(part) for part in parts))


def half_memberships(users: int, runs: int, seed: int) -> np.ndarray:
    """`bool [runs, users]`: which users train which shadow system; every user trains exactly half
    of them.

    Raises:
        ExperimentError: the number of runs is odd or below 4 (both halves need a mean and a
            variance).
    """
    if runs < 4 or runs % 2:
        raise ExperimentError(
            "wrong number of shadow systems",
            expected="an even number, at least 4",
            got=str(runs),
            fix="--shadows 16",
        )
    order = stream(seed, "attack-halves").random((runs, users)).argsort(axis=0)
    return order.argsort(axis=0) < runs // 2


def half_members(users: int, seed: int) -> np.ndarray:
    """`bool [users]`: which users train the target system, half of them (rounded down)."""
    member = np.zeros(users, dtype=bool)
    member[stream(seed, "attack-target").permutation(users)[: users // 2]] = True
    return member
