# SPDX-License-Identifier: Apache-2.0
"""Rounds of real nodes that wait for nobody: nodes in this process that answer when a test says, by
a clock that the grid's waiting moves."""

import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Error, Message, RecordDict

from clients.app import app
from fedrec.errors import ClientError, ExperimentError
from fedrec.protocol.messages import unpack_sum, unpack_train_order
from fedrec.protocol.sparse_update import dense_change
from fedrec.protocol.zero_copy import for_the_network, from_the_network
from fedrec.runs.folder import RunFolder
from server.callbacks.base import Callback
from server.deployed.grid import DeployedGrid
from server.run import execute
from simulations import runner
from simulations.engines.grid import FIRST_NODE_ID, contexts_of
from simulations.engines.serial import SerialGrid
from tests.runs import Interrupt, parameters_in

NODES = 3
MF = (
    "model={name='mf', factors=3}",
    "step={name='sgd', epochs=2, private-parameters=['user.*'], late-parameters=['item.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
)
DECAYING = ("step={name='sgd', weight-decay=0.05, batch-size=8}", "dataset.items=1000")
"""Rows that nobody touches change relative to the parameters that a client started from, and tables
are changed in place."""
PRIVATE = "privacy={clip-norm=0.05, noise-multiplier=1.0, delta=1e-3}"
COMPRESSED = "compression={name='top-k', share=0.5, bits=8}"


class LateNodes(SerialGrid):
    """Nodes whose answer to a training message comes so many seconds after it as `delay` says of
    node (from 0) and round; None: never. Work is done when the message comes."""

    def __init__(self, run, delay):
        configs = contexts_of(run.experiment.model_dump_json(), str(run.path), NODES)
        super().__init__(
            app,
            [
                Context(1, FIRST_NODE_ID + place, own, RecordDict(), {**shared, "deployment": True})
                for place, (own, shared) in enumerate(configs)
            ],
        )
        self.delay = delay
        self.now = 0.0
        self.asked = {}  # training messages, by identifier
        self.sent = {}  # when they were sent, and their orders
        self.came = {}  # answers to them: identifier -> seconds
        self.sums = {}  # identifier -> what its node answered
        self._ready = {}

    def _submit(self, batch):
        for message in batch:
            name = message.metadata.message_id
            node = message.metadata.dst_node_id - FIRST_NODE_ID
            training = message.metadata.message_type == "train"
            order = unpack_train_order(message.content) if training else None
            delay = self.delay(node, order.round) if training else 0.0
            if training:
                self.asked[name] = message
                self.sent[name] = (self.now, order)
            if delay is not None:
                super()._submit([message])
                self._ready[name] = self.now + delay
                if training:
                    self.answered(name)

    def answered(self, name):
        """An answer to a training message is made."""
        content = RecordDict(dict(self._replies[name].content.items()))
        self.sums[name] = unpack_sum(from_the_network(content))

    def _collect(self, message_ids, timeout):
        found = {name for name in message_ids if self._ready.get(name, np.inf) <= self.now}
        self.came |= {name: self.now for name in found & self.sent.keys()}
        return super()._collect(found, timeout)

    def sleep(self, seconds):
        self.now += max(seconds, 0.001)

    def grid(self):
        return DeployedGrid(self, 100, clock=lambda: self.now, sleep=self.sleep)


class Watch(Callback):
    """The parameters before each round and after the last one."""

    compares = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_update(self, round_number, before, after):
        self.seen.append({name: np.array(value) for name, value in before.items()})
        self.last = {name: np.array(value) for name, value in after.items()}


@pytest.fixture
def deployed(load_tiny, tmp_path):
    """Runs the tiny experiment on late nodes; returns the result and the nodes."""

    def run(*settings, delay=lambda node, number: 0.0, output="run", callbacks=(), kind=LateNodes):
        own = (
            f"engine.nodes={NODES}",
            "engine.timeout=20.0",
            "engine.max-failures=0.5",
            "evaluation.every=0",
        )
        experiment = runner.settle(load_tiny(*own, *settings))
        folder = RunFolder.create(experiment, tmp_path / output)
        nodes = kind(folder, delay)
        return execute(folder, nodes.grid(), callbacks), nodes

    return run


def asynchronous(concurrency, **more):
    settings = "".join(f", {name}={value}" for name, value in more.items())
    return f"asynchronous={{concurrency={concurrency}{settings}}}"


