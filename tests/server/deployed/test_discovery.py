# SPDX-License-Identifier: Apache-2.0
"""Discovery of real nodes, and the first rounds with them."""

import stat
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID

from fedrec.errors import ClientError, EngineError, ExperimentError, RunError
from fedrec.protocol.messages import (
    Presence,
    TrainOrder,
    TrainSum,
    pack_arrays,
    pack_order,
    pack_presence,
    pack_sum,
)
from fedrec.protocol.serialization import for_the_network, from_record, to_record
from server.cohort import SampledCohorts
from server.deployed.discovery import Discovery, _read_roster, _write_roster, most_common_parameters
from server.deployed.federation import DeployedFederation, DeployedGrid, _check_registered
from server.nodes import DroppedReplies, answers

pytestmark = pytest.mark.usefixtures("identity")

# Real nodes: the roster, the owner of each client, and how a deployed grid treats offline nodes.


def presence(place, training, evaluated=()):
    return Presence(place, np.array(training, dtype=np.int64), np.array(evaluated, dtype=np.int64))


class Nodes:
    """A fake of Flower's grid with a simulated clock: nodes that reply with the contents of
    `answers`, after `delays` seconds, or not at all."""

    def __init__(self, answers, delays=None):
        self.answers, self.delays = dict(answers), dict(delays or {})
        self.away, self.silent = set(), set()
        self.now, self.pushed, self.waiting = 0.0, [], {}

    @property
    def asked(self):
        return [message.metadata.dst_node_id for message in self.pushed]

    def get_node_ids(self):
        return [node for node in self.answers if node not in self.away]

    def push_messages(self, messages):
        identifiers = []
        for message in messages:
            identifier = f"m{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = identifier
            self.pushed.append(message)
            node = message.metadata.dst_node_id
            if node not in self.silent:
                self.waiting[identifier] = (self.now + self.delays.get(node, 0.0), message)
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, identifiers):
        ready = [i for i in identifiers if i in self.waiting and self.now >= self.waiting[i][0]]
        return [self._reply(self.waiting.pop(identifier)[1]) for identifier in ready]

    def _reply(self, message):
        content = self.answers[message.metadata.dst_node_id]
        content = pack_presence(content) if isinstance(content, Presence) else content
        return Message(content, reply_to=message)

    def sleep(self, seconds):
        self.now += max(seconds, 0.001)

    def grid(self):
        return DeployedGrid(self, clock=lambda: self.now, sleep=self.sleep)


def discovery(nodes, file, timeout=5.0, **settings):
    return Discovery(nodes.grid(), file, timeout=timeout, sleep=nodes.sleep, **settings)


def test_late_nodes_are_asked_once_and_remembered(tmp_path):
    nodes = Nodes({7: presence(1, [4, 9], [4]), 3: presence(0, [5])})
    found = discovery(nodes, tmp_path / "roster.npz")
    assert (
        found.wait_for(2).nodes == (3, 7) and not found.refresh_roster() and len(nodes.pushed) == 2
    )
    nodes.answers[11] = presence(2**61, [2**61 + 1])
    assert found.refresh_roster()
    assert found.roster.training.tolist() == [4, 5, 9, 2**61 + 1]
    assert len(nodes.pushed) == 3
    groups = [
        (node, ids.tolist()) for node, ids in found.roster.by_node(np.array([4, 9, 2**61 + 1]))
    ]
    assert groups == [(7, [4, 9]), (11, [2**61 + 1])]
    nodes.away.add(7)  # offline nodes stay on the roster
    again = discovery(nodes, tmp_path / "roster.npz")
    assert again.wait_for(3).training.tolist() == found.roster.training.tolist()
    assert len(nodes.pushed) == 3


def test_a_client_id_belongs_to_the_first_node_and_to_none_of_two_at_once(tmp_path):
    nodes = Nodes({3: presence(0, [5, 6])})
    found = discovery(nodes, tmp_path / "r.sqlite")
    found.wait_for(1)
    nodes.answers |= {4: presence(1, [6, 7]), 8: presence(2, [7, 8], [5])}
    found.refresh_roster()
    training = [presence.training.tolist() for presence in found.roster.presences]
    assert dict(zip(found.roster.nodes, training, strict=True)) == {3: [5, 6], 4: [], 8: [8]}
    assert found.roster.evaluated.tolist() == []  # nor is another node's client evaluated on it


