# SPDX-License-Identifier: Apache-2.0
"""Attribute inference end to end: from profiles, lists and updates of a system, and with
perturbation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from fedrec.data.population import Population
from fedrec.data.readers.synthetic import Synthetic
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.models.metamf import generate
from fedrec.rng import stream
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.attacks.driver import run_attack
from simulations.attacks.system import TrainedSystem
from tests.clients.oracles import update_under
from tests.simulations.attacks.tables import experiment_on, synthetic


class Stereotyped(Synthetic):
    """The synthetic dataset, but three of four items of women are even, and of men odd."""

    def read(self):
        data = super().read()
        woman = data.user_features["gender"].padded()[data.users, 0] == 0
        follows = np.random.default_rng(0).random(len(data)) < 0.75
        even = np.where(follows, woman, ~woman)
        return replace(data, items=(data.items // 2) * 2 + ~even)


ATTACKED = experiment_on(
    synthetic(250, 40, 14) | {"name": "test_attribute_driver:Stereotyped"},
    name="attacked",
    rounds=6,
    model={"name": "privrec", "embedding": 4, "hidden": [8]},
    step={"name": "sgd", "epochs": 3, "learning-rate": 0.3, "batch-size": 8},
    sampler={"name": "fixed-size", "cohort": 20},
    evaluation={"ks": [5], "baselines": [], "fine-tune": {"epochs": 4}},
)
del ATTACKED["positive-above"]


def attack(tmp_path, *overrides, table=ATTACKED, **settings):
    chosen = {"name": "attribute", "attribute": "gender", **settings}
    return run_attack(load(table, overrides), chosen, tmp_path)


@pytest.mark.slow
def test_profiles_reveal_gender_and_a_strong_perturbation_hides_it(tmp_path):
    outcome = attack(tmp_path, attacker="logistic")
    clear = outcome.found
    assert clear.balanced_accuracy.value > 0.8 and outcome.table["categories"] == ["F", "M"]
    assert "recommends" not in outcome.table
    assert [file.name for file in tmp_path.iterdir()] == ["attack.json"]
    targeted = ("perturb.name=targeted", "perturb.attribute=gender")
    responses = ("perturb.epsilon=0.1", "perturb.mechanism=randomised-response")
    hidden = attack(tmp_path, *targeted, *responses, attacker="logistic").found
    assert hidden.balanced_accuracy.value < 0.63
    half = attack(tmp_path, *targeted, "perturb.epsilon=3", attacker="logistic").found
    assert hidden.auc < half.auc <= clear.auc + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("source", ["recommendations", "updates"])
def test_attribute_inference_from_a_trained_system(tmp_path, source):
    """The gender among the model's features must not help the attacker, who sees only items."""
    outcome = attack(tmp_path, source=source, without=["user.*"])
    found = outcome.found
    assert found.users == len(Population.of(load(ATTACKED)).partition.training_clients)
    assert found.balanced_accuracy.low > 0.55 and "hits@5" in outcome.table["recommends"]
    assert outcome.table["attack"] == "attribute" and (tmp_path / "target" / "run.json").is_file()


META = {
    **ATTACKED,
    "model": {"name": "metamf", "rank": 2}
    | dict.fromkeys(("user", "memory", "generator", "embedding", "hidden"), 4),
    "step": {"name": "metamf", "negatives": 1},
    "strategy": {"name": "metamf", "server-lr": 0.05},
    "split": {"name": "ratio"},
    "evaluation": {"ks": [5], "baselines": []},
}


def test_updates_of_a_generating_system_as_its_server_sees_them(tmp_path):
    """The description of each client's gradients equals that of a central gradient of its loss."""
    experiment = load(META, ["rounds=2"])
    runner.run(experiment, output=tmp_path / "run")
    users = Population.of(experiment).partition.training_clients[[5, 3, 200]]
    target = TrainedSystem(experiment, RunFolder(tmp_path / "run"), users)
    found = list(target.updates(users, ("layer1.*",)))
    node = Node(experiment, 0, 1, None)
    given = {name: torch.from_numpy(value.copy()) for name, value in target.parameters.items()}
    for user, described in zip(users.tolist(), found, strict=True):
        values, low = generate(given, torch.tensor([user]), None)
        own = {name: value[0] for name, value in (values | {"item.low": low}).items()}
        drawn = stream(experiment.seed, "client", user, experiment.rounds + 1)
        data = node.population.client(user)
        delta = update_under(node.step(experiment.step), own, data, drawn).delta
        told = [
            v.norm(dim=-1) if v.dim() > 1 else v
            for n, v in delta.items()
            if not n.startswith("layer1.")
        ]
        np.testing.assert_allclose(
            np.abs(described), np.abs(torch.cat(told).numpy()), rtol=1e-3, atol=1e-6
        )
        assert described.shape == (4 + 4 + 2 + 40,) and 0 < np.count_nonzero(described[-40:]) < 40


def test_updates_of_a_generating_system_are_attacked(tmp_path):
    outcome = attack(tmp_path, table=META, source="updates", attacker="logistic")
    assert outcome.found.balanced_accuracy.low > 0.55 and "hits@5" in outcome.table["recommends"]


@pytest.mark.slow
def test_an_update_reveals_the_features_of_the_user(tmp_path):
    found = attack(tmp_path, source="updates", attacker="logistic").found
    assert found.balanced_accuracy.value > 0.92  # the row of `user.gender` that moves


def test_items_independent_of_gender_reveal_nothing(tmp_path):
    found = attack(tmp_path, "dataset.users=400", attribute="occupation", attacker="logistic").found
    assert abs(found.balanced_accuracy.value - found.chance) < 0.1


@pytest.mark.parametrize("attribute", ["sex", "genres"])
def test_an_unknown_attribute_is_explained(tmp_path, attribute):
    """Before anything is trained."""
    with pytest.raises(ExperimentError, match="not an attribute that can be inferred"):
        attack(tmp_path, attribute=attribute, source="updates")
    assert not list(tmp_path.iterdir())
