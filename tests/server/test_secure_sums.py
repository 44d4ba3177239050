# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation with nodes in this process: the result is the plain sum for all dropouts, and
nothing else is revealed."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from clients.app import node_of
from fedrec.errors import ClientError, ExperimentError
from fedrec.privacy.clipping import Protection
from fedrec.protocol.messages import TrainSum, pack_masked, pack_order, pack_sum
from fedrec.protocol.secure import ShareReply, UnmaskReply
from fedrec.protocol.serialization import to_record, zero_copy_arrays
from fedrec.protocol.updates import dense_change, network_bytes
from fedrec.secure import vector
from fedrec.secure.vector import session_bits
from simulations.engines.grid import FIRST_NODE_ID
from tests.server.conftest import Federation


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


def test_while_too_few_are_there_it_is_waited_for_them(federation, monkeypatch):
    made = federation(3)
    made.grid.away.update({0, 1, 2})
    looked = []

    def sleep(seconds):
        looked.append(seconds)
        if len(looked) == 4:
            made.grid.away.clear()

    monkeypatch.setattr("server.privacy.secure_sums.time.sleep", sleep)
    made.expect(made.secure(), range(3))
    assert len(looked) == 4
    made.grid.away.update({0, 1})
    monkeypatch.setattr("server.privacy.secure_sums.time.sleep", looked.append)
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
    assert sent == [8 * (numbers + 5)] * 3
    assert found.sent == found.clients * sent[0]


def _sums(made, order):
    parts = made.sums_of(range(3), order)
    return {name: sum(dense_change(part.total[name]) for part in parts) for name in parts[0].total}


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
    "keys of another length": ("shares", lambda content: pack_order(ShareReply(b"", b"", b""))),
    "nothing": ("shares", lambda content: RecordDict()),
    "shares of another length": ("unmask", lambda content: pack_order(UnmaskReply(b"1"))),
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
    row = made.sums.dropped.after_round(1, None)
    assert row["dropped-replies"] == 2
    assert "node 2: no reply before the deadline" in row["dropped-or-bounded"]
    assert "node 4: failed: the reply to query.secure_shares" in row["dropped-or-bounded"]
    made.grid.deaf.update({(place, "unmask") for place in (1, 3)})
    assert made.secure().clients == 0
    row = made.sums.dropped.after_round(1, None)
    assert row["dropped-replies"] == 5 and row["dropped-or-bounded"].count("has no sum") == 3


def test_false_shares_are_noticed(federation, caplog):
    made = federation(3)
    made.grid.forged[0, "unmask"] = lambda content: pack_order(UnmaskReply(bytes(range(48))))
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
        content = pack_order(order, to_record(made.theta))
        (reply,) = made.grid.send_and_receive([Message(content, FIRST_NODE_ID, "train")])
        assert reply.has_error() and "requests an unmasked sum" in reply.error.reason