@pytest.mark.parametrize(
    "answer",
    [
        RecordDict(),
        RecordDict(
            {"arrays": ArrayRecord([np.zeros(3)]), "metrics": MetricRecord({"partition-id": 0})}
        ),
        Presence(0, np.array([-1]), np.array([], dtype=np.int64)),
        Presence(0, np.array([3, 3]), np.array([], dtype=np.int64)),
        Presence(0, np.array([[3]]), np.array([], dtype=np.int64)),
        Presence(0, np.array([0.5]), np.array([], dtype=np.int64)),
    ],
)
def test_a_node_that_sends_no_list_of_clients_is_left_out(tmp_path, answer):
    nodes = Nodes({3: presence(0, [5]), 4: answer})
    assert discovery(nodes, tmp_path / "r.sqlite").wait_for(1).nodes == (3,)


def test_a_reply_in_the_name_of_a_node_that_was_not_asked_does_not_count(tmp_path):
    nodes = Nodes({3: presence(0, [5]), 4: presence(0, [6])})
    reply = nodes._reply

    def forged(message):
        answer = reply(message)
        if message.metadata.dst_node_id == 4:
            answer.metadata.__dict__["_src_node_id"] = 9
        return answer

    nodes._reply = forged
    assert discovery(nodes, tmp_path / "r.sqlite").wait_for(1).nodes == (3,)


def test_a_node_may_not_offer_to_train_others_clients(tmp_path):
    """Only nodes of a simulation may, because they hold all clients' data."""
    nodes = Nodes({3: Presence(0, np.array([5]), np.array([], dtype=np.int64), np.array([10**9]))})
    roster = discovery(nodes, tmp_path / "r.sqlite").wait_for(1)
    assert [node for node, _ in roster.for_training(np.array([5]))] == [3]


REASON = "this node does not run 'x' (step)\n  got: 'x'"
REFUSED = Error(2, f"<class 'fedrec.errors.RefusalError'>:<'{REASON}'>")


def test_a_run_that_nodes_refuse_ends_at_once(tmp_path):
    nodes = Nodes({3: REFUSED, 4: REFUSED})
    with pytest.raises(EngineError, match="too many nodes refuse this run") as caught:
        discovery(nodes, tmp_path / "r.sqlite", timeout=120.0).wait_for(1)
    assert nodes.now < 2
    assert "node 3: failed: this node does not run 'x' (step) got: 'x'" in str(caught.value)


def test_others_are_waited_for_where_a_node_refuses(tmp_path):
    """One that has not answered yet, one that failed and may answer the next time, and one that
    must still come online for as many as the run needs."""
    nodes = Nodes({3: REFUSED, 4: presence(0, [5])})
    nodes.silent.add(4)
    found = discovery(nodes, tmp_path / "r.sqlite", timeout=120.0)
    found._sleep = lambda seconds: (nodes.sleep(seconds), nodes.silent.clear())
    assert found.wait_for(1).nodes == (4,)
    nodes = Nodes({3: REFUSED, 4: Error(2, "<class 'ValueError'>:<'damaged'>")})
    with pytest.raises(EngineError, match="too few nodes"):
        discovery(nodes, tmp_path / "s.json").wait_for(1)
    with pytest.raises(EngineError, match="too few nodes"):
        discovery(Nodes({3: REFUSED}), tmp_path / "t.json").wait_for(2)


def test_the_error_lists_the_faults_of_the_connected_nodes(tmp_path):
    nodes = Nodes(
        {
            3: presence(0, [5]),
            4: RecordDict(),
            6: Error(0, "no file\n" + "x" * 10_000),
            7: presence(1, [8]),
        }
    )
    nodes.silent.add(7)
    with pytest.raises(EngineError) as caught:
        discovery(nodes, tmp_path / "r.sqlite").wait_for(2)
    said = str(caught.value)
    assert "node 4: sent an invalid list of clients" in said
    assert "node 6: failed: no file xxx" in said
    assert len(said) < 2000
    assert "node 7: did not announce its clients" in said and "node 3" not in said


