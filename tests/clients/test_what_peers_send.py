# SPDX-License-Identifier: Apache-2.0
"""What leaves the devices of federated recommenders with private parts, in whole rounds: the shared
part and nothing else."""

import numpy as np
import pytest

import clients.app
from clients.hosting.node import Node
from fedrec.protocol.sparse_update import dense_change
from tests.systems import LAST_OUT, SYSTEMS

ROUNDS = ("rounds=2", "sampler={name='full'}", *LAST_OUT)
TOWER = {"tower0.weight", "tower0.bias", "output.weight", "output.bias"}
LAYERS = {
    f"{name}.{part}" for name in ("items", "users") for part in ("weight", "source", "target")
}
# what moves on the server, what a device keeps
SUMMED = {
    "mf": ({"item.factors", "item.bias", "bias"}, {"user.factors", "user.bias"}),
    "fedncf": ({"item.factors", "item.tower", *TOWER}, {"user.factors", "user.tower"}),
    "pfedrec": ({"item.id"}, {"score.weight", "score.bias"}),
    "fedrap": ({"item.id"}, {"item.personal", "score.weight", "score.bias"}),
}
SINGLE = {
    "gpfedrec": (
        {"item.id"},
        {"item.own", "user.id"} | {f"layer{n}.{p}" for n in (0, 1) for p in ("weight", "bias")},
    ),
    # tokens and user embedding are for the third party, whose messages the server forwards
    "fedgnn": ({"item.id", *LAYERS, "third.tokens", "third.user"}, {"user.id", "user.vector"}),
}


@pytest.fixture
def replies(monkeypatch):
    """What the app packed into replies to training orders."""
    found = []
    for name in ("pack_sum", "pack_each"):
        packs = getattr(clients.app, name)
        monkeypatch.setattr(
            clients.app, name, lambda reply, packs=packs: found.append(reply) or packs(reply)
        )
    return found


def kept_by_devices(result, private):
    """Checks that devices keep the private parameters, and that these were trained."""
    node = Node(result.experiment, 0, 1, result.folder / "private")
    start = node.initial()
    assert node.private is not None
    kept = node.private.load(int(node.training[0]), result.experiment.rounds + 1)
    assert set(kept) == private
    assert any(not np.array_equal(value, start[name].numpy()) for name, value in kept.items())
    shared = {name: value for name, value in result.parameters.items() if name in private}
    for name, value in shared.items():
        np.testing.assert_array_equal(value, start[name].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("system", SUMMED)
def test_sums_have_no_private_part(run_tiny, replies, system):
    sent, private = SUMMED[system]
    result = run_tiny(*SYSTEMS[system], *ROUNDS)
    start = Node(result.experiment, 0, 1, None).initial()
    assert len(replies) >= 2
    for reply in replies:
        changes = {n: dense_change(c, start[n].numpy()) for n, c in reply.total.items()}
        assert {name for name, change in changes.items() if change.any()} == sent
    kept_by_devices(result, private)


@pytest.mark.parametrize("system", SINGLE)
def test_single_messages_have_no_private_part(run_tiny, replies, system):
    sent, private = SINGLE[system]
    result = run_tiny(*SYSTEMS[system], *ROUNDS)
    assert len(replies) >= 2
    for reply in replies:
        assert {*reply.updates.values, *reply.updates.rows} == sent
    kept_by_devices(result, private)
