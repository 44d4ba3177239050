# SPDX-License-Identifier: Apache-2.0
"""Simulated devices: late answers, buffers and deadlines, and what is told ahead."""

import json
import types

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, Message

import fedrec
from fedrec.devices import Devices
from fedrec.errors import ExperimentError
from fedrec.experiment.schema import ClosingConfig
from fedrec.privacy.accounting.sampling import Full
from fedrec.protocol.messages import TrainOrder, TrainSum, pack_sum, unpack_order, writable_arrays
from fedrec.protocol.serialization import from_record, to_record
from fedrec.protocol.updates import SparseUpdate
from server.cohort import Timeline, closed
from server.federation import AsynchronousFederation, _BufferedTimeline
from strategies.sums import Reptile, ReptileConfig
from tests.runs import assert_close, assert_same_run, charged, parameters_in, resumed
from tests.server.test_phase_plans import delta_of

# Runs on simulated devices: equal to synchronous ones where they have to be, resumed, on engines,
# under a guarantee, and what is refused.

EVEN = "devices={example-seconds=0, network-spread=0}"
UNEVEN = "devices={compute-spread=2.0}"
NIGHTLY = "devices={compute-spread=2.0, nightly={hours=9.0}}"
EARLY = "closing={over-selection=1.3, deadline=0.2}"
BUFFERED = "asynchronous={concurrency=12}"
MF = (
    "model={name='mf', factors=3}",
    "step={name='sgd', epochs=2, private-parameters=['user.*'], late-parameters=['item.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
)
BY_CLIENT = "split.stream=client"
PRIVATE = "privacy={clip-norm=1.0, noise-multiplier=1.0, delta=1e-3}"
TIMED = "devices={examples=10, compute-spread=2.0}"


@pytest.mark.slow
@pytest.mark.parametrize("system", [(), MF, ("strategy={name='fedavg'}",)])
def test_equal_buffer_and_concurrency_give_the_synchronous_run(run_tiny, system):
    """The sampler's cohort has 6 clients, and all devices are equally fast: to the byte."""
    waiting = run_tiny("rounds=4", EVEN, *system, output="waiting")
    buffered = run_tiny("rounds=4", EVEN, "asynchronous={concurrency=6}", *system, output="buffer")
    rows = pd.read_csv(buffered.folder / "rounds.csv", dtype=str)
    assert set(rows.pop("staleness").astype(float)) == {0.0}
    assert rows.to_csv(index=False) == (waiting.folder / "rounds.csv").read_text()
    found, expected = parameters_in(buffered.folder), parameters_in(waiting.folder)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    tables = [(one.folder / "users.csv").read_bytes() for one in (buffered, waiting)]
    assert tables[0] == tables[1]


def test_early_closing_takes_less_time_and_a_whole_cohort(run_tiny):
    waiting = run_tiny("rounds=6", UNEVEN, output="waiting")
    early = run_tiny("rounds=6", UNEVEN, "closing={over-selection=1.5}", output="early")
    assert set(early.rounds["num-clients"]) == {6} and set(early.rounds["late-clients"]) == {3}
    ends = [one.rounds["simulated-seconds"].iloc[-1] for one in (waiting, early)]
    assert ends[1] < ends[0] / 2
    said = json.loads((early.folder / "result.json").read_text())["devices"]
    assert (said["asked"], said["late"]) == (54, 18)
    assert any("18 of 54 replies (33.3%) were late" in line for line in early.privacy)
    assert fedrec.Result.load(early.folder).privacy == early.privacy


def test_late_clients_are_left_out_in_each_stage(run_tiny):
    step = "step={name='contrastive', hidden=4, session-length=4, epochs=1}"
    stages = f"strategy={{name='two-stage', stage-one={{rounds=1, {step}}}}}"
    rounds = run_tiny(stages, UNEVEN, "closing={over-selection=1.5}").rounds
    assert set(rounds["num-clients"]) == {6} and set(rounds["late-clients"]) == {3}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [UNEVEN, NIGHTLY])
@pytest.mark.parametrize("late", [EARLY, BUFFERED])
def test_a_resumed_run_is_the_same_to_the_bit(run_tiny, devices, late):
    settings = ("rounds=6", devices, late, *MF)
    assert_same_run(resumed(run_tiny, *settings, after=3), run_tiny(*settings))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.ray
