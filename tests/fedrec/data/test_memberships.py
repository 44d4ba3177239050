# SPDX-License-Identifier: Apache-2.0
"""Members of shadow systems: sizes, balance, and independence of the order of users."""

from __future__ import annotations

import numpy as np
import pytest

from fedrec.data.memberships import half_members, half_memberships, shadow_plan
from fedrec.errors import ExperimentError

PAPER = {"shadow_users": 1000, "used_share": 0.8, "member_share": 0.5}


def test_the_papers_sizes():
    plan = shadow_plan(np.arange(6040), **PAPER, seed=1)
    assert [len(part) for part in (plan.used, plan.unused, plan.members, plan.others)] == [
        800,
        200,
        2520,
        2520,
    ]
    everybody = np.concatenate([plan.used, plan.unused, plan.members, plan.others])
    assert np.array_equal(np.sort(everybody), np.arange(6040))


def test_a_plan_is_a_function_of_the_users_and_the_seed():
    users = np.arange(100, 1500)
    first = shadow_plan(users, **PAPER, seed=1)
    again = shadow_plan(users[::-1], **PAPER, seed=1)
    assert np.array_equal(first.used, again.used) and np.array_equal(first.members, again.members)
    assert not np.array_equal(first.used, shadow_plan(users, **PAPER, seed=2).used)


@pytest.mark.parametrize("users", [900, 1000, 1001])
def test_too_few_users_are_explained(users):
    with pytest.raises(ExperimentError, match="too few users") as caught:
        shadow_plan(np.arange(users), **PAPER, seed=1)
    assert "--shadow-users" in str(caught.value.fix)


def test_every_user_trains_half_of_the_shadow_systems():
    masks = half_memberships(501, 8, seed=3)
    assert masks.shape == (8, 501) and (masks.sum(axis=0) == 4).all()
    assert (
        np.abs(masks.mean(axis=1) - 0.5) < 0.1
    ).all()  # and each system gets about half of the users
    member = half_members(501, seed=3)
    assert member.sum() == 250
    agreement = (masks == member).mean(axis=1)
    assert (np.abs(agreement - 0.5) < 0.12).all()  # the target's members are drawn separately


@pytest.mark.parametrize("runs", [2, 5])
def test_a_wrong_number_of_shadow_systems_is_explained(runs):
    with pytest.raises(ExperimentError, match="shadow systems"):
        half_memberships(10, runs, seed=0)
