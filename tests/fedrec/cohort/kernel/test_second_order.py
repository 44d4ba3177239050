# SPDX-License-Identifier: Apache-2.0
"""Gradients through the adaptation against autograd in float64: every activation, depth, loss and
kind of input."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.kernel.meta_learning import meta_learn_block
from fedrec.cohort.sgd import SgdSettings
from fedrec.nn.declaration import KernelModel, Layer
from tests.fedrec.cohort.kernel.declared_models import (
    ACTIVATIONS,
    ITEMS,
    WIDTH,
    bare_model,
    clients_of,
    model_of,
    model_of_features,
    predicted,
    start_of,
)

RATES = {"items": 3.0, "age": 0.0, "w1": 0.5, "b0": 2.0, "item.bias": 4.0, "genres": 1.5}


def learners(counts=(23, 8, 1, 0), steps=3, seed=3):
    """Users' codes and batches: a support several times, then a query of a quarter of its size; the
    last client has none."""
    random = np.random.default_rng(seed)
    users, _ = clients_of(counts)
    batches = []
    for count in counts:
        parts = [
            (random.integers(ITEMS, size=n), (random.random(n) < 0.5).astype(np.float32))
            for n in (count, -(-count // 4))
        ]
        batches.append(Batches.whole([parts[0]] * steps + parts[1:] if count else []))
    return users, batches


def by_autograd(model, start, user, batches, sgd, second):
    """The gradient of the query's loss of one client in float64, and the loss."""
    first = {name: value.double().requires_grad_() for name, value in start.items()}
    p = first
    measure = F.binary_cross_entropy_with_logits if model.loss == "logistic" else F.mse_loss
    for step, size in enumerate(batches.sizes):
        items = torch.from_numpy(batches.items[step, :size])
        labels = torch.from_numpy(batches.labels[step, :size]).double()
        loss = measure(predicted(model, p, user, items), labels)
        if step == len(batches.sizes) - 1:
            by = first if second else p
            found = torch.autograd.grad(
                loss, list(by.values()), allow_unused=True, materialize_grads=True
            )
            return dict(zip(by, found, strict=True)), loss.item()
        found = torch.autograd.grad(
            loss, list(p.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        p = {
            name: value - sgd.rate(name) * gradient
            for (name, value), gradient in zip(p.items(), found, strict=True)
        }
    return {name: torch.zeros_like(value) for name, value in first.items()}, np.nan


def check(model, start, sgd, clients, second=True):
    """Check every client's update and loss against autograd within rounding."""
    users, batches = clients
    before = {name: value.clone() for name, value in start.items()}
    block = Block.of(users, batches, torch.device("cpu"))
    found = meta_learn_block(model, start, block, sgd, second)
    assert all(torch.equal(before[name], start[name]) for name in start)
    moved = 0.0
    for place, (user, own) in enumerate(zip(users, batches, strict=True)):
        wanted, loss = by_autograd(model, start, user, own, sgd, second)
        got = found.parameters_of(place)
        for name, gradient in wanted.items():
            update = got[name][0].double() - start[name].double()
            scale = max(float(start[name].abs().max()), float(gradient.abs().max()))
            np.testing.assert_allclose(
                update.numpy(),
                -gradient.numpy(),
                rtol=1e-4,
                atol=4e-6 * scale,
                err_msg=f"{name} of {place}",
            )
            moved = max(moved, float(gradient.abs().max()))
        np.testing.assert_allclose(found.losses()[place], loss, rtol=1e-5)
    assert moved > 1e-2


@pytest.mark.parametrize("second", [True, False], ids=["second order", "first order"])
@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("hidden", [(), (7,), (16, 8, 4)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_autograd(activation, hidden, loss, second):
    model, widths = model_of(hidden, activation, loss)
    sgd = SgdSettings(0.3 if loss == "logistic" else 0.03, rates=RATES)
    check(model, start_of(widths), sgd, learners(), second)


def test_the_orders_differ():
    """By far more than rounding, so that the tests above tell them apart."""
    model, widths = model_of((7,), "tanh")
    users, batches = learners()
    start = start_of(widths)
    block = Block.of(users, batches, torch.device("cpu"))
    sgd = SgdSettings(0.3, rates=RATES)
    first, second = (meta_learn_block(model, start, block, sgd, order) for order in (False, True))
    changes = [found.parameters_of(0)["w0"] - start["w0"] for found in (first, second)]
    assert (changes[0] - changes[1]).norm() > 0.05 * changes[1].norm()


def test_examples_that_pass_through_the_layers_in_parts():
    """Supports of 128, 129 and 300 examples, and layers that are not multiples of a vector."""
    model, widths = model_of((70, 33), "tanh")
    check(
        model,
        start_of(widths, scale=0.2),
        SgdSettings(0.3),
        learners((300, 129, 128), steps=2),
    )


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_any_number_of_steps(steps):
    """Without any the gradient is a plain one."""
    model, widths = model_of((8,), "sigmoid")
    check(model, start_of(widths), SgdSettings(0.3), learners(steps=steps))


def test_without_features_bias_and_offset():
    model, start = bare_model()
    users, batches = learners()
    check(model, start, SgdSettings(0.3), ([()] * len(users), batches))


def test_items_by_features_alone():
    model, start = model_of_features()
    users, batches = learners()
    check(model, start, SgdSettings(0.3), ([user[:1] for user in users], batches))


def test_rows_of_the_users_own_and_layers_without_bias():
    widths = [2 * WIDTH, 8, 1]
    layers = tuple(Layer(f"w{place}") for place in range(2))
    model = KernelModel(layers, "tanh", "logistic", item_table="items", user_rows=("mine",))
    random = torch.Generator().manual_seed(2)
    start = {"items": torch.randn(ITEMS, WIDTH, generator=random)}
    start |= {"mine": torch.randn(WIDTH, generator=random)}
    for place, shape in enumerate(itertools.pairwise(widths)):
        start[f"w{place}"] = torch.randn(shape, generator=random) * 0.3
    users, batches = learners()
    check(model, start, SgdSettings(0.3), ([()] * len(users), batches))


def test_a_client_does_not_depend_on_the_others():
    """What diverges is no number, and stays with its client."""
    model, widths = model_of((7,), "tanh", "squared")
    users, batches = learners((23, 8))
    start = start_of(widths)
    device = torch.device("cpu")
    alone = Block.of(users[1:], batches[1:], device)
    batches[0].labels[:] = np.inf
    together = Block.of(users, batches, device)
    found, wanted = (
        meta_learn_block(model, start, block, SgdSettings(0.03), True)
        for block in (together, alone)
    )
    assert not found.parameters_of(0)["w0"].isfinite().all()
    for name, value in wanted.parameters_of(0).items():
        assert torch.equal(found.parameters_of(1)[name], value), name


def test_what_does_not_fit_is_refused():
    model, widths = model_of((7,))
    users, batches = learners((23, 8))
    block = Block.of(users, batches, torch.device("cpu"))
    start = start_of(widths)
    start["items"] = start["items"][:5]
    with pytest.raises(ValueError, match="Expected items below 5"):
        meta_learn_block(model, start, block, SgdSettings(0.3), True)
