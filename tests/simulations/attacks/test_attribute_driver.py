# SPDX-License-Identifier: Apache-2.0
"""Attribute inference end to end: from profiles, lists and updates of a system, and with
perturbation."""

from __future__ import annotations

import json
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
from simulations.attacks.attribute import AttributeOptions, _updates, attack_attribute
from simulations.attacks.federations import parameters_of
from simulations.study.runs import run_once
from tests.clients.oracles import update_under


class Stereotyped(Synthetic):
    """The synthetic dataset, but three of four items of women are even, and of men odd."""

    def read(self):
        data = super().read()
        woman = data.user_features["gender"].padded()[data.users, 0] == 0
        follows = np.random.default_rng(0).random(len(data)) < 0.75
        even = np.where(follows, woman, ~woman)
        return replace(data, items=(data.items // 2) * 2 + ~even)


ATTACKED = {
    "name": "attacked",
    "rounds": 6,
    "dataset": {
        "name": "test_attribute_driver:Stereotyped",
        "users": 250,
        "items": 40,
        "mean-interactions": 14,
    },
    "model": {"name": "privrec", "embedding": 4, "hidden": [8]},
    "step": {"name": "sgd", "epochs": 3, "learning-rate": 0.3, "batch-size": 8},
    "sampler": {"name": "fixed-size", "cohort": 20},
    "evaluation": {"ks": [5], "baselines": [], "fine-tune": {"epochs": 4}},
    "engine": {"name": "serial", "nodes": 1, "threads": 1, "device": "cpu"},
}


def attack(tmp_path, options, *overrides):
    return attack_attribute(load(ATTACKED, overrides), options, tmp_path)


def test_profiles_reveal_gender_and_a_strong_perturbation_hides_it(tmp_path):
    options = AttributeOptions("gender", attacker="logistic")
    clear = attack(tmp_path, options)
    assert clear.success.balanced_accuracy.value > 0.8 and clear.categories == ("F", "M")
    assert clear.recommends == {} and not list(tmp_path.iterdir())
    targeted = ("perturb.name=targeted", "perturb.attribute=gender")
    responses = ("perturb.epsilon=0.1", "perturb.mechanism=randomised-response")
    hidden = attack(tmp_path, options, *targeted, *responses)
    assert hidden.success.balanced_accuracy.value < 0.63
    half = attack(tmp_path, options, *targeted, "perturb.epsilon=3")
    assert hidden.success.auc < half.success.auc <= clear.success.auc + 0.05


@pytest.mark.parametrize("source", ["recommendations", "updates"])
def test_attribute_inference_from_a_trained_system(tmp_path, source):
    """The gender among the model's features must not help the attacker, who sees only items."""
    found = attack(tmp_path, AttributeOptions("gender", source=source, without=("user.*",)))
    assert found.success.users == len(Population.of(load(ATTACKED)).partition.training_clients)
    assert found.success.balanced_accuracy.low > 0.55 and "hits@5" in found.recommends
    assert found.table()["attack"] == "attribute" and (tmp_path / "target" / "run.json").is_file()


META = {
    **ATTACKED,
    "model": {
        "name": "metamf",
        "user": 4,
        "memory": 4,
        "generator": 4,
        "embedding": 4,
        "rank": 2,
        "hidden": 4,
    },
    "step": {"name": "metamf", "negatives": 1},
    "strategy": {"name": "metamf", "server-lr": 0.05},
    "split": {"name": "ratio"},
    "evaluation": {"ks": [5], "baselines": []},
}


def test_updates_of_a_generating_system_as_its_server_sees_them(tmp_path):
    """The description of each client's gradients equals that of a central gradient of its loss."""
    experiment = load(META, ["rounds=2"])
    run = run_once(experiment, tmp_path / "run")
    users = Population.of(experiment).partition.training_clients[[5, 3, 200]]
    options = AttributeOptions("gender", source="updates", without=("layer1.*",))
    found = list(_updates(experiment, parameters_of(run), users, options))
    node = Node(experiment, 0, 1, None)
    given = {name: torch.from_numpy(value) for name, value in parameters_of(run).items()}
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
    options = AttributeOptions("gender", source="updates", attacker="logistic")
    found = attack_attribute(load(META), options, tmp_path)
    assert found.success.balanced_accuracy.low > 0.55 and "hits@5" in found.recommends


def test_an_update_reveals_the_features_of_the_user(tmp_path):
    found = attack(tmp_path, AttributeOptions("gender", source="updates", attacker="logistic"))
    assert found.success.balanced_accuracy.value > 0.92  # the row of `user.gender` that moves


def test_items_independent_of_gender_reveal_nothing(tmp_path):
    found = attack(
        tmp_path, AttributeOptions("occupation", attacker="logistic"), "dataset.users=400"
    )
    assert abs(found.success.balanced_accuracy.value - found.success.chance) < 0.1


@pytest.mark.parametrize("attribute", ["sex", "genres"])
def test_an_unknown_attribute_is_explained(tmp_path, attribute):
    with pytest.raises(ExperimentError, match="not an attribute that can be inferred"):
        attack(tmp_path, AttributeOptions(attribute))


def test_the_command(tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from simulations.cli import app

    file = tmp_path / "attacked.toml"
    import tomli_w

    file.write_text(tomli_w.dumps(ATTACKED))
    result = CliRunner().invoke(
        app,
        [
            "attack",
            "attribute",
            str(file),
            "--attacker",
            "logistic",
            "--json",
            "-o",
            str(tmp_path / "out"),
        ],
    )
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert table["success"]["users"] == 200 and table == json.loads(
        (tmp_path / "out" / "attack.json").read_text()
    )
    shown = CliRunner().invoke(
        app,
        ["attack", "attribute", str(file), "--attacker", "logistic", "-o", str(tmp_path / "out")],
    )
    assert "balanced accuracy" in shown.output and "0.500" in shown.output
    targeted = [
        "--set",
        "perturb.name=targeted",
        "--set",
        "perturb.attribute=gender",
        "--set",
        "perturb.epsilon=1",
    ]
    perturbed = CliRunner().invoke(app, ["perturb", str(file), *targeted, "--json"])
    assert json.loads(perturbed.stdout)["epsilon"]["true, whole profile"]["max"] == "inf"
    refused = CliRunner().invoke(app, ["perturb", str(file)])
    assert "perturbs nothing" in str(refused.exception)
