# SPDX-License-Identifier: Apache-2.0
"""Layers with a cohort dimension against torch.nn client by client, and fused SGD against torch.optim."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedrec.cohort.fused import FusedDescent
from fedrec.cohort.layers import (
    gather_rows,
    mixed_rows,
    perceptron,
    pooled_rows,
    row_shares,
    weighted_cross_entropy,
)

RATE = 0.1
ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def fused(parameters):
    """Copies that local training updates in the backward pass, and the anchor of that pass."""
    anchor = torch.zeros((), requires_grad=True)
    copies = [value.clone() for value in parameters]
    for copy in copies:
        copy.descent = FusedDescent(copy, RATE, anchor)
    return copies, anchor


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
    tables.gathered = True
    assert gather_rows(tables, index) is tables


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_perceptron_is_that_of_torch_and_its_fused_step_is_that_of_torch_optim(activation):
    """Two clients; the input is joined from a user part of one row and two item parts."""
    user, items = draw(2, 1, 3), [draw(2, 4, 2), draw(2, 4, 5)]
    weights = [draw(2, 10, 6), draw(2, 6, 4), draw(2, 4, 1)]
    biases = [draw(2, 6), draw(2, 4), draw(2, 1)]
    parts = [user.clone().requires_grad_(), *(item.clone().requires_grad_() for item in items)]
    changed, anchor = fused([*weights, *biases])
    outputs = perceptron([parts[:1], parts[1:]], changed[:3], changed[3:], activation).unsqueeze(-1)
    torch.testing.assert_close(outputs[..., 0], perceptron([[user], items], weights, biases, activation))
    gradients = torch.autograd.grad(outputs.square().sum(), [anchor, *parts], allow_unused=True)
    for client in range(2):
        network = nn.Sequential(
            nn.Linear(10, 6), ACTIVATIONS[activation](), nn.Linear(6, 4), ACTIVATIONS[activation](), nn.Linear(4, 1)
        )
        linear = [layer for layer in network if isinstance(layer, nn.Linear)]
        for layer, weight, bias in zip(linear, weights, biases, strict=True):
            layer.weight.data, layer.bias.data = weight[client].T.clone(), bias[client].clone()
        own = [part.detach()[client].clone().requires_grad_() for part in parts]
        expected = network(torch.cat([own[0].expand(4, -1), *own[1:]], 1))
        torch.testing.assert_close(outputs[client].detach(), expected.detach())
        expected.square().sum().backward()
        torch.optim.SGD(network.parameters(), lr=RATE).step()
        for layer, weight, bias in zip(linear, changed[:3], changed[3:], strict=True):
            torch.testing.assert_close(weight[client], layer.weight.data.T)
            torch.testing.assert_close(bias[client], layer.bias.data)
        for gradient, part in zip(gradients[1:], own, strict=True):
            torch.testing.assert_close(gradient[client], part.grad)


def test_fused_step_of_tables_is_that_of_torch_optim():
    shares = [row_shares(torch.tensor([[[0]], [[1]]]), 2), draw(2, 1, 3).softmax(-1)]
    tables = [draw(2, 2, 4), draw(2, 3, 5)]
    changed, anchor = fused(tables)
    torch.autograd.grad(mixed_rows(shares, changed).square().sum(), [anchor], allow_unused=True)
    leaves = [table.clone().requires_grad_() for table in tables]
    sums = [torch.einsum("cbr,crd->cbd", share, leaf) for share, leaf in zip(shares, leaves, strict=True)]
    torch.cat(sums, -1).square().sum().backward()
    torch.optim.SGD(leaves, lr=RATE).step()
    for got, expected in zip(changed, leaves, strict=True):
        torch.testing.assert_close(got, expected.detach())


def test_a_parameter_is_refused_in_two_fused_layers():
    """Its first update would change what the second layer computes with."""
    (table,), _ = fused([draw(1, 2, 3)])
    mixed_rows([torch.ones(1, 1, 2)], [table])
    with pytest.raises(ValueError, match="one in two of them"):
        mixed_rows([torch.ones(1, 1, 2)], [table])


def test_weighted_cross_entropy_is_that_of_torch():
    logits = draw(2, 5).requires_grad_()
    labels, weights = (draw(2, 5, seed=1) > 0).float(), draw(2, 5, seed=2).abs()
    scale = torch.tensor([2.0, -1.0])
    (weighted_cross_entropy(logits, labels, weights) * scale).sum().backward()
    plain = logits.detach().clone().requires_grad_()
    losses = nn.functional.binary_cross_entropy_with_logits(plain, labels, reduction="none")
    ((losses * weights).sum(-1) * scale).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad)
    found = weighted_cross_entropy(logits.detach(), labels, weights)
    torch.testing.assert_close(found, (losses.detach() * weights).sum(-1))
