# SPDX-License-Identifier: Apache-2.0
"""Attacks on experiments, and the canaries of audits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clients.node import Node
from clients.round import train_clients
from clients.step import keeps_state, private_names
from fedrec.data.interactions import Feature, FeatureTable
from fedrec.data.population import Population
from fedrec.data.readers.synthetic import Synthetic, SyntheticConfig
from fedrec.data.splits.folds import LeaveOneOut
from fedrec.errors import ExperimentError, RunError
from fedrec.experiment.schema import load
from fedrec.models.base import Model
from fedrec.models.personal import generate
from fedrec.privacy.canaries import CanaryPlan
from fedrec.protocol.messages import TrainOrder
from fedrec.protocol.updates import dense_change
from fedrec.rng import stream, torch_stream
from fedrec.runs.folder import RunFolder
from simulations import runner
from simulations.attacks.base import run_attack
from simulations.attacks.systems import (
    EXAMPLES,
    Reserved,
    TrainedSystem,
    TrainingClients,
    bit_mask,
    half_members,
    half_memberships,
    shadow_parts,
)
from tests.clients.oracles import update_under
from tests.simulations.helpers import experiment_on, synthetic

# Membership attacks end to end: federations, lists and signals, on systems with and without a leak.


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


def attack(folder, name, *overrides, table=ATTACKED, **settings):
    return run_attack(load(table, overrides), {"name": name, **settings}, folder)


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
    found = attack(tmp_path, "lira", *MEMORISING, shadows=6).figures
    assert found.auc.value > 0.85 and found.balanced_accuracy.low > 0.7


def test_runs_that_are_there_are_taken_and_others_refused(tmp_path):
    first = attack(tmp_path, "lira", "rounds=2", shadows=4)
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
    again = attack(tmp_path, "lira", "rounds=2", shadows=4)
    assert again.table == first.table and len(stamps) == 10
    other = attack(tmp_path, "lira", "rounds=2", shadows=4, epsilon=1.0)
    assert other.figures == first.figures and other.table["ceilings"]
    assert stamps == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/checkpoints/*")}
    with pytest.raises(RunError, match="holds a run with different settings"):
        attack(tmp_path, "lira", "rounds=3", shadows=4)


PAPERS = {"shadow-users": 40}


def test_the_papers_attack_end_to_end(tmp_path):
    outcome = attack(tmp_path, "membership", "rounds=3", **PAPERS)
    assert (outcome.figures.members, outcome.figures.others) == (28, 28)
    assert "hits@5" in outcome.table["recommends"]
    runs = RunFolder(tmp_path / "shadow"), RunFolder(tmp_path / "target")
    clients = Population.of(load(ATTACKED)).partition.training_clients
    parts = shadow_parts(clients, 40, seed=0)
    for run, expected in zip(runs, parts[::2], strict=True):
        assert np.array_equal(Population.of(run.experiment).partition.training_clients, expected)
    assert runs[0].experiment.seed != runs[1].experiment.seed == 0
    table = outcome.table
    assert table["attack"] == "membership" and table["success"]["members"] == 28
    assert table["options"]["shadow_users"] == 40 and table["ceilings"] == {}


def test_the_papers_attack_finds_members_of_a_system_that_learns_them_by_heart(tmp_path):
    found = attack(tmp_path, "membership", *MEMORISING, **PAPERS).figures
    assert found.balanced_accuracy.low > 0.7 and found.auc.low > 0.75


class Stereotyped(Synthetic):
    """The synthetic dataset, but three of four items of women are even, and of men odd."""

    def read(self):
        data = super().read()
        woman = data.user_features["gender"].padded()[data.users, 0] == 0
        follows = np.random.default_rng(0).random(len(data)) < 0.75
        even = np.where(follows, woman, ~woman)
        return replace(data, items=(data.items // 2) * 2 + ~even)


STEREOTYPED = experiment_on(
    synthetic(250, 40, 14) | {"name": "test_attack_drivers:Stereotyped"},
    name="attacked",
    rounds=6,
    model={"name": "privrec", "embedding": 4, "hidden": [8]},
    step={"name": "sgd", "epochs": 3, "learning-rate": 0.3, "batch-size": 8},
    sampler={"name": "fixed-size", "cohort": 20},
    evaluation={"ks": [5], "baselines": [], "fine-tune": {"epochs": 4}},
)
del STEREOTYPED["positive-above"]


def infer(folder, *overrides, **settings):
    return attack(folder, "attribute", *overrides, table=STEREOTYPED, **settings)


@pytest.mark.slow
def test_profiles_reveal_gender_and_a_strong_perturbation_hides_it(tmp_path):
    outcome = infer(tmp_path)
    clear = outcome.figures
    assert clear.balanced_accuracy.value > 0.8 and outcome.table["categories"] == ["F", "M"]
    assert "recommends" not in outcome.table
    assert [file.name for file in tmp_path.iterdir()] == ["attack.json"]
    targeted = ("perturb.name=targeted", "perturb.attribute=gender")
    responses = ("perturb.name=randomised-response", "perturb.epsilon=0.1")
    hidden = infer(tmp_path, *responses).figures
    assert hidden.balanced_accuracy.value < 0.63
    half = infer(tmp_path, *targeted, "perturb.epsilon=3").figures
    assert hidden.auc < half.auc <= clear.auc + 0.05


@pytest.mark.slow
def test_attribute_inference_from_a_trained_system(tmp_path):
    """The gender among the model's features must not help the attacker, who sees only items."""
    outcome = infer(tmp_path, source="recommendations")
    found = outcome.figures
    assert found.users == len(Population.of(load(STEREOTYPED)).partition.training_clients)
    assert found.balanced_accuracy.low > 0.55 and "hits@5" in outcome.table["recommends"]
    assert outcome.table["attack"] == "attribute" and (tmp_path / "target" / "run.json").is_file()


