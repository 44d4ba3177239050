# SPDX-License-Identifier: Apache-2.0
"""Steps without autograd: the same as with it where a tape can follow, and autograd wherever it cannot."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from fedrec.cohort import descent
from fedrec.cohort.batches import Batches
from fedrec.cohort.block import Block
from fedrec.cohort.descent import Recommending, descend
from fedrec.cohort.layers import mixed_rows, perceptron, row_shares, weighted_cross_entropy
from fedrec.cohort.sgd import SgdSettings

SGD = SgdSettings(0.5)
USERS, ITEMS, WIDTH = 3, 6, 2


class Tiny:
    """A network of our layers; `between` stands behind the user part, where a model may do anything."""

    item_tables, repeats = ("item", "bias"), False

    def __init__(self, between=lambda user: user, loss=lambda loss: loss):
        self.between, self.changed = between, loss

    def start(self):
        random = torch.Generator().manual_seed(0)
        sizes = {
            "user": (USERS, WIDTH),
            "item": (ITEMS, WIDTH),
            "w0": (2 * WIDTH, 3),
            "b0": (3,),
            "w1": (3, 1),
            "b1": (1,),
        }
        return {name: torch.randn(*size, generator=random) for name, size in sizes.items()}

    def user_inputs(self, users):
        return users

    def item_inputs(self, items):
        return ()

    def predict(self, parameters, users, items, rows=None):
        user = self.between(mixed_rows([row_shares(users[0].unsqueeze(1), USERS)], [parameters["user"]]))
        weights, biases = [parameters["w0"], parameters["w1"]], [parameters["b0"], parameters["b1"]]
        return perceptron([[user], [parameters["item"]]], weights, biases, "tanh")

    def loss(self, predicted, labels, weights):
        return self.changed(weighted_cross_entropy(predicted, labels, weights))


def block():
    """Two clients, one with two steps and one with one."""
    own = [
        Batches.cut([(np.array([0, 3, 3, 5]), np.array([1, 0, 1, 0], dtype=np.float32))], 2),
        Batches.cut([(np.array([2, 4]), np.array([1, 0], dtype=np.float32))], 2),
    ]
    users = [(np.array([0]),), (np.array([2]),)]
    return Block.of(users, own, torch.device("cpu"))


def long_block():
    """Five clients with very different numbers of steps."""
    random = np.random.default_rng(3)
    lengths = (90, 84, 60, 59, 2)
    own = [
        Batches.cut([(random.integers(0, ITEMS, length), random.integers(0, 2, length).astype(np.float32))], 2)
        for length in lengths
    ]
    users = [(random.integers(0, USERS, 1),) for _ in lengths]
    return Block.of(users, own, torch.device("cpu"))


def by_hand(model, place, given=None):
    """The same steps of one client by torch.optim on whole tables."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.start().items()}
    optimiser, given = torch.optim.SGD(leaves.values(), lr=SGD.learning_rate), given or block()
    for step in range(sum(active > place for active in given.active)):
        user = model.between(leaves["user"][given.users[0][place]].unsqueeze(0))
        rows = leaves["item"][given.items[step, place]]
        hidden = torch.tanh(torch.cat([user[0].expand(2, -1), rows], 1) @ leaves["w0"] + leaves["b0"])
        logits = (hidden @ leaves["w1"] + leaves["b1"]).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, given.labels[step, place], given.weights[step, place], reduction="sum"
        )
        optimiser.zero_grad()
        model.changed(loss).sum().backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


CASES = {
    "only layers": (Tiny(), True),
    "something between layers": (Tiny(between=lambda user: user * 2), False),
    "something behind the loss": (Tiny(loss=lambda loss: loss * 3), False),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch_optim(name, monkeypatch):
    model, followed = CASES[name]
    used = []
    backward = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given, **named: used.append(1) or backward(*given, **named))
    trained = descend(model, model.start(), block(), SGD)
    assert bool(used) != followed
    for place in range(2):
        for key, value in by_hand(model, place).items():
            torch.testing.assert_close(trained.parameters_of(place)[key][0], value)


