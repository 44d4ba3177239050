# SPDX-License-Identifier: Apache-2.0
"""Algorithm 3 of DP-VAE: gradients of single examples, the clip, the noise, and the upload."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.hosting.node import Node
from clients.local.histories import generator_of
from clients.local.own_noise import clipped_mean
from clients.steps.dpsgd import DpSgdConfig
from clients.steps.dpvae import DpVae, DpVaeConfig
from clients.training.one_client import update_of
from clients.training.update_sum import UpdateSum
from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.gdp import gdp_epsilon
from fedrec.privacy.noise_source import Reproducible
from fedrec.privacy.optimal_clip import optimal_clip
from fedrec.rng import stream
from server.samplers.limited import Limited, LimitedConfig
from tests.clients import oracles

VAE = ("model={name='vae', hidden=6, latent=3}", "evaluation.fine-tune={epochs=0}")


@pytest.fixture
def made(load_tiny, tmp_path):
    return Node(load_tiny(*VAE, "step={name='dpvae'}"), 0, 1, Path(tmp_path))


def step_of(made, **settings):
    return oracles.DpVae(DpVaeConfig(**{"budgets": "equal", **settings}), made.model, made.device)


def flat(update, parameters):
    return torch.cat([update.delta[name].flatten() for name in parameters])


def test_gradients_are_those_of_each_interaction(made):
    parameters, data = made.initial(), made.population.client(3)
    got, loss = step_of(made, examples=3, beta=0.6).gradients(parameters, data, stream(1, "x"))
    random = stream(1, "x")
    items = random.choice(data.positives, size=min(3, len(data.positives)), replace=False)
    draw = made.model.draw((1, 1), generator_of(random))
    history = made.model.history(data.positives)
    losses = []
    for place, item in enumerate(items):
        leaves = {
            name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
        }
        target = made.model.history(np.array([item]))
        one = made.model.negative_elbo(
            leaves, history, draw, 0.6 / len(data.positives), targets=target
        ).sum()
        one.backward()
        expected = torch.cat([leaves[name].grad.flatten() for name in parameters])
        torch.testing.assert_close(got[place], expected, rtol=1e-4, atol=1e-6)
        losses.append(float(one.detach()))
    assert len(got) == len(items) and loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_mean_of_all_examples_is_the_bound_over_their_number(made):
    parameters, data = made.initial(), made.population.client(3)
    got, _ = step_of(made, examples=1000, beta=0.6).gradients(parameters, data, stream(1, "x"))
    random = stream(1, "x")
    random.choice(data.positives, size=len(data.positives), replace=False)
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
    }
    draw = made.model.draw((1, 1), generator_of(random))
    made.model.negative_elbo(leaves, made.model.history(data.positives), draw, 0.6).sum().backward()
    whole = torch.cat([leaves[name].grad.flatten() for name in parameters]) / len(data.positives)
    torch.testing.assert_close(got.mean(0), whole, rtol=1e-4, atol=1e-6)


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
def test_noise_has_the_users_own_scale_on_every_coordinate(made, mode):
    parameters, data = made.initial(), made.population.client(3)
    step = step_of(made, mode=mode, clip_norm=0.25, learning_rate=0.5, epsilon=0.8)
    shipped = DpVae(step.config, made.model, made.device)
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
        uploaded = -flat(found, parameters) / 0.5
        noise.append((uploaded - expected) / (multiplier * bound))
    noise = torch.stack(noise)
    assert float(noise.std()) == pytest.approx(1, abs=4 / math.sqrt(2 * noise.numel()))
    assert abs(float(noise.mean())) < 4 / math.sqrt(noise.numel()) and (noise.std(0) > 0.5).all()


def test_a_sound_upload_reveals_only_the_noisy_mean(made):
    parameters, data = made.initial(), made.population.client(3)
    step = DpVae(step_of(made).config, made.model, made.device)
    empty = type(data)(3, data.features, data.items[:0], data.labels[:0], data.positives[:0])
    one, other = (update_of(step, parameters, own, stream(0, "y")) for own in (data, empty))
    assert one.examples == other.examples and math.isnan(one.loss) and math.isnan(other.loss)
    assert (flat(other, parameters) != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["user", "examples"])
def test_noise_of_a_sum_has_the_distribution_of_the_users_noises_together(made, clip):
    settings = {"clip": clip, "clip_norm": 0.3, "budgets": "uniform", "learning_rate": 0.5}
    settings |= {"weighting": "precision", "participations": 1, "epsilon": 2.0}
    parameters, clients = made.initial(), [1, 3, 4]

    def added(repeat, **own):
        step = DpVae(DpVaeConfig(**{**settings, **own}), made.model, made.device)
        data = [made.population.client(client) for client in clients]
        streams = [stream(0, "sum", client, repeat) for client in clients]
        batches = [step.batches(one, r) for one, r in zip(data, streams, strict=True)]
        block = step.block([one.features for one in data], batches, made.device)
        arrays = {name: value.numpy() for name, value in parameters.items()}
        total = UpdateSum(arrays, (), "uniform", None, Reproducible(repeat), 1)
        trained = step.train_block(parameters, block)
        total._shares = lambda *_: [0.5, 0.0, 0.25]
        total.add_block(clients, trained)
        found = [total.sum().total[name].ravel() for name in parameters]
        return torch.from_numpy(np.concatenate(found)).double(), trained

    (summed, other) = (
        torch.stack([added(repeat, noise=kind)[0] for repeat in range(60)])
        for kind in ("summed", "reproducible")
    )
    config = DpVaeConfig(**settings)
    stds = [config.gradient_multiplier(c) * 0.3 * 0.5 * config.weight(c) for c in clients]
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


def test_noise_of_a_sum_is_for_gradients_of_the_autoencoder_alone():
    with pytest.raises(ExperimentError, match="quantile"):
        DpVaeConfig.parse({"noise": "summed", "quantile": {}})
    with pytest.raises(ExperimentError, match="dpvae"):
        DpSgdConfig.parse({"noise": "summed"})


def test_a_run_with_noise_of_the_sum_says_that_it_is_a_simulation(run_tiny):
    settings = ("step={name='dpvae', noise='summed', participations=1}", "rounds=2")
    result = run_tiny(*VAE, *settings, "sampler={name='limited', cohort=9, participations=1}")
    assert any("'summed': a simulation, not a release" in line for line in result.privacy)
    assert any(line.startswith("0 of 18 users spent more") for line in result.privacy)


def test_drawn_budgets_stay_the_same_in_every_round(made):
    step = step_of(made, budgets="uniform", epsilon=1.0)
    multipliers = {client: step.config.noise_multiplier(client) for client in range(5)}
    assert len(set(multipliers.values())) == 5
    assert all(
        step.in_round(7).config.noise_multiplier(client) == value
        for client, value in multipliers.items()
    )


def test_users_drawn_no_more_often_than_planned_stay_within_the_budget(made):
    step = step_of(made, budgets="uniform", epsilon=1.0, participations=3)
    sampler = Limited(LimitedConfig(cohort=4, participations=3), np.arange(10), 0)
    squares = Counter()
    for round_number in range(1, 20):
        for client in sampler.sample(round_number).tolist():
            squares[client] += (2 / step.config.noise_multiplier(client)) ** 2  # exchanged: 2 S
    assert sorted(squares) == list(range(10))
    for client, square in squares.items():
        budget = step.config.budget(client)
        epsilon = gdp_epsilon(math.sqrt(square), budget.delta)
        assert epsilon == pytest.approx(budget.epsilon, rel=1e-6)


@pytest.mark.slow
def test_a_run_goes_through_and_almost_no_noise_learns(run_tiny):
    settings = (
        "step={name='dpvae', budgets='equal', clip-norm=1.0, delta=0.1, epsilon=1e6}",
        "rounds=40",
    )
    same = (
        "dataset.users=160",
        "dataset.mean-interactions=12",
        "split={name='ratio'}",
        "sampler.cohort=20",
    )
    more = (
        "strategy={name='fed-adam', server-lr=0.03}",
        "evaluation.every=0",
        "evaluation.final-users=80",
    )
    trained = run_tiny(*VAE, *settings, *same, *more, output="trained")
    fresh = run_tiny(
        *VAE, *settings, *same, *more, "rounds=1", "strategy.server-lr=1e-9", output="fresh"
    )
    assert trained.metrics["ndcg@5"] > 1.3 * fresh.metrics["ndcg@5"]
