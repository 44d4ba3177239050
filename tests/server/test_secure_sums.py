# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation with nodes in this process: the result is the plain sum for all dropouts, and
nothing else is revealed."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context, Error, Message, RecordDict

from clients import secure
from clients.app import app, node_of
from clients.steps.sgd import Sgd
from clients.storage import SessionSecrets
from fedrec.errors import ClientError, ExperimentError, RefusalError
from fedrec.experiment.loading import load
from fedrec.privacy.protection import Protection
from fedrec.protocol.messages import (
    INITIAL,
    SECURE_SHARES,
    SECURE_UNMASK,
    pack_channel,
    pack_masked,
    pack_sum,
    pack_train,
    pack_words,
    unpack_channel,
    unpack_parameters,
    unpack_sum,
    unpack_train,
    unpack_words,
)
from fedrec.protocol.orders import TrainOrder, TrainSum
from fedrec.protocol.secure import (
    SEALED_BYTES,
    MaskOrder,
    ShareReply,
    UnmaskOrder,
    UnmaskReply,
    counted,
    listed,
    pieces,
    unlisted,
)
from fedrec.protocol.serialization import from_the_network, to_record, zero_copy_arrays
from fedrec.protocol.updates import dense_change, network_bytes
from fedrec.secure import keys as masks
from fedrec.secure import vector
from fedrec.secure.identity import CERTIFICATE, KEY, Identity
from fedrec.secure.session import Session
from fedrec.secure.vector import digest_of, session_bits
from server.cohort import Roster, call_roster
from server.privacy.secure_sums import FEDERATION, secure_sums
from simulations.deployment.pki import Authority
from simulations.deployment.shards import cut
from simulations.engines.grid import FIRST_NODE_ID, contexts_of
from simulations.engines.serial import SerialGrid
from strategies.base import check_additive

STEPS = {SECURE_SHARES: "shares", "train": "train", SECURE_UNMASK: "unmask"}


