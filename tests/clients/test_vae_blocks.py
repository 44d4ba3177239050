# SPDX-License-Identifier: Apache-2.0
"""The variational autoencoder's steps in blocks equal those client by client."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from clients.hosting.node import Node
from clients.training.blocks import train_in_blocks
from clients.training.one_client import update_of
from clients.training.round import train_clients
from fedrec.experiment.sections import Section
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.sparse_update import dense_change
from fedrec.rng import stream
from tests.clients.oracles import with_oracle

VAE = ("model={name='vae', hidden=6, latent=3}", "evaluation.fine-tune={epochs=0}")
STEPS = {
    "one-epoch": "step={name='vae', learning-rate=0.3, beta=0.7}",
    "epochs": "step={name='vae', epochs=3, learning-rate=0.2}",
    "annealed": "step={name='vae', anneal-rounds=4}",
    "no-epoch": "step={name='vae', epochs=0}",
    "ratings": "step={name='vae', learning-rate=0.3}",
    "dp-ratings": "step={name='dpvae', clip-norm=0.3, examples=3}",
    "vae-priors": "step={name='vae', learning-rate=0.3, priors={}}",
    "epochs-priors": "step={name='vae', epochs=2, priors={features=['gender']}}",
    "sound": "step={name='dpvae', clip-norm=0.3, examples=3}",
    "paper": "step={name='dpvae', mode='paper', examples=3}",
    "all-examples": "step={name='dpvae', clip-norm=0.01, examples=100, weighting='precision'}",
    "whole-user": "step={name='dpvae', clip='user', clip-norm=0.2, participations=4}",
    "quantile": (
        "step={name='dpvae', clip-norm=0.3, examples=3, quantile={quantile=0.3}, participations=4}"
    ),
    "priors": "step={name='dpvae', clip-norm=0.3, priors={}, participations=4}",
    "own-priors": "step={name='dpvae', mode='paper', priors={features=['gender'], noise=false}}",
    "no-upload": "step={name='dpvae', epochs=0}",
    "autoencoder": "step={name='vae', learning-rate=0.3}",
    "autoencoder-epochs": "step={name='vae', epochs=3, learning-rate=0.2}",
    "autoencoder-sound": "step={name='dpvae', clip-norm=0.3, examples=3}",
    "autoencoder-paper": "step={name='dpvae', mode='paper', examples=3}",
}


@pytest.fixture
def pair(load_tiny):
    """A node, one with the oracle in place of the step, and the initial parameters."""

    def make(*overrides):
        fast, slow = (
            Node(load_tiny(*VAE, *overrides, f"engine.path={p}"), 0, 1, None)
            for p in ("blocks", "reference")
        )
        with_oracle(slow)
        return fast, slow, {name: value.numpy() for name, value in slow.initial().items()}

    return make


def settings(case):
    model = ["model.history=ratings"] * ("ratings" in case) + ["model.name='ae'"] * (
        "autoencoder" in case
    )
    return (STEPS[case], *model)


def close(got, expected):
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            got[name], value, rtol=1e-4, atol=1e-6 * max(1.0, np.abs(np.asarray(value)).max())
        )


def without_noise(*nodes):
    """Large noise would hide differences between gradients, so the noise is almost zero."""
    for node in nodes:
        step = node.experiment.step
        if step.name == "dpvae":
            tiny = {**step.options, "epsilon": 1e7, "budgets": "equal", "delta": 0.1}
            table = node.experiment.model_copy(
                update={"step": Section.model_validate({"name": "dpvae", **tiny})}
            )
            node.experiment = table


@pytest.mark.slow
@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("case", STEPS)
def test_sums_are_equal(pair, case, noise):
    fast, slow, arrays = pair(*settings(case))
    if not noise:
        without_noise(fast, slow)
    order = TrainOrder(2, np.arange(18), "examples")
    got, expected = train_clients(fast, arrays, order), train_clients(slow, arrays, order)
    close(
        *({n: dense_change(c, arrays[n]) for n, c in one.total.items()} for one in (got, expected))
    )
    assert (got.clients, got.examples, got.losses) == (
        expected.clients,
        expected.examples,
        expected.losses,
    )
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.fixture
def odd(world):
    """One positive; the same item twice; only a low rating; no row; the whole catalogue."""
    population = world()
    first = population.client(0)
    everything, ones = np.arange(6), np.ones(6, np.float32)
    longest = replace(
        first, client=4, items=everything, labels=ones, positives=everything, ratings=5 * ones
    )
    return {
        **{client: population.client(client) for client in range(4)},
        4: longest,
    }, population.schema()


def given(node, odd):
    """A node that hosts these clients."""
    clients, schema = odd
    population = SimpleNamespace(
        client=clients.__getitem__, clients=lambda ids: [clients[one] for one in ids.tolist()]
    )
    population.schema = lambda: schema
    node.__dict__["population"] = population
    node.__dict__.pop("model", None)
    return node


@pytest.mark.parametrize("noise", [True, False])
@pytest.mark.parametrize("case", STEPS)
def test_odd_clients_are_equal(pair, odd, case, noise):
    fast, slow = (given(node, odd) for node in pair(*settings(case))[:2])
    if not noise:
        without_noise(fast, slow)
    parameters = slow.initial()
    step, reference = fast.step(fast.experiment.step), slow.step(slow.experiment.step)
    seen = []
    for places, trained in train_in_blocks(
        fast, step, fast.path(step), parameters, np.arange(5), "client", 1
    ):
        norms, losses = trained.norms(), trained.losses()
        for member, place in enumerate(places):
            update = update_of(reference, parameters, odd[0][place], stream(0, "client", place, 1))
            close(
                {n: v[0] - parameters[n] for n, v in trained.parameters_of(member).items()},
                update.delta,
            )
            norm = math.sqrt(
                sum(float(delta.double().square().sum()) for delta in update.delta.values())
            )
            assert float(norms[member]) == pytest.approx(norm, rel=1e-4, abs=1e-7)
            assert trained.block.examples[member] == update.examples
            assert losses[member] == pytest.approx(update.loss, rel=1e-5, nan_ok=True)
            seen.append(place)
    assert sorted(seen) == [0, 1, 2, 3, 4]