def test_a_model_whose_tape_tears_midway_is_finished_by_autograd():
    """The third forward pass is the second step again, this time for autograd."""
    calls = []
    model = Tiny(between=lambda user: calls.append(1) or (user if len(calls) == 1 else user * 1.0))
    trained = descend(model, model.start(), block(), SGD)
    assert len(calls) == 3
    for place in range(2):
        for key, value in by_hand(Tiny(), place).items():
            torch.testing.assert_close(trained.parameters_of(place)[key][0], value)


@pytest.mark.parametrize("shared", [True, False])
def test_many_clients_with_many_steps(shared):
    """What belongs to the user stands for its table meanwhile, whoever still trains."""
    model, given = Tiny(), long_block()
    own = {} if shared else {"w0": model.start()["w0"].repeat(len(given), 1, 1)}
    trained = descend(model, model.start(), given, SGD, own=own)
    for place in range(len(given)):
        for key, value in by_hand(Tiny(), place, given).items():
            torch.testing.assert_close(trained.parameters_of(place)[key][0], value, rtol=1e-4, atol=1e-5)


def test_losses_that_are_computed_later_are_those_before_each_step():
    """By autograd, which a factor of one calls in, they are computed at once."""
    found, wanted = (
        descend(model, model.start(), long_block(), SGD).step_losses
        for model in (Tiny(), Tiny(loss=lambda loss: loss * 1.0))
    )
    assert (wanted > 0).sum() == sum(long_block().active)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_mix_is_held_for_the_same_shares_only():
    """When others come the table is whole again; the same by autograd, which holds nothing."""

    class Changing(Tiny):
        def predict(self, parameters, users, items, rows=None):
            shares = self.shares[self.step // 3 % 2].expand(len(items), -1, -1)
            user = mixed_rows([shares], [parameters["user"]])
            weights, biases = [parameters["w0"], parameters["w1"]], [parameters["b0"], parameters["b1"]]
            return perceptron([[user], [parameters["item"]]], weights, biases, "tanh")

    def train(model, factor):
        model.shares = [torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[0.0, 0.2, 0.8]]])]
        recommending = Recommending(model)

        def objective(parameters, block, step, active):
            model.step = step
            loss = recommending(parameters, block, step, active)
            return loss if factor is None else loss * factor  # which no layer does

        return descend(model, model.start(), long_block(), SGD, objective).values

    for name, value in train(Changing(), 1.0).items():
        torch.testing.assert_close(train(Changing(), None)[name], value, rtol=1e-4, atol=1e-5)


def test_an_objective_of_its_own_may_use_a_table_twice():
    """Both uses count."""
    model, recommending = Tiny(), Recommending(Tiny())

    def objective(parameters, given, step, active):
        return recommending(parameters, given, step, active) + parameters["item"].square().sum((1, 2))

    trained = descend(model, model.start(), block(), SGD, objective)
    leaf = model.start()["item"].requires_grad_()
    rows = leaf[block().items[0, 1]]
    start = model.start()
    hidden = torch.tanh(torch.cat([start["user"][2].expand(2, -1), rows], 1) @ start["w0"] + start["b0"])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        (hidden @ start["w1"] + start["b1"])[:, 0], block().labels[0, 1]
    )
    (loss + rows.square().sum()).backward()
    torch.testing.assert_close(trained.parameters_of(1)["item"][0], leaf.detach() - SGD.learning_rate * leaf.grad)


def test_nothing_of_a_block_outlives_it(monkeypatch):
    """Marks and the parameters that they are on name each other; waiting for Python to find that takes memory."""
    leaves = []
    fused = descent.FusedDescent

    def watched(leaf, *rest):
        leaves.append(weakref.ref(leaf))
        return fused(leaf, *rest)

    monkeypatch.setattr(descent, "FusedDescent", watched)
    gc.disable()
    try:
        for model, _ in CASES.values():
            descend(model, model.start(), block(), SGD)
        assert leaves and all(leaf() is None for leaf in leaves)
    finally:
        gc.enable()
