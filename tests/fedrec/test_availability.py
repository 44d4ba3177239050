# SPDX-License-Identifier: Apache-2.0
"""Availability of devices, traces and simulated times."""

import numpy as np
import pytest

from fedrec.devices import DAY, Devices, DevicesConfig

# When devices are available, by hand.

HOUR = 3600.0
NEVER = -np.inf


def nightly(start, hours, spread=0.0):
    settings = {"nightly": {"start": start, "hours": hours, "spread": spread}}
    return Devices(DevicesConfig.parse(settings), 0)


@pytest.mark.parametrize(
    ("start", "hour", "until", "returns"),
    [
        (22, 0, 6, 0),
        (22, 6, NEVER, 22),
        (22, 12, NEVER, 22),
        (22, 23, 30, 23),
        (22, 49, 54, 49),
        (1, 0, NEVER, 1),
        (1, 3, 9, 3),
        (1, 12, NEVER, 25),
        (1, 49, 57, 49),
    ],
)
def test_devices_are_available_for_eight_hours_of_each_day(start, hour, until, returns):
    devices = nightly(start, 8)
    clients = np.arange(2)
    assert (devices.available_until(clients, hour * HOUR) / HOUR).tolist() == [until] * 2
    assert (devices.returns_at(clients, hour * HOUR) / HOUR).tolist() == [returns] * 2


def test_a_device_is_available_at_the_time_at_which_it_is_said_to_be():
    """Whatever the rounding of seconds."""
    devices = nightly(22, 3, 8.0)
    for client, at in enumerate(np.random.default_rng(1).random(2000) * 30 * DAY):
        clients = np.array([client])
        returns = devices.returns_at(clients, at)[0]
        assert returns >= at and devices.available_until(clients, returns)[0] > returns


# Speeds of devices: their distribution, and that they depend on seed and client alone.

MANY = np.arange(20_000)


def test_speeds_are_log_normal():
    """Medians and standard deviations of the logarithms, of the settings."""
    seconds = {"example-seconds": 0.02, "megabyte-seconds": 8.0}
    spreads = {"compute-spread": 1.5, "network-spread": 0.5}
    devices = Devices(DevicesConfig.parse(seconds | spreads), seed=0)
    for seconds, median, spread in (
        (devices.seconds(MANY, 100, 0.0), 2.0, 1.5),
        (devices.seconds(MANY, 0, 0.5), 4.0, 0.5),
    ):
        logs = np.log(seconds)
        assert np.median(logs) == pytest.approx(np.log(median), abs=0.04)
        assert logs.std() == pytest.approx(spread, rel=0.02)


@pytest.mark.parametrize("settings", [{}, {"nightly": {"hours": 7, "spread": 5}}])
def test_a_device_depends_on_seed_and_client_alone(settings):
    config = DevicesConfig.parse(settings)
    some = np.array([5, 1023, 1024, 19_999])
    found = {}
    for seed, clients in ((4, MANY), (4, some), (5, some)):
        devices = Devices(config, seed)
        both = np.stack(
            [devices.seconds(clients, 3, 1.0), devices.available_until(clients, 4000.0)]
        )
        found[seed, len(clients)] = both[:, some] if len(clients) > 4 else both
    assert np.array_equal(found[4, len(MANY)], found[4, 4])
    assert not np.array_equal(found[4, 4], found[5, 4])
