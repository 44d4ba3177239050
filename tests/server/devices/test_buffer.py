# SPDX-License-Identifier: Apache-2.0
"""The queue of buffered aggregation by hand: three devices of known speed."""

import types

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message

from fedrec.devices.devices import Devices
from fedrec.protocol.messages import pack_sum, unpack_train
from fedrec.protocol.orders import TrainSum
from fedrec.protocol.sparse_update import SparseUpdate
from fedrec.protocol.zero_copy import from_record, to_record
from fedrec.rng import stream
from server.devices.buffer import BufferedTimeline
from strategies.reptile import Reptile, ReptileConfig

pytestmark = pytest.mark.usefixtures("identity")
SECONDS = np.array([1.0, 2.0, 5.0])
DRAWN = (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2)
THETA = {"w": np.zeros((3, 1), np.float32)}


class ByHand(Devices):
    """Devices that take 1, 2 and 5 seconds."""

    def seconds(self, clients, examples, megabytes):
        return SECONDS[clients]


class Drawn:
    """Cohorts of one client, in a given order."""

    clients = np.arange(3)
    section = types.SimpleNamespace(options={"cohort": 1})

    def drawn(self, number, present=None):
        return np.array([DRAWN[number - 1]])


@pytest.fixture
def timeline(load_tiny):
    def make(*more):
        settings = ("devices={examples=1}", "asynchronous={concurrency=2}", "sampler.cohort=1")
        experiment = load_tiny(*settings, *more)
        found = BufferedTimeline(experiment, experiment.devices, experiment.asynchronous)
        found.devices = ByHand(experiment.devices, 0)
        found.announce(THETA)
        return found

    return make


def rounds_of(timeline, first, last):
    """Client, staleness and time of each of some rounds."""
    found = []
    for number in range(first, last + 1):
        cohort = timeline.cohort(number, Drawn())
        assert timeline.cohort(number, Drawn()) is cohort
        timeline.after_training(number, to_record(THETA))
        row = timeline.columns()
        found.append((cohort.tolist(), row["staleness"], row["simulated-seconds"]))
    return found


EXPECTED = [
    # 0 and 1 start at 0; 0 answers at 1
    ([0], 0, 1.0),
    # 2 starts at 1, until 6; 1 answers at 2 to the first parameters
    ([1], 1, 2.0),
    # 0 starts at 2 from the second step
    ([0], 0, 3.0),
    # 1 starts at 3, until 5
    ([1], 0, 5.0),
    # 2 is drawn and busy, so 0 starts at 5; at 6 both 0 and 2 answer: 0 comes first
    ([0], 0, 6.0),
    # 1 starts at 6; 2 answered at 6 to the parameters after the first step
    ([2], 4, 6.0),
    # 2 starts at 6, until 11; 1 answers at 8 to those after the fifth
    ([1], 1, 8.0),
]


def test_the_queue_by_hand(timeline):
    assert rounds_of(timeline(), 1, len(EXPECTED)) == EXPECTED


def test_a_restored_queue_goes_on(timeline):
    for after in range(1, len(EXPECTED)):
        first = timeline()
        rounds_of(first, 1, after)
        memory = {name: np.copy(value) for name, value in first.memory().items()}
        second = timeline()
        second.restore(memory)
        assert rounds_of(second, after + 1, len(EXPECTED)) == EXPECTED[after:]


def test_only_parameters_that_are_still_needed_are_kept(timeline):
    found = timeline()
    rounds_of(found, 1, 5)
    # 2 trains from those after the first step; the next start from those after the fifth
    assert set(found.versions) == {1, 5}
    rounds_of(found, 6, 6)
    assert set(found.versions) == {5, 6}


@pytest.mark.parametrize(("exponent", "weight"), [(0.5, 5**-0.5), (0.0, 1.0), (1.0, 0.2)])
def test_stale_answers_are_weighted_and_start_from_their_own_parameters(timeline, exponent, weight):
    """Reptile with rate 1: theta + weight * change / 1; drift is relative to the old parameters."""
    found = timeline(f"asynchronous.staleness-exponent={exponent}")
    rounds_of(found, 1, 5)
    old = np.full((3, 1), 10.0, np.float32)
    found.versions[1] = {"w": old}
    cohorts = types.SimpleNamespace(
        sample=lambda number: found.cohort(number, Drawn()),
        by_node=lambda clients: [(7, clients)],
    )
    strategy = Reptile(ReptileConfig(server_lr=1.0), cohorts, {"name": "sgd"})
    strategy.staleness = found
    (message,) = strategy.configure_train(6, to_record(THETA), ConfigRecord(), None)
    arrays, order = unpack_train(message.content)
    assert order.clients.tolist() == [2] and arrays["w"].tolist() == old.tolist()
    change = SparseUpdate((3, 1), np.array([1]), np.array([[4.0]]), drift=-0.5)
    reply = Message(pack_sum(TrainSum({"w": change}, 1, 1.0, 4, 0.0, 0)), reply_to=message)
    moved, metrics = strategy.aggregate_train(6, [reply])
    expected = weight * np.array([-5.0, -1.0, -5.0])
    assert from_record(moved)["w"].ravel() == pytest.approx(expected, rel=1e-6)
    assert metrics["num-clients"] == 1


def test_nobody_is_twice_in_a_buffer_or_in_two_places(load_tiny):
    """18 clients, 13 at a time and 6 in a buffer, of very different speeds."""
    experiment = load_tiny("devices={examples=1, compute-spread=3}", "asynchronous.concurrency=13")
    found = BufferedTimeline(experiment, experiment.devices, experiment.asynchronous)
    found.announce(THETA)
    cohorts = types.SimpleNamespace(
        clients=np.arange(18),
        section=experiment.sampler,
        drawn=lambda number, present=None: np.sort(
            stream(0, "test", number).choice(18, 6, replace=False)
        ),
    )
    for number in range(1, 60):
        cohort = found.cohort(number, cohorts)
        queue = [one.client for one in found._queue]
        assert len(cohort) == len(set(cohort.tolist())) == 6
        assert len(queue) == len(set(queue)) and len(queue) <= 13
        found.after_training(number, to_record(THETA))
