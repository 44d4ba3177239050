# SPDX-License-Identifier: Apache-2.0
"""The encoders against `torch.nn.GRU` and `torch.nn.Linear`, values and gradients."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fedrec.pretext.encoder import encode_items, encode_sessions, initial_encoder, recommender_part

LENGTHS = torch.tensor([5, 1, 3])


@pytest.fixture
def clients():
    """Parameters of two clients, `[2, ...]`, that require gradients, and three sessions of each,
    `[2, 3, 5, 4]`."""
    drawn = [initial_encoder(4, 6, torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    for one in drawn:  # zero biases would hide an error
        one |= {
            name: torch.linspace(-1, 1, value.numel())
            for name, value in one.items()
            if name.endswith("bias")
        }
    parameters = {
        name: torch.stack([one[name] for one in drawn]).requires_grad_() for name in drawn[0]
    }
    embeddings = torch.randn(
        2, 3, 5, 4, generator=torch.Generator().manual_seed(2)
    ).requires_grad_()
    return parameters, embeddings


def torch_gru(parameters, client):
    gru = nn.GRU(4, 6, batch_first=True)
    own = {"ih": "session.gru.input", "hh": "session.gru.state"}
    state = {
        f"weight_{key}_l0": parameters[f"{name}.weight"][client].detach().T
        for key, name in own.items()
    }
    state |= {
        f"bias_{key}_l0": parameters[f"{name}.bias"][client].detach() for key, name in own.items()
    }
    gru.load_state_dict(state)
    return gru


def test_the_last_state_and_all_gradients_equal_those_of_torchs_gru(clients):
    parameters, embeddings = clients
    present = (torch.arange(5) < LENGTHS[:, None]).expand(2, 3, 5)
    encoded = encode_sessions(parameters, embeddings, present)
    encoded.square().sum().backward()
    for client in (0, 1):
        gru = torch_gru(parameters, client)
        own = embeddings[client].detach().requires_grad_()
        _, last = gru(pack_padded_sequence(own, LENGTHS, batch_first=True, enforce_sorted=False))
        last.square().sum().backward()
        torch.testing.assert_close(encoded[client], last[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(embeddings.grad[client], own.grad, rtol=1e-5, atol=1e-6)
        for key, name in (("ih", "session.gru.input"), ("hh", "session.gru.state")):
            weight = getattr(gru, f"weight_{key}_l0").grad
            bias = getattr(gru, f"bias_{key}_l0").grad
            torch.testing.assert_close(
                parameters[f"{name}.weight"].grad[client], weight.T, rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(
                parameters[f"{name}.bias"].grad[client], bias, rtol=1e-5, atol=1e-6
            )


def test_a_session_without_items_is_zero_and_what_is_not_present_does_not_matter(clients):
    parameters, embeddings = clients
    present = torch.tensor([False] * 5).expand(2, 3, 5)
    assert not encode_sessions(parameters, embeddings, present).any()
    present = (torch.arange(5) < 2).expand(2, 3, 5)
    noisy = embeddings.detach().clone()
    noisy[:, :, 2:] = 1e3
    torch.testing.assert_close(
        encode_sessions(parameters, noisy, present),
        encode_sessions(parameters, embeddings, present),
    )


def test_the_item_encoder_equals_two_linear_layers(clients):
    parameters, embeddings = clients
    found = encode_items(parameters, embeddings)
    for client in (0, 1):
        own = {
            name: parameters[f"session.{name}"][client].detach()
            for name in ("item0.weight", "item0.bias", "item1.weight")
        }
        layers = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        layers[0].load_state_dict({"weight": own["item0.weight"].T, "bias": own["item0.bias"]})
        layers[1].load_state_dict({"weight": own["item1.weight"].T})
        expected = nn.Sequential(layers[0], nn.ReLU(), layers[1])(embeddings[client])
        torch.testing.assert_close(found[client], expected, rtol=1e-6, atol=1e-6)


def test_the_recommender_is_what_does_not_belong_to_the_encoders():
    added = initial_encoder(4, 6, torch.Generator().manual_seed(0))
    table = torch.zeros(3, 4)
    assert recommender_part({"item.id": table, **added}) == {"item.id": table} and len(added) == 7
