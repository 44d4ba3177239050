# SPDX-License-Identifier: Apache-2.0
"""Least squares, transitions and fold-in from sums over clients."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

import fedrec
from clients.blocks import to_device, update_of
from clients.evaluation import client_scorer
from clients.node import Node
from clients.step import private_names
from fedrec.baselines.base import Histories
from fedrec.baselines.closed_form import CentralIalsConfig, TransitionsBaseline, _solved
from fedrec.baselines.private.ranking import DpFoldIn, DpFoldInConfig
from fedrec.data.population import POPULATIONS, Population
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.accountant import Accountant
from fedrec.protocol.updates import SparseAccumulator, dense_change
from fedrec.training.block import Block
from server.privacy.guard import PhasePlans
from simulations import runner
from strategies.base import Aggregate
from strategies.sums import Fcf, FcfConfig, _denoised
from tests.clients.oracles import Als

SETTINGS = {"weight": 5.0, "regularisation": 0.7}


@pytest.fixture
def table(tiny_experiment):
    """Makes the tiny experiment with implicit matrix factorization, all clients in each round."""

    def make(moments: bool, rounds: int = 3, low_rated: float = 0.0) -> dict:
        strategy = {"name": "fed-als", **SETTINGS} if moments else {"name": "fcf"}
        return tiny_experiment() | {
            "rounds": rounds,
            "model": {"name": "ials", "factors": 5, "moments": moments, "spread": 2.0},
            "step": {"name": "als", "low-rated": low_rated, **SETTINGS},
            "strategy": strategy,
            "sampler": {"name": "full"},
        }

    return make


def histories(node: Node) -> Histories:
    data, clients = node.population.interactions, node.training
    return Histories(
        data.num_items,
        *node.population.rows(clients, positive=True).lists,
        clients,
        data.user_features,
        data.item_features,
        Histories(data.num_items, *node.population.rows(clients, positive=False).lists),
    )


@pytest.mark.parametrize("low_rated", [0.0, 0.4])
@pytest.mark.parametrize("path", ["blocks", "reference"])
def test_rounds_of_solving_are_sweeps_of_the_centralised_one(table, tmp_path, path, low_rated):
    """After each round, the item factors are those of iALS from the same start; and so are its
    scores."""
    result = runner.run(
        table(True, low_rated=low_rated), [f"engine.path={path}"], output=tmp_path / "run"
    )
    node = Node(result.experiment, 0, 1, tmp_path / "run" / "private")
    config = CentralIalsConfig(factors=5, **SETTINGS)
    liked = histories(node).csr(low_rated=low_rated)
    items = node.initial()["item.factors"].double()
    for _ in range(3):
        items = _solved(liked.T.tocsr(), _solved(liked, items, config), config)
    np.testing.assert_allclose(
        result.parameters["item.factors"], items.numpy(), rtol=2e-4, atol=2e-5
    )
    assert not result.parameters["item.moments"].any() and not result.parameters["user.gram"].any()
    step = node.step(result.experiment.fine_tune_step())
    parameters = to_device(result.parameters, node.device)
    found = client_scorer(node, step, parameters, 3)(node.training)
    wanted = _solved(liked, items, config) @ items.T
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("moments", [False, True])
def test_a_block_of_users_sends_what_each_would_alone(table, moments):
    """Sums, norms and losses with rows rated low, against plain linear algebra for one user."""
    experiment = load(table(moments, low_rated=0.4))
    node = Node(experiment, 0, 1, None)
    step = node.step(experiment.step)
    parameters = node.initial()
    clients = node.training
    data = node.population.clients(clients)
    batches = [step.batches(one, np.random.default_rng(0)) for one in data]
    order = np.argsort([-len(one.sizes) for one in batches], kind="stable")
    block = Block.of([data[n].features for n in order], [batches[n] for n in order], step.device)
    found = step.train_block(parameters, block)
    alone = Als(step.config, node.model, step.device)
    expected = [alone.alone(parameters, data[n], np.random.default_rng(0)) for n in order]
    names = ["user.gram", "item.right", *(["item.moments"] if moments else [])]
    shares = torch.arange(1.0, len(order) + 1, dtype=torch.float64)
    norms = found.norms(names)
    if moments:  # 15 numbers for each item that changes, with its index or as a whole table
        changed = sum(int(one.delta["item.moments"].any(1).sum()) for one in expected)
        sent = found.sent_bytes(["item.moments"])
        assert 4 * 15 * changed <= sent <= (4 * 15 + 16) * changed
    for place, one in enumerate(expected):
        whole = torch.cat([one.delta[name].flatten() for name in names]).double()
        assert float(norms[place]) == pytest.approx(float(whole.norm()), rel=1e-5, abs=1e-9)
        own = found.parameters_of(place)
        for name in names:
            torch.testing.assert_close(own[name][0], one.delta[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.losses(), [one.loss for one in expected], rtol=1e-5)
    for name in names[1:]:
        total = SparseAccumulator(tuple(parameters[name].shape))
        found.add_to({name: total}, shares)
        table = parameters[name].numpy()
        wanted = sum(s * one.delta[name].double() for s, one in zip(shares, expected, strict=True))
        summed_up = dense_change(total.change(table))
        np.testing.assert_allclose(summed_up, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("low_rated", [0.0, 0.4])
def test_what_clients_send_adds_up_to_the_gradient_of_the_loss(table, low_rated):
    """Against automatic differentiation of the loss over every user and item."""
    experiment = load(table(False, low_rated=low_rated))
    node = Node(experiment, 0, 1, None)
    start = node.initial()
    arrays = {name: value.numpy() for name, value in start.items()}
    config, weight = CentralIalsConfig(factors=5, **SETTINGS), SETTINGS["weight"]
    liked = histories(node).csr(low_rated=low_rated)
    items = start["item.factors"].double().requires_grad_()
    users = _solved(liked, items.detach(), config)
    target = torch.from_numpy(liked.toarray()).double()
    fitted = users @ items.T
    errors = target * weight * (1 - fitted).square() + (1 - target) * fitted.square()
    (errors.sum() + 0.3 * items.square().sum()).backward()

    class Everybody:
        clients = node.training

    rule = Fcf(FcfConfig(regularisation=0.3), Everybody(), {"name": "als"})
    step = node.step(experiment.step)
    sums = {name: np.zeros(value.shape) for name, value in arrays.items()}
    for client in node.training.tolist():
        delta = update_of(
            step, start, node.population.client(client), np.random.default_rng(0)
        ).delta
        sums = {name: value + delta[name].double().numpy() for name, value in sums.items()}
    np.testing.assert_allclose(
        rule.gradient(items.detach().numpy(), sums), items.grad.numpy(), rtol=1e-4, atol=1e-4
    )


def test_the_server_takes_steps_of_adam(monkeypatch):
    """Against torch's, along given gradients."""
    random = np.random.default_rng(0)
    gradients = random.normal(size=(4, 6, 2))
    weight = torch.zeros(6, 2, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=0.05, betas=(0.1, 0.99))

    class Everybody:
        clients = np.arange(3)

    rule = Fcf(FcfConfig(), Everybody(), {"name": "als"})
    step = iter(gradients)
    monkeypatch.setattr(rule, "gradient", lambda factors, sums: next(step))
    theta = {name: np.zeros((6, 2)) for name in ("item.factors", "item.right")}
    theta |= {name: np.zeros((2, 2)) for name in ("item.gram", "user.gram")}
    for round_, gradient in enumerate(gradients, 1):
        weight.grad = torch.from_numpy(gradient)
        adam.step()
        theta = rule.apply(theta, Aggregate({}, 3, 3.0, round_))
    np.testing.assert_allclose(theta["item.factors"], weight.detach().numpy(), rtol=1e-5)