META = {
    **STEREOTYPED,
    "model": {"name": "metamf", "rank": 2}
    | dict.fromkeys(("user", "memory", "generator", "embedding", "hidden"), 4),
    "step": {"name": "metamf"},
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
    found = list(target.updates(users))
    node = Node(experiment, 0, 1, None)
    given = {name: torch.from_numpy(value.copy()) for name, value in target.parameters.items()}
    for user, described in zip(users.tolist(), found, strict=True):
        values, low = generate(given, torch.tensor([user]), None)
        own = {name: value[0] for name, value in (values | {"item.low": low}).items()}
        drawn = stream(experiment.seed, "client", user, experiment.rounds + 1)
        data = node.population.client(user)
        delta = update_under(node.step(experiment.step), own, data, drawn).delta
        told = [v.norm(dim=-1) if v.dim() > 1 else v for v in delta.values()]
        np.testing.assert_allclose(
            np.abs(described), np.abs(torch.cat(told).numpy()), rtol=1e-3, atol=1e-6
        )
        assert 0 < np.count_nonzero(described[-40:]) < 40


@pytest.mark.parametrize("attribute", ["sex", "genres"])
def test_an_unknown_attribute_is_explained(tmp_path, attribute):
    """Before anything is trained."""
    with pytest.raises(ExperimentError, match="cannot be inferred"):
        infer(tmp_path, attribute=attribute, source="updates")
    assert not list(tmp_path.iterdir())


# Who trains the systems of an attack: sizes, balance, independence of the order of users, and a
# split in which only they train.

PAPER = {"shadow_users": 1000}


def test_the_papers_sizes():
    parts = shadow_parts(np.arange(6040), **PAPER, seed=1)
    assert [len(part) for part in parts] == [800, 200, 2520, 2520]
    again = shadow_parts(np.arange(6040)[::-1], **PAPER, seed=1)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(6040))


@pytest.mark.parametrize("users", [1000, 1001])
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