@pytest.mark.parametrize(
    "settings", [(), MF, ("strategy={name='fedavg'}",), (PRIVATE,), (COMPRESSED,)]
)
def test_without_lateness_equal_buffer_and_concurrency_give_the_synchronous_run(deployed, settings):
    """The sampler's cohort has 6 clients: to the byte."""
    rounds = ("rounds=4", *settings)
    # charged like the other one
    waits = ("closing={}",) if PRIVATE in settings else ()
    waiting, _ = deployed(*rounds, *waits, output="waiting")
    buffered, _ = deployed(*rounds, asynchronous(6), output="buffered")
    rows = pd.read_csv(buffered.folder / "rounds.csv", dtype=str)
    assert set(rows.pop("staleness").astype(float)) == {0.0}
    assert set(rows.pop("late-clients").astype(int)) == {0}
    assert rows.to_csv(index=False) == (waiting.folder / "rounds.csv").read_text()
    found, expected = parameters_in(buffered.folder), parameters_in(waiting.folder)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def buffers(nodes, size):
    """Which answers each round takes, by hand: in the order in which they came, until the clients
    of their orders fill it."""
    rounds = [[]]
    clients = 0
    number = {name: place for place, name in enumerate(nodes.sent)}
    for name in sorted(nodes.came, key=lambda one: (nodes.came[one], number[one])):
        if clients >= size:
            rounds.append([])
            clients = 0
        rounds[-1].append(name)
        clients += len(nodes.sent[name][1].clients)
    return rounds


def uneven(node, number):
    return (0.3, 1.0, 6.0)[node] + 0.11 * (number % 3)


def together(node, number):
    return 0.5


@pytest.mark.parametrize(
    ("exponent", "delay", "least", "system"),
    [
        (0.5, uneven, 0.5, ()),
        (0.0, uneven, 0.5, DECAYING),
        (1.0, together, 0.0, ()),
    ],
)
def test_a_late_answer_enters_a_later_round_with_its_weight(
    deployed, exponent, delay, least, system
):
    """Each round by hand, from what the nodes answered: theta + 0.7 * sum of w * update over the
    number of clients, where w is (1 + s)^-exponent for parameters of s rounds ago."""
    watch = Watch()
    result, nodes = deployed(
        "rounds=9",
        "strategy={name='reptile', server-lr=0.7}",
        asynchronous(9, **{"staleness-exponent": exponent}),
        *system,
        delay=delay,
        callbacks=[watch],
    )
    taken = buffers(nodes, 6)
    staleness = []
    for number, before in enumerate(watch.seen, start=1):
        orders = [nodes.sent[name][1] for name in taken[number - 1]]
        sums = [nodes.sums[name] for name in taken[number - 1]]
        clients = sum(one.clients for one in sums)
        after = watch.seen[number] if number < len(watch.seen) else watch.last
        for name, value in before.items():
            total = sum(
                (1 + number - order.round) ** -exponent
                * dense_change(own.total[name], watch.seen[order.round - 1][name])
                for order, own in zip(orders, sums, strict=True)
            )
            expected = value + 0.7 * total / clients
            np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-7)
        ages = [number - order.round for order in orders for _ in order.clients]
        staleness.append(np.mean(ages))
        assert result.rounds["num-clients"][number - 1] == clients >= 6
        assert result.rounds["late-clients"][number - 1] == sum(age > 0 for age in ages)
    np.testing.assert_allclose(result.rounds["staleness"], staleness)
    # late answers came; where all come together, those beyond a full buffer
    assert max(staleness) > least
    assert not result.rounds[["dropped-replies", "bounded-replies"]].any(axis=None)
    said = json.loads((result.folder / "result.json").read_text())["asynchronous"]
    assert said["late"] == result.rounds["late-clients"].sum() > 0
    assert any("answers were to parameters of earlier rounds" in line for line in result.privacy)


def test_nobody_waits_for_the_slow(deployed):
    late = dict(delay=lambda node, number: (0.5, 0.5, 12.0)[node])
    _, waiting = deployed("rounds=5", output="waiting", **late)
    _, buffered = deployed("rounds=5", asynchronous(9), output="buffered", **late)
    assert waiting.now > 5 * 12 and buffered.now < 20


def test_the_clients_of_a_dead_node_are_free_again_when_their_order_expires(deployed):
    """Node 2 never answers in the first rounds, and is back later."""
    result, nodes = deployed(
        "rounds=40",
        asynchronous(9),
        delay=lambda node, number: None if node == 2 and number < 12 else 2.0,
    )
    dead = [(at, order) for at, order in nodes.sent.values() if order.round < 12]
    lost = [one for one in dead if set(one[1].clients) & set(_hosted(nodes, 2))]
    back = [
        nodes.sent[name]
        for name in nodes.came
        if set(nodes.sent[name][1].clients) & set(_hosted(nodes, 2))
    ]
    assert lost and back
    again = set(np.concatenate([order.clients for _, order in back]))
    assert set(np.concatenate([order.clients for _, order in lost])) & again
    # each expired order is told once
    told = "; ".join(result.rounds["dropped-or-bounded"].fillna(""))
    assert told.count("no answer in time") == result.rounds["dropped-replies"].sum() == len(lost)
    assert (result.rounds["num-clients"] >= 6).all()


