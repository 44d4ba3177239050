# SPDX-License-Identifier: Apache-2.0
"""Strategies that ask for the update of each client: the updates, engines, refusals."""

import numpy as np
import pytest

from clients.hosting.node import Node
from clients.training.round import train_clients, train_each
from fedrec.errors import ClientError, ExperimentError
from fedrec.privacy.protection import Protection
from fedrec.protocol.messages import pack_each, unpack_each
from fedrec.protocol.orders import TrainEach, TrainOrder
from fedrec.protocol.sparse_update import dense_change

TRIMMED = "strategy={name='trimmed-mean', cut=0.3}"
CLIENTS = np.array([1, 4, 7, 9, 11])


def start_of(node):
    return {name: value.numpy() for name, value in node.initial().items()}


def wholes(reply, arrays, place):
    return {n: dense_change(reply.changes(n, table)[place], table) for n, table in arrays.items()}


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("engine.path=blocks", "step.weight-decay=0.1"),
        ("engine.path=reference",),
        ("step={name='counts'}", "model.item-bias=true"),
    ],
)
def test_each_update_is_the_sum_over_that_client_alone(load_tiny, settings):
    """Through a message, and joined from two nodes in any order."""
    node = Node(load_tiny(*settings), 0, 1, None)
    arrays = start_of(node)
    parts = [
        unpack_each(pack_each(train_each(node, arrays, TrainOrder(1, part, each=True))))
        for part in (CLIENTS[3:], CLIENTS[:3])
    ]
    joined = TrainEach.joined(parts)
    assert joined.clients.tolist() == CLIENTS.tolist()
    for place, client in enumerate(CLIENTS.tolist()):
        alone = train_clients(node, arrays, TrainOrder(1, np.array([client])))
        found = wholes(joined, arrays, place)
        for name, change in alone.total.items():
            wanted = dense_change(change, arrays[name])
            np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-6)
        assert joined.examples[place] == alone.examples
    assert any(value.any() for value in wholes(joined, arrays, 0).values())


def test_private_parameters_are_kept_and_not_in_the_updates(load_tiny, tmp_path):
    node = Node(load_tiny("step.private-parameters=['user.*']"), 0, 1, tmp_path)
    arrays = start_of(node)
    reply = train_each(node, arrays, TrainOrder(1, CLIENTS, each=True))
    sent = {*reply.updates.values, *reply.updates.rows}
    assert sent == {name for name in arrays if not name.startswith("user.")}
    assert set(node.private.load(1, 2)) == set(arrays) - sent
    assert not any(change.any() for change in reply.changes("user.age", arrays["user.age"]))


def test_protection_and_orders_for_nobody_by_name_are_refused(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    arrays = start_of(node)
    protection = Protection(1.0, 2, tuple(arrays))
    for order in (
        TrainOrder(1, CLIENTS, each=True, protection=protection),
        TrainOrder(1, None, each=True),
    ):
        with pytest.raises(ExperimentError, match="update of each client"):
            train_each(node, arrays, order)


def test_it_is_refused_beside_a_user_level_guarantee_and_secure_sums(run_tiny):
    with pytest.raises(ExperimentError, match="cannot be made private by"):
        run_tiny(TRIMMED, "privacy={clip-norm=1.0, noise-multiplier=1.0}", output="private")
    with pytest.raises(ExperimentError, match="needs more than the sum"):
        run_tiny(TRIMMED, "secure-aggregation=true", "engine.nodes=4", output="secure")


def test_answers_that_were_not_asked_for_are_refused(load_tiny):
    from strategies.per_client.gpfedrec import GpfedrecStrategy, GpfedrecStrategyConfig

    node = Node(load_tiny(), 0, 1, None)
    reply = train_each(node, start_of(node), TrainOrder(1, CLIENTS, each=True))
    server = GpfedrecStrategy(GpfedrecStrategyConfig(), None, {"name": "gpfedrec"})  # type: ignore[arg-type]
    server._open = {1, 4}
    with pytest.raises(ClientError, match="other clients"):
        server._aggregate_each(1, [reply])