def test_only_the_chosen_users_train_and_nothing_else_changes():
    """Also whether held-out items are kept out of the negatives."""
    settings = {"users": 40, "items": 30, "mean-interactions": 8, "min-interactions": 4}
    data = Synthetic("synthetic", SyntheticConfig.parse(settings)).read()
    own = {"name": "leave-one-out", "leaky-negatives": True}
    base = LeaveOneOut(LeaveOneOut.Config.parse({"leaky-negatives": True}), 3).split(data)
    chosen = np.random.default_rng(0).random(40) < 0.4

    section = {"base": own, "seed": 3, "members": bit_mask(chosen)}
    found = TrainingClients(TrainingClients.Config.parse(section), 99).split(data)
    assert np.array_equal(found.training_clients, base.training_clients[chosen])
    for part in ("train_rows", "validation_rows", "test_rows", "leaky_negatives"):
        assert np.array_equal(getattr(found, part), getattr(base, part))
    section["members"] = bit_mask(chosen[:20])
    with pytest.raises(ExperimentError, match="drawn from other users"):
        TrainingClients(TrainingClients.Config.parse(section), 99).split(data)


# What an audit adds to an experiment: canary users, rows of parameters that nothing reads, and a
# step in which the canaries upload fixed updates and all others do the same as ever.

USERS, CANARIES = 24, 6
PLAN = {"first": USERS, "count": CANARIES, "magnitude": 3.0, "seed": 1}
HERE = "simulations.attacks.systems"


def added(table, kind, where, **settings):
    return {kind: {"name": f"{HERE}:{where}", "base": table[kind], **settings}}


def with_users(table, count=CANARIES, **settings):
    users = added(table, "dataset", "CanaryUsers", count=count, **settings)
    return {**table, **users, **added(table, "split", "TrainingClients", canaries=count)}


def with_rows(table, rows, **settings):
    return {**table, **added(table, "model", "Reserved", rows=rows, **settings)}


@pytest.mark.parametrize(
    "split",
    [
        {"name": "user-holdout"},
        {"name": "leave-one-out", "leaky-negatives": True},
        {"name": "ratio"},
    ],
)
def test_canaries_train_and_nothing_else_changes(tiny_experiment, split):
    table = {**tiny_experiment(), "split": split}
    audited = Population.of(load(with_users(table, count=7, items=3)))
    plain = Population.of(load(table))
    users = plain.interactions.num_users
    new = np.arange(users, users + 7)
    assert audited.interactions.num_users == users + 7
    assert audited.interactions.num_items == plain.interactions.num_items + 3
    assert np.array_equal(audited.interactions.items, plain.interactions.items)
    training = np.concatenate([plain.partition.training_clients, new])
    assert np.array_equal(audited.partition.training_clients, training)
    for part in ("train_rows", "validation_rows", "test_rows", "leaky_negatives"):
        assert np.array_equal(getattr(audited.partition, part), getattr(plain.partition, part))
    assert np.array_equal(audited.evaluated_clients("test"), plain.evaluated_clients("test"))
    assert audited.schema().user_features == plain.schema().user_features
    canary = audited.client(int(new[0]))
    assert len(canary.items) == len(canary.positives) == 0
    assert all((codes == -1).all() for codes in canary.features)


@pytest.mark.parametrize("model", ["privrec", "mf", "ials"])
def test_nothing_reads_reserved_rows(tiny_experiment, model):
    """Scores, losses and the other rows of initial parameters are those of the other model."""
    table = tiny_experiment()
    table["model"] = table["model"] if model == "privrec" else {"name": model, "factors": 2}
    reserved, plain = (Node(load(t), 0, 1, None).model for t in (with_rows(table, 5), table))
    more, less = (model.initial(torch_stream(1, "init")) for model in (reserved, plain))
    assert list(more) == list(less) and reserved.item_tables == plain.item_tables
    parameters = {name: value.unsqueeze(0) for name, value in less.items()}
    wider = dict(parameters)
    for name, value in less.items():
        five = (5, *value.shape[1:])
        if name in plain.item_tables:
            wider[name] = torch.cat([value, torch.full(five, 7.0)])[None]
            value = torch.cat([value, torch.zeros(five)])
        assert torch.equal(more[name], value)
    users = tuple(torch.zeros(1, 1, dtype=torch.int64) for _ in plain.schema.user_features)
    scores = reserved.scores(wider, users)
    assert torch.equal(scores, plain.scores(parameters, users))
    assert scores.shape == (1, plain.schema.num_items)
    predictions, labels = torch.tensor([[0.3, -1.0]]), torch.tensor([[1.0, 0.0]])
    assert torch.equal(reserved.loss(predictions, labels), plain.loss(predictions, labels))


