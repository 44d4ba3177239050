# SPDX-License-Identifier: Apache-2.0
"""Steps that clip and add noise, and those of the variational autoencoder."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.blocks import update_of
from clients.evaluation import client_scorer
from clients.node import Node
from clients.round import train_clients
from clients.steps.dpsgd import DpSgd, DpSgdConfig
from clients.steps.own_noise import clipped_mean
from clients.steps.vae import DpVae, DpVaeConfig, VaeStep, VaeStepConfig, generator_of
from clients.sums import UpdateSum
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import load
from fedrec.privacy.accounting.rdp import gdp_epsilon
from fedrec.privacy.optimal_clip import optimal_clip
from fedrec.protocol.messages import TrainOrder
from fedrec.rng import Reproducible, stream
from server.samplers import Limited, LimitedConfig
from tests.clients import oracles

# DP-SGD with the user's own noise on matrix factorization, against gradients in closed form.

MF = ("model={name='mf', factors=3}", "split={name='ratio'}", "evaluation.fine-tune={upload=false}")
SHARED = ("bias", "item.factors", "item.bias")
LITTLE = {"budgets": "equal", "epsilon": 1e12, "delta": 0.1}  # next to no noise


@pytest.fixture(params=["ranking", "rating"])
def made(request, tiny_experiment, tmp_path):
    table = {**tiny_experiment(), "task": request.param}
    if request.param == "rating":
        del table["positive-above"]
    return Node(
        load(table, [*MF, "step={name='dpsgd', private-parameters=['user.*']}"]),
        0,
        1,
        Path(tmp_path),
    )


@pytest.fixture
def given(made):
    """A client, its examples, and parameters of which none is zero."""
    data, random = made.population.client(3), np.random.default_rng(0)
    parameters = {
        n: torch.from_numpy(random.normal(size=v.shape).astype("f4"))
        for n, v in made.initial().items()
    }
    return data, parameters


def step_of(made, **settings):
    given = {"private_parameters": ("user.*",), "budgets": "equal", **settings}
    return DpSgd(DpSgdConfig(**given), made.model, made.device)


def by_hand(task, parameters, item, label):
    """The gradient of one example's loss with respect to the prediction, and then to each
    parameter."""
    p = {name: value.double().numpy() for name, value in parameters.items()}
    score = (
        p["bias"][0]
        + p["user.bias"][0]
        + p["item.bias"][item, 0]
        + p["item.factors"][item] @ p["user.factors"]
    )
    outer = 2 * (score - label) if task == "rating" else 1 / (1 + math.exp(-score)) - label
    found = {name: np.zeros(value.shape) for name, value in p.items()}
    found["bias"][0] = found["user.bias"][0] = found["item.bias"][item, 0] = outer
    found["item.factors"][item] = outer * p["user.factors"]
    found["user.factors"][:] = outer * p["item.factors"][item]
    return found


def rows_by_hand(made, parameters, items, labels):
    task = made.experiment.task
    parts = [
        by_hand(task, parameters, item, label) for item, label in zip(items, labels, strict=True)
    ]
    return np.array(
        [
            np.concatenate([one[name].ravel() for name in parameters if name in SHARED])
            for one in parts
        ]
    )


def flat(update, parameters, names=SHARED):
    return np.concatenate(
        [update.delta[name].numpy().ravel() for name in parameters if name in names]
    )


def test_gradients_are_those_of_each_example(made, given):
    data, parameters = given
    examples = data.items[:4], np.array([1, 0, 1, 0], dtype=np.float32)
    got, _ = step_of(made, examples=100).gradients(parameters, data, examples, stream(0, "x"))
    order = stream(0, "x").choice(4, size=4, replace=False)
    expected = rows_by_hand(made, parameters, *(part[order] for part in examples))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-6)
    mean, _ = step_of(made, examples=100, clip="user").gradients(
        parameters, data, examples, stream(0, "x")
    )
    np.testing.assert_allclose(mean.numpy(), expected.mean(0, keepdims=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["sound", "paper"])
def test_an_upload_is_the_mean_of_clipped_gradients(made, given, mode):
    """With `paper` and no noise, equation 20 selects the norm with the smallest clipping error: the
    largest norm."""
    data, parameters = given
    # a rate of next to nothing leaves them where they are
    fixed = dict.fromkeys(("user.factors", "user.bias"), 0.0)
    step = step_of(
        made, mode=mode, clip_norm=0.4, learning_rate=0.5, examples=5, private_rate=1e-30, **LITTLE
    )
    update = update_of(step, parameters, data, stream(0, "y"))
    random, config = stream(0, "y"), step.config
    items, labels = oracles.labelled(data, made.model.schema, 4, "ignore", random)
    for _ in range(config.epochs):
        random.permutation(len(items))
    drawn = random.choice(len(items), size=5, replace=False)
    rows = rows_by_hand(made, parameters, items[drawn], labels[drawn])
    norms = np.linalg.norm(rows, axis=1)
    bounds = [0.4] if mode == "sound" else norms
    candidates = [-0.5 * (rows * np.minimum(1, bound / norms)[:, None]).mean(0) for bound in bounds]
    gaps = [np.abs(flat(update, parameters) - one).max() for one in candidates]
    assert min(gaps) < 1e-5 and all(
        float(update.delta[name].abs().max()) == value for name, value in fixed.items()
    )
    if mode == "paper":

        def lost(bound):  # H(S) of equation 20 without its first term, by loops
            clipped = [row * min(1, bound / norm) for row, norm in zip(rows, norms, strict=True)]
            mean = np.mean(clipped, axis=0)
            parts = [np.abs(mean - own).sum() for own in clipped]
            return np.mean(
                [
                    p + np.abs(r).sum() / n * max(0, n - bound)
                    for p, r, n in zip(parts, rows, norms, strict=True)
                ]
            )

        ordered = sorted(norms, reverse=True)
        place = ordered.index(bounds[int(np.argmin(gaps))])
        near = [
            lost(ordered[other]) for other in (place - 1, place + 1) if 0 <= other < len(ordered)
        ]
        assert lost(ordered[place]) <= min(near) + 1e-9
        assert math.isfinite(update.loss)


@pytest.mark.slow
def test_noise_has_the_users_own_scale_on_every_shared_number_and_on_no_private_one(made, given):
    data, parameters = given
    settings = {"clip_norm": 0.25, "learning_rate": 0.5}
    noisy, quiet = step_of(made, **settings, epsilon=0.8), step_of(made, **settings, **LITTLE)
    noise = []
    for repeat in range(40):
        one, other = (
            update_of(step, parameters, data, stream(0, "y", repeat)) for step in (noisy, quiet)
        )
        noise.append((flat(one, parameters) - flat(other, parameters)) / 0.5)
        for name in ("user.factors", "user.bias"):
            assert torch.equal(one.delta[name], other.delta[name]) and (one.delta[name] != 0).all()
    noise = np.stack(noise) / (0.25 * math.sqrt(2 * math.log(1.25e5)) / 0.8)
    assert noise.std() == pytest.approx(1, abs=4 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 4 / math.sqrt(noise.size) and (noise.std(0) > 0.5).all()


def test_private_parameters_go_down_their_own_gradient(made, given, monkeypatch):
    monkeypatch.setattr("clients.steps.dpsgd._BATCH", 1000)
    data, parameters = given
    update = update_of(
        step_of(made, upload=False, epochs=3, private_rate=0.2), parameters, data, stream(0, "z")
    )
    items, labels = oracles.labelled(data, made.model.schema, 4, "ignore", stream(0, "z"))
    own = {name: value.clone() for name, value in parameters.items()}
    for _ in range(3):
        parts = [
            by_hand(made.experiment.task, own, i, y) for i, y in zip(items, labels, strict=True)
        ]
        for name in ("user.factors", "user.bias"):
            own[name] = own[name] - 0.2 * torch.from_numpy(
                np.mean([one[name] for one in parts], axis=0)
            )
    for name in ("user.factors", "user.bias"):
        np.testing.assert_allclose(
            update.delta[name].numpy(), (own[name] - parameters[name]).numpy(), rtol=1e-3, atol=1e-5
        )
    assert not flat(update, parameters).any()


def test_a_sound_upload_reveals_only_the_noisy_mean(made, given):
    data, parameters = given
    empty = type(data)(3, data.features, data.items[:0], data.labels[:0], data.positives[:0])
    one, other = (
        update_of(step_of(made), parameters, own, stream(0, "y")) for own in (data, empty)
    )
    assert one.examples == other.examples and math.isnan(one.loss) and math.isnan(other.loss)
    assert (flat(other, parameters) != 0).all()


def test_no_epoch_changes_nothing_and_is_no_upload(made, given):
    data, parameters = given
    step = step_of(made, epochs=0, participations=2)
    assert step.config.uploads is None
    assert not flat(update_of(step, parameters, data, stream(0, "y")), parameters, parameters).any()
    assert step_of(made, participations=2).config.uploads == 2
    assert step_of(made, participations=2, upload=False).config.uploads is None


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="priors"):
        DpSgdConfig.model_validate({"priors": {}})
    with pytest.raises(ValueError, match="compares examples"):
        DpSgdConfig.model_validate({"mode": "paper", "clip": "user"})


# Algorithm 3 of DP-VAE: gradients of single examples, the clip, the noise, and the upload.

VAE = ("model={name='vae', hidden=6, latent=3}", "evaluation.fine-tune={epochs=0}")


@pytest.fixture
def vae_node(load_tiny, tmp_path):
    return Node(load_tiny(*VAE, "step={name='dpvae'}"), 0, 1, Path(tmp_path))


def dpvae_of(made, **settings):
    return oracles.DpVae(DpVaeConfig(**{"budgets": "equal", **settings}), made.model, made.device)


def flat_network(update, parameters):
    return torch.cat([update.delta[name].flatten() for name in parameters])


def test_gradients_are_those_of_each_interaction(vae_node):
    parameters, data = vae_node.initial(), vae_node.population.client(3)
    got, loss = dpvae_of(vae_node, examples=3, beta=0.6).gradients(parameters, data, stream(1, "x"))
    random = stream(1, "x")
    items = random.choice(data.positives, size=min(3, len(data.positives)), replace=False)
    draw = vae_node.model.draw((1, 1), generator_of(random))
    history = oracles.one_history(vae_node.model, data.positives)
    losses = []
    for place, item in enumerate(items):
        leaves = {
            name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
        }
        log_chances, distances = vae_node.model.parts(leaves, history, draw)
        one = (0.6 / len(data.positives) * distances - log_chances[..., item]).sum()
        one.backward()
        expected = torch.cat([leaves[name].grad.flatten() for name in parameters])
        torch.testing.assert_close(got[place], expected, rtol=1e-4, atol=1e-6)
        losses.append(float(one.detach()))
    assert len(got) == len(items) and loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_each_gradient_is_clipped_on_its_own():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0]])
    torch.testing.assert_close(
        clipped_mean(rows, 1.0), torch.tensor([0.9, 1.2]) / 3, rtol=1e-5, atol=0
    )
    assert clipped_mean(torch.zeros(0, 2), 1.0).tolist() == [0, 0]


@pytest.mark.parametrize("bound", [1e-3, 0.37, 2.0])
def test_a_clipped_mean_never_exceeds_the_bound(bound):
    rows = 100 * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0)).expand(4, -1)
    assert clipped_mean(rows, bound).double().norm() <= bound


@pytest.mark.parametrize("mode", ["sound", "paper"])
def test_noise_has_the_users_own_scale_on_every_coordinate(vae_node, mode):
    parameters, data = vae_node.initial(), vae_node.population.client(3)
    step = dpvae_of(vae_node, mode=mode, clip_norm=0.25, learning_rate=0.5, epsilon=0.8)
    shipped = DpVae(step.config, vae_node.model, vae_node.device)
    gradients, _ = step.gradients(parameters, data, stream(0, "y"))
    multiplier = math.sqrt(2 * math.log(1.25e5)) / 0.8
    bound = 0.25 if mode == "sound" else optimal_clip(gradients, multiplier)
    noise = []
    for repeat in range(40):
        own = stream(0, "y", repeat)
        expected = clipped_mean(step.gradients(parameters, data, stream(0, "y", repeat))[0], bound)
        if mode == "paper":
            own_gradients = step.gradients(parameters, data, stream(0, "y", repeat))[0]
            bound = optimal_clip(own_gradients, multiplier)
            expected = clipped_mean(own_gradients, bound)
        found = update_of(shipped, parameters, data, own)
        uploaded = -flat_network(found, parameters) / 0.5
        noise.append((uploaded - expected) / (multiplier * bound))
    noise = torch.stack(noise)
    assert float(noise.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * noise.numel()))
    assert abs(float(noise.mean())) < 4 / math.sqrt(noise.numel()) and (noise.std(0) > 0.5).all()


def test_a_sound_upload_reveals_only_the_noisy_mean_of_dpvae_step(vae_node):
    parameters, data = vae_node.initial(), vae_node.population.client(3)
    step = DpVae(dpvae_of(vae_node).config, vae_node.model, vae_node.device)
    empty = type(data)(3, data.features, data.items[:0], data.labels[:0], data.positives[:0])
    one, other = (update_of(step, parameters, own, stream(0, "y")) for own in (data, empty))
    assert one.examples == other.examples and math.isnan(one.loss) and math.isnan(other.loss)
    assert (flat_network(other, parameters) != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["user", "examples"])
def test_noise_of_a_sum_has_the_distribution_of_the_users_noises_together(vae_node, clip):
    settings = {"clip": clip, "clip_norm": 0.3, "budgets": "uniform", "learning_rate": 0.5}
    settings |= {"weighting": "precision", "participations": 1, "epsilon": 2.0}
    parameters, clients = vae_node.initial(), [1, 3, 4]

    def added(repeat, **own):
        step = DpVae(DpVaeConfig(**{**settings, **own}), vae_node.model, vae_node.device)
        data = [vae_node.population.client(client) for client in clients]
        streams = [stream(0, "sum", client, repeat) for client in clients]
        batches = [step.batches(one, r) for one, r in zip(data, streams, strict=True)]
        block = step.block([one.features for one in data], batches, vae_node.device)
        arrays = {name: value.numpy() for name, value in parameters.items()}
        total = UpdateSum(arrays, (), "uniform", None, Reproducible(repeat), 1)
        trained = step.train_block(parameters, block)
        total._shares = lambda *_: np.array([0.5, 0.0, 0.25])
        total.add_block(clients, trained)
        found = [total.sum().total[name].ravel() for name in parameters]
        return torch.from_numpy(np.concatenate(found)).double(), trained

    (summed, other) = (
        torch.stack([added(repeat, noise=kind)[0] for repeat in range(60)])
        for kind in ("summed", "reproducible")
    )
    config = DpVaeConfig(**settings)
    stds = [config.noise_multiplier(c) * 0.3 * 0.5 * config.weight(c) for c in clients]
    std = math.hypot(stds[0] * 0.5, stds[2] * 0.25)
    near = pytest.approx(std, rel=4 / math.sqrt(2 * summed.numel()) + 0.01)
    assert float((summed - summed.mean(0)).std() * math.sqrt(60 / 59)) == near
    assert (summed.std(0) > 0.5 * std).all() and (other.std(0) > 0.5 * std).all()
    # without noise to speak of the two are equal
    calm = {"epsilon": 1e9, "delta": 0.5, "budgets": "equal"}
    (one, trained), (same, _) = added(0, noise="summed", **calm), added(0, **calm)
    torch.testing.assert_close(one, same, rtol=0, atol=1e-3 * float(same.norm()))
    for single in (trained.norms, lambda: trained.changes_of(0)):
        with pytest.raises(ExperimentError, match="no single update"):
            single()


def test_a_run_with_noise_of_the_sum_says_that_it_is_a_simulation(run_tiny):
    settings = ("step={name='dpvae', noise='summed', participations=1}", "rounds=2")
    result = run_tiny(*VAE, *settings, "sampler={name='limited', cohort=9, participations=1}")
    assert any("'summed': a simulation, not a release" in line for line in result.privacy)
    assert any(line.startswith("0 of 18 users spent more") for line in result.privacy)


def test_drawn_budgets_stay_the_same_in_every_round(vae_node):
    step = dpvae_of(vae_node, budgets="uniform", epsilon=1.0)
    multipliers = {client: step.config.noise_multiplier(client) for client in range(5)}
    assert len(set(multipliers.values())) == 5
    assert all(
        step.config.in_round(7).noise_multiplier(client) == value
        for client, value in multipliers.items()
    )


def test_users_drawn_no_more_often_than_planned_stay_within_the_budget(vae_node):
    step = dpvae_of(vae_node, budgets="uniform", epsilon=1.0, participations=3)
    sampler = Limited(LimitedConfig(cohort=4, participations=3), np.arange(10), 0)
    squares = Counter()
    for round_number in range(1, 20):
        for client in sampler.sample(round_number).tolist():
            squares[client] += (2 / step.config.noise_multiplier(client)) ** 2  # exchanged: 2 S
    assert sorted(squares) == list(range(10))
    for client, square in squares.items():
        epsilon = gdp_epsilon(math.sqrt(square), step.config.delta)
        assert epsilon == pytest.approx(step.config.requested(client), rel=1e-6)


# Training of the variational autoencoder on clients: gradients by autograd on the whole cohort, and
# a run.

VAE_STEP_VAE = (
    "model={name='vae', hidden=6, latent=3}",
    "step={name='vae'}",
    "evaluation.fine-tune={epochs=0}",
)


@pytest.fixture
def node(load_tiny, tmp_path):
    return lambda *more: Node(load_tiny(*VAE_STEP_VAE, *more), 0, 1, Path(tmp_path))


def gradient(model, parameters, data, beta, share=1.0):
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
    }
    draw = model.draw((1, 1), generator_of(stream(0, "client", data.client, 1)))
    loss = (
        model.negative_elbo(leaves, oracles.one_history(model, data.positives), draw, beta).sum()
        * share
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {name: g[0] for name, g in zip(leaves, gradients, strict=True)}, loss.detach()


def test_one_epoch_is_one_gradient_step_on_the_bound(node):
    made = node()
    parameters, data = made.initial(), made.population.client(3)
    step = VaeStep(VaeStepConfig(learning_rate=0.5, beta=0.7), made.model, made.device)
    update = update_of(step, parameters, data, stream(0, "client", 3, 1))
    expected, loss = gradient(made.model, parameters, data, 0.7)
    assert update.loss == pytest.approx(float(loss), rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(update.delta[name], -0.5 * value, rtol=1e-4, atol=1e-6)


def test_beta_rises_linearly_and_stays(node):
    made = node("step.anneal-rounds=4", "step.beta=0.5")
    step = made.step(made.experiment.step)
    betas = [step.config.in_round(number).beta for number in (1, 2, 3, 5, 9)]
    assert betas == [0, 0.125, 0.25, 0.5, 0.5]
    assert VaeStepConfig(beta=0.5).in_round(1).beta == 0.5
    order = TrainOrder(3, np.array([3]), "uniform", None)
    arrays = {name: value.numpy() for name, value in made.initial().items()}
    total = train_clients(made, arrays, order).total
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in made.initial().items()
    }
    draw = made.model.draw((1, 1), generator_of(stream(0, "client", 3, 3)))
    history = oracles.one_history(made.model, made.population.client(3).positives)
    made.model.negative_elbo(leaves, history, draw, 0.25).sum().backward()
    np.testing.assert_allclose(
        total["mean.weight"], -0.01 * leaves["mean.weight"].grad[0], rtol=1e-4, atol=1e-7
    )


def test_a_client_without_positives_changes_nothing(node):
    made = node()
    data = made.population.client(3)
    empty = type(data)(3, data.features, data.items[:0], data.labels[:0], data.positives[:0])
    update = update_of(made.step(made.experiment.step), made.initial(), empty, stream(0, "x"))
    assert update.examples == 0
    assert np.isnan(update.loss)
    assert not any(d.any() for d in update.delta.values())


def test_evaluation_gives_the_model_what_each_client_knows_and_no_more(node):
    made = node("split={name='ratio'}")
    parameters, clients = made.initial(), np.array([2, 5, 7])
    scores = client_scorer(made, made.step(made.experiment.fine_tune_step()), parameters, 1)(
        clients
    )
    slices = {name: value.unsqueeze(0) for name, value in parameters.items()}
    for place, client in enumerate(clients.tolist()):
        history = oracles.one_history(made.model, made.population.client(client).positives)
        torch.testing.assert_close(scores[place], made.model.history_scores(slices, history)[0, 0])
    tuned = VaeStep(VaeStepConfig(epochs=1, learning_rate=0.1), made.model, made.device)
    assert not torch.allclose(client_scorer(made, tuned, parameters, 1)(clients), scores)


DPVAE = "step={name='dpvae', budgets='equal', clip-norm=1.0, delta=0.1, epsilon=1e6}"
DPSGD = (
    "step={name='dpsgd', private-parameters=['user.*'], clip-norm=1.0, examples=50,"
    " learning-rate=1.0, budgets='equal', epsilon=1e6, delta=0.1}"
)
LEARNING = {
    "dpsgd": ((*MF, DPSGD, "strategy.server-lr=0.05", "rounds=30"), 1.2),
    "dpvae": ((*VAE, DPVAE, "dataset.users=160", "split={name='ratio'}"), 1.3),
    "vae": ((*VAE_STEP_VAE, "split={name='ratio', stream='dataset'}"), 1.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("system", LEARNING)
def test_training_with_adam_on_the_server_ranks_better_than_fresh_parameters(run_tiny, system):
    """Under next to no noise, or none."""
    settings, factor = LEARNING[system]
    data = ("dataset.users=80", "dataset.mean-interactions=12", "sampler.cohort=20", "rounds=40")
    adam = "strategy={name='fed-adam', server-lr=0.03}"
    same = (*data, adam, *settings, "evaluation.every=0", "evaluation.final-users=80")
    trained = run_tiny(*same, output="trained")
    fresh = run_tiny(*same, "rounds=1", "strategy.server-lr=1e-9", output="fresh")
    assert trained.metrics["ndcg@5"] > factor * fresh.metrics["ndcg@5"]
    assert (trained.folder / "epsilons.csv").exists() == (system != "vae")
