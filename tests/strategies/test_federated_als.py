# SPDX-License-Identifier: Apache-2.0
"""Federated matrix factorization with solved users, against the centralised one and automatic
differentiation."""

import numpy as np
import pytest
import torch

from clients.evaluation import client_scorer
from clients.hosting.node import Node
from clients.training.one_client import to_device, update_of
from fedrec.baselines.base import Histories
from fedrec.baselines.factorisation.ials import CentralIalsConfig, solved
from fedrec.cohort.block import Block
from fedrec.errors import ExperimentError
from fedrec.experiment.loading import load
from fedrec.factors.packed import packed, unpacked
from fedrec.protocol.sparse_update import SparseAccumulator, dense_change
from simulations import runner
from strategies.base import Aggregate
from strategies.fcf import Fcf, FcfConfig
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
        *node.population.liked(clients),
        clients,
        data.user_features,
        data.item_features,
        Histories(data.num_items, *node.population.low_rated(clients)),
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
        items = solved(liked.T.tocsr(), solved(liked, items, config), config)
    np.testing.assert_allclose(
        result.parameters["item.factors"], items.numpy(), rtol=2e-4, atol=2e-5
    )
    assert not result.parameters["item.moments"].any() and not result.parameters["user.gram"].any()
    step = node.step(result.experiment.fine_tune_step())
    parameters = to_device(result.parameters, node.device)
    found = client_scorer(node, step, parameters, 3)(node.training)
    wanted = solved(liked, items, config) @ items.T
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
    for place, one in enumerate(expected):
        whole = torch.cat([one.delta[name].flatten() for name in names]).double()
        assert float(norms[place]) == pytest.approx(float(whole.norm()), rel=1e-5, abs=1e-9)
        own = found.parameters_of(place)
        for name in names:
            torch.testing.assert_close(own[name][0], one.delta[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.losses(), [one.loss for one in expected], rtol=1e-5)
    for name in names[1:]:
        total = SparseAccumulator(tuple(parameters[name].shape))
        found.add_rows(name, total, shares)
        table = parameters[name].numpy()
        wanted = sum(s * one.delta[name].double() for s, one in zip(shares, expected, strict=True))
        summed_up = dense_change(total.change(table), table)
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
    users = solved(liked, items.detach(), config)
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
    adam = torch.optim.Adam([weight], lr=0.05, betas=(0.7, 0.9))

    class Everybody:
        clients = np.arange(3)

    rule = Fcf(FcfConfig(beta1=0.7, beta2=0.9), Everybody(), {"name": "als"})
    step = iter(gradients)
    monkeypatch.setattr(rule, "gradient", lambda factors, sums: next(step))
    theta = {name: np.zeros((6, 2)) for name in ("item.factors", "item.right")}
    theta |= {name: np.zeros((2, 2)) for name in ("item.gram", "user.gram")}
    for round_, gradient in enumerate(gradients, 1):
        weight.grad = torch.from_numpy(gradient)
        adam.step()
        theta = rule.apply(theta, Aggregate({}, 3, 3.0, round_))
    np.testing.assert_allclose(theta["item.factors"], weight.detach().numpy(), rtol=1e-5)


def test_a_full_step_along_what_clients_send_gives_the_factors_of_implicit(table):
    """The loss is quadratic in each item's factors, so Newton's step, the inverse of its second
    derivative times FCF's gradient, is one alternation of least squares."""
    als = pytest.importorskip("implicit.cpu.als")
    from scipy.sparse import csr_matrix

    node = Node(load(table(False)), 0, 1, None)
    start = node.initial()
    step, everybody = node.step(node.experiment.step), node.training.tolist()
    weight, regularisation = SETTINGS["weight"], SETTINGS["regularisation"]
    liked = histories(node).csr(np.float64)

    class Everybody:
        clients = node.training

    rule = Fcf(FcfConfig(regularisation=regularisation), Everybody(), {"name": "als"})
    sums = {name: np.zeros(value.shape) for name, value in start.items()}
    for client in everybody:
        delta = update_of(
            step, start, node.population.client(client), np.random.default_rng(0)
        ).delta
        sums = {name: value + delta[name].double().numpy() for name, value in sums.items()}
    before = start["item.factors"].double().numpy()
    gradient = rule.gradient(before, sums)

    reference = als.AlternatingLeastSquares(
        factors=5,
        alpha=weight,
        regularization=regularisation,
        use_cg=False,
        iterations=1,
        dtype=np.float64,
        num_threads=1,
    )
    reference.user_factors = np.zeros((len(everybody), 5))
    reference.item_factors = before.copy()
    reference.fit(csr_matrix(liked), show_progress=False)
    users, counted = reference.user_factors, 1 + (weight - 1) * liked.toarray()
    curvature = 2 * np.einsum("ui,uf,ug->ifg", counted, users, users)
    curvature += 2 * regularisation * np.eye(5)
    after = before - np.linalg.solve(curvature, gradient[..., None])[..., 0]
    np.testing.assert_allclose(after, reference.item_factors, rtol=2e-3, atol=2e-4)
    assert np.abs(after - before).max() > 0.1


@pytest.mark.slow
def test_the_gradient_vanishes_where_solving_stays(table, tmp_path):
    """After convergence, the gradient with respect to the items' factors is zero."""
    result = runner.run(
        table(True, rounds=300),
        ["checkpoint.every=300", "evaluation.every=0"],
        output=tmp_path / "run",
    )
    experiment = result.experiment
    node = Node(experiment, 0, 1, None)
    liked, config = histories(node).csr(), CentralIalsConfig(factors=5, **SETTINGS)
    items = torch.from_numpy(result.parameters["item.factors"]).double().requires_grad_()
    users = solved(liked, items.detach(), config)
    target = torch.from_numpy(liked.toarray()).double()
    errors = (1 + (SETTINGS["weight"] - 1) * target) * (target - users @ items.T).square()
    (errors.sum() + SETTINGS["regularisation"] * items.square().sum()).backward()
    assert items.grad.abs().max() < 1e-3 * target.sum()


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


def test_packed_matrices_have_the_same_norm_and_come_back():
    drawn = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrices = drawn + drawn.transpose(1, 2)
    torch.testing.assert_close(packed(matrices).norm(dim=-1), matrices.flatten(1).norm(dim=1))
    torch.testing.assert_close(unpacked(packed(matrices)), matrices)
    with pytest.raises(ValueError, match="got 7"):
        unpacked(torch.zeros(7))


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
    assert node.step(experiment.step).private_names(list(arrays)) == ["user.factors"]
    idle = node.population.client(int(node.training[0]))
    idle = type(idle)(
        idle.client, idle.features, idle.items[:0], idle.labels[:0], idle.positives[:0]
    )
    batches = node.step(experiment.step).batches(idle, np.random.default_rng(0))
    block = node.step(experiment.step).block([idle.features], [batches], node.device)
    trained = node.step(experiment.step).train_block(start, block)
    assert not any(value.any() for value in trained.values.values())
    assert np.isnan(trained.losses()[0])


def test_a_noisy_round_is_finite(table, tmp_path):
    """Under noise the moments are not positive semi-definite; they are projected, and the run
    continues."""
    private = table(True) | {"privacy": {"clip-norm": 1.0, "noise-multiplier": 1.0, "delta": 1e-5}}
    names = ["user.gram", "item.right", "item.moments"]
    result = runner.run(private, [f"privacy.parameters={names}"], output=tmp_path / "run")
    assert all(np.isfinite(value).all() for value in result.parameters.values())
