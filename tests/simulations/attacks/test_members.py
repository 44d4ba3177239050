# SPDX-License-Identifier: Apache-2.0
"""Who trains the systems of an attack: sizes, balance, independence of the order of users, and a
split in which only they train."""

import numpy as np
import pytest

from fedrec.data.readers.synthetic import Synthetic, SyntheticConfig
from fedrec.data.splits.leave_one_out import LeaveOneOut
from fedrec.errors import ExperimentError
from simulations.attacks.members import Members, half_members, half_memberships, shadow_parts

PAPER = {"shadow_users": 1000, "used": 0.8, "members": 0.5}


def test_the_papers_sizes():
    parts = shadow_parts(np.arange(6040), **PAPER, seed=1)
    assert [len(part) for part in parts] == [800, 200, 2520, 2520]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(6040))


def test_the_parts_are_a_function_of_the_users_and_the_seed():
    users = np.arange(100, 1500)
    first = shadow_parts(users, **PAPER, seed=1)
    again = shadow_parts(users[::-1], **PAPER, seed=1)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not np.array_equal(first[0], shadow_parts(users, **PAPER, seed=2)[0])


@pytest.mark.parametrize("users", [900, 1000, 1001])
def test_too_few_users_are_explained(users):
    with pytest.raises(ExperimentError, match="too few users") as caught:
        shadow_parts(np.arange(users), **PAPER, seed=1)
    assert "--shadow-users" in str(caught.value.fix)


def test_every_user_trains_half_of_the_shadow_systems():
    masks = half_memberships(501, 8, seed=3)
    assert masks.shape == (8, 501) and (masks.sum(axis=0) == 4).all()
    assert (np.abs(masks.mean(axis=1) - 0.5) < 0.1).all()
    member = half_members(501, seed=3)
    assert member.sum() == 250
    agreement = (masks == member).mean(axis=1)
    assert (np.abs(agreement - 0.5) < 0.12).all()  # the target's members are drawn separately


@pytest.mark.parametrize("runs", [2, 5])
def test_a_wrong_number_of_shadow_systems_is_explained(runs):
    with pytest.raises(ExperimentError, match="shadow systems"):
        half_memberships(10, runs, seed=0)


def test_only_the_chosen_users_train_and_nothing_else_changes():
    """Also whether held-out items are kept out of the negatives."""
    settings = {"users": 40, "items": 30, "mean-interactions": 8, "min-interactions": 4}
    data = Synthetic("synthetic", SyntheticConfig.parse(settings)).read()
    own = {"name": "leave-one-out", "leaky-negatives": True}
    base = LeaveOneOut(LeaveOneOut.Config.parse({"leaky-negatives": True}), 3).split(data)
    chosen = np.random.default_rng(0).random(40) < 0.4

    section = Members.section(own, 3, chosen)
    assert section.pop("name") == "simulations.attacks.members:Members"
    found = Members(Members.Config.parse(section), 99).split(data)
    assert np.array_equal(found.training_clients, base.training_clients[chosen])
    for part in ("train_rows", "validation_rows", "test_rows", "leaky_negatives"):
        assert np.array_equal(getattr(found, part), getattr(base, part))
    section = {**section, "members": Members.section(own, 3, chosen[:20])["members"]}
    with pytest.raises(ExperimentError, match="drawn from other users"):
        Members(Members.Config.parse(section), 99).split(data)
