# SPDX-License-Identifier: Apache-2.0
"""Which answers a synchronous round takes, and when it closes, by hand."""

import numpy as np
import pytest

from fedrec.experiment.tables import ClosingConfig
from server.devices.closing import closed

ENDS = np.array([4.0, 1.0, 9.0, 1.0, 3.0])
LOST = np.array([False, False, False, False, True])


@pytest.mark.parametrize(
    ("settings", "taken", "at"),
    [
        # all that answer; the lost one went at 3, the last answer came at 9
        ({}, (1, 3, 0, 2), 9.0),
        # two of five asked are one cohort of 4 at most: 0.5 of 5 rounded up
        ({"enough": 0.5}, (1, 3, 0), 4.0),
        # 5 asked for a cohort of 4
        ({"over_selection": 1.25}, (1, 3, 0, 2), 9.0),
        ({"over_selection": 1.25, "enough": 0.25}, (1,), 1.0),
        ({"deadline": 2.0}, (1, 3), 2.0),
        ({"deadline": 0.5}, (), 0.5),
        ({"deadline": 100.0}, (1, 3, 0, 2), 9.0),
        # enough at 1, before the deadline
        ({"deadline": 2.0, "enough": 0.4}, (1, 3), 1.0),
    ],
)
def test_answers_by_hand(settings, taken, at):
    start = 10.0
    found = closed(np.arange(20, 25), ENDS + start, LOST, start, ClosingConfig(**settings))
    assert tuple(found.taken.tolist()) == taken and found.at == start + at


def test_a_round_that_asks_nobody_takes_no_time():
    nobody = np.empty(0)
    found = closed(nobody.astype(np.int64), nobody, nobody.astype(bool), 7.0, ClosingConfig())
    assert not len(found.taken) and found.at == 7.0


def test_a_random_cohort_of_one_is_waited_for():
    """A Poisson sampler may draw a single client, where more than one was meant to be asked."""
    config = ClosingConfig(over_selection=1.3)
    found = closed(np.array([4]), np.array([3.0]), np.zeros(1, dtype=bool), 2.0, config)
    assert found.taken.tolist() == [0] and found.at == 3.0


def test_without_an_answer_a_round_ends_when_the_last_device_goes():
    lost = np.ones(2, dtype=bool)
    found = closed(np.arange(2), np.array([3.0, 5.0]), lost, 0.0, ClosingConfig())
    assert not len(found.taken) and found.at == 5.0


@pytest.mark.parametrize("more", [1.0, 1.05, 1.1, 1.3, 1.7, 2.0, 3.3])
def test_one_cohort_of_those_asked_is_enough(more):
    config = ClosingConfig(over_selection=more)
    for cohort in range(1, 200):
        asked = config.asked(cohort)
        assert cohort * more - 1e-6 <= asked < cohort * more + 1
        assert config.needed(asked) == cohort
    assert config.asked(2.5) == pytest.approx(2.5 * more)
