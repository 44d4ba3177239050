# SPDX-License-Identifier: Apache-2.0
"""Stacked parameters of clients: selection, padding, and serialization."""

import numpy as np

from fedrec.protocol.client_arrays import ClientArrays, ItemRequests

LISTS = {3: [1, 4], 5: [], 8: [0, 1, 7]}


def requests():
    return ItemRequests.of(
        np.array(list(LISTS)), [np.array(items, dtype=np.int64) for items in LISTS.values()]
    )


def generated():
    rows = np.array([[31.0], [34.0], [80.0], [81.0], [87.0]])
    return ClientArrays(requests(), {"w": np.array([[3.0, 3], [5, 5], [8, 8]])}, {"t": rows})


def told(some):
    lists = np.split(some.items, some.offsets[1:-1])
    return {client: lists[place].tolist() for place, client in enumerate(some.clients.tolist())}


def test_some_clients_in_any_order():
    taken = generated().take(np.array([2, 0]))
    assert told(taken.requests) == {8: [0, 1, 7], 3: [1, 4]}
    assert taken.values["w"][:, 0].tolist() == [8, 3]
    assert taken.rows["t"][:, 0].tolist() == [80, 81, 87, 31, 34]


def test_parts_are_joined_in_the_order_of_clients():
    whole = requests()
    parts = [whole.take(np.array([2])), whole.take(np.array([0, 1]))]
    joined = ItemRequests.joined(parts)
    assert joined.clients.tolist() == [3, 5, 8] and told(joined) == LISTS
    assert ItemRequests.joined([]).clients.tolist() == []


def test_padding():
    padded = generated().padded(4)
    assert padded["t"][..., 0].tolist() == [[31, 34, 0, 0], [0, 0, 0, 0], [80, 81, 87, 0]]
    assert generated().real(4).sum(1).tolist() == [2, 0, 3]


def test_arrays_spell_everything():
    again = ClientArrays.read(generated().arrays())
    assert told(again.requests) == LISTS
    assert again.values["w"].tolist() == generated().values["w"].tolist()
    assert again.rows["t"].shape == (5, 1)
