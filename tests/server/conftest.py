# SPDX-License-Identifier: Apache-2.0
"""Nodes under secure aggregation in this process, some of which fail or lie."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict

from clients import secure
from clients.app import app, node_of
from fedrec.experiment.schema import load
from fedrec.protocol.messages import (
    INITIAL,
    SECURE_SHARES,
    SECURE_UNMASK,
    TrainOrder,
    pack_order,
    read_arrays,
    unpack_sum,
)
from fedrec.protocol.secure import UnmaskOrder
from fedrec.protocol.serialization import from_the_network, to_record
from fedrec.protocol.updates import dense_change
from fedrec.secure.identity import CERTIFICATE, KEY, Identity
from fedrec.secure.session import Session
from fedrec.secure.vector import digest_of, session_bits
from server.deployed.discovery import Discovery
from server.nodes import call_roster
from server.privacy.secure_sums import FEDERATION, secure_sums
from simulations.deployment.layout import Authority
from simulations.deployment.shards import cut
from simulations.engines.grid import FIRST_NODE_ID, SerialGrid, contexts_of
from tests.clients.device.test_device_node import files_of

STEPS = {SECURE_SHARES: "shares", "train": "train", SECURE_UNMASK: "unmask"}


class UnreliableGrid(SerialGrid):
    """Real nodes, some of which do not get a message, or whose replies are lost. All messages are
    recorded."""

    def __init__(self, experiment, output, nodes, folders=()):
        """With the folders of real nodes, or simulated ones."""
        contexts = contexts_of(experiment.model_dump_json(), str(output), nodes)
        run = {"resolved": experiment.model_dump_json(), "run": "00ff" * 4}
        if folders:
            contexts = [
                Context(1, FIRST_NODE_ID + n, settings_of(folder), RecordDict(), run)
                for n, folder in enumerate(folders)
            ]
        super().__init__(app, contexts)
        self.contexts = contexts
        self.deaf, self.mute, self.away, self.forged = set(), set(), set(), {}
        self.sent, self.heard = [], []

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if node - FIRST_NODE_ID not in self.away]

    def _submit(self, batch):
        for message in batch:
            place = message.metadata.dst_node_id - FIRST_NODE_ID
            kind = message.metadata.message_type
            step = STEPS.get(kind, kind)
            self.sent.append((place, step, message.content))
            if (place, step) in self.deaf:
                continue
            try:
                super()._submit([message])
                reply = self._replies[message.metadata.message_id]
            except Exception as error:
                reply = self._replies[message.metadata.message_id] = Message(
                    Error(2, str(error)), reply_to=message
                )
            if reply.has_content():
                from_the_network(reply.content)
            if reply.has_content() and (place, step) in self.forged:
                forged = self.forged[place, step](reply.content)
                reply = self._replies[message.metadata.message_id] = Message(
                    forged, reply_to=message
                )
            self.heard.append((place, step, reply))
            if (place, step) in self.mute:
                del self._replies[message.metadata.message_id]


def settings_of(folder):
    """Node configuration of a real node."""
    files = {key: str(file) for key, file in (files_of(folder) | {"join": folder}).items()}
    return {"numbers": True, **files}


def certified(experiment, output, nodes):
    """Folders of real nodes, whose certificates are of one authority."""
    authority = Authority.create("test")
    folders = [output / f"node-{place}" for place in range(nodes)]
    for folder in folders:
        folder.mkdir()
        issued = authority.issue(folder.name)
        (folder / KEY).write_bytes(issued.key)
        (folder / CERTIFICATE).write_bytes(issued.certificate)
        (folder / "ca.crt").write_bytes(authority.issued.certificate)
    cut(experiment, folders)
    return folders


class Federation:
    """Some nodes under secure aggregation, and the plain sum of the same clients."""

    def __init__(self, table, output, nodes, real=False, **settings):
        engine = {
            **table["engine"],
            "nodes": nodes,
            "max-failures": settings.pop("max_failures", 1.0),
        }
        bare = {**table, "engine": engine}
        self.experiment = load({**bare, "secure-aggregation": settings or True})
        folders = certified(self.experiment, output, nodes) if real else ()
        self.grid = UnreliableGrid(self.experiment, output / "secure", nodes, folders)
        self.plain = UnreliableGrid(load(bare), output / "plain", nodes)
        self.roster = (
            Discovery(self.grid, output / "roster.npz", timeout=60.0).wait_for(nodes)
            if real
            else call_roster(self.grid, timeout=60.0)
        )
        self.sums = secure_sums(self.experiment, self.grid, self.roster)
        (fresh,) = self.plain.send_and_receive([Message(RecordDict(), FIRST_NODE_ID, INITIAL)])
        self.theta = {name: np.array(value) for name, value in read_arrays(fresh.content).items()}
        self.groups = dict(self.roster.for_training(self.roster.training))

    def order(self, protection=None, weighting="uniform"):
        step = {"name": self.experiment.step.name, **self.experiment.step.options}
        return TrainOrder(1, self.roster.training, weighting, step, protection=protection)

    def secure(self, order=None):
        content = pack_order(order or self.order(), to_record(self.theta))
        (reply,) = self.sums.send_and_receive([Message(content, FEDERATION, "train")])
        assert reply.metadata.src_node_id == FEDERATION
        return unpack_sum(reply.content)

    def sums_of(self, places, order=None):
        """The plain sum of each of some nodes."""
        found = []
        for place in places:
            node = FIRST_NODE_ID + place
            own = replace(order or self.order(), clients=self.groups[node])
            content = pack_order(own, to_record(self.theta))
            (reply,) = self.plain.send_and_receive([Message(content, node, "train")])
            found.append(unpack_sum(reply.content))
        return found

    def expect(self, found, places, order=None, step=1e-11):
        """Compare a sum with the plain one of some nodes."""
        parts = self.sums_of(places, order)
        for name in found.total:
            expected = sum(dense_change(part.total[name]) for part in parts)
            assert expected.any() or not len(parts)
            np.testing.assert_allclose(found.total[name], expected, rtol=0, atol=step)
        for count in ("clients", "weight", "examples", "loss", "losses"):
            assert getattr(found, count) == pytest.approx(
                sum(getattr(part, count) for part in parts), abs=1e-5
            )


class Dialogue:
    """A session of some nodes, step by step, without a grid."""

    def __init__(self, made, certified=False):
        self.nodes = [node_of(context) for context in made.grid.contexts]
        self.authority = Authority.create("test")
        for place, node in enumerate(self.nodes if certified else ()):
            node.identity, node.run = self.identity(f"node-{place}"), "run"
        replies = [secure.channel_key(node) for node in self.nodes]
        channels = [reply.key for reply in replies]
        counts = [len(made.groups[FIRST_NODE_ID + place]) for place in range(len(channels))]
        quorum = made.experiment.secure_aggregation.quorum(len(channels))
        largest = made.sums.settings.largest
        bits = session_bits(made.order().protection, sum(counts), len(counts), largest)
        training = digest_of(made.order(), made.theta)
        self.session = Session(
            channels, quorum, bits, counts, training, [r.proof for r in replies if certified]
        )
        self.share_orders = self.session.share_orders()
        self.made = made

    def identity(self, name, authority=None):
        issued = (authority or self.authority).issue(name)
        judge = self.authority.issued.certificate
        return Identity(issued.key, issued.certificate, judge)

    def deal(self):
        self.session.dealt = {
            p: secure.share(self.nodes[p], order) for p, order in self.share_orders.items()
        }
        self.mask_orders = self.session.mask_orders()
        return self

    def train(self, place, masking=None, theta=None, **changes):
        clients = self.made.groups[FIRST_NODE_ID + place]
        masking = masking or self.mask_orders[place]
        order = replace(self.made.order(), clients=clients, secure=masking, **changes)
        return secure.masked_sum(self.nodes[place], theta or self.made.theta, order)

    def unmask(self, place, *survivors):
        flags = bytes(other in survivors for other in range(len(self.nodes)))
        return secure.unmask(self.nodes[place], UnmaskOrder(self.session.identifier, flags))


@pytest.fixture
def federation(tiny_experiment, tmp_path):
    return lambda nodes, **settings: Federation(tiny_experiment(), tmp_path, nodes, **settings)


@pytest.fixture
def dialogue(federation):
    return lambda nodes=3, certified=False, **settings: Dialogue(
        federation(nodes, **settings), certified
    )
