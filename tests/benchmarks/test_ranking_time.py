# SPDX-License-Identifier: Apache-2.0
"""The benchmark of long catalogues evaluates the users that it says."""

import pytest

from benchmarks.ranking import SYSTEMS, measured


@pytest.mark.parametrize("system", SYSTEMS)
def test_users_are_evaluated(system):
    users, seconds = measured(system, 5000, 20)
    assert users == 20 and seconds > 0
