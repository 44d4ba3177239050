# SPDX-License-Identifier: Apache-2.0
"""Compressed updates of real nodes: what arrives is what a simulated node adds up, its bytes are
those of the message, what is left out stays on the device, and false ones are refused."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message

from clients.device.device_node import DeviceNode
from clients.hosting.node import Node
from clients.training.round import train_clients
from fedrec.errors import RefusalError
from fedrec.privacy.protection import Protection
from fedrec.protocol.messages import pack_sum, pack_train, unpack_sum
from fedrec.protocol.orders import SentUpdate, TrainOrder
from fedrec.protocol.serialization import opened
from fedrec.protocol.sparse_update import dense_change
from fedrec.protocol.zero_copy import for_the_network, from_the_network, to_record
from server.deployed.reply_validation import ReplyValidator
from simulations.deployment.shards import cut

pytestmark = pytest.mark.usefixtures("identity")
TOP_K = "compression={name='top-k', share=0.2, bits=8}"
COMPRESSIONS = {
    "int8": "compression={name='rounding', bits=8}",
    "2 bits on a grid": "compression={name='rounding', bits=2, largest=0.01}",
    "top-k": TOP_K,
}
MF = "model={name='mf', factors=4}", "step.private-parameters=['user.*']"
EXAMPLES = "strategy={name='fedavg', weighting='examples'}"


@pytest.fixture
def folder(load_tiny, tmp_path):
    """The folder of a node with the shards of all users."""
    (tmp_path / "node").mkdir()
    cut(load_tiny(), [tmp_path / "node"])
    return tmp_path / "node"


def device(experiment, folder):
    return DeviceNode(
        experiment,
        experiment.digest()[:16],
        state=folder / "state",
        data=folder / "data.csv",
        catalogue=folder / "catalogue.json",
        place=0,
        numbers=True,
    )


def start(node):
    return {name: value.numpy() for name, value in node.initial().items()}


def delivered(order, reply, theta):
    """What the server reads of a node's reply, and the message as it leaves the node."""
    asked = Message(pack_train(to_record(theta), order), 7, "train")
    answer = Message(pack_sum(reply), reply_to=asked)
    message = for_the_network(answer.content)["arrays"]["#packed"].data
    from_the_network(answer.content)
    return asked, answer, message


def received(experiment, order, reply, theta):
    asked, answer, message = delivered(order, reply, theta)
    good = ReplyValidator(experiment=experiment).trained([asked], [answer], theta)
    return (unpack_sum(good[0].content) if good else None), message


def assert_equal_sums(found, expected, theta):
    for name, table in theta.items():
        one, other = (dense_change(part.total[name], table) for part in (found, expected))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7, err_msg=name)
    for name in ("clients", "weight", "examples", "loss", "losses"):
        assert getattr(found, name) == getattr(expected, name)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_server_adds_up_what_a_simulated_node_does(
    load_tiny, folder, tmp_path, compression, weighting
):
    experiment = load_tiny(COMPRESSIONS[compression], *MF)
    mine, simulated = device(experiment, folder), Node(experiment, 0, 1, tmp_path / "private")
    theta = start(simulated)
    order = TrainOrder(1, simulated.training[3:4], weighting)
    expected = train_clients(simulated, theta, order)
    found, message = received(experiment, order, train_clients(mine, theta, order), theta)
    assert expected.updates is None and found is not None
    assert_equal_sums(found, expected, theta)
    # the only count: bytes of the arrays in the message
    assert found.sent == expected.sent == sum(len(part.data) for part in opened(message))
    whole = sum(value.nbytes for name, value in theta.items() if not name.startswith("user"))
    assert 0 < found.sent < whole


def test_a_node_of_several_clients_sends_the_update_of_each(load_tiny, folder, tmp_path):
    experiment = load_tiny(TOP_K, EXAMPLES, *MF)
    mine, simulated = device(experiment, folder), Node(experiment, 0, 1, tmp_path / "private")
    theta = start(simulated)
    order = TrainOrder(1, simulated.training[:3], "examples")
    expected = train_clients(simulated, theta, order)
    reply = train_clients(mine, theta, order)
    assert len(reply.updates) == 3 and len({one.share for one in reply.updates}) > 1
    found, message = received(experiment, order, reply, theta)
    assert_equal_sums(found, expected, theta)
    assert found.sent == expected.sent == sum(len(part.data) for part in opened(message))