def test_a_part_of_the_clients_is_scaled_up_to_all(table):
    """The rule scales sums of half of the clients up to all."""
    node = Node(load(table(False)), 0, 1, None)
    arrays = {name: value.numpy() for name, value in node.initial().items()}

    class Everybody:
        clients = node.training

    sums = {name: np.ones(value.shape) for name, value in arrays.items()}
    half = {name: value / 2 for name, value in sums.items()}
    rules = [Fcf(FcfConfig(), Everybody(), {"name": "als"}) for _ in range(2)]
    whole = rules[0].apply(dict(arrays), Aggregate(sums, len(node.training), 0, 1))
    scaled = rules[1].apply(dict(arrays), Aggregate(half, len(node.training) / 2, 0, 1))
    for name, value in whole.items():
        np.testing.assert_allclose(scaled[name], value)


@pytest.mark.parametrize("name", ["fcf", "fed-als"])
def test_models_that_do_not_fit_are_refused(table, tmp_path, name):
    """Unexpected moments, missing moments, and another model."""
    wrong = table(name == "fcf") | {"strategy": {"name": name}}
    with pytest.raises(ExperimentError, match="cannot be computed"):
        runner.run(wrong, output=tmp_path / "moments")
    with pytest.raises(ExperimentError, match=r"model\.name = 'ials'"):
        runner.run(table(False) | {"model": {"name": "mf"}}, output=tmp_path / "model")