def test_cohorts_take_in_who_joins(load_tiny, tmp_path):
    nodes = Nodes({3: presence(0, range(10))})
    found = discovery(nodes, tmp_path / "r.sqlite")
    cohorts = SampledCohorts(load_tiny("sampler.cohort=10"), found.wait_for(1))
    some = cohorts.among(np.array([0, 1, 2]), cohorts.section.model_copy(update={"cohort": 2}))
    assert cohorts.sample(1).tolist() == list(range(10))
    nodes.answers[4] = presence(1, range(10, 20))
    found.refresh_roster()
    cohorts.joined(found.roster)
    drawn = np.concatenate([cohorts.sample(number) for number in range(1, 8)])
    assert (drawn >= 10).any() and len(cohorts.clients) == 20
    assert dict(cohorts.by_node(np.array([2, 12]))).keys() == {3, 4}
    assert some.clients.tolist() == [0, 1, 2] and dict(some.by_node(np.array([12]))).keys() == {4}


def orders(*nodes):
    return [Message(RecordDict(), node, "train") for node in nodes]


def answered(grid, *nodes, timeout=10.0):
    """The nodes that reply to an order in time."""
    replies = grid.send_and_receive(orders(*nodes), timeout=timeout)
    return [reply.metadata.src_node_id for reply in replies]


def test_a_deadline_ends_the_wait_and_the_silent_node_is_left_alone_for_a_while():
    nodes = Nodes({3: RecordDict(), 4: RecordDict()})
    nodes.silent.add(4)
    grid = nodes.grid()
    assert answered(grid, 3, 4) == [3]
    assert 10.0 <= nodes.now < 11.0 and 10.0 <= nodes.pushed[-1].metadata.ttl < 100.0
    asked = []
    for _ in range(8):
        before = len(nodes.pushed)
        answered(grid, 3, 4)
        asked.append(4 in nodes.asked[before:])
    assert asked == [False, True, False, False, True, False, False, False]  # 1, 2, 4 pauses
    assert nodes.now < 40  # three deadlines in all, not nine
    nodes.silent.clear()
    for _ in range(6):
        answered(grid, 3, 4)
    assert nodes.asked[-2:] == [3, 4]  # an answer ends it


@pytest.mark.parametrize("code", [3, 4])
def test_a_message_that_expired_is_as_one_without_an_answer(code):
    """Flower's server replies for a node that did not."""
    nodes = Nodes({3: RecordDict(), 4: Error(code, "expired")})
    grid = nodes.grid()
    assert answered(grid, 3, 4) == [3]
    answered(grid, 3, 4)
    # it gets no messages for a while
    assert nodes.asked == [3, 4, 3]


def test_a_reply_whose_pieces_come_slowly_does_not_cost_the_replies_behind_it():
    nodes = Nodes({1: presence(0, [1]), 2: presence(1, [2])})
    pull = nodes.pull_messages

    def slowly(identifiers):
        """The first reply holds the server up until after the deadline, while the second one
        comes."""
        if nodes.now < 5:
            nodes.now = 9.0
            return pull(identifiers[:1])
        return pull(identifiers)

    nodes.pull_messages = slowly
    assert answered(nodes.grid(), 1, 2, timeout=5.0) == [1, 2]


def test_the_time_to_live_starts_when_a_message_is_sent():
    """Otherwise the server refuses them as expired, however often they are sent."""
    nodes, (old,) = Nodes({1: RecordDict()}), orders(1)
    old.metadata.__dict__["_created_at"] -= 500.0
    assert len(list(nodes.grid().send_and_receive([old], timeout=10.0))) == 1
    assert 510.0 <= nodes.pushed[0].metadata.ttl < 600.0


def test_an_interrupted_upload_continues_with_the_same_messages():
    class ObjectPushError(Exception):
        """As Flower's is called."""

    nodes, fails, lifetimes = Nodes({3: RecordDict()}), [1, 1], []
    push = nodes.push_messages

    def failing(messages):
        lifetimes.append([message.metadata.ttl for message in messages])
        if fails:
            fails.pop()
            raise ObjectPushError
        return push(messages)

    nodes.push_messages = failing
    assert answered(nodes.grid(), 3) == [3]
    # Flower's id depends on it
    assert len(lifetimes) == 3 and lifetimes[0] == lifetimes[1] == lifetimes[2]


