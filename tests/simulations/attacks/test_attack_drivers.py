# SPDX-License-Identifier: Apache-2.0
"""Membership attacks end to end: federations, lists and signals, on systems with and without a
leak."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrec.data.features import Feature, FeatureTable
from fedrec.data.memberships import shadow_plan
from fedrec.data.population import Population
from fedrec.data.readers.synthetic import Synthetic
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load
from fedrec.models.base import Model
from fedrec.runs.folder import RunFolder
from simulations.attacks import membership
from simulations.attacks.federations import parameters_of, scores_of
from simulations.attacks.lira import LiraOptions, attack_lira
from simulations.attacks.membership import MembershipOptions, attack_membership
from simulations.study.runs import run_once


class Named(Synthetic):
    """The synthetic dataset with every user's name as a feature, so that a model can memorise
    users."""

    def read(self):
        data = super().read()
        name = Feature.single("name", [f"{user:05d}" for user in range(data.num_users)])
        return replace(
            data, user_features=FeatureTable(data.num_users, (*data.user_features.features, name))
        )


class Memory(Model):
    """A leaky recommender: one score per user and item, learned from that user only."""

    def initial(self, generator):
        return {"memory": torch.zeros(self.schema.user_features[-1][1], self.schema.num_items)}

    def predict(self, parameters, users, items, rows=None):
        table = parameters["memory"]
        own = table[torch.arange(len(table)), users[-1][:, 0]]
        return own.gather(1, items)


ATTACKED = {
    "name": "attacked",
    "rounds": 12,
    "positive-above": 3.0,
    "dataset": {"name": "synthetic", "users": 120, "items": 40, "mean-interactions": 10},
    "model": {"name": "privrec", "embedding": 4, "hidden": [8]},
    "step": {"name": "sgd", "epochs": 4, "learning-rate": 0.3, "batch-size": 8},
    "sampler": {"name": "fixed-size", "cohort": 10},
    "evaluation": {"ks": [5], "baselines": [], "fine-tune": {"epochs": 1}},
    "engine": {"name": "serial", "nodes": 1, "threads": 1, "device": "cpu"},
}


def attacked(*overrides):
    return load(ATTACKED, overrides)


MEMORISING = (
    "dataset.name=test_attack_drivers:Named",
    "dataset.users=120",
    "dataset.items=40",
    "dataset.mean-interactions=10",
    "model.name=test_attack_drivers:Memory",
    "sampler.cohort=20",
    "strategy.server-lr=20",
    "rounds=4",
)


@pytest.mark.slow
def test_lira_finds_members_of_a_system_that_learns_them_by_heart(tmp_path):
    found = attack_lira(attacked(*MEMORISING), LiraOptions(shadows=6), tmp_path)
    assert found.success.auc.value > 0.85 and found.success.balanced_accuracy.low > 0.7
    with np.load(tmp_path / "signals.npz") as file:
        assert file["shadows"].shape == file["masks"].shape == (6, 96)
        assert file["shadows"][file["masks"]].mean() > file["shadows"][~file["masks"]].mean()


def test_lira_finds_nothing_after_no_training(tmp_path):
    experiment = attacked("rounds=1", "step.learning-rate=1e-9")
    found = attack_lira(experiment, LiraOptions(shadows=4, mode="offline"), tmp_path)
    assert (
        0.3 < found.success.auc.value < 0.7 and found.success.members == found.success.others == 48
    )


def test_runs_that_are_there_are_taken_and_others_refused(tmp_path):
    options = LiraOptions(shadows=4)
    first = attack_lira(attacked("rounds=2"), options, tmp_path)
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
    again = attack_lira(attacked("rounds=2"), options, tmp_path)
    assert again.success == first.success and len(stamps) == 10
    assert stamps == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
    with pytest.raises(RunError, match="run of other settings"):
        attack_lira(attacked("rounds=3"), options, tmp_path)


@pytest.fixture(scope="module")
def options():
    return MembershipOptions(shadow_users=40, used=0.8)


def test_the_papers_attack_end_to_end(tmp_path, options):
    experiment = attacked("rounds=3")
    found = attack_membership(experiment, options, tmp_path)
    assert (found.success.members, found.success.others) == (28, 28)
    assert 1 <= found.descriptions <= 56 and "hits@5" in found.recommends
    trained = RunFolder(tmp_path / "shadow"), RunFolder(tmp_path / "target")
    clients = Population.of(experiment).partition.training_clients
    plan = shadow_plan(clients, shadow_users=40, used_share=0.8, member_share=0.5, seed=0)
    for run, expected in zip(trained, (plan.used, plan.members), strict=True):
        assert np.array_equal(Population.of(run.experiment).partition.training_clients, expected)
    assert trained[0].experiment.seed != trained[1].experiment.seed == 0
    assert found.table()["attack"] == "membership" and found.table()["success"]["members"] == 28


def test_the_papers_attack_finds_members_of_a_system_that_learns_them_by_heart(tmp_path, options):
    found = attack_membership(attacked(*MEMORISING), replace(options, balanced=True), tmp_path)
    assert found.success.balanced_accuracy.low > 0.7 and found.success.auc.low > 0.75


def test_equal_features_are_equal_lists_of_the_shared_model(tmp_path, options):
    """Of a model without user ids, the paper's attacker sees only the effect of features; after
    fine-tuning, more."""
    experiment = attacked("rounds=2")
    run = run_once(experiment, tmp_path / "run")
    population = Population.of(experiment)
    users = population.partition.training_clients
    shared = np.concatenate(
        [s for _, s in scores_of(experiment, parameters_of(run), users, fine_tune=False)]
    )
    tuned = np.concatenate(
        [s for _, s in scores_of(experiment, parameters_of(run), users, fine_tune=True)]
    )
    codes = np.hstack(population.feature_codes(users))
    kinds = len(np.unique(codes, axis=0))
    assert len(np.unique(shared, axis=0)) == kinds < len(users) == len(np.unique(tuned, axis=0))
    told = membership._lists(experiment, population, parameters_of(run), users[::-1], options)
    # regardless of the other users of the block
    assert np.array_equal(told, membership.top_lists(shared[::-1]))


@pytest.mark.slow
def test_as_many_test_users_judge_the_target_as_one_likes(tmp_path, options):
    experiment = attacked("rounds=1", "dataset.users=150")
    everybody = len(Population.of(experiment).evaluated_clients("test"))
    for judged, expected in ((7, 7), (None, everybody)):
        attack_membership(experiment, replace(options, judged=judged), tmp_path / str(judged))
        assert len(RunFolder(tmp_path / str(judged) / "target").read_result().users) == expected


def test_lists_can_leave_out_what_a_user_has(tmp_path, options, monkeypatch):
    seen = []
    real = membership.top_lists
    monkeypatch.setattr(membership, "top_lists", lambda *a: seen.append(real(*a)) or seen[-1])
    experiment = attacked("rounds=1")
    attack_membership(experiment, replace(options, exclude_known=True), tmp_path)
    population = Population.of(experiment)
    plan = shadow_plan(
        population.partition.training_clients,
        shadow_users=40,
        used_share=0.8,
        member_share=0.5,
        seed=0,
    )
    for user, items in zip(np.sort(np.concatenate([plan.used, plan.unused])), seen[0], strict=True):
        assert not np.isin(items, population.client(int(user)).items).any()


def test_too_few_users_are_explained_before_anything_runs(tmp_path):
    with pytest.raises(ExperimentError, match="too few users"):
        attack_membership(attacked(), MembershipOptions(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
