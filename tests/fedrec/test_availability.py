# SPDX-License-Identifier: Apache-2.0
"""Availability of devices, traces and simulated times."""

import numpy as np
import pytest

from fedrec.devices import DAY, Daily, Devices, DevicesConfig
from fedrec.errors import ExperimentError

# When devices are available, by hand.

HOUR = 3600.0
NEVER = -np.inf


@pytest.mark.parametrize(
    ("hour", "until", "back"),
    [
        # the first is available from 22 to 6, the second from 1 to 9
        (0, (6, NEVER), (0, 1)),
        (3, (6, 9), (3, 3)),
        (6, (NEVER, 9), (22, 6)),
        (12, (NEVER, NEVER), (22, 25)),
        (23, (30, NEVER), (23, 25)),
        (49, (54, 57), (49, 49)),
    ],
)
def test_daily(hour, until, back):
    daily = Daily(np.array([22.0, 1.0]) * HOUR, 8 * HOUR)
    devices = np.arange(2)
    assert (daily.until(devices, hour * HOUR) / HOUR).tolist() == list(until)
    assert (daily.back(devices, hour * HOUR) / HOUR).tolist() == list(back)


def test_a_device_is_available_at_the_time_at_which_it_is_said_to_be():
    """Whatever the rounding of seconds."""
    starts = np.random.default_rng(0).random(2000) * DAY
    daily = Daily(starts, 3 * HOUR)
    for place, at in enumerate(np.random.default_rng(1).random(2000) * 30 * DAY):
        device = np.array([place])
        back = daily.back(device, at)[0]
        assert back >= at and daily.until(device, back)[0] > back


# Speeds of devices: their distribution, and that they depend on seed and client alone.

MANY = np.arange(20_000)


def test_speeds_are_log_normal():
    """Medians and standard deviations of the logarithms, of the settings."""
    config = DevicesConfig(
        example_seconds=0.02,
        megabyte_seconds_down=2.0,
        megabyte_seconds_up=6.0,
        compute_spread=1.5,
        network_spread=0.5,
    )
    devices = Devices(config, seed=0)
    for seconds, median, spread in (
        (devices.seconds(MANY, 100, 0.0), 2.0, 1.5),
        (devices.seconds(MANY, 0, 0.5), 4.0, 0.5),
    ):
        logs = np.log(seconds)
        assert np.median(logs) == pytest.approx(np.log(median), abs=0.04)
        assert logs.std() == pytest.approx(spread, rel=0.02)


def test_a_smaller_upload_takes_its_share_of_the_time():
    even = {"example_seconds": 0.0, "network_spread": 0.0}
    config = DevicesConfig(**even, upload_share=0.25, megabyte_seconds_up=8.0)
    assert Devices(config, 0).seconds(np.arange(3), 9, 2.0).tolist() == [2 + 4] * 3


@pytest.mark.parametrize("settings", [{}, {"nightly": {"hours": 7, "spread": 5}}])
def test_a_device_depends_on_seed_and_client_alone(settings):
    config = DevicesConfig.parse(settings)
    some = np.array([5, 1023, 1024, 19_999])
    found = {}
    for seed, clients in ((4, MANY), (4, some), (5, some)):
        devices = Devices(config, seed)
        both = np.stack([devices.seconds(clients, 3, 1.0), devices.until(clients, 4000.0)])
        found[seed, len(clients)] = both[:, some] if len(clients) > 4 else both
    assert np.array_equal(found[4, len(MANY)], found[4, 4])
    assert not np.array_equal(found[4, 4], found[5, 4])


def test_most_devices_are_available_at_night():
    devices = Devices(DevicesConfig.parse({"nightly": {"hours": 8, "start": 22, "spread": 2}}), 0)
    shares = [(devices.until(MANY, hour * 3600.0) > 0).mean() for hour in (2, 10, 14, 26)]
    # normal starts: P(18 < start < 26 = 2 h), P(start > 26 or start < ...) of mean 22 and spread 2
    assert shares[0] == pytest.approx(0.954, abs=0.01) and shares[3] == shares[0]
    assert shares[1] == pytest.approx(0.0228, abs=0.01) and shares[2] < 0.01


@pytest.mark.parametrize(
    "settings",
    [
        {"example-seconds": -1.0},
        {"compute-spread": 11.0},
        {"nightly": {"hours": 24.0}},
        {"speed": 3},
    ],
)
def test_settings_that_do_not_fit(settings):
    with pytest.raises(ExperimentError):
        DevicesConfig.parse(settings)
