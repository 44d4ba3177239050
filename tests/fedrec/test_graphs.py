# SPDX-License-Identifier: Apache-2.0
"""Graph attention against a dense computation and torch_geometric's layer; the third party by
hand."""

import math

import numpy as np
import pytest
import torch

from fedrec.graphs.attention import attended
from fedrec.graphs.third_party import NOTHING, ThirdParty, tokens


@pytest.fixture
def layer():
    """Three targets with up to four neighbours, one of them with none."""
    random = torch.Generator().manual_seed(0)
    targets, sources = (
        torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((3, 5), (3, 4, 5))
    )
    there = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    weight = torch.randn(5, 2, generator=random, dtype=torch.float64)
    ends = torch.randn(2, 2, generator=random, dtype=torch.float64)
    return targets, sources, there, weight, ends[0], ends[1]


def test_attention_is_the_sum_by_hand(layer):
    targets, sources, there, weight, of_source, of_target = (part.numpy() for part in layer)
    found = attended(*layer).numpy()
    for place in range(3):
        values = [sources[place, n] @ weight for n in range(4) if there[place, n]]
        raw = [v @ of_source + targets[place] @ weight @ of_target for v in values]
        weights = [math.exp(r if r > 0 else 0.2 * r) for r in raw]
        wanted = sum(
            (w / sum(weights) * v for w, v in zip(weights, values, strict=True)), np.zeros(2)
        )
        np.testing.assert_allclose(found[place], wanted, rtol=1e-12)


def test_attention_is_that_of_torch_geometric(layer):
    geometric = pytest.importorskip("torch_geometric")
    targets, sources, there, weight, of_source, of_target = layer
    other = geometric.nn.GATConv((5, 5), 2, add_self_loops=False, bias=False).double()
    with torch.no_grad():
        for linear in {other.lin_src, other.lin_dst, getattr(other, "lin", None)} - {None}:
            linear.weight.copy_(weight.T)
        other.att_src.copy_(of_source.view(1, 1, -1))
        other.att_dst.copy_(of_target.view(1, 1, -1))
    target, slot = torch.nonzero(there, as_tuple=True)
    edges = torch.stack([target * 4 + slot, target])
    wanted = other((sources.flatten(0, 1), targets), edges)
    torch.testing.assert_close(attended(*layer), wanted)


def test_neighbours_are_those_with_the_same_token():
    """Users 1, 4 and 6 share an item, 4 and 6 another one; no user is its own neighbour."""
    third = ThirdParty(1)
    embedding = {user: np.full(2, user, dtype=np.float32) for user in (1, 4, 6)}
    for user, own in ((1, [10, 20, NOTHING]), (4, [10, 30, NOTHING]), (6, [30, 10, NOTHING])):
        third.register(user, np.array(own), embedding[user])
    given, counts = third.found([1, 6, 4, 9], 3, 2)
    assert counts.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert given[0, 0, 0].tolist() == [4, 4]  # who follows 1 among 1, 4, 6
    assert given[1, :, 0, 0].tolist() == [4, 1, 0]
    third.neighbours = 5
    given, counts = third.found([4], 3, 2)
    assert counts.tolist() == [[2, 1, 0]] and given[0, 0, :2, 0].tolist() == [6, 1]
    again = ThirdParty(5)
    again.restore(third.state())
    np.testing.assert_array_equal(again.found([4], 3, 2)[0], given)
    again.register(6, np.array([NOTHING] * 3), embedding[6])
    assert again.found([4], 3, 2)[1].tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("seed", range(40))
def test_neighbours_are_those_of_loops(seed):
    """Who follows a sender among the holders of its token, around the end."""
    random = np.random.default_rng(seed)
    slots, most = random.integers(1, 7, 2).tolist()
    third = ThirdParty(most)
    held = {}
    for sender in random.permutation(30)[: random.integers(0, 25)].tolist():
        held[sender] = random.permutation(12)[:slots]
        held[sender][random.permutation(slots)[: random.integers(0, slots + 1)]] = NOTHING
        third.register(sender, held[sender], np.full(2, sender, np.float32))
    asking = random.permutation(32)[: random.integers(0, 12)].tolist()
    wanted = np.zeros((len(asking), slots, most, 2), np.float32)
    numbers = np.zeros((len(asking), slots), np.int64)
    for place, sender in enumerate(asking):
        for slot, token in enumerate(held.get(sender, [])):
            same = sorted(one for one in held if token in held[one] and token != NOTHING)
            others = sorted(set(same) - {sender}, key=lambda one, own=sender: (one < own, one))
            numbers[place, slot] = len(others[:most])
            wanted[place, slot, : len(others[:most])] = np.array(others[:most])[:, None]
    given, counts = third.found(asking, slots, 2)
    np.testing.assert_array_equal(given, wanted)
    np.testing.assert_array_equal(counts, numbers)


def test_tokens_reveal_only_which_items_are_equal_without_the_key():
    one, other = tokens([3, 5, 3], "key"), tokens([3, 5], "another")
    assert one[0] == one[2] != one[1] and not set(one) & set(other)
    assert one.dtype == np.int64 and (one >= 0).all()