def _hosted(nodes, place):
    """The clients that a node was ever asked for."""
    node = FIRST_NODE_ID + place
    return {
        client
        for name, (_, order) in nodes.sent.items()
        if nodes.asked[name].metadata.dst_node_id == node
        for client in order.clients.tolist()
    }


@pytest.mark.parametrize("seed", range(6))
def test_no_client_is_twice_in_flight_or_in_a_sum(deployed, seed):
    """Whatever the delays, expired and failed orders included."""
    draw = np.random.default_rng(seed)

    def delay(node, number):
        seconds = float(draw.exponential((0.2, 2.0, 8.0)[node]))
        return None if draw.random() < 0.1 else seconds

    class Failing(LateNodes):
        def answered(self, name):
            super().answered(name)
            if draw.random() < 0.1:
                self._replies[name] = Message(Error(0, "it failed"), reply_to=self.asked[name])

    result, nodes = deployed(
        "rounds=25",
        "engine.max-failures=1.0",
        asynchronous(11),
        delay=delay,
        kind=Failing,
    )
    flights = defaultdict(list)
    for name, (at, order) in nodes.sent.items():
        end = nodes.came.get(name, at + 20.0)
        for client in order.clients.tolist():
            flights[client].append((at, end, order.round))
    for own in flights.values():
        rounds = [number for _, _, number in own]
        assert len(set(rounds)) == len(rounds)  # at most one order a round
        for (_, end, _), (start, _, _) in pairwise(own):
            assert end <= start
    for at, _ in nodes.sent.values():
        flying = sum(start <= at < end for own in flights.values() for start, end, _ in own)
        assert flying <= 11
    assert result.rounds["num-clients"].max() <= 6 + 11 and len(flights) == 18


class Hostile(LateNodes):
    """Node 2 answers as `lie` says: it is given the honest content and the message."""

    def answered(self, name):
        super().answered(name)
        message = self.asked[name]
        if message.metadata.dst_node_id == FIRST_NODE_ID + 2:
            self._replies[name] = self.lie(self._replies[name], message)

    def lie(self, reply, message):
        raise NotImplementedError


class Foreign(Hostile):
    """It claims to be another node."""

    def lie(self, reply, message):
        reply.metadata.__dict__["_src_node_id"] = FIRST_NODE_ID
        return reply


class Fresh(Hostile):
    """It claims that its late answer belongs to another part of the round, to have more weight."""

    def lie(self, reply, message):
        reply.metadata.group_id = f"{unpack_train_order(message.content).round + 3}.1"
        return reply


class Wrong(Hostile):
    """It answers with arrays of other shapes."""

    def lie(self, reply, message):
        content = from_the_network(RecordDict(dict(reply.content.items())))
        total = unpack_sum(content).total
        record = next(iter(content.array_records))
        assert total
        content[record] = type(content[record])([np.ones(3, dtype=np.float32)])
        return Message(for_the_network(content), reply_to=message)


