# SPDX-License-Identifier: Apache-2.0
"""Runs on simulated devices: equal to synchronous ones where they have to be, resumed, on engines,
under a guarantee, and what is refused."""

import json

import numpy as np
import pandas as pd
import pytest

from fedrec.errors import ExperimentError
from fedrec.privacy.accounting.sampling import Full
from fedrec.privacy.ledger import Ledger
from fedrec.report.naming import named
from fedrec.report.page.results import curves
from tests.runs import assert_close, assert_same_run, parameters_in, resumed

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


def test_time_alone_changes_nothing_else(run_tiny):
    timed = run_tiny(UNEVEN, output="timed")
    plain = run_tiny(output="plain")
    assert_close(parameters_in(timed.folder), parameters_in(plain.folder))
    columns = ["simulated-seconds", "late-clients", "late-bytes"]
    pd.testing.assert_frame_equal(timed.rounds.drop(columns=columns), plain.rounds)
    assert timed.rounds["simulated-seconds"].is_monotonic_increasing
    assert not timed.rounds["late-clients"].any()


def test_early_closing_takes_less_time_and_a_whole_cohort(run_tiny):
    waiting = run_tiny("rounds=6", UNEVEN, output="waiting")
    early = run_tiny("rounds=6", UNEVEN, "closing={over-selection=1.5}", output="early")
    assert set(early.rounds["num-clients"]) == {6} and set(early.rounds["late-clients"]) == {3}
    ends = [one.rounds["simulated-seconds"].iloc[-1] for one in (waiting, early)]
    assert ends[1] < ends[0] / 2
    said = json.loads((early.folder / "result.json").read_text())["devices"]
    assert (said["asked"], said["late"]) == (54, 18)
    assert any("18 of 54 answers (33.3%) were late" in line for line in early.privacy)
    charts = "".join(curves(named([early, waiting])))
    assert "hits@5 by round" in charts and "hits@5 by simulated hour" in charts


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
    assert _delta(np.sqrt(3), epsilon) == pytest.approx(1e-3, rel=0.02)
    charges = Ledger(result.folder / "privacy.jsonl").charges
    assert [line.event.sampling for line in charges] == [Full()] * 3  # type: ignore[union-attr]
    assert any("speed and availability of devices" in line for line in result.privacy)


def test_the_denominator_is_the_cohort_whoever_answers(run_tiny, monkeypatch):
    """And the sum is clipped for as many as were asked by name."""
    seen = []
    from strategies.reptile import Reptile

    apply = Reptile.apply

    def watched(self, theta, aggregate):
        seen.append((aggregate.clients, sum(self._asked.values())))
        return apply(self, theta, aggregate)

    monkeypatch.setattr(Reptile, "apply", watched)
    run_tiny(PRIVATE, TIMED, "closing={deadline=0.15}")
    assert [clients for clients, _ in seen] == [6.0, 6.0]


def test_who_takes_part_does_not_depend_on_data_under_a_guarantee(run_tiny, monkeypatch):
    """Users with twice as many rows answer at the same time."""
    from server.devices.timeline import Timeline

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
        ((EARLY,), "needs the time at which devices answer"),
        ((BUFFERED,), "[asynchronous] needs the time at which devices answer"),
        ((UNEVEN, EARLY, BUFFERED), "[asynchronous] without [closing]"),
        ((UNEVEN, BUFFERED, "sampler={name='poisson'}"), "sampler.name = 'fixed-size'"),
        ((UNEVEN, "asynchronous={concurrency=14}"), "at most 13"),
        ((UNEVEN, BUFFERED, "strategy.name=median"), "does not work with [asynchronous]"),
        ((UNEVEN, "strategy.name=flwr.serverapp.strategy:FedAvg"), "does not work with [devices]"),
        (
            (UNEVEN, EARLY, "secure-aggregation=true", "engine.nodes=3"),
            "without secure-aggregation",
        ),
        ((UNEVEN, BUFFERED, "secure-aggregation=true"), "without secure-aggregation"),
        ((NIGHTLY, "secure-aggregation=true"), "without secure-aggregation"),
        ((UNEVEN, EARLY, PRIVATE), "devices.examples with [privacy]"),
        ((NIGHTLY, PRIVATE), "devices.examples with [privacy]"),
        ((TIMED, PRIVATE, "privacy.mode=secure"), "shows who took part"),
        (
            (TIMED, BUFFERED, PRIVATE, "privacy.placement=distributed"),
            "without privacy.placement = 'distributed'",
        ),
        ((UNEVEN, "closing={over-selection=1.3}", "sampler={name='full'}"), "has no cohort"),
        ((UNEVEN, "closing={enough=0.0}"), "closing.enough"),
        ((UNEVEN, "closing={enuf=0.5}"), "enough"),
        (("devices={nightly={hours=0.001}}",), "never available at one time"),
    ],
)
def test_what_does_not_fit_is_refused(run_tiny, settings, said):
    with pytest.raises(ExperimentError) as error:
        run_tiny(*settings)
    assert said in error.value.text()


def _delta(mu, epsilon):
    """Delta of a Gaussian release whose sensitivity is mu standard deviations."""
    from statistics import NormalDist

    phi = NormalDist().cdf
    return phi(mu / 2 - epsilon / mu) - np.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
