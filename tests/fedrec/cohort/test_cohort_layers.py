# SPDX-License-Identifier: Apache-2.0
"""Layers with a cohort dimension against torch.nn client by client, and their derivatives."""

import pytest
import torch
from torch import nn

from fedrec.nn.layers import (
    gather_rows,
    mixed_rows,
    perceptron,
    pooled_rows,
    row_shares,
    weighted_cross_entropy,
)

ACTIVATIONS = {"identity": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    )


def test_rows_are_averaged_over_the_codes_that_are_there():
    table = torch.tensor([[[1.0, 10], [2, 20], [3, 30]]])
    codes = torch.tensor([[[0, 2], [1, -1], [-1, -1]]])
    expected = [[[2, 20], [2, 20], [0, 0]]]
    assert pooled_rows(table, codes).tolist() == expected
    assert mixed_rows([row_shares(codes, 3)], [table]).tolist() == expected


def test_shares_of_a_single_code_are_one_hot():
    assert row_shares(torch.tensor([[2], [-1]]), 3).tolist() == [[0, 0, 1], [0, 0, 0]]


def test_rows_are_taken_from_each_clients_own_table():
    tables = torch.arange(12.0).view(2, 3, 2)
    index = torch.tensor([[2], [0]])
    assert gather_rows(tables, index).tolist() == [[[4, 5]], [[6, 7]]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_perceptron_is_that_of_torch(activation):
    """Two clients; the input is the concatenation of one user part (one row) and two item parts."""
    user, items = draw(2, 1, 3), [draw(2, 4, 2), draw(2, 4, 5)]
    weights = [draw(2, 10, 6), draw(2, 6, 4), draw(2, 4, 1)]
    biases = [draw(2, 6), draw(2, 4), draw(2, 1)]
    leaves = [value.requires_grad_() for value in (user, *items, *weights, *biases)]
    outputs = perceptron([[user], items], weights, biases, activation)
    gradients = torch.autograd.grad(outputs.square().sum(), leaves)
    for client in range(2):
        layers = [
            nn.Linear(10, 6),
            ACTIVATIONS[activation](),
            nn.Linear(6, 4),
            ACTIVATIONS[activation](),
            nn.Linear(4, 1),
        ]
        network, linear = nn.Sequential(*layers).double(), layers[::2]
        for layer, weight, bias in zip(linear, weights, biases, strict=True):
            layer.weight.data = weight[client].detach().T.clone()
            layer.bias.data = bias[client].detach().clone()
        own = [part.detach()[client].clone().requires_grad_() for part in (user, *items)]
        expected = network(torch.cat([own[0].expand(4, -1), *own[1:]], 1))
        torch.testing.assert_close(outputs[client].detach(), expected.detach()[:, 0])
        expected.square().sum().backward()
        wanted = [*own, *(layer.weight for layer in linear), *(layer.bias for layer in linear)]
        for place, (gradient, leaf) in enumerate(zip(gradients, wanted, strict=True)):
            torch.testing.assert_close(
                gradient[client], leaf.grad.T if 3 <= place < 6 else leaf.grad
            )


def test_weighted_cross_entropy_is_that_of_torch():
    logits = draw(2, 5).requires_grad_()
    labels, weights = (draw(2, 5, seed=1) > 0).double(), draw(2, 5, seed=2).abs()
    scale = torch.tensor([2.0, -1.0], dtype=torch.float64)
    (weighted_cross_entropy(logits, labels, weights) * scale).sum().backward()
    plain = logits.detach().clone().requires_grad_()
    losses = nn.functional.binary_cross_entropy_with_logits(plain, labels, reduction="none")
    ((losses * weights).sum(-1) * scale).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad)
    found = weighted_cross_entropy(logits.detach(), labels, weights)
    torch.testing.assert_close(found, (losses.detach() * weights).sum(-1))