def test_without_any_node_the_grid_waits_for_the_first():
    nodes = Nodes({3: RecordDict(), 4: RecordDict()})
    nodes.away |= {3, 4}

    def sleep(seconds):
        nodes.now += seconds
        if nodes.now > 4:
            nodes.away.clear()

    grid = DeployedGrid(nodes, clock=lambda: nodes.now, sleep=sleep)
    assert len(answered(grid, 3, 4)) == 2 and 4 < nodes.now < 7
    nodes.away |= {3, 4}
    nodes.now, grid._sleep = 0.0, nodes.sleep  # this time nobody comes
    assert not answered(grid, 3, 4) and 10 <= nodes.now < 11
    assert not list(grid.send_and_receive([], timeout=10.0)) and nodes.now < 11


def test_many_messages_are_announced_a_few_at_a_time_and_all_are_answered(monkeypatch):
    nodes, announced = Nodes({node: RecordDict() for node in range(3, 14)}), []
    push = nodes.push_messages
    monkeypatch.setattr(
        nodes, "push_messages", lambda some: (announced.append(len(some)), push(some))[1]
    )
    assert sorted(answered(nodes.grid(), *range(3, 14))) == list(range(3, 14))
    assert announced == [4, 4, 3]


def test_when_all_have_let_a_deadline_pass_all_are_asked_again():
    nodes = Nodes({3: RecordDict(), 4: RecordDict()})
    nodes.silent |= {3, 4}  # as when the server's machine was asleep
    grid = nodes.grid()
    assert not answered(grid, 3, 4)
    nodes.silent.clear()
    assert len(answered(grid, 3, 4)) == 2


def test_arrays_leave_as_one_packed_array_of_flowers_own_class_and_come_back_as_arrays():
    answer = for_the_network(RecordDict({"arrays": to_record({"v": np.ones(2), "u": np.zeros(1)})}))
    nodes = Nodes({3: answer})
    content = RecordDict({"arrays": to_record({"w": np.arange(3.0), "x": np.zeros(1)})})
    (reply,) = nodes.grid().send_and_receive([Message(content, 3, "train")], timeout=1.0)
    (sent,) = nodes.pushed[0].content["arrays"].values()
    assert type(sent).__name__ == "Array" and isinstance(sent.data, bytes)
    assert from_record(reply.content["arrays"])["v"].tolist() == [1.0, 1.0]


def test_a_call_at_which_the_superlink_fails_is_made_again_and_a_refusal_is_not():
    nodes = Nodes({3: RecordDict()})
    pull, fails = nodes.pull_messages, [500, 503]

    def failing(identifiers):
        if fails:
            answer = httpx.Response(fails.pop(), request=httpx.Request("POST", "https://x"))
            raise httpx.HTTPStatusError("failed", request=answer.request, response=answer)
        return pull(identifiers)

    nodes.pull_messages = failing
    assert answered(nodes.grid(), 3, timeout=60.0) == [3] and not fails
    fails.append(401)
    with pytest.raises(httpx.HTTPStatusError):
        list(nodes.grid().send_and_receive(orders(3), timeout=60.0))


def parameters(value, shape=(2, 3)):
    return pack_arrays({"w": np.full(shape, value, dtype=np.float32)})


@pytest.mark.parametrize(
    "malicious", [parameters(9.0), parameters(np.nan), parameters(1.0, (3, 2)), RecordDict()]
)
def test_initial_parameters_are_those_that_most_give(tmp_path, malicious):
    nodes = Nodes({1: presence(0, [1]), 2: presence(1, [2]), 3: presence(2, [3])})
    roster = discovery(nodes, tmp_path / "r.sqlite").wait_for(3)
    nodes.answers = {1: malicious, 2: parameters(1.0), 3: parameters(1.0)}
    found = most_common_parameters(nodes.grid(), roster, timeout=5.0)
    assert found["w"].shape == (2, 3) and (found["w"] == 1.0).all()


