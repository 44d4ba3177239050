# SPDX-License-Identifier: Apache-2.0
"""Membership attacks end to end: federations, lists and signals, on systems with and without a
leak."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrec.attacks.membership import top_lists
from fedrec.data.features import Feature, FeatureTable
from fedrec.data.population import Population
from fedrec.data.readers.synthetic import Synthetic
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.loading import load
from fedrec.models.base import Model
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.attacks.driver import run_attack
from simulations.attacks.members import shadow_parts
from simulations.attacks.system import TrainedSystem
from tests.runs import Interrupt
from tests.simulations.attacks.tables import experiment_on, synthetic


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


ATTACKED = experiment_on(
    synthetic(120, 40, 10),
    name="attacked",
    rounds=12,
    model={"name": "privrec", "embedding": 4, "hidden": [8]},
    step={"name": "sgd", "epochs": 4, "learning-rate": 0.3, "batch-size": 8},
    sampler={"name": "fixed-size", "cohort": 10},
    evaluation={"ks": [5], "baselines": [], "fine-tune": {"epochs": 1}},
)


def attack(folder, name, *overrides, **settings):
    return run_attack(load(ATTACKED, overrides), {"name": name, **settings}, folder)


def system(folder, *overrides):
    """A system and its training users."""
    runner.run(load(ATTACKED, overrides), output=folder)
    run = RunFolder(folder)
    users = Population.of(run.experiment).partition.training_clients
    return TrainedSystem(run.experiment, run, users), users


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
    found = attack(tmp_path, "lira", *MEMORISING, shadows=6).found
    assert found.auc.value > 0.85 and found.balanced_accuracy.low > 0.7
    with np.load(tmp_path / "signals.npz") as file:
        assert file["shadows"].shape == file["masks"].shape == (6, 96)
        assert file["shadows"][file["masks"]].mean() > file["shadows"][~file["masks"]].mean()


def test_lira_finds_nothing_after_no_training(tmp_path):
    idle = ("rounds=1", "step.learning-rate=1e-9")
    found = attack(tmp_path, "lira", *idle, shadows=4, mode="offline").found
    assert 0.3 < found.auc.value < 0.7 and found.members == found.others == 48


def test_runs_that_are_there_are_taken_and_others_refused(tmp_path):
    first = attack(tmp_path, "lira", "rounds=2", shadows=4)
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
    again = attack(tmp_path, "lira", "rounds=2", shadows=4)
    assert again.table == first.table and len(stamps) == 10
    other = attack(tmp_path, "lira", "rounds=2", shadows=4, mode="offline")
    assert other.found != first.found
    assert stamps == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
    with pytest.raises(RunError, match="holds a run of other settings"):
        attack(tmp_path, "lira", "rounds=3", shadows=4)


def test_an_interrupted_attack_goes_on_where_it_stopped(tmp_path):
    whole = attack(tmp_path / "whole", "fit", "rounds=4")
    with pytest.raises(KeyboardInterrupt):
        run_attack(
            load(ATTACKED, ["rounds=4"]), {"name": "fit"}, tmp_path / "broken", [Interrupt(2)]
        )
    assert attack(tmp_path / "broken", "fit", "rounds=4").table == whole.table
    rows = (tmp_path / "broken" / "target" / "rounds.csv").read_text()
    assert rows == (tmp_path / "whole" / "target" / "rounds.csv").read_text()


PAPERS = {"shadow-users": 40, "used": 0.8}


def test_the_papers_attack_end_to_end(tmp_path):
    shares = {"shadow-users": 40, "used": 0.75, "members": 0.25, "length": 5}
    outcome = attack(tmp_path, "membership", "rounds=3", **shares)
    assert (outcome.found.members, outcome.found.others) == (14, 42)
    assert 1 <= outcome.table["descriptions"] <= 56 and "hits@5" in outcome.table["recommends"]
    runs = RunFolder(tmp_path / "shadow"), RunFolder(tmp_path / "target")
    clients = Population.of(load(ATTACKED)).partition.training_clients
    parts = shadow_parts(clients, shadow_users=40, used=0.75, members=0.25, seed=0)
    for run, expected in zip(runs, parts[::2], strict=True):
        assert np.array_equal(Population.of(run.experiment).partition.training_clients, expected)
    assert runs[0].experiment.seed != runs[1].experiment.seed == 0
    table = outcome.table
    assert table["attack"] == "membership" and table["success"]["members"] == 14
    assert table["options"]["shadow_users"] == 40 and table["ceilings"] == {}


def test_the_papers_attack_finds_members_of_a_system_that_learns_them_by_heart(tmp_path):
    found = attack(tmp_path, "membership", *MEMORISING, **PAPERS, balanced=True).found
    assert found.balanced_accuracy.low > 0.7 and found.auc.low > 0.75


def test_equal_features_are_equal_lists_of_the_shared_model(tmp_path):
    """Of a model without user ids, the paper's attacker sees only the effect of features; after
    fine-tuning, more."""
    target, users = system(tmp_path / "run", "rounds=2")
    shared, tuned = (
        np.concatenate([s for _, s in target.scores(users, fine_tune=tune)])
        for tune in (False, True)
    )
    codes = np.hstack(Population.of(target.experiment).feature_codes(users))
    kinds = len(np.unique(codes, axis=0))
    assert len(np.unique(shared, axis=0)) == kinds < len(users) == len(np.unique(tuned, axis=0))
    # regardless of the other users of the block
    assert np.array_equal(target.lists(users[::-1], 10), top_lists(shared[::-1]))
    with pytest.raises(ValueError, match="read-only"):
        target.parameters["item.id"][:] = 0


def test_lists_can_leave_out_what_a_user_has(tmp_path):
    target, users = system(tmp_path / "run", "rounds=1")
    population = Population.of(target.experiment)
    lists = target.lists(users, 10, exclude_known=True)
    for user, items in zip(users.tolist(), lists, strict=True):
        assert not np.isin(items, population.client(user).items).any()


@pytest.mark.slow
def test_as_many_test_users_judge_the_target_as_one_likes(tmp_path):
    overrides = ("rounds=1", "dataset.users=150")
    everybody = len(Population.of(load(ATTACKED, overrides)).evaluated_clients("test"))
    for judged, expected in ((7, 7), (0, everybody)):
        folder = tmp_path / str(judged)
        attack(folder, "membership", *overrides, **PAPERS, judged=judged)
        assert len(RunFolder(folder / "target").read_result().users) == expected


def test_too_few_users_are_explained_before_anything_runs(tmp_path):
    with pytest.raises(ExperimentError, match="too few users"):
        attack(tmp_path / "runs", "membership")
    assert not (tmp_path / "runs").exists()