def test_user_factors_stay_on_the_device(table):
    """A node's reply does not contain them, and is zero for a client without likes."""
    experiment = load(table(False))
    node = Node(experiment, 0, 1, None)
    start = node.initial()
    arrays = {name: value.numpy() for name, value in start.items()}
    assert private_names(node.step(experiment.step), arrays) == ["user.factors"]
    idle = node.population.client(int(node.training[0]))
    idle = type(idle)(
        idle.client, idle.features, idle.items[:0], idle.labels[:0], idle.positives[:0]
    )
    batches = node.step(experiment.step).batches(idle, np.random.default_rng(0))
    block = node.step(experiment.step).block([idle.features], [batches], node.device)
    trained = node.step(experiment.step).train_block(start, block)
    assert not any(change.any() for change in trained.changes_of(0).values())
    assert np.isnan(trained.losses()[0])


# Federated transitions against the centralised system.

RECENCY = {"window": 4, "decay": 0.6}


@pytest.fixture
def transitions_table(tiny_experiment):
    found = copy.deepcopy(tiny_experiment())
    found |= {
        "rounds": 2,
        "split": {"name": "leave-one-out"},
        "model": {"name": "transitions", **RECENCY},
        "step": {"name": "transitions"},
        "strategy": {"name": "popularity-start", "main": {"name": "transitions"}},
        "sampler": {"name": "full"},
    }
    baselines = [{"name": "transitions", **RECENCY}]
    found["evaluation"] = {"every": 0, "ks": [5], "baselines": baselines}
    return found


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_weights_and_metrics_are_those_of_the_centralised_system(transitions_table, tmp_path, path):
    result = fedrec.run({**transitions_table, "engine": {"path": path}}, output=tmp_path / "run")
    population = POPULATIONS.population(load(transitions_table))
    offsets, items = population.rows(population.training_clients, positive=True).sequences()
    central = TransitionsBaseline(TransitionsBaseline.Config(**RECENCY))
    size = population.interactions.num_items
    central.fit(Histories(size, offsets, items))
    expected = central._weights.toarray()
    np.testing.assert_allclose(result.parameters["item.weights"], expected, atol=1e-6)
    own, other = result.metrics, result.baselines["transitions"]
    assert {name: own[name] for name in other} == pytest.approx(other, abs=1e-6)


def test_noise_alone_is_left_out_and_a_strong_direction_is_not():
    generator = torch.Generator().manual_seed(0)
    size, std = 200, 3.0
    noise = std * torch.randn(size, size, dtype=torch.float64, generator=generator)
    edge = 2 * std * size**0.5
    assert _denoised(noise, 1.05 * edge, 12).abs().max() == 0
    left, right = torch.rand(2, size, dtype=torch.float64, generator=generator)
    signal = 40 * torch.outer(left, right)
    error = torch.linalg.matrix_norm(_denoised(signal + noise, edge, 12) - signal)
    assert error < 0.2 * torch.linalg.matrix_norm(noise)


# The federated fold-in against the centralised one, on every engine, with noise, under secure
# aggregation, and when it is resumed.

