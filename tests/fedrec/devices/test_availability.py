# SPDX-License-Identifier: Apache-2.0
"""When devices are available, by hand."""

import numpy as np
import pytest

from fedrec.devices.availability import DAY, Daily

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