@pytest.mark.parametrize("patterns", [["*"], ["layer0.*", "user.*"]])
def test_reserved_rows_of_all_parameters_change_no_update(tiny_experiment, patterns):
    """The model computes with its own rows, so that the reserved ones stay zero."""
    table = {**tiny_experiment(), "seed": 3}
    plain, wider = (
        Node(load(t), 0, 1, None) for t in (table, with_rows(table, 12, parameters=patterns))
    )
    assert isinstance(wider.model, Reserved)
    room = wider.model.room
    some = plain.training[:4]
    found = train_clients(wider, parameters(wider), TrainOrder(1, some))
    expected = train_clients(plain, parameters(plain), TrainOrder(1, some))
    for name in parameters(plain):
        own = dense_change(expected.total[name])
        wide = dense_change(found.total[name])
        assert wide[: len(own)] == pytest.approx(own, rel=1e-4, abs=1e-6)
        assert not wide[len(own) :].any()
        assert len(wide) - len(own) == room.get(name, 0)
    assert {"layer0.weight", "layer0.bias", "item.id"} <= set(room)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.fixture
def nodes(tiny_experiment):
    """A node with canaries and one without, of the same experiment."""

    def make(path="auto"):
        table = tiny_experiment()
        table["engine"]["path"] = path
        audited = with_rows(with_users(table), CANARIES)
        audited["step"] = {
            **table["step"],
            "name": f"{HERE}:Canary",
            "base": "sgd",
            "canaries": PLAN,
        }
        return Node(load(audited), 0, 1, None), Node(load(table), 0, 1, None)

    return make


def parameters(node):
    return {
        name: value.numpy() for name, value in node.model.initial(torch_stream(0, "init")).items()
    }


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_round_is_the_plain_round_and_the_planted_rows(nodes, path, weighting):
    audited, plain = nodes(path)
    some = plain.training[:5]
    canaries = np.array([USERS, USERS + 3])
    with_them = train_clients(
        audited, parameters(audited), TrainOrder(1, np.concatenate([some, canaries]), weighting)
    )
    alone = train_clients(plain, parameters(plain), TrainOrder(1, some, weighting))
    share = EXAMPLES if weighting == "examples" else 1.0
    audit = {name: dense_change(change) for name, change in with_them.total.items()}
    for name, change in alone.total.items():
        total = dense_change(change)
        assert np.array_equal(audit[name][: len(total)], total)
    rows = audit["item.id"][-CANARIES:]
    signs = CanaryPlan.parse(PLAN).signs()
    expected = np.zeros((CANARIES, 4))
    for place in (0, 3):
        expected[place] = share * signs[place] * 3.0 / 2.0  # norm 3 over four entries
    assert rows == pytest.approx(expected)
    assert with_them.clients == alone.clients + 2
    assert with_them.examples == alone.examples + 2 * EXAMPLES
    assert (with_them.loss, with_them.losses) == (alone.loss, alone.losses)
    assert with_them.weight == alone.weight + 2 * share


def test_the_others_are_trained_in_blocks(nodes, monkeypatch):
    audited, _ = nodes()
    from clients import round

    blocks = []
    real = round.train_in_blocks
    monkeypatch.setattr(
        round, "train_in_blocks", lambda *a, **k: blocks.append(a[4].tolist()) or real(*a, **k)
    )
    train_clients(
        audited, parameters(audited), TrainOrder(1, np.array([*audited.training[:4], USERS + 1]))
    )
    assert blocks == [audited.training[:4].tolist(), [USERS + 1]]


def test_what_belongs_to_the_other_step_is_the_others(nodes):
    """Its settings in fine-tuning, and what stays on a device."""
    audited, _ = nodes()
    section = audited.experiment.step
    canary = audited.step(section)
    tuned = audited.step(audited.experiment.fine_tune_step())
    assert tuned.base.config.epochs == 1 and tuned.base.config.batch_size == 8
    private = type(section).model_validate({**section.model_dump(), "private-parameters": ["w"]})
    step = audited.step(private)
    assert keeps_state(step) and not keeps_state(canary)
    assert private_names(step, ["w", "v"]) == ["w"]
