# SPDX-License-Identifier: Apache-2.0
"""Nodes under secure aggregation refuse what would reveal a sum of their own to the server."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Message

from clients import secure
from clients.app import node_of
from clients.steps.sgd import Sgd
from clients.storage import SessionSecrets
from fedrec.errors import ClientError, RefusalError
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import pack_order
from fedrec.protocol.secure import SEALED_BYTES, MaskOrder, counted, listed, pieces, unlisted
from fedrec.protocol.serialization import to_record
from fedrec.protocol.updates import dense_change
from fedrec.secure import keys as masks
from fedrec.secure.identity import Identity
from server.nodes import Roster
from simulations.deployment.layout import Authority
from simulations.engines.grid import FIRST_NODE_ID


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
    talk.session.dealt = {p: secure.share(talk.nodes[p], talk.share_orders[p]) for p in (0, 1)}
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
        expected = sum(dense_change(part.total[name]) for part in made.sums_of(range(3), others))
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
    content = pack_order(masked, to_record(made.theta))
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
    talk.session.dealt = {
        place: secure.share(talk.nodes[place], order) for place, order in orders.items()
    }
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
    talk.session.dealt = {p: secure.share(talk.nodes[p], o) for p, o in orders.items()}
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


def test_attack_the_server_answers_in_the_name_of_other_nodes(dialogue):
    """With the server's own channel keys: unsigned, self-signed, or signed by an invented node."""
    talk = dialogue(certified=True)
    order = talk.share_orders[0]
    own = X25519PrivateKey.generate()
    key, channels, proofs = masks.public_of(own), pieces(order.channels, 32), unlisted(order.proofs)
    statement = secure._statement(talk.nodes[0], key)
    server = talk.authority.issue("localhost", ["localhost"])
    false_server = Identity(server.key, server.certificate, talk.authority.issued.certificate)
    unknown, twin = (
        talk.identity("node-1", Authority.create(name)) for name in ("another", "test")
    )
    forged = {
        "another's": (proofs[1], "not signed by its node"),
        "a server's certificate": (false_server.proof(statement), "not for use by a node"),
        "one of an authority of that name": (twin.proof(statement), "not signed by the authority"),
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