@pytest.mark.parametrize("late", [EARLY, BUFFERED])
def test_ray_gives_the_serial_run(run_tiny, shared_engine, late):
    settings = ("rounds=4", UNEVEN, late, "engine.nodes=2")
    ray, serial = (run_tiny(*settings, f"engine.name={n}", output=n) for n in ("ray", "serial"))
    assert_close(ray.parameters, serial.parameters, rtol=1e-5, atol=1e-6)
    for column in ("simulated-seconds", "late-clients", "num-clients"):
        assert ray.rounds[column].tolist() == serial.rounds[column].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("late", [EARLY, BUFFERED, "devices.nightly={hours=9.0}"])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_nothing_is_gained_by_sampling_where_devices_decide(run_tiny, late, adjacency):
    """The ledger charges each round as one with all clients: mu = sqrt(rounds) / z of a Gaussian,
    whose delta is known (Dong, Roth and Su 2022)."""
    settings = ("rounds=3", PRIVATE, f"privacy.adjacency={adjacency}", TIMED, late, BY_CLIENT)
    result = run_tiny(*settings)
    epsilon = result.rounds["epsilon"].iloc[-1]
    assert delta_of(np.sqrt(3), epsilon) == pytest.approx(1e-3, rel=0.02)
    assert [line.event.sampling for line in charged(result.folder)] == [Full()] * 3  # type: ignore[union-attr]
    assert any("speed and availability of devices" in line for line in result.privacy)


def test_the_denominator_is_the_cohort_whoever_answers(run_tiny, monkeypatch):
    """And the sum is clipped for as many as were asked by name."""
    seen = []
    apply = Reptile.apply

    def watched(self, theta, aggregate):
        seen.append((aggregate.clients, sum(self._asked.values())))
        return apply(self, theta, aggregate)

    monkeypatch.setattr(Reptile, "apply", watched)
    run_tiny(PRIVATE, TIMED, "closing={deadline=0.15}")
    assert [clients for clients, _ in seen] == [6.0, 6.0]


def test_who_takes_part_does_not_depend_on_data_under_a_guarantee(run_tiny, monkeypatch):
    """Users with twice as many rows answer at the same time."""
    cohorts: dict = {}
    plan = Timeline.cohort

    def watched(self, number, among):
        found = plan(self, number, among)
        cohorts.setdefault(self.experiment.name, {})[number] = found.tolist()
        return found

    monkeypatch.setattr(Timeline, "cohort", watched)
    for rows in (8, 14):
        run_tiny(
            "rounds=4",
            PRIVATE,
            TIMED,
            EARLY,
            f"name=rows-{rows}",
            f"dataset.mean-interactions={rows}",
            output=f"rows-{rows}",
        )
    assert cohorts["rows-8"] == cohorts["rows-14"] and len(cohorts["rows-8"]) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((EARLY,), "needs simulated or real reply times of devices"),
        ((BUFFERED,), "[asynchronous] needs simulated or real reply times of devices"),
        ((UNEVEN, EARLY, BUFFERED), "[asynchronous] cannot be combined with [closing]"),
        ((UNEVEN, BUFFERED, "sampler={name='poisson'}"), "sampler.name = 'fixed-size'"),
        ((UNEVEN, "asynchronous={concurrency=14}"), "at most 13"),
        ((UNEVEN, BUFFERED, "strategy.name=median"), "does not work with [asynchronous]"),
        ((UNEVEN, "strategy.name=flwr.serverapp.strategy:FedAvg"), "does not work with [devices]"),
        (
            (UNEVEN, EARLY, "secure-aggregation=true", "engine.nodes=3"),
            "secure-aggregation cannot be combined",
        ),
        ((UNEVEN, BUFFERED, "secure-aggregation=true"), "secure-aggregation cannot be combined"),
        ((NIGHTLY, "secure-aggregation=true"), "secure-aggregation cannot be combined"),
        ((UNEVEN, EARLY, PRIVATE), "needs devices.examples"),
        ((NIGHTLY, PRIVATE), "needs devices.examples"),
        ((TIMED, PRIVATE, "privacy.mode=secure"), "reveals its participants"),
        (
            (TIMED, BUFFERED, PRIVATE, "privacy.placement=distributed"),
            "cannot be combined with privacy.placement = 'distributed'",
        ),
        ((UNEVEN, "closing={over-selection=1.3}", "sampler={name='full'}"), "'full' has none"),
        ((UNEVEN, "closing={over-selecton=1.5}"), "over-selection"),
        (("devices={nightly={hours=0.001}}",), "is impossible"),
    ],
)
def test_what_does_not_fit_is_refused(run_tiny, settings, said):
    with pytest.raises(ExperimentError) as error:
        run_tiny(*settings)
    assert said in error.value.text()


