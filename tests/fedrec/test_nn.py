# SPDX-License-Identifier: Apache-2.0
"""PyTorch's import, optimisers, recurrence and rows of tables."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedrec.nn.layers import Adam, AdamW, all_rows, gather_rows, recurrent_states
from fedrec.training.results import add_to_rows

# The optimisers take PyTorch's steps and leave its compiler out.

WITHOUT_COMPILER = """
import sys
import torch
from fedrec.nn.layers import Adam, AdamW
for made in (Adam, AdamW):
    value = torch.ones(3, requires_grad=True)
    optimiser = made([value], lr=0.1)
    optimiser.zero_grad()
    value.sum().backward()
    optimiser.step()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_the_compiler_is_not_imported():
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    assert subprocess.check_output(command, text=True).strip() == "False"


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (Adam, torch.optim.Adam, {"fused": True}),
        (Adam, torch.optim.Adam, {}),
        (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    ],
)
def test_steps_are_pytorch_s(ours, theirs, settings):
    values = []
    for made in (ours, theirs):
        value = torch.linspace(-1, 1, 7, requires_grad=True)
        optimiser = made([{"params": [value], "lr": 0.1}], **settings)
        falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, 5)
        for _ in range(5):
            optimiser.zero_grad()
            value.sin().sum().backward()
            optimiser.step()
            falling.step()
        assert value.requires_grad and torch.is_grad_enabled()
        values.append(value.detach())
    assert torch.equal(*values)


# Gated recurrent units in compiled code against `torch.nn.GRU` in float64, and against PyTorch's
# operations where items are missing.

SIZES = [(1, 1, 1), (7, 1, 3), (4, 5, 20), (9, 8, 64), (2, 3, 17)]  # places, sequences, width
CLIENTS = 3


class Clients:
    """What several clients give, and their states and gradients in one precision."""

    def __init__(self, places, sequences, width, *, shared=False, holes=False):
        drawn = torch.Generator().manual_seed(places)

        def normal(*shape):
            return torch.randn(shape, generator=drawn, dtype=torch.float64)

        own = 1 if shared else CLIENTS
        self.given = normal(CLIENTS, places, sequences, 3 * width)
        self.weight = normal(own, width, 3 * width) / width**0.5
        self.bias = normal(own, 3 * width)
        self.into = normal(CLIENTS, places, sequences, width)  # gradients by the states
        self.present = None
        if holes:
            self.present = torch.rand(CLIENTS, places, sequences, generator=drawn) < 0.6

    def solved(self, dtype):
        """States, and gradients by what is given, weight and bias, `[C, ...]` each."""
        given = self.given.to(dtype).requires_grad_()
        weight, bias = (
            one.to(dtype).expand(CLIENTS, *one.shape[1:]).requires_grad_()
            for one in (self.weight, self.bias)
        )
        states = recurrent_states(given, weight, bias, self.present)
        compiled = type(states.grad_fn).__name__ == "_StatesBackward"
        assert compiled == (dtype == torch.float32)
        return states, *torch.autograd.grad(states, (given, weight, bias), self.into.to(dtype))


def same(found, wanted):
    for own, expected in zip(found, wanted, strict=True):
        largest = max(float(expected.detach().abs().max()), 1e-3)
        torch.testing.assert_close(
            own / largest, (expected / largest).to(own.dtype), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_states_and_gradients_are_those_of_torchs_gru(size, shared):
    clients = Clients(*size, shared=shared)
    width = size[2]
    wanted = []
    for client in range(CLIENTS):
        gru = nn.GRU(3 * width, width).double()
        own = min(client, len(clients.weight) - 1)
        gru.load_state_dict(
            {
                "weight_ih_l0": torch.eye(3 * width),  # what inputs add is given
                "bias_ih_l0": torch.zeros(3 * width),
                "weight_hh_l0": clients.weight[own].T,
                "bias_hh_l0": clients.bias[own],
            }
        )
        given = clients.given[client].clone().requires_grad_()
        states, _ = gru(given)
        states.backward(clients.into[client])
        wanted.append((states, given.grad, gru.weight_hh_l0.grad.T, gru.bias_hh_l0.grad))
    same(clients.solved(torch.float32), [torch.stack(own) for own in zip(*wanted, strict=True)])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_is_missing_changes_no_state(size):
    clients = Clients(*size, holes=True)
    expected = clients.solved(torch.float64)
    found = clients.solved(torch.float32)
    same(found, expected)
    states, of_given, *_ = found
    assert not of_given[~clients.present].any() and not states[:, 0][~clients.present[:, 0]].any()


def test_clients_without_sequences_have_no_gradients():
    states, _, *of_parameters = Clients(4, 0, 20).solved(torch.float32)
    assert states.shape == (CLIENTS, 4, 0, 20) and not any(own.any() for own in of_parameters)


def test_what_is_not_finite_stays_with_its_client():
    clients = Clients(4, 5, 20)
    clients.given[1, 2, 0, 0] = torch.nan
    for own in clients.solved(torch.float32):
        assert own.flatten(1).isfinite().all(1).tolist() == [True, False, True]


def test_one_client_takes_the_operations_of_pytorch():
    """As on a device, which would wait for the compiler."""
    given = torch.zeros(1, 2, 1, 6, requires_grad=True)
    states = recurrent_states(given, torch.ones(1, 2, 6), torch.ones(1, 6))
    assert type(states.grad_fn).__name__ == "StackBackward0"


# Rows of tables against numpy.


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


def test_all_rows_are_the_table_itself_and_only_these():
    table = torch.randn(2, 3, 4)
    assert gather_rows(table, all_rows(2, 3, table.device)) is table
    some = torch.tensor([[0, 1, 1], [2, 1, 0]])
    expected = table.numpy()[np.arange(2)[:, None], some.numpy()]
    np.testing.assert_array_equal(gather_rows(table, some).numpy(), expected)
    fewer = gather_rows(table, all_rows(2, 2, table.device))
    np.testing.assert_array_equal(fewer.numpy(), table[:, :2].numpy())