def test_claims_above_the_registered_maximum_are_refused(tmp_path):
    """Claimed clients are sampled like others, and more clients would mean less noise."""
    crowd = presence(1, range(100, 1100))
    nodes = Nodes({3: presence(0, [5, 6], [6, 7]), 7: crowd, 9: presence(2, range(3), range(3, 6))})
    found = discovery(nodes, tmp_path / "roster.npz", most=3)
    with pytest.raises(
        EngineError, match=r"node 7: .*claims 1000 clients, more than the 3 it may host"
    ):
        found.wait_for(2)
    assert found.roster.nodes == (3,) and found.roster.training.tolist() == [5, 6]
    nodes.answers[9] = presence(2, range(3))
    assert discovery(nodes, tmp_path / "other.sqlite", most=3).wait_for(2).nodes == (3, 9)


@pytest.mark.parametrize(
    ("placement", "refused"), [("central", True), ("distributed", True), ("local", False)]
)
def test_noise_that_depends_on_claims_takes_a_registered_maximum(load_tiny, placement, refused):
    privacy = f'privacy={{clip-norm=1.0, noise-multiplier=1.0, placement="{placement}"}}'
    experiment = load_tiny(privacy, *(["sampler.name=full"] if placement == "local" else []))
    _check_registered(experiment, DeployedGrid(Nodes({}), 10))
    _check_registered(load_tiny(), DeployedGrid(Nodes({})))
    words = r"most-clients in deployment\.toml"
    with pytest.raises(ExperimentError, match=words) if refused else nullcontext():
        _check_registered(experiment, DeployedGrid(Nodes({})))


# Rounds of real nodes that close before all have answered, over a fake of Flower's grid with a
# clock.

THETA = {"w": np.zeros(2, dtype=np.float32)}


@pytest.fixture
def federation(load_tiny):
    def make(delays, *settings):
        total = {name: np.ones_like(value) for name, value in THETA.items()}
        trained = pack_sum(TrainSum(total, 1, 1.0, 1, 0.0, 0))
        failed = Error(0, "it failed")
        nodes = Nodes({n: failed if delay < 0 else trained for n, delay in delays.items()}, delays)
        found = object.__new__(DeployedFederation)  # without a roster
        found.experiment = load_tiny("engine.max-failures=0.2", *settings)
        found.timeout, found.secure = 100.0, None
        found.dropped = DroppedReplies(always=True)
        found.grid = found._deployed = nodes.grid()
        return found, nodes

    return make


def a_round(federation, number=1, clients=1):
    """The nodes whose replies a round takes."""
    nodes = federation.grid.get_node_ids()
    orders = [TrainOrder(number, np.arange(clients) + clients * node, "uniform") for node in nodes]
    messages = [
        Message(pack_order(order, to_record(THETA)), node, "train")
        for node, order in zip(nodes, orders, strict=True)
    ]
    _, replies = federation._exchange(messages)
    good = answers(
        replies,
        sent=nodes,
        max_failures=federation.experiment.engine.max_failures,
        dropped=federation.dropped,
        may_be_late=True,
    )
    return sorted(reply.metadata.src_node_id for reply in good)


DELAYS = {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 4.0}


def test_a_round_closes_at_its_deadline_and_the_late_are_counted(federation):
    found, nodes = federation(DELAYS, "closing={deadline=10.0}")
    assert a_round(found) == [1, 2, 3, 5] and 10 <= nodes.now < 13
    row = found.dropped.after_round(1, None)
    assert row["dropped-or-bounded"] == "node 4: no reply before the deadline"
    assert a_round(found, 2) == [1, 2, 3, 5]
    assert nodes.asked.count(4) == 1  # it let a deadline pass, so it is not asked this time
    assert nodes.now < 20


def test_sending_is_part_of_the_time_and_messages_left_at_the_deadline_are_not_sent(federation):
    """Four messages are announced at a time; each time takes 7 of the 10 seconds."""
    found, nodes = federation(dict.fromkeys(range(1, 15), 0.5), "closing={deadline=10.0}")
    push = nodes.push_messages

    def slowly(messages):
        nodes.now += 7
        return push(messages)

    nodes.push_messages = slowly
    assert a_round(found) == [1, 2, 3, 4] and nodes.now == 14
    assert nodes.asked == list(range(1, 9))  # the second four were sent, and let it pass
    nodes.push_messages = push
    assert a_round(found, 2) == [1, 2, 3, 4, *range(9, 15)]


