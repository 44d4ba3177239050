# SPDX-License-Identifier: Apache-2.0
"""SASRec's sampled softmax in compiled code against PyTorch's operations in float64."""

import math

import pytest
import torch

from fedrec.data.features import FeatureTable
from fedrec.data.schema import Schema
from fedrec.models.sequential.sasrec import SasRec, SasRecConfig, _SampledLoss
from tests.compilation import assert_compiled_once

ITEMS = 400
SETTINGS = [
    {"width": 4, "longest": 5, "blocks": 1, "negatives": 7},
    {"width": 6, "longest": 5, "heads": 2, "negatives": 8, "dropout": 0.3},
    {"width": 24, "longest": 37, "heads": 3, "blocks": 3, "negatives": 30, "dropout": 0.0},
    {"width": 64, "longest": 50, "negatives": 256},
]


class FourClients:
    """Random parameters, embeddings and dropout of four clients, the second without a place."""

    def __init__(self, shared, **settings):
        config = SasRecConfig(loss="sampled-softmax", **settings)
        self.model = SasRec(config, Schema(ITEMS, FeatureTable(ITEMS, ()), (), "ranking"))
        self.random = torch.Generator().manual_seed(3)
        start = self.model.initial(self.random)
        del start["item.id"]
        self.parameters = {
            name: (value + 0.2 * self.normal(*value.shape)).expand(4, *value.shape)
            if shared
            else value + 0.2 * self.normal(4, *value.shape)
            for name, value in start.items()
        }
        self.drawn = settings["negatives"]
        rows = self.drawn + config.longest + 1
        self.embedded = 0.3 * self.normal(4, 1, rows, config.width)
        self.counts = torch.tensor([[config.longest], [0], [1], [config.longest - 2]])
        generators = [torch.Generator().manual_seed(client) for client in range(4)]
        self.kept = self.model.keep(generators, 1, config.longest)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random)

    def solved(self, kind, weights):
        """Losses and all gradients of a sum in which clients count differently."""
        leaves = [value.to(kind).detach() for value in (self.embedded, *self.parameters.values())]
        embedded, *own = [leaf.requires_grad_() for leaf in leaves]
        given = dict(zip(self.parameters, own, strict=True))
        kept = None if self.kept is None else self.kept.to(kind)
        losses = self.model.drawn_loss(given, embedded, self.drawn, self.counts, kept, weights)
        total = (losses * torch.tensor([1.0, 2.0, -3.0, 0.5], dtype=kind)).sum()
        found = torch.autograd.grad(total, [embedded, *own])
        return losses, dict(zip(["embedded", *self.parameters], found, strict=True))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda own: f"width {own['width']}")
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients_are_those_of_autograd(settings, shared, weighted, monkeypatch):
    problem = FourClients(shared, **settings)
    weights = torch.tensor([[0.02], [1.0], [0.7], [0.1]]) if weighted else None
    losses, found = problem.solved(torch.float32, weights)
    assert type(losses.grad_fn).__name__ == "_SampledLossBackward"
    monkeypatch.setattr(_SampledLoss, "apply", None)  # float64 takes PyTorch's operations
    expected, wanted = problem.solved(torch.float64, weights)
    torch.testing.assert_close(losses, expected.float(), rtol=1e-5, atol=1e-5)
    for name, gradient in found.items():
        largest = max(float(wanted[name].abs().max()), 1e-3)
        torch.testing.assert_close(
            gradient / largest, (wanted[name] / largest).float(), rtol=0, atol=1e-4, msg=name
        )
        assert gradient[0].any() and not gradient[1].any(), name


def test_what_is_not_finite_is_seen():
    problem = FourClients(shared=False, **SETTINGS[0])
    problem.embedded[0, 0, 2] = math.nan
    losses, found = problem.solved(torch.float32, None)
    assert losses.isnan().tolist() == [True, False, False, False]
    assert (
        found["block0.inner.weight"].flatten(1).isfinite().all(1).tolist() == [False] + [True] * 3
    )


@pytest.mark.slow
def test_training_finds_what_was_compiled_before_it(tmp_path):
    """A process compiles, with an empty cache; another trains and compiles nothing of the loss."""
    command = (
        "from fedrec.models.sequential import _native as native\n"
        "from tests.fedrec.models.sequential.test_compiled_loss import FourClients\n"
        "import sys, torch\n"
        "if sys.argv[1] == 'before':\n"
        "    native.compile_losses()\n"
        "else:\n"
        "    clients = FourClients(True, width=4, longest=5, blocks=1, negatives=7)\n"
        "    clients.solved(torch.float32, None)\n"
        "print(sum(native.losses_with_gradients.stats.cache_misses.values()))"
    )
    assert_compiled_once(tmp_path, command)