class UnreliableGrid(SerialGrid):
    """Real nodes, some of which do not get a message, or whose replies are lost. All messages are
    recorded."""

    def __init__(self, experiment, output, nodes, folders=()):
        """With the folders of real nodes, or simulated ones."""
        configs = contexts_of(experiment.model_dump_json(), str(output), nodes)
        if folders:
            run = {"resolved": experiment.model_dump_json(), "run": "00ff" * 4}
            configs = [(settings_of(folder), run) for folder in folders]
        contexts = [
            Context(1, FIRST_NODE_ID + n, own, RecordDict(), config)
            for n, (own, config) in enumerate(configs)
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
    files = {"data": folder / "data.csv", "catalogue": folder / "catalogue.json", "join": folder}
    own = {"private-dir": folder / "state", **files}
    place = int(folder.name.removeprefix("node-"))
    return {"partition-id": place, "numbers": True, **{k: str(v) for k, v in own.items()}}


def certified(experiment, output, nodes):
    """Folders of real nodes, whose certificates are of one authority."""
    authority = Authority.create("test")
    folders = [output / f"node-{place}" for place in range(nodes)]
    for folder in folders:
        folder.mkdir()
        issued = authority.issue_node(folder.name)
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
        self.roster = call_roster(self.grid, timeout=60.0)
        self.sums = secure_sums(self.experiment, self.grid, self.roster)
        (fresh,) = self.plain.send_and_receive([Message(RecordDict(), FIRST_NODE_ID, INITIAL)])
        self.theta = {
            name: np.array(value) for name, value in unpack_parameters(fresh.content).items()
        }
        self.groups = dict(self.roster.for_training(self.roster.training))

    def order(self, protection=None, weighting="uniform"):
        step = {"name": self.experiment.step.name, **self.experiment.step.options}
        return TrainOrder(1, self.roster.training, weighting, step, protection=protection)

    def secure(self, order=None):
        content = pack_train(to_record(self.theta), order or self.order())
        (reply,) = self.sums.send_and_receive([Message(content, FEDERATION, "train")])
        assert reply.metadata.src_node_id == FEDERATION
        return unpack_sum(reply.content)

    def sums_of(self, places, order=None):
        """The plain sum of each of some nodes."""
        found = []
        for place in places:
            node = FIRST_NODE_ID + place
            own = replace(order or self.order(), clients=self.groups[node])
            content = pack_train(to_record(self.theta), own)
            (reply,) = self.plain.send_and_receive([Message(content, node, "train")])
            found.append(unpack_sum(reply.content))
        return found

    def expect(self, found, places, order=None, step=1e-11):
        """Compare a sum with the plain one of some nodes."""
        parts = self.sums_of(places, order)
        for name in found.total:
            expected = sum(dense_change(part.total[name], self.theta[name]) for part in parts)
            assert expected.any() or not len(parts)
            np.testing.assert_allclose(found.total[name], expected, rtol=0, atol=step)
        for count in ("clients", "weight", "examples", "loss", "losses", "unclipped"):
            assert getattr(found, count) == pytest.approx(
                sum(getattr(part, count) for part in parts), abs=1e-5
            )


@pytest.fixture
def federation(tiny_experiment, tmp_path):
    return lambda nodes, **settings: Federation(tiny_experiment(), tmp_path, nodes, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_sum_is_the_plain_sum(federation, nodes, weighting):
    made = federation(nodes)
    order = made.order(weighting=weighting)
    found = made.secure(order)
    assert found.clients == len(made.roster.training) == 18
    made.expect(found, range(nodes), order)
    made.expect(made.secure(order), range(nodes), order)  # and in a session after it


DROPS = {
    "before shares": ("deaf", [(1, "shares")], 4),
    "shares not heard": ("mute", [(1, "shares")], 4),
    "before its masked sum": ("deaf", [(1, "train")], 4),
    "masked sum not heard": ("mute", [(1, "train")], 4),
    "before unmasking": ("deaf", [(1, "unmask")], 5),
    "unmasking not heard": ("mute", [(1, "unmask")], 5),
    "one before and one after": ("deaf", [(1, "train"), (4, "unmask")], 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("drop", DROPS)
def test_nodes_that_drop_out_are_taken_off(federation, drop):
    made = federation(5, threshold=0.6)
    how, places, _ = DROPS[drop]
    getattr(made.grid, how).update(places)
    lost = {place for place, step in places if step != "unmask"}
    survivors = [place for place in range(5) if place not in lost]
    assert len(survivors) == DROPS[drop][2]
    found = made.secure()
    made.expect(found, survivors)
    made.grid.deaf.clear()
    made.grid.mute.clear()
    made.expect(made.secure(), range(5))  # no node is lost permanently


def test_an_offline_node_is_not_expected_to_answer(federation):
    made = federation(4)
    made.grid.away.update({0, 3})
    found = made.secure()
    made.expect(found, [1, 2])
    assert {place for place, step, _ in made.grid.sent if step == "shares"} == {1, 2}


def test_while_too_few_are_there_it_is_waited_for_them(federation):
    made = federation(3)
    made.grid.away.update({0, 1, 2})
    looked = []

    def sleep(seconds):
        looked.append(seconds)
        if len(looked) == 4:
            made.grid.away.clear()

    made.sums._sleep = sleep
    made.expect(made.secure(), range(3))
    assert len(looked) == 4
    made.grid.away.update({0, 1})
    made.sums._sleep = looked.append
    assert made.secure().clients == 0
    timeout = made.experiment.engine.timeout
    assert timeout <= sum(looked[4:]) <= timeout + 2


@pytest.mark.parametrize("step", ["shares", "train", "unmask"])
def test_below_the_quorum_there_is_no_sum(federation, step, caplog):
    made = federation(3)
    made.grid.deaf.update({(0, step), (2, step)})
    with caplog.at_level(logging.WARNING, "fedrec"):
        found = made.secure()
    assert "round 1 has no sum" in caplog.text and "2 must complete" in caplog.text
    assert found.clients == found.weight == found.examples == found.losses == 0
    assert set(found.total) == set(made.theta)
    assert not any(value.any() for value in found.total.values())
    unmasking = [entry for entry in made.grid.sent if entry[1] == "unmask"]
    assert bool(unmasking) == (step == "unmask")  # shares are not even requested


def test_more_failures_than_are_tolerated_end_the_run(federation):
    made = federation(4, max_failures=0.2)
    made.grid.deaf.add((3, "train"))
    with pytest.raises(ClientError, match="1 of 4 nodes failed"):
        made.secure()


def test_under_distributed_noise_the_sum_has_the_same_noise(federation):
    made = federation(3)
    names = tuple(made.theta)
    order = made.order(Protection(0.5, 2, names, noise_scale=0.3, silent=True))
    found = made.secure(order)
    made.expect(found, range(3), order)
    assert found.losses == found.examples == 0 and found.clients == 18
    spread = np.concatenate([value.ravel() for value in found.total.values()]).std()
    assert spread > 0.3 * np.sqrt(18) * 0.8


PRODUCTS = {
    "gram": (
        "item.weights",
        {"model": {"name": "item-weights", "items": 20}, "step": {"name": "gram"}},
    ),
    "als": ("user.gram", {"model": {"name": "ials", "factors": 5}, "step": {"name": "als"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("system", PRODUCTS)
def test_of_products_one_half_is_masked(tiny_experiment, tmp_path, system, noise):
    """The same sum as without masks, from half of the numbers, which are the bytes counted."""
    name, table = PRODUCTS[system]
    made = Federation({**tiny_experiment(), **table}, tmp_path, 3)
    shapes = {name: value.shape for name, value in made.theta.items()}
    names = tuple(other for other in shapes if other != "user.factors")
    protection = Protection(2.0, 2, names, noise_scale=noise) if noise else None
    order = made.order(protection)
    found = made.secure(order)
    for other, expected in _sums(made, order).items():
        np.testing.assert_allclose(found.total[other], expected, rtol=0, atol=1e-5)
    side = shapes[name][0]
    rest = sum(np.prod(shapes[other], dtype=int) for other in found.total if other != name)
    numbers = side * (side + 1) // 2 + rest
    sent = [
        network_bytes(zero_copy_arrays(reply.content["arrays"]))
        for _, step, reply in made.grid.heard
        if step == "train"
    ]
    assert sent == [8 * (numbers + 6)] * 3
    assert found.sent == found.clients * sent[0]


def _sums(made, order):
    parts = made.sums_of(range(3), order)
    return {
        name: sum(dense_change(part.total[name], made.theta[name]) for part in parts)
        for name in parts[0].total
    }


def test_what_a_node_answers_is_masked_and_nothing_else(federation):
    made = federation(3)
    made.secure()
    made.secure()
    first, second = [
        [
            np.concatenate(list(zero_copy_arrays(reply.content["arrays"]).values()))
            for _, step, reply in made.grid.heard
            if step == "train"
        ][turn : turn + 3]
        for turn in (0, 3)
    ]
    shapes = vector.shapes_of(made.theta, None)
    for place, part in enumerate(made.sums_of(range(3))):
        bits = session_bits(made.order().protection, 18, 3, made.sums.settings.largest)
        bare = vector.encoded(part, made.theta, shapes, bits, 3)
        assert (first[place] != bare).mean() > 0.99
        assert (first[place] != second[place]).mean() > 0.99
        counts = np.bincount((first[place] - bare).view(np.uint8), minlength=256)
        assert counts.std() < 3 * np.sqrt(counts.mean())
    for _, step, reply in made.grid.heard:
        if step == "train":
            assert list(reply.content) == ["arrays"]
            assert list(reply.content["arrays"]) == ["masked"]


FORGERIES = {
    "a masked sum of another length": (
        "train",
        lambda content: pack_masked(np.zeros(9, np.uint64)),
    ),
    "a bare sum": ("train", lambda content: pack_sum(TrainSum({}, 1, 1.0, 1, 0.0, 0))),
    "keys of another length": ("shares", lambda content: pack_words(ShareReply(b"", b"", b""))),
    "nothing": ("shares", lambda content: RecordDict()),
    "shares of another length": ("unmask", lambda content: pack_words(UnmaskReply(b"1"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_node_that_answers_nonsense_counts_as_one_that_did_not(federation, forgery):
    made = federation(4, threshold=0.6)
    step, forged = FORGERIES[forgery]
    made.grid.forged[2, step] = forged
    made.expect(made.secure(), [0, 1, 3] if step != "unmask" else range(4))


def test_nodes_that_are_not_in_a_sum_are_recorded(federation):
    """One that is offline, one whose answer is malformed, one whose sum is lost; and all of a round
    without a sum."""
    made = federation(5, threshold=0.51)
    made.grid.away.add(0)
    made.grid.forged[2, "shares"] = lambda content: RecordDict()
    made.expect(made.secure(), [1, 3, 4])
    row = made.sums.dropped.columns()
    assert row["dropped-replies"] == 2
    assert "node 2: no reply before the deadline" in row["dropped-or-bounded"]
    assert "node 4: failed: the reply to query.secure_shares" in row["dropped-or-bounded"]
    made.grid.deaf.update({(place, "unmask") for place in (1, 3)})
    assert made.secure().clients == 0
    row = made.sums.dropped.columns()
    assert row["dropped-replies"] == 5 and row["dropped-or-bounded"].count("has no sum") == 3


def test_false_shares_are_noticed(federation, caplog):
    made = federation(3)
    made.grid.forged[0, "unmask"] = lambda content: pack_words(UnmaskReply(bytes(range(48))))
    with caplog.at_level(logging.WARNING, "fedrec"):
        assert made.secure().clients == 0
    assert "do not match" in caplog.text


def test_a_node_that_lost_its_secrets_is_met_again(federation, tmp_path):
    made = federation(3)
    made.secure()
    node_of(made.grid.contexts[1]).session_secrets.file.unlink()
    made.expect(made.secure(), [0, 2])
    made.expect(made.secure(), range(3))


def test_keys_are_never_printed(federation, caplog):
    made = federation(3)
    with caplog.at_level(logging.DEBUG):
        made.grid.deaf.add((1, "train"))
        made.secure()
    seen = (
        repr(
            [
                (content, reply)
                for _, _, content in made.grid.sent
                for _, _, reply in made.grid.heard
            ]
        )
        + caplog.text
    )
    for context in made.grid.contexts:
        key = node_of(context).session_secrets.channel(b"none")
        assert len(key) == 32 and key.hex() not in seen and repr(key)[2:-1] not in seen


def test_two_nodes_are_needed(federation):
    with pytest.raises(ExperimentError, match=r"too few nodes(.*\n)*.*engine.nodes = 2"):
        federation(1)
    with pytest.raises(ExperimentError, match="at least 4 nodes"):
        federation(3, **{"least-nodes": 4})


@pytest.mark.parametrize("changes", [{"clients": None}, {"each": True}])
def test_orders_for_more_than_a_sum_are_refused(federation, changes):
    made = federation(2)
    with pytest.raises(ExperimentError, match="more than a sum"):
        made.secure(replace(made.order(), **changes))


def test_a_node_gives_no_bare_sum_in_such_a_run(federation):
    made = federation(2)
    for order in (made.order(), replace(made.order(), clients=None)):
        content = pack_train(to_record(made.theta), order)
        (reply,) = made.grid.send_and_receive([Message(content, FIRST_NODE_ID, "train")])
        assert reply.has_error() and "requests an unmasked sum" in reply.error.reason


class Dialogue:
    """A session of some nodes, step by step, without a grid."""

    def __init__(self, made, certified=False):
        self.nodes = [node_of(context) for context in made.grid.contexts]
        self.authority = Authority.create("test")
        for place, node in enumerate(self.nodes if certified else ()):
            node.identity, node.run = self.identity(f"node-{place}"), "run"
        channels, proofs = zip(*(secure.channel_key(node) for node in self.nodes), strict=True)
        counts = [len(made.groups[FIRST_NODE_ID + place]) for place in range(len(channels))]
        quorum = made.experiment.secure_aggregation.quorum(len(channels))
        largest = made.sums.settings.largest
        bits = session_bits(made.order().protection, sum(counts), len(counts), largest)
        training = digest_of(made.order(), made.theta)
        self.session = Session(
            channels, quorum, bits, counts, training, proofs if certified else ()
        )
        self.share_orders = self.session.share_orders()
        self.made = made

    def identity(self, name, authority=None):
        issued = (authority or self.authority).issue_node(name)
        judge = self.authority.issued.certificate
        return Identity(issued.key, issued.certificate, judge)

    def deal(self):
        self.session.take_shares(
            {p: secure.share(self.nodes[p], order) for p, order in self.share_orders.items()}
        )
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
def dialogue(federation):
    return lambda nodes=3, certified=False, **settings: Dialogue(
        federation(nodes, **settings), certified
    )


def test_a_node_never_gives_both_kinds_of_shares(dialogue):
    """It answers one list of survivors; a second request, with the same list or another one, is
    refused."""
    talk = dialogue().deal()
    talk.train(0)
    told = pieces(talk.unmask(0, 0, 1).shares, 16)
    assert len(set(told)) == 3
    for survivors in ((0, 2), (0, 1), (0, 1, 2)):
        with pytest.raises(ClientError, match="taken before"):
            talk.unmask(0, *survivors)


@pytest.mark.parametrize("survivors", [(0,), (1, 2), (), (0, 1, 2)])
def test_a_node_refuses_a_list_of_survivors_that_cannot_be(dialogue, survivors):
    """Too few survivors, without itself, none, or with a node that sent no shares; it still answers
    a valid list afterwards."""
    talk = dialogue()
    talk.session.take_shares({p: secure.share(talk.nodes[p], talk.share_orders[p]) for p in (0, 1)})
    talk.mask_orders = talk.session.mask_orders()
    talk.train(0)
    with pytest.raises(ClientError, match="invalid secure-aggregation message"):
        talk.unmask(0, *survivors)
    assert talk.unmask(0, 0, 1).shares[32:] == bytes(16)


def test_a_node_masks_one_sum_per_session(dialogue):
    talk = dialogue().deal()
    talk.train(0)
    with pytest.raises(ClientError, match="taken before"):
        talk.train(0)


def test_a_node_refuses_what_is_not_meant_for_it(dialogue):
    talk = dialogue().deal()
    order = talk.mask_orders[0]
    with pytest.raises(ClientError, match="not from its stated sender"):
        talk.train(0, replace(order, sealed=talk.mask_orders[1].sealed))
    swapped = pieces(order.mask_keys, 32)
    unknown = masks.public_of(masks.key_of(bytes(16)))
    with pytest.raises(ClientError, match="mask key differs"):
        talk.train(0, replace(order, mask_keys=b"".join([swapped[0], unknown, swapped[2]])))
    with pytest.raises(ClientError, match="1 of 3 nodes"):
        talk.train(0, replace(order, mask_keys=swapped[0] + bytes(64)))
    with pytest.raises(ClientError, match="another session"):
        talk.train(0, replace(order, session=bytes(16)))
    assert talk.train(0).dtype == np.uint64  # refused requests have no effect


def test_a_node_refuses_sessions_that_are_not_sound(dialogue):
    talk = dialogue(**{"least-nodes": 3})
    order = talk.share_orders[0]
    keys = pieces(order.channels, 32)
    for channels in (
        keys[0] + keys[1],
        keys[0] + keys[1] + keys[1],
        keys[1] + keys[0] + keys[2],
        b"",
        bytes(31),
    ):
        with pytest.raises(ClientError, match="invalid secure-aggregation message"):
            secure.share(talk.nodes[0], replace(order, channels=channels))
    with pytest.raises(ClientError, match="invalid secure-aggregation message"):
        secure.share(talk.nodes[0], replace(order, session=b"short"))
    talk.nodes[0].least_nodes = 4
    with pytest.raises(ClientError, match="this node's owner requires at least 4"):
        secure.share(talk.nodes[0], order)


def test_a_sum_that_is_too_large_is_refused_by_its_node(dialogue):
    talk = dialogue(largest=1e-9).deal()
    with pytest.raises(ClientError, match=r"too large(.*\n)*.*secure-aggregation.largest"):
        talk.train(0)


def test_a_sum_that_is_too_large_counts_as_zero_if_its_node_is_real(federation):
    """An error would tell that the node's sum is large."""
    made = federation(3, real=True, largest=1e-9)
    found = made.secure()
    assert found.clients == 18 and found.weight == 0
    assert not any(value.any() for value in found.total.values())


def test_a_client_that_fails_in_a_session_of_real_nodes_counts_as_zero(federation, monkeypatch):
    """No node drops out, and the sum is that of the others."""
    made = federation(3, real=True)
    every = made.secure()
    failing, batches = int(made.roster.training[4]), Sgd.batches
    made.expect(every, range(3), step=1e-6)

    def work(self, data, random):
        if data.client == failing:
            raise ZeroDivisionError
        return batches(self, data, random)

    monkeypatch.setattr(Sgd, "batches", work)
    found = made.secure(replace(made.order(), round=2))
    assert (found.clients, found.weight) == (18, 18) and found.examples < every.examples
    monkeypatch.undo()
    others = replace(made.order(), round=2)
    made.groups = {n: own[own != failing] for n, own in made.groups.items()}
    for name in found.total:
        expected = sum(
            dense_change(part.total[name], made.theta[name])
            for part in made.sums_of(range(3), others)
        )
        np.testing.assert_allclose(found.total[name], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_attack_parameters_in_a_session_by_which_nodes_with_an_item_would_drop_out(
    federation, value
):
    """All real nodes refuse them with one text, and still take part in the session as agreed."""
    made = federation(3, real=True)
    sound = made.theta
    table = next(name for name in sound if name.startswith("item"))
    made.theta = {**sound, table: sound[table].copy()}
    made.theta[table][3] = value
    assert made.secure().clients == 0
    errors = {reply.error.reason for _, step, reply in made.grid.heard if step == "train"}
    assert len(errors) == 1 and "invalid parameters in an order" in errors.pop()
    made.theta = sound
    assert made.secure().clients == 18


@pytest.mark.parametrize("lie", [{"round": 9}, {"step": {"name": "sgd", "epochs": 77}}])
def test_attack_an_order_in_a_session_that_is_not_of_the_experiment(federation, lie):
    """Real nodes refuse it before they look at data; the session has no sum."""
    made = federation(3, real=True)
    assert made.secure(replace(made.order(), **lie)).clients == 0
    replies = [reply for _, step, reply in made.grid.heard if step == "train"]
    assert len(replies) == 3 and len({reply.error.reason for reply in replies}) == 1
    assert not any(node_of(context).memory.spent() for context in made.grid.contexts)


def test_a_plain_experiment_has_no_sessions(federation, identity):
    made = federation(2)
    plain = node_of(made.plain.contexts[0])
    with pytest.raises(ClientError, match="no secure aggregation"):
        secure.channel_key(plain)
    masked = replace(made.order(), secure=MaskOrder(bytes(16), b"", b""))
    content = pack_train(to_record(made.theta), masked)
    (reply,) = made.plain.send_and_receive([Message(content, FIRST_NODE_ID, "train")])
    assert reply.has_error()


def test_attack_others_have_no_clients(dialogue):
    """The sum of a session in which only one node has clients is that node's own."""
    talk = dialogue()
    order = talk.share_orders[0]
    with pytest.raises(RefusalError, match="nodes without clients in the sum"):
        secure.share(talk.nodes[0], replace(order, counts=counted([6, 0, 0])))
    talk.deal()
    nobody = replace(talk.made.order(), clients=np.empty(0, np.int64), secure=talk.mask_orders[1])
    # although the others were given six
    with pytest.raises(RefusalError, match="clients differ from the 6"):
        secure.masked_sum(talk.nodes[1], talk.made.theta, nobody)


def test_attack_others_clients_take_part_no_more(dialogue):
    """Because they are not hosted there, or have reached their owner's limit of rounds."""
    talk = dialogue().deal()
    talk.nodes[1].real = True
    talk.nodes[1].accept = lambda order: replace(order, clients=order.clients[:0])
    with pytest.raises(RefusalError, match="0 clients of this node take part"):
        talk.train(1)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [-200, -1, 0, 20, 41, 100, 101, 2**40])
def test_attack_the_point_stands_where_nothing_is_left_of_the_others(dialogue, bits):
    talk = dialogue()
    assert talk.session.bits == 41
    for place, order in talk.share_orders.items():
        if bits == 41 or place == 0:
            talk.session.dealt[place] = secure.share(talk.nodes[place], order)
            continue
        told = replace(order, bits=bits)
        if not 0 <= bits <= 100:
            with pytest.raises(RefusalError, match="binary digits"):
                secure.share(talk.nodes[place], told)
            return
        talk.session.dealt[place] = secure.share(talk.nodes[place], told)
    talk.mask_orders = talk.session.mask_orders()
    if bits == 41:
        assert talk.train(1).dtype == np.uint64
        return
    for place in range(3):
        with pytest.raises(RefusalError, match=f"{bits} binary digits instead|stated sender"):
            talk.train(place)


def test_attack_nodes_get_different_terms(dialogue):
    """A node that was given other numbers of clients cannot decrypt the others' messages, nor they
    its messages."""
    talk = dialogue()
    lie = replace(talk.share_orders[1], counts=counted([5, 6, 6]))
    orders = {**talk.share_orders, 1: lie}
    talk.session.take_shares(
        {place: secure.share(talk.nodes[place], order) for place, order in orders.items()}
    )
    talk.mask_orders = talk.session.mask_orders()
    for place in range(3):
        with pytest.raises(RefusalError, match="not from its stated sender"):
            talk.train(place)


def test_attack_the_others_train_something_else(dialogue):
    """Parameters under which the others learn nothing, or a step that does nothing, would leave one
    node's update as the sum."""
    talk = dialogue().deal()
    order = talk.made.order()
    theta = talk.made.theta
    name = sorted(theta)[0]
    without = {n: v for n, v in theta.items() if n != name}
    lies = [
        {"theta": {n: np.zeros_like(v) for n, v in theta.items()}},
        {"theta": {**theta, name: np.nextafter(theta[name], np.float32(np.inf))}},
        {"theta": {**theta, name: theta[name].astype(np.float64)}},
        {"theta": {**theta, name: theta[name].reshape(1, *theta[name].shape)}},
        {"theta": {**without, f"{name}x": theta[name]}},
        {"round": 2},
        {"weighting": "examples"},
        {"step": {**order.step, "epochs": 0}},
        {"step": None},
        {"overrides": {"proximal-mu": 1e9}},
        {"protection": Protection(1e-9, 2, tuple(theta))},
    ]
    for lie in lies:
        with pytest.raises(RefusalError, match=r"agreed on|binary digits"):
            talk.train(1, **lie)
    told = replace(talk.share_orders[2], training=bytes(32))
    talk.session.identifier = bytes(16)
    orders = {**talk.session.share_orders(), 2: replace(told, session=bytes(16))}
    talk.session.take_shares({p: secure.share(talk.nodes[p], o) for p, o in orders.items()})
    talk.mask_orders = talk.session.mask_orders()
    for place in range(2):  # which were told the truth, and another node was not
        with pytest.raises(RefusalError, match="not from its stated sender"):
            talk.train(place)


def test_attack_a_session_is_repeated(dialogue):
    """With one nonce per key, the difference of two sealed messages of one session would reveal
    that of their contents."""
    talk = dialogue().deal()
    first = pieces(talk.session.dealt[0].sealed, SEALED_BYTES)
    with pytest.raises(RefusalError, match="begun before"):
        secure.share(talk.nodes[0], talk.share_orders[0])
    # another process
    talk.nodes[0].session_secrets = SessionSecrets(talk.nodes[0].session_secrets.file)
    with pytest.raises(RefusalError, match="begun before"):
        secure.share(talk.nodes[0], talk.share_orders[0])
    talk.session.identifier = bytes(16)
    other = secure.share(talk.nodes[0], talk.session.share_orders()[0])
    assert not set(first[1:]) & set(pieces(other.sealed, SEALED_BYTES)[1:])


def test_secrets_of_very_many_nodes_are_read_again(tmp_path):
    """They are longer than any message may be."""
    kept = SessionSecrets(tmp_path / "session.sqlite")
    secrets = {f"share {node}": bytes(200) for node in range(4000)}
    kept.begin(bytes(16), secrets)
    assert kept.look(bytes(16)) == secrets


def test_nodes_that_prove_themselves_are_believed(dialogue):
    talk = dialogue(certified=True).deal()
    masked = {place: talk.train(place) for place in range(3)}
    told = {place: talk.unmask(place, 0, 1, 2) for place in range(3)}
    assert talk.session.unmasked(masked, told) is not None


def test_attack_the_server_answers_in_the_name_of_other_nodes(dialogue):
    """With the server's own channel keys: unsigned, self-signed, or signed by an invented node."""
    talk = dialogue(certified=True)
    order = talk.share_orders[0]
    own = X25519PrivateKey.generate()
    key, channels, proofs = masks.public_of(own), pieces(order.channels, 32), unlisted(order.proofs)
    statement = secure._statement(talk.nodes[0], key)
    server = talk.authority.issue(["localhost"])
    false_server = Identity(server.key, server.certificate, talk.authority.issued.certificate)
    unknown, twin = (
        talk.identity("node-1", Authority.create(name)) for name in ("another", "test")
    )
    forged = {
        "another's": (proofs[1], "not signed by its node"),
        "a server's certificate": (false_server.proof(statement), "not for use by a node"),
        "one of an authority of that name": (
            twin.proof(statement),
            "not signed by the authority",
        ),
        "another authority's": (unknown.proof(statement), "not signed by the authority"),
        "nothing": (b"", "needs a certificate and a signature"),
        "rubbish": (b"\x00" * 50, "."),
        "one node twice": (talk.nodes[2].identity.proof(statement), "3 channel keys from 2 nodes"),
        "another run": (
            talk.nodes[1].identity.proof(statement.replace(b"run", b"ran")),
            "not signed by its node",
        ),
    }
    for proof, why in forged.values():
        told = listed([proofs[0], proof, proofs[2]])
        lie = replace(order, channels=b"".join([channels[0], key, channels[2]]), proofs=told)
        with pytest.raises(RefusalError, match=why):
            secure.share(talk.nodes[0], lie)
    with pytest.raises(RefusalError, match="without a valid proof"):
        secure.share(talk.nodes[0], replace(order, proofs=b""))
    assert secure.share(talk.nodes[0], order)


def test_orders_travel_whole():
    order = TrainOrder(3, np.array([1, 2]), secure=MaskOrder(b"s" * 16, b"k" * 64, b"x" * 160))
    _, found = unpack_train(pack_train(to_record({}), order))
    assert found.secure == order.secure
    _, bare = unpack_train(pack_train(to_record({}), replace(order, secure=None)))
    assert bare.secure is None
    with pytest.raises(ValueError, match="'session' is not of type bytes"):
        unpack_words(UnmaskOrder, pack_words(UnmaskReply(b"1")))
    with pytest.raises(ValueError, match="32 bytes"):
        unpack_channel(pack_channel(b"short"))
    assert unpack_channel(pack_channel(bytes(32), b"proof")) == (bytes(32), b"proof")


def test_strategies_that_are_not_additive_are_refused():
    from flwr.serverapp.strategy import FedAvg

    with pytest.raises(
        ExperimentError, match=r"'FedAvg' needs more than the sum(.*\n)*.*'reptile'"
    ):
        check_additive(FedAvg())


@pytest.fixture
def repeated(federation):
    """Real nodes, which keep their clients, and an order for all of these but one of node 0."""

    def made(nodes, **settings):
        found = federation(nodes, **settings)
        for context in found.grid.contexts:
            node_of(context).real = True
        presences = tuple(replace(presence, work=None) for presence in found.roster.presences)
        found.roster = found.sums.roster = Roster(found.roster.nodes, presences)
        found.groups = dict(found.roster.for_training(found.roster.training))
        order, left_out = found.order(), found.groups[FIRST_NODE_ID][0]
        return found, replace(order, clients=order.clients[order.clients != left_out])

    return made


def test_attack_a_round_is_repeated_with_one_client_fewer(repeated, caplog):
    """The difference of the two sums would be the update of that client."""
    made, fewer = repeated(3)
    assert made.secure().clients == 18
    with caplog.at_level(logging.WARNING, "fedrec"):
        found = made.secure(fewer)
    assert found.clients == 0 and not any(value.any() for value in found.total.values())
    assert "node 2 failed: a second, different sum of round 1" in caplog.text
    assert made.secure(replace(fewer, round=2)).clients == 17


def test_attack_a_round_is_repeated_without_a_node(repeated):
    """Neither a node that is not asked again nor one that is said to have dropped out is exposed by
    the difference."""
    made, _ = repeated(4, threshold=0.6)
    assert made.secure().clients == 18
    made.grid.mute.add((3, "train"))
    assert made.secure().clients == 0
    made.grid.mute.clear()
    made.grid.away.add(3)
    assert made.secure().clients == 0


def test_attack_a_sum_that_was_not_unmasked_is_repeated_without_a_node(repeated):
    """Nodes record whom they mask a sum with, as they do not learn whether others unmask it."""
    made, _ = repeated(4, threshold=0.6)
    made.grid.deaf.update({(0, "unmask"), (1, "unmask")})
    assert made.secure().clients == 0
    made.grid.deaf.clear()
    made.grid.away.add(3)
    assert made.secure().clients == 0


def test_a_resumed_run_repeats_a_round_with_the_same_nodes_and_clients(repeated):
    made, _ = repeated(3)
    first, second = made.secure(), made.secure()
    assert first.clients == second.clients == 18
    for name, value in first.total.items():
        np.testing.assert_array_equal(second.total[name], value)


def test_with_noise_of_the_clients_a_round_may_be_repeated_with_others(repeated):
    made, fewer = repeated(3)
    noise = Protection(0.5, 2, tuple(made.theta), noise_scale=0.3)
    assert made.secure(made.order(noise)).clients == 18
    assert made.secure(replace(fewer, protection=noise)).clients == 17