def test_a_round_closes_when_enough_have_answered(federation):
    """Four cohorts' clients are asked for three; whoever is late has missed no deadline."""
    found, nodes = federation(DELAYS, "closing={deadline=60.0, over-selection=1.6}")
    assert a_round(found) == [1, 2, 3] and nodes.now < 4
    before = nodes.now
    a_round(found, 2)
    assert nodes.asked.count(4) == 2 and nodes.now < before + 6


def test_nodes_that_fail_are_not_late(federation):
    found, _ = federation({1: 1.0, 2: -1.0, 3: -1.0, 4: 1.0}, "closing={deadline=10.0}")
    with pytest.raises(ClientError, match="2 of 4 nodes failed"):
        a_round(found)


def test_without_a_deadline_of_its_own_a_round_closes_at_the_timeout(federation):
    found, nodes = federation({1: 1.0, 2: 500.0}, "closing={}")
    assert a_round(found) == [1] and 100 <= nodes.now < 104


@pytest.mark.parametrize(
    ("table", "settings"),
    [("devices", "{}"), ("asynchronous", "{concurrency=12}"), ("compression", "{name='top-k'}")],
)
def test_simulated_devices_beside_real_nodes_are_refused(load_tiny, table, settings):
    """Before the server waits for a node."""
    run = SimpleNamespace(experiment=load_tiny(f"{table}={settings}"))
    with pytest.raises(ExperimentError, match=rf"\[{table}\] applies only to simulated devices"):
        DeployedFederation(run, DeployedGrid(Nodes({})))


def test_an_empty_round_asks_nobody(federation):
    found, nodes = federation({1: 1.0}, "closing={deadline=10.0}")
    assert not list(
        found._deployed.send_and_receive([Message(RecordDict(), 9, "train")], timeout=1)
    )
    assert not nodes.asked


def test_an_error_of_the_superlink_is_that_of_the_lost_node(federation):
    """It answers as node 1 for a node that went offline, which must not count twice."""
    made, nodes = federation({8: 1.0, 9: -1.0}, "engine.max-failures=0.5")
    failing = nodes._reply

    def as_superlink(message):
        reply = failing(message)
        if reply.has_error():
            reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return reply

    nodes._reply = as_superlink
    a_round(made)
    assert made.dropped.after_round(1, None)["dropped-or-bounded"] == "node 9: failed: it failed"


def test_what_was_written_is_read_in_order_whatever_the_ids(tmp_path):
    none = np.empty(0, dtype=np.int64)
    random = np.unique(np.random.default_rng(0).integers(2**62, size=1000))
    nodes = {
        2**64 - 1: Presence(0, random, none),
        3: Presence(0, np.array([0, 2**63 - 1]), none),
        1: Presence(0, none, np.array([7])),
    }
    file = tmp_path / "roster.npz"
    assert _read_roster(file) == {} and not file.exists()
    _write_roster(file, nodes)
    found = _read_roster(file)
    assert list(found) == list(nodes)
    for node, presence in nodes.items():
        for name in ("training", "evaluated"):
            np.testing.assert_array_equal(getattr(found[node], name), getattr(presence, name))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"x" * 200, "cut", {"x/training": 1}, {"1/training": 1}])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "roster.npz"
    if isinstance(content, dict):
        np.savez(path, **content)
    elif content == "cut":
        _write_roster(path, {1: Presence(0, np.array([4, 9]), np.array([4]))})
        path.write_bytes(path.read_bytes()[:-40])
    else:
        path.write_bytes(content)
    with pytest.raises(RunError) as error:
        _read_roster(path)
    assert "the nodes are asked again" in error.value.text()


# Orders to real nodes: one per node and round.


def test_one_message_per_client_is_refused_before_anything_is_sent():
    """Of a node's replies only one is accepted, so all others would be lost."""
    orders = [TrainOrder(1, np.array([client]), "uniform", {"name": "sgd"}) for client in range(4)]
    messages = [
        Message(pack_order(order, to_record(THETA)), 7 + number // 3, "train")
        for number, order in enumerate(orders)
    ]
    federation = object.__new__(DeployedFederation)  # without a grid: nothing can be sent
    with pytest.raises(ExperimentError, match="sends node 7 3 messages in one round") as error:
        federation.train(messages, THETA)
    assert "reply = .each." in error.value.text().replace(chr(39), ".")
