# SPDX-License-Identifier: Apache-2.0
"""Stock clients of Flower, and one large node."""

import numpy as np
import pytest

from clients.node import Node
from clients.round import train_clients
from fedrec.protocol.orders import TrainOrder
from fedrec.protocol.updates import dense_change
from server.deployed.validation import LARGER, UsualSize

NODES = 6
ITEM = 3


@pytest.fixture
def sums(load_tiny):
    """Each node's sum over its clients as whole arrays, and their number."""
    found = []
    for place in range(NODES):
        node = Node(load_tiny(), place, NODES, None)
        arrays = {name: value.numpy() for name, value in node.initial().items()}
        one = train_clients(node, arrays, TrainOrder(1, node.training))
        wholes = {name: dense_change(value, arrays[name]) for name, value in one.total.items()}
        found.append((wholes, one.clients))
    return found


def norm(total):
    return float(np.sqrt(sum(np.square(value).sum() for value in total.values())))


def test_it_may_put_ten_times_the_usual_norm_of_all_its_clients_into_one_item(sums):
    """Its sum passes unchanged up to that, and moves one item more than all honest clients move any
    item together."""
    sizes = {place: norm(total) / clients for place, (total, clients) in enumerate(sums)}
    usual = sorted(sizes.values())[(NODES - 1) // 2]
    most = LARGER * usual
    assert UsualSize().factors({**sizes, 0: 0.999 * most}).keys() <= sizes.keys() - {0}
    above = UsualSize().factors({**sizes, 0: 2 * LARGER * max(sizes.values())})
    assert above[0] <= 0.5
    moved = most * sums[0][1]
    honest = sum(total["item.id"] for total, _ in sums[1:])
    assert moved / np.linalg.norm(honest, axis=1).max() == pytest.approx(29, rel=0.05)
