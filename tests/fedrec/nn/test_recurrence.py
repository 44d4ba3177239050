# SPDX-License-Identifier: Apache-2.0
"""Gated recurrent units in compiled code against `torch.nn.GRU` in float64, and against PyTorch's
operations where items are missing."""

import pytest
import torch
from torch import nn

from fedrec.nn.recurrence import recurrent_states
from tests.compilation import assert_compiled_once

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


@pytest.mark.slow
def test_training_finds_what_was_compiled_before_it(tmp_path):
    """A process compiles, with an empty cache; another trains and compiles nothing."""
    command = (
        "from fedrec.nn.native import recurrence as native\n"
        "from tests.fedrec.nn.test_recurrence import Clients\n"
        "import sys, torch\n"
        "if sys.argv[1] == 'before':\n"
        "    native.compile_recurrence()\n"
        "else:\n"
        "    for holes in (False, True):\n"
        "        Clients(4, 5, 20, shared=holes, holes=holes).solved(torch.float32)\n"
        "both = native.recurrent_forward, native.recurrent_backward\n"
        "print(sum(sum(one.stats.cache_misses.values()) for one in both))"
    )
    assert_compiled_once(tmp_path, command, functions=2)