# The queue of buffered aggregation by hand: three devices of known speed.

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
        found = _BufferedTimeline(experiment, experiment.devices, experiment.asynchronous)
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
        row = timeline.after_round(number, to_record(THETA))
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


@pytest.mark.usefixtures("identity")
def test_the_queue_by_hand(timeline):
    assert rounds_of(timeline(), 1, len(EXPECTED)) == EXPECTED


@pytest.mark.usefixtures("identity")
def test_a_restored_queue_goes_on(timeline):
    for after in range(1, len(EXPECTED)):
        first = timeline()
        rounds_of(first, 1, after)
        memory = {name: np.copy(value) for name, value in first.memory().items()}
        second = timeline()
        second.restore(memory)
        assert rounds_of(second, after + 1, len(EXPECTED)) == EXPECTED[after:]


@pytest.mark.usefixtures("identity")
def test_stale_answers_are_weighted_and_start_from_their_own_parameters(timeline):
    """Reptile with rate 1: theta + weight * change / 1."""
    found = timeline()
    rounds_of(found, 1, 5)
    old = np.full((3, 1), 10.0, np.float32)
    found.versions[1] = {"w": old}
    cohorts = types.SimpleNamespace(
        sample=lambda number: found.cohort(number, Drawn()),
        by_node=lambda clients: [(7, group) for group in found.groups(clients)],
    )
    strategy = Reptile(ReptileConfig(server_lr=1.0), cohorts, {"name": "sgd"})
    federation = object.__new__(AsynchronousFederation)
    federation.timeline, federation.secure, federation.timeout = found, None, 1.0

    def answered(messages, timeout):
        (message,) = messages
        arrays, order = writable_arrays(message.content), unpack_order(TrainOrder, message.content)
        assert order.clients.tolist() == [2] and arrays["w"].tolist() == old.tolist()
        change = SparseUpdate((3, 1), np.array([1]), np.array([[4.0]]))
        return [Message(pack_sum(TrainSum({"w": change}, 1, 1.0, 4, 0.0, 0)), reply_to=message)]

    federation.grid = types.SimpleNamespace(send_and_receive=answered)
    messages = list(strategy.configure_train(6, to_record(THETA), ConfigRecord(), None))
    (reply,) = federation._exchange(messages)[1]
    moved, metrics = strategy.aggregate_train(6, [reply])
    expected = 5**-0.5 * np.array([0.0, 4.0, 0.0])
    assert from_record(moved)["w"].ravel() == pytest.approx(expected, rel=1e-6)
    assert metrics["num-clients"] == 1


# Which answers a synchronous round takes, and when it closes, by hand.

ENDS = np.array([4.0, 1.0, 9.0, 1.0, 3.0])
LOST = np.array([False, False, False, False, True])


@pytest.mark.parametrize(
    ("settings", "taken", "at"),
    [
        # all that answer; the lost one went at 3, the last answer came at 9
        ({}, (1, 3, 0, 2), 9.0),
        # 5 asked for a cohort of 4
        ({"over_selection": 1.25}, (1, 3, 0, 2), 9.0),
        ({"over_selection": 5.0}, (1,), 1.0),
        ({"deadline": 2.0}, (1, 3), 2.0),
        ({"deadline": 0.5}, (), 0.5),
        ({"deadline": 100.0}, (1, 3, 0, 2), 9.0),
        # as many as needed at 1, before the deadline
        ({"deadline": 2.0, "over_selection": 2.5}, (1, 3), 1.0),
    ],
)
def test_answers_by_hand(settings, taken, at):
    start = 10.0
    indices, closes = closed(
        np.arange(20, 25), ENDS + start, LOST, start, ClosingConfig(**settings)
    )
    assert tuple(indices.tolist()) == taken and closes == start + at