class Twice(LateNodes):
    """Every answer comes again in each later poll."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.old = []

    def _collect(self, message_ids, timeout):
        found = super()._collect(message_ids, timeout)
        again = list(self.old)
        self.old += [one for one in found if one.metadata.reply_to_message_id in self.sent]
        return [*found, *again]


SLOW_LAST = dict(delay=lambda node, number: (0.5, 0.7, 3.0)[node])


@pytest.mark.parametrize(
    ("kind", "said"), [(Foreign, "not asked for"), (Wrong, "unknown or missing parameters")]
)
def test_an_answer_that_is_not_to_its_order_is_left_out(deployed, kind, said):
    """Its clients are missing in the rounds that it came in, and the others are not."""
    result, nodes = deployed("rounds=8", asynchronous(9), kind=kind, **SLOW_LAST)
    liar = {n for n, one in nodes.asked.items() if one.metadata.dst_node_id == FIRST_NODE_ID + 2}
    told = "; ".join(result.rounds["dropped-or-bounded"].fillna(""))
    taken = buffers(nodes, 6)[:8]
    lies = [name for names in taken for name in names if name in liar]
    assert lies and told.count(said) == len(lies)
    honest = [
        sum(len(nodes.sent[name][1].clients) for name in names if name not in liar)
        for names in taken
    ]
    assert result.rounds["num-clients"].tolist() == honest


@pytest.mark.parametrize("kind", [Fresh, Twice])
def test_what_a_node_says_of_its_answer_or_repeats_changes_nothing(deployed, kind):
    honest, _ = deployed("rounds=8", asynchronous(9), output="honest", **SLOW_LAST)
    found, _ = deployed("rounds=8", asynchronous(9), output="other", kind=kind, **SLOW_LAST)
    assert (honest.folder / "rounds.csv").read_text() == (found.folder / "rounds.csv").read_text()
    for name, value in honest.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)


def test_the_sum_of_late_clients_is_bounded_as_that_of_as_many_as_were_asked(deployed):
    """Under a guarantee, with hardly any noise: the mean update is no longer than the clip norm,
    and a late node's part is in it."""
    quiet = "privacy={clip-norm=0.05, noise-multiplier=1e-6, delta=1e-3}"
    watch = Watch()
    result, nodes = deployed("rounds=6", quiet, asynchronous(9), callbacks=[watch], **SLOW_LAST)
    taken = buffers(nodes, 6)
    for number, before in enumerate(watch.seen, start=1):
        after = watch.seen[number] if number < len(watch.seen) else watch.last
        expected = {name: np.zeros(value.shape) for name, value in before.items()}
        for name in taken[number - 1]:
            order, own = nodes.sent[name][1], nodes.sums[name]
            for key, change in own.total.items():
                start = watch.seen[order.round - 1][key]
                expected[key] += (1 + number - order.round) ** -0.5 * dense_change(change, start)
        for name, value in before.items():
            np.testing.assert_allclose(after[name] - value, expected[name] / 6, atol=2e-6)
    assert result.rounds["late-clients"].any()


def test_orders_in_flight_are_lost_when_a_run_stops_and_that_is_told(deployed, load_tiny, tmp_path):
    interrupt = Interrupt(3)
    settings = ("rounds=8", asynchronous(9))
    with pytest.raises(KeyboardInterrupt):
        deployed(*settings, callbacks=[interrupt], **SLOW_LAST)
    told = Told()
    folder = RunFolder(interrupt.folder)
    result = execute(folder, LateNodes(folder, SLOW_LAST["delay"]).grid(), [told])
    assert len(result.rounds) == 8 and (result.rounds["num-clients"] >= 6).all()
    assert any(
        "clients trained when the run stopped; their answers are lost" in t for t in told.lines
    )


class Told(Callback):
    def __init__(self):
        super().__init__()
        self.lines = []

    def on_message(self, text):
        self.lines.append(text)


def test_a_node_that_goes_offline_is_no_failure(deployed):
    """None is tolerated here."""

    class Offline(Hostile):
        def lie(self, reply, message):
            return Message(Error(5, "Node Unavailable"), reply_to=message)

    result, _ = deployed(
        "rounds=5", asynchronous(9), "engine.max-failures=0.0", kind=Offline, **SLOW_LAST
    )
    assert (result.rounds["num-clients"] >= 6).all()
    assert "no answer in time" in "; ".join(result.rounds["dropped-or-bounded"].fillna(""))


def test_too_many_failures_end_the_run(deployed):
    class Broken(LateNodes):
        def answered(self, name):
            self._replies[name] = Message(Error(0, "it failed"), reply_to=self.asked[name])

    with pytest.raises(ClientError, match="nodes failed"):
        deployed("rounds=3", asynchronous(6), kind=Broken)


def test_a_round_ends_when_nobody_is_left_to_be_asked(deployed):
    """All nodes are silent: it takes one deadline, and the parameters stay."""
    result, nodes = deployed("rounds=2", asynchronous(9), delay=lambda node, number: None)
    assert result.rounds["num-clients"].tolist() == [0, 0]
    assert 40 <= nodes.now < 60


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("devices={}",), "[devices] is for simulated devices"),
        ((asynchronous(14),), "at most 13"),
        ((asynchronous(9), "strategy.name=median"), "does not work with [asynchronous]"),
        (
            (asynchronous(9), "strategy.name=flwr.serverapp.strategy:FedAvg"),
            "does not work with [asynchronous]",
        ),
        ((asynchronous(9), "secure-aggregation=true"), "without secure-aggregation"),
        ((asynchronous(9), "closing={}"), "without [closing]"),
        ((asynchronous(9), PRIVATE, "privacy.placement=distributed"), "'distributed'"),
        (
            (asynchronous(9), PRIVATE, "privacy.adaptive-clip={quantile=0.5, count-noise=3.0}"),
            "without privacy.adaptive-clip",
        ),
    ],
)
def test_what_does_not_fit_is_refused(deployed, settings, said):
    with pytest.raises(ExperimentError) as error:
        deployed(*settings)
    assert said in error.value.text()