def test_a_node_of_many_clients_sends_their_sum_if_it_is_shorter(load_tiny, folder, tmp_path):
    experiment = load_tiny("compression={name='rounding', bits=8}", *MF)
    mine, simulated = device(experiment, folder), Node(experiment, 0, 1, tmp_path / "private")
    theta = start(simulated)
    order = TrainOrder(1, simulated.training)
    expected = train_clients(simulated, theta, order)
    found, message = received(experiment, order, train_clients(mine, theta, order), theta)
    assert_equal_sums(found, expected, theta)
    assert sum(len(part.data) for part in opened(message)) < found.sent == expected.sent


def test_what_is_left_out_survives_a_restart_of_the_node(load_tiny, folder, tmp_path):
    """A node that was restarted between two rounds sends in the second what one that was not does,
    and something else than one that forgot."""
    experiment = load_tiny(TOP_K, *MF, "rounds=2")
    simulated = Node(experiment, 0, 1, tmp_path / "private")
    theta = start(simulated)
    client = simulated.training[:1]
    for number in (1, 2):
        order = TrainOrder(number, client)
        expected = train_clients(simulated, theta, order)
        fresh = device(experiment, folder)  # of the same state folder, in each round
        found, _ = received(experiment, order, train_clients(fresh, theta, order), theta)
        assert_equal_sums(found, expected, theta)
    forgot = Node(experiment, 0, 1, tmp_path / "forgot")
    other = train_clients(forgot, theta, TrainOrder(2, client))
    name = next(name for name in theta if name.startswith("item"))
    one, two = (dense_change(part.total[name], theta[name]) for part in (found, other))
    assert not np.allclose(one, two, atol=1e-6)


def test_a_clip_bounds_what_is_sent_and_the_server_clips_too(load_tiny, folder, tmp_path):
    experiment = load_tiny("compression={name='rounding', bits=2}", *MF)
    mine, simulated = device(experiment, folder), Node(experiment, 0, 1, tmp_path / "private")
    theta = start(simulated)
    names = tuple(name for name in theta if not name.startswith("user"))
    order = TrainOrder(1, simulated.training[:1], protection=Protection(0.01, 2, names))
    reply = train_clients(mine, theta, order)
    found, _ = received(experiment, order, reply, theta)
    assert norm(found) == pytest.approx(0.01, rel=1e-4) and norm(found) <= 0.01
    assert norm(train_clients(simulated, theta, order)) == pytest.approx(norm(found), rel=1e-6)
    (honest,) = reply.updates
    large = {
        name: {key: value * 100 if key == "scales" else value for key, value in payload.items()}
        for name, payload in honest.payloads.items()
    }
    false = replace(reply, updates=[SentUpdate(large)])
    found, _ = received(experiment, order, false, theta)
    assert norm(found) == pytest.approx(0.01, rel=1e-4) and norm(found) <= 0.01


def norm(reply):
    values = (getattr(change, "values", change) for change in reply.total.values())
    return float(np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in values)))


def _with(payloads, **arrays):
    name = next(name for name, payload in payloads.items() if "rows" in payload)
    return {**payloads, name: {**payloads[name], **arrays}}


FALSE = {
    "more clients than were asked": lambda one: [one, one],
    "another weight": lambda one: [replace(one, share=5.0)],
    "no number": lambda one: [replace(one, share=float("nan"))],
    "rows beyond the table": lambda one: [
        SentUpdate(_with(one.payloads, rows=np.array([60_000], dtype=np.uint16)))
    ],
    "rows twice": lambda one: [SentUpdate(_with(one.payloads, rows=np.zeros(2, dtype=np.uint8)))],
    "no scales": lambda one: [
        SentUpdate({name: {"rows": np.zeros(1, np.uint8)} for name in one.payloads})
    ],
    "infinities": lambda one: [
        SentUpdate(_with(one.payloads, scales=np.full(3, np.inf, dtype=np.float32)))
    ],
    "an unknown parameter": lambda one: [SentUpdate({"x": next(iter(one.payloads.values()))})],
}


@pytest.mark.parametrize("what", FALSE)
def test_false_updates_are_left_out(load_tiny, folder, what):
    experiment = load_tiny(TOP_K, *MF)
    node = device(experiment, folder)
    theta = start(node)
    order = TrainOrder(1, node.training[:1])
    reply = train_clients(node, theta, order)
    assert received(experiment, order, reply, theta)[0] is not None
    false = replace(reply, updates=FALSE[what](reply.updates[0]))
    assert received(experiment, order, false, theta)[0] is None


def test_a_compression_of_another_package_is_refused_before_it_is_imported(load_tiny, folder):
    experiment = load_tiny(TOP_K)
    table = {**experiment.compression.table(), "name": "somebody.elses:Compression"}
    section = type(experiment.compression).model_validate(table)
    with pytest.raises(RefusalError, match="does not run 'somebody\\.elses"):
        device(experiment.model_copy(update={"compression": section}), folder)
