# SPDX-License-Identifier: Apache-2.0
"""Wrappers of datasets and splits: the added users, the training users, and that nothing else
changes."""

from __future__ import annotations

import numpy as np
import pytest

from fedrec.data.features import Feature, FeatureTable
from fedrec.data.memberships import half_members, half_memberships, shadow_plan
from fedrec.data.population import Population
from fedrec.data.readers import canaries as canary_reader
from fedrec.data.readers.canaries import Canaries
from fedrec.data.readers.synthetic import Synthetic, SyntheticConfig
from fedrec.data.splits.members import Members, MembersConfig
from fedrec.data.splits.user_holdout import UserHoldout, UserHoldoutConfig
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load

SMALL = {"users": 40, "items": 30, "mean-interactions": 8, "min-interactions": 4}


def with_canaries(table, split):
    changed = {
        **table,
        "dataset": {"name": "canaries", "base": table["dataset"], "count": 7},
        "split": {"name": "canaries", "base": split, "count": 7},
    }
    return Population.of(load(changed)), Population.of(load({**table, "split": split}))


@pytest.mark.parametrize("split", ["user-holdout", "leave-one-out", "ratio"])
def test_canaries_train_and_nothing_else_changes(tiny_experiment, split):
    audited, plain = with_canaries(tiny_experiment(), {"name": split})
    users = plain.interactions.num_users
    added = np.arange(users, users + 7)
    assert audited.interactions.num_users == users + 7
    assert np.array_equal(audited.interactions.items, plain.interactions.items)
    training = np.concatenate([plain.partition.training_clients, added])
    assert np.array_equal(audited.partition.training_clients, training)
    for part in ("train_rows", "validation_rows", "test_rows"):
        assert np.array_equal(getattr(audited.partition, part), getattr(plain.partition, part))
    assert np.array_equal(audited.evaluated_clients("test"), plain.evaluated_clients("test"))
    assert audited.schema().user_features == plain.schema().user_features
    canary = audited.client(int(added[0]))
    assert len(canary.items) == len(canary.positives) == 0 and all(
        (codes == -1).all() for codes in canary.features
    )


@pytest.mark.parametrize("kind", ["integers", "texts", "objects"])
def test_ids_of_canaries_are_new(kind, monkeypatch):
    ids = {
        "integers": np.array([7, 3]),
        "texts": np.array(["a", "canary-0"]),
        "objects": np.array(["a", 5], dtype=object),
    }[kind]
    found = canary_reader._more_ids(ids, 3)
    assert len(set(found.tolist())) == 5 and found[:2].tolist() == ids.tolist()


def test_a_feature_keeps_its_categories_and_gets_rows_without_codes():
    feature = Feature.multiple("hobby", [["a", "b"], [], ["b"]])
    longer = canary_reader._extended(feature, 2)
    assert longer.categories == feature.categories
    assert FeatureTable(5, (longer,)).rows == 5
    assert longer.padded().tolist() == [*feature.padded().tolist(), [-1, -1], [-1, -1]]


def test_a_wrong_setting_of_the_other_dataset_is_named():
    with pytest.raises(ExperimentError, match=r"dataset\.base\.usres"):
        Canaries("canaries", Canaries.Config(base={"name": "synthetic", "usres": 5})).read()


@pytest.fixture(scope="module")
def interactions():
    return Synthetic("synthetic", SyntheticConfig.parse(SMALL)).read()


def drawn(interactions, **settings):
    config = MembersConfig.parse(
        {"base": {"name": "user-holdout", "test-users": 0.25}, "seed": 3, **settings}
    )
    return Members(config, seed=99).split(interactions)


@pytest.fixture(scope="module")
def base(interactions):
    return UserHoldout(UserHoldoutConfig.parse({"test-users": 0.25}), 3).split(interactions)


def test_the_two_systems_of_the_papers_attack(interactions, base):
    settings = {"shadow-users": 10, "used": 0.6, "members": 0.5}
    shadow = drawn(interactions, draw="shadow", **settings)
    target = drawn(interactions, draw="target", **settings)
    plan = shadow_plan(
        base.training_clients, shadow_users=10, used_share=0.6, member_share=0.5, seed=3
    )
    assert np.array_equal(shadow.training_clients, plan.used) and len(plan.used) == 6
    assert np.array_equal(target.training_clients, plan.members) and len(plan.members) == 10
    for part in ("train_rows", "validation_rows", "test_rows"):
        assert np.array_equal(getattr(target, part), getattr(base, part))


def test_the_systems_of_the_likelihood_ratio_attack(interactions, base):
    masks = half_memberships(30, 4, seed=3)
    for run in range(1, 5):
        clients = drawn(interactions, draw="half", runs=4, run=run).training_clients
        assert np.array_equal(clients, base.training_clients[masks[run - 1]])
    target = drawn(interactions, draw="half", runs=4).training_clients
    assert np.array_equal(target, base.training_clients[half_members(30, seed=3)])


def test_a_run_beyond_the_last_is_refused():
    with pytest.raises(ExperimentError, match="inconsistent settings"):
        MembersConfig.parse({"runs": 4, "run": 5})
