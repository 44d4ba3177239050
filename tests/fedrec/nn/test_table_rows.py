# SPDX-License-Identifier: Apache-2.0
"""Rows of tables, products with one column and drawn softmaxes against numpy and PyTorch's own."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedrec.nn.catalogue_softmax import sampled_cross_entropy
from fedrec.nn.layers import all_rows, gather_rows, single_output
from fedrec.nn.table_rows import add_to_rows, rows_at


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_repeat_get_all_their_moves(dtype):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 3, generator=generator, dtype=dtype)
    places = torch.tensor([4, 0, 4, 4, 6])
    moves = torch.randn(3, 5, generator=generator, dtype=dtype).T  # not contiguous
    expected = table.double().numpy().copy()
    np.add.at(expected, places.numpy(), -0.3 * moves.double().numpy())
    add_to_rows(table, places, moves, -0.3)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


def test_rows_at_places():
    table = torch.arange(12.0).view(4, 3)
    places = torch.tensor([[3, 0], [1, 1]])
    assert rows_at(table, places).tolist() == table.numpy()[places.numpy()].tolist()


def test_all_rows_are_the_table_itself_and_only_these():
    table = torch.randn(2, 3, 4)
    assert gather_rows(table, all_rows(2, 3, table.device)) is table
    some = torch.tensor([[0, 1, 1], [2, 1, 0]])
    expected = table.numpy()[np.arange(2)[:, None], some.numpy()]
    np.testing.assert_array_equal(gather_rows(table, some).numpy(), expected)
    fewer = gather_rows(table, all_rows(2, 2, table.device))
    np.testing.assert_array_equal(fewer.numpy(), table[:, :2].numpy())


def test_a_product_with_one_column_and_its_gradients():
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5, 4), (3, 4, 1))
    ]
    inputs, weight = given
    own = single_output(inputs, weight)
    expected = torch.einsum("cbi,ci->cb", inputs, weight[..., 0])
    torch.testing.assert_close(own, expected)
    for found in (own, expected):
        assert found.shape == (3, 5)
    factors = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    both = [torch.autograd.grad((one * factors).sum(), given) for one in (own, expected)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_drawn_softmax_is_a_cross_entropy_of_shifted_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, wanted, drawn = (
        torch.randn(2, n, 3, generator=generator, dtype=torch.float64).mul_(4).requires_grad_()
        for n in (5, 5, 6)
    )
    weights = torch.tensor([[1.0, 0.5, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, 1.0, 0.2]]).double()
    logits = torch.cat([(hidden * wanted).sum(-1, keepdim=True), hidden @ drawn.mT + 1.7], -1)
    places = torch.zeros(10, dtype=torch.int64)
    each = F.cross_entropy(logits.flatten(0, 1), places, reduction="none").view(2, 5)
    expected = (each * weights).sum(1)
    found = sampled_cross_entropy(hidden, wanted, drawn, 1.7, weights)
    torch.testing.assert_close(found, expected)
    factors = torch.tensor([0.3, -2.0]).double()
    parameters = (hidden, wanted, drawn)
    both = [torch.autograd.grad((one * factors).sum(), parameters) for one in (found, expected)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)