SYSTEM = (
    "rounds=2",
    "model={name='fold-in', items=12, factors=5, low-rated=0.25}",
    "step={name='gram', exponent=0.2, low-rated=0.25}",
    "strategy={name='popularity-start', step={name='counts', low-rated=0.25},"
    " estimate='posterior-mean', main={name='fold-in', damping=0.4}}",
    "sampler={name='full'}",
    "evaluation.fine-tune={epochs=0}",
    "evaluation.every=0",
)
CLIPS = "parameters=['item.products'], clip-norm=3.0, phases={popularity={"
PHASE = "parameters=['item.bias'], clip-norm=2.0, noise-factor=2.0}}"
CLIPPED = f"privacy={{noise-multiplier=0.0, {CLIPS}{PHASE}}}"
PRIVATE = f"privacy={{epsilon=3.0, delta=1e-5, {CLIPS}{PHASE}}}"


@pytest.fixture
def run_fold_in(run_tiny):
    return lambda *more, **others: run_tiny(*SYSTEM, *more, **others)


def centralised(experiment, **options) -> np.ndarray:
    """Scores of every user by the baseline without noise, fitted to the training users."""
    population = Population.of(experiment)
    features = population.interactions.item_features

    def histories(users):
        count = population.interactions.num_items
        others = Histories(count, *population.rows(users, positive=False).lists)
        return Histories(
            count, *population.rows(users, positive=True).lists, users, None, features, others
        )

    model = DpFoldIn(
        DpFoldInConfig(noise=False, items=12, factors=5, low_rated=0.25, damping=0.4).model_copy(
            update=options
        )
    )
    model.fit(histories(population.training_clients))
    return model.scores(histories(np.arange(population.interactions.num_users))).numpy()


def differences(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of scores that have a constant of their own for each user."""
    apart = found - expected
    return apart - apart.mean(1, keepdims=True)


@pytest.mark.parametrize(
    ("privacy", "clips"),
    [((), (1e9, 1e9)), ((CLIPPED,), (3.0, 2.0))],
    ids=["whole contributions", "clipped contributions"],
)
@pytest.mark.parametrize("path", ["auto", "reference"])
def test_without_noise_scores_are_those_of_the_centralised_system(
    run_fold_in, path, privacy, clips
):
    result = run_fold_in(*privacy, f"engine.path={path}")
    expected = centralised(result.experiment, clip_norm=clips[0], count_clip=clips[1])
    found = result.scores().to_numpy()
    np.testing.assert_allclose(differences(found, expected), 0, atol=2e-3)
    assert np.abs(differences(expected, expected[:1])).max() > 0.3, "users differ"
    learned = result.parameters["item.learned"]
    assert learned.any() and (learned[:, -1] != 0).sum() == 12, "of the chosen items alone"
    assert not result.parameters["item.products"].any(), "products are no state"


def test_both_releases_cost_epsilon_and_sqrt_2_clip_norms(run_fold_in):
    """Gaussian releases compose to one with mu^2 = sum of 1 / z^2, by one ledger."""
    result = run_fold_in(PRIVATE)
    plans = PhasePlans.before_a_run(result.experiment, np.arange(18)).plans
    for plan, clip in ((plans["popularity"], 2.0), (plans["main"], 3.0)):
        assert plan.sensitivity == pytest.approx(math.sqrt(2) * clip)
        assert plan.noise_scale == pytest.approx(plan.noise_multiplier * plan.sensitivity)
    lines = (result.folder / "privacy.jsonl").read_text().splitlines()
    charged = [json.loads(line)["event"] for line in lines]
    assert [event["phase"] for event in charged] == ["popularity", "main"]
    assert charged[0]["noise_multiplier"] == pytest.approx(2 * charged[1]["noise_multiplier"])
    mu = math.sqrt(sum(event["noise_multiplier"] ** -2 for event in charged))
    delta = norm.cdf(mu / 2 - 3 / mu) - math.exp(3) * norm.cdf(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=0.02)
    assert 2.99 < result.rounds["epsilon"].iloc[-1] <= 3.0


@pytest.mark.slow
def test_the_shipped_experiments_spend_epsilon_5():
    for name in ("fed-fold-in-ml1m", "fed-fold-in-add-remove-ml1m", "dp-fed-gram-ml1m"):
        plans = PhasePlans.before_a_run(load(name), np.arange(4832)).plans
        accountant = Accountant("pld")
        for phase, plan in plans.items():
            accountant.step(plan.event(phase))
        assert accountant.epsilon(1e-5).epsilon == pytest.approx(5.0, rel=1e-3)
