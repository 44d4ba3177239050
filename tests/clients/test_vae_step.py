# SPDX-License-Identifier: Apache-2.0
"""Training of the variational autoencoder on clients: gradients by autograd on the whole cohort,
and a run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clients.evaluation import client_scorer
from clients.hosting.node import Node
from clients.local.histories import generator_of
from clients.steps.vae import VaeStep, VaeStepConfig
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.errors import ExperimentError
from fedrec.protocol.orders import TrainOrder
from fedrec.rng import stream

VAE = (
    "model={name='vae', hidden=6, latent=3}",
    "step={name='vae'}",
    "evaluation.fine-tune={epochs=0}",
)


@pytest.fixture
def node(load_tiny, tmp_path):
    return lambda *more: Node(load_tiny(*VAE, *more), 0, 1, Path(tmp_path))


def gradient(model, parameters, data, beta, share=1.0):
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in parameters.items()
    }
    draw = model.draw((1, 1), generator_of(stream(0, "client", data.client, 1)))
    loss = model.negative_elbo(leaves, model.history(data.positives), draw, beta).sum() * share
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


def test_epochs_follow_each_other_with_new_random_numbers(node):
    made = node()
    parameters, data = made.initial(), made.population.client(3)
    random = stream(0, "x")
    step = VaeStep(VaeStepConfig(epochs=2, learning_rate=0.1), made.model, made.device)
    once = VaeStep(VaeStepConfig(epochs=1, learning_rate=0.1), made.model, made.device)
    both = update_of(step, parameters, data, random)
    random = stream(0, "x")
    first = update_of(once, parameters, data, random).delta
    second = update_of(once, {n: v + first[n] for n, v in parameters.items()}, data, random).delta
    for name in parameters:
        torch.testing.assert_close(
            both.delta[name], first[name] + second[name], rtol=1e-4, atol=1e-6
        )


def test_beta_rises_linearly_and_stays(node):
    made = node("step.anneal-rounds=4", "step.beta=0.5")
    step = made.step(made.experiment.step)
    betas = [step.in_round(number).config.beta for number in (1, 2, 3, 5, 9)]
    assert betas == [0, 0.125, 0.25, 0.5, 0.5]
    assert VaeStep(VaeStepConfig(beta=0.5), made.model, made.device).in_round(1).config.beta == 0.5
    order = TrainOrder(3, np.array([3]), "uniform", None)
    arrays = {name: value.numpy() for name, value in made.initial().items()}
    total = train_clients(made, arrays, order).total
    leaves = {
        name: value.clone().unsqueeze(0).requires_grad_() for name, value in made.initial().items()
    }
    draw = made.model.draw((1, 1), generator_of(stream(0, "client", 3, 3)))
    history = made.model.history(made.population.client(3).positives)
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
        history = made.model.history(made.population.client(client).positives)
        torch.testing.assert_close(scores[place], made.model.history_scores(slices, history)[0, 0])
    tuned = VaeStep(VaeStepConfig(epochs=1, learning_rate=0.1), made.model, made.device)
    assert not torch.allclose(client_scorer(made, tuned, parameters, 1)(clients), scores)


def test_another_model_is_refused(load_tiny, tmp_path):
    made = Node(load_tiny(), 0, 1, Path(tmp_path))
    with pytest.raises(ExperimentError, match=r"model\.name = 'vae'"):
        VaeStep(VaeStepConfig(), made.model, made.device)


@pytest.mark.slow
def test_training_with_adam_on_the_server_ranks_better_than_fresh_parameters(run_tiny):
    settings = (
        *VAE,
        "strategy={name='fed-adam', server-lr=0.03}",
        "dataset.users=80",
        "dataset.mean-interactions=12",
    )
    same = (
        "split={name='ratio', stream='dataset'}",
        "evaluation.final-users=80",
        "sampler.cohort=20",
        "evaluation.every=0",
    )
    fresh = run_tiny(*settings, *same, "rounds=1", "strategy.server-lr=1e-9", output="fresh")
    trained = run_tiny(*settings, *same, "rounds=40", output="trained")
    assert trained.metrics["ndcg@5"] > 1.3 * fresh.metrics["ndcg@5"]
